"""How often, how soon and at what distance a tenant comes back to the same prefixes.

From a bounded sample of the blocks its prompts are made of: a miss-ratio curve over cache size and
one over retention time, live. The sample is spatial (a block is in it or not, by its hash, so that
all its uses are), of fixed size: when it is full, the hash threshold falls and the blocks above it
leave. Distances are scaled up by the sampling rate (SHARDS: Waldspurger, Park, Garthwaite and
Ahmad, "Efficient MRC Construction with SHARDS", FAST 2015). It knows no engine and no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from msgspec import Struct
from sortedcontainers import SortedList

HASH_BITS = 24
HASHES = 1 << HASH_BITS
SAMPLE_MAX = 4_096
"""Blocks of one tenant that are followed: about 1.5 MB with their indexes."""

BUCKETS_PER_OCTAVE = 4


class Point(Struct, frozen=True):
    """`hit_ratio` of block uses when the cache has room for `blocks`, or keeps for `seconds`.

    `error`: one standard error of the ratio, from the number of sampled blocks.
    """

    at: float
    hit_ratio: float
    error: float


class Histogram:
    """Weighted counts by the logarithm of a value. Two buckets differ by a fifth."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}

    def add(self, value: float, weight: float) -> None:
        """O(1)."""
        place = 0 if value < 1 else 1 + int(BUCKETS_PER_OCTAVE * math.log2(value))
        self._counts[place] = self._counts.get(place, 0.0) + weight

    def merge(self, other: Histogram) -> None:
        """All that is in another. O(buckets)."""
        for place, count in other._counts.items():
            self._counts[place] = self._counts.get(place, 0.0) + count

    def below(self, value: float) -> float:
        """The weight of everything that is at most `value`: whole buckets, rounded down."""
        last = 0 if value < 1 else int(BUCKETS_PER_OCTAVE * math.log2(value))
        return sum(count for place, count in self._counts.items() if place <= last)

    def quantile(self, part: float) -> float | None:
        """The value below which this part of the weight lies: its bucket's upper edge."""
        total = sum(self._counts.values())
        if total <= 0:
            return None
        sum_so_far = 0.0
        for place in sorted(self._counts):
            sum_so_far += self._counts[place]
            if sum_so_far >= part * total:
                break
        return float(2 ** (place / BUCKETS_PER_OCTAVE))

    def fade(self, factor: float) -> None:
        """Older counts weigh less."""
        self._counts = {
            place: count * factor for place, count in self._counts.items() if count * factor > 1e-6
        }


class ReuseSampler:
    """One tenant's reuse. Belongs to one thread; bounded by `sample_max` blocks."""

    def __init__(self, sample_max: int = SAMPLE_MAX) -> None:
        self._sample_max = sample_max
        self._threshold = HASHES
        self._last: dict[int, tuple[int, float]] = {}
        self._by_hash: SortedList = SortedList()
        self._order: list[int] = []  # turns only grow, so it is sorted as it is
        self._turn = 0
        self._distances = Histogram()
        self._gaps = Histogram()
        self._uses = 0.0

    @property
    def rate(self) -> float:
        """The part of all blocks that is followed."""
        return self._threshold / HASHES

    @property
    def sampled_blocks(self) -> int:
        return len(self._last)

    def use(self, block_hashes: Iterable[int], at_s: float) -> None:
        """A prompt's blocks, from its beginning. About 0.1 us a block, 0.3 us a sampled one that
        was last used right after the one before it, 5 us any other."""
        run: list[int] = []
        last, due = self._last, (0, 0.0)
        for value in block_hashes:
            if value % HASHES >= self._threshold:
                continue
            known = last.get(value)
            if run and known == due:
                run.append(value)
            else:
                self._again(run, at_s)
                # What has just been noted may be this very block.
                known = last.get(value)
                run = [value] if known is not None else []
                if known is None:
                    self._first(value, at_s)
                    continue
            due = (known[0] + 1, known[1])
        self._again(run, at_s)

    def by_blocks(self, sizes: Iterable[float]) -> list[Point]:
        """The hit ratio that a cache of each size would have had, by least recent use."""
        return [self._point(size, self._distances.below(size)) for size in sizes]

    def by_seconds(self, times: Iterable[float]) -> list[Point]:
        """The hit ratio that each retention would have had, renewed by use, with room for all."""
        return [self._point(seconds, self._gaps.below(seconds)) for seconds in times]

    def fade(self, factor: float) -> None:
        """Let the past weigh less, so that curves follow a tenant that changes."""
        self._distances.fade(factor)
        self._gaps.fade(factor)
        self._uses *= factor

    def check(self) -> None:
        """Raises AssertionError if the indexes disagree. O(sample)."""
        assert len(self._last) == len(self._by_hash) == len(self._order) <= self._sample_max
        assert sorted(turn for turn, _ in self._last.values()) == self._order
        assert all(value % HASHES < self._threshold for value in self._last)

    def _again(self, run: Sequence[int], at_s: float) -> None:
        """Blocks that were last used one right after the other, at one time: between two uses of
        each lie as many others, so they are one entry in both histograms."""
        if not run:
            return
        weight = len(run) / self.rate
        self._uses += weight
        turn, before_s = self._last[run[0]]
        place = bisect_left(self._order, turn)
        self._distances.add((len(self._order) - place) / self.rate, weight)
        self._gaps.add(at_s - before_s, weight)
        del self._order[place : place + len(run)]
        for value in run:
            self._turn += 1
            self._last[value] = (self._turn, at_s)
        self._order.extend(range(self._turn - len(run) + 1, self._turn + 1))

    def _first(self, value: int, at_s: float) -> None:
        """A block that is not in the sample yet; another may have to leave."""
        self._uses += 1 / self.rate
        self._turn += 1
        self._by_hash.add((value % HASHES, value))
        self._last[value] = (self._turn, at_s)
        self._order.append(self._turn)
        while len(self._last) > self._sample_max:
            self._lower()

    def _lower(self) -> None:
        """The highest hash leaves the sample, and nothing as high comes in again."""
        place, _ = self._by_hash[-1]
        self._threshold = place
        while self._by_hash and self._by_hash[-1][0] >= place:
            _, value = self._by_hash.pop()
            turn, _ = self._last.pop(value)
            del self._order[bisect_left(self._order, turn)]

    def _point(self, at: float, hits: float) -> Point:
        if self._uses <= 0:
            return Point(at, 0.0, 0.0)
        ratio = min(1.0, hits / self._uses)
        # Uses of one block are not independent: the blocks are what was drawn.
        error = math.sqrt(ratio * (1 - ratio) / max(1, len(self._last))) if self.rate < 1 else 0.0
        return Point(at, ratio, error)
