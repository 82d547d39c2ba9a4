"""What is told of a request when it is over, as a line of the log and as a span."""

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
    span_facts,
)


def state(**more: Any) -> RequestState:
    """A request that began at 10 s of some clock."""
    return RequestState("r", 10.0, **more)


@pytest.mark.parametrize(
    ("method", "shown"), [("POST", "POST"), ("GET\x1b[2J", "other"), ("X" * 9, "other")]
)
def test_a_method_is_shown_if_it_is_a_word(method: str, shown: str) -> None:
    """Whatever stands in the log came from us."""
    assert log_facts(state(), method, 200, 0.5)["method"] == shown


def test_times_are_told_from_the_beginning_of_the_request() -> None:
    """The first token's counts from when the engine had the request."""
    facts = state(submitted_s=10.2, first_token_s=0.3, settled_s=10.9)

    line = log_facts(facts, "POST", 200, 1.0)
    span = span_facts(facts, 200, 1.0, 5_000, "")

    assert (line["first_token_ms"], line["total_ms"]) == (300.0, 1000.0)
    assert (span.submitted_s, span.first_token_s, span.settled_s) == pytest.approx((0.2, 0.5, 0.9))


def test_what_never_reached_the_engine_has_no_times_of_it() -> None:
    """A refusal; its code is the span's error."""
    facts = state(ending="refused", code="bad")

    span = span_facts(facts, 400, 0.1, 5_000, "")

    assert log_facts(facts, "POST", 400, 0.1)["first_token_ms"] is None
    assert (span.submitted_s, span.first_token_s, span.settled_s) == (None, None, None)
    assert span.error == "bad"


@pytest.mark.parametrize(("is_complete", "status"), [(False, 0), (True, 200)])
def test_a_client_that_leaves_after_the_last_byte_has_lost_nothing(
    is_complete: bool, status: int
) -> None:
    """It has its answer; before, it has none."""
    facts = state(is_complete=is_complete)

    assert facts.mark_client_left() == status
    assert facts.ending == ("done" if is_complete else "cancelled")


def test_request_ids_are_in_order_and_nobody_guesses_one() -> None:
    """80 bits of the system's own randomness each behind the millisecond, however many are asked
    for at once."""
    asked: list[int] = []

    def random_bytes(count: int) -> bytes:
        asked.append(count)
        return os.urandom(count)

    now_ms = iter(range(10**12, 10**13))
    new_id = RequestIds(lambda: next(now_ms), random_bytes)
    made = [new_id() for _ in range(2 * IDS_AT_ONCE + 1)]

    assert made == sorted(made)
    assert len({one[12:] for one in made}) == len(made)
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in made)
    assert sum(asked) == 3 * IDS_AT_ONCE * ID_BYTES
