"""Promises that a level below the device keeps: what the cache asks of that level.

A promise of a block is *on the device* (the block is not evicted) or *below* (a copy keeps it, and
the device may evict the block like any other). It is never both. A block's promise stays on the
device while a block under it is promised there, so that no evictable block stands above one that is
not. A window block's moves down with its node's or before it, and never back up with it. This
module knows no copy, no disk and no clock. `lease_manager` and `block_promises` call the level;
`engine.levels.promises` is it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine.api import Namespace, Payer
from engine.cache.tree.accounts import NamespaceAccount
from engine.cache.tree.leases import BlockTerms
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
