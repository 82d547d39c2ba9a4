"""Times of steps, as they were measured and as steps have been since."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.drafts.drafter import Drafter
from engine.drafts.step_times import StepTimes
from tests.unit.engine.drafts.test_drafter import drafted, right, sequences

FLAT = tuple(1.0 + 0.01 * tokens for tokens in range(64))
"""Where memory bounds a step, further tokens cost little."""


def test_times_are_those_measured_until_steps_differ() -> None:
    """Further tokens than were measured cost what the last ones did."""
    times = StepTimes(FLAT)

    assert [times.seconds(tokens) for tokens in (1, 2, 64)] == [1.0, 1.01, FLAT[-1]]
    assert times.seconds(164) == pytest.approx(FLAT[-1] + 1.0)


def test_a_size_in_use_becomes_what_its_steps_take() -> None:
    """And one that is not in use follows what all sizes have in common."""
    times = StepTimes(FLAT)
    for _ in range(300):
        times.record(1, 2.0)
        times.record(16, 6.0)

    assert times.seconds(1) == pytest.approx(2.0, rel=0.1)
    assert times.seconds(16) == pytest.approx(6.0, rel=0.1)
    assert 1.5 < times.seconds(2) / FLAT[1] < 6.0


def test_a_size_that_seemed_slow_is_forgiven() -> None:
    """A depth that is no longer chosen would else never be measured again."""
    times = StepTimes(FLAT)
    for _ in range(50):
        times.record(8, 3.0)
        times.record(1, 1.0)
    slow = times.seconds(8)
    for _ in range(2_000):
        times.record(1, 1.0)

    assert slow > 2.0
    assert times.seconds(8) < 1.2


def test_a_pause_of_the_machine_counts_little() -> None:
    """One step of a minute is no measure of the next ones."""
    times = StepTimes(FLAT)
    times.record(4, 60.0)

    assert times.seconds(4) < 2.0


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0.01, 100.0)), max_size=60))
def test_more_tokens_never_take_less_time(steps: list[tuple[int, float]]) -> None:
    """Whatever was recorded; else drafts would be taken for a gain of time."""
    times = StepTimes(FLAT)
    for tokens, seconds in steps:
        times.record(tokens, seconds)
    found = [times.seconds(tokens) for tokens in range(1, 80)]

    assert found == sorted(found)


def test_the_depth_follows_the_times_of_steps() -> None:
    """Steps whose time has come to grow with their tokens get fewer drafts, and again as many once
    they have become fast."""
    drafter, chance = Drafter(FLAT, right()), random.Random(3)
    before = drafted(drafter, sequences())
    for _ in range(200):
        tokens = chance.choice([1, 2, 4, 8, 16])
        drafter.times.record(tokens, float(tokens))
    during = drafted(drafter, sequences())
    for _ in range(2_000):
        drafter.times.record(1, 1.0)

    assert during < before / 2
    assert drafted(drafter, sequences()) == before


def test_a_wait_for_the_host_is_part_of_a_step_with_drafts() -> None:
    """Where steps overlap, the one before drafts is collected first: then a draft has to save
    more."""
    slow = tuple(1.0 + 0.3 * tokens for tokens in range(64))
    alone, overlapping = Drafter(slow, right()), Drafter(slow, right(), exposed_s=0.6)
    assert drafted(alone, sequences()) > 0
    assert drafted(overlapping, sequences()) == 0

    for _ in range(300):
        overlapping.times.record_exposed(0.0)

    assert drafted(overlapping, sequences()) > 0


def test_drafts_hardly_lengthen_a_step_that_carries_prompts() -> None:
    """Its first tokens are waited for: at most a twentieth more."""
    drafter, times = Drafter(FLAT, right()), StepTimes(FLAT)
    batch = sequences(4)

    found = drafter.propose(batch, 64, prompt_tokens=40)
    count = sum(len(draft.token_ids) for draft in found.values())

    assert 0 < count < 15
    assert times.seconds(44 + count) <= 1.05 * times.seconds(44)
