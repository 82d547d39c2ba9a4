"""Erasures: what is erased on the device and below, and the answers that wait for levels.

The device's tree and host memory are erased at once, but for copies of an earlier engine that are
not recovered yet. The answer goes out when no later start finds what was named, on disk or in host
memory; the engine's thread does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from engine.api import Erase, Erased, LevelErased
from engine.cache import PrefixCache
from engine.levels.levels import Levels

Answer = Callable[[Erased], None]


class Erasures:
    """The erasures that wait for levels with their answers."""

    def __init__(self, cache: PrefixCache, levels: Levels | None) -> None:
        self._cache = cache
        self._levels = levels
        self._waiting: dict[int, tuple[Erased, Answer]] = {}
        if levels is not None:
            levels.on_erased = self._finish

    def erase(self, call: Erase, answer: Answer) -> None:
        """Erase what was named; call `answer` when every level has done so. O(blocks of the
        namespace).
        """
        waits_for = None
        if self._levels is None:
            blocks = self._cache.erase(call.namespace, lease_id=call.lease_id, tokens=call.tokens)
            erased = Erased(call.call_id, blocks, ())
        else:
            blocks, host, waits_for = self._levels.erase(call)
            erased = Erased(call.call_id, blocks, (host,))
        if waits_for is None:
            answer(erased)
        else:
            self._waiting[waits_for] = (erased, answer)

    def _finish(self, waits_for: int, disk: LevelErased | None) -> None:
        erased, answer = self._waiting.pop(waits_for)
        levels = erased.levels if disk is None else (*erased.levels, disk)
        answer(replace(erased, levels=levels))
