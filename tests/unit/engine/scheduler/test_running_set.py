"""The sums over the sequences that run are those over a walk of them."""

from __future__ import annotations

import pytest

from engine.api import CacheGrant, Request
from engine.errors import InvariantViolation
from engine.scheduler.running_set import RunningSet
from engine.scheduler.sequence import ActiveRequest, Sequence

PREEMPTIONS_MAX = 2


def sequence(number: int, samples: int = 1, preemptions: int = 0) -> Sequence:
    request = Request(f"r{number}", (1,), 1, CacheGrant(b"n"), samples=samples)
    made = Sequence(ActiveRequest(request, number, 0.0), 0, number)
    made.preemptions = preemptions
    return made


def test_a_prompt_takes_the_places_of_its_samples_until_these_run() -> None:
    """Otherwise they would find none when their prompt is computed."""
    running, prompt = RunningSet(PREEMPTIONS_MAX), sequence(0, samples=3)
    forks = [Sequence(prompt.parent, index, index) for index in (1, 2)]

    running.add(prompt)
    before = running.batch_slots
    prompt.parent.is_forked = True
    running.split_slots(prompt)
    for fork in forks:
        running.add(fork)
    running.check()
    together = running.batch_slots
    running.remove(prompt)
    running.check()

    assert (before, together, running.batch_slots) == (3, 3, 2)


def test_what_does_not_run_may_be_taken_out() -> None:
    """A sequence ends wherever it stands."""
    running = RunningSet(PREEMPTIONS_MAX)
    running.add(sequence(0))

    running.remove(sequence(1))

    assert [s.sequence_id for s in running] == [0]
    assert running.batch_slots == 1


def test_those_whose_blocks_nobody_takes_are_known() -> None:
    """Each admission asks for them, and nearly always there is none."""
    running = RunningSet(PREEMPTIONS_MAX)
    often = sequence(1, preemptions=PREEMPTIONS_MAX)
    for each in (sequence(0, preemptions=PREEMPTIONS_MAX - 1), often):
        running.add(each)

    pinned = running.pinned
    running.remove(often)

    assert pinned == [often]
    assert running.pinned == []
    running.check()


def test_a_sum_that_is_wrong_is_found() -> None:
    """A sample that forked unseen."""
    running, prompt = RunningSet(PREEMPTIONS_MAX), sequence(0, samples=2)
    running.add(prompt)

    prompt.parent.is_forked = True

    with pytest.raises(InvariantViolation, match="2 slots"):
        running.check()
