"""`GET /v1/models` and `GET /v1beta/models`: the served models, in the format of the client.

The families of APIs share these paths; what only one of them sends selects the format.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway.context import Context
from gateway.dialects.families import find_family
from gateway.dialects.protocol import ApiFamily, ListedModel
from gateway.engines.served_models import ServedModel
from gateway.errors import Kind, Refusal
from gateway.http.middleware import Route
from gateway.http.request_context import STATE, identity_of
from gateway.http.route_table import tidy


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
        """Return the models that a tenant may use by its API: not all list embeddings."""
        chat = list_chat(identity_of(request).tenant.name)
        embedder = gateway.embeddings
        if embedder is None or not _family(request).lists_embeddings:
            return chat
        limit = embedder.card.tokens_max
        embedding = [ListedModel(name, created_s, limit, 0) for name in embedder.names]
        return [*chat, *embedding]

    async def list_models(request: web.BaseRequest) -> web.StreamResponse:
        return _json(_family(request).list_models(list_for(request), request.query))

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
        return _json(_family(request).show_model(found))

    return tuple(
        Route("GET", base + path, handler, "inference")
        for base in ("/v1/models", "/models", "/v1beta/models")
        for path, handler in (("", list_models), ("/{name:.+}", get_model))
    )


def _family(request: web.BaseRequest) -> ApiFamily:
    return find_family(tidy(request.path) + "/", request.headers, request.query)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
