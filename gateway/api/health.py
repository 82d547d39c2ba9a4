"""Health probes without authentication: `/healthz`, the process is up; `/readyz`, it takes
requests.
"""

from __future__ import annotations

from aiohttp import web

from gateway.context import Context
from gateway.http.middleware import Route


def routes(gateway: Context) -> tuple[Route, ...]:
    """Return the two probes. Their answers have no tenant, model or load."""

    async def health(request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    async def ready(request: web.BaseRequest) -> web.StreamResponse:
        if gateway.is_ready():
            return web.json_response({"status": "ready"})
        status = "draining" if gateway.is_draining else "starting"
        return web.json_response({"status": status}, status=503, headers={"Retry-After": "1"})

    return (
        Route("GET", "/healthz", health, "open"),
        Route("GET", "/readyz", ready, "open"),
    )
