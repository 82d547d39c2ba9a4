"""Faults planted in where states are kept and resumed, which their machine must find."""

from __future__ import annotations

from typing import Any

import pytest

from engine.cache.blocks.block_manager import BlockManager
from engine.cache.lease_manager import LeaseManager
from engine.cache.state_manager import StateManager
from engine.cache.tree.prefix_tree import State
from engine.core.step_drafts import StepDrafts
from engine.scheduler.scheduler import Scheduler
from tests.property.planted import Plant, RarePlant, planted
from tests.property.test_state_machine import StateEngineMachine
from tests.unit.engine.core import test_states


def broken_state_found(original: Any) -> Any:
    """A state of which a block was evicted is resumed."""
    return property(lambda self: True)


def state_ignored(original: Any) -> Any:
    """A hit stands wherever KV is, and begins from a state of zeros."""
    return lambda self, found: found


def state_not_pinned(original: Any) -> Any:
    """The blocks of a hit's state may be given to others before they are read."""

    def pin(self: Any, table: Any, found: Any, now_s: float) -> None:
        original(self, table, found, now_s)
        for block in table.restores:
            self._manager.unpin(block)

    return pin


def kept_where_no_step_ends(original: Any) -> Any:
    """A state is noted at a position that a slice has run past."""

    def keep(self: Any, table: Any, position: int, now_s: float) -> Any:
        blocks = original(self, table, position, now_s)
        if blocks and position - 1 > table.kv_tokens:
            table.kept[position - 1] = table.kept.pop(position)
        return blocks

    return keep


def kept_after_a_further_step(original: Any) -> Any:
    """The last state of a sequence is kept although a launched step has taken it further."""

    def keep(self: Any, sequence: Any, table: Any, now_s: float) -> None:
        computed, sequence.computed = sequence.computed, table.kv_tokens
        original(self, sequence, table, now_s)
        sequence.computed = computed

    return keep


def erased_prefix_leaves_its_state(original: Any) -> Any:
    """What is erased up to the middle of a block leaves the state that stands there."""
    return lambda self, node, run: []


def accepted_drafts_not_taken_in(original: Any) -> Any:
    """A sequence goes on behind its accepted drafts with a state from before them."""

    def note(self: Any, sequence: Any, draft: Any, token_ids: Any, now_s: float) -> None:
        original(self, sequence, draft, token_ids, now_s)
        sequence.state_lag = 0

    return note


def last_state_behind_drafts(original: Any) -> Any:
    """The last state of a sequence is taken for one behind its accepted drafts."""
    return lambda self, table, position, now_s: original(self, table, table.kv_tokens, now_s)


def promised_state_evicted(original: Any) -> Any:
    """A state that a lease promises is evicted as any other."""
    return lambda self, table, position, state, now_s: table.state_promises.pop(position, None)


CAUGHT = (
    Plant(StateEngineMachine, State, "is_whole", broken_state_found, seed=12),
    Plant(StateEngineMachine, StateManager, "cut", state_ignored, seed=3),
    Plant(StateEngineMachine, StateManager, "pin", state_not_pinned, seed=7),
    Plant(StateEngineMachine, StateManager, "keep", kept_where_no_step_ends, seed=7),
    Plant(StateEngineMachine, StepDrafts, "note", accepted_drafts_not_taken_in, seed=3),
    Plant(StateEngineMachine, StateManager, "keep_last", last_state_behind_drafts, seed=3),
)
RARE = (
    RarePlant(Scheduler, "_keep_state", kept_after_a_further_step,
              test_states.test_the_state_of_an_answer_that_a_stop_token_ends_is_its_own),
    RarePlant(BlockManager, "_orphaned_states", erased_prefix_leaves_its_state,
              test_states.test_an_erased_prefix_takes_the_state_at_its_end_along),
    RarePlant(LeaseManager, "promise_state", promised_state_evicted,
              test_states.test_a_promise_holds_the_state_at_its_end),
)  # fmt: skip


@pytest.mark.slow
@planted(*CAUGHT)
def test_a_planted_state_fault_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that misses this fault proves nothing when it passes."""
    plant.check(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("plant", RARE, ids=[plant.fault.__name__ for plant in RARE])
def test_a_rare_state_fault_is_caught(plant: RarePlant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine meets it too seldom; the test of that behaviour fails with it."""
    plant.check(monkeypatch)
