"""All metrics of the gateway, named `trunkline_*`.

Besides, the `vllm:*` names that autoscalers and inference routers read, where the meaning is the
same. Each running gateway has one registry; there are no globals. Tenants are labels only up to a
configured number, and no other label has a value that a client chose. The middleware counts, the
admin listener exposes. Engine metrics are those of the last heartbeat: its counters start again
with each engine process, as Prometheus expects of a counter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from platform import python_version
from typing import TypeVar

from msgspec import Struct
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.statistics import Stats
from gateway.observability.level_metrics import LevelMetrics

C = TypeVar("C", bound=Collector)

CONTENT_TYPE = CONTENT_TYPE_LATEST
OTHERS = "other"
"""The label of tenants beyond the configured number."""
ENGINE_EPOCHS_MAX = 64
"""Engine epochs with counts of their own: those counted last."""

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_LOAD_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)

_GAUGES = {
    "blocks": ("kv_blocks", "Blocks of the pool."),
    "free_blocks": ("kv_free_blocks", "Blocks without a reference."),
    "cached_blocks": ("kv_cached_blocks", "Blocks that only the prefix tree refers to."),
    "window_blocks": ("kv_window_blocks", "Blocks of window groups in the prefix tree."),
    "pinned_blocks": ("kv_pinned_blocks", "Blocks in some block table."),
    "waiting": ("waiting_requests", "Requests waiting for their first step."),
    "running": ("running_requests", "Running requests."),
    "compiling": ("compiling_requests", "Requests that wait for their grammar to be compiled."),
    "loading": ("loading_requests", "Requests that wait for host memory or disk."),
    "waiting_tokens": ("waiting_tokens", "Prompt tokens of waiting requests."),
    "steps_per_s": ("engine_steps_per_second", "Engine steps per second, recently."),
    "prefill_tokens_per_s": (
        "engine_prefill_tokens_per_second",
        "Prompt tokens computed per second, in steps that compute some.",
    ),
}
_COUNTERS = {
    "step": ("engine_steps", "Engine steps since the engine started."),
    "prompt_tokens_total": (
        "engine_prompt_tokens",
        "Prompt tokens of requests that the engine started.",
    ),
    "cached_tokens_total": ("engine_cached_tokens", "Prompt tokens found in the cache."),
    "computed_tokens_total": ("engine_computed_tokens", "Prompt tokens computed."),
    "output_tokens_total": ("engine_output_tokens", "Output tokens."),
    "abandoned_prompt_tokens_total": (
        "abandoned_prompt_tokens",
        "Prompt tokens of requests whose connection to the engine left before they ended.",
    ),
    "abandoned_cached_tokens_total": (
        "abandoned_cached_tokens",
        "Of them, those found in the cache.",
    ),
    "abandoned_output_tokens_total": (
        "abandoned_tokens",
        "Output tokens of such requests, which no entry has.",
    ),
    "unneeded_tokens_total": (
        "unneeded_tokens",
        "Output tokens sampled after the end of their text.",
    ),
    "evicted_blocks_total": ("evicted_blocks", "Blocks evicted under pressure."),
    "expired_blocks_total": ("expired_blocks", "Blocks whose retention ended."),
    "copied_blocks_total": ("copied_blocks", "Blocks copied because they were shared."),
    "resume_gap_tokens_total": (
        "resume_gap_tokens",
        "Cached prompt tokens computed again: no window's blocks or state were kept at their end.",
    ),
    "preemptions_total": ("preemptions", "Sequences preempted."),
}
_ROUTER_HELP = "Model-server name, for autoscalers and routers."


def cache_outcome(cached_tokens: int, prompt_tokens: int) -> str:
    """Classify a prompt: `hit` if at least half was cached, `partial` if less, `miss` if nothing.

    The first tokens of a template are nearly always cached; a prompt with only those takes its full
    time.
    """
    if not cached_tokens:
        return "miss"
    return "hit" if 2 * cached_tokens >= prompt_tokens else "partial"


CACHE_OUTCOMES = ("hit", "partial", "miss")


class LabelledCounter(Collector):
    """A counter with labels. Counts are added several times a request and read a few times a
    minute, by one thread, so a dict suffices."""

    def __init__(self, name: str, help_text: str, *labels: str) -> None:
        self.labels = labels
        self._name, self._text = name, help_text
        self._counts: defaultdict[tuple[str, ...], int] = defaultdict(int)
        if not labels:
            self._counts[()] = 0

    def add(self, count: int, *labels: str) -> None:
        """Add `count` to the series of these labels. O(1)."""
        self._counts[labels] += count

    def clear(self) -> None:
        """Remove all series, whose counts are kept elsewhere."""
        self._counts.clear()

    def set(self, count: int, *labels: str) -> None:
        """Set the series of these labels to a count that is kept elsewhere. O(1)."""
        self._counts[labels] = count

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
    """Three counters by tenant that are counted together, as in `LabelledCounter`."""

    labels = ("tenant",)

    def __init__(self, **texts: str) -> None:
        """`texts`: help text of each counter, by name."""
        assert len(texts) == 3
        self._texts = texts
        self._rows: dict[str, list[int]] = {}

    def add(self, tenant: str, first: int, second: int, third: int) -> None:
        """Add to the three counters, in the order of their names. O(1)."""
        row = self._rows.get(tenant)
        if row is None:
            row = self._rows[tenant] = [0, 0, 0]
        row[0] += first
        row[1] += second
        row[2] += third

    def describe(self) -> Iterator[Metric]:
        """See `Collector`."""
        yield from self._families()

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        for place, family in enumerate(self._families()):
            for tenant, row in self._rows.items():
                family.add_metric((tenant,), row[place])
            yield family

    def _families(self) -> Iterator[CounterMetricFamily]:
        for name, help_text in self._texts.items():
            yield CounterMetricFamily(f"trunkline_{name}", help_text, labels=self.labels)


class DraftCounts(Collector):
    """Drafts of ended requests by source, and the steps that they saved by tenant, counted as in
    `LabelledCounter`."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}

    def add(self, tenant: str, source: str, drafted: int, accepted: int) -> None:
        """Count a request's drafts from one source. O(1)."""
        row = self._counts.setdefault((tenant, source), [0, 0])
        row[0] += drafted
        row[1] += accepted

    def rows(self) -> list[dict[str, object]]:
        """Return the counts by tenant label and source. Each accepted draft saves a step."""
        return [
            {"tenant": tenant, "source": source, "drafted": drafted, "accepted": accepted}
            for (tenant, source), (drafted, accepted) in sorted(self._counts.items())
        ]

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        text = "Drafts of ended requests: accepted as output tokens, or rejected."
        tokens = CounterMetricFamily("trunkline_draft_tokens", text, labels=("source", "outcome"))
        text = "Steps of sequences that accepted drafts saved."
        saved = CounterMetricFamily("trunkline_saved_steps", text, labels=("tenant",))
        by_source: dict[str, list[int]] = {}
        by_tenant: dict[str, int] = {}
        for (tenant, source), (drafted, accepted) in self._counts.items():
            sums = by_source.setdefault(source, [0, 0])
            sums[0] += accepted
            sums[1] += drafted - accepted
            by_tenant[tenant] = by_tenant.get(tenant, 0) + accepted
        for source, (accepted, rejected) in by_source.items():
            tokens.add_metric((source, "accepted"), accepted)
            tokens.add_metric((source, "rejected"), rejected)
        for tenant, steps in by_tenant.items():
            saved.add_metric((tenant,), steps)
        yield tokens
        yield saved


