"""What operators look at: hits, misses and why, time to first token, reuse and breaks, by tenant.

Told of each answer once, when it is over; holds counts, digests and samples, never words. Bounded:
`tenants_max` tenants are followed closely, those that were active last, and `COUNTED_MAX` counted;
a minute of history is a few numbers. Clocks are given. `answer` tells it, `handlers.analytics`
asks.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import asdict

from gateway.dialects.canonical import Rendered, UsageRecord
from gateway.observability.metrics import CACHED, cached_as
from tenancy.pricing.charges import RateCard
from tenancy.reuse.advice import ClassTerms, advise_classes, advise_sizes
from tenancy.reuse.miss_ratio_curve import (
    BLOCK_TOKENS,
    DEPTH_BLOCKS_MAX,
    LogHistogram,
    ReuseSampler,
    bucket_of,
    hash_units,
)
from tenancy.reuse.prefix_statistics import PrefixStatistics

T = TypeVar("T")

MINUTES = 120
MINUTE_MS = 60_000
COUNTED_MAX = 2_000
"""Tenants with sums of their own, at most about 30 kB each."""

SAMPLE_MAX = 1_024
PROMPTS_BYTES_MAX = 2 * 2**20

WAITING_MAX = 65_536
"""Of the answers that wait to be added up: their prompts' tokens, and as many as take as long as an
answer does, and each of its boundaries."""
ANSWER_TOKENS, MARK_TOKENS = 384, 64
TOKENS_MAX = DEPTH_BLOCKS_MAX * BLOCK_TOKENS
"""Of one prompt, looked at: the beginning is where prefixes are."""


class Facts(Struct, frozen=True, array_like=True, gc=False):
    """One prompt of an answer that is over. `missed_tokens`: of the longest prefix that was written
    before, what was not read, because of `missed`. `is_further`: the answer has been told with
    another prompt of it, and counts once, as it does in the ledger."""

    tenant: str
    record: UsageRecord
    prompt: Rendered
    first_token_s: float | None
    missed: str
    ending: str
    missed_tokens: int = 0
    is_further: bool = False


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


class AnalyticsSums:
    """What some answers of one tenant and one minute come to, added up once for all who count
    them."""

    def __init__(self, many: Sequence[tuple[float, Facts]]) -> None:
        """O(answers)."""
        self.endings: defaultdict[str, int] = defaultdict(int)
        self.misses: defaultdict[str, int] = defaultdict(int)
        self.missed_tokens: defaultdict[str, int] = defaultdict(int)
        self.read_classes: defaultdict[str, int] = defaultdict(int)
        self.write_classes: defaultdict[str, int] = defaultdict(int)
        self.first_token_ms = {cached: LogHistogram() for cached in CACHED}
        endings, reads, writes = self.endings, self.read_classes, self.write_classes
        first_ms = {cached: times.counts for cached, times in self.first_token_ms.items()}
        fresh = out = prompt = physical = owed = further = 0
        for _, facts in many:
            record = facts.record
            cached = record.physical_cached
            fresh += record.fresh
            out += record.out
            prompt += record.total_in
            physical += cached
            owed += record.breached_tokens
            if record.read:
                for name, tokens in record.read.items():
                    reads[name] += tokens
            if record.write:
                for name, tokens in record.write.items():
                    writes[name] += tokens
            if facts.missed:
                self.misses[facts.missed] += 1
                self.missed_tokens[facts.missed] += facts.missed_tokens
            if facts.is_further:
                further += 1
                continue
            endings[facts.ending] += 1
            if facts.first_token_s is not None:
                times = first_ms[cached_as(cached, record.total_in)]
                times[bucket_of(1000 * facts.first_token_s)] += 1
        self.prompt, self.physical, self.owed = prompt, physical, owed
        read, write = sum(self.read_classes.values()), sum(self.write_classes.values())
        self.totals = len(many) - further, read, write, fresh, out


class TenantView:
    """What is counted of one tenant."""

    def __init__(self) -> None:
        self.total = Minute(0)
        self.physical = 0
        self.prompt = 0
        self.owed = 0
        self.minutes: deque[Minute] = deque(maxlen=MINUTES)
        self.read_classes: dict[str, int] = {}
        self.write_classes: dict[str, int] = {}
        self.misses: dict[str, int] = {}
        self.missed_tokens: dict[str, int] = {}
        self.endings: dict[str, int] = {}
        self.first_token_ms = {cached: LogHistogram() for cached in CACHED}

    def add(self, minute: int, sums: AnalyticsSums) -> None:
        """More answers of one minute. O(1)."""
        self.total.add(*sums.totals)
        _minute(self.minutes, minute).add(*sums.totals)
        self.prompt += sums.prompt
        self.physical += sums.physical
        self.owed += sums.owed
        _add(self.endings, sums.endings)
        _add(self.read_classes, sums.read_classes)
        _add(self.write_classes, sums.write_classes)
        _add(self.misses, sums.misses)
        _add(self.missed_tokens, sums.missed_tokens)
        for cached, times in self.first_token_ms.items():
            times.merge(sums.first_token_ms[cached])

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


class PromptSamples:
    """What is sampled of one tenant's prompts: at most `PROMPTS_BYTES_MAX`, measured when full."""

    def __init__(self, spans: Collection[float] = ()) -> None:
        """`spans`: the retentions that will be asked for, in seconds."""
        self.prefixes = PrefixStatistics()
        self.reuse = ReuseSampler(SAMPLE_MAX, spans)

    @property
    def count(self) -> int:
        """How many were looked at."""
        return self.prefixes.prompts()

    def add(self, many: Sequence[tuple[float, Facts]]) -> None:
        """More of them: their units and boundaries. O(tokens)."""
        use, note = self.reuse.use, self.prefixes.note
        for at_s, facts in many:
            prompt, record = facts.prompt, facts.record
            tokens = prompt.token_ids[:TOKENS_MAX]
            data = _packer(len(tokens))(*tokens)
            use(hash_units(data), at_s)
            note(data, prompt.boundaries, record.total_in, record.physical_cached)


