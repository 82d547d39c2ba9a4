"""A token bucket: how much of a limit per minute is taken, and when there is room again.

It is one number, from which what is owed at any time follows: it drains at the limit's own rate.
Everything is whole numbers (tokens times the nanoseconds of a minute), so sums are exact. Where the
limit changes, a half-full bucket of one size is a half-full one of another. It knows no clock and
nobody's name; `limits` keeps one for each limit of each tenant and key, and takes from it.

    owed ┤ ╲ taken        given while owed + cost is at most a minute's worth
         │  ╲│╲
         └────────▶ time
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SECOND_NS = 1_000_000_000
MINUTE_NS = 60 * SECOND_NS

Kind = Literal["tenant", "key"]


@dataclass(slots=True)
class Bucket:
    """What is owed at a time is `until` less the time times the limit; below zero nothing is.
    `told`: the same, if those who were refused had been given when they were told to come back."""

    kind: Kind
    meter: int
    limit: int
    until: int = 0
    told: int = 0

    def owed(self, now_ns: int) -> int:
        """Token-nanoseconds. Changes nothing."""
        return max(0, self.until - now_ns * self.limit)

    def resize(self, now_ns: int, limit: int) -> None:
        """The limit has changed; shares are rounded up."""
        before, after = now_ns * self.limit, now_ns * limit
        self.until = after - min(0, (before - self.until) * limit // self.limit)
        self.told = after - min(0, (before - self.told) * limit // self.limit)
        self.limit = limit

    def after_ns(self, now_ns: int, cost: int) -> int:
        """How long until that much fits. O(1). Changes nothing."""
        return max(0, -(-(self.owed(now_ns) + cost - self.limit * MINUTE_NS) // self.limit))

    def turn_ns(self, now_ns: int, cost: int) -> int:
        """How long until that much fits after all who were told to wait before: each gets a turn
        of his own, or all would come at once and most be refused again. At most a minute."""
        whole, drained = self.limit * MINUTE_NS, now_ns * self.limit
        turn = max(self.until, self.told, drained) + cost - drained
        self.told = drained + min(turn, 2 * whole)
        return min(MINUTE_NS, -(-(turn - whole) // self.limit))

    def is_idle(self, now_ns: int) -> bool:
        """Would a new one be the same?"""
        return max(self.until, self.told) <= now_ns * self.limit
