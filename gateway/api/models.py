"""`GET /v1/models` and `GET /v1beta/models`: the served models, in the format of the client.

OpenAI, Anthropic and Gemini share these paths; headers that only one of them sends select the
format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from gateway.context import Context
from gateway.dialects.model_lists import (
    ListedModel,
    anthropic_list,
    anthropic_model,
    gemini_list,
    gemini_model,
    openai_list,
    openai_model,
)
from gateway.engines.served_models import ServedModel
from gateway.errors import Kind, Refusal
from gateway.http.middleware import Route
from gateway.http.request_context import STATE, identity_of
from gateway.http.route_table import tidy


class ModelListFormat(NamedTuple):
    """One API's format of the model list and of one model."""

    list: Callable[[Sequence[ListedModel], Mapping[str, str]], dict[str, Any]]
    model: Callable[[ListedModel], dict[str, Any]]


OPENAI = ModelListFormat(openai_list, openai_model)
ANTHROPIC = ModelListFormat(anthropic_list, anthropic_model)
GEMINI = ModelListFormat(gemini_list, gemini_model)


def routes(gateway: Context) -> tuple[Route, ...]:
    """Return the model routes, also without /v1: clients often omit it from the base URL."""
    created_s = gateway.wall() // 1000

    def listed(model: ServedModel, name: str) -> ListedModel:
        info = model.engine.info
        context = 0 if info is None else info.context_tokens
        output = min(context, gateway.config.limits.output_tokens_default)
        return ListedModel(name, created_s, context, output)

    def list_chat(tenant: str) -> list[ListedModel]:
        models = gateway.models.open_to(tenant)
        return [listed(model, name) for model in models for name in model.names]

    def list_for(request: web.BaseRequest) -> list[ListedModel]:
        """Return the models that a tenant may use by its API: only OpenAI's has embeddings."""
        chat = list_chat(identity_of(request).tenant.name)
        embedder = gateway.embeddings
        if embedder is None or _format_for(request) is not OPENAI:
            return chat
        limit = embedder.card.tokens_max
        embedding = [ListedModel(name, created_s, limit, 0) for name in embedder.names]
        return [*chat, *embedding]

    async def list_models(request: web.BaseRequest) -> web.StreamResponse:
        return _json(_format_for(request).list(list_for(request), request.query))

    async def get_model(request: web.BaseRequest) -> web.StreamResponse:
        name = request[STATE].parameters["name"].removeprefix("models/")
        found = next((model for model in list_for(request) if model.name == name), None)
        if found is None:
            meant = gateway.models.find(name, identity_of(request).tenant.name)
            if meant is not None and meant.failure():
                raise meant.unavailable(is_alone=not gateway.models.are_several)
            found = None if meant is None else listed(meant, name)
        if found is None:
            message = f"Model not found: the model `{name[:200]}` does not exist."
            raise Refusal(Kind.NOT_FOUND, "model_not_found", message, param="model")
        return _json(_format_for(request).model(found))

    return tuple(
        Route("GET", base + path, handler, "inference")
        for base in ("/v1/models", "/models", "/v1beta/models")
        for path, handler in (("", list_models), ("/{name:.+}", get_model))
    )


def _format_for(request: web.BaseRequest) -> ModelListFormat:
    is_goog = any(name in request.headers for name in ("x-goog-api-key", "x-goog-api-client"))
    if is_goog or "key" in request.query or tidy(request.path).startswith("/v1beta/"):
        return GEMINI
    return ANTHROPIC if "anthropic-version" in request.headers else OPENAI


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