class DurationHistogram(Collector):
    """A histogram of seconds with labels, counted as in `LabelledCounter`."""

    def __init__(
        self, name: str, help_text: str, *labels: str, buckets_s: tuple[float, ...] = _BUCKETS_S
    ) -> None:
        """`buckets_s`: upper edges, ascending."""
        self.labels, self._edges_s = labels, buckets_s
        self._name, self._text = name, help_text
        self._rows: dict[tuple[str, ...], tuple[list[int], list[float]]] = {}
        if not labels:
            self._row(())

    def add(self, seconds: float, *labels: str) -> None:
        """Count one duration. O(1)."""
        counts, sums = self._rows.get(labels) or self._row(labels)
        counts[bisect_left(self._edges_s, seconds)] += 1
        sums[0] += seconds

    def describe(self) -> Iterator[Metric]:
        """See `Collector`."""
        yield HistogramMetricFamily(self._name, self._text, labels=self.labels)

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        family = HistogramMetricFamily(self._name, self._text, labels=self.labels)
        edges = [*map(floatToGoString, self._edges_s), "+Inf"]
        for labels, (counts, sums) in self._rows.items():
            buckets = list(zip(edges, accumulate(counts), strict=True))
            family.add_metric(labels, buckets, sums[0])
        yield family

    def _row(self, labels: tuple[str, ...]) -> tuple[list[int], list[float]]:
        row = self._rows[labels] = [0] * (len(self._edges_s) + 1), [0.0]
        return row


