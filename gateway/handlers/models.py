"""`GET /v1/models` and `/v1/models/{id}`: what can be asked for, in OpenAI's shape."""

from __future__ import annotations

import json

from aiohttp import web

from gateway.context import Context
from gateway.errors import Kind, Refusal
from gateway.middleware import Route


def routes(gateway: Context) -> tuple[Route, ...]:
    """The model endpoints."""
    created_s = gateway.wall() // 1000

    def describe(name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": created_s, "owned_by": "trunkline"}

    async def list_models(request: web.Request) -> web.StreamResponse:
        return _json({"object": "list", "data": [describe(n) for n in gateway.model_names]})

    async def get_model(request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in gateway.model_names:
            message = "There is no such model here."
            raise Refusal(Kind.NOT_FOUND, "model_not_found", message, param="model")
        return _json(describe(name))

    return (
        Route("GET", "/v1/models", list_models, "inference"),
        Route("GET", "/v1/models/{name:.+}", get_model, "inference"),
    )


def _json(value: object) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), content_type="application/json")
