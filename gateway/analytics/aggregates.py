"""Sums of finished requests by tenant: hits, misses and their causes, time to first token, reuse.

Each finished request is noted once; the sums hold counts, digests and samples, never text. Memory
is bounded: `TENANTS_COUNTED_MAX` tenants have sums, and a minute of history is a few numbers. Each
model has a cache of its own, so prompts are sampled by tenant and model; the `tenants_max` most
recently active of these have samples. Clocks are arguments.
`gateway.generation` notes requests; `gateway.api.admin.analytics` reads the sums.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from heapq import nlargest
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import asdict

from gateway.analytics.completed_prompt import CompletedPrompt
from gateway.analytics.prompt_findings import EVICTED, PromptFindings, prompt_parts, siblings_of
from gateway.observability.metrics import CACHE_OUTCOMES, cache_outcome
from tenancy.pricing.charges import RateCard
from tenancy.reuse.advice import ClassTerms, advise_classes, advise_sizes
from tenancy.reuse.finding_counts import ExplainedMisses, FindingCount, FindingKey
from tenancy.reuse.miss_causes import OF_SUMS, MissCause, waste_cost
from tenancy.reuse.miss_ratio_curve import (
    BLOCK_TOKENS,
    DEPTH_BLOCKS_MAX,
    LogHistogram,
    ReuseSampler,
    bucket_of,
    hash_units,
)
from tenancy.reuse.prompt_changes import ObservedPrompt, PromptChanges, PromptReuse
from tenancy.types import MINUTE_MS

T = TypeVar("T")
K = TypeVar("K")

MINUTES = 120
MINUTE_COLUMNS = ("requests", "read_tokens", "write_tokens", "fresh_tokens", "output_tokens")
TENANTS_COUNTED_MAX = 2_000
"""Tenants with sums, at most about 30 kB each."""

SAMPLE_MAX = 1_024
CAUSES_MAX = 16_384
"""Miss causes of single requests that wait to be taken; further ones are only counted."""
COUNTS_MAX = 4_096
"""Counts of causes that wait to be taken; further places are not counted."""
PROMPTS_BYTES_MAX = 5 * 2**20
"""What is kept of one tenant's prompts to one model takes at most so many bytes."""
ROWS_MAX = 20
"""Prefixes, and places where prompts diverge, that a report on a tenant shows."""

PENDING_MAX = 65_536
"""Weight of finished requests that wait to be aggregated, in prompt tokens."""
REQUEST_WEIGHT, BOUNDARY_WEIGHT = 384, 64
"""A request and a boundary of its prompt weigh as much as the tokens that take the same time."""
TOKENS_MAX = DEPTH_BLOCKS_MAX * BLOCK_TOKENS
"""Tokens of a prompt that are sampled: prefixes are at its beginning."""


class RequestSums:
    """Sums of requests."""

    COUNTERS = ("totals", "endings", "ignored", "misses", "read_classes", "write_classes")

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        """Requests, and tokens by `MINUTE_COLUMNS` and others."""
        self.endings: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.read_classes: Counter[str] = Counter()
        self.write_classes: Counter[str] = Counter()
        self.first_token_ms = {cached: LogHistogram() for cached in CACHE_OUTCOMES}

    def merge(self, sums: RequestSums) -> None:
        """Add other sums. O(1)."""
        for name in self.COUNTERS:
            getattr(self, name).update(getattr(sums, name))
        for cached, times in self.first_token_ms.items():
            times.merge(sums.first_token_ms[cached])


def sum_requests(timed_prompts: Sequence[tuple[float, CompletedPrompt]]) -> RequestSums:
    """Return the sums of several requests, which are added to every view that includes them.
    O(requests)."""
    sums = RequestSums()
    endings, reads, writes = sums.endings, sums.read_classes, sums.write_classes
    first_ms = {cached: times.counts for cached, times in sums.first_token_ms.items()}
    fresh = out = prompt = physical = recomputed = further = 0
    for _, completed in timed_prompts:
        record = completed.record
        cached = record.physical_cached
        fresh += record.fresh
        out += record.out
        prompt += record.total_in
        physical += cached
        recomputed += record.recomputed_promised
        if record.read:
            for name, tokens in record.read.items():
                reads[name] += tokens
        if record.write:
            for name, tokens in record.write.items():
                writes[name] += tokens
        if completed.missed:
            sums.misses[completed.missed] += 1
        if completed.is_further:
            further += 1
            continue
        endings[completed.ending] += 1
        for label in completed.ignored:
            sums.ignored[label] += 1
        if completed.first_token_s is not None:
            times = first_ms[cache_outcome(cached, record.total_in)]
            times[bucket_of(1000 * completed.first_token_s)] += 1
    sums.totals = Counter(
        requests=len(timed_prompts) - further,
        prompt_tokens=prompt,
        read_tokens=reads.total(),
        write_tokens=writes.total(),
        fresh_tokens=fresh,
        output_tokens=out,
        physical_cached_tokens=physical,
        recomputed_promised_tokens=recomputed,
    )
    return sums


