"""What a namespace holds, and what all namespaces of one payer hold together.

Each namespace has an account, and all accounts of one payer are one share, under one quota. A
share's *borrowed* blocks are those above its floor; divided by its weight they say how far it is
over (rule 9; `shares` keeps the order). Within a share its least recently used leaf goes first,
whichever of its accounts that is in.

Pure bookkeeping: it knows no pool and no clock. What moves is noted, in a set of names for whoever
tells of them and in a list of shares for the sums over all: so neither costs more than what has
moved. Only `holdings`, `lease_book` and `shares` call it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sortedcontainers import SortedList

from engine.api import Namespace, Payer, Quota
from engine.cache.lease_expiry import LeaseExpiry
from engine.cache.prefix_tree import Node, PrefixTree


class NamespaceAccount:
    """What one namespace holds. All counts are blocks.

    `held`: allocated to it. `cached`: of these, in the tree and in nobody's table. `evictable`: of
    these, not promised. `promised`: in the tree under a live promise, `promised_in` by its class;
    `reserved`: promised to running requests that have not computed them yet. `ends`: where its
    leases do. Where it moves, its name is put in the set `changed` that it was made with.
    """

    __slots__ = (
        "_changed",
        "cached",
        "ends",
        "evictable",
        "held",
        "namespace",
        "promised",
        "promised_in",
        "reserved",
        "share",
        "tables",
        "tree",
        "write_epoch",
    )

    def __init__(
        self,
        namespace: Namespace,
        share: PayerAccount,
        block_size: int,
        serials: Iterator[int],
        changed: set[Namespace],
    ) -> None:
        self.namespace = namespace
        self.share = share
        self.tree = PrefixTree(block_size, serials)
        self.ends = LeaseExpiry()
        self.tables = 0
        self.held = 0
        self.cached = 0
        self.evictable = 0
        self.promised = 0
        self.promised_in: Counter[str] = Counter()
        self.reserved = 0
        self.write_epoch = 0
        self._changed = changed

    def add_held(self, blocks: int) -> None:
        self.held += blocks
        self.share.held += blocks
        self._moved()

    def add_cached(self, blocks: int, evictable: int) -> None:
        """So many more are in the tree alone; `evictable` of them are not promised."""
        self.cached += blocks
        self.evictable += evictable
        share = self.share
        share.cached += blocks
        share.evictable += evictable
        self._moved()

    def add_promised(self, retention: str, blocks: int) -> None:
        """In a class; the sums follow."""
        self.promised_in[retention] += blocks
        if not self.promised_in[retention]:
            del self.promised_in[retention]
        self.promised += blocks
        self.share.promised += blocks
        self._moved()

    def add_reserved(self, blocks: int) -> None:
        self.reserved += blocks
        self.share.promised += blocks
        self._moved()

    @property
    def is_idle(self) -> bool:
        """Nothing held, nobody running: it may be forgotten."""
        return not (self.held or self.tables or self.reserved)

    def enter(self, node: Node) -> None:
        """An unpinned, unpromised leaf may be evicted from now on. O(log n)."""
        node.in_order = True
        self.share.order.add((node.last_use_s, node.serial, node))

    def leave(self, node: Node) -> None:
        """It may not any more. O(log n)."""
        node.in_order = False
        self.share.order.remove((node.last_use_s, node.serial, node))

    def _moved(self) -> None:
        self._changed.add(self.namespace)
        if not self.share.is_stale:
            self.share.moved()


class PayerAccount:
    """What all accounts of one payer hold together, under its quota.

    `held`, `cached` and `evictable` are the sums of its accounts', `promised` that of promised and
    reserved; the accounts keep them so. `floor_blocks`: what it is guaranteed of its quota's floor.
    `order`: its evictable leaves, oldest use first. `is_stale`: it has moved and is in the list
    `stale` that it was made with. `counted` and `place` are how `shares` counts it.
    """

    __slots__ = (
        "_stale",
        "accounts",
        "cached",
        "counted",
        "evictable",
        "floor_blocks",
        "held",
        "is_stale",
        "order",
        "payer",
        "place",
        "promised",
        "quota",
        "serial",
    )

    def __init__(self, payer: Payer, quota: Quota, serial: int, stale: list[PayerAccount]) -> None:
        self.payer = payer
        self.quota = quota
        self.serial = serial
        self.floor_blocks = 0
        self.accounts: dict[Namespace, NamespaceAccount] = {}
        self.held = self.cached = self.evictable = self.promised = 0
        self.order = SortedList()
        self.is_stale = False
        self.counted = (0, 0, 0)
        self.place: tuple[float, int, PayerAccount] | None = None
        self._stale = stale

    def take(self, account: NamespaceAccount) -> None:
        """It is in this share from now on. O(1), and O(its blocks) if it held any."""
        account.share = self
        self.accounts[account.namespace] = account
        self._add(account, 1)
        for node in _leaves(account):
            account.enter(node)

    def let_go(self, account: NamespaceAccount) -> None:
        """It is in this share no more. As `take`."""
        for node in _leaves(account):
            self.order.remove((node.last_use_s, node.serial, node))
        del self.accounts[account.namespace]
        self._add(account, -1)

    def _add(self, account: NamespaceAccount, sign: int) -> None:
        self.held += sign * account.held
        self.cached += sign * account.cached
        self.evictable += sign * account.evictable
        self.promised += sign * (account.promised + account.reserved)
        self.moved()

    def moved(self) -> None:
        """The sums over all shares are not what they were."""
        if not self.is_stale:
            self.is_stale = True
            self._stale.append(self)

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

    def claimed(self) -> int:
        """Blocks of which promises to others leave nothing."""
        return max(self.promised, self.floor_blocks)

    def oldest(self) -> Node:
        """The least recently used evictable leaf of all its accounts. O(1)."""
        node: Node = self.order[0][2]
        return node


def _leaves(account: NamespaceAccount) -> list[Node]:
    """Those of its nodes that are in the order."""
    return [node for node in account.tree.root.below() if node.in_order] if account.held else []
