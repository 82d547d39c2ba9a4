"""Faults planted in copies for models with window groups, which their machine must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.cache.moved_blocks import MovedBlocks
from engine.cache.window_manager import WindowManager
from engine.levels.window_copies import WindowCopies
from tests.property.planted import check_caught
from tests.property.test_window_levels_machine import WindowLevelsMachine

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


PLANTS: tuple[tuple[Any, str, Fault], ...] = (
    (WindowCopies, "standing", ends_anywhere),
    (MovedBlocks, "settle", never_settled),
    (MovedBlocks, "hold", too_few_held),
    (WindowCopies, "blocks_of", wrong_group),
    (WindowManager, "commit", holes_committed),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "fault"), PLANTS, ids=[plant[2].__name__ for plant in PLANTS]
)
def test_a_planted_fault_of_window_copies_is_caught(
    owner: Any, name: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that misses this fault proves nothing when it passes."""
    monkeypatch.setattr(owner, name, fault(getattr(owner, name)))
    check_caught(WindowLevelsMachine)
