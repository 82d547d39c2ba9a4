"""Routes of the endpoints that generate: one per path and dialect."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator

from aiohttp import web

from gateway.api.routes import ENDPOINTS, Endpoint
from gateway.context import Context
from gateway.dialects.openai.responses import DIALECT, not_found
from gateway.generation.generation import Generation
from gateway.http.middleware import Handler, Route
from gateway.http.request_context import STATE


def routes(gateway: Context) -> tuple[Route, ...]:
    """Return the endpoints that generate, and those of stored responses, which answer 404."""
    generate = (
        Route("POST", end.path, _handler(gateway, end), "inference", end.dialect)
        for end in ENDPOINTS
    )
    return (*generate, *_stored_responses())


def _handler(gateway: Context, endpoint: Endpoint) -> Handler:
    def handle(request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        dialect = endpoint.dialect
        if endpoint.without_sse is not None and request.query.get("alt") != "sse":
            dialect = endpoint.without_sse
        return Generation(gateway, dialect, request).run(endpoint.id_prefix)

    return handle


def _stored_responses() -> Iterator[Route]:
    """Yield the routes of stored responses, with and without /v1, as `ENDPOINTS` has them."""

    async def missing(request: web.BaseRequest) -> web.StreamResponse:
        raise not_found(request[STATE].parameters["id"])

    for base in ("/v1/responses", "/responses"):
        for method, path in (
            ("GET", "/{id}"),
            ("DELETE", "/{id}"),
            ("POST", "/{id}/cancel"),
            ("GET", "/{id}/input_items"),
        ):
            yield Route(method, base + path, missing, "inference", DIALECT)
