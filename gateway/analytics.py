"""What operators look at: hits, misses and why, time to first token, reuse and breaks, by tenant.

Told of each answer once, when it is over; holds counts, digests and samples, never words. Bounded:
`tenants_max` tenants are followed closely, those that were active last; a minute of history is a
few numbers. Clocks are given. `answer` tells it, `handlers.analytics` asks.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xxhash
from msgspec import Struct
from msgspec.structs import asdict

from gateway.dialects.canonical import Boundary, UsageRecord
from tenancy.advice import advise_classes, advise_sizes
from tenancy.pricing import RateCard
from tenancy.reuse import Histogram, ReuseSampler
from tenancy.volatility import Mark, Volatility

MINUTES = 120
PREFIXES_MAX = 2_048
SAMPLE_MAX = 1_024
SEEN_MAX = 4_096
TOKENS_MAX = 65_536
"""Of one prompt, looked at: the beginning is where prefixes are."""


class Facts(Struct, frozen=True):
    """One answer that is over."""

    tenant: str
    record: UsageRecord
    tokens: Sequence[int]
    boundaries: Sequence[Boundary]
    first_token_s: float | None
    missed: str
    ending: str


class Minute:
    """Sums of one minute."""

    __slots__ = ("fresh", "number", "out", "read", "requests", "write")

    def __init__(self, number: int) -> None:
        self.number = number
        self.requests = self.read = self.write = self.fresh = self.out = 0

    def add(self, record: UsageRecord) -> None:
        self.requests += 1
        self.read += record.read_tokens()
        self.write += record.write_tokens()
        self.fresh += record.fresh
        self.out += record.out

    def row(self) -> list[int]:
        """[minute, requests, read, write, fresh, out]."""
        return [self.number, self.requests, self.read, self.write, self.fresh, self.out]


class Times:
    """Times to first token. Quantiles to a fifth, from buckets."""

    def __init__(self) -> None:
        self._ms = Histogram()
        self.count = 0

    def add(self, seconds: float) -> None:
        self._ms.add(seconds * 1000, 1.0)
        self.count += 1

    def quantiles(self) -> dict[str, float | None]:
        """Milliseconds; None before there is one."""
        return {"count": self.count, **{f"p{q}": self._ms.quantile(q / 100) for q in (50, 95, 99)}}


class TenantView:
    """What is known of one tenant."""

    def __init__(self) -> None:
        self.total = Minute(0)
        self.physical = 0
        self.prompt = 0
        self.owed = 0
        self.minutes: deque[Minute] = deque(maxlen=MINUTES)
        self.read_classes: Counter[str] = Counter()
        self.write_classes: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.endings: Counter[str] = Counter()
        self.hit_times, self.miss_times = Times(), Times()
        self.prefixes: OrderedDict[bytes, list[Any]] = OrderedDict()
        self.reuse = ReuseSampler(SAMPLE_MAX)
        self.volatility = Volatility(SEEN_MAX)

    def add(self, facts: Facts, minute: int) -> None:
        """One more answer: its counts. O(1)."""
        record = facts.record
        self.total.add(record)
        _minute(self.minutes, minute).add(record)
        self.prompt += record.total_in
        self.physical += record.physical_cached
        self.owed += record.recomputed_promised
        self.read_classes.update(record.read)
        self.write_classes.update(record.write)
        self.endings[facts.ending] += 1
        if facts.missed:
            self.misses[facts.missed] += 1
        if facts.first_token_s is not None:
            times = self.hit_times if record.physical_cached else self.miss_times
            times.add(facts.first_token_s)

    def prompt_of(self, facts: Facts, at_s: float) -> None:
        """Its prompt's blocks and boundaries. O(tokens), about 0.5 us a block."""
        hashes, marks = digested(facts.tokens, facts.boundaries)
        self.reuse.use(hashes, at_s)
        self.volatility.note(marks, facts.record.total_in)
        found = facts.record.physical_cached
        for mark in marks:
            row = self.prefixes.get(mark.digest)
            if row is None:
                row = self.prefixes[mark.digest] = [mark.path, mark.tokens, 0, 0]
            row[2] += 1
            row[3] += mark.tokens <= found
            self.prefixes.move_to_end(mark.digest)
        while len(self.prefixes) > PREFIXES_MAX:
            self.prefixes.popitem(last=False)

    def summary(self) -> dict[str, Any]:
        """A line of a table."""
        total = self.total
        return {
            "requests": total.requests,
            "prompt_tokens": self.prompt,
            "read_tokens": total.read,
            "write_tokens": total.write,
            "fresh_tokens": total.fresh,
            "output_tokens": total.out,
            "physical_cached_tokens": self.physical,
            "hit_ratio": _ratio(total.read, self.prompt),
            "physical_hit_ratio": _ratio(self.physical, self.prompt),
            "recomputed_promised_tokens": self.owed,
        }


