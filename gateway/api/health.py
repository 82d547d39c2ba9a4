"""Health probes without authentication: `/healthz`, the process is up; `/readyz`, it takes
requests. `/health` is the name by which clients of other engines ask for `/healthz`.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from msgspec import Struct

from gateway.context import Obstacle
from gateway.dialects.families import PLAIN
from gateway.engines.served_models import ServedModels
from gateway.http import json_api
from gateway.http.route_table import Handler, Route


class HealthAnswer(Struct, frozen=True, omit_defaults=True):
    """A probe's answer. `reason`: why requests are not taken."""

    status: str
    reason: str | None = None
    engine: str | None = None


def routes(models: ServedModels, obstacle: Callable[[], Obstacle | None]) -> tuple[Route, ...]:
    """Return the probes. Their answers have no tenant and no load, and name models only where
    several are served. `obstacle`: what keeps the gateway from accepting requests."""

    async def health(request: web.BaseRequest) -> web.StreamResponse:
        # 200 without an engine, too: it is restarted until it serves, and the gateway answers.
        if models.default.replicas.ready():
            return web.json_response({"status": "ok"})
        return web.json_response({"status": "ok", "engine": "not ready"})

    async def ready(request: web.BaseRequest) -> web.StreamResponse:
        found = obstacle()
        # The reasons of failures are in the log and for administrators: this answer is for
        # everyone. The default model alone decides on readiness.
        shown = {"models": models.states()} if models.are_several else {}
        if found is None:
            return web.json_response({"status": "ready", **shown})
        body = {"status": found.status, "reason": found.reason, **shown}
        return web.json_response(body, status=503, headers={"Retry-After": "1"})

    def probe(path: str, handler: Handler, text: str) -> Route:
        about = (text, None, HealthAnswer)
        return Route("GET", path, handler, "open", PLAIN, *about, family=json_api.FAMILY)

    return (
        probe("/healthz", health, "Say that the process is up."),
        probe("/health", health, "Say that the process is up, as /healthz does."),
        probe("/readyz", ready, "Say whether requests are taken."),
    )
