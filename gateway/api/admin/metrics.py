"""`GET /metrics` on the admin listener, in Prometheus' text format, without authentication."""

from __future__ import annotations

from aiohttp import web

from gateway.background.metrics_export import refresh_metrics
from gateway.context import Context
from gateway.http.middleware import Route
from gateway.observability.metrics import CONTENT_TYPE


def routes(gateway: Context) -> tuple[Route, ...]:
    """Return the route of metrics."""

    async def metrics(request: web.BaseRequest) -> web.StreamResponse:
        await refresh_metrics(gateway)
        body = gateway.metrics.exposition()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    return (Route("GET", "/metrics", metrics, "open"),)
