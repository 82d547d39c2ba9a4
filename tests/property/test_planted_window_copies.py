"""Faults planted in copies for models with window groups, which their machine must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.cache import window_promises
from engine.cache.block_promises import BlockPromises
from engine.cache.moved_blocks import MovedBlocks
from engine.cache.tree.prefix_tree import WindowBlock
from engine.cache.window_manager import WindowManager
from engine.errors import InvariantViolation
from engine.levels import promises
from engine.levels.stored_prefixes import Copy
from engine.levels.window_copies import WindowCopies
from tests.property.planted import check_caught
from tests.property.test_window_levels_machine import WindowLevelsMachine
from tests.property.test_window_promises import (
    RestartedWindowMachine,
    WindowHostPromisesMachine,
)
from tests.unit.engine.levels import test_window_copies as unit

Fault = Callable[[Any], Any]


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
    return lambda self, copy, level=None: True


def windows_not_charged(original: Any) -> Any:
    """What is promised of window blocks below is known to the level alone."""

    def keep(self: Any, node: Any) -> Any:
        is_kept = original(self, node)
        if is_kept and isinstance(node, WindowBlock) and node.terms is not None:
            self._manager.account_of(node).add_below(node.terms.below_class, -1)
        return is_kept

    return keep


def windows_not_adopted(original: Any) -> Any:
    """A window block that comes back to the device does not know of its promise."""
    return lambda self, account, block, now_s: None


def windows_not_told(original: Any) -> Any:
    """The next engine hears of the promises of runs alone."""
    return lambda self: ()


def windows_not_told_late(original: Any) -> Any:
    """A level hears of a run's windows when it is stored, and of none that is promised later."""
    return lambda copy: False


def a_part_moves_down(original: Any) -> Any:
    """A promise covers what resuming at its last token reads, not at its last whole block."""
    return lambda groups, group, tokens, *, has_level: groups.first_read(group, tokens)


PLANTS: tuple[tuple[Any, Any, str, Fault], ...] = (
    (WindowLevelsMachine, WindowCopies, "standing", ends_anywhere),
    (WindowLevelsMachine, MovedBlocks, "settle", never_settled),
    (WindowLevelsMachine, MovedBlocks, "hold", too_few_held),
    (WindowLevelsMachine, WindowCopies, "blocks_of", wrong_group),
    (WindowLevelsMachine, WindowManager, "commit", holes_committed),
    (WindowHostPromisesMachine, BlockPromises, "keep_below", windows_not_charged),
    (WindowHostPromisesMachine, BlockPromises, "adopt_window", windows_not_adopted),
    (WindowHostPromisesMachine, window_promises, "first_promised", a_part_moves_down),
    (RestartedWindowMachine, promises, "_lacks_windows", windows_not_told_late),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "owner", "name", "fault"), PLANTS, ids=[plant[3].__name__ for plant in PLANTS]
)
def test_a_planted_fault_of_window_copies_is_caught(
    machine: Any, owner: Any, name: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that misses this fault proves nothing when it passes."""
    monkeypatch.setattr(owner, name, fault(getattr(owner, name)))
    check_caught(machine)


def test_promises_moved_to_copies_of_group_0_fail_their_own_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine meets such a copy under a promised window too seldom."""
    check = unit.test_no_part_of_a_window_is_below_where_a_record_has_group_0_alone
    check(12, "granted")
    monkeypatch.setattr(WindowCopies, "keeps_whole", group_0_is_enough(None))

    with pytest.raises((AssertionError, InvariantViolation)):
        check(12, "granted")


def test_window_blocks_of_which_the_next_engine_is_not_told_fail_their_own_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine allows that they are counted late."""
    check = unit.test_a_promise_of_all_groups_outlives_its_engine
    monkeypatch.setattr(Copy, "_promised_windows", windows_not_told(None))

    with pytest.raises(AssertionError):
        check("disk")