class Analytics:
    """All tenants of one gateway. Belongs to one thread."""

    def __init__(
        self,
        clock: Callable[[], float],
        wall: Callable[[], int],
        tenants_max: int,
        classes: Mapping[str, ClassTerms],
    ) -> None:
        """`wall`: milliseconds since the epoch, for minutes that people read. `tenants_max`: whose
        prompts are sampled. `classes`: for how long each retention class keeps."""
        self._clock = clock
        self._wall = wall
        self._tenants_max = tenants_max
        self._classes = classes
        self._spans = [kept.seconds for kept in classes.values()]
        self._tenants: OrderedDict[str, TenantView] = OrderedDict()
        self._prompts: OrderedDict[str, PromptSamples] = OrderedDict()
        self._all = TenantView()
        self._waiting: defaultdict[str, list[tuple[float, Facts]]] = defaultdict(list)
        self._room = WAITING_MAX
        self._minute, self._minute_ends_s = 0, -math.inf  # of those that wait

    def note(self, facts: Facts) -> None:
        """An answer is over. O(1), and now and then O(tokens of those before): many answers of one
        minute are added up together, and those that wait whenever somebody asks."""
        at_s = self._clock()
        if at_s >= self._minute_ends_s:
            self._begin(at_s)
        self._waiting[facts.tenant].append((at_s, facts))
        prompt = facts.prompt
        self._room -= ANSWER_TOKENS + len(prompt.token_ids) + MARK_TOKENS * len(prompt.boundaries)
        if self._room <= 0:
            self._fold()

    def _begin(self, at_s: float) -> None:
        self._fold()
        wall_ms = self._wall()
        self._minute = wall_ms // MINUTE_MS
        self._minute_ends_s = at_s + (MINUTE_MS - wall_ms % MINUTE_MS) / 1000

    def _fold(self) -> None:
        def prompts() -> PromptSamples:
            return PromptSamples(self._spans)

        for tenant, many in self._waiting.items():
            sums = AnalyticsSums(many)
            self._all.add(self._minute, sums)
            _latest(self._tenants, tenant, TenantView, COUNTED_MAX).add(self._minute, sums)
            _latest(self._prompts, tenant, prompts, self._tenants_max).add(many)
        self._waiting.clear()
        self._room, self._minute_ends_s = WAITING_MAX, -math.inf

    def missed_tokens(self, name: str, cause: str) -> int:
        """Tokens of a tenant's prefixes that had to be computed again because of this."""
        self._fold()
        view = self._tenants.get(name)
        return 0 if view is None else view.missed_tokens.get(cause, 0)

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
        blocks: int,
    ) -> dict[str, Any] | None:
        """One tenant in full, with advice at these prices and beside a cache of so many blocks;
        None if it was not seen lately. Of one that is only counted there is no advice."""
        self._fold()
        view = self._tenants.get(name)
        if view is None:
            return None
        prompts = self._prompts.get(name) or PromptSamples(self._spans)
        prefixes = prompts.prefixes
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
                {
                    "id": f"{one.digest:016x}",
                    "path": one.path,
                    "tokens": one.tokens,
                    "uses": one.uses,
                    "hits": one.hits,
                }
                for one in prefixes.top()
            ],
            "recomputed": [
                {
                    "cause": cause,
                    "tokens": tokens,
                    "cost_pico": tokens * max(0, card.input - card.cache_read),
                }
                for cause, tokens in sorted(view.missed_tokens.items(), key=lambda one: -one[1])
                if tokens
            ],
            "breaks": [
                {**asdict(one), "cost_pico": one.tokens * (card.input - card.cache_read)}
                for one in prefixes.breaks()
            ],
            "retention_advice": [
                asdict(one) for one in advise_classes(prompts.reuse, self._classes, card)
            ],
            "size_advice": [
                asdict(one) for one in advise_sizes(prompts.reuse, _sizes(blocks), blocks, card)
            ],
            "sampled_prompts": prompts.count,
            "sampled_blocks": prompts.reuse.sampled_blocks,
            "sampling_rate": prompts.reuse.rate,
            "rate_card": card.rate_card_id,
        }


