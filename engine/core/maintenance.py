"""Maintenance beside the engine's work: lease expiry, and a recount of the cache now and then.

It knows the cache and a callable that recounts the rest of the engine, and no clock. Core calls it
at the end of every step and heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from engine.cache import PrefixCache

IDLE_CHECK_S: Final = 1.0
"""Seconds without work after which a recount starts."""


class Maintenance:
    """Recount the cache once per idle period, and after `check_interval_s` without one during work.

    A recount runs in pieces: a new request waits for one piece at most, and the remaining pieces
    wait for the next idle period.
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

    def run(self, now_s: float, *, is_busy: bool) -> None:
        """Expire leases and run one piece of a recount that is due. Raises InvariantViolation.

        Sets `is_recounting`: whether more pieces should run now. O(expired), and one piece.
        """
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
            self._continue_recount(now_s)

    def _continue_recount(self, now_s: float) -> None:
        if self._recount is None:
            self._recount = self._cache.recount()
        try:
            next(self._recount)
        except StopIteration:
            self._check_rest()
            self._recount = None
            self._checked_at_s = now_s
            self.is_recounting = False
