"""Every metric of the gateway, once. Names are `trunkline_*`, plus the model-server names that
autoscalers and inference routers read (`vllm:*`), where they mean the same.

One registry per running gateway; no globals. Tenants are labels only up to a configured number;
no other label carries anything that a client chose. The middleware counts, the admin listener
shows. What the engine counts is passed on as it came with its last heartbeat: those counters start
again with each life of the engine, as Prometheus expects of a counter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.api import Stats

CONTENT_TYPE = CONTENT_TYPE_LATEST
OTHERS = "others"
EPOCHS_MAX = 16
"""Lives of the engine whose tokens are told apart: the latest."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

_GAUGES = {
    "blocks": ("kv_blocks", "Blocks of the pool."),
    "free_blocks": ("kv_free_blocks", "Blocks nobody refers to."),
    "cached_blocks": ("kv_cached_blocks", "Blocks only the prefix tree refers to."),
    "pinned_blocks": ("kv_pinned_blocks", "Blocks in some block table."),
    "waiting": ("waiting_requests", "Requests that wait for their first step."),
    "running": ("running_requests", "Requests that run."),
    "waiting_tokens": ("waiting_tokens", "Prompt tokens of waiting requests."),
    "steps_per_s": ("engine_steps_per_second", "Engine steps per second, lately."),
    "prefill_tokens_per_s": ("engine_prefill_tokens_per_second", "Prompt tokens per second."),
}
_COUNTERS = {
    "step": ("engine_steps", "Steps of this life of the engine."),
    "prompt_tokens_total": ("engine_prompt_tokens", "Prompt tokens the engine began."),
    "cached_tokens_total": ("engine_cached_tokens", "Prompt tokens found in the cache."),
    "computed_tokens_total": ("engine_computed_tokens", "Prompt tokens computed."),
    "output_tokens_total": ("engine_output_tokens", "Output tokens."),
    "unneeded_tokens_total": ("unneeded_tokens", "Output tokens behind the end of their text."),
    "evicted_blocks_total": ("evicted_blocks", "Blocks taken under pressure."),
    "expired_blocks_total": ("expired_blocks", "Blocks whose retention ended."),
    "copied_blocks_total": ("copied_blocks", "Blocks copied because they were shared."),
    "preemptions_total": ("preemptions", "Sequences preempted."),
}
_ROUTERS = "As model servers name it, for autoscalers and routers."


def cached_as(cached_tokens: int, prompt_tokens: int) -> str:
    """`hit` if half of the prompt or more was cached, `partial` if less was, `miss` if nothing. The
    first words of a template are nearly always there: with those alone a prompt takes its time."""
    if not cached_tokens:
        return "miss"
    return "hit" if 2 * cached_tokens >= prompt_tokens else "partial"


CACHED = ("hit", "partial", "miss")


class LabelledCounter(Collector):
    """A counter, by labels. Tally are made several times an answer and read a few times a minute,
    by one thread: a dict is all it takes."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.labels = labels
        self._name, self._text = name, text
        self._counts: defaultdict[tuple[str, ...], int] = defaultdict(int)
        if not labels:
            self._counts[()] = 0

    def add(self, count: int, *labels: str) -> None:
        """So many more. O(1)."""
        self._counts[labels] += count

    def describe(self) -> Iterator[Metric]:
        """See `Collector`."""
        yield CounterMetricFamily(self._name, self._text, labels=self.labels)

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        family = CounterMetricFamily(self._name, self._text, labels=self.labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


class CounterGroup(Collector):
    """Three counters with one label that are counted together. Kept as `LabelledCounter` is."""

    def __init__(self, label: str, **texts: str) -> None:
        """`texts`: what each counter says of itself, by its name."""
        assert len(texts) == 3
        self.labels, self._texts = (label,), texts
        self._rows: dict[str, list[int]] = {}

    def add(self, label: str, first: int, second: int, third: int) -> None:
        """So many more, in the order of their names. O(1)."""
        row = self._rows.get(label)
        if row is None:
            row = self._rows[label] = [0, 0, 0]
        row[0] += first
        row[1] += second
        row[2] += third

    def describe(self) -> Iterator[Metric]:
        """See `Collector`."""
        yield from self._families()

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        for place, family in enumerate(self._families()):
            for label, row in self._rows.items():
                family.add_metric((label,), row[place])
            yield family

    def _families(self) -> Iterator[CounterMetricFamily]:
        for name, text in self._texts.items():
            yield CounterMetricFamily(f"trunkline_{name}", text, labels=self.labels)


class DurationHistogram(Collector):
    """A histogram of seconds, by labels. Kept as `LabelledCounter` is."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.labels = labels
        self._name, self._text = name, text
        self._rows: dict[tuple[str, ...], tuple[list[int], list[float]]] = {}
        if not labels:
            self._row(())

    def add(self, seconds: float, *labels: str) -> None:
        """One more. O(1)."""
        counts, sums = self._rows.get(labels) or self._row(labels)
        counts[bisect_left(_SECONDS, seconds)] += 1
        sums[0] += seconds

    def describe(self) -> Iterator[Metric]:
        """See `Collector`."""
        yield HistogramMetricFamily(self._name, self._text, labels=self.labels)

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        family = HistogramMetricFamily(self._name, self._text, labels=self.labels)
        edges = [*map(floatToGoString, _SECONDS), "+Inf"]
        for labels, (counts, sums) in self._rows.items():
            buckets = list(zip(edges, accumulate(counts), strict=True))
            family.add_metric(labels, buckets, sums[0])
        yield family

    def _row(self, labels: tuple[str, ...]) -> tuple[list[int], list[float]]:
        row = self._rows[labels] = [0] * (len(_SECONDS) + 1), [0.0]
        return row


