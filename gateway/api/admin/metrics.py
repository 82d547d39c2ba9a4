"""`GET /metrics` on the admin listener, in Prometheus' text format, without authentication."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from gateway.http import json_api
from gateway.http.route_table import Route
from gateway.observability.metrics import CONTENT_TYPE, Metrics


def routes(metrics: Metrics, refresh: Callable[[], Awaitable[None]]) -> tuple[Route, ...]:
    """Return the route of metrics. `refresh`: sets those that are kept elsewhere."""

    async def show(request: web.BaseRequest) -> web.StreamResponse:
        await refresh()
        return web.Response(body=metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    text = "Show metrics in Prometheus's format."
    kind, family = ("text/plain",), json_api.FAMILY
    return (Route("GET", "/metrics", show, "open", summary=text, content=kind, family=family),)
