"""Miss-ratio curves of one tenant's prompts over cache size and over retention, maintained live.

They come from a bounded spatial sample of prompt blocks: a block's hash decides whether it is in
the sample, so all uses of a block are in it or none. When the sample is full, the hash threshold
falls and blocks above it leave. Reuse distances are scaled up by the sampling rate (SHARDS:
Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC Construction with SHARDS", FAST 2015). Only
misses are estimated from the sample: all uses are counted and the rest are hits, because a few
blocks at the beginning of all prompts may have most of the hits and no place in the sample. Deep in
a prompt one block represents its neighbours (`hash_units`), so counts there are rounded to an
eighth of the depth. The module knows no engine and no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from math import log2

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from tenancy.reuse.reuse_intervals import BlockUses, ReuseIntervals

HASH_BITS = 24
HASHES = 1 << HASH_BITS
"""The range of a sampling hash."""
SAMPLE_MAX = 4_096
"""Units of one tenant in the sample: about 1.5 MB with their indexes."""

BLOCK_TOKENS = 16
BLOCK_BYTES = 4 * BLOCK_TOKENS
DEPTH_BLOCKS_MAX = 4_096
"""Blocks of a prompt that are considered, from its beginning, where shared prefixes are."""

UNITS_PER_OCTAVE = 8
"""Units per octave of depth. In the first two octaves' worth, each block is a unit."""

BUCKETS_PER_OCTAVE = 4
"""Histogram buckets per doubling of the value."""


class CurvePoint(Struct, frozen=True):
    """`hit_ratio` of block uses for a cache of `at` blocks, or a retention of `at` seconds."""

    at: float
    hit_ratio: float
    error: float
    """One standard error of the ratio, from the sample of blocks and of prompts."""
    prompts: float
    """The effective number of equally long prompts behind it."""
    held_s: float
    """The mean seconds for which a use keeps its blocks."""
    is_early: bool
    """The retention exceeds the time observed, so the ratio is a lower bound."""


class HitRatioChange(Struct, frozen=True):
    """A difference of hit ratios, and its standard error."""

    hit_ratio: float
    error: float


def bucket_of(value: float) -> int:
    """Return the bucket of a value: 0 below one, then four per octave."""
    return 0 if value < 1 else 1 + int(BUCKETS_PER_OCTAVE * log2(value))


class LogHistogram:
    """Weighted counts in logarithmic buckets; neighbouring buckets differ by a fifth."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: defaultdict[int, float] = defaultdict(float)

    def add(self, value: float, weight: float = 1.0) -> None:
        """Add a value. O(1)."""
        self.counts[bucket_of(value)] += weight

    def merge(self, other: LogHistogram) -> None:
        """Add all counts of another histogram. O(buckets)."""
        for place, count in other.counts.items():
            self.counts[place] += count

    def total(self) -> float:
        """Return the total weight."""
        return sum(self.counts.values())

    def above(self, value: float) -> tuple[float, float]:
        """Return the weight above `value`, and its standard error.

        Of the bucket that contains the value, the part above it counts, by the logarithm.
        """
        own, part = bucket_of(value), 0.0
        if value >= 1:
            part = own - BUCKETS_PER_OCTAVE * log2(value)
        weight = self.counts.get(own, 0.0)
        found = sum(count for place, count in self.counts.items() if place > own)
        return found + part * weight, weight * math.sqrt(part * (1 - part))

    def quantile(self, part: float) -> float | None:
        """Return the value below which this part of the weight lies: a bucket's upper edge."""
        total, sum_so_far = self.total(), 0.0
        if total <= 0:
            return None
        for place in sorted(self.counts):
            sum_so_far += self.counts[place]
            if sum_so_far >= part * total:
                break
        return float(2 ** (place / BUCKETS_PER_OCTAVE))