class TenantView(RequestSums):
    """Sums of one tenant."""

    def __init__(self) -> None:
        super().__init__()
        self.minutes: deque[list[int]] = deque(maxlen=MINUTES)
        """Rows of a minute's number and the sums of `MINUTE_COLUMNS` in it."""
        self.recomputed: dict[tuple[str, str], FindingCount] = {}
        """What was wasted, by cause, with evictions by their own, and by model."""

    def add(self, minute: int, sums: RequestSums) -> None:
        """Add the sums of more requests of one minute. O(1)."""
        self.merge(sums)
        if not self.minutes or self.minutes[-1][0] < minute:
            self.minutes.append([minute] + [0] * len(MINUTE_COLUMNS))
        for place, name in enumerate(MINUTE_COLUMNS, start=1):
            self.minutes[-1][place] += sums.totals[name]

    def add_causes(self, causes: Iterable[MissCause]) -> None:
        """Add what single requests wasted. O(causes)."""
        for one in causes:
            if one.wasted_tokens and one.cause not in OF_SUMS:
                name = next((fact for fact in one.facts if fact.startswith(EVICTED)), one.cause)
                known = self.recomputed.get((name, one.model))
                count = FindingCount.of(one)
                self.recomputed[name, one.model] = count if known is None else known.plus(count)

    def summary(self) -> dict[str, Any]:
        """Return the tenant's totals as JSON fields."""
        names = ("requests", "prompt_tokens", *MINUTE_COLUMNS[1:], "physical_cached_tokens")
        found: dict[str, Any] = {name: self.totals[name] for name in names}
        prompt = self.totals["prompt_tokens"]
        return {
            **found,
            "hit_ratio": _ratio(found["read_tokens"], prompt),
            "physical_hit_ratio": _ratio(found["physical_cached_tokens"], prompt),
            "recomputed_promised_tokens": self.totals["recomputed_promised_tokens"],
        }

    def by_class(self) -> dict[str, dict[str, int]]:
        """Return the tokens that were read and written, by retention class, as JSON fields."""
        return {
            "read_by_class": dict(self.read_classes),
            "write_by_class": dict(self.write_classes),
        }


class ModelTerms(Struct, frozen=True):
    """What a tenant's advice on one model is reckoned with: its prices, and the blocks of its
    cache (0 while no engine runs)."""

    card: RateCard
    blocks: int


class PromptSamples:
    """What is kept of one tenant's prompts to one model: reuse samples, and digests that the next
    prompt is compared with."""

    def __init__(self, key: int, spans: Collection[float] = ()) -> None:
        """`key`: see `PromptChanges`. `spans`: the retention times that advice will be given on, in
        seconds."""
        self.changes = PromptChanges(key)
        self.reuse = ReuseSampler(SAMPLE_MAX, spans)
        self.count = 0
        """Number of sampled prompts."""

    def add(self, at_s: float, completed: CompletedPrompt) -> PromptReuse:
        """Sample a prompt, and compare it with the ones before. O(tokens)."""
        prompt, record, context = completed.prompt, completed.record, completed.context
        tokens = prompt.token_ids[:TOKENS_MAX]
        data = _token_packer(len(tokens))(*tokens)
        self.count += 1
        self.reuse.use(hash_units(data), at_s)
        parts = prompt_parts(prompt.boundaries, len(tokens))
        total, cached = record.total_in, record.physical_cached
        if context is None or completed.first_token_s is None:
            # What was not computed as usual is known to no other prompt.
            return self.changes.note(b"", ObservedPrompt(data, parts, total, cached, at_s, at_s))
        observed = ObservedPrompt(
            *(data, parts, total, cached, context.started_s, at_s),
            epoch=context.epoch,
            losses=context.losses,
            tools=context.tools,
        )
        return self.changes.note(context.namespace, observed, siblings_of(context.namespace))

    def advice(self, classes: Mapping[str, ClassTerms], terms: ModelTerms) -> dict[str, Any]:
        """Return what each retention class and each cache size would save, as JSON fields."""
        card, blocks = terms.card, terms.blocks
        sizes = advise_sizes(self.reuse, _sizes(blocks), blocks, card)
        return {
            "rate_card": card.rate_card_id,
            "retention_advice": [asdict(one) for one in advise_classes(self.reuse, classes, card)],
            "size_advice": [asdict(one) for one in sizes],
            "sampled_prompts": self.count,
            "sampled_blocks": self.reuse.sampled_blocks,
            "sampling_rate": self.reuse.rate,
        }


