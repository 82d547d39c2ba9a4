"""Routes of the endpoints that run a model: one per path and dialect."""

from __future__ import annotations

from collections.abc import Awaitable

from aiohttp import web

from gateway.context import Context
from gateway.dialects.families import ENDPOINTS, embeddings
from gateway.dialects.protocol import Endpoint
from gateway.generation.embedding import EmbeddingRequest
from gateway.generation.generation import Generation
from gateway.http.middleware import Handler, Route


def routes(gateway: Context) -> tuple[Route, ...]:
    """Return the endpoints that generate, and those that embed."""
    return (
        *(
            Route("POST", end.path, _handler(gateway, end), "inference", end.dialect)
            for end in ENDPOINTS
        ),
        *(
            Route("POST", path, _embed_handler(gateway), "inference", embeddings.SHAPE)
            for path in ("/v1/embeddings", "/embeddings")
        ),
    )


def _embed_handler(gateway: Context) -> Handler:
    def handle(request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        return EmbeddingRequest(gateway, request).run()

    return handle


def _handler(gateway: Context, endpoint: Endpoint) -> Handler:
    def handle(request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        dialect = endpoint.dialect
        if endpoint.without_sse is not None and request.query.get("alt") != "sse":
            dialect = endpoint.without_sse
        return Generation(gateway, dialect, request).run(endpoint.id_prefix)

    return handle