def _unit_grid() -> tuple[list[int], list[int]]:
    """Return, for each unit, the block in its middle and its number of blocks."""
    middles, sizes = list(range(2 * UNITS_PER_OCTAVE)), [1] * (2 * UNITS_PER_OCTAVE)
    start, size = 2 * UNITS_PER_OCTAVE, 2
    while start < DEPTH_BLOCKS_MAX:
        for _ in range(UNITS_PER_OCTAVE):
            middles.append(start + size // 2)
            sizes.append(size)
            start += size
        size *= 2
    return middles, sizes


_MIDDLES, UNIT_BLOCKS = _unit_grid()
"""How many blocks each unit of a prompt represents."""
_CUMULATIVE_BLOCKS = [0, *accumulate(UNIT_BLOCKS)]
"""Blocks of the first n units."""
_UNIT_ENDS = [BLOCK_BYTES * (middle + 1) for middle in _MIDDLES]
"""The end of each unit's middle block, in bytes of token ids."""
_UNIT_SLICES = [slice(*pair) for pair in pairwise([0, *_UNIT_ENDS])]

PARTIAL_BLOCK = 0.5
"""Blocks by which the estimate errs where prompts diverge within a block: half of one.

The cache finds the tokens before the divergence; the sample counts whole blocks only.
"""

ROUNDING = 1 / UNITS_PER_OCTAVE / math.sqrt(12)
"""The relative standard error of a length that is rounded to whole units."""


def hash_units(data: bytes) -> list[int]:
    """Return a hash of each unit of a prompt, which covers everything before the unit's middle.

    `data`: token ids, four bytes each. A unit is a block; behind the sixteenth block it is several
    adjacent ones, an eighth of their octave. A unit is present if its middle block is. O(tokens) at
    memory speed, and O(log blocks).
    """
    found, value = [], 0
    for part in _UNIT_SLICES[: bisect_left(_MIDDLES, len(data) // BLOCK_BYTES)]:
        value = xxh3_64_intdigest(data[part], value)
        found.append(value)
    return found


class _Run:
    """Units that were last used consecutively.

    Between two uses each has the same number of other units, so a run is one entry in both
    histograms. `turn`: the turn of its first unit. `sizes`: blocks of each unit.
    """

    __slots__ = ("at_s", "sizes", "turn", "units")

    def __init__(self, turn: int, at_s: float, units: list[int], sizes: list[int]) -> None:
        self.turn, self.at_s, self.units, self.sizes = turn, at_s, units, sizes


class ReuseSampler:
    """The reuse statistics of one tenant, bounded by `sample_max` units. Belongs to one thread."""

    def __init__(self, sample_max: int = SAMPLE_MAX, spans: Iterable[float] = ()) -> None:
        """Start empty. `spans`: the retentions, in seconds, that `by_seconds` will be asked for."""
        self._sample_max = sample_max
        self._threshold = HASHES
        self._scale = 1.0  # blocks that a sampled one represents
        self._runs: dict[int, _Run] = {}
        self._by_hash: list[tuple[int, int, int]] = []  # a heap of (-hash, unit, its blocks)
        self._turns: list[int] = []  # of all runs, ascending
        self._blocks: list[int] = []  # blocks of the same runs
        self._turn = 0
        self._distances = LogHistogram()
        self._intervals = ReuseIntervals(spans)
        self._first_blocks = 0.0  # first uses, which miss in any cache
        self._size = self._squares = 0  # blocks in the sample, and the sum of their squares

    @property
    def rate(self) -> float:
        """The fraction of all blocks in the sample. Never 0, even for adversarial hashes."""
        return max(1, self._threshold) / HASHES

    @property
    def sampled_blocks(self) -> int:
        """The number of sampled units, most of which are one block."""
        return len(self._runs)

    def use(self, units: Sequence[int], at_s: float, blocks: Sequence[int] = UNIT_BLOCKS) -> None:
        """Count a prompt, given its units from the beginning and how many blocks each has.

        `blocks` is at least as long as `units`. About 0.1 us a unit, 1 us a run of sampled units,
        and 1 us a new sampled unit.
        """
        total = (
            _CUMULATIVE_BLOCKS[len(units)] if blocks is UNIT_BLOCKS else sum(blocks[: len(units)])
        )
        if not total:
            return
        self._intervals.add_prompt(total, at_s)
        if (limit := self._threshold) < HASHES:
            pairs = zip(units, blocks, strict=False)
            sampled = [pair for pair in pairs if pair[0] % HASHES < limit]
            units, blocks = [unit for unit, _ in sampled], [size for _, size in sampled]
        run = self._runs.get(units[0]) if units else None
        if run is None or run.units != units:
            self._use(units, at_s, blocks)
        elif run.turn == self._turns[-1]:  # the latest prompt repeated
            self._count(run, self._blocks[-1], self._blocks[-1], at_s)
        else:
            self._count_reuse(run, at_s, None)

    def by_blocks(self, sizes: Iterable[float]) -> list[CurvePoint]:
        """Return the hit ratio that an LRU cache of each size, in blocks, would have had."""
        points = []
        for size in sizes:
            weight, error = self._weight_beyond(size)
            seen = self._intervals.total()
            seen.missed = self._first_blocks + weight
            points.append(self._point(size, seen, error))
        return points

    def between(self, size: float, other: float) -> HitRatioChange:
        """Return how much more a cache of size `other` would hit than one of `size`.

        It uses only reuse distances between the two, so its error is smaller than that of either
        ratio.
        """
        (weight, error), (other_weight, other_error) = map(self._weight_beyond, (size, other))
        seen, more = self._intervals.total(), weight - other_weight
        if not seen.blocks:
            return HitRatioChange(0.0, 0.0)
        ratio = max(-1.0, min(1.0, more / seen.blocks))
        errors = [ROUNDING * ratio if self._squares > self._size else 0.0]
        errors += [one / seen.blocks for one in (error, other_error)]
        errors.append(_proportion_error(abs(ratio), seen.prompts))
        if self.rate < 1:
            errors.append(math.sqrt(abs(ratio) * (1 - abs(ratio)) / self._effective_units()))
        return HitRatioChange(ratio, math.hypot(*errors))

    def by_seconds(self, spans: Iterable[float]) -> list[CurvePoint]:
        """Return the hit ratio of each retention, renewed by use, in an unbounded cache."""
        points = []
        for span in spans:
            seen, is_early = self._intervals.kept_within(span)
            points.append(self._point(span, seen, 0.0, is_early=is_early))
        return points

    def check(self) -> None:
        """Raise AssertionError if the indexes disagree. O(sample)."""
        runs = {run.turn: run for run in self._runs.values()}
        assert sorted(runs) == self._turns
        assert [sum(runs[turn].sizes) for turn in self._turns] == self._blocks
        units = [pair for run in runs.values() for pair in zip(run.units, run.sizes, strict=True)]
        assert sorted(units) == sorted((unit, size) for _, unit, size in self._by_hash)
        assert len(units) == len(self._runs) <= self._sample_max
        assert all(self._runs[unit] is run for run in runs.values() for unit in run.units)
        assert all(unit % HASHES < self._threshold for unit in self._runs)
        assert sum(self._blocks) == self._size
        assert sum(size * size for _, size in units) == self._squares

    def _use(self, units: Sequence[int], at_s: float, blocks: Sequence[int]) -> None:
        """Count units that diverge from earlier prompts or extend them."""
        at, latest = 0, None
        while at < len(units):
            run = self._runs.get(units[at])
            if run is not None:
                run = self._split_at_divergence(run, units[at:])
                at += len(run.units)
                latest = self._count_reuse(run, at_s, latest)
            else:
                if units[at] % HASHES < self._threshold:  # the threshold may have fallen
                    latest = self._add_unit(units[at], blocks[at], at_s, latest)
                at += 1

    def _split_at_divergence(self, run: _Run, units: Sequence[int]) -> _Run:
        """Split a run so that it contains only the units it shares with these; return it."""
        if run.units[0] != units[0]:
            run = self._split_run(run, run.units.index(units[0]))
        if units[: len(run.units)] != run.units:
            pairs = enumerate(zip(units, run.units, strict=False))
            self._split_run(run, next((n for n, (one, other) in pairs if one != other), len(units)))
        return run

    def _split_run(self, run: _Run, most: int) -> _Run:
        """Keep the first `most` units in the run; return a new run of the others."""
        rest = _Run(run.turn + most, run.at_s, run.units[most:], run.sizes[most:])
        del run.units[most:], run.sizes[most:]
        place = bisect_left(self._turns, run.turn)
        self._blocks[place] = sum(run.sizes)
        self._turns.insert(place + 1, rest.turn)
        self._blocks.insert(place + 1, sum(rest.sizes))
        self._runs.update(dict.fromkeys(rest.units, rest))
        return rest

    def _count_reuse(self, run: _Run, at_s: float, latest: _Run | None) -> _Run:
        """Count another use of a run, and join it to what this prompt used just before."""
        turns, sizes = self._turns, self._blocks
        place = bisect_left(turns, run.turn)
        blocks = sizes[place]
        self._count(run, blocks, sum(sizes[place:]), at_s)
        del turns[place], sizes[place]
        if latest is not None and turns and turns[-1] == latest.turn:
            latest.units += run.units
            latest.sizes += run.sizes
            sizes[-1] += blocks
            self._runs.update(dict.fromkeys(run.units, latest))
        else:
            latest, run.turn = run, self._turn
            turns.append(run.turn)
            sizes.append(blocks)
        self._turn += len(run.units)
        return latest

    def _count(self, run: _Run, blocks: int, distance: int, at_s: float) -> None:
        """Count a use of a run at this distance, in sampled blocks, from its last use."""
        scale = self._scale
        self._distances.counts[bucket_of(distance * scale)] += blocks * scale
        self._intervals.count_reuse(blocks * scale, at_s - run.at_s)
        run.at_s = at_s

    def _add_unit(self, unit: int, size: int, at_s: float, latest: _Run | None) -> _Run:
        """Add a unit to the sample; another may have to leave."""
        self._first_blocks += size * self._scale
        self._intervals.count_first(size * self._scale)
        if latest is None or not self._turns or self._turns[-1] != latest.turn:
            latest = _Run(self._turn, at_s, [], [])
            self._turns.append(latest.turn)
            self._blocks.append(0)
        latest.units.append(unit)
        latest.sizes.append(size)
        self._blocks[-1] += size
        self._turn += 1
        self._runs[unit] = latest
        heappush(self._by_hash, (-(unit % HASHES), unit, size))
        self._size += size
        self._squares += size * size
        while len(self._runs) > self._sample_max:
            self._lower_threshold()
        return latest

    def _lower_threshold(self) -> None:
        """Remove the highest hash from the sample, and lower the threshold to it."""
        self._threshold = -self._by_hash[0][0]
        self._scale = 1 / self.rate
        while self._by_hash and -self._by_hash[0][0] >= self._threshold:
            _, unit, size = heappop(self._by_hash)
            run = self._runs.pop(unit)
            at, place = run.units.index(unit), bisect_left(self._turns, run.turn)
            del run.units[at], run.sizes[at]
            self._blocks[place] -= size
            if not run.units:
                del self._turns[place], self._blocks[place]
            self._size -= size
            self._squares -= size * size

    def _point(
        self, at: float, seen: BlockUses, error: float, *, is_early: bool = False
    ) -> CurvePoint:
        ratio, prompts = seen.hit_ratio, seen.prompts
        if not prompts:
            return CurvePoint(at, 0.0, 0.0, 0.0, 0.0, is_early)
        errors = [_proportion_error(ratio, prompts), error / seen.blocks]
        if ratio < 1:
            errors.append(PARTIAL_BLOCK * prompts / seen.blocks)
        if self._squares > self._size:
            errors.append(ROUNDING * ratio)
        if self.rate < 1:
            errors.append((1 - ratio) * math.sqrt((1 - self.rate) / self._effective_units()))
        held_s = seen.held_s / seen.blocks
        return CurvePoint(at, ratio, math.hypot(*errors), prompts, held_s, is_early)

    def _weight_beyond(self, size: float) -> tuple[float, float]:
        """Return the weight of uses further apart than `size`, and its standard error.

        Distances are estimated from the sampled blocks between two uses, and a small cache has few
        of them.
        """
        weight, error = self._distances.above(size)
        if self.rate < 1:
            units = size * self.rate * self._size / max(1, self._squares)
            factor = 1 + 1 / math.sqrt(max(1.0, units))
            least, most = (self._distances.above(size * by)[0] for by in (factor, 1 / factor))
            error = math.hypot(error, (most - least) / 2)
        return weight, error

    def _effective_units(self) -> float:
        """Return the effective number of equally large sampled units.

        Uses of one unit are not independent, so the units are the sample.
        """
        return max(1.0, self._size**2 / max(1, self._squares))


def _proportion_error(ratio: float, prompts: float) -> float:
    """Return the standard error of a ratio over this many prompts.

    One hit and one miss are added, so that a few equal prompts are no certainty (Agresti and Coull,
    "Approximate is better than exact", 1998).
    """
    likely = (ratio * prompts + 1) / (prompts + 2)
    return math.sqrt(likely * (1 - likely) / (prompts + 2))
