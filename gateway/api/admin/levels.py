"""`/admin/v1/levels` and `/admin/v1/levels/tenants`: the levels of the cache, as JSON."""

from __future__ import annotations

from aiohttp import web

from engine.config import LevelsConfig
from gateway.background.storage_metering import update_churn
from gateway.caching.namespaces import owner_of
from gateway.context import Context
from gateway.engines.served_models import ServedModel
from gateway.errors import Kind, Refusal
from gateway.http import json_api
from gateway.http.middleware import Route
from gateway.levels.placement import configured_dir
from gateway.levels.report import levels_report, tenants_report


def routes(gateway: Context) -> tuple[Route, ...]:
    """Return the read-only routes of levels."""

    async def levels(request: web.BaseRequest) -> web.StreamResponse:
        model = _model(gateway, json_api.query(request, "model").get("model"))
        engine = model.engine
        update_churn(gateway)
        folder = configured_dir(gateway.config)
        report = levels_report(
            _levels_of(gateway, model),
            str(folder / model.name if gateway.models.are_several else folder),
            engine.info,
            engine.stats,
            sum(one.promised_blocks for one in engine.namespaces),
            gateway.level_history.since_ms,
        )
        minutes = gateway.level_history.minutes()
        named = {"model": model.name, "models": [one.name for one in gateway.models]}
        return json_api.answer({**report, "minutes": minutes, "at_ms": gateway.wall(), **named})

    async def tenants(request: web.BaseRequest) -> web.StreamResponse:
        query = json_api.query(request, "format", "model")
        is_csv = json_api.wants_csv(query)
        engine = _model(gateway, query.get("model")).engine

        def name_of(tenant_id: int) -> str:
            found = gateway.registry.tenant(tenant_id)
            return str(tenant_id) if found is None else found.tenant.name

        rows = tenants_report(engine.stats, engine.info, engine.namespaces, owner_of, name_of)
        if is_csv:
            return json_api.csv_answer(rows, "levels")
        return json_api.answer({"tenants": rows})

    return (
        Route("GET", "/admin/v1/levels", levels, "admin:read", json_api.SHAPE),
        Route("GET", "/admin/v1/levels/tenants", tenants, "admin:read", json_api.SHAPE),
    )


def _model(gateway: Context, name: str | None) -> ServedModel:
    """Return the named model, or the default one. Raises Refusal for a model that is not
    served."""
    found = gateway.models.default if name is None else gateway.models.by_name.get(name)
    if found is None:
        names = ", ".join(gateway.models.names)
        message = f"model: {str(name)[:80]!r} is not served; expected one of: {names}."
        raise Refusal(Kind.BAD, "invalid_value", message, param="model")
    return found


def _levels_of(gateway: Context, model: ServedModel) -> LevelsConfig:
    """Return the settings of the levels of a model's engine."""
    config = gateway.config
    own = next((one for one in config.models if one.name == model.name), None)
    return (config.engine if own is None else config.engine_of(own)).levels
