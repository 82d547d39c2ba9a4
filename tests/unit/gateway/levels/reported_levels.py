"""Heartbeats of an engine with levels, for tests of what operators see."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from engine.statistics import FidelityBytes, LevelStats, PayerBytes, Stats

HOST = LevelStats(
    "host",
    "open",
    capacity_bytes=1_000,
    used_bytes=400,
    promised_bytes=100,
    blocks=4,
    offloaded_total=9,
    loaded_total=5,
    loaded_tokens_total=80,
    regret_s_total=0.5,
    bytes_per_s=1_000.0,
    chosen_total=3,
    declined_total=1,
    not_loaded={"slower": 1, "late": 2},
    uncopied_total=3,
    copies=(FidelityBytes("exact", 2, 320), FidelityBytes("near", 2, 80)),
)
DISK = LevelStats(
    "disk",
    "full",
    reason="less than 2 GiB free",
    capacity_bytes=9_000,
    used_bytes=9_000,
    blocks=90,
    stored_total=95,
    fetched_total=2,
    failed_total=6,
    damaged_total=1,
    dropped_total=4,
    expired_total=1,
    loaded_tokens_total=32,
    written_bytes_today=70,
    written_bytes_total=700,
    pending_erasures=2,
    payers=(PayerBytes(b"1", 8_000, 500), PayerBytes(b"2", 1_000, 0)),
)
STATS = Stats(
    blocks=8,
    free_blocks=2,
    cached_blocks=6,
    cached_tokens_total=200,
    device_tokens_total=88,
    levels=(HOST, DISK),
    loading=1,
)


class ReportedEngine:
    """An engine whose heartbeat is given, and is another's in all else."""

    def __init__(self, engine: Any, stats: Stats) -> None:
        self.engine, self.stats = engine, stats
        self.namespaces = engine.namespaces

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def set_level(self, name: str, **fields: object) -> None:
        """Change fields of one level."""
        levels = [replace(one, **fields) if one.name == name else one for one in self.stats.levels]
        self.stats = replace(self.stats, levels=tuple(levels))
