"""The levels of the cache as the admin API, the command line and the dashboard show them.

Pure: it reads the engine's last heartbeat and the settings. The device is a level too, so that all
bytes of the cache are in one table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nlargest
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from engine.api import EngineInfo
from engine.config import LevelsConfig
from engine.statistics import NOT_ANSWERED, FidelityBytes, LevelStats, NamespaceStats, Stats
from gateway.levels.level_worth import level_worth
from tenancy.types import FIDELITIES, Fidelity

SWITCH_ON = "[engine.levels]\ndisk_gib = 100"
"""The two lines of the configuration file that give the cache a disk."""
STATES = ("open", "full", "off")
"""States of a level, from the best to the worst."""
_SUMMED = tuple(
    name
    for name in LevelStats.__struct_fields__
    if name not in ("name", "state", "reason", "bytes_per_s", "copies", "not_loaded")
)
ROWS_MAX = 1_000
"""Most rows of a table by tenant: those with most bytes."""


class EngineLevels(Struct, frozen=True):
    """One model's engine as it reports its levels."""

    model: str
    info: EngineInfo | None
    stats: Stats
    promised_blocks: int
    """Held on the device."""


def sum_levels(each: Iterable[Sequence[LevelStats]]) -> tuple[LevelStats, ...]:
    """Return the levels of several engines by name: sums of their counts, the worst of their
    states with its reason, the best of their rates."""
    found: dict[str, LevelStats] = {}
    for one in chain.from_iterable(each):
        before = found.get(one.name)
        if before is None:
            found[one.name] = one
            continue
        worst = max(before, one, key=lambda level: STATES.index(level.state))
        sums = {name: getattr(before, name) + getattr(one, name) for name in _SUMMED}
        rate = max(before.bytes_per_s, one.bytes_per_s)
        sums["copies"] = _sum_copies((*before.copies, *one.copies))
        sums["not_loaded"] = dict(Counter(before.not_loaded) + Counter(one.not_loaded))
        found[one.name] = replace(worst, bytes_per_s=rate, **sums)
    return tuple(found.values())


def _sum_copies(each: Sequence[FidelityBytes]) -> tuple[FidelityBytes, ...]:
    """Return the sums of copies by fidelity."""
    blocks, size = Counter[Fidelity](), Counter[Fidelity]()
    for one in each:
        blocks[one.fidelity] += one.blocks
        size[one.fidelity] += one.bytes
    return tuple(FidelityBytes(one, blocks[one], size[one]) for one in FIDELITIES if blocks[one])


def levels_report(
    config: LevelsConfig,
    folder: str,
    engines: Sequence[EngineLevels],
    since_ms: Callable[[str], int | None],
    config_file: Path | None = None,
) -> dict[str, Any]:
    """Return the levels of all engines together, with their sizes, counts and worth.

    `folder`: of the disk level. `since_ms`: when a level got its present state. `config_file`:
    the file that was read at the start.
    """
    levels: list[dict[str, Any]] = []
    known = [one for one in engines if one.info is not None]
    if known:
        levels.append(_device(known))
    for one in sum_levels(engine.stats.levels for engine in engines):
        shown = {name: value for name, value in asdict(one).items() if name != "payers"}
        shown["copies"] = [asdict(copies) for copies in one.copies]
        if one.reason == NOT_ANSWERED:
            shown["state"] = "starting"
        shown["free_bytes"] = one.free_bytes
        shown["since_ms"] = since_ms(one.name)
        shown["worth"] = _worth(one, known[0]) if len(known) == 1 else None
        levels.append(shown)
    is_on = config.is_on or len(levels) > 1
    return {
        "is_on": is_on,
        "switch_on": None if is_on else SWITCH_ON,
        "config_file": None if config_file is None else str(config_file),
        "folder": folder if config.disk_gib else None,
        "is_sealed": bool(config.disk_gib) and config.seal,
        "remote": config.remote.url or None,
        "write_bytes_per_day_max": int((config.disk_write_gib_per_day or config.disk_gib) * 2**30),
        "loading": sum(one.stats.loading for one in engines),
        "levels": levels,
    }


def holds_promises(stats: Stats) -> bool:
    """Return whether a level holds promised prefixes over the end of an engine: a disk that serves,
    or host memory from which this engine has taken over copies of the one before."""
    return any(
        one.state != "off" and (one.name == "disk" or one.recovered_total > 0)
        for one in stats.levels
    )


def unkept_tokens(stats: Stats, info: EngineInfo | None) -> int:
    """Return how many tokens at the end of a promised prefix the levels of an engine do not keep:
    a disk has whole blocks, the device has all."""
    return info.block_size - 1 if info is not None and holds_promises(stats) else 0


def is_disk_away(stats: Stats) -> bool:
    """Return whether there is a disk that does not serve now: what it has is not known."""
    return any(
        one.name == "disk" and one.state == "off" and one.capacity_bytes > 0 for one in stats.levels
    )


def tenants_report(
    levels: Iterable[LevelStats],
    namespaces: Iterable[tuple[NamespaceStats, int]],
    owner_of: Callable[[bytes], int | None],
    name_of: Callable[[int], str],
) -> list[dict[str, Any]]:
    """Return the bytes that each tenant has on each level, most first, at most `ROWS_MAX` rows.

    `namespaces`: with the bytes of a block. Payers are tenant ids
    (`gateway.caching.namespaces.payer_of`). O(namespaces + payers).
    """
    rows: dict[int, dict[str, dict[str, int]]] = {}

    def add(tenant_id: int, level: str, used: int, promised: int) -> None:
        cell = rows.setdefault(tenant_id, {}).setdefault(
            level, {"used_bytes": 0, "promised_bytes": 0}
        )
        cell["used_bytes"] += used
        cell["promised_bytes"] += promised

    for one, size in namespaces:
        owner = owner_of(one.namespace)
        if owner is not None and one.blocks:
            add(owner, "device", one.blocks * size, one.promised_on_device * size)
    for level in levels:
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


def _device(engines: Sequence[EngineLevels]) -> dict[str, Any]:
    found = Counter[str]()
    for one in engines:
        stats, size = one.stats, 0 if one.info is None else one.info.kv_bytes_per_block
        found["capacity_bytes"] += stats.blocks * size
        found["used_bytes"] += stats.used_blocks * size
        found["free_bytes"] += stats.free_blocks * size
        found["promised_bytes"] += one.promised_blocks * size
        found["blocks"] += stats.used_blocks
        found["loaded_tokens_total"] += stats.device_tokens_total
    return {"name": "device", "state": "open", "reason": "", **found}


def _worth(one: LevelStats, engine: EngineLevels) -> dict[str, Any] | None:
    """Return what the level saves by its measured rate and the mean size of its copies; None before
    both rates are known."""
    info, rate = engine.info, engine.stats.prefill_tokens_per_s
    if info is None or not (one.bytes_per_s and rate and info.kv_bytes_per_block):
        return None
    blocks = sum(copies.blocks for copies in one.copies)
    per_block = sum(copies.bytes for copies in one.copies) / blocks if blocks else 0.0
    per_token = (per_block or info.kv_bytes_per_block) / info.block_size
    worth = level_worth(one.name, per_token, one.bytes_per_s, rate)
    return {
        "load_us_per_token": round(worth.load_s_per_token * 1e6, 3),
        "compute_us_per_token": round(worth.compute_s_per_token * 1e6, 3),
        "tokens_min": worth.tokens_min,
    }
