"""Block accounts: what one namespace holds, and what all namespaces of one payer hold.

Each namespace has a `NamespaceAccount`. All namespaces of one payer share a `PayerAccount` under
one quota. A payer's *borrowed* blocks are the blocks above its floor; divided by the payer's weight
they give its overage (rule *Fair share*; `fair_share` orders payers by it). Within a payer the
policy in `eviction_policy` picks the next leaf, from any of the payer's namespaces.

The accounts know no pool and no clock. A change marks the namespace in a set of names and the payer
in a list, so reporting and summing cost only as much as has changed. Only `block_manager`,
`block_promises`, `lease_manager` and `fair_share` change them; levels read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from engine.api import Namespace, Payer, Quota
from engine.cache.tree.eviction_policy import EvictionOrder
from engine.cache.tree.lease_endpoints import LeaseEndpoints
from engine.cache.tree.prefix_tree import Node, PrefixTree, TreeBlock, tree_blocks


@dataclass(slots=True, eq=False, repr=False)
class NamespaceAccount:
    """The blocks of one namespace. All counts are in blocks; every change adds the namespace to the
    set `changed`, which all accounts share.
    """

    namespace: Namespace
    payer_account: PayerAccount
    tree: PrefixTree
    changed: set[Namespace]
    lease_endpoints: LeaseEndpoints[Node]
    """The last blocks of each lease."""
    tables: int = 0
    held: int = 0
    """Blocks of the device that are allocated to the namespace."""
    cached: int = 0
    """The part of `held` that only the tree refers to."""
    evictable: int = 0
    """The part of `cached` that is not bound."""
    bound: int = 0
    """Blocks that promises bind to the device, there or still to come."""
    promised: int = 0
    """Blocks in the tree under a live promise, on any level."""
    promised_in: Counter[str] = field(default_factory=Counter)
    """These by retention class."""
    below: int = 0
    """The part of `promised` that is not bound, since a level below keeps the promise."""
    away: int = 0
    """The part of `promised` that has no block of the device."""
    reserved: int = 0
    """Blocks promised to running requests that have not computed them yet."""
    write_epoch: int = 0

    def add_held(self, blocks: int) -> None:
        """Add `blocks` (may be negative) to the allocated blocks. O(1)."""
        self.held += blocks
        self.payer_account.held += blocks
        self._mark_changed()

    def add_cached(self, blocks: int, evictable: int) -> None:
        """Add `blocks` that only the tree refers to; `evictable` of them are not bound. O(1)."""
        self.cached += blocks
        self.evictable += evictable
        payer_account = self.payer_account
        payer_account.cached += blocks
        payer_account.evictable += evictable
        self._mark_changed()

    def add_promise(self, block: TreeBlock, sign: int) -> None:
        """Count a block of the tree by its promise as it is now; with the sign -1 no more. O(1)."""
        if not block.is_bound and block.promised_class is None:
            return
        payer_account = self.payer_account
        if block.is_bound:
            self.bound += sign
            payer_account.promised += sign
        if (name := block.promised_class) is not None:
            self.promised += sign
            payer_account.promised_total += sign
            self.promised_in[name] += sign
            if not self.promised_in[name]:
                del self.promised_in[name]
            if not block.is_bound:
                self.below += sign
                payer_account.below += sign
            if block.block < 0:
                self.away += sign
        self._mark_changed()

    def add_away(self, blocks: int) -> None:
        """Add `blocks` under a promise that the device has evicted, or got back. O(1)."""
        self.away += blocks
        self._mark_changed()

    def add_reserved(self, blocks: int) -> None:
        """Add `blocks` that are promised and not computed yet. O(1)."""
        self.reserved += blocks
        self.payer_account.promised += blocks
        self.payer_account.promised_total += blocks
        self._mark_changed()

    @property
    def is_idle(self) -> bool:
        """Return whether the namespace holds nothing on any level and runs nothing, so its account
        may be deleted.
        """
        return not (self.held or self.tables or self.reserved or self.tree.root.children)

    def add_evictable(self, node: TreeBlock) -> None:
        """Put an unpinned, unbound leaf or window block into the payer's eviction order.
        O(log n).
        """
        self.payer_account.eviction_order.add(node)

    def remove_evictable(self, node: TreeBlock) -> None:
        """Take a leaf or window block out of the payer's eviction order. O(log n)."""
        self.payer_account.eviction_order.remove(node)

    def _mark_changed(self) -> None:
        self.changed.add(self.namespace)
        if not self.payer_account.is_stale:
            self.payer_account.mark_stale()


