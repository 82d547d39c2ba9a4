"""`/admin/v1/levels` and `/admin/v1/levels/tenants`: the levels of the cache, as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from aiohttp import web
from msgspec import Struct

from gateway.background.config_reload import ConfigReload
from gateway.caching.namespaces import owner_of
from gateway.config import Config
from gateway.engines.cache_usage import CacheUsage
from gateway.engines.served_models import ServedModels
from gateway.http import json_api
from gateway.http.route_table import Route
from gateway.levels.placement import configured_dir
from gateway.levels.report import EngineLevels, levels_report, tenants_report
from tenancy.types import Fidelity, WallClock


class LevelWorthAnswer(Struct, frozen=True):
    """Microseconds to load a token and to compute it, by measured rates. `tokens_min`: from how
    many tokens on loading is faster; null if it never is."""

    load_us_per_token: float
    compute_us_per_token: float
    tokens_min: int | None


class CopiesAnswer(Struct, frozen=True):
    """The copies of one fidelity on a level: blocks, and their bytes."""

    fidelity: Fidelity
    blocks: int
    bytes: int


class LevelAnswer(Struct, frozen=True, omit_defaults=True):
    """A level. Totals count blocks unless they say otherwise, since the engine's start. The device
    has none of the fields from `since_ms` on. `not_loaded`: prompts of which the level had more
    than was loaded, by why; `uncopied_total`: blocks that the device has evicted without a copy."""

    name: Literal["device", "host", "disk", "remote", "peer"]
    state: Literal["open", "full", "off", "starting"]
    reason: str
    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    promised_bytes: int
    blocks: int
    loaded_tokens_total: int
    since_ms: int | None = None
    worth: LevelWorthAnswer | None = None
    offloaded_total: int = 0
    loaded_total: int = 0
    stored_total: int = 0
    fetched_total: int = 0
    failed_total: int = 0
    damaged_total: int = 0
    dropped_total: int = 0
    expired_total: int = 0
    regret_s_total: float = 0.0
    bytes_per_s: float = 0.0
    written_bytes_today: int = 0
    written_bytes_total: int = 0
    chosen_total: int = 0
    declined_total: int = 0
    not_loaded: dict[str, int] = {}
    uncopied_total: int = 0
    pending_erasures: int = 0
    copies: list[CopiesAnswer] = []
    recovered_total: int = 0
    torn_total: int = 0
    orphaned_total: int = 0
    lapsed_total: int = 0
    unnoted_total: int = 0


class LevelsAnswer(Struct, frozen=True):
    """All levels. `switch_on`: the lines of the configuration that give the cache a disk, while
    there is no level below the device. `config_file`: the file that the server read at its start.
    `is_sealed`: what the disk keeps is encrypted; `remote`: the address of the store below it.
    `minutes`: by name, one value for each of the last minutes: `minute` since the epoch, tokens
    found by level, blocks moved by flow."""

    is_on: bool
    switch_on: str | None
    config_file: str | None
    folder: str | None
    is_sealed: bool
    remote: str | None
    write_bytes_per_day_max: int
    loading: int
    levels: list[LevelAnswer]
    minutes: dict[str, list[int]]
    at_ms: int


class LevelBytes(Struct, frozen=True):
    """Bytes of one tenant on one level, and the promised part of them."""

    used_bytes: int
    promised_bytes: int


class LevelTenant(Struct, frozen=True):
    """A tenant's bytes, by level."""

    tenant: str
    bytes: int
    levels: dict[str, LevelBytes]


class LevelTenants(Struct, frozen=True):
    """Tenants by their bytes, most first."""

    tenants: list[LevelTenant]


def routes(
    models: ServedModels,
    usage: CacheUsage,
    config: Config,
    reload: ConfigReload,
    name_of: Callable[[int], str | None],
    wall: WallClock,
) -> tuple[Route, ...]:
    """Return the read-only routes of levels. `name_of`: the name of a tenant that exists."""

    async def levels(request: web.BaseRequest) -> object:
        usage.update_churn()
        engines = [
            EngineLevels(
                model.name,
                model.replicas.info,
                model.replicas.stats,
                sum(one.promised_on_device for one in model.replicas.namespaces()),
            )
            for model in models
        ]
        since_ms, minutes = usage.level_history.since_ms, usage.level_history.minutes()
        folder, settings = str(configured_dir(config)), config.engine.levels
        report = levels_report(settings, folder, engines, since_ms, reload.source.file)
        return {**report, "minutes": minutes, "at_ms": wall()}

    async def tenants(request: web.BaseRequest) -> object:
        spaces = (
            (one, info.kv_bytes_per_block)
            for model in models
            if (info := model.replicas.info) is not None
            for one in model.replicas.namespaces()
        )
        rows = tenants_report(
            models.stats().levels, spaces, owner_of, lambda one: name_of(one) or str(one)
        )
        if json_api.wants_csv(request.query):
            return json_api.csv_answer(rows, "levels")
        return {"tenants": rows}

    route, path = json_api.route, "/admin/v1/levels"
    return (
        route(
            *(f"GET {path}", "admin:read", "Show the cache's levels.", levels),
            answer=LevelsAnswer,
        ),
        route(
            *(f"GET {path}/tenants", "admin:read", "Show bytes by tenant and level.", tenants),
            answer=LevelTenants,
            query="format",
        ),
    )