class BudgetGauges(Struct, frozen=True):
    """A tenant's own budget in its present window, in dollars. `spent_usd` includes the amounts
    reserved for running requests; None: no such limit."""

    tenant: str
    window: str
    spent_usd: float
    hard_usd: float | None
    soft_usd: float | None


class _Maker:
    """Makes metrics of one registry, with the prefix of our names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def own(self, metric: C) -> C:
        self._registry.register(metric)
        return metric

    def counter(self, name: str, help_text: str, *labels: str) -> LabelledCounter:
        return self.own(LabelledCounter(f"trunkline_{name}", help_text, *labels))

    def seconds(
        self, name: str, help_text: str, *labels: str, buckets_s: tuple[float, ...] = _BUCKETS_S
    ) -> DurationHistogram:
        name = f"trunkline_{name}_seconds"
        return self.own(DurationHistogram(name, help_text, *labels, buckets_s=buckets_s))

    def gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(f"trunkline_{name}", help_text, labels, registry=self._registry)


class Metrics:
    """Counters, gauges and histograms of one gateway. Belongs to one thread."""

    def __init__(self, tenants_as_labels_max: int, version: str = "") -> None:
        """`version`: of the program, for `trunkline_build_info`."""
        self.registry = CollectorRegistry()
        self._tenants_max = tenants_as_labels_max
        self.has_unnamed_tenants = False
        self._tenants: set[str] = set()
        self._epochs: dict[str, list[int]] = {}

        make = _Maker(self.registry)
        counter, seconds, gauge, own = make.counter, make.seconds, make.gauge, make.own
        gauge("build_info", "1; the labels have the versions.", "version", "python").labels(
            version, python_version()
        ).set(1)
        self.requests = counter("requests", "Finished requests.", "tenant", "route", "ending")
        self.refusals = counter("refusals", "Refused requests, by error code.", "code")
        # A series that appears with its first refusal shows no increase, so no alert would fire.
        self.refusals.add(0, "ledger_unavailable")
        help_text = "Refused requests of tenants, by error code."
        self.tenant_refusals = counter("tenant_refusals", help_text, "tenant", "code")
        self.embeddings = own(_embedding_counts())
        self.tokens, self.contract_tokens = own(_token_counts()), own(_contract_counts())
        self.drafts = own(DraftCounts())
        self.output_format_violations = counter(
            "output_format_violations", "Finished responses that violate their JSON format."
        )
        self.ignored_fields = counter(
            "ignored_fields", "Requests with a field that had no effect, by field.", "field"
        )
        help_text = "Requests that ran under an attention policy."
        self.attention_requests = counter("attention_requests", help_text, "policy")
        self.attention_requests.add(0, "window")
        self.misses = counter("cache_misses", "Breakpoints not read in full, by cause.", "cause")
        self.unreadable = counter("unreadable_requests", "Connections that did not speak HTTP.")
        self.first_token_s = seconds(
            "first_token", "Time from arrival to the first token.", "cache"
        )
        self.duration_s = seconds("request", "Time from arrival to the end of the response.")
        help_text = "Time that requests waited in the engine for their first step, without loads."
        self.queue_s = seconds("queue", help_text)
        help_text = "Time that requests waited for a load, by the slowest level it came from."
        self.load_s = seconds("load", help_text, "level", buckets_s=_LOAD_BUCKETS_S)
        help_text = "Mean time between the output tokens of a request, after the first."
        self.time_per_output_token_s = seconds(
            "time_per_output_token", help_text, buckets_s=_TOKEN_BUCKETS_S
        )
        help_text = "{} tokens per second of the engine, over the last minute."
        self.prompt_tokens_per_s = gauge("prompt_tokens_per_second", help_text.format("Prompt"))
        self.output_tokens_per_s = gauge("output_tokens_per_second", help_text.format("Output"))
        help_text = "Epoch of the ledger; a restored backup begins the next one."
        self.ledger_epoch = gauge("ledger_epoch", help_text)
        help_text = "1 while limits are not shared with other gateways, though they are to be."
        self.shared_degraded = gauge("shared_degraded", help_text)
        help_text = "Soft budgets exceeded in their present windows."
        self._soft_budgets = gauge("soft_budgets_passed", help_text, "tenant")
        self._make_fleet_metrics(counter, gauge)
        self.ledger_restarts = counter("ledger_restarts", "Restarts of the ledger process.")
        help_text = "Blocks inserted into the prefix tree."
        self.inserted_blocks = counter("inserted_blocks", help_text)
        self.encoder = _EncoderMetrics(make)
        self.process, self.money = own(_ProcessMetrics()), own(_MoneyMetrics())
        self.promises, self.levels = own(_PromiseMetrics()), own(LevelMetrics())
        self._engine = own(_EngineMetrics())

    def _make_fleet_metrics(
        self, counter: Callable[..., LabelledCounter], gauge: Callable[..., Gauge]
    ) -> None:
        """Make those of engines elsewhere."""
        help_text = "1 if an engine elsewhere takes requests of a model."
        self._replica_ready = gauge("replica_ready", help_text, "model", "replica")
        self.replica_facts = counter(
            "replica_facts", "Messages of an engine on its prefixes and load.", "model", "replica"
        )
        help_text = "Prompt tokens of requests that started at an engine elsewhere: all, cached,"
        help_text += " predicted to be cached, and missing of these."
        self.routed_tokens = counter("routed_tokens", help_text, "model", "replica", "kind")
        self.promise_moves = counter("promise_moves", "Moves of promises.", "model", "outcome")
        help_text = "Long prompts that another engine was to compute than the one that answers."
        self.prompts_apart = counter("prompts_apart", help_text, "model", "outcome")
        help_text = "Engines elsewhere that take requests, by what they are for."
        self.replica_roles = gauge("replica_roles", help_text, "model", "role")

    def count_epoch(self, epoch: str, prompt: int, cached: int, output: int) -> None:
        """Count the tokens of a request by the engine epoch that computed them."""
        counts = self._epochs.pop(epoch, None)
        if counts is not None:
            self._epochs[epoch] = counts  # the latest: another model's engine may restart often
        else:
            counts = self._epochs[epoch] = [0, 0, 0]
            if len(self._epochs) > ENGINE_EPOCHS_MAX:
                del self._epochs[next(iter(self._epochs))]
        counts[0] += prompt
        counts[1] += cached
        counts[2] += output

    def epoch_tokens(self, epoch: str) -> tuple[int, int, int]:
        """Return the prompt, cached and output tokens of an engine epoch."""
        prompt, cached, output = self._epochs.get(epoch, (0, 0, 0))
        return prompt, cached, output

    def tenant_label(self, name: str) -> str:
        """Return the tenant's name for the first few tenants, `others` for the rest."""
        if name in self._tenants:
            return name
        if len(self._tenants) < self._tenants_max:
            self._tenants.add(name)
            return name
        self.has_unnamed_tenants = True
        return OTHERS

    def set_soft_budgets(self, counts: Mapping[str, int]) -> None:
        """Set the number of exceeded soft budgets by tenant label; remove all other series."""
        self._soft_budgets.clear()
        for tenant, count in counts.items():
            self._soft_budgets.labels(tenant).set(count)

    def set_replicas(self, ready: Mapping[tuple[str, str], bool]) -> None:
        """Set which engines elsewhere take requests, by model and replica; remove all others."""
        self._replica_ready.clear()
        for (model, replica), is_ready in ready.items():
            self._replica_ready.labels(model, replica).set(is_ready)

    def set_engine_stats(
        self,
        stats: Stats,
        *,
        is_ready: bool,
        restarts: int,
        moved: int = 0,
        several: Sequence[EngineState] = (),
    ) -> None:
        """Store the engine's latest heartbeat; `several`: those of several models, which then have
        the label `model`, in place of it. `moved`: see `EngineState`."""
        self._engine.states = several or (EngineState("", stats, is_ready, restarts, moved),)
        self.levels.stats = stats

    def exposition(self) -> bytes:
        """Return the Prometheus text format. O(series)."""
        return bytes(generate_latest(self.registry))


