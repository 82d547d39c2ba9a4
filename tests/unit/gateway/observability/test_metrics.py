"""Metrics: defined once, bounded in labels, readable by Prometheus."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from engine.api import Stats
from gateway.observability.metrics import OTHERS, Metrics

ROUTERS = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
}


@pytest.fixture
def telemetry() -> Metrics:
    return Metrics(2)


def samples(telemetry: Metrics) -> dict[str, float]:
    """Every sample without labels, as a Prometheus server reads it."""
    families = text_string_to_metric_families(telemetry.exposition().decode())
    return {s.name: s.value for family in families for s in family.samples if not s.labels}


def test_the_engines_heartbeat_is_shown_as_it_came(telemetry: Metrics) -> None:
    """Gauges as gauges, counters as counters, whatever was there before."""
    telemetry.show_engine(Stats(blocks=9, step=7), is_ready=False, restarts=0)
    stats = Stats(
        blocks=10, pinned_blocks=4, free_blocks=6, waiting=3, running=2, evicted_blocks_total=5,
        prompt_tokens_total=100, cached_tokens_total=40,
    )  # fmt: skip
    telemetry.show_engine(stats, is_ready=True, restarts=1)
    shown = samples(telemetry)

    assert shown["trunkline_kv_blocks"] == 10
    assert shown["trunkline_evicted_blocks_total"] == 5
    assert shown["trunkline_engine_steps_total"] == 0
    assert (shown["trunkline_engine_ready"], shown["trunkline_engine_restarts_total"]) == (1, 1)
    assert shown["vllm:num_requests_waiting"] == 3
    assert shown["vllm:kv_cache_usage_perc"] == 0.4
    assert shown["vllm:prefix_cache_hits_total"] == 40


def test_what_became_of_promises_is_shown_by_class(telemetry: Metrics) -> None:
    """Those that ended as counters, those that run as a gauge."""
    promises = {"5m": {"given": 3, "kept": 1, "broken": 1, "running": 1}, "1h": {"running": 2}}
    telemetry.show_cache(promises, 7)
    families = text_string_to_metric_families(telemetry.exposition().decode())
    shown = {
        (s.name, *s.labels.values()): s.value
        for family in families
        for s in family.samples
        if "promises" in s.name or "inserted" in s.name
    }

    assert shown["trunkline_promises_total", "5m", "broken"] == 1
    assert shown["trunkline_promises_total", "5m", "given"] == 3
    assert shown["trunkline_running_promises", "1h"] == 2
    assert shown["trunkline_inserted_blocks_total",] == 7
    assert ("trunkline_promises_total", "5m", "running") not in shown


def test_every_count_of_the_heartbeat_has_a_metric(telemetry: Metrics) -> None:
    """A count that nobody can see was not worth keeping."""
    fields = [f for f in Stats.__struct_fields__ if f not in ("call_id", "changed")]
    before = samples(telemetry)
    for number, field in enumerate(fields, 1000):
        telemetry.show_engine(
            structs.replace(Stats(), **{field: number}), is_ready=False, restarts=0
        )

        assert number in samples(telemetry).values(), field
    assert not set(range(1000, 1000 + len(fields))) & set(before.values())


def test_deaths_of_the_ledgers_process_are_counted(telemetry: Metrics) -> None:
    """Requests go on over them; somebody should hear of it all the same."""
    telemetry.show_ledger(3)

    assert samples(telemetry)["trunkline_ledger_restarts_total"] == 3


def test_an_engine_that_never_answered_divides_by_nothing(telemetry: Metrics) -> None:
    """Before the first heartbeat there are no blocks."""
    assert samples(telemetry)["vllm:kv_cache_usage_perc"] == 0


def test_a_thousand_tenants_are_a_few_labels(telemetry: Metrics) -> None:
    """A label per tenant would be a series per tenant, for ever."""
    names = {telemetry.tenant_label(f"t{number % 1000}") for number in range(2000)}

    assert names == {"t0", "t1", OTHERS}


def test_a_tenant_called_others_is_counted_with_them() -> None:
    """Names are theirs to choose; the series stays one."""
    assert Metrics(0).tenant_label(OTHERS) == OTHERS


def test_series_are_not_doubled_by_the_instants_they_were_made(telemetry: Metrics) -> None:
    """A counter is one series for each set of labels."""
    telemetry.requests.add(1, "a", "/v1", "done")

    assert b"_created" not in telemetry.exposition()


def test_times_are_counted_in_every_bucket_that_holds_them(telemetry: Metrics) -> None:
    """Buckets are cumulative, a time on an edge is within it, and the last one has all."""
    for seconds in (0.004, 0.005, 0.3, 1e9):
        telemetry.first_token_s.add(seconds, "hit")
    shown = {
        (s.name.removeprefix("trunkline_first_token_seconds_"), s.labels.get("le")): s.value
        for family in text_string_to_metric_families(telemetry.exposition().decode())
        for s in family.samples
        if s.labels.get("cache") == "hit"
    }

    assert [shown["bucket", edge] for edge in ("0.005", "0.25", "0.5", "120.0", "+Inf")] == [
        2, 2, 3, 3, 4,
    ]  # fmt: skip
    assert shown["count", None] == 4
    assert shown["sum", None] == pytest.approx(1e9 + 0.309)


def test_two_gateways_do_not_share_counts() -> None:
    """Tests, and embedders with two models."""
    first, second = Metrics(1), Metrics(1)
    first.tokens.add("a", 1, 2, 3)

    assert b'tenant="a"' in first.exposition()
    assert b'tenant="a"' not in second.exposition()


def test_names_say_whose_they_are_and_in_which_unit(telemetry: Metrics) -> None:
    """Ours begin with our name; times are in seconds; each has a text."""
    for family in text_string_to_metric_families(telemetry.exposition().decode()):
        assert re.fullmatch(r"trunkline_[a-z_]+", family.name) or family.name in ROUTERS
        assert family.documentation.endswith(".")
        assert not re.search(r"_(ms|millis|s)$", family.name)


def test_every_metric_is_in_the_operators_guide(telemetry: Metrics) -> None:
    """And the guide names none that is not there."""
    text = (Path(__file__).parents[4] / "docs/operations.md").read_text()
    named = set(re.findall(r"\b(?:trunkline|vllm)[_:][a-z_]*[a-z]", text))
    families = text_string_to_metric_families(telemetry.exposition().decode())
    there = {f"{f.name}_total" if f.type == "counter" else f.name for f in families}
    routers = {name.removesuffix("_total") for name in there if name in ROUTERS or ":" in name}
    ours = {name for name in there if ":" not in name}

    assert named == ours | routers
