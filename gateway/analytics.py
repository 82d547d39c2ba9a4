"""What operators look at: hits, misses and why, time to first token, reuse and breaks, by tenant.

Told of each answer once, when it is over; holds counts, digests and samples, never words. Bounded:
`tenants_max` tenants are followed closely, those that were active last, and `COUNTED_MAX` counted;
a minute of history is a few numbers. Clocks are given. `answer` tells it, `handlers.analytics`
asks.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import xxhash
from msgspec import Struct
from msgspec.structs import asdict

from gateway.dialects.canonical import Boundary, UsageRecord
from tenancy.advice import advise_classes, advise_sizes
from tenancy.pricing import RateCard
from tenancy.reuse import Histogram, ReuseSampler
from tenancy.volatility import Mark, Volatility

T = TypeVar("T")

MINUTES = 120
COUNTED_MAX = 2_000
"""Tenants with sums of their own, at most about 30 kB each."""

PREFIXES_MAX = 2_048
PATH_SIGNS_MAX = 120
SAMPLE_MAX = 1_024
SEEN_MAX = 4_096
TOGETHER = 32
"""How many answers wait to be added up at most; their prompts have `TOKENS_MAX` tokens at most."""
TOKENS_MAX = 65_536
"""Of one prompt, looked at: the beginning is where prefixes are."""


PROMPTS_BYTES_MAX = 2 * 2**20


class Facts(Struct, frozen=True):
    """One answer that is over. `missed_tokens`: of the longest prefix that was written before, what
    was not read, because of `missed`."""

    tenant: str
    record: UsageRecord
    tokens: Sequence[int]
    boundaries: Sequence[Boundary]
    first_token_s: float | None
    missed: str
    ending: str
    missed_tokens: int = 0


class Minute:
    """Sums of one minute."""

    __slots__ = ("fresh", "number", "out", "read", "requests", "write")

    def __init__(self, number: int) -> None:
        self.number = number
        self.requests = self.read = self.write = self.fresh = self.out = 0

    def add(self, requests: int, read: int, write: int, fresh: int, out: int) -> None:
        self.requests += requests
        self.read += read
        self.write += write
        self.fresh += fresh
        self.out += out

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

    def merge(self, others: Times) -> None:
        """More of them. O(buckets)."""
        self._ms.merge(others._ms)
        self.count += others.count

    def quantiles(self) -> dict[str, float | None]:
        """Milliseconds; None before there is one."""
        return {"count": self.count, **{f"p{q}": self._ms.quantile(q / 100) for q in (50, 95, 99)}}


class Sums:
    """What some answers of one minute come to, added up once for all who count them."""

    def __init__(self, many: Sequence[Facts]) -> None:
        """O(answers)."""
        records = [facts.record for facts in many]
        self.counts = (
            len(records),
            sum([record.read_tokens() for record in records]),
            sum([record.write_tokens() for record in records]),
            sum([record.fresh for record in records]),
            sum([record.out for record in records]),
        )
        self.prompt = sum([record.total_in for record in records])
        self.physical = sum([record.physical_cached for record in records])
        self.owed = sum([record.recomputed_promised for record in records])
        self.endings = Counter([facts.ending for facts in many])
        self.read_classes = _by_class([record.read for record in records if record.read])
        self.write_classes = _by_class([record.write for record in records if record.write])
        self.misses: defaultdict[str, int] = defaultdict(int)
        self.missed_tokens: defaultdict[str, int] = defaultdict(int)
        self.hit_times, self.miss_times = Times(), Times()
        for facts in many:
            if facts.missed:
                self.misses[facts.missed] += 1
                if facts.missed_tokens:
                    self.missed_tokens[facts.missed] += facts.missed_tokens
            if facts.first_token_s is not None:
                times = self.hit_times if facts.record.physical_cached else self.miss_times
                times.add(facts.first_token_s)


class TenantView:
    """What is counted of one tenant."""

    def __init__(self) -> None:
        self.total = Minute(0)
        self.physical = 0
        self.prompt = 0
        self.owed = 0
        self.minutes: deque[Minute] = deque(maxlen=MINUTES)
        self.read_classes: Counter[str] = Counter()
        self.write_classes: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.missed_tokens: Counter[str] = Counter()
        self.endings: Counter[str] = Counter()
        self.hit_times, self.miss_times = Times(), Times()

    def add(self, minute: int, sums: Sums) -> None:
        """More answers of one minute. O(1)."""
        self.total.add(*sums.counts)
        _minute(self.minutes, minute).add(*sums.counts)
        self.prompt += sums.prompt
        self.physical += sums.physical
        self.owed += sums.owed
        self.endings.update(sums.endings)
        self.read_classes.update(sums.read_classes)
        self.write_classes.update(sums.write_classes)
        self.misses.update(sums.misses)
        self.missed_tokens.update(sums.missed_tokens)
        self.hit_times.merge(sums.hit_times)
        self.miss_times.merge(sums.miss_times)

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


class Prompts:
    """What is sampled of one tenant's prompts: at most `PROMPTS_BYTES_MAX`, measured when full."""

    def __init__(self) -> None:
        self.prefixes: OrderedDict[bytes, list[Any]] = OrderedDict()
        self.reuse = ReuseSampler(SAMPLE_MAX)
        self.volatility = Volatility(SEEN_MAX)
        self.count = 0

    def add(self, facts: Facts, at_s: float) -> None:
        """One more: its blocks and boundaries. O(tokens), about 0.5 us a block."""
        hashes, marks = digested(facts.tokens, facts.boundaries)
        self.count += 1
        self.reuse.use(hashes, at_s)
        self.volatility.note(marks, facts.record.total_in)
        found = facts.record.physical_cached
        for mark in marks:
            row = self.prefixes.get(mark.digest)
            if row is None:
                row = self.prefixes[mark.digest] = [mark.path[:PATH_SIGNS_MAX], mark.tokens, 0, 0]
            row[2] += 1
            row[3] += mark.tokens <= found
            self.prefixes.move_to_end(mark.digest)
        while len(self.prefixes) > PREFIXES_MAX:
            self.prefixes.popitem(last=False)


