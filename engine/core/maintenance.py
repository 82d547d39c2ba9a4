"""What the engine does beside its work: let leases lapse, and recount the cache now and then.

It knows the cache, of the rest of the engine a call that recounts it, and no clock. Core calls it
at the end of every step and heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from engine.cache import PrefixCache

IDLE_CHECK_S: Final = 1.0


class Housekeeper:
    """Recounts once per idle time, and after `check_interval_s` without one beside the work.

    A piece at a time: whoever comes meanwhile waits for one piece, and the rest for the next idle
    time.
    """

    def __init__(
        self,
        cache: PrefixCache,
        check_rest: Callable[[], None],
        check_interval_s: float,
        now_s: float,
    ) -> None:
        self._cache = cache
        self._check_rest = check_rest
        self._check_interval_s = check_interval_s
        self._idle_since_s: float | None = None
        self._checked_at_s = now_s
        self._recount: Iterator[None] | None = None
        self.is_recounting = False

    def keep(self, now_s: float, *, is_busy: bool) -> None:
        """O(what lapses), and a piece of a recount. `is_recounting` says whether there is more of
        it to be done now. Raises InvariantViolation."""
        self._cache.expire(now_s)
        if is_busy:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        is_overdue = now_s - self._checked_at_s >= self._check_interval_s
        idle_since_s = self._idle_since_s
        self.is_recounting = is_overdue
        if idle_since_s is not None and now_s - idle_since_s >= IDLE_CHECK_S:
            is_unfinished = self._recount is not None
            self.is_recounting |= is_unfinished or self._checked_at_s <= idle_since_s
        if self.is_recounting:
            self._go_on(now_s)

    def _go_on(self, now_s: float) -> None:
        if self._recount is None:
            self._recount = self._cache.recount()
        try:
            next(self._recount)
        except StopIteration:
            self._check_rest()
            self._recount = None
            self._checked_at_s = now_s
            self.is_recounting = False
