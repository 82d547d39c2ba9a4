"""The paths that answer prompts: each request becomes an `Answer` in its dialect."""

from __future__ import annotations

from collections.abc import Awaitable

from aiohttp import web

from gateway.api.routes import ENDPOINTS, Endpoint
from gateway.context import Context
from gateway.generation.generation import Answer
from gateway.http.middleware import Handler, Route


def routes(gateway: Context) -> tuple[Route, ...]:
    """The inference endpoints."""
    return tuple(
        Route("POST", end.path, _handler(gateway, end), "inference", end.dialect)
        for end in ENDPOINTS
    )


def _handler(gateway: Context, endpoint: Endpoint) -> Handler:
    def handle(request: web.Request) -> Awaitable[web.StreamResponse]:
        dialect = endpoint.dialect
        if endpoint.without_sse is not None and request.query.get("alt") != "sse":
            dialect = endpoint.without_sse
        return Answer(gateway, dialect, request).run(endpoint.id_prefix)

    return handle
