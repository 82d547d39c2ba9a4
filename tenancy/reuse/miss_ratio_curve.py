"""How often, how soon and at what distance a tenant comes back to the same prefixes.

From a bounded sample of the blocks its prompts are made of: a miss-ratio curve over cache size and
one over retention time, live. The sample is spatial (a block is in it or not, by its hash, so that
all its uses are), of fixed size: when it is full, the hash threshold falls and the blocks above it
leave. Distances are scaled up by the sampling rate (SHARDS: Waldspurger, Park, Garthwaite and
Ahmad, "Efficient MRC Construction with SHARDS", FAST 2015). Only misses are told from the sample:
all uses are counted, and what has not missed has hit, as a few blocks that all prompts begin with
may have most of the hits and no place in the sample. Deep in a prompt a block speaks for its
neighbours (`hash_units`): what came and hit of it is rounded to an eighth of the depth. It knows no
engine and no clock; `gateway.analytics.aggregates` tells it.
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
SAMPLE_MAX = 4_096
"""Units of one tenant that are followed: about 1.5 MB with their indexes."""

BLOCK_TOKENS = 16
BLOCK_BYTES = 4 * BLOCK_TOKENS
DEPTH_BLOCKS_MAX = 4_096
"""Blocks of one prompt, looked at: the beginning is where prefixes are."""

UNITS_PER_OCTAVE = 8
"""Units of each octave of depth. The first two octaves' worth of blocks are one each."""

BUCKETS_PER_OCTAVE = 4


class CurvePoint(Struct, frozen=True):
    """`hit_ratio` of block uses when the cache has room for so many blocks, or keeps for so many
    seconds (`at`).

    `error`: one standard error of the ratio, of the sample of blocks and of the prompts. `prompts`:
    as how many of one length those count that it is told from. `held_s`: for how many seconds it
    keeps what one use has used, as a mean. `is_early`: it has not been watched
    for as long as this keeps, so that the ratio is the least that it can be.
    """

    at: float
    hit_ratio: float
    error: float
    prompts: float
    held_s: float = 0.0
    is_early: bool = False


class HitRatioChange(Struct, frozen=True):
    """Of a hit ratio, and its standard error."""

    hit_ratio: float
    error: float


def bucket_of(value: float) -> int:
    """0 for what is below one; four for each octave above."""
    return 0 if value < 1 else 1 + int(BUCKETS_PER_OCTAVE * log2(value))


class LogHistogram:
    """Weighted counts by the logarithm of a value. Two buckets differ by a fifth."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: defaultdict[int, float] = defaultdict(float)

    def add(self, value: float, weight: float = 1.0) -> None:
        """O(1)."""
        self.counts[bucket_of(value)] += weight

    def merge(self, other: LogHistogram) -> None:
        """All that is in another. O(buckets)."""
        for place, count in other.counts.items():
            self.counts[place] += count

    def total(self) -> float:
        """The weight of everything."""
        return sum(self.counts.values())

    def above(self, value: float) -> tuple[float, float]:
        """The weight of everything above `value`, and its standard error: of the weight in the
        bucket that the value cuts, the part by the logarithm is taken."""
        own, part = bucket_of(value), 0.0
        if value >= 1:
            part = own - BUCKETS_PER_OCTAVE * log2(value)
        weight = self.counts.get(own, 0.0)
        found = sum(count for place, count in self.counts.items() if place > own)
        return found + part * weight, weight * math.sqrt(part * (1 - part))

    def quantile(self, part: float) -> float | None:
        """The value below which this part of the weight lies: its bucket's upper edge."""
        total, sum_so_far = self.total(), 0.0
        if total <= 0:
            return None
        for place in sorted(self.counts):
            sum_so_far += self.counts[place]
            if sum_so_far >= part * total:
                break
        return float(2 ** (place / BUCKETS_PER_OCTAVE))


def _unit_grid() -> tuple[list[int], list[int]]:
    """(of each unit the block in its middle, how many blocks it is), from a prompt's beginning."""
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
"""`UNIT_BLOCKS`: how many blocks each unit of a prompt speaks for."""
_CUMULATIVE_BLOCKS = [0, *accumulate(UNIT_BLOCKS)]
"""Of the first n units."""
_UNIT_ENDS = [BLOCK_BYTES * (middle + 1) for middle in _MIDDLES]
_UNIT_SLICES = [slice(*pair) for pair in pairwise([0, *_UNIT_ENDS])]

PARTIAL_BLOCK = 0.5
"""Of the block within which a prompt parts from others the cache finds a part, and this nothing."""

ROUNDING = 1 / UNITS_PER_OCTAVE / math.sqrt(12)
"""The standard error of a length that is rounded to whole units, over the length."""


