"""Metrics: defined once, bounded in labels, readable by Prometheus."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec import structs
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from engine.statistics import Stats
from gateway.observability.metrics import OTHERS, BudgetGauges, EngineState, Metrics

ROUTERS = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(2)


def families_of(metrics: Metrics) -> list[Metric]:
    """Return the metrics as a Prometheus server reads them."""
    return list(text_string_to_metric_families(metrics.exposition().decode()))


def samples(metrics: Metrics) -> dict[str, float]:
    """Return every sample without labels."""
    return {s.name: s.value for f in families_of(metrics) for s in f.samples if not s.labels}


def values(metrics: Metrics) -> set[float]:
    """Return the values of all samples."""
    return {sample.value for family in families_of(metrics) for sample in family.samples}


def shown_with_labels(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """Return the samples of one name by the values of their labels, in the order of their
    names."""
    found = [s for family in families_of(metrics) for s in family.samples if s.name == name]
    return {tuple(value for _, value in sorted(s.labels.items())): s.value for s in found}


def test_exposes_latest_engine_heartbeat(metrics: Metrics) -> None:
    """Gauges are exported as gauges and counters as counters."""
    metrics.set_engine_stats(Stats(blocks=9, step=7), is_ready=False, restarts=0)
    stats = Stats(
        blocks=10, pinned_blocks=4, free_blocks=6, waiting=3, running=2, evicted_blocks_total=5,
        prompt_tokens_total=100, cached_tokens_total=40,
    )  # fmt: skip
    metrics.set_engine_stats(stats, is_ready=True, restarts=1)
    shown = samples(metrics)

    assert shown["trunkline_kv_blocks"] == 10
    assert shown["trunkline_evicted_blocks_total"] == 5
    assert shown["trunkline_engine_steps_total"] == 0
    assert (shown["trunkline_engine_ready"], shown["trunkline_engine_restarts_total"]) == (1, 1)
    assert shown["vllm:num_requests_waiting"] == 3
    assert shown["vllm:kv_cache_usage_perc"] == 0.4
    assert shown["vllm:prefix_cache_hits_total"] == 40


def test_engines_of_several_models_have_a_label(metrics: Metrics) -> None:
    """Each name once, with a series for each model and none without a model."""
    states = [
        EngineState("a", Stats(blocks=10, pinned_blocks=4), True, 1),
        EngineState("b", Stats(blocks=20), False, 0),
    ]
    metrics.set_engine_stats(Stats(), is_ready=True, restarts=0, several=states)
    families = families_of(metrics)
    shown = {
        (s.name, s.labels["model"]): s.value
        for f in families
        for s in f.samples
        if "model" in s.labels
    }

    assert (shown["trunkline_kv_blocks", "a"], shown["trunkline_kv_blocks", "b"]) == (10, 20)
    assert (shown["trunkline_engine_ready", "a"], shown["trunkline_engine_ready", "b"]) == (1, 0)
    assert shown["trunkline_engine_restarts_total", "a"] == 1
    assert shown["vllm:kv_cache_usage_perc", "a"] == 0.4
    names = [one.name for one in families]
    assert len(names) == len(set(names))
    assert not {name for name, _ in shown} & samples(metrics).keys()


def test_exposes_promises_by_class(metrics: Metrics) -> None:
    """Ended promises as counters, running promises as a gauge."""
    promises = {"5m": {"given": 3, "kept": 1, "broken": 1, "running": 1}, "1h": {"running": 2}}
    metrics.promises.by_class = promises

    assert shown_with_labels(metrics, "trunkline_promises_total") == {
        ("5m", "given"): 3,
        ("5m", "kept"): 1,
        ("5m", "broken"): 1,
    }
    running = shown_with_labels(metrics, "trunkline_running_promises")
    assert running == {("1h",): 2, ("5m",): 1}


def test_every_heartbeat_field_has_a_metric(metrics: Metrics) -> None:
    fields = [f for f in Stats.__struct_fields__ if f not in ("call_id", "changed", "levels")]
    before = values(metrics)
    for number, field in enumerate(fields, 1000):
        metrics.set_engine_stats(
            structs.replace(Stats(), **{field: number}), is_ready=False, restarts=0
        )

        assert number in values(metrics), field
    assert not set(range(1000, 1000 + len(fields))) & before


def test_counter_may_show_a_count_that_is_kept_elsewhere(metrics: Metrics) -> None:
    """Restarts of the ledger process: requests survive them, so only the metric shows them."""
    metrics.ledger_restarts.set(2)
    metrics.ledger_restarts.set(3)

    assert samples(metrics)["trunkline_ledger_restarts_total"] == 3


def test_exposes_zero_usage_before_the_first_heartbeat(metrics: Metrics) -> None:
    """There are no blocks to divide by."""
    assert samples(metrics)["vllm:kv_cache_usage_perc"] == 0


def test_limits_tenant_labels(metrics: Metrics) -> None:
    """A label per tenant would be a series per tenant, for ever."""
    names = {metrics.tenant_label(f"t{number % 1000}") for number in range(2000)}

    assert names == {"t0", "t1", OTHERS}


def test_tenant_named_others_shares_that_label() -> None:
    assert Metrics(0).tenant_label(OTHERS) == OTHERS


def test_exposes_no_created_series(metrics: Metrics) -> None:
    """A counter is one series for each set of labels."""
    metrics.requests.add(1, "a", "/v1", "done")

    assert b"_created" not in metrics.exposition()


def test_histogram_buckets_are_cumulative(metrics: Metrics) -> None:
    """A duration on an edge is within its bucket, and the last bucket has all."""
    for seconds in (0.004, 0.005, 0.3, 1e9):
        metrics.first_token_s.add(seconds, "hit")
    shown = {
        (s.name.removeprefix("trunkline_first_token_seconds_"), s.labels.get("le")): s.value
        for family in families_of(metrics)
        for s in family.samples
        if s.labels.get("cache") == "hit"
    }

    assert [shown["bucket", edge] for edge in ("0.005", "0.25", "0.5", "120.0", "+Inf")] == [
        2, 2, 3, 3, 4,
    ]  # fmt: skip
    assert shown["count", None] == 4
    assert shown["sum", None] == pytest.approx(1e9 + 0.309)


def test_gateways_do_not_share_counts() -> None:
    """Tests and embedders run several in one process."""
    first, second = Metrics(1), Metrics(1)
    first.tokens.add("a", 1, 2, 3)

    assert b'tenant="a"' in first.exposition()
    assert b'tenant="a"' not in second.exposition()


def test_names_have_prefix_unit_and_help(metrics: Metrics) -> None:
    for family in families_of(metrics):
        assert re.fullmatch(r"trunkline_[a-z_]+", family.name) or family.name in ROUTERS
        assert family.documentation.endswith(".")
        assert not re.search(r"_(ms|millis|s)$", family.name)


def test_every_metric_is_in_the_operators_guide(metrics: Metrics) -> None:
    """And the guide names no metric that does not exist."""
    text = (Path(__file__).parents[4] / "docs/operations.md").read_text()
    named = set(re.findall(r"\b(?:trunkline|vllm)[_:][a-z_]*[a-z]", text))
    families = families_of(metrics)
    there = {f"{f.name}_total" if f.type == "counter" else f.name for f in families}
    routers = {name.removesuffix("_total") for name in there if name in ROUTERS or ":" in name}
    ours = {name for name in there if ":" not in name}

    assert named == ours | routers


def test_tells_versions_and_process(metrics: Metrics) -> None:
    """The operating system is asked apart from the exposition, which must not block."""
    told = Metrics(1, "9.8.7")
    told.process.read()

    assert samples(metrics).get("process_resident_memory_bytes") is None
    assert samples(told)["process_resident_memory_bytes"] > 1_000_000
    (((_, version), value),) = shown_with_labels(told, "trunkline_build_info").items()
    assert (version, value) == ("9.8.7", 1)


def test_exposes_money_by_tenant(metrics: Metrics) -> None:
    """A budget that is removed leaves no series."""
    metrics.money.dollars = {"ada": (1.5, 4.0)}
    metrics.money.budgets = [BudgetGauges("ada", "day", 1.5, 2.0, None)]
    limits = shown_with_labels(metrics, "trunkline_budget_limit_usd")
    spent = shown_with_labels(metrics, "trunkline_budget_spent_usd")
    metrics.money.budgets = []

    assert shown_with_labels(metrics, "trunkline_cost_usd_total") == {("ada",): 1.5}
    assert shown_with_labels(metrics, "trunkline_uncached_cost_usd_total") == {("ada",): 4.0}
    assert (limits, spent) == ({("hard", "ada", "day"): 2.0}, {("ada", "day"): 1.5})
    assert shown_with_labels(metrics, "trunkline_budget_spent_usd") == {}


def test_notes_that_a_tenant_has_no_label_of_its_own(metrics: Metrics) -> None:
    named = [metrics.tenant_label(name) for name in ("a", "b")]
    before = metrics.has_unnamed_tenants

    assert (named, before) == (["a", "b"], False)
    assert metrics.tenant_label("c") == OTHERS
    assert metrics.has_unnamed_tenants


def test_drafts_are_counted_by_source_and_saved_steps_by_tenant(metrics: Metrics) -> None:
    """An operator sees which source pays, and for whom; each accepted draft saved a step."""
    metrics.drafts.add("ada", "ngram", 10, 7)
    metrics.drafts.add("ada", "suffix", 4, 0)
    metrics.drafts.add("bob", "ngram", 2, 2)

    assert shown_with_labels(metrics, "trunkline_draft_tokens_total") == {
        ("accepted", "ngram"): 9, ("rejected", "ngram"): 3,
        ("accepted", "suffix"): 0, ("rejected", "suffix"): 4,
    }  # fmt: skip
    assert shown_with_labels(metrics, "trunkline_saved_steps_total") == {("ada",): 7, ("bob",): 2}
    assert metrics.drafts.rows()[0] == {
        "tenant": "ada", "source": "ngram", "drafted": 10, "accepted": 7
    }  # fmt: skip
