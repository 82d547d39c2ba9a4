"""What the engine does beside its work: let leases lapse, and recount the cache now and then.

It knows the cache alone, and no clock. Core calls it at the end of every step and heartbeat.
"""

from __future__ import annotations

from typing import Final

from engine.cache import PrefixCache

IDLE_CHECK_S: Final = 1.0


class Housekeeper:
    """Recounts once per idle time, and every `check_interval_s` without one."""

    def __init__(self, cache: PrefixCache, check_interval_s: float, now_s: float) -> None:
        self._cache = cache
        self._check_interval_s = check_interval_s
        self._idle_since_s: float | None = None
        self._checked_at_s = now_s

    def keep(self, now_s: float, *, is_busy: bool) -> None:
        """O(what lapses), and O(blocks) when it recounts. Raises InvariantViolation."""
        self._cache.expire(now_s)
        is_due = now_s - self._checked_at_s >= self._check_interval_s
        if is_busy:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        elif self._checked_at_s <= self._idle_since_s:
            is_due = is_due or now_s - self._idle_since_s >= IDLE_CHECK_S
        if is_due:
            self._checked_at_s = now_s
            self._cache.check()
