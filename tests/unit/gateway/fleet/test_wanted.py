"""How many engines the load asks for."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.statistics import Stats
from gateway.fleet.errors import FleetError
from gateway.fleet.wanted import (
    LOAD_MAX,
    GatewayCounts,
    WantedEngines,
    count_wanted,
    quantile,
    read_counts,
    wanted_text,
)
from gateway.observability.metrics import Metrics

NOTHING = GatewayCounts(0, 0, 0, 0, 0.0, {}, 2, 2_000.0)
WINDOW_S, ROWS, WAIT_S = 300.0, 64, 0.5


def wanted(**after: Any) -> WantedEngines:
    """Return what counts of five minutes say; the rate is 1,000 tokens/s an engine."""
    return count_wanted(NOTHING, replace(NOTHING, **after), WINDOW_S, ROWS, WAIT_S)


def test_uncached_prompt_tokens_ask_for_engines() -> None:
    """3,100 tokens/s at 1,000 an engine, each busy for three quarters of its time."""
    found = wanted(prompt_tokens=3_100 * WINDOW_S)

    assert found.prefill_load == pytest.approx(3.1)
    assert found.engines == 5


def test_cached_tokens_ask_for_none() -> None:
    """A queue of cached prompts is no work."""
    found = wanted(prompt_tokens=9e9, cached_tokens=9e9)

    assert (found.engines, found.prefill_load) == (1, 0.0)


def test_running_answers_take_rows() -> None:
    """1,280 tokens/s at 0.1 s a token are 128 rows, those of two engines."""
    tokens = 1_280 * WINDOW_S
    found = wanted(output_tokens=tokens, answers=100, answers_s=10.0)

    assert found.mean_rows == pytest.approx(128)
    assert found.decode_load == pytest.approx(2.0)
    assert found.engines == 3


def test_long_waits_ask_for_one_more_than_there_are() -> None:
    """Whatever the load says; at the limit nothing is asked."""
    late = wanted(waits={0.5: 10, 1.0: 100, math.inf: 100})
    timely = wanted(waits={0.5: 90, 1.0: 100, math.inf: 100})

    assert (late.engines, late.wait_s) == (3, 1.0)
    assert (timely.engines, timely.wait_s) == (1, 0.5)
    assert "too long: one more than there are" in wanted_text(late)
    assert "too long" not in wanted_text(timely)


def test_only_waits_of_the_window_count() -> None:
    """An early rush is over."""
    before = {0.5: 0.0, math.inf: 1_000.0}
    after = {0.5: 10.0, math.inf: 1_010.0}

    assert quantile(before, after) == 0.5
    assert quantile(before, before) == 0.0
    assert quantile(before, {0.5: 0.0, math.inf: 1_001.0}) == math.inf


@given(
    uncached=st.floats(0, 1e6), rows=st.floats(0, 1e4), rate=st.floats(1, 1e6), n=st.integers(1, 64)
)
def test_it_is_the_smallest_number_within_the_load(
    uncached: float, rows: float, rate: float, n: int
) -> None:
    """One fewer would be too busy."""
    before = GatewayCounts(0, 0, 0, 0, 0.0, {}, n, rate * n)
    after = replace(before, prompt_tokens=uncached, output_tokens=rows, answers=1.0, answers_s=1.0)
    found = count_wanted(before, after, 1.0, ROWS, WAIT_S)
    load = found.prefill_load + found.decode_load

    assert load <= LOAD_MAX * found.engines * (1 + 1e-6) + 1e-6
    assert found.engines == 1 or load > LOAD_MAX * (found.engines - 1)


def test_a_gateway_that_began_anew_is_no_measurement() -> None:
    """Its counters fell."""
    with pytest.raises(FleetError, match="begun anew"):
        count_wanted(replace(NOTHING, prompt_tokens=5.0), NOTHING, 1.0, ROWS, WAIT_S)


def test_without_an_engine_nothing_is_measured() -> None:
    """Not even what one does."""
    with pytest.raises(FleetError, match="no engine takes requests"):
        wanted(engines=0)


def gateway_page(*replicas: bool) -> str:
    """Return the metrics of a gateway with some counts."""
    metrics = Metrics(8)
    stats = Stats(prefill_tokens_per_s=3_000.0)
    metrics.set_engine_stats(stats, is_ready=True, restarts=0)
    metrics.set_replicas({("m", f"e{at}"): is_ready for at, is_ready in enumerate(replicas)})
    metrics.tokens.add("ada", 100, 60, 7)
    metrics.tokens.add("bob", 100, 60, 7)
    metrics.queue_s.add(0.3)
    metrics.time_per_output_token_s.add(0.02)
    return metrics.exposition().decode()


def test_a_gateways_metrics_are_read() -> None:
    """The names are those that it tells; a replica that is not ready computes nothing."""
    found = read_counts(gateway_page(True, False, True))

    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens) == (200, 120, 14)
    assert (found.answers, found.answers_s) == (1, 0.02)
    assert (found.engines, found.prefill_tokens_per_s) == (2, 3_000.0)
    assert quantile({}, found.waits) == 0.5
    assert read_counts(gateway_page()).engines == 1


def test_a_gateway_without_a_request_has_counted_none() -> None:
    """A counter with labels has no line before its first count."""
    found = read_counts(Metrics(8).exposition().decode())

    assert replace(found, waits={}) == GatewayCounts(0, 0, 0, 0, 0, {}, 0, 0)
    assert quantile({}, found.waits) == 0.0


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("", "no trunkline_engine_ready; expected /metrics of a gateway's admin listener"),
        ("<html>", "no metrics in Prometheus' text format"),
        (
            'trunkline_engine_ready{model="a"} 1\ntrunkline_engine_ready{model="b"} 1\n',
            "the gateway serves 2 models; expected one",
        ),
    ],
)
def test_other_pages_are_refused(page: str, message: str) -> None:
    """By what is wrong with them."""
    with pytest.raises(FleetError) as refused:
        read_counts(page)

    assert message in str(refused.value)