class Metrics:
    """Counters, gauges and histograms of one gateway. Belongs to one thread."""

    def __init__(self, tenants_as_labels_max: int) -> None:
        self.registry = one = CollectorRegistry()
        self._tenants_max = tenants_as_labels_max
        self._tenants: set[str] = set()
        self._epochs: dict[str, list[int]] = {}

        def counter(name: str, text: str, *labels: str) -> LabelledCounter:
            made = LabelledCounter(f"trunkline_{name}", text, *labels)
            one.register(made)
            return made

        def seconds(name: str, text: str, *labels: str) -> DurationHistogram:
            made = DurationHistogram(f"trunkline_{name}_seconds", text, *labels)
            one.register(made)
            return made

        self.requests = counter("requests", "Requests that ended.", "tenant", "route", "ending")
        self.refusals = counter("refusals", "Requests refused, by stable code.", "code")
        # A series that begins with its first refusal has not risen, and no alert would see it.
        self.refusals.add(0, "ledger_unavailable")
        self.tokens = CounterGroup(
            "tenant",
            prompt_tokens="Prompt tokens.",
            cached_tokens="Prompt tokens from the cache.",
            output_tokens="Output tokens.",
        )
        self.contract_tokens = CounterGroup(
            "tenant",
            cache_read_tokens="Prompt tokens read by contract.",
            cache_write_tokens="Prompt tokens written.",
            recomputed_promised_tokens="Tokens read by contract and computed again.",
        )
        one.register(self.tokens)
        one.register(self.contract_tokens)
        self.output_format_violations = counter(
            "output_format_violations", "Finished answers that broke the JSON format asked for."
        )
        self.misses = counter("cache_misses", "Breakpoints not read in full, by cause.", "cause")
        self.unreadable = counter("unreadable_requests", "Connections that spoke no HTTP.")
        self.first_token_s = seconds("first_token", "From arrival to the first token.", "cache")
        self.duration_s = seconds("request", "Time of a whole request.")
        self.ready = Gauge("trunkline_engine_ready", "1 if requests are taken.", registry=one)
        text = "Which life of the ledger this is: a restored one begins the next."
        self.ledger_epoch = Gauge("trunkline_ledger_epoch", text, registry=one)
        text = "Soft budgets that are passed in their present windows."
        self._soft_budgets = Gauge("trunkline_soft_budgets_passed", text, ["tenant"], registry=one)
        self._engine = _EngineMetrics()
        self._cache = _CacheMetrics()
        self._ledger = _LedgerMetrics()
        one.register(self._engine)
        one.register(self._cache)
        one.register(self._ledger)

    def count_epoch(
        self, epoch: str, prompt: int, cached: int, output: int, unneeded: int = 0
    ) -> None:
        """The same tokens as in the counters, by the engine's life in which they were computed, and
        those that it drew and nobody needed without hearing of it."""
        counts = self._epochs.get(epoch)
        if counts is None:
            counts = self._epochs[epoch] = [0, 0, 0, 0]
            if len(self._epochs) > EPOCHS_MAX:
                del self._epochs[next(iter(self._epochs))]
        counts[0] += prompt
        counts[1] += cached
        counts[2] += output
        counts[3] += unneeded

    def of_epoch(self, epoch: str) -> tuple[int, int, int]:
        """Prompt, cached and output tokens of a life of the engine."""
        prompt, cached, output, _ = self._epochs.get(epoch, (0, 0, 0, 0))
        return prompt, cached, output

    def unneeded_in(self, epoch: str) -> int:
        """What a life of the engine drew for nobody, beside what it knows of itself."""
        return self._epochs.get(epoch, (0, 0, 0, 0))[3]

    def tenant_label(self, name: str) -> str:
        """The tenant's own name for the first few, `others` for the rest."""
        if name in self._tenants:
            return name
        if len(self._tenants) < self._tenants_max:
            self._tenants.add(name)
            return name
        return OTHERS

    def show_soft_budgets(self, counts: Mapping[str, int]) -> None:
        """How many are passed, by the tenant's label; none of anybody else."""
        self._soft_budgets.clear()
        for tenant, count in counts.items():
            self._soft_budgets.labels(tenant).set(count)

    def show_engine(self, stats: Stats, *, is_ready: bool, restarts: int) -> None:
        """Take over the engine's latest heartbeat."""
        self.ready.set(1 if is_ready else 0)
        self._engine.stats, self._engine.restarts = stats, restarts

    def show_ledger(self, restarts: int) -> None:
        """Take over how often its process was started again."""
        self._ledger.restarts = restarts

    def show_cache(self, promises: Mapping[str, Mapping[str, int]], inserted_blocks: int) -> None:
        """Take over what became of promises, by class, and what came into the cache."""
        self._cache.promises, self._cache.inserted_blocks = promises, inserted_blocks

    def exposition(self) -> bytes:
        """The Prometheus text format. O(series)."""
        return bytes(generate_latest(self.registry))


