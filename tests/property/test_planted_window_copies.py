"""Faults planted in copies for models with window groups, which their machine must find."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from engine.cache import window_promises
from engine.cache.blocks.block_manager import BlockManager
from engine.cache.moved_blocks import MovedBlocks
from engine.cache.tree.accounts import NamespaceAccount
from engine.cache.tree.prefix_tree import WindowBlock
from engine.cache.window_manager import WindowManager
from engine.levels import promise_terms, promises
from engine.levels.window_copies import WindowCopies
from tests.property.planted import Plant, RarePlant, planted
from tests.property.test_window_levels_machine import WindowLevelsMachine
from tests.property.test_window_promises import WindowHostPromisesMachine
from tests.unit.engine.levels import test_window_copies as unit


def ends_anywhere(original: Any) -> Any:
    """A load ends where a window group lacks what a query behind it reads."""
    return lambda self, copies, first, count: count


def never_settled(original: Any) -> Any:
    """What was set aside for a load is neither let go nor brought back."""
    return lambda self, table, whole, loaded: loaded


def too_few_held(original: Any) -> Any:
    """Window blocks are copied that nothing holds meanwhile."""

    def hold(self: Any, account: Any, path: Any, now_s: float, beside: Any = ()) -> Any:
        return original(self, account, path, now_s)

    return hold


def wrong_group(original: Any) -> Any:
    """A copy has the blocks of its groups in another order."""

    def blocks_of(self: Any, node: Any, index: int, ends: Any) -> Any:
        return original(self, node, index, ends)[::-1]

    return blocks_of


def holes_committed(original: Any) -> Any:
    """A hole takes a node's window block, as a block that was computed would."""

    def commit(self: Any, table: Any, node: Any, index: int, now_s: float) -> Any:
        for row in table.beside:
            row[index] = max(row[index], 0)
        return original(self, table, node, index, now_s)

    return commit


def group_0_is_enough(original: Any) -> Any:
    """Promises of window blocks move down to a copy of group 0."""
    return lambda self, node, level=None: True


def windows_not_charged(original: Any) -> Any:
    """What is promised of window blocks below is known to the level alone."""

    def add(self: Any, block: Any, sign: int) -> None:
        original(self, block, sign)
        if isinstance(block, WindowBlock) and block.promised_below:
            self.payer_account.promised_total -= sign

    return add


def windows_not_come_back(original: Any) -> Any:
    """A window block that comes back to the device does not know of its promise."""

    def fill(self: Any, account: Any, node: Any, group: int, *rest: Any) -> Any:
        fresh = original(self, account, node, group, *rest)
        if fresh.promised_below:
            self.set_promise(account, fresh, None, is_bound=False)
            fresh.terms = None
        return fresh

    return fill


def windows_not_told(original: Any) -> Any:
    """The next engine hears of the promises of runs alone."""
    return lambda node: ()


def windows_not_told_late(original: Any) -> Any:
    """A level hears of a run's windows when it is stored, and of none that is promised later."""
    return lambda node: False


def a_part_moves_down(original: Any) -> Any:
    """A promise covers what resuming at its last token reads, not at its last whole block."""
    return lambda groups, group, tokens, *, has_level: groups.first_read(group, tokens)


@pytest.mark.slow
@planted(
    Plant(WindowLevelsMachine, WindowCopies, "standing", ends_anywhere, seed=2),
    Plant(WindowLevelsMachine, MovedBlocks, "settle", never_settled, seed=2),
    Plant(WindowLevelsMachine, MovedBlocks, "hold", too_few_held, seed=1),
    Plant(WindowLevelsMachine, WindowCopies, "blocks_of", wrong_group),
    Plant(WindowLevelsMachine, WindowManager, "commit", holes_committed, seed=3),
    Plant(WindowHostPromisesMachine, NamespaceAccount, "add_promise", windows_not_charged),
    Plant(WindowHostPromisesMachine, BlockManager, "fill", windows_not_come_back),
    Plant(WindowHostPromisesMachine, window_promises, "first_promised", a_part_moves_down),
)
def test_a_planted_fault_of_window_copies_is_caught(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that misses this fault proves nothing when it passes."""
    plant.check(monkeypatch)


RARE = (
    RarePlant(  # the machine meets such a copy under a promised window too seldom
        WindowCopies,
        "keeps_whole",
        group_0_is_enough,
        partial(
            unit.test_no_part_of_a_window_is_below_where_a_record_has_group_0_alone, 12, "granted"
        ),
    ),
    RarePlant(
        promises,
        "_lacks_windows",
        windows_not_told_late,
        partial(
            unit.test_windows_that_are_promised_later_than_their_run_outlive_their_engine, "disk"
        ),
    ),
    RarePlant(  # the machine allows that they are counted late
        promise_terms,
        "promised_windows",
        windows_not_told,
        partial(unit.test_a_promise_of_all_groups_outlives_its_engine, "disk"),
    ),
)


@pytest.mark.parametrize("plant", RARE, ids=[plant.fault.__name__ for plant in RARE])
def test_a_rare_fault_of_window_copies_fails_its_own_test(
    plant: RarePlant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which always meets it."""
    plant.check(monkeypatch)
