"""Who gives a block when none is free: one account per namespace, and the order of rule 9.

A namespace's *borrowed* blocks are those above its floor; divided by its weight they say how far it
is over its share. The one furthest over gives first, its least recently used leaf first; a floor is
never touched by others. This is weighted max-min fairness by water-filling, and needs no total: a
tenant that streams unique prompts stands highest and so turns over its own blocks.

Pure bookkeeping: it knows no pool and no clock. Only `prefix_cache` calls it.
"""

from __future__ import annotations

from collections.abc import Iterable

from sortedcontainers import SortedList

from engine.api import Namespace, Quota
from engine.cache.prefix_tree import Node, PrefixTree


class Account:
    """What one namespace holds. All counts are blocks.

    `held`: allocated to it. `cached`: of these, in the tree and in nobody's table. `evictable`: of
    these, not promised. `promised`: in the tree under a live promise; `reserved`: promised to
    running requests that have not computed them yet. `order`: evictable leaves, oldest use first.
    """

    __slots__ = (
        "cached",
        "evictable",
        "held",
        "namespace",
        "order",
        "promised",
        "quota",
        "reserved",
        "tables",
        "tree",
        "write_epoch",
    )

    def __init__(self, namespace: Namespace, quota: Quota, block_size: int) -> None:
        self.namespace = namespace
        self.quota = quota
        self.tree = PrefixTree(block_size)
        self.order = SortedList()
        self.tables = 0
        self.held = 0
        self.cached = 0
        self.evictable = 0
        self.promised = 0
        self.reserved = 0
        self.write_epoch = 0

    @property
    def is_idle(self) -> bool:
        """Nothing held, nobody running, nothing guaranteed: it may be forgotten."""
        return not (self.held or self.tables or self.quota.floor_blocks or self.reserved)

    def over_share(self, more: int = 0) -> float:
        """Blocks borrowed above the floor, per unit of weight, if it held `more`."""
        return (self.held + more - self.quota.floor_blocks) / self.quota.weight

    def spare(self) -> int:
        """Blocks that others may take: evictable, and above the floor."""
        return max(0, min(self.evictable, self.held - self.quota.floor_blocks))

    def enter(self, node: Node) -> None:
        """An unpinned, unpromised leaf may be evicted from now on. O(log n)."""
        node.in_order = True
        self.order.add((node.last_use_s, node.serial, node))

    def leave(self, node: Node) -> None:
        """It may not any more. O(log n)."""
        node.in_order = False
        self.order.remove((node.last_use_s, node.serial, node))

    def oldest(self) -> Node:
        """The least recently used evictable leaf."""
        node: Node = self.order[0][2]
        return node


def next_victim(taker: Account, others: Iterable[Account], wanted: int, own: bool) -> Account:
    """The account that gives the next block to `taker`, which wants `wanted` more.

    `own`: the taker's own blocks may go; at equal distance they go first. The caller has made sure
    that somebody can give. O(accounts).
    """
    best, highest = None, float("-inf")
    if own and taker.evictable:
        best, highest = taker, taker.over_share(wanted)
    for account in others:
        if account is not taker and account.spare() and account.over_share() > highest:
            best, highest = account, account.over_share()
    assert best is not None, "asked for a victim where nobody can give"
    return best
