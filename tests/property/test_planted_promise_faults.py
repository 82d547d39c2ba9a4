"""Faults planted in promises that move down, which their machines must find."""

from __future__ import annotations

from functools import partial
from inspect import unwrap
from typing import Any

import pytest

from engine.cache import PrefixCache
from engine.cache.block_promises import BlockPromises
from engine.cache.blocks.block_manager import BlockManager
from engine.cache.lease_manager import LeaseManager
from engine.cache.tree.accounts import NamespaceAccount
from engine.levels.disk import storing
from engine.levels.host.accounts import HostAccounts
from engine.levels.promises import KeptPromises
from engine.levels.restarts.recall import PromiseRecall
from tests.property.planted import Plant, RarePlant, planted
from tests.property.test_promises_machine import HostPromisesMachine, PromisesMachine
from tests.property.test_restarted_promises import RestartedHostMachine, RestartedMachine
from tests.unit.engine.cache import test_leases as leases
from tests.unit.engine.levels import test_promises_below as unit
from tests.unit.engine.scheduler import test_scheduler as schedules


def moved_down_too_early(original: Any) -> Any:
    """A promise moves down to a record that the disk was never asked to keep."""
    return lambda self, node: node.record is not None


def loss_not_told(original: Any) -> Any:
    """A promise that its level has lost ends in silence."""

    def lost(self: Any, block: Any, now_s: float) -> None:
        tell, self._tell = self._tell, lambda fact: None
        original(self, block, now_s)
        self._tell = tell

    return lost


def never_renewed(original: Any) -> Any:
    """The disk is not told that a promise goes on, and drops its record."""
    return lambda self, copies, now_s: None


def never_ended(original: Any) -> Any:
    """A promise whose time is over is still kept and paid for."""
    return lambda self, now_s: None


def not_charged(original: Any) -> Any:
    """A payer's promises below do not count."""

    def add(self: Any, block: Any, sign: int) -> None:
        original(self, block, sign)
        if block.promised_below:
            self.payer_account.promised_total -= sign

    return add


def charged_twice(original: Any) -> Any:
    """What is promised below takes room again when a lease asks for it."""
    return lambda self, *rest: 0


def copies_dropped_for_room(original: Any) -> Any:
    """A copy that keeps a promise is given up like any other."""

    def update(self: Any, node: Any) -> None:
        kept, node.promised_class = node.promised_class, None
        original(self, node)
        node.promised_class = kept

    return update


def not_bound(original: Any) -> Any:
    """A new promise under one that is kept below leaves that one there."""

    def bind(self: Any, account: Any, block: Any, promised_class: Any = None) -> None:
        name = promised_class or block.promised_class
        self._manager.set_promise(account, block, name, is_bound=True)

    return bind


def not_come_back(original: Any) -> Any:
    """A block that comes back to the device does not know of its promise."""

    def insert(self: Any, account: Any, parent: Any, run: Any, *rest: Any) -> Any:
        node, added = original(self, account, parent, run, *rest)
        if node.promised_below:
            self.set_promise(account, node, None, is_bound=False)
            node.terms = None
        return node, added

    return insert


def nothing_recalled(original: Any) -> Any:
    """What the disk still promises is not charged."""
    return lambda self, copy, until_s, told, now_s: None


def terms_forgotten(original: Any) -> Any:
    """The next engine hears of the end of a promise alone."""
    return lambda node: None


def stale_page_taken(original: Any) -> Any:
    """A page that was on its way during an erasure brings back what is gone."""
    return lambda self: None


def not_taken_over(original: Any) -> Any:
    """A recovered copy does not keep the promise that it was noted with."""
    return lambda self, block, fresh, now_s: None


def room_given_up(original: Any) -> Any:
    """A preempted sequence gives up the room of its promises, and asks anew."""
    return lambda self, table, *rest, keep=True: False


def clipped_in_silence(original: Any) -> Any:
    """What was promised before a preemption, and is not after it, is not told."""

    def grant(self: Any, *rest: Any, **settings: Any) -> int:
        original(self, *rest, **settings)
        return 0

    return grant


def moved_down_before_its_end(original: Any) -> Any:
    """A promise moves down above blocks whose promise will bring it back."""
    return lambda self, table, node: None


@pytest.mark.slow
@planted(
    Plant(PromisesMachine, BlockPromises, "lapse_promises", never_ended, seed=4),
    Plant(PromisesMachine, NamespaceAccount, "add_promise", not_charged),
    Plant(HostPromisesMachine, HostAccounts, "update", copies_dropped_for_room),
    Plant(HostPromisesMachine, BlockPromises, "_bind", not_bound, seed=4),
    Plant(HostPromisesMachine, BlockManager, "insert", not_come_back, seed=7),
    Plant(RestartedMachine, KeptPromises, "take_over", nothing_recalled, seed=7),
    Plant(RestartedHostMachine, KeptPromises, "take_over", nothing_recalled, seed=7),
    Plant(RestartedMachine, storing, "told_terms", terms_forgotten, seed=7),
    Plant(RestartedMachine, PromiseRecall, "erasing", stale_page_taken, seed=2),
    Plant(RestartedHostMachine, BlockPromises, "take_over", not_taken_over, seed=7),
)
def test_a_planted_promise_fault_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that misses this fault proves nothing when it passes."""
    plant.check(monkeypatch)


RARE = (
    RarePlant(BlockPromises, "place_lost", loss_not_told, unit.test_a_lost_record_is_told_once),
    RarePlant(
        KeptPromises,
        "_is_durable",
        moved_down_too_early,
        unit.test_host_memory_keeps_promises_where_it_may,
    ),
    RarePlant(
        KeptPromises,
        "_renew_each",
        never_renewed,
        unit.test_a_read_renews_a_promise_that_moved_down,
    ),
    RarePlant(
        LeaseManager,
        "_kept_behind",
        charged_twice,
        unit.test_host_memory_keeps_promises_where_it_may,
    ),
    RarePlant(
        PrefixCache,
        "suspend",
        room_given_up,
        partial(unwrap(schedules.test_a_preempted_request_keeps_what_it_was_promised), 1, False),
    ),
    RarePlant(
        LeaseManager,
        "grant",
        clipped_in_silence,
        leases.test_a_promise_that_ran_out_while_its_sequence_waited_is_told_as_lost,
    ),
    RarePlant(
        BlockPromises,
        "bind_under",
        moved_down_before_its_end,
        partial(leases.test_a_promise_stays_above_blocks_that_are_to_be_promised, True),
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("plant", RARE, ids=[plant.fault.__name__ for plant in RARE])
def test_a_rare_promise_fault_fails_its_own_test(
    plant: RarePlant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine meets it once in hundreds of runs."""
    plant.check(monkeypatch)
