"""Request ids, and the log line and span of a finished request."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from gateway.http.request_context import (
    ID_BYTES,
    IDS_AT_ONCE,
    RequestIds,
    RequestState,
    log_facts,
    record_of,
    span_facts,
)


def state(**more: Any) -> RequestState:
    """The state of a request that began at 10 s on the clock."""
    return RequestState("r", 10.0, **more)


@pytest.mark.parametrize(
    ("method", "shown"), [("POST", "POST"), ("GET\x1b[2J", "other"), ("X" * 9, "other")]
)
def test_log_line_shows_only_alphabetic_methods(method: str, shown: str) -> None:
    """A method from the wire could carry terminal escapes into the log."""
    assert log_facts(state(), method, 200, 0.5, "")["method"] == shown


def test_span_times_are_relative_to_the_start_of_the_request() -> None:
    """The log line's first-token time is relative to the submission to the engine."""
    facts = state(submitted_s=10.2, first_token_s=0.3, settled_s=10.9)

    line = log_facts(facts, "POST", 200, 1.0, "")
    span = span_facts(facts, 200, 1.0, 5_000, "")

    assert (line["first_token_ms"], line["total_ms"]) == (300.0, 1000.0)
    assert (span.submitted_s, span.first_token_s, span.settled_s) == pytest.approx((0.2, 0.5, 0.9))


def test_first_token_is_not_after_the_settlement() -> None:
    """The engine counts from its receipt, which is before the gateway knows of it."""
    facts = state(submitted_s=10.2, first_token_s=0.9, settled_s=10.9)

    times = (
        record_of(facts, 200, 1.0).first_token_s,
        span_facts(facts, 200, 1.0, 0, "").first_token_s,
    )

    assert times == pytest.approx((0.9, 0.9))


def test_a_load_is_a_part_of_the_time_before_the_first_step() -> None:
    """The record has both, so that the page can tell queue, load and compute apart."""
    facts = state(submitted_s=10.25, queue_s=0.5, load_s=0.125, load_level="disk")
    record = record_of(facts, 200, 1.0)

    assert (record.submitted_s, record.started_s, record.load_s) == (0.25, 0.75, 0.125)
    assert span_facts(facts, 200, 1.0, 5_000, "").load_s == 0.125
    assert record_of(state(submitted_s=10.25), 200, 1.0).load_s is None


def test_refused_request_has_no_engine_times() -> None:
    """The refusal's code is the span's error."""
    facts = state(ending="refused", code="bad")

    span = span_facts(facts, 400, 0.1, 5_000, "")

    assert log_facts(facts, "POST", 400, 0.1, "")["first_token_ms"] is None
    assert (span.submitted_s, span.first_token_s, span.settled_s) == (None, None, None)
    assert span.error == "bad"


@pytest.mark.parametrize(("is_complete", "status"), [(False, 0), (True, 200)])
def test_client_that_leaves_after_the_last_byte_is_not_cancelled(
    is_complete: bool, status: int
) -> None:
    """A complete response was delivered; an incomplete one counts as cancelled, status 0."""
    facts = state(is_complete=is_complete)

    assert facts.mark_client_left() == status
    assert facts.ending == ("done" if is_complete else "cancelled")


def test_request_ids_are_ordered_and_unpredictable() -> None:
    """Each id has 80 bits of system randomness after the millisecond, also within a batch."""
    requested: list[int] = []

    def random_bytes(count: int) -> bytes:
        requested.append(count)
        return os.urandom(count)

    now_ms = iter(range(10**12, 10**13))
    new_id = RequestIds(lambda: next(now_ms), random_bytes)
    made = [new_id() for _ in range(2 * IDS_AT_ONCE + 1)]

    assert made == sorted(made)
    assert len({request_id[12:] for request_id in made}) == len(made)
    assert all(re.fullmatch("[0-9a-f]{32}", request_id) for request_id in made)
    assert sum(requested) == 3 * IDS_AT_ONCE * ID_BYTES