def hash_units(data: bytes) -> list[int]:
    """Of a prompt's token ids, four bytes each: a hash of each unit and all that stands before it.

    A unit is a block, and behind the sixteenth a few that lie together: an eighth of the octave
    they are in. It is there if its middle is. O(tokens) at memory's speed, and O(log blocks).
    """
    found, value = [], 0
    for part in _UNIT_SLICES[: bisect_left(_MIDDLES, len(data) // BLOCK_BYTES)]:
        value = xxh3_64_intdigest(data[part], value)
        found.append(value)
    return found


class _Run:
    """Units that were last used one right after the other. Between two uses of each lie as many
    others, so they are one entry in both histograms. `turn`: of the first; `sizes`: in blocks."""

    __slots__ = ("at_s", "sizes", "turn", "units")

    def __init__(self, turn: int, at_s: float, units: list[int], sizes: list[int]) -> None:
        self.turn, self.at_s, self.units, self.sizes = turn, at_s, units, sizes


class ReuseSampler:
    """One tenant's reuse. Belongs to one thread; bounded by `sample_max` units."""

    def __init__(self, sample_max: int = SAMPLE_MAX, spans: Iterable[float] = ()) -> None:
        """`spans`: the retentions that will be asked for, in seconds."""
        self._sample_max = sample_max
        self._threshold = HASHES
        self._scale = 1.0  # blocks that a followed one speaks for
        self._runs: dict[int, _Run] = {}
        self._highest: list[tuple[int, int, int]] = []  # a heap of (-place, unit, its blocks)
        self._turns: list[int] = []  # of all runs; turns only grow, so they are sorted as they are
        self._blocks: list[int] = []  # of the same runs
        self._turn = 0
        self._distances = LogHistogram()
        self._returns = ReuseIntervals(spans)
        self._first_blocks = 0.0  # of all uses, those that miss in whatever room there is
        self._size = self._squares = 0  # blocks of what is followed, and of their squares

    @property
    def rate(self) -> float:
        """The part of all blocks that is followed. Never 0, whatever hashes somebody has found."""
        return max(1, self._threshold) / HASHES

    @property
    def sampled_blocks(self) -> int:
        """How many units are followed: most are a block."""
        return len(self._runs)

    def use(self, units: Sequence[int], at_s: float, blocks: Sequence[int] = UNIT_BLOCKS) -> None:
        """A prompt's units, from its beginning; how many blocks each is, at least as many. About
        0.1 us a unit, 1 us a run of sampled ones, 1 us a sampled one that is new."""
        total = (
            _CUMULATIVE_BLOCKS[len(units)] if blocks is UNIT_BLOCKS else sum(blocks[: len(units)])
        )
        if not total:
            return
        self._returns.prompt(total, at_s)
        if (limit := self._threshold) < HASHES:
            pairs = zip(units, blocks, strict=False)
            sampled = [pair for pair in pairs if pair[0] % HASHES < limit]
            units, blocks = [unit for unit, _ in sampled], [size for _, size in sampled]
        run = self._runs.get(units[0]) if units else None
        if run is None or run.units != units:
            self._use(units, at_s, blocks)
        elif run.turn == self._turns[-1]:  # the same once more, and nothing came between
            self._count(run, self._blocks[-1], self._blocks[-1], at_s)
        else:
            self._again(run, at_s, None)

    def by_blocks(self, sizes: Iterable[float]) -> list[CurvePoint]:
        """The hit ratio that a cache of each size would have had, by least recent use."""
        points = []
        for size in sizes:
            far, error = self._beyond(size)
            seen = self._returns.all()
            seen.missed = self._first_blocks + far
            points.append(self._point(size, seen, error))
        return points

    def between(self, size: float, other: float) -> HitRatioChange:
        """What a cache of the other size would hit beyond one of this size. Told from what lies
        between, so it is known better than either ratio."""
        (far, error), (other_far, other_error) = map(self._beyond, (size, other))
        seen, more = self._returns.all(), far - other_far
        if not seen.blocks:
            return HitRatioChange(0.0, 0.0)
        ratio = max(-1.0, min(1.0, more / seen.blocks))
        errors = [ROUNDING * ratio if self._squares > self._size else 0.0]
        errors += [one / seen.blocks for one in (error, other_error)]
        errors.append(_proportion_error(abs(ratio), seen.prompts))
        if self.rate < 1:
            errors.append(math.sqrt(abs(ratio) * (1 - abs(ratio)) / self._units()))
        return HitRatioChange(ratio, math.hypot(*errors))

    def by_seconds(self, spans: Iterable[float]) -> list[CurvePoint]:
        """The hit ratio that each of the retentions would have had, renewed by use, with room for
        all."""
        points = []
        for span in spans:
            seen, is_early = self._returns.within(span)
            points.append(self._point(span, seen, 0.0, is_early=is_early))
        return points

    def check(self) -> None:
        """Raises AssertionError if the indexes disagree. O(sample)."""
        runs = {run.turn: run for run in self._runs.values()}
        assert sorted(runs) == self._turns
        assert [sum(runs[turn].sizes) for turn in self._turns] == self._blocks
        units = [pair for run in runs.values() for pair in zip(run.units, run.sizes, strict=True)]
        assert sorted(units) == sorted((unit, size) for _, unit, size in self._highest)
        assert len(units) == len(self._runs) <= self._sample_max
        assert all(self._runs[unit] is run for run in runs.values() for unit in run.units)
        assert all(unit % HASHES < self._threshold for unit in self._runs)
        assert sum(self._blocks) == self._size
        assert sum(size * size for _, size in units) == self._squares

    def _use(self, units: Sequence[int], at_s: float, blocks: Sequence[int]) -> None:
        """What parts from earlier prompts, or goes on."""
        at, latest = 0, None
        while at < len(units):
            run = self._runs.get(units[at])
            if run is not None:
                run = self._shared(run, units[at:])
                at += len(run.units)
                latest = self._again(run, at_s, latest)
            else:
                if units[at] % HASHES < self._threshold:  # it may have fallen meanwhile
                    latest = self._first(units[at], blocks[at], at_s, latest)
                at += 1

    def _shared(self, run: _Run, units: Sequence[int]) -> _Run:
        """The part of a run that begins as these units do, as far as both go on alike."""
        if run.units[0] != units[0]:
            run = self._cut(run, run.units.index(units[0]))
        if units[: len(run.units)] != run.units:
            pairs = enumerate(zip(units, run.units, strict=False))
            self._cut(run, next((n for n, (one, other) in pairs if one != other), len(units)))
        return run

    def _cut(self, run: _Run, most: int) -> _Run:
        """Leave a run so many units; the others are the one that is returned."""
        rest = _Run(run.turn + most, run.at_s, run.units[most:], run.sizes[most:])
        del run.units[most:], run.sizes[most:]
        place = bisect_left(self._turns, run.turn)
        self._blocks[place] = sum(run.sizes)
        self._turns.insert(place + 1, rest.turn)
        self._blocks.insert(place + 1, sum(rest.sizes))
        self._runs.update(dict.fromkeys(rest.units, rest))
        return rest

    def _again(self, run: _Run, at_s: float, latest: _Run | None) -> _Run:
        """A run is used again. What this prompt used before it, it joins."""
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
        """One more use of a run, so many followed blocks after the last one."""
        scale = self._scale
        self._distances.counts[bucket_of(distance * scale)] += blocks * scale
        self._returns.again(blocks * scale, at_s - run.at_s)
        run.at_s = at_s

    def _first(self, unit: int, size: int, at_s: float, latest: _Run | None) -> _Run:
        """A unit that is not in the sample yet; another may have to leave."""
        self._first_blocks += size * self._scale
        self._returns.first(size * self._scale)
        if latest is None or not self._turns or self._turns[-1] != latest.turn:
            latest = _Run(self._turn, at_s, [], [])
            self._turns.append(latest.turn)
            self._blocks.append(0)
        latest.units.append(unit)
        latest.sizes.append(size)
        self._blocks[-1] += size
        self._turn += 1
        self._runs[unit] = latest
        heappush(self._highest, (-(unit % HASHES), unit, size))
        self._size += size
        self._squares += size * size
        while len(self._runs) > self._sample_max:
            self._lower()
        return latest

    def _lower(self) -> None:
        """The highest hash leaves the sample, and nothing as high comes in again."""
        self._threshold = -self._highest[0][0]
        self._scale = 1 / self.rate
        while self._highest and -self._highest[0][0] >= self._threshold:
            _, unit, size = heappop(self._highest)
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
            return CurvePoint(at, 0.0, 0.0, 0.0, is_early=is_early)
        errors = [_proportion_error(ratio, prompts), error / seen.blocks]
        if ratio < 1:
            errors.append(PARTIAL_BLOCK * prompts / seen.blocks)
        if self._squares > self._size:
            errors.append(ROUNDING * ratio)
        if self.rate < 1:
            errors.append((1 - ratio) * math.sqrt((1 - self.rate) / self._units()))
        held_s = seen.held_s / seen.blocks
        return CurvePoint(at, ratio, math.hypot(*errors), prompts, held_s, is_early)

    def _beyond(self, size: float) -> tuple[float, float]:
        """The weight of uses further apart than this, and its standard error: how far apart they
        are is itself told from the followed blocks in between, of which a small cache has few."""
        far, error = self._distances.above(size)
        if self.rate < 1:
            units = size * self.rate * self._size / max(1, self._squares)
            factor = 1 + 1 / math.sqrt(max(1.0, units))
            least, most = (self._distances.above(size * by)[0] for by in (factor, 1 / factor))
            error = math.hypot(error, (most - least) / 2)
        return far, error

    def _units(self) -> float:
        """As how many of one size those count that are followed. Uses of one are not independent:
        the units are what was drawn."""
        return max(1.0, self._size**2 / max(1, self._squares))


def _proportion_error(ratio: float, prompts: float) -> float:
    """The standard error of a ratio, of so many prompts; as if one more had hit and one more
    missed, so that a few that were all alike are no certainty (Agresti and Coull, "Approximate is
    better than exact", 1998)."""
    likely = (ratio * prompts + 1) / (prompts + 2)
    return math.sqrt(likely * (1 - likely) / (prompts + 2))
