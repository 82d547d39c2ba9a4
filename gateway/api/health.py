"""Health probes without authentication: `/healthz`, the process is up; `/readyz`, it takes
requests. `/health` is the name by which clients of other engines ask for `/healthz`.
"""

from __future__ import annotations

from aiohttp import web

from gateway.context import Context
from gateway.engines.served_models import ModelState
from gateway.http.middleware import Route


def routes(gateway: Context) -> tuple[Route, ...]:
    """Return the probes. Their answers have no tenant and no load, and name models only if
    several are served."""

    async def health(request: web.BaseRequest) -> web.StreamResponse:
        # 200 without an engine, too: it is restarted until it serves, and the gateway answers.
        if gateway.models.default.engine.ready():
            return web.json_response({"status": "ok"})
        return web.json_response({"status": "ok", "engine": "not ready"})

    async def ready(request: web.BaseRequest) -> web.StreamResponse:
        obstacle = gateway.obstacle()
        models = _states(gateway)
        if obstacle is None:
            return web.json_response({"status": "ready", **models})
        body = {"status": obstacle.status, "reason": obstacle.reason, **models}
        return web.json_response(body, status=503, headers={"Retry-After": "1"})

    return (
        Route("GET", "/healthz", health, "open"),
        Route("GET", "/health", health, "open"),
        Route("GET", "/readyz", ready, "open"),
    )


def _states(gateway: Context) -> dict[str, dict[str, ModelState]]:
    """Return the state of each of several models: only the default one decides on readiness. The
    reasons of failures are in the log and for administrators: this answer is for everyone."""
    return {"models": gateway.models.states()} if gateway.models.are_several else {}
