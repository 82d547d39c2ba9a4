"""Erasures: what is erased on the device and below, and the answers that wait for levels.

The device's tree and host memory are erased at once, but for copies of an earlier engine that are
not recovered yet. The answer goes out when no later start finds what was named, on disk or in host
memory; the engine's thread does not wait for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from engine.api import Erase, Erased, LevelErased, Namespace, Request
from engine.cache import PrefixCache
from engine.levels.levels import Levels

Answer = Callable[[Erased], None]
ERASED_S: Final = 120.0
"""For so long after an erasure no promise of what was erased is taken over from another engine: who
brings it may have got it before that engine heard of the erasure, or from one that missed it."""


class Erasures:
    """The erasures that wait for levels with their answers."""

    def __init__(self, cache: PrefixCache, levels: Levels | None) -> None:
        self._cache = cache
        self._levels = levels
        self._waiting: dict[int, tuple[Erased, Answer]] = {}
        self._erased_at_s: OrderedDict[tuple[Namespace, str | None], float] = OrderedDict()
        if levels is not None:
            levels.on_erased = self._finish

    def covers(self, request: Request, now_s: float) -> bool:
        """Return whether what a request brings was erased here lately. O(leases)."""
        namespace, leases = request.grant.namespace, request.grant.leases
        known = [(namespace, None), *((namespace, one.lease_id) for one in leases)]
        return any(now_s - self._erased_at_s.get(one, -ERASED_S) < ERASED_S for one in known)

    def erase(self, call: Erase, answer: Answer, now_s: float) -> None:
        """Erase what was named; call `answer` when every level has done so. O(blocks of the
        namespace).
        """
        self._erased_at_s[call.namespace, call.lease_id] = now_s
        self._erased_at_s.move_to_end((call.namespace, call.lease_id))
        while next(iter(self._erased_at_s.values())) <= now_s - ERASED_S:
            self._erased_at_s.popitem(last=False)
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

    def _finish(self, waits_for: int, below: tuple[LevelErased, ...]) -> None:
        erased, answer = self._waiting.pop(waits_for)
        answer(replace(erased, levels=(*erased.levels, *below)))
