"""Tells connections which prefixes the engine has, and its load, with the frames of steps.

What the tree has is told in parts of bounded work, one a step, so that no token waits long for it;
until all is told, steps without work follow each other. `engine.server.service` has one. While
nobody watches, it does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final, Generic, TypeVar

from msgspec.structs import replace

from engine.core.core import Core
from engine.protocol import Facts
from engine.statistics import LoadReport
from engine.strides import PrefixChanges

NODES_A_STEP: Final = 512
"""Nodes of the tree that are looked at between two steps, in less than a millisecond."""
LOAD_EVERY_S: Final = 0.05
"""Least time between two reports of the load."""


ReaderT = TypeVar("ReaderT")


class PrefixReporter(Generic[ReaderT]):
    """What the connections that watch have been told. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._loads: dict[ReaderT, LoadReport] = {}
        """The last one of each reader."""
        self._next_load_at_s = -inf
        self._is_stale = False
        """Whether a step came too soon after the last report of the load."""

    def start(self, core: Core, reader: ReaderT) -> None:
        """Tell all readers everything anew, from the next step on, and this one too. O(trees)."""
        core.cache.strides.start()
        self._loads[reader], self._next_load_at_s = LoadReport(), -inf

    def stop(self, core: Core, reader: ReaderT) -> None:
        """Tell a reader nothing more. O(1); O(namespaces) after the last one."""
        if self._loads.pop(reader, None) is not None and not self._loads:
            core.cache.strides.stop()
            self._is_stale = False

    def wait_s(self, core: Core, now_s: float) -> float:
        """Return how long an engine without work may wait for its next step: not at all while
        prefixes are yet to be told. O(1).
        """
        if self._loads and core.cache.strides.has_more:
            return 0.0
        return max(0.0, self._next_load_at_s - now_s) if self._is_stale else inf

    def take(
        self, core: Core, accepted: Mapping[ReaderT, int], now_s: float
    ) -> dict[ReaderT, list[Facts]]:
        """Return what is to be told to each reader after a step. `accepted`: the Submits of each so
        far. Less than a millisecond.
        """
        facts: dict[ReaderT, list[Facts]] = {}
        if not self._loads:
            return facts
        if core.cache.strides.has_more:
            changes = core.cache.strides.take(NODES_A_STEP)
            if changes != PrefixChanges():
                facts = {reader: [changes] for reader in self._loads}
        self._is_stale = now_s < self._next_load_at_s
        if self._is_stale:
            return facts
        now = core.engine_stats.load(core.cache, core.scheduler, core.requests, 0)
        for reader, before in self._loads.items():
            load = replace(now, accepted=accepted.get(reader, 0))
            if load != before:
                self._loads[reader], self._next_load_at_s = load, now_s + LOAD_EVERY_S
                facts.setdefault(reader, []).append(load)
        return facts