class Analytics:
    """Sums of all tenants of a gateway. Belongs to one thread."""

    def __init__(
        self,
        clock: Callable[[], float],
        wall: Callable[[], int],
        tenants_max: int,
        classes: Mapping[str, ClassTerms],
        key: int,
    ) -> None:
        """`wall`: Unix milliseconds, for minutes that people read. `tenants_max`: tenants whose
        prompts are sampled; one that uses several models counts once for each. `classes`: the
        retention classes and how long each keeps. `key`: a random number of 64 bits, which digests
        of prompts are made with."""
        self._clock = clock
        self._wall = wall
        self._tenants_max = tenants_max
        self._classes = classes
        self._spans = [kept.seconds for kept in classes.values()]
        self._tenants: OrderedDict[int, TenantView] = OrderedDict()
        self._prompts: OrderedDict[tuple[int, str], PromptSamples] = OrderedDict()
        """By tenant and model, the most recently active last."""
        self._all = TenantView()
        self._pending: defaultdict[int, list[tuple[float, CompletedPrompt]]] = defaultdict(list)
        self._pending_room = PENDING_MAX
        self._minute, self._minute_ends_s = 0, -math.inf  # of pending requests
        self._key = key
        self._findings = PromptFindings(classes)
        self._causes: list[MissCause] = []
        self._counts: dict[FindingKey, FindingCount] = {}

    def note(self, completed: CompletedPrompt) -> None:
        """Record a finished request.

        O(1), and now and then O(tokens of pending requests): requests of one minute are aggregated
        together, and whenever sums are read.
        """
        at_s = self._clock()
        if at_s >= self._minute_ends_s:
            self._start_minute(at_s)
        self._pending[completed.tenant_id].append((at_s, completed))
        prompt = completed.prompt
        self._pending_room -= (
            REQUEST_WEIGHT + len(prompt.token_ids) + BOUNDARY_WEIGHT * len(prompt.boundaries)
        )
        if self._pending_room <= 0:
            self._aggregate()

    def _start_minute(self, at_s: float) -> None:
        """Aggregate the last minute's requests and begin a minute."""
        self._aggregate()
        wall_ms = self._wall()
        self._minute = wall_ms // MINUTE_MS
        self._minute_ends_s = at_s + (MINUTE_MS - wall_ms % MINUTE_MS) / 1000

    def _aggregate(self) -> None:
        """Add all pending requests to the sums."""

        def new_samples() -> PromptSamples:
            return PromptSamples(self._key, self._spans)

        wall_ms_at_0 = self._wall() - 1_000 * self._clock()
        for tenant_id, timed_prompts in self._pending.items():
            sums = sum_requests(timed_prompts)
            self._all.add(self._minute, sums)
            view = _touch(self._tenants, tenant_id, TenantView, TENANTS_COUNTED_MAX)
            view.add(self._minute, sums)
            for at_s, completed in timed_prompts:
                key = (tenant_id, completed.model)
                samples = _touch(self._prompts, key, new_samples, self._tenants_max)
                reuse, context = samples.add(at_s, completed), completed.context
                if context is not None and completed.first_token_s is not None:
                    at_ms = round(wall_ms_at_0 + 1_000 * at_s)
                    causes = self._findings.explain(completed, context, reuse, at_ms)
                    view.add_causes(causes)
                    self._count(causes)
        self._pending.clear()
        self._pending_room, self._minute_ends_s = PENDING_MAX, -math.inf

    def _count(self, causes: Sequence[MissCause]) -> None:
        self._causes += [one for one in causes if one.cause not in OF_SUMS]
        del self._causes[CAUSES_MAX:]
        for count in map(FindingCount.of, causes):
            known = self._counts.get(count.key)
            if known is not None or len(self._counts) < COUNTS_MAX:
                self._counts[count.key] = count if known is None else known.plus(count)

    def take_misses(self) -> ExplainedMisses:
        """Return what explained misses add up to since the last call. Changes: they begin anew."""
        self._aggregate()
        taken = ExplainedMisses(self._causes, list(self._counts.values()))
        self._causes, self._counts = [], {}
        return taken

    def missed_tokens(self, tenant_id: int, cause: str) -> int:
        """Return the tokens of a tenant that were computed again because of `cause`."""
        self._aggregate()
        view = self._tenants.get(tenant_id)
        if view is None:
            return 0
        return sum(one.wasted_tokens for (name, _), one in view.recomputed.items() if name == cause)

    def overview(self) -> dict[str, Any]:
        """Return the totals, and one row per tenant."""
        self._aggregate()
        return {
            "total": self._all.summary(),
            "minutes": list(self._all.minutes),
            "first_token_ms": _latencies(self._all),
            "misses": dict(self._all.misses),
            "endings": dict(self._all.endings),
            "ignored_fields": dict(self._all.ignored),
            "tenants": [
                {"tenant_id": tenant_id, **view.summary(), **view.by_class()}
                for tenant_id, view in reversed(self._tenants.items())
            ],
        }

    def tenant(self, tenant_id: int, terms: Mapping[str, ModelTerms]) -> dict[str, Any] | None:
        """Return all sums of one tenant, and `advice` for each model of `terms` that it has prompt
        samples of, the most asked first.

        Returns None if the tenant was not active lately. What was lost with a model that is not in
        `terms` has no price.
        """
        self._aggregate()
        view = self._tenants.get(tenant_id)
        if view is None:
            return None
        samples = {
            model: one
            for model in terms
            if (one := self._prompts.get((tenant_id, model))) is not None
        }
        most_asked = sorted(samples.items(), key=lambda pair: -pair[1].count)
        return {
            "total": view.summary(),
            "minutes": list(view.minutes),
            "first_token_ms": _latencies(view),
            **view.by_class(),
            "misses": dict(view.misses),
            "endings": dict(view.endings),
            "ignored_fields": dict(view.ignored),
            "top_prefixes": _top_prefixes(samples),
            "recomputed": _recomputed(view, terms),
            "breaks": _breaks(samples, terms),
            "advice": [
                {"model": model, **one.advice(self._classes, terms[model])}
                for model, one in most_asked
            ],
        }