@lru_cache(maxsize=1_024)
def _packer(count: int) -> Callable[..., bytes]:
    """Four bytes a token id; twice as fast as an array for short prompts."""
    return struct.Struct(f"{count}I").pack


def _latest(kept: OrderedDict[str, T], name: str, make: Callable[[], T], most: int) -> T:
    """The named one, made where it is not there; beyond `most` those used longest ago go."""
    one = kept.get(name)
    if one is None:
        one = kept[name] = make()
    kept.move_to_end(name)
    while len(kept) > most:
        kept.popitem(last=False)
    return one


def _add(sums: dict[str, int], counts: Mapping[str, int]) -> None:
    for name, count in counts.items():
        sums[name] = sums.get(name, 0) + count


def _minute(minutes: deque[Minute], number: int) -> Minute:
    if not minutes or minutes[-1].number < number:
        minutes.append(Minute(number))
    return minutes[-1]


def _times(view: TenantView) -> dict[str, Any]:
    """Milliseconds, to a fifth; None before there is one."""
    return {
        name: {
            "count": round(times.total()),
            **{f"p{part}": times.quantile(part / 100) for part in (50, 95, 99)},
        }
        for name, times in view.first_token_ms.items()
    }


def _sizes(blocks: int) -> list[int]:
    """Of caches around the one that there is, by which they are doubled."""
    return sorted({max(1, blocks * part // 16) for part in (1, 2, 4, 8, 16, 32)}) if blocks else []


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
