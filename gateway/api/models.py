"""`GET /v1/models` and `/v1beta/models`: what can be asked for, in the asker's own shape.

Three families share the path; the headers that only one of them sends tell which it is.
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
from gateway.errors import Kind, Refusal
from gateway.http.middleware import Handler, Route
from gateway.http.request_context import STATE


class Family(NamedTuple):
    """How one family lists models, and shows one."""

    all: Callable[[Sequence[ListedModel], Mapping[str, str]], dict[str, Any]]
    one: Callable[[ListedModel], dict[str, Any]]


OPENAI = Family(openai_list, openai_model)
ANTHROPIC = Family(anthropic_list, anthropic_model)
GEMINI = Family(gemini_list, gemini_model)


def routes(gateway: Context) -> tuple[Route, ...]:
    """The model endpoints. At the root too: a base URL without /v1 is a common slip."""
    created_s = gateway.wall() // 1000

    def models() -> list[ListedModel]:
        info = gateway.engine.info
        context = 0 if info is None else info.context_tokens
        output = min(context, gateway.config.limits.output_tokens_default)
        return [ListedModel(name, created_s, context, output) for name in gateway.model_names]

    async def list_models(request: web.BaseRequest) -> web.StreamResponse:
        return _json(_family(request).all(models(), request.query))

    async def get_model(request: web.BaseRequest) -> web.StreamResponse:
        name = request[STATE].parameters["name"].removeprefix("models/")
        found = next((model for model in models() if model.name == name), None)
        if found is None:
            message = "There is no such model here."
            raise Refusal(Kind.NOT_FOUND, "model_not_found", message, param="model")
        return _json(_family(request).one(found))

    def both(base: str, many: Handler, one: Handler) -> tuple[Route, ...]:
        return (
            Route("GET", base, many, "inference"),
            Route("GET", base + "/{name:.+}", one, "inference"),
        )

    return tuple(
        route
        for base in ("/v1/models", "/models", "/v1beta/models")
        for route in both(base, list_models, get_model)
    )


def _family(request: web.BaseRequest) -> Family:
    is_goog = any(name in request.headers for name in ("x-goog-api-key", "x-goog-api-client"))
    if is_goog or "key" in request.query or request.path.startswith("/v1beta/"):
        return GEMINI
    return ANTHROPIC if "anthropic-version" in request.headers else OPENAI


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
