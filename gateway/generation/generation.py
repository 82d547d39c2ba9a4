"""One generation request, from its body to its last byte.

    read ─ parse ─ find the model ─ replay ─ continue ─ prepare ─ execute (`execution`)

Nothing before the ledger hold needs to be undone. The module knows no dialect by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from aiohttp import web
from msgspec.structs import replace

from engine.api import AttentionWindow
from gateway.caching.attention import ATTENTION_HEADER, parse_attention, with_attention
from gateway.dialects.canonical import Call, Reply
from gateway.dialects.protocol import Dialect, Encoder
from gateway.dialects.tolerance import without_thinking
from gateway.engines.served_models import ServedModel
from gateway.errors import Kind, Refusal
from gateway.generation.delivery import PlainAnswer, ThreadedAnswer
from gateway.generation.execution import Execution
from gateway.generation.serving import Serving
from gateway.generation.usage import IGNORED_HEADER
from gateway.http.request_body import BODY_SHARE, read_body
from gateway.http.request_context import STATE, identity_of, request_metadata
from gateway.http.response import send
from gateway.levels.fidelity import FIDELITY_HEADER, parse_fidelity
from tenancy.types import Fidelity, Identity

DRAFTS_HEADER = "X-Trunkline-Drafts"
DRAFTS_WORDS = {"auto": True, "off": False}
SHOWN_CHARS_MAX = 32
"""Characters of a wrong word that its error repeats."""


async def generate(
    serving: Serving, dialect: Dialect, request: web.BaseRequest, id_prefix: str
) -> web.StreamResponse:
    """Answer one request. Raises Refusal, EngineError, ClientGone, and what the ledger raises."""
    gateway, state, identity = serving.gateway, request[STATE], identity_of(request)
    state.is_generation = True
    serving.check_open()
    fidelity = attention = None
    if FIDELITY_HEADER in request.headers or ATTENTION_HEADER in request.headers:
        fidelity, attention = cache_settings(request, identity)
    drafts = parse_drafts(request.headers.getall(DRAFTS_HEADER, ()))
    body = await read_body(request)
    metadata = request_metadata(request, gateway.config)
    tenant_id, preparation = identity.tenant.tenant_id, serving.preparation
    call = await preparation.parse(tenant_id, dialect.parse, body, metadata)
    state.is_stream = call.stream
    state.asked_model = call.model
    model = preparation.check_model(call.model, identity)
    state.model = model.name
    serving.check_open()
    is_count = call.operation == "count"
    delivery = None if is_count else await serving.delivery(request, body, identity)
    if isinstance(delivery, web.StreamResponse):
        return delivery
    if call.thread.is_pending:
        share = request[BODY_SHARE]
        call = await serving.stored.continue_call(dialect, body, metadata, call, identity, share)
    del body
    ignored = _without_effect(model, call) if call.ignored else ()
    if fidelity is not None or ignored != call.ignored:
        call = replace(call, fidelity=fidelity, ignored=ignored)
    call = call if attention is None else with_attention(call, attention)
    call = call if drafts else replace(call, drafts=False)
    prepared = await preparation.prepare(model, call, identity, share=request[BODY_SHARE])
    request[BODY_SHARE].release()
    call = prepared.call
    if delivery is None:
        state.is_generation = False
        counted = dialect.count_body(prepared.tokens, prepared.resource_tokens)
        return await send(request, 200, counted, _count_head(ignored))
    # What is stored is found by its id, and operators see the request's in records and logs.
    reply_id = gateway.new_id() if call.thread.input else state.request_id
    reply = Reply(f"{id_prefix}{reply_id}", call.model, gateway.wall() // 1000)
    answer = _answer(serving, identity, call, reply, dialect.encoder(call, reply))
    execution = Execution(serving, dialect, prepared, answer, delivery, ignored)
    return await delivery.run(execution.run(reply.response_id))


def cache_settings(
    request: web.BaseRequest, identity: Identity
) -> tuple[Fidelity | None, AttentionWindow | Literal["full"] | None]:
    """Return what a request's headers say of its KV; None for what they leave open. Raises
    Refusal."""
    fidelity = request.headers.getall(FIDELITY_HEADER, [])
    attention = request.headers.getall(ATTENTION_HEADER, [])
    return (
        parse_fidelity(fidelity, identity.policy.fidelity),
        parse_attention(attention, identity.policy.attention),
    )


def parse_drafts(values: Sequence[str]) -> bool:
    """Return whether the engine may draft by a request's headers; it may without the header. Raises
    Refusal for another word, and for a header that is sent twice."""
    if not values:
        return True
    if len(values) > 1 or values[0] not in DRAFTS_WORDS:
        given = "sent twice" if len(values) > 1 else repr(values[0][:SHOWN_CHARS_MAX])
        message = f"{DRAFTS_HEADER}: {given}; expected {' or '.join(DRAFTS_WORDS)}."
        raise Refusal(Kind.BAD, "invalid_value", message, param=DRAFTS_HEADER)
    return DRAFTS_WORDS[values[0]]


def _without_effect(model: ServedModel, call: Call) -> tuple[str, ...]:
    """Return the names of the fields that had no effect: a model that thinks honours some."""
    if model.renderer.thinking.kind == "none":
        return call.ignored
    return without_thinking(call.ignored)


def _count_head(ignored: Sequence[str]) -> dict[str, str]:
    head = {"Content-Type": "application/json"}
    return {**head, IGNORED_HEADER: ", ".join(ignored)} if ignored else head


def _answer(
    serving: Serving, identity: Identity, call: Call, reply: Reply, encoder: Encoder
) -> PlainAnswer:
    """Return what encodes the answer, by its kind."""
    if call.generation.prompt_logprobs is not None:
        pool, tenant_id = serving.gateway.preparations, identity.tenant.tenant_id
        return ThreadedAnswer(encoder, partial(pool.run_admitted, tenant_id))
    stored = serving.stored.answer(identity, call, reply, encoder) if call.thread.input else None
    return stored or PlainAnswer(encoder)