class _EngineMetrics(Collector):
    """The engine's own counts, as it last told them."""

    def __init__(self) -> None:
        self.stats, self.restarts = Stats(), 0

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"trunkline_{name}", text, getattr(stats, field))
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"trunkline_{name}", text, getattr(stats, field))
        restarts = "Times the engine was started again."
        yield CounterMetricFamily("trunkline_engine_restarts", restarts, self.restarts)
        in_use = stats.pinned_blocks / stats.blocks if stats.blocks else 0.0
        yield GaugeMetricFamily("vllm:num_requests_running", _ROUTERS, stats.running)
        yield GaugeMetricFamily("vllm:num_requests_waiting", _ROUTERS, stats.waiting)
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", _ROUTERS, in_use)
        asked, found = stats.prompt_tokens_total, stats.cached_tokens_total
        yield CounterMetricFamily("vllm:prefix_cache_queries", _ROUTERS, asked)
        yield CounterMetricFamily("vllm:prefix_cache_hits", _ROUTERS, found)


class _LedgerMetrics(Collector):
    """Of the ledger's process."""

    def __init__(self) -> None:
        self.restarts = 0

    def collect(self) -> Iterator[Metric]:
        text = "Times the ledger's process was started again."
        yield CounterMetricFamily("trunkline_ledger_restarts", text, self.restarts)


class _CacheMetrics(Collector):
    """What the gateway's own books say of the cache."""

    def __init__(self) -> None:
        self.promises: Mapping[str, Mapping[str, int]] = {}
        self.inserted_blocks = 0

    def collect(self) -> Iterator[Metric]:
        text = "Blocks that came into the prefix tree."
        yield CounterMetricFamily("trunkline_inserted_blocks", text, self.inserted_blocks)
        text = "What became of promises: each given one is kept, broken or given up in the end."
        ended = CounterMetricFamily("trunkline_promises", text, labels=("class", "outcome"))
        text = "Promises whose time is not over."
        running = GaugeMetricFamily("trunkline_running_promises", text, labels=("class",))
        for name, counts in sorted(self.promises.items()):
            running.add_metric((name,), counts["running"])
            for outcome, count in counts.items():
                if outcome != "running":
                    ended.add_metric((name, outcome), count)
        yield ended
        yield running
