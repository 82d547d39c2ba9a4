"""The levels of the cache as the admin API, the command line and the dashboard show them.

Pure: it reads the engine's last heartbeat and the settings. The device is a level too, so that all
bytes of the cache are in one table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import nlargest
from typing import Any

from msgspec.structs import asdict

from engine.api import EngineInfo, LevelStats, NamespaceStats, Stats
from engine.config import LevelsConfig
from gateway.levels.worth import level_worth

SWITCH_ON = "[engine.levels]\ndisk_gib = 100"
"""The two lines of the configuration file that give the cache a disk."""
ROWS_MAX = 1_000
"""Most rows of a table by tenant: those with most bytes."""


def levels_report(
    config: LevelsConfig,
    folder: str,
    info: EngineInfo | None,
    stats: Stats,
    promised_blocks: int,
    since_ms: Callable[[str], int | None],
) -> dict[str, Any]:
    """Return the levels with their sizes, counts and worth.

    `folder`: of the disk level. `promised_blocks`: on the device. `since_ms`: when a level got its
    present state.
    """
    levels = [] if info is None else [_device(info, stats, promised_blocks)]
    for one in stats.levels:
        shown = {name: value for name, value in asdict(one).items() if name != "payers"}
        shown["free_bytes"] = max(0, one.capacity_bytes - one.used_bytes)
        shown["since_ms"] = since_ms(one.name)
        shown["worth"] = _worth(one, info, stats)
        levels.append(shown)
    is_on = config.is_on or bool(stats.levels)
    return {
        "is_on": is_on,
        "switch_on": None if is_on else SWITCH_ON,
        "folder": folder if config.disk_gib else None,
        "write_bytes_per_day_max": int((config.disk_write_gib_per_day or config.disk_gib) * 2**30),
        "loading": stats.loading,
        "levels": levels,
    }


def holds_promises(stats: Stats) -> bool:
    """Return whether a disk serves, which holds promised prefixes over the end of an engine."""
    return any(one.name == "disk" and one.state != "off" for one in stats.levels)


def tenants_report(
    stats: Stats,
    info: EngineInfo | None,
    namespaces: Iterable[NamespaceStats],
    owner_of: Callable[[bytes], int | None],
    name_of: Callable[[int], str],
) -> list[dict[str, Any]]:
    """Return the bytes that each tenant has on each level, most first, at most `ROWS_MAX` rows.

    Payers are tenant ids (`gateway.caching.namespaces.payer_of`). O(namespaces + payers).
    """
    rows: dict[int, dict[str, dict[str, int]]] = {}

    def add(tenant_id: int, level: str, used: int, promised: int) -> None:
        cell = rows.setdefault(tenant_id, {}).setdefault(
            level, {"used_bytes": 0, "promised_bytes": 0}
        )
        cell["used_bytes"] += used
        cell["promised_bytes"] += promised

    size = 0 if info is None else info.kv_bytes_per_block
    for one in namespaces:
        owner = owner_of(one.namespace)
        if owner is not None and one.blocks:
            add(owner, "device", one.blocks * size, one.promised_blocks * size)
    for level in stats.levels:
        for payer in level.payers:
            if payer.payer.isdigit():
                add(int(payer.payer), level.name, payer.used, payer.promised)
    largest = nlargest(ROWS_MAX, rows, key=lambda tenant_id: _sum(rows[tenant_id]))
    return [
        {"tenant": name_of(tenant_id), "bytes": _sum(rows[tenant_id]), "levels": rows[tenant_id]}
        for tenant_id in largest
    ]


def _sum(levels: Mapping[str, Mapping[str, int]]) -> int:
    return sum(cell["used_bytes"] for cell in levels.values())


def _device(info: EngineInfo, stats: Stats, promised_blocks: int) -> dict[str, Any]:
    size, used = info.kv_bytes_per_block, stats.blocks - stats.free_blocks
    loaded = sum(one.loaded_tokens_total for one in stats.levels)
    return {
        "name": "device",
        "state": "open",
        "reason": "",
        "capacity_bytes": stats.blocks * size,
        "used_bytes": used * size,
        "free_bytes": stats.free_blocks * size,
        "promised_bytes": promised_blocks * size,
        "blocks": used,
        "loaded_tokens_total": max(0, stats.cached_tokens_total - loaded),
    }


def _worth(one: LevelStats, info: EngineInfo | None, stats: Stats) -> dict[str, Any] | None:
    """Return what the level saves by its measured rate; None before both rates are known."""
    if info is None or one.name == "device" or not one.bytes_per_s:
        return None
    rate = stats.prefill_tokens_per_s
    if not rate or not info.kv_bytes_per_block:
        return None
    per_token = info.kv_bytes_per_block / info.block_size
    worth = level_worth(one.name, per_token, one.bytes_per_s, rate)
    return {
        "load_us_per_token": round(worth.load_s_per_token * 1e6, 3),
        "compute_us_per_token": round(worth.compute_s_per_token * 1e6, 3),
        "tokens_min": worth.tokens_min,
    }
