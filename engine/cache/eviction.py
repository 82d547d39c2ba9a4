"""Who gives a block when none is free: accounts, the shares they are in, and the order of rule 9.

Each namespace has an account, and all accounts of one payer are one share, under one quota. A
share's *borrowed* blocks are those above its floor; divided by its weight they say how far it is
over. The one furthest over gives first, its least recently used leaf first; a floor is never
touched by others. This is weighted max-min fairness by water-filling, and needs no total: a tenant
that streams unique prompts stands highest and so turns over its own blocks, however many namespaces
it makes of them.

Pure bookkeeping: it knows no pool and no clock. Only `prefix_cache` calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sortedcontainers import SortedList

from engine.api import Namespace, Payer, Quota
from engine.cache.lease_ends import LeaseEnds
from engine.cache.prefix_tree import Node, PrefixTree


class Account:
    """What one namespace holds. All counts are blocks.

    `held`: allocated to it. `cached`: of these, in the tree and in nobody's table. `evictable`: of
    these, not promised. `promised`: in the tree under a live promise, `promised_in` by its class;
    `reserved`: promised to running requests that have not computed them yet. `order`: evictable
    leaves, oldest use first. `ends`: where its leases do.
    """

    __slots__ = (
        "cached",
        "ends",
        "evictable",
        "held",
        "namespace",
        "order",
        "promised",
        "promised_in",
        "reserved",
        "share",
        "tables",
        "tree",
        "write_epoch",
    )

    def __init__(self, namespace: Namespace, share: Share, block_size: int) -> None:
        self.namespace = namespace
        self.share = share
        self.tree = PrefixTree(block_size)
        self.order = SortedList()
        self.ends = LeaseEnds()
        self.tables = 0
        self.held = 0
        self.cached = 0
        self.evictable = 0
        self.promised = 0
        self.promised_in: Counter[str] = Counter()
        self.reserved = 0
        self.write_epoch = 0

    def add_held(self, blocks: int) -> None:
        self.held += blocks
        self.share.held += blocks

    def add_evictable(self, blocks: int) -> None:
        self.evictable += blocks
        self.share.evictable += blocks

    def add_promised(self, retention: str, blocks: int) -> None:
        """In a class; the sums follow."""
        self.promised_in[retention] += blocks
        if not self.promised_in[retention]:
            del self.promised_in[retention]
        self.promised += blocks
        self.share.promised += blocks

    def add_reserved(self, blocks: int) -> None:
        self.reserved += blocks
        self.share.promised += blocks

    @property
    def is_idle(self) -> bool:
        """Nothing held, nobody running: it may be forgotten."""
        return not (self.held or self.tables or self.reserved)

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


class Share:
    """What all accounts of one payer hold together, under its quota.

    `held` and `evictable` are the sums of its accounts', `promised` that of promised and reserved;
    the accounts keep them so. `floor_blocks`: what it is guaranteed of its quota's floor.
    """

    __slots__ = ("accounts", "evictable", "floor_blocks", "held", "payer", "promised", "quota")

    def __init__(self, payer: Payer, quota: Quota) -> None:
        self.payer = payer
        self.quota = quota
        self.floor_blocks = 0
        self.accounts: dict[Namespace, Account] = {}
        self.held = self.evictable = self.promised = 0

    def take(self, account: Account) -> None:
        """It is in this share from now on. O(1)."""
        account.share = self
        self.accounts[account.namespace] = account
        self._add(account, 1)

    def let_go(self, account: Account) -> None:
        """It is in this share no more. O(1)."""
        del self.accounts[account.namespace]
        self._add(account, -1)

    def _add(self, account: Account, sign: int) -> None:
        self.held += sign * account.held
        self.evictable += sign * account.evictable
        self.promised += sign * (account.promised + account.reserved)

    @property
    def is_idle(self) -> bool:
        """Nobody is in it and nothing is guaranteed: it may be forgotten."""
        return not (self.accounts or self.quota.floor_blocks)

    def over(self, more: int = 0) -> float:
        """Blocks borrowed above the floor, per unit of weight, if it held `more`."""
        return (self.held + more - self.floor_blocks) / self.quota.weight

    def spare(self) -> int:
        """Blocks that others may take: evictable, and above the floor."""
        return max(0, min(self.evictable, self.held - self.floor_blocks))

    def giver(self) -> Account:
        """The account with its least recently used evictable leaf. O(its accounts)."""
        with_leaves = (account for account in self.accounts.values() if account.order)
        return min(with_leaves, key=lambda account: account.oldest().last_use_s)


def next_victim(taker: Share, others: Iterable[Share], wanted: int, own: bool) -> Share:
    """The share that gives the next block to `taker`, which wants `wanted` more.

    `own`: the taker's own blocks may go; at equal distance they go first. The caller has made sure
    that somebody can give. O(shares).
    """
    best, highest = None, float("-inf")
    if own and taker.evictable:
        best, highest = taker, taker.over(wanted)
    for share in others:
        if share is not taker and share.spare() and share.over() > highest:
            best, highest = share, share.over()
    assert best is not None, "asked for a victim where nobody can give"
    return best