class PayerCounts(NamedTuple):
    """What `fair_share` sums over payers, in blocks: those that a payer would give to others, those
    that promises to others must leave it, on the device and below, and its cached ones.
    """

    spare: int = 0
    claimed: int = 0
    cached: int = 0
    claimed_below: int = 0


NOT_COUNTED = PayerCounts()
RESTING_WEIGHT: Final = 1 / 4
"""What remains of the weight of a payer that rests: of 30 tenants of which 20 had asked for nothing
for hours, the others then found 0.54 of their tokens instead of 0.36.
"""


@dataclass(slots=True, eq=False, repr=False)
class PayerAccount:
    """All accounts of one payer, under the payer's quota. All counts are in blocks.

    `held`, `cached`, `evictable` and `below` are sums over the namespaces; `promised` is the
    sum of blocks that promises take of the device, or will (bound, reserved); `promised_total`
    the sum of all promises on any level. The namespace accounts keep these sums.
    `floor_blocks`: the guaranteed part of the quota's floor. `eviction_order`: the payer's
    evictable leaves, sorted by the policy. `is_resting`: it has asked for nothing for long.
    `is_stale`: the account has changed and is in the list `stale`, which all payers share.
    `fair_share` keeps `counted` (what its sums include of this payer) and `order_entry` (the
    payer's entry in its order).
    """

    payer: Payer
    quota: Quota
    serial: int
    stale: list[PayerAccount]
    eviction_order: EvictionOrder
    floor_blocks: int = 0
    accounts: dict[Namespace, NamespaceAccount] = field(default_factory=dict)
    held: int = 0
    cached: int = 0
    evictable: int = 0
    promised: int = 0
    promised_total: int = 0
    below: int = 0
    is_resting: bool = False
    is_stale: bool = False
    counted: PayerCounts = NOT_COUNTED
    order_entry: tuple[float, int, PayerAccount] | None = None

    def add_account(self, account: NamespaceAccount, leaves: Iterable[TreeBlock] = ()) -> None:
        """Add a namespace, with its evictable `leaves`, to this payer. O(leaves log n)."""
        account.payer_account = self
        self.accounts[account.namespace] = account
        self._add_counts(account, 1)
        for node in leaves:
            self.eviction_order.add(node)

    def remove_account(self, account: NamespaceAccount) -> list[TreeBlock]:
        """Remove a namespace from this payer. Return its evictable leaves.

        O(1), or O(blocks) if the namespace holds any.
        """
        leaves = _evictable_leaves(account)
        for node in leaves:
            self.eviction_order.remove(node)
        del self.accounts[account.namespace]
        self._add_counts(account, -1)
        return leaves

    def _add_counts(self, account: NamespaceAccount, sign: int) -> None:
        self.held += sign * account.held
        self.cached += sign * account.cached
        self.evictable += sign * account.evictable
        self.promised += sign * (account.bound + account.reserved)
        self.promised_total += sign * (account.promised + account.reserved)
        self.below += sign * account.below
        self.mark_stale()

    def mark_stale(self) -> None:
        """Note that `fair_share` must count this payer again. O(1)."""
        if not self.is_stale:
            self.is_stale = True
            self.stale.append(self)

    @property
    def is_idle(self) -> bool:
        """Return whether the payer has no namespace and no floor, so its account may be deleted."""
        return not (self.accounts or self.quota.floor_blocks)

    def overage(self, more: int = 0) -> float:
        """Return the blocks borrowed above the floor per unit of weight, with `more` added."""
        return (self.held + more - self.floor_blocks) / self.weight

    @property
    def weight(self) -> float:
        """Return its weight, of which one that has asked for nothing for long has a part. O(1)."""
        return self.quota.weight * RESTING_WEIGHT if self.is_resting else self.quota.weight

    def spare_blocks(self) -> int:
        """Return the blocks that other payers may take: evictable, and above the floor."""
        return max(0, min(self.evictable, self.held - self.floor_blocks))

    def claimed_blocks(self) -> int:
        """Return the blocks that promises to other payers must leave free: the promises or the
        floor.
        """
        return max(self.promised, self.floor_blocks)

    def claimed_below(self, scale: float) -> int:
        """Return the same on the level that keeps promises, which is `scale` times the device."""
        return max(self.promised_total, int(self.floor_blocks * scale))


def _evictable_leaves(account: NamespaceAccount) -> list[TreeBlock]:
    """Return the leaves and window blocks of a namespace that are in the eviction order.
    O(blocks).
    """
    if not account.held:
        return []
    return [
        block
        for node in account.tree.root.subtree()
        if node.block >= 0
        for block in tree_blocks(node)
        if block.eviction_score is not None
    ]
