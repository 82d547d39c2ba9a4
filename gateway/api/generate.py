"""Routes of the endpoints that generate: one per path and dialect."""

from __future__ import annotations

from collections.abc import Awaitable

from aiohttp import web

from gateway.api.routes import ENDPOINTS, Endpoint
from gateway.context import Context
from gateway.generation.generation import Generation
from gateway.http.middleware import Handler, Route


def routes(gateway: Context) -> tuple[Route, ...]:
    """Return the endpoints that generate."""
    return tuple(
        Route("POST", end.path, _handler(gateway, end), "inference", end.dialect)
        for end in ENDPOINTS
    )


def _handler(gateway: Context, endpoint: Endpoint) -> Handler:
    def handle(request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        dialect = endpoint.dialect
        if endpoint.without_sse is not None and request.query.get("alt") != "sse":
            dialect = endpoint.without_sse
        return Generation(gateway, dialect, request).run(endpoint.id_prefix)

    return handle
