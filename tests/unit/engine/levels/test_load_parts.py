"""Loads that are committed in parts, what choices wait behind, and deadlines beside long steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from engine.api import CacheGrant, Erase, Finished, Quota
from engine.levels.loads import TURNS_MIN
from engine.scheduler.step_cost import StepCost
from tests.unit.engine.levels.leveled_worlds import LeveledWorld, ask, prompt

LONG = 41
"""Tokens of a prompt of ten whole blocks."""


def on_host() -> LeveledWorld:
    """Return a world without a disk, in which a long prompt is on host alone; loads are committed
    block by block."""
    world = LeveledWorld(disk=False, blocks=40, slots=200, verify_host=1)
    world.run(ask("first", prompt(1, LONG)))
    world.push_out(30)
    world.levels.loads.part = 1
    return world


def test_what_is_in_place_is_committed_while_the_rest_is_copied() -> None:
    """Also what others find: a part of a load is as good as a part of a computation."""
    world = on_host()
    world.weather.polls_max = 6
    world.submit(ask("again", prompt(1, LONG)))
    seen = set()
    for _ in range(60):
        world.step()
        if world.core.stats().loading:
            seen.add(world.below(prompt(1, LONG))[0])
    world.settle()

    assert seen - {0, 40}
    assert world.loaded("again") == {"host": 40}


def test_a_load_counts_for_the_admission_that_it_belongs_to() -> None:
    """A request that is preempted before its first step may find nothing of it: its cached tokens
    would be less than those that were loaded, and the device's total would fall."""
    world = on_host()
    world.submit(ask("again", prompt(1, LONG)))
    world.step_until_loading()
    for number in range(2, 5):  # their prompts take all of the step in which the load ends
        world.submit(ask(f"urgent{number}", prompt(number, LONG), priority=1))
    while world.core.stats().loading:
        world.step()
    active = world.core.requests.get("again")
    assert active is not None
    assert active.loaded_tokens
    assert active.started_at_s is None
    world.core.scheduler.preempt(active.sequences[0], world.clock())
    world.core.erase(Erase(1, b"n"))
    world.settle()

    assert (world.cached("again"), world.loaded("again")) == (0, {})


def test_a_load_that_fails_half_way_keeps_what_was_committed() -> None:
    """The rest is computed, over blocks that nothing else fills any more."""
    world = on_host()
    copies = world.levels.places.match(b"n", prompt(1, LONG), world.clock())
    world.memory.contents[copies[7].slot] = (None,) * 4
    world.weather.polls_max = 4
    world.run(ask("again", prompt(1, LONG)))

    assert world.wait("again").cause == "damaged"
    assert world.cached("again") == 28
    world.core.check()


def test_a_request_that_goes_during_its_load_leaves_what_was_committed() -> None:
    """Its blocks are found by the next one; those that moves fill are freed when these end."""
    world = on_host()
    world.weather.polls_max = 9
    world.submit(ask("again", prompt(1, LONG)))
    for _ in range(60):
        world.step()
        if world.below(prompt(1, LONG))[0]:
            break
    world.cancel("again")
    world.settle()

    assert world.core.stats().pinned_blocks == 0
    assert world.below(prompt(1, LONG))[0] > 0
    world.core.check()


@pytest.mark.parametrize(
    ("payer", "left", "is_loaded"),
    [(b"p", 41, True), (b"p", 8, False), (b"other", 41, False)],
    ids=["own", "decoding", "of another"],
)
def test_computing_waits_behind_the_payers_own_prompts(
    payer: bytes, left: int, *, is_loaded: bool
) -> None:
    """A load that takes longer than computing alone is worth it behind a prompt of the same payer;
    prompts of others do not count, since what is found would tell of them.
    """
    world = on_host()
    world.submit(ask("warm", prompt(1, LONG), grant=CacheGrant(b"n", Quota(payer=b"p"))))
    active, loading = world.core.requests.get("warm"), world.core.scheduler.loading
    assert active is not None
    assert loading is not None
    sequence, now_s = active.sequences[0], world.clock()
    other = SimpleNamespace(
        table=SimpleNamespace(kv_tokens=0),
        is_halted=False,
        length=left,
        parent=SimpleNamespace(payer=payer),
    )
    running: Any = [other]
    world.levels.paces["host"].block_s = [1.0]  # 10 s for the prompt; computing it takes 8 s
    found = world.cache.find(b"n", sequence.tokens, now_s)

    with patch.object(StepCost, "seconds_of_slice", lambda self, start, count: 0.2 * count):
        plan = loading.plan(sequence, found, running, now_s)

    assert (plan is not None) is is_loaded
    world.settle()


def test_the_moves_of_a_load_begin_in_the_step_that_admits_it() -> None:
    """A step that waits for nothing would delay its first copy by a turn."""
    world = on_host()
    world.weather.polls_max = 3
    world.submit(ask("again", prompt(1, LONG)))
    world.step()

    assert world.levels.loads.moves == 10
    world.settle()


def test_the_moves_of_a_load_wait_for_the_steps_in_flight() -> None:
    """One of them may still write to the former owner of a block that the load fills."""
    world = LeveledWorld(disk=False, blocks=40, slots=200, depth=2)
    world.run(ask("first", prompt(1, LONG)))
    world.push_out(30)
    world.weather.polls_max = 3
    world.submit(ask("other", prompt(2), max_tokens=20))
    world.step()
    world.submit(ask("again", prompt(1, LONG)))
    world.step_until_loading()

    assert world.core.engine_stats.step > 0
    assert world.levels.loads.moves == 0
    world.settle()
    assert world.loaded("again") == {"host": 40}


@pytest.mark.parametrize(("polls", "has_lost"), [(0, False), (6, True)], ids=["one", "several"])
def test_the_turn_that_finds_a_load_complete_is_no_time_of_it(
    polls: int, *, has_lost: bool
) -> None:
    """A turn comes once a step, and what is computed waits for it, too. Counted as the load's, a
    level whose loads were faster was left alone."""
    world = on_host()
    world.levels.loads.part = 100
    world.weather.polls_max = polls
    world.submit(ask("again", prompt(1, LONG)))
    world.step_until_loading()
    for _ in range(8):
        world.clock.advance(1.0)
        world.step()

    assert world.loaded("again") == {"host": 40}
    assert (world.levels.paces["host"].regret_s > 0) is has_lost
    world.settle()


def test_a_load_has_some_turns_beside_steps_that_take_longer_than_its_deadline() -> None:
    """A turn comes once a step: the outcomes of its moves are polled in the next ones."""
    world = on_host()
    world.weather.polls_max = 3
    world.submit(ask("again", prompt(1, LONG)))
    world.step_until_loading()
    for _ in range(TURNS_MIN - 1):
        world.clock.advance(1.0)
        world.step()
    world.settle()

    assert isinstance(world.streams["again"].finished, Finished)
    assert world.wait("again").cause == ""
    assert world.loaded("again") == {"host": 40}
