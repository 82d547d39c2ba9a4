"""`GET` of `/v1/models`, `/v1beta/models` and `/v1alpha/models`: the served models, in the client's
format.

The families of APIs share these paths; what only one of them sends selects the format.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway.dialects.families import find_family
from gateway.dialects.protocol import ApiFamily, ListedModel
from gateway.embeddings.embedder import Embedder
from gateway.engines.served_models import ServedModel, ServedModels
from gateway.errors import Kind, Refusal
from gateway.http.request_context import STATE, identity_of
from gateway.http.route_table import Route, tidy


def routes(
    models: ServedModels, embedder: Embedder | None, output_tokens: int, created_s: int
) -> tuple[Route, ...]:
    """Return the model routes, also without /v1: clients often omit it from the base URL.
    `output_tokens`: of a request that sets no limit. `created_s`: of every model."""

    def listed(model: ServedModel, name: str) -> ListedModel:
        info = model.replicas.info
        context = 0 if info is None else info.context_tokens
        output = min(context, output_tokens)
        return ListedModel(name, created_s, context, output)

    def list_chat(tenant: str) -> list[ListedModel]:
        return [listed(one, name) for one in models.open_to(tenant) for name in one.names]

    def list_for(request: web.BaseRequest) -> list[ListedModel]:
        """Return the models that a tenant may use by its API: not all list embeddings."""
        chat = list_chat(identity_of(request).tenant.name)
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
            meant = models.find(name, identity_of(request).tenant.name)
            if meant is not None and meant.failure():
                raise meant.unavailable(is_alone=not models.are_several)
            found = None if meant is None else listed(meant, name)
        if found is None:
            message = f"Model not found: the model `{name[:200]}` does not exist."
            raise Refusal(Kind.NOT_FOUND, "model_not_found", message, param="model")
        return _json(_family(request).show_model(found))

    many, one = "List models, in the client's format.", "Show a model."
    return tuple(
        Route("GET", base + path, handler, "inference", find_family(f"{base}/", ()).errors, text)
        for base in ("/v1/models", "/models", "/v1beta/models", "/v1alpha/models")
        for path, handler, text in (("", list_models, many), ("/{name:.+}", get_model, one))
    )


def _family(request: web.BaseRequest) -> ApiFamily:
    return find_family(tidy(request.path) + "/", request.headers, request.query)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