class EngineState(Struct, frozen=True):
    """One engine as metrics show it."""

    model: str
    """The label; "" for none."""
    stats: Stats
    is_ready: bool
    restarts: int
    moved: int = 0
    """Requests that went on at another replica."""


def _token_counts() -> CounterGroup:
    return CounterGroup(
        prompt_tokens="Prompt tokens.",
        cached_tokens="Prompt tokens from the cache.",
        output_tokens="Output tokens.",
    )


def _contract_counts() -> CounterGroup:
    return CounterGroup(
        cache_read_tokens="Prompt tokens charged as cache reads.",
        cache_write_tokens="Prompt tokens charged as cache writes.",
        recomputed_promised_tokens="Tokens charged as cache reads that were computed again.",
    )


def _embedding_counts() -> CounterGroup:
    return CounterGroup(
        embedding_texts="Texts embedded for answers, cached ones too.",
        embedding_tokens="Tokens of embedded texts, cached ones too.",
        embedding_cached_tokens="Tokens of texts whose vectors were cached.",
    )


class _EngineMetrics(Collector):
    """The engines' own statistics, from their last heartbeats."""

    def __init__(self) -> None:
        self.states: Sequence[EngineState] = (EngineState("", Stats(), False, 0),)

    def collect(self) -> Iterator[Metric]:
        ready = "1 if the engine accepts requests."
        yield self._gauge("trunkline_engine_ready", ready, lambda one: int(one.is_ready))
        for field, (name, help_text) in _GAUGES.items():
            yield self._gauge(f"trunkline_{name}", help_text, _field(field))
        for field, (name, help_text) in _COUNTERS.items():
            yield self._counter(f"trunkline_{name}", help_text, _field(field))
        restarts = "Restarts of the engine process."
        yield self._counter("trunkline_engine_restarts", restarts, lambda one: one.restarts)
        moved = "Requests that went on at another engine after theirs was lost."
        yield self._counter("trunkline_moved_requests", moved, lambda one: one.moved)
        for name, field in (
            ("num_requests_running", "running"),
            ("num_requests_waiting", "waiting"),
        ):
            yield self._gauge(f"vllm:{name}", _ROUTER_HELP, _field(field))
        yield self._gauge("vllm:kv_cache_usage_perc", _ROUTER_HELP, _share_in_use)
        for name, field in (
            ("prefix_cache_queries", "prompt_tokens_total"),
            ("prefix_cache_hits", "cached_tokens_total"),
        ):
            yield self._counter(f"vllm:{name}", _ROUTER_HELP, _field(field))

    def _gauge(self, name: str, help_text: str, value: _StateValue) -> Metric:
        return self._filled(GaugeMetricFamily(name, help_text, labels=self._labels()), value)

    def _counter(self, name: str, help_text: str, value: _StateValue) -> Metric:
        return self._filled(CounterMetricFamily(name, help_text, labels=self._labels()), value)

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: _StateValue
    ) -> Metric:
        for one in self.states:
            family.add_metric((one.model,) if one.model else (), value(one))
        return family

    def _labels(self) -> tuple[str, ...]:
        return ("model",) if self.states[0].model else ()