def _top_prefixes(samples: Mapping[str, PromptSamples]) -> list[dict[str, Any]]:
    """Return the prefixes that saved most tokens, of all models."""
    found = [
        {
            "model": model,
            "id": f"{one.digest:016x}",
            "path": one.path,
            "tokens": one.tokens,
            "uses": one.uses,
            "hits": one.hits,
        }
        for model, each in samples.items()
        for one in each.changes.top(ROWS_MAX)
    ]
    return nlargest(ROWS_MAX, found, key=lambda one: (one["tokens"] * one["hits"], one["tokens"]))


def _breaks(
    samples: Mapping[str, PromptSamples], terms: Mapping[str, ModelTerms]
) -> list[dict[str, Any]]:
    """Return the places where prompts part with most tokens behind, of all models, each at the
    prices of its own."""
    found = [
        {
            "model": model,
            **asdict(one),
            "cost_pico": waste_cost("", one.tokens, {}, terms[model].card),
        }
        for model, each in samples.items()
        for one in each.changes.breaks(ROWS_MAX)
    ]
    return nlargest(ROWS_MAX, found, key=lambda one: one["tokens"])


def _recomputed(view: TenantView, terms: Mapping[str, ModelTerms]) -> list[dict[str, Any]]:
    """Return what was computed again by cause, most tokens first, with the sum of its costs."""
    tokens, costs = Counter[str](), Counter[str]()
    for (name, model), one in view.recomputed.items():
        tokens[name] += one.wasted_tokens
        if model in terms:
            card = terms[model].card
            costs[name] += waste_cost(one.cause, one.wasted_tokens, one.facts, card)
    return [
        {"cause": name, "tokens": count, "cost_pico": costs[name]}
        for name, count in tokens.most_common()
    ]


@lru_cache(maxsize=1_024)
def _token_packer(count: int) -> Callable[..., bytes]:
    """Return a packer of four bytes per token id; twice as fast as an array for short prompts."""
    return struct.Struct(f"{count}I").pack


def _touch(kept: OrderedDict[K, T], key: K, make: Callable[[], T], kept_max: int) -> T:
    """Return a key's entry, made if missing; evict the least recently used beyond `kept_max`."""
    one = kept.get(key)
    if one is None:
        one = kept[key] = make()
    kept.move_to_end(key)
    while len(kept) > kept_max:
        kept.popitem(last=False)
    return one


def _latencies(view: TenantView) -> dict[str, Any]:
    """Return quantiles in milliseconds, accurate to a fifth; None before the first measurement."""
    return {
        name: {
            "count": round(times.total()),
            **{f"p{part}": times.quantile(part / 100) for part in (50, 95, 99)},
        }
        for name, times in view.first_token_ms.items()
    }


def _sizes(blocks: int) -> list[int]:
    """Return cache sizes around the present one, each twice the one before."""
    return sorted({max(1, blocks * part // 16) for part in (1, 2, 4, 8, 16, 32)}) if blocks else []


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
