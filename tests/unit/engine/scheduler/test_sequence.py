"""Sequences: their progress, the tokens left to compute, and usage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import CacheGrant, Request
from engine.scheduler.sequence import ActiveRequest, Sequence, common_tokens


def make_sequence(
    tokens: list[int], *, max_tokens: int = 4, arrival: int = 0, priority: int = 0
) -> Sequence:
    """Return the first sequence of a request received at second 10."""
    request = Request("r", tuple(tokens), max_tokens, CacheGrant(b"n"), priority=priority)
    work = ActiveRequest(request, arrival, 10.0)
    work.sequences.append(Sequence(work, 0, 0))
    return work.sequences[0]


def test_a_new_sequence_has_its_whole_prompt_to_compute() -> None:
    """Prefill is no state: `computed` is below the length."""
    sequence = make_sequence([1, 2, 3])

    assert (sequence.tokens_to_compute, sequence.is_schedulable, sequence.is_decoding) == (
        3,
        True,
        False,
    )


def test_the_last_prompt_token_alone_is_not_decoding() -> None:
    """After a full hit one prompt token is left; it queues with the prompts, for fairness."""
    sequence = make_sequence([1, 2, 3])
    sequence.computed = 2

    assert not sequence.is_decoding


def test_a_token_in_flight_counts_towards_the_length() -> None:
    """The next step is planned before the token's value is known."""
    sequence = make_sequence([1, 2, 3])
    sequence.computed, sequence.in_flight = 3, 1

    assert (sequence.length, sequence.tokens_to_compute, sequence.is_decoding) == (4, 1, True)


def test_no_row_follows_the_last_of_max_tokens() -> None:
    """While it is in flight, a further row would certainly be wasted."""
    sequence = make_sequence([1], max_tokens=2)
    sequence.tokens.append(0)
    sequence.output_tokens, sequence.in_flight, sequence.computed = 1, 1, 2

    assert not sequence.is_schedulable


def test_a_prewarm_computes_its_prompt() -> None:
    assert make_sequence([1, 2], max_tokens=0).is_schedulable


def test_rank_is_priority_then_arrival() -> None:
    """The lower rank is served first and preempted last."""
    old, new = make_sequence([1], arrival=1), make_sequence([1], arrival=2)
    urgent = make_sequence([1], arrival=3, priority=1)

    assert sorted([new, old, urgent], key=lambda s: s.rank) == [urgent, old, new]


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=20),
    st.lists(st.integers(0, 1), min_size=1, max_size=20),
    st.integers(1, 4),
)
def test_common_tokens_are_the_longest_equal_whole_blocks(
    a: list[int], b: list[int], size: int
) -> None:
    """Bisection against counting. One token of each sequence is left to compute, for its logits."""
    expected = 0
    while a[: expected + size] == b[: expected + size]:
        if expected + size > min(len(a), len(b)) - 1:
            break
        expected += size

    assert common_tokens(make_sequence(a), make_sequence(b), size) == expected


@pytest.mark.parametrize(("started_s", "queue_s"), [(None, 5.0), (12.0, 2.0)])
def test_usage_counts_the_time_in_the_queue(started_s: float | None, queue_s: float) -> None:
    """A request that never started has waited until now."""
    work = make_sequence([1]).parent
    work.started_at_s = started_s

    usage = work.usage(15.0)

    assert (usage.queue_s, usage.total_s, usage.first_token_s) == (queue_s, 5.0, None)
