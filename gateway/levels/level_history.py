"""What moved between the levels and was found on each, by minute, and since when a level is so.

`background.storage_metering` feeds the engine's heartbeats; totals of a new engine or storage
process begin at 0. Memory is bounded by the latest minutes. This module reads no clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from engine.statistics import Stats
from gateway.levels.report import sum_levels

MINUTES = 120
FLOWS = (
    "device_host", "host_device", "host_disk", "disk_host", "disk_remote", "remote_host",
    "host_peer", "peer_host",
)  # fmt: skip
"""Blocks copied between two levels; the names of both."""
HITS = ("device", "host", "disk", "remote", "peer")
"""Cached tokens by the level on which they were found."""


class LevelHistory:
    """The history of one gateway's levels. Belongs to one thread."""

    def __init__(self) -> None:
        self._minutes: deque[tuple[int, Counter[str]]] = deque(maxlen=MINUTES)
        self._totals: dict[tuple[str, str], int] = {}
        """The last totals of each engine, by its name and theirs."""
        self._states: dict[str, tuple[str, int]] = {}

    def update(self, engines: Iterable[tuple[str, Stats]], now_ms: int) -> None:
        """Count what happened since the last call, for the minute of `now_ms`. O(levels).

        `engines`: the latest heartbeat of each, by a name that its successor has too.
        """
        found = dict(engines)
        levels = sum_levels(stats.levels for stats in found.values())
        for level in levels:
            state, since_ms = self._states.get(level.name, ("", now_ms))
            if level.state != state:
                since_ms = now_ms
            self._states[level.name] = level.state, since_ms
        new: Counter[str] = Counter()
        for engine, stats in found.items():
            for name, total in _totals(stats).items():
                before = self._totals.get((engine, name), 0)
                # One that fell is of another process.
                new[name] += total - before if total >= before else total
                self._totals[engine, name] = total
        minute = now_ms // 60_000
        if self._minutes and self._minutes[-1][0] == minute:
            self._minutes[-1][1].update(new)
        elif levels:
            self._minutes.append((minute, new))

    def since_ms(self, level: str) -> int | None:
        """Return when a level got its present state; None for an unknown level."""
        found = self._states.get(level)
        return None if found is None else found[1]

    def minutes(self) -> dict[str, list[int]]:
        """Return the minutes since the epoch, and in each the tokens found by level and the blocks
        moved by flow."""
        found: dict[str, Any] = {"minute": [minute for minute, _ in self._minutes]}
        for name in (*HITS, *FLOWS):
            found[name] = [counts[name] for _, counts in self._minutes]
        return found


def _totals(stats: Stats) -> dict[str, int]:
    totals = {"device": stats.device_tokens_total}
    for level in stats.levels:
        totals[level.name] = level.loaded_tokens_total
        totals |= {f"{origin}_{target}": blocks for origin, target, blocks in level.moves}
    return totals
