"""`/admin/v1/levels` and `/admin/v1/levels/tenants`: the levels of the cache, as JSON."""

from __future__ import annotations

from aiohttp import web

from gateway.background.storage_metering import update_churn
from gateway.caching.namespaces import owner_of
from gateway.context import Context
from gateway.http import json_api
from gateway.http.middleware import Route
from gateway.levels.placement import configured_dir
from gateway.levels.report import EngineLevels, levels_report, tenants_report


def routes(gateway: Context) -> tuple[Route, ...]:
    """Return the read-only routes of levels."""

    async def levels(request: web.BaseRequest) -> web.StreamResponse:
        json_api.query(request)
        update_churn(gateway)
        engines = [
            EngineLevels(
                model.name,
                model.engine.info,
                model.engine.stats,
                sum(one.promised_on_device for one in model.engine.namespaces),
            )
            for model in gateway.models
        ]
        folder = str(configured_dir(gateway.config))
        since_ms, minutes = gateway.level_history.since_ms, gateway.level_history.minutes()
        report = levels_report(
            gateway.config.engine.levels, folder, engines, since_ms, gateway.source.file
        )
        return json_api.answer({**report, "minutes": minutes, "at_ms": gateway.wall()})

    async def tenants(request: web.BaseRequest) -> web.StreamResponse:
        is_csv = json_api.wants_csv(json_api.query(request, "format"))

        def name_of(tenant_id: int) -> str:
            found = gateway.authenticator.tenant(tenant_id)
            return str(tenant_id) if found is None else found.tenant.name

        spaces = (
            (one, info.kv_bytes_per_block)
            for model in gateway.models
            if (info := model.engine.info) is not None
            for one in model.engine.namespaces
        )
        rows = tenants_report(gateway.models.stats().levels, spaces, owner_of, name_of)
        if is_csv:
            return json_api.csv_answer(rows, "levels")
        return json_api.answer({"tenants": rows})

    return (
        Route("GET", "/admin/v1/levels", levels, "admin:read", json_api.SHAPE),
        Route("GET", "/admin/v1/levels/tenants", tenants, "admin:read", json_api.SHAPE),
    )
