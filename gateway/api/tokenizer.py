"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`, as vLLM has them.

Nothing is run or billed. A request counts as one of its tenant's, as a token count does, and long
texts are tokenized in the tenant's turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from engine.api import EngineInfo
from gateway.dialects.canonical import RequestMetadata
from gateway.dialects.families import tokenizer as dialect
from gateway.engines.served_models import ServedModel
from gateway.generation.admission import check_ids
from gateway.generation.serving import Serving
from gateway.generation.usage import IGNORED_HEADER
from gateway.http.request_body import BODY_SHARE, read_body
from gateway.http.request_context import STATE, identity_of, request_metadata
from gateway.http.response import send, send_json
from gateway.http.route_table import INFERENCE, Route
from tenancy.types import Identity

T = TypeVar("T")

INLINE_TOKENS_MAX = 4_096
"""Token ids that the event loop encodes or decodes; more take a turn in a thread."""


def routes(serving: Serving) -> tuple[Route, ...]:
    """Return the tokenizer's routes; vLLM has none of them under /v1."""
    handlers = _TokenizerHandlers(serving)
    about = (INFERENCE, dialect.SHAPE)
    return (
        Route(
            *("POST", "/tokenize", handlers.tokenize, *about),
            *("Show the token ids of a text or a chat, as vLLM does.",),
            *(dialect.TokenizeBody, dialect.TokenizeAnswer),
        ),
        Route(
            *("POST", "/detokenize", handlers.detokenize, *about),
            *("Show the text of token ids, as vLLM does.",),
            *(dialect.DetokenizeBody, dialect.DetokenizeAnswer),
        ),
        Route(
            *("GET", "/tokenizer_info", handlers.tokenizer_info, *about),
            *("Show a tokenizer's settings, as vLLM does.", None, dialect.TokenizerInfoAnswer),
            query=("model",),
        ),
    )


class _TokenizerHandlers:
    """One handler per route of the tokenizer."""

    def __init__(self, serving: Serving) -> None:
        self._serving, self._models = serving, serving.gateway.models

    async def tokenizer_info(self, request: web.BaseRequest) -> web.StreamResponse:
        model = self._model_of(request.query.get("model"), identity_of(request))
        return await send_json(request, _describe(model, self._info_of(model)))

    async def tokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        call = await self._parse(request, dialect.parse_tokenize)
        identity, preparation = identity_of(request), self._serving.preparation
        tenant_id, model = identity.tenant.tenant_id, self._model_of(call.model, identity)
        request[STATE].model = model.name
        info = self._info_of(model)  # first: without it the prompt's length has no bound
        [rendered] = await preparation.render(model, (call.prompt,), tenant_id)
        request[BODY_SHARE].release()
        work = partial(_encode, model, info, call, rendered.token_ids)
        answer = await self._in_turn(tenant_id, len(rendered.token_ids), work)
        headers = {"Content-Type": "application/json"}
        if call.ignored:
            headers[IGNORED_HEADER] = ", ".join(call.ignored)
        return await send(request, 200, answer, headers)

    async def detokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        call, identity = await self._parse(request, dialect.parse_detokenize), identity_of(request)
        model = self._model_of(call.model, identity)
        request[STATE].model = model.name
        check_ids("tokens", call.tokens, self._info_of(model))
        work = partial(_decode, model, call.tokens)
        answer = await self._in_turn(identity.tenant.tenant_id, len(call.tokens), work)
        return await send_json(request, answer)

    async def _parse(
        self, request: web.BaseRequest, parse: Callable[[bytes, RequestMetadata], T]
    ) -> T:
        serving, tenant_id = self._serving, identity_of(request).tenant.tenant_id
        serving.check_open()
        body = await read_body(request)
        metadata = request_metadata(request, serving.gateway.config)
        return await serving.preparation.parse(tenant_id, parse, body, metadata)

    def _model_of(self, name: str | None, identity: Identity) -> ServedModel:
        """Return the model of a name; without one the default model, or the first that the tenant
        may use. Raises Refusal."""
        if name is None:
            tenant, default = identity.tenant.name, self._models.default
            found = [default] if default.is_open_to(tenant) else self._models.open_to(tenant)
            name = found[0].name if found else ""
        return self._serving.preparation.check_model(name, identity)

    def _info_of(self, model: ServedModel) -> EngineInfo:
        """Return what a model's engine has told of itself. Raises EngineUnavailable before it
        has."""
        if model.replicas.info is None:
            raise model.unavailable(is_alone=not self._models.are_several)
        return model.replicas.info

    async def _in_turn(self, tenant_id: int, tokens: int, work: Callable[[], bytes]) -> bytes:
        """Return the result of work on so many tokens; of many in a thread."""
        if tokens <= INLINE_TOKENS_MAX:
            return work()
        return await self._serving.gateway.preparations.run_admitted(tenant_id, work)


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