class Analytics:
    """All tenants of one gateway. Belongs to one thread."""

    def __init__(
        self, clock: Callable[[], float], wall: Callable[[], int], tenants_max: int
    ) -> None:
        """`wall`: milliseconds since the epoch, for minutes that people read. `tenants_max`: whose
        prompts are sampled."""
        self._clock = clock
        self._wall = wall
        self._tenants_max = tenants_max
        self._tenants: OrderedDict[str, TenantView] = OrderedDict()
        self._prompts: OrderedDict[str, Prompts] = OrderedDict()
        self._all = TenantView()
        self._waiting: list[tuple[int, float, Facts]] = []
        self._waiting_tokens = 0

    def note(self, facts: Facts) -> None:
        """An answer is over. O(1), and now and then O(tokens of those before): a few dozen answers
        are added up together, and those that wait whenever somebody asks."""
        self._waiting.append((self._wall() // 60_000, self._clock(), facts))
        self._waiting_tokens += len(facts.tokens)
        if len(self._waiting) >= TOGETHER or self._waiting_tokens >= TOKENS_MAX:
            self._fold()

    def _fold(self) -> None:
        groups: dict[tuple[int, str], list[Facts]] = {}
        for minute, at_s, facts in self._waiting:
            groups.setdefault((minute, facts.tenant), []).append(facts)
            prompts = _latest(self._prompts, facts.tenant, Prompts, self._tenants_max)
            prompts.add(facts, at_s)
        for (minute, tenant), many in groups.items():
            sums = Sums(many)
            self._all.add(minute, sums)
            _latest(self._tenants, tenant, TenantView, COUNTED_MAX).add(minute, sums)
        self._waiting, self._waiting_tokens = [], 0

    def missed_tokens(self, name: str, cause: str) -> int:
        """Tokens of a tenant's prefixes that had to be computed again because of this."""
        self._fold()
        view = self._tenants.get(name)
        return 0 if view is None else view.missed_tokens[cause]

    def overview(self) -> dict[str, Any]:
        """Everything together, and a line per tenant."""
        self._fold()
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
        """One tenant in full, with advice at these prices; None if it was not seen lately. Of one
        that is only counted there is no advice."""
        self._fold()
        view = self._tenants.get(name)
        if view is None:
            return None
        prompts = self._prompts.get(name) or Prompts()
        rows = sorted(prompts.prefixes.items(), key=lambda item: -item[1][1] * item[1][3])[:20]
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
            "recomputed": [
                {
                    "cause": cause,
                    "tokens": tokens,
                    "cost_pico": tokens * max(0, card.input - card.cache_read),
                }
                for cause, tokens in view.missed_tokens.most_common()
            ],
            "breaks": [
                {**asdict(one), "cost_pico": one.tokens * (card.input - card.cache_read)}
                for one in prompts.volatility.breaks()
            ],
            "retention_advice": [
                asdict(one) for one in advise_classes(prompts.reuse, prompts.count, classes, card)
            ],
            "size_advice": [
                {**asdict(one), "tokens": one.blocks * block_size}
                for one in advise_sizes(prompts.reuse, prompts.count, sizes, card)
            ],
            "sampled_prompts": prompts.count,
            "sampled_blocks": prompts.reuse.sampled_blocks,
            "sampling_rate": prompts.reuse.rate,
            "rate_card": card.rate_card_id,
        }


def digested(
    tokens: Sequence[int], boundaries: Sequence[Boundary], block_size: int = 16
) -> tuple[list[int], list[Mark]]:
    """(a chained hash of each whole block, a mark of each boundary) of a prompt's beginning.

    The hashes sample and group; they never prove equality.
    """
    data = memoryview(array("I", tokens[:TOKENS_MAX])).cast("B")
    whole, size = len(data), 4 * block_size
    hashes: list[int] = []
    marks: list[Mark] = []
    running = xxhash.xxh3_64()
    for end in range(size, whole + 1, size):
        running.update(data[end - size : end])
        hashes.append(running.intdigest())
    running, at = xxhash.xxh3_64(), 0
    for mark in boundaries:
        end = 4 * mark.tokens
        if end > whole:
            break
        if end > at:
            running.update(data[at:end])
            at = end
        marks.append(Mark(mark.path, mark.tokens, running.digest()))
    return hashes, marks


def _latest(kept: OrderedDict[str, T], name: str, make: Callable[[], T], most: int) -> T:
    """The named one, made where it is not there; beyond `most` those used longest ago go."""
    one = kept.get(name)
    if one is None:
        one = kept[name] = make()
    kept.move_to_end(name)
    while len(kept) > most:
        kept.popitem(last=False)
    return one


def _by_class(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    found: defaultdict[str, int] = defaultdict(int)
    for count in counts:
        for name, tokens in count.items():
            found[name] += tokens
    return found


def _minute(minutes: deque[Minute], number: int) -> Minute:
    if not minutes or minutes[-1].number < number:
        minutes.append(Minute(number))
    return minutes[-1]


def _times(view: TenantView) -> dict[str, Any]:
    return {"hit": view.hit_times.quantiles(), "miss": view.miss_times.quantiles()}


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