_StateValue = Callable[[EngineState], float]


def _field(name: str) -> _StateValue:
    def read(one: EngineState) -> float:
        return float(getattr(one.stats, name))

    return read


def _share_in_use(one: EngineState) -> float:
    return one.stats.pinned_blocks / one.stats.blocks if one.stats.blocks else 0.0


class _ProcessMetrics(Collector):
    """Memory, processor time and descriptors of this process, as they were last read."""

    def __init__(self) -> None:
        self._source = ProcessCollector(registry=None)
        self._families: list[Metric] = []

    def read(self) -> None:
        """Read them. Blocks: the operating system has them in files."""
        self._families = list(self._source.collect())

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


class _MoneyMetrics(Collector):
    """Money by tenant label. `dollars`: charged since the ledger began, and what the same requests
    would have cost with every prompt token at the input price. `budgets`: tenants' own ones."""

    def __init__(self) -> None:
        self.dollars: Mapping[str, tuple[float, float]] = {}
        self.budgets: Sequence[BudgetGauges] = ()

    def collect(self) -> Iterator[Metric]:
        texts = {
            "cost_usd": "Dollars charged since the ledger began, before adjustments.",
            "uncached_cost_usd": "Dollars that charged requests would have cost without caching.",
        }
        for place, (name, help_text) in enumerate(texts.items()):
            family = CounterMetricFamily(f"trunkline_{name}", help_text, labels=("tenant",))
            for tenant, amounts in self.dollars.items():
                family.add_metric((tenant,), amounts[place])
            yield family
        help_text = "Dollars spent and reserved in the present window of a tenant's budget."
        spent = GaugeMetricFamily(
            "trunkline_budget_spent_usd", help_text, labels=("tenant", "window")
        )
        help_text = "Dollars of a tenant's budget: the hard limit, and the soft one."
        limits = GaugeMetricFamily(
            "trunkline_budget_limit_usd", help_text, labels=("tenant", "window", "kind")
        )
        for budget in self.budgets:
            owner = budget.tenant, budget.window
            spent.add_metric(owner, budget.spent_usd)
            for kind, limit in (("hard", budget.hard_usd), ("soft", budget.soft_usd)):
                if limit is not None:
                    limits.add_metric((*owner, kind), limit)
        yield spent
        yield limits


