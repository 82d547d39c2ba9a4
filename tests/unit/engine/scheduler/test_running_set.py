"""The running set: its sums equal a walk over the running sequences."""

from __future__ import annotations

import random

import pytest

from engine.api import CacheGrant, Request
from engine.errors import InvariantViolation
from engine.scheduler.running_set import RunningSet
from engine.scheduler.sequence import ActiveRequest, Sequence
from tests.tables import each_row

PREEMPTIONS_MAX = 2


def sequence(number: int, samples: int = 1, preemptions: int = 0) -> Sequence:
    request = Request(f"r{number}", (1,), 1, CacheGrant(b"n"), samples=samples)
    made = Sequence(ActiveRequest(request, number, 0.0), 0, number)
    made.preemptions = preemptions
    return made


def test_a_prompt_takes_a_batch_slot_per_sample() -> None:
    """Otherwise its forks would find no slot when the prompt is computed."""
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


def test_removing_a_sequence_that_does_not_run_is_allowed() -> None:
    """A sequence may end in any state."""
    running = RunningSet(PREEMPTIONS_MAX)
    running.add(sequence(0))

    running.remove(sequence(1))

    assert [s.sequence_id for s in running] == [0]
    assert running.batch_slots == 1


def test_pinned_sequences_are_listed() -> None:
    """Each admission reads the list, which is nearly always empty."""
    running = RunningSet(PREEMPTIONS_MAX)
    often = sequence(1, preemptions=PREEMPTIONS_MAX)
    for each in (sequence(0, preemptions=PREEMPTIONS_MAX - 1), often):
        running.add(each)

    pinned = running.pinned
    running.remove(often)

    assert pinned == [often]
    assert running.pinned == []
    running.check()


def test_the_check_finds_a_wrong_sum() -> None:
    running, prompt = RunningSet(PREEMPTIONS_MAX), sequence(0, samples=2)
    running.add(prompt)

    prompt.parent.is_forked = True

    with pytest.raises(InvariantViolation, match="2 slots"):
        running.check()


@each_row("seed", range(5))
def test_the_set_is_kept_in_order_of_rank(seed: int) -> None:
    """Sorting a large batch would be a tenth of its step."""
    chance, running = random.Random(seed), RunningSet(PREEMPTIONS_MAX)
    alive: list[Sequence] = []
    for number in range(120):
        if alive and chance.random() < 0.4:
            running.remove(alive.pop(chance.randrange(len(alive))))
        else:
            made = sequence(number)
            made.parent.arrival = chance.randrange(1_000_000)
            alive.append(made)
            running.add(made)
        running.check()

        assert running.ranked == sorted(alive, key=lambda s: s.rank)


def test_the_check_finds_a_wrong_order() -> None:
    running = RunningSet(PREEMPTIONS_MAX)
    for number in (0, 1):
        running.add(sequence(number))

    next(iter(running)).parent.arrival = 2

    with pytest.raises(InvariantViolation, match="by rank"):
        running.check()
