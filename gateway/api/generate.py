"""Routes of the endpoints that run a model: one per path and dialect."""

from __future__ import annotations

from collections.abc import Awaitable

from aiohttp import web

from gateway.caching.attention import ATTENTION_HEADER
from gateway.dialects.families import ENDPOINTS, embeddings
from gateway.dialects.protocol import Endpoint
from gateway.generation.embedding import EmbeddingRequest
from gateway.generation.generation import DRAFTS_HEADER, generate
from gateway.generation.serving import Serving
from gateway.http.route_table import INFERENCE, JSON, SSE, Handler, Route
from gateway.levels.fidelity import FIDELITY_HEADER

CACHE_HEADERS = (FIDELITY_HEADER, ATTENTION_HEADER)
"""What a request that generates, and its quote, may say of its KV."""


def routes(serving: Serving) -> tuple[Route, ...]:
    """Return the endpoints that generate, and those that embed."""

    def embed(request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        return EmbeddingRequest(serving, request).run()

    about = (INFERENCE, embeddings.SHAPE, "Embed texts.", embeddings.EmbeddingBody)
    return (
        *(_route(serving, end) for end in ENDPOINTS),
        *(Route("POST", path, embed, *about) for path in ("/v1/embeddings", "/embeddings")),
    )


def _route(serving: Serving, end: Endpoint) -> Route:
    return Route(
        *("POST", end.path, _handler(serving, end), INFERENCE, end.dialect, end.summary),
        body=end.body,
        query=() if end.without_sse is None else ("alt",),
        content=(JSON,) if end.counts else (JSON, SSE),
        headers=() if end.counts else (*CACHE_HEADERS, DRAFTS_HEADER),
    )


def _handler(serving: Serving, end: Endpoint) -> Handler:
    def handle(request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        dialect = end.dialect
        if end.without_sse is not None and request.query.get("alt") != "sse":
            dialect = end.without_sse
        return generate(serving, dialect, request, end.id_prefix)

    return handle
