"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`, as vLLM has them.

Nothing is run or billed. A request counts as one of its tenant's, as a token count does, and long
texts are tokenized in the tenant's turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec
from aiohttp import web

from engine.api import EngineInfo
from gateway.context import Context
from gateway.dialects.families import tokenizer as dialect
from gateway.engines.served_models import ServedModel
from gateway.generation.admission import check_ids
from gateway.generation.preparation import check_model, parse_body, render, shutting_down
from gateway.generation.usage import IGNORED_HEADER
from gateway.http.middleware import Handler, Route
from gateway.http.request_body import BODY_SHARE, read_body
from gateway.http.request_context import STATE, identity_of, request_metadata
from gateway.http.response import send, send_json
from tenancy.types import Identity

INLINE_TOKENS_MAX = 4_096
"""Token ids that the event loop encodes or decodes; more take a turn in a thread."""


def routes(gateway: Context) -> tuple[Route, ...]:
    """Return the tokenizer's routes; vLLM has none of them under /v1."""

    async def tokenizer_info(request: web.BaseRequest) -> web.StreamResponse:
        identity = identity_of(request)
        model = _model_of(gateway, request.query.get("model"), identity)
        return await send_json(request, _describe(model, _info_of(gateway, model)))

    return (
        Route("POST", "/tokenize", _handler(gateway, _tokenize), "inference", dialect.SHAPE),
        Route("POST", "/detokenize", _handler(gateway, _detokenize), "inference", dialect.SHAPE),
        Route("GET", "/tokenizer_info", tokenizer_info, "inference", dialect.SHAPE),
    )


def _handler(
    gateway: Context,
    answer: Callable[[Context, web.BaseRequest, bytes], Awaitable[web.StreamResponse]],
) -> Handler:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if gateway.is_draining:
            raise shutting_down()
        return await answer(gateway, request, await read_body(request, gateway.config.server))

    return handle


async def _tokenize(gateway: Context, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
    identity = identity_of(request)
    tenant_id = identity.tenant.tenant_id
    metadata = request_metadata(request, gateway.config)
    call = await parse_body(gateway, tenant_id, dialect.parse_tokenize, body, metadata)
    del body
    model = _model_of(gateway, call.model, identity)
    request[STATE].model = model.name
    info = _info_of(gateway, model)  # first: without it the prompt's length has no bound
    [rendered] = await render(gateway, model, (call.prompt,), tenant_id)
    request[BODY_SHARE].release()
    work = partial(_encode, model, info, call, rendered.token_ids)
    answer = await _in_turn(gateway, tenant_id, len(rendered.token_ids), work)
    headers = {"Content-Type": "application/json"}
    if call.ignored:
        headers[IGNORED_HEADER] = ", ".join(call.ignored)
    return await send(request, 200, answer, headers)


async def _detokenize(
    gateway: Context, request: web.BaseRequest, body: bytes
) -> web.StreamResponse:
    identity = identity_of(request)
    tenant_id = identity.tenant.tenant_id
    metadata = request_metadata(request, gateway.config)
    call = await parse_body(gateway, tenant_id, dialect.parse_detokenize, body, metadata)
    model = _model_of(gateway, call.model, identity)
    request[STATE].model = model.name
    check_ids("tokens", call.tokens, _info_of(gateway, model))
    work = partial(_decode, model, call.tokens)
    answer = await _in_turn(gateway, tenant_id, len(call.tokens), work)
    return await send_json(request, answer)


def _model_of(gateway: Context, name: str | None, identity: Identity) -> ServedModel:
    """Return the model of a name; without one the default model, or the first that the tenant may
    use. Raises Refusal."""
    if name is None:
        tenant, default = identity.tenant.name, gateway.models.default
        found = [default] if default.is_open_to(tenant) else gateway.models.open_to(tenant)
        name = found[0].name if found else ""
    return check_model(gateway, name, identity)


def _info_of(gateway: Context, model: ServedModel) -> EngineInfo:
    """Return what a model's engine has reported of itself. Raises EngineUnavailable before it
    has."""
    if model.engine.info is None:
        raise model.unavailable(is_alone=not gateway.models.are_several)
    return model.engine.info


async def _in_turn(
    gateway: Context, tenant_id: int, tokens: int, work: Callable[[], bytes]
) -> bytes:
    """Return the result of work on so many tokens; of many in a thread."""
    if tokens <= INLINE_TOKENS_MAX:
        return work()
    return await gateway.preparations.run(tenant_id, lambda _: work(), is_admitted=True)


def _encode(
    model: ServedModel, info: EngineInfo, call: dialect.TokenizeCall, ids: tuple[int, ...]
) -> bytes:
    start, is_text = model.renderer.start_ids, call.prompt.text is not None
    if is_text and not call.add_special_tokens:
        ids = ids[len(start) :]
    elif call.add_special_tokens and not is_text:
        ids = start + ids
    spelt = model.renderer.tokenizer.token_strings(ids) if call.return_token_strs else None
    return msgspec.json.encode(dialect.TokenizeAnswer(len(ids), info.context_tokens, ids, spelt))


def _decode(model: ServedModel, ids: Sequence[int]) -> bytes:
    return msgspec.json.encode(dialect.DetokenizeAnswer(model.renderer.tokenizer.decode(ids)))


def _describe(model: ServedModel, info: EngineInfo) -> dialect.TokenizerInfoAnswer:
    renderer, card = model.renderer, model.renderer.card
    return dialect.TokenizerInfoAnswer(
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=info.context_tokens,
        chat_template=renderer.template_source,
        eos_token=renderer.special_text(card.eos_token_id) or None,
        bos_token=renderer.special_text(card.bos_token_id) or None,
        add_bos_token=card.add_bos,
    )
