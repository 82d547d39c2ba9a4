"""`GET /metrics` on the admin listener, in Prometheus' text format, without authentication."""

from __future__ import annotations

from aiohttp import web

from gateway.background.storage_metering import update_churn
from gateway.context import Context
from gateway.http.middleware import Route
from gateway.observability import metrics as telemetry


def routes(gateway: Context) -> tuple[Route, ...]:
    """Return the route of metrics."""

    async def metrics(request: web.BaseRequest) -> web.StreamResponse:
        gateway.telemetry.set_engine_stats(
            gateway.engine.stats,
            is_ready=gateway.is_ready(),
            restarts=gateway.engine_restarts(),
        )
        gateway.telemetry.set_ledger_restarts(gateway.ledger.restarts)
        update_churn(gateway)
        promises = gateway.contracts.promises.by_class(gateway.clock())
        gateway.telemetry.set_cache_stats(promises, gateway.churn.all.total[0])
        return web.Response(
            body=gateway.telemetry.exposition(),
            headers={"Content-Type": telemetry.CONTENT_TYPE},
        )

    return (Route("GET", "/metrics", metrics, "open"),)