class _PromiseMetrics(Collector):
    """The outcomes of promises. `by_class`: counts by class, with the running ones."""

    def __init__(self) -> None:
        self.by_class: Mapping[str, Mapping[str, int]] = {}

    def collect(self) -> Iterator[Metric]:
        help_text = "Cache promises by outcome: given, and in the end kept, broken or given up."
        ended = CounterMetricFamily("trunkline_promises", help_text, labels=("class", "outcome"))
        help_text = "Cache promises that still run."
        running = GaugeMetricFamily("trunkline_running_promises", help_text, labels=("class",))
        for name, counts in sorted(self.by_class.items()):
            running.add_metric((name,), counts["running"])
            for outcome, count in counts.items():
                if outcome != "running":
                    ended.add_metric((name, outcome), count)
        yield ended
        yield running


class _EncoderMetrics:
    """Metrics of the embedding model; 0 without one."""

    def __init__(self, make: _Maker) -> None:
        self.ready = make.gauge("encoder_ready", "1 if texts are embedded now.")
        help_text = "Tokens that wait to be embedded."
        self.waiting_tokens = make.gauge("encoder_waiting_tokens", help_text)
        help_text = "Size of the cache of vectors."
        self.cached_bytes = make.gauge("embedding_cache_bytes", help_text)
        help_text = "Restarts of the encoder process."
        self.restarts = make.counter("encoder_restarts", help_text)
        self.batches = make.counter("encoder_batches", "Batches of texts that were encoded.")
