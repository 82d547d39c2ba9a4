"""Faults planted in the engine, which a simulated life must find.

A fault that no life finds would mean that the oracle, the checker or the stream's check is blind to
it. A check must catch each fault, not an accidental exception in the faulty code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

import engine.core.planner
from engine.api import Finished, Tokens
from engine.cache import BlockTable, PrefixCache
from engine.cache.blocks.block_manager import BlockManager
from engine.cache.blocks.block_pool import BlockPool
from engine.cache.tree.prefix_tree import PrefixTree
from engine.core.core import Core
from engine.core.planner import StepPlanner, find_groups
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import ActiveRequest
from tests.checkers import outcome
from tests.sim.life import Life

LIVES = 150
EVENTS = 250
Plant = Callable[[pytest.MonkeyPatch], None]


def around(owner: Any, name: str, change: Callable[..., Any]) -> Plant:
    """Replace a method by `change(original, self, ...)`."""
    original = getattr(owner, name)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(original, self, *args, **kwargs)

    return lambda patch: patch.setattr(owner, name, changed)


def no_copy_on_write() -> Plant:
    """A shared block is written in place."""

    def grow(original: Any, self: Any, table: Any, tokens: int, now_s: float, **more: Any) -> bool:
        start = len(table.blocks) * self.block_size
        return bool(original(self, table, tokens, now_s, start=max(start, table.kv_tokens)))

    return around(PrefixCache, "grow", grow)


def copy_forgotten() -> Plant:
    """The new block is allocated and its copy is dropped."""

    def take(original: Any, self: Any) -> Any:
        original(self)
        return ()

    return around(PrefixCache, "take_copies", take)


def copy_a_slot_short() -> Plant:
    """A partial hit copies one slot fewer than it counts."""

    def copy(original: Any, self: Any, src: int, dst: int, tokens: int) -> None:
        original(self, src, dst, max(1, tokens - 1))

    return around(BlockManager, "add_copy", copy)


def namespace_ignored() -> Plant:
    """All namespaces share one tree."""

    def account(original: Any, self: Any, namespace: bytes, quota: Any) -> Any:
        return original(self, b"all", quota)

    return around(BlockManager, "account", account)


def hit_without_pin() -> Plant:
    """A matched block may be evicted while it is read."""
    return around(BlockManager, "pin", lambda original, self, node: None)


def detach_keeps_the_reference() -> Plant:
    """A block that leaves the tree never becomes free."""

    def detach(original: Any, self: Any, account: Any, top: Any) -> Any:
        before = len(self.pool.free)
        gone = original(self, account, top)
        if len(self.pool.free) > before:
            self.pool.ref_count[self.pool.free.pop()] = 1
        return gone

    return around(BlockManager, "detach", detach)


def free_twice() -> Plant:
    """A freed block is on the free list twice, so two sequences get it."""

    def drop(original: Any, self: Any, block: int) -> int:
        left: int = original(self, block)
        if left == 0:
            self.free.append(block)
        return left

    return around(BlockPool, "drop_ref", drop)


def pinned_block_evicted() -> Plant:
    """A pinned block stays in the eviction order."""
    return around(BlockManager, "_uncount_cached", lambda original, self, account, node: None)


def release_leaks() -> Plant:
    """A sequence that ends keeps its last block."""

    def release(original: Any, self: Any, table: Any, *args: Any, **more: Any) -> None:
        table.blocks[:] = table.blocks[:-1]
        original(self, table, *args, **more)

    return around(PrefixCache, "release", release)


def partial_block_committed_as_full() -> Plant:
    """A block enters the tree before its last slots are computed."""

    def commit(
        original: Any, self: Any, table: Any, tokens: Any, kv_tokens: int, now_s: float
    ) -> None:
        whole = -(-kv_tokens // self.block_size) * self.block_size
        original(self, table, tokens, whole if whole <= len(tokens) else kv_tokens, now_s)
        table.kv_tokens = kv_tokens

    return around(PrefixCache, "commit", commit)


def slot_off_by_one() -> Plant:
    """A row is one slot off."""

    def plan(original: Any, self: Any, *args: Any) -> Any:
        planned, in_flight = original(self, *args)
        rows = [msgspec.structs.replace(row, start=row.start + 1) for row in planned.rows]
        return msgspec.structs.replace(planned, rows=tuple(rows)), in_flight

    return around(StepPlanner, "plan", plan)


def whole_prompt_hit() -> Plant:
    """A fully cached prompt leaves nothing to compute, and so no logits."""
    return around(
        PrefixTree,
        "find",
        lambda original, self, tokens: original(self, (*tokens, 0)),
    )


def tail_found_too_long() -> Plant:
    """A partial hit counts one token more than are equal."""

    def nearest(original: Any, self: Any, node: Any, tokens: Any) -> Any:
        found, common = original(self, node, tokens)
        return found, common + 1 if found and common < len(tokens) else common

    return around(PrefixTree, "longest_common_child", nearest)


def committed_before_the_step_completed() -> Plant:
    """Blocks can be found while the step that writes them may still fail."""

    def launch(original: Any, self: Any, slices: Any, now_s: float) -> bool:
        launched: bool = original(self, slices, now_s)
        for piece in slices if launched else ():
            table, tokens = piece.sequence.table, piece.sequence.tokens
            if table is not None:
                self.cache.commit(table, tokens, min(len(tokens), piece.sequence.computed), now_s)
        return launched

    return around(Core, "_launch", launch)


def failed_step_committed() -> Plant:
    """Blocks of a failed request are left to the tree, tail and all."""

    def failed(original: Any, self: Any, flight: Any, error: Any) -> None:
        for piece in flight.slices:
            if piece.sequence.table is piece.table and piece.sequence.in_flight == 0:
                end = piece.start + piece.count
                self.cache.commit(piece.table, piece.sequence.tokens, end, self.clock())
        original(self, flight, error)

    return around(Core, "_fail_step", failed)


def cancel_forgets_to_release() -> Plant:
    """A cancelled request ends and keeps its blocks."""

    def leave(original: Any, self: Any, work: Any, now_s: float, *, keep: bool = True) -> None:
        for sequence in work.sequences:
            if not sequence.is_ended:
                sequence.table = None
        original(self, work, now_s, keep=keep)

    return around(Scheduler, "remove_request", leave)


def sharing_across_namespaces() -> Plant:
    """A request waits for the same prompt of another tenant, which reveals that prompt."""

    class Any_(bytes):
        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = bytes.__hash__

    return lambda patch: patch.setattr(
        BlockTable, "namespace", property(lambda table: Any_(table.account.namespace))
    )


def two_final_events() -> Plant:
    """A request is finished twice."""

    def finish(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        self._events.append(self._events[-1])

    return around(Core, "_finish", finish)


def event_lost() -> Plant:
    """One token event in many is lost."""
    turn = itertools.count()

    def step(original: Any, self: Any) -> list[Any]:
        events: list[Any] = original(self)
        return [e for e in events if not isinstance(e, Tokens) or next(turn) % 50]

    return around(Core, "step", step)


def final_event_lost() -> Plant:
    """One final event in many is lost."""
    turn = itertools.count(1)

    def step(original: Any, self: Any) -> list[Any]:
        events: list[Any] = original(self)
        return [e for e in events if not isinstance(e, Finished) or next(turn) % 50]

    return around(Core, "step", step)


def cached_tokens_overstated() -> Plant:
    """Usage reports more cached tokens than were found."""

    def started(original: Any, self: Any, sequence: Any, now_s: float) -> None:
        original(self, sequence, now_s)
        sequence.parent.cached_tokens += 1

    return around(Core, "_mark_started", started)


def recomputed_charged_to_the_client() -> Plant:
    """Recomputation after a preemption is counted as prompt tokens."""

    def usage(original: Any, self: Any, now_s: float) -> Any:
        true = original(self, now_s)
        return msgspec.structs.replace(
            true, computed_tokens=true.computed_tokens + true.recomputed_tokens
        )

    return around(ActiveRequest, "usage", usage)


def group_claims_too_much() -> Plant:
    """Groups contain one block more than their rows share."""

    def wider(runs: Any) -> Any:
        return tuple(
            msgspec.structs.replace(group, end_block=group.end_block + 1)
            for group in find_groups(runs)
        )

    return lambda patch: patch.setattr(engine.core.planner, "find_groups", wider)


def fork_without_pins() -> Plant:
    """A fork holds blocks without references."""
    return around(BlockManager, "pin_again", lambda original, self, block: None)


def erased_and_still_there() -> Plant:
    """An erasure reports success and removes nothing."""
    return around(PrefixCache, "erase", lambda original, self, namespace, **more: 0)


def namespace_starves() -> Plant:
    """One namespace is never scheduled."""

    def schedule(original: Any, self: Any, now_s: float) -> Any:
        return [
            piece
            for piece in original(self, now_s)
            if piece.sequence.parent.request.grant.namespace != b"east"
        ]

    return around(Scheduler, "schedule", schedule)


def token_sampled_twice() -> Plant:
    """A token is sampled in flight and again after a preemption."""

    def preempt(original: Any, self: Any, sequence: Any, now_s: float, **more: Any) -> None:
        sequence.in_flight = 0
        original(self, sequence, now_s, **more)

    return around(Scheduler, "preempt", preempt)


FAULTS: tuple[Callable[[], Plant], ...] = (
    no_copy_on_write,
    copy_forgotten,
    copy_a_slot_short,
    namespace_ignored,
    hit_without_pin,
    detach_keeps_the_reference,
    free_twice,
    pinned_block_evicted,
    release_leaks,
    partial_block_committed_as_full,
    slot_off_by_one,
    whole_prompt_hit,
    tail_found_too_long,
    committed_before_the_step_completed,
    failed_step_committed,
    cancel_forgets_to_release,
    sharing_across_namespaces,
    two_final_events,
    event_lost,
    final_event_lost,
    cached_tokens_overstated,
    recomputed_charged_to_the_client,
    group_claims_too_much,
    fork_without_pins,
    erased_and_still_there,
    namespace_starves,
    token_sampled_twice,
)


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught(
    fault: Callable[[], Plant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that misses this fault would pass a broken engine."""
    fault()(monkeypatch)

    lives = (outcome(partial(Life(seed).live, EVENTS)) for seed in range(LIVES))
    caught = next((found for found in lives if found), "")

    assert caught.startswith(("RuleBroken", "OracleError", "InvariantViolation")), (
        caught or "not seen"
    )