class Analytics:
    """All tenants of one gateway. Belongs to one thread."""

    def __init__(
        self, clock: Callable[[], float], wall: Callable[[], int], tenants_max: int
    ) -> None:
        """`wall`: milliseconds since the epoch, for minutes that people read."""
        self._clock = clock
        self._wall = wall
        self._tenants_max = tenants_max
        self._tenants: OrderedDict[str, TenantView] = OrderedDict()
        self._all = TenantView()

    def note(self, facts: Facts) -> None:
        """An answer is over. O(tokens of its prompt)."""
        view = self._tenants.setdefault(facts.tenant, TenantView())
        self._tenants.move_to_end(facts.tenant)
        while len(self._tenants) > self._tenants_max:
            self._tenants.popitem(last=False)
        minute = self._wall() // 60_000
        for one in (view, self._all):
            one.add(facts, minute)
        view.prompt_of(facts, self._clock())

    def overview(self) -> dict[str, Any]:
        """Everything together, and a line per tenant."""
        return {
            "total": self._all.summary(),
            "minutes": [minute.row() for minute in self._all.minutes],
            "first_token_ms": _times(self._all),
            "misses": dict(self._all.misses),
            "endings": dict(self._all.endings),
            "tenants": [
                {"tenant": name, **view.summary()} for name, view in reversed(self._tenants.items())
            ],
        }

    def tenant(
        self,
        name: str,
        card: RateCard,
        classes: Mapping[str, float],
        block_size: int,
        sizes: Sequence[int],
    ) -> dict[str, Any] | None:
        """One tenant in full, with advice at these prices; None if it was not seen lately."""
        view = self._tenants.get(name)
        if view is None:
            return None
        rows = sorted(view.prefixes.items(), key=lambda item: -item[1][1] * item[1][3])[:20]
        return {
            "tenant": name,
            "total": view.summary(),
            "minutes": [minute.row() for minute in view.minutes],
            "first_token_ms": _times(view),
            "read_by_class": dict(view.read_classes),
            "write_by_class": dict(view.write_classes),
            "misses": dict(view.misses),
            "endings": dict(view.endings),
            "top_prefixes": [
                {"id": digest.hex(), "path": path, "tokens": tokens, "uses": uses, "hits": hits}
                for digest, (path, tokens, uses, hits) in rows
            ],
            "breaks": [
                {**asdict(one), "cost_pico": one.tokens * (card.input - card.cache_read)}
                for one in view.volatility.breaks()
            ],
            "retention_advice": [asdict(one) for one in advise_classes(view.reuse, classes, card)],
            "size_advice": [
                {**asdict(one), "tokens": one.blocks * block_size}
                for one in advise_sizes(view.reuse, sizes, card)
            ],
            "sampled_blocks": view.reuse.sampled_blocks,
            "sampling_rate": view.reuse.rate,
            "rate_card": card.rate_card_id,
        }


def digested(
    tokens: Sequence[int], boundaries: Sequence[Boundary], block_size: int = 16
) -> tuple[list[int], list[Mark]]:
    """(a chained hash of each whole block, a mark of each boundary) of a prompt's beginning.

    The hashes sample and group; they never prove equality.
    """
    data = memoryview(array("I", tokens[:TOKENS_MAX])).cast("B")
    running, at = xxhash.xxh3_64(), 0
    hashes: list[int] = []
    marks: list[Mark] = []
    size = 4 * block_size
    ends = iter(boundaries)
    mark = next(ends, None)
    for start in range(0, len(data), size):
        end = min(start + size, len(data))
        while mark is not None and 4 * mark.tokens <= end:
            running.update(data[at : max(at, 4 * mark.tokens)])
            at = max(at, 4 * mark.tokens)
            marks.append(Mark(mark.path, mark.tokens, running.digest()))
            mark = next(ends, None)
        running.update(data[at:end])
        at = end
        if end - start == size:
            hashes.append(running.intdigest())
    return hashes, marks


def _minute(minutes: deque[Minute], number: int) -> Minute:
    if not minutes or minutes[-1].number < number:
        minutes.append(Minute(number))
    return minutes[-1]


def _times(view: TenantView) -> dict[str, Any]:
    return {"hit": view.hit_times.quantiles(), "miss": view.miss_times.quantiles()}


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
