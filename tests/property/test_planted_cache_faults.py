"""Faults planted in the cache, which its machines must find: time, promises, quotas, windows."""

from __future__ import annotations

from typing import Any

import pytest

from engine.cache import PrefixCache
from engine.cache.blocks.block_manager import BlockManager
from engine.cache.lease_manager import LeaseManager
from engine.cache.tree.window_groups import WindowGroups
from tests.property.planted import Plant, RarePlant, planted
from tests.property.test_cache_machine import CacheMachine
from tests.property.test_window_machine import WindowMachine
from tests.unit.engine.cache import test_leases as leases


def expired_still_found(original: Any) -> Any:
    """Expired blocks are not removed."""
    return lambda self, now_s: 0


def promise_not_kept(original: Any) -> Any:
    """A promised block is evicted like any other."""
    return lambda self, account, block, promised_class, is_bound: None


def ceiling_ignored(original: Any) -> Any:
    """A namespace grows above its ceiling while the pool has room."""
    return lambda self, account, count: (max(0, count - len(self.pool.free)), 0)


def erasure_removes_nothing(original: Any) -> Any:
    """An erasure by prefix removes nothing."""

    def erase(self: Any, namespace: bytes, *, lease_id: Any = None, tokens: Any = None) -> int:
        return 0 if tokens else int(original(self, namespace, lease_id=lease_id, tokens=tokens))

    return erase


def no_copy_for_a_partial_hit(original: Any) -> Any:
    """A block is shared from its middle without the copy."""
    return lambda self, src, dst, tokens: None


def writer_commits_after_an_erasure(original: Any) -> Any:
    """A sequence that runs during an erasure commits erased tokens."""
    return lambda self, table: table.write


def window_let_go_too_early(original: Any) -> Any:
    """A sequence lets a block of its window go that its next query reads."""
    return lambda self, group, tokens: original(self, group, tokens) + 1


def hit_over_a_tombstone(original: Any) -> Any:
    """A hit stands although a window block is gone."""
    return lambda self, path, tokens: tokens


def window_not_promised(original: Any) -> Any:
    """A promise protects group 0 alone."""
    return lambda self, table, node, index, spans, now_s: None


def room_given_to_others(original: Any) -> Any:
    """What a preempted sequence has yet to compute is promised to the next that asks."""

    def suspend(self: Any, table: Any, *rest: Any, keep: bool = True) -> bool:
        is_suspended = bool(original(self, table, *rest, keep=keep))
        table.account.add_reserved(-table.reserved)
        table.reserved = 0
        return is_suspended

    return suspend


@pytest.mark.slow
@planted(
    Plant(CacheMachine, PrefixCache, "expire", expired_still_found, seed=1),
    Plant(CacheMachine, BlockManager, "set_promise", promise_not_kept, seed=1),
    Plant(CacheMachine, BlockManager, "shortage", ceiling_ignored, seed=3),
    Plant(CacheMachine, PrefixCache, "erase", erasure_removes_nothing, seed=6),
    Plant(CacheMachine, BlockManager, "add_copy", no_copy_for_a_partial_hit, seed=1),
    Plant(CacheMachine, PrefixCache, "_may_write", writer_commits_after_an_erasure, seed=8),
    Plant(WindowMachine, WindowGroups, "first_kept", window_let_go_too_early),
    Plant(WindowMachine, WindowGroups, "standing", hit_over_a_tombstone),
    Plant(WindowMachine, LeaseManager, "_extend_windows", window_not_promised),
)
def test_a_planted_cache_fault_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that misses this fault proves nothing when it passes."""
    plant.check(monkeypatch, 1_600)


def test_room_given_to_others_fails_its_own_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine does not meet it in 1,600 runs."""
    check = leases.test_a_preempted_sequence_keeps_the_room_of_its_promise
    RarePlant(PrefixCache, "suspend", room_given_to_others, check).check(monkeypatch)
