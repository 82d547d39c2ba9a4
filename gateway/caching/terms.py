"""What one prompt may read and has to write, settled before it runs; and what that comes to once
it is known how much is there. A read is the longest prefix that

    an earlier call wrote at one of the positions this call's breakpoints look back to,
    is still live, and is promised or still there,
    and holds, up to each breakpoint below it, at least the promise asked for there
    (asking for longer is a write);

with the "longest" lookup, whatever the engine found counts as well. Writes are the breakpoints
beyond the read, each charged from the one before it. Pure: it changes no entry and reads no clock.
`contract` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from engine.api import Retention
from gateway.caching.prefix_index import Entry
from gateway.dialects.canonical import UsageRecord
from gateway.retention_classes import BEST_EFFORT, CacheProfile


class Write(Struct, frozen=True):
    """A breakpoint to write: the first `tokens` tokens in this class."""

    tokens: int
    retention: Retention
    digest: bytes


class Terms(Struct, frozen=True):
    """`total`: tokens of the prompt. `tries`: what of it was written before, by length, longest
    first. `writes`: ascending. `is_below`: there were breakpoints, all too near the beginning."""

    profile: CacheProfile
    lookup: str
    total: int
    tries: Sequence[tuple[int, Entry]]
    writes: tuple[Write, ...]
    is_below: bool
    honours_promises: bool

    def wanted(self) -> int:
        """Up to where it would read, if all had been written."""
        return self.writes[-1].tokens if self.writes else 0

    def kept_s(self) -> float:
        """How long what it asks for is kept, if nobody reads it: the longest of its classes."""
        kept = (max(w.retention.promise_s, w.retention.limit_s or 0.0) for w in self.writes)
        return max(kept, default=0.0)

    def longest(self) -> Entry | None:
        """Of what was written before, that which holds most."""
        return self.tries[0][1] if self.tries else None

    def split(
        self, cached_tokens: int, granted: Mapping[int, int] | None, now_s: float
    ) -> tuple[UsageRecord, Entry | None]:
        """total = read + write + fresh, and the entry that is read, if the engine has this many
        tokens and grants so many at each write (None: all). O(tries * writes)."""
        read, entry, owed = self._read(cached_tokens, now_s)
        classes: dict[str, int] = {}
        at = read
        for write in self.writes:
            end = write.tokens if granted is None else min(write.tokens, granted[write.tokens])
            if end > at:
                classes[write.retention.name] = classes.get(write.retention.name, 0) + end - at
                at = end
        fresh = self.total - at
        if not self.profile.reports_writes:
            fresh, classes = self.total - read, {}
        name = BEST_EFFORT
        if entry is not None:
            best = entry.best(now_s)
            name = best.retention.name if best is not None else BEST_EFFORT
        record = UsageRecord(
            total_in=self.total,
            read={name: read} if read else {},
            write=classes,
            fresh=fresh,
            physical_cached=cached_tokens,
            recomputed_promised=owed,
        )
        return record, entry

    def is_there(self, tokens: int, cached_tokens: int) -> bool:
        """The last token of a prompt is always computed: that is no loss."""
        return cached_tokens >= min(tokens, self.total - 1)

    def _read(self, there: int, now_s: float) -> tuple[int, Entry | None, int]:
        """(logical tokens read, the entry they come from, of them promised but not there)."""
        if self.lookup == "none":
            return 0, None, 0
        read, entry = 0, None
        for tokens, found in self.tries:
            if not found.is_live(now_s) or not self._covers(tokens, now_s):
                continue
            owed = self.honours_promises and found.is_promised(now_s)
            if owed or self.is_there(tokens, there):
                read, entry = tokens, found
                break
        if self.lookup == "longest" and there > read:
            read, entry = there, None
        read -= read % self.profile.granularity
        if read < self.profile.min_tokens:
            return 0, None, 0
        return read, entry, max(0, min(read, self.total - 1) - there)

    def _covers(self, tokens: int, now_s: float) -> bool:
        """Does what was written hold each promise asked for up to here?"""
        for write in self.writes:
            if write.tokens > tokens:
                continue
            held = max(
                (
                    _promise(lease.retention)
                    for at, entry in self.tries
                    if at >= write.tokens
                    for lease in entry.leases.values()
                    if lease.expires_at_s > now_s
                ),
                default=-1.0,
            )
            if held < _promise(write.retention):
                return False
        return True


def _promise(retention: Retention) -> float:
    return float("inf") if retention.pinned else retention.promise_s
