"""Promises that a level below the device keeps: what the cache asks of that level, and the room
for promises.

A promise of a block is *on the device* (the block is not evicted) or *below* (a copy keeps it, and
the device may evict the block like any other). It is never both. A block's promise stays on the
device while a block under it is promised there, so that no evictable block stands above one that is
not. A window block's moves down with its node's or before it, and never back up with it. This
module knows no copy, no disk and no clock; `lease_manager` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine.api import Bound, LeaseRequest, Namespace, Payer
from engine.cache.tree.accounts import NamespaceAccount
from engine.cache.tree.leases import BlockTerms, promised_seconds
from engine.cache.tree.prefix_tree import Node, TreeBlock, WindowBlock


class KeptWindows(NamedTuple):
    """What a copy keeps of a run's window blocks.

    `terms`: of their promises, by window group; empty where it keeps none. `is_fixed`: it has the
    block of group 0 alone, and no other copy will take its place.
    """

    terms: Sequence[BlockTerms | None]
    is_fixed: bool


class KeptBelow(Protocol):
    """The level that keeps promises below the device.

    `BlockTerms.below_class` says whether a promise is kept there; node and copy share the terms.
    """

    def terms_of(
        self, namespace: Namespace, tokens: Sequence[int], now_s: float
    ) -> list[BlockTerms | None]:
        """Return for each leading whole run of `tokens` that has a copy the terms of the promise
        that the copy keeps, or None. O(runs).
        """

    def windows_of(
        self, namespace: Namespace, tokens: Sequence[int], now_s: float
    ) -> list[KeptWindows]:
        """Return what the copy of each leading whole run of `tokens` keeps of its window blocks.
        O(runs).
        """

    def adopt(self, account: NamespaceAccount, node: Node, now_s: float) -> BlockTerms | None:
        """Return the terms of the promise that a copy keeps of a run which has just entered the
        device's tree, or None. O(1).
        """

    def adopt_window(
        self, account: NamespaceAccount, block: WindowBlock, now_s: float
    ) -> BlockTerms | None:
        """Return the same for a window block that a node of the tree has just got. O(1)."""

    def returned(self, node: Node) -> None:
        """Take note that the promise of a node is on the device again. O(1)."""


class FoundPromise(NamedTuple):
    """A promise that a level below has kept for an engine before.

    `fresh`: its terms; `known`: those that the copy has already, if any. `node`: the device's node
    of the same tokens, or its window block, if it has one.
    """

    namespace: Namespace
    payer: Payer
    fresh: BlockTerms
    known: BlockTerms | None = None
    node: TreeBlock | None = None


class PromiseRoom:
    """The blocks that may still be promised to one payer.

    `total`: on the lowest level that keeps promises; `device`: promises that no level below keeps
    yet. `waiting`: blocks that are covered and promised below, whose promises return to the device
    with the next block under them that is promised there. `total_bound`, `device_bound`: what
    limits each. Without levels both are the same number.
    """

    __slots__ = ("device", "device_bound", "total", "total_bound", "waiting")

    def __init__(self, total: int, total_bound: Bound, device: int, device_bound: Bound) -> None:
        self.total = total
        self.total_bound = total_bound
        self.device = device
        self.device_bound = device_bound
        self.waiting = 0

    @property
    def blocks(self) -> int:
        """Return how many blocks may be promised on the device now."""
        return min(self.total, self.device - self.waiting)

    @property
    def bound(self) -> Bound:
        """Return the bound that is met first."""
        return self.total_bound if self.total <= self.device - self.waiting else self.device_bound

    def keep(self, blocks: int, held_up: int) -> None:
        """Leave room for `blocks` that were promised to the taker before, and for `held_up` above
        them that return to the device with them, whatever the bounds are now.
        """
        self.total = max(self.total, blocks)
        self.device = max(self.device, blocks + held_up)

    def take(self) -> bool:
        """Take room for one more block on the device, and for those that wait; return whether there
        was any.
        """
        if self.blocks < 1:
            return False
        self.total -= 1
        self.device -= 1 + self.waiting
        self.waiting = 0
        return True


NO_ROOM_ASKED = PromiseRoom(0, "", 0, "")
"""For requests without leases."""


def cover(
    path: Sequence[Node], kept: int, covered: int, wanted: int, room: PromiseRoom
) -> tuple[int, int]:
    """Cover blocks with a promise, from number `covered` to `wanted`, as far as there is room.

    `path`: the cached ones; behind them a level below keeps `kept`. Returns how many blocks are
    covered then, and how many of these are not computed yet. Takes the room. O(blocks).
    """
    reserved = 0
    while covered < wanted:
        node = path[covered] if covered < len(path) else None
        is_below = covered - len(path) < kept if node is None else node.promised_below
        if is_below:
            room.waiting += 1
        elif node is None or not node.promised:
            if not room.take():
                break
            reserved += node is None
        covered += 1
    return covered, reserved


def asks_promise(leases: Sequence[LeaseRequest]) -> bool:
    """Return whether any of these leases promises anything."""
    return any(promised_seconds(lease.retention) > 0 for lease in leases)
