"""Who holds which block: the pool, the accounts, and the trees' holds kept in step.

A block is *free*, *cached* (only the tree refers to it) or *pinned* (a table does, or a copy that
has not been launched). Each move between these states happens here, and moves the account's counts
with it. It knows no lease and no clock. Only `prefix_cache` and `lease_book` call it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import count as count_up

from engine.api import Namespace, Quota
from engine.cache.accounts import NamespaceAccount, PayerAccount
from engine.cache.block_pool import BlockPool
from engine.cache.block_table import BlockTable
from engine.cache.events import CacheStats, NamespaceUse
from engine.cache.fair_share import FairShare
from engine.cache.prefix_tree import Node
from engine.plan import BlockCopy

PROMISABLE = 7 / 8
"""The part of the pool that promises and floors together may take, and of a payer's ceiling that
promises may; the rest keeps work moving."""
FLOORS_MOST = 1 / 2
"""The part that floors may always take, however long one sequence may be."""


class BlockManager:
    """`owner[b]` is the account that block b is allocated to; `node_of[b]` its node in a tree.

    `copies` are pending: by destination, each pinning its source. `changed`: the names of accounts
    whose counts have moved since somebody took them. `version`: another whenever something has
    moved by other means than a block table.
    """

    def __init__(self, blocks: int, block_size: int, longest: int = 0) -> None:
        """`longest`: blocks of the longest sequence that anybody may ask for. Floors leave room for
        it, or half of the pool if it is longer, so that none makes another's request impossible."""
        self.block_size = block_size
        self.pool = BlockPool(blocks)
        self.accounts: dict[Namespace, NamespaceAccount] = {}
        promisable, least = int(blocks * PROMISABLE), int(blocks * FLOORS_MOST)
        self.shares = FairShare(promisable, min(promisable, max(least, blocks - longest)))
        self.changed: set[Namespace] = set()
        self.owner: list[NamespaceAccount | None] = [None] * blocks
        self.node_of: list[Node | None] = [None] * blocks
        self.copies: dict[int, BlockCopy] = {}
        self.tables: set[BlockTable] = set()
        self.version = 0
        self._serials = count_up(1)

    # -- accounts -----------------------------------------------------------------------------

    def account(self, namespace: Namespace, quota: Quota) -> NamespaceAccount:
        """The namespace's account, in its payer's share under the present quota."""
        self.version += 1
        share = self.shares.under(namespace, quota)
        account = self.accounts.get(namespace)
        if account is None:
            account = self.accounts[namespace] = NamespaceAccount(
                namespace, share, self.block_size, self._serials, self.changed
            )
            share.take(account)
        elif account.share is not share:  # another pays for it from now on
            self._leave_share(account)
            share.take(account)
        return account

    def forget_if_idle(self, account: NamespaceAccount) -> None:
        """A namespace that holds nothing costs nothing; a payer that is guaranteed something is
        remembered."""
        if account.is_idle and self.accounts.get(account.namespace) is account:
            del self.accounts[account.namespace]
            self._leave_share(account)

    def use(self, namespace: Namespace) -> NamespaceUse:
        """What one namespace holds, which may be nothing."""
        account = self.accounts.get(namespace)
        if account is None:
            return NamespaceUse(namespace, 0, 0, {})
        pinned = account.held - account.cached
        return NamespaceUse(namespace, account.held, pinned, dict(account.promised_in))

    def take_changed(self) -> set[Namespace]:
        """The names of the accounts that have changed; from now on it is noted anew. O(these)."""
        names = self.changed.copy()
        self.changed.clear()
        return names

    def _leave_share(self, account: NamespaceAccount) -> None:
        share = account.share
        share.let_go(account)
        self.shares.forget_if_idle(share)

    # -- pins ---------------------------------------------------------------------------------

    def pin(self, node: Node) -> None:
        """One more hold on a block of the tree."""
        if self.pool.add_ref(node.block) == 2:
            self._uncount(self._owner(node.block), node)

    def pin_all(self, account: NamespaceAccount, nodes: Sequence[Node]) -> None:
        """One more hold on each; they are in this account's tree."""
        add_ref = self.pool.add_ref
        cached = evictable = 0
        for node in nodes:
            if add_ref(node.block) == 2:
                cached += 1
                evictable += node.promised_as is None
                if node.in_order:
                    account.leave(node)
        if cached:
            account.add_cached(-cached, -evictable)

    def share(self, block: int) -> None:
        """One more hold on a block that is pinned already."""
        self.pool.add_ref(block)

    def unpin(self, block: int) -> None:
        """One hold fewer: the last one leaves the block cached, or free if no tree has it."""
        count = self.pool.drop_ref(block)
        if count == 0:
            self._freed(block)
        elif count == 1:
            node = self.node_of[block]
            if node is not None:
                self._count(self._owner(block), node)

    def unpin_all(self, account: NamespaceAccount, blocks: Iterable[int]) -> None:
        """One hold fewer on each; they are this account's, a prefix's end before its beginning."""
        drop_ref, node_of = self.pool.drop_ref, self.node_of
        cached = evictable = 0
        for block in blocks:
            count = drop_ref(block)
            if count == 0:
                self._freed(block)
            elif count == 1 and (node := node_of[block]) is not None:
                cached += 1
                if node.promised_as is None:
                    evictable += 1
                    if not node.children:
                        account.enter(node)
        if cached:
            account.add_cached(cached, evictable)

    # -- copies -------------------------------------------------------------------------------

    def copy(self, src: int, dst: int, tokens: int) -> None:
        """Note a copy; its source is pinned until `take_copies`."""
        self.pool.add_ref(src)
        self.copies[dst] = BlockCopy(src=src, dst=dst, tokens=tokens)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Hand the copies over, in order, and let their sources go."""
        copies = tuple(self.copies.values())
        self.copies.clear()
        for copy in copies:
            self.unpin(copy.src)
        return copies

    # -- allocation ---------------------------------------------------------------------------

    def shortage(self, account: NamespaceAccount, count: int) -> tuple[int, int]:
        """(blocks to evict in all, of these its payer's own) so that `account` may take `count`."""
        ceiling = account.share.quota.ceiling_blocks
        own = 0 if ceiling is None else max(0, account.share.held + count - ceiling)
        return max(own, count - len(self.pool.free)), own

    def rooms(self, namespace: Namespace, quota: Quota) -> tuple[int, float]:
        """Blocks that `namespace` could take now, by free list and eviction: as many as the pool
        has, and as its payer's own ceiling leaves it. See `FairShare`."""
        mine = self.shares.get(quota.payer or namespace)
        held, own = (0, 0) if mine is None else (mine.held, mine.evictable)
        pool = len(self.pool.free) + self.shares.spare_beside(mine) + own
        ceiling = quota.ceiling_blocks
        return pool, math.inf if ceiling is None else ceiling - held + own

    def stats(self, evicted: int, expired: int, copied: int) -> CacheStats:
        """Gauges, with these totals beside them. See `FairShare`."""
        free, cached = len(self.pool.free), self.shares.cached()
        return CacheStats(
            blocks=self.pool.blocks,
            free=free,
            cached=cached,
            pinned=self.pool.blocks - free - cached,
            evicted_blocks_total=evicted,
            expired_blocks_total=expired,
            copied_blocks_total=copied,
        )

    def room(self, namespace: Namespace, quota: Quota) -> int:
        """Blocks that `namespace` could ever have. Others' floors are theirs. See `FairShare`."""
        payer = quota.payer or namespace
        room = self.pool.blocks - self.shares.floors_beside(payer, quota.floor_blocks)
        if quota.ceiling_blocks is not None:
            room = min(room, quota.ceiling_blocks)
        return room

    def can_evict(self, account: NamespaceAccount, count: int) -> bool:
        """Would `make_room` succeed? See `FairShare`."""
        wanted, own = self.shortage(account, count)
        share = account.share
        can_give = share.evictable if self._may_evict_own(share, count) else 0
        return own <= can_give and wanted <= can_give + self.shares.spare_beside(share)

    def make_room(
        self, account: NamespaceAccount, count: int
    ) -> list[tuple[NamespaceAccount, Node]]:
        """Evict by rule 9 until `account` may take `count` blocks; who gave each, and which.

        Call it only when `can_evict` said so. O(evicted log n).
        """
        wanted, own = self.shortage(account, count)
        share = account.share
        may_own = self._may_evict_own(share, count)
        victims = []
        for index in range(wanted):
            giving = share
            if index >= own:
                giving = self.shares.giver(share, count, own=may_own)
            victims.append(self._evict(giving))
        return victims

    def allocate(self, account: NamespaceAccount, count: int) -> list[int]:
        """`count` blocks, each with one reference; there must be room."""
        blocks = [self.pool.allocate() for _ in range(count)]
        for block in blocks:
            self.owner[block] = account
        account.add_held(count)
        return blocks

    # -- the trees' holds ---------------------------------------------------------------------

    def insert(
        self,
        account: NamespaceAccount,
        parent: Node,
        run: tuple[int, ...],
        block: int,
        now_s: float,
    ) -> tuple[Node, int]:
        """The tree takes a hold on a pinned block. A tail that `run` extends gives way to it. Says
        by how many blocks the tree has grown."""
        node, shorter = account.tree.insert(parent, run, block)
        if shorter is not None:  # it may be the same block, left earlier by a fork of this sequence
            node.terms = shorter.terms
            account.ends.move(shorter, node)
            self._let_go(account, shorter)
        self.pool.add_ref(block)
        self.node_of[block] = node
        node.since_s = node.last_use_s = now_s
        return node, shorter is None

    def detach(self, account: NamespaceAccount, top: Node) -> int:
        """Take a node and all below it out of the tree; how many. Pinned blocks stay allocated."""
        self.version += 1
        parent, gone = top.parent, 0
        for node in top.below():
            account.ends.goes(node)
            account.tree.remove(node)
            self._let_go(account, node)
            gone += 1
        assert parent is not None, "the root stays"
        self._enter_if_leaf(account, parent)
        return gone

    def set_promised(self, account: NamespaceAccount, node: Node, promised_as: str | None) -> None:
        """Move a node between best effort (None) and promised in a class."""
        self.version += 1
        is_cached = self.pool.ref_count[node.block] == 1
        if is_cached:
            self._uncount(account, node)
        if node.promised_as is not None:
            account.add_promised(node.promised_as, -1)
        if promised_as is not None:
            account.add_promised(promised_as, 1)
        node.promised_as = promised_as
        if is_cached:
            self._count(account, node)

    # -- inside -------------------------------------------------------------------------------

    def _owner(self, block: int) -> NamespaceAccount:
        account = self.owner[block]
        assert account is not None, "a block in use belongs to somebody"
        return account

    def _may_evict_own(self, share: PayerAccount, count: int) -> bool:
        """Inside its floor a payer waits rather than lose what it was guaranteed (T3)."""
        return share.held + count > share.floor_blocks

    def _evict(self, share: PayerAccount) -> tuple[NamespaceAccount, Node]:
        node = share.oldest()
        account, parent = self._owner(node.block), node.parent
        account.ends.goes(node)
        account.tree.remove(node)
        self._let_go(account, node)
        assert parent is not None, "the root stays"
        self._enter_if_leaf(account, parent)
        return account, node

    def _let_go(self, account: NamespaceAccount, node: Node) -> None:
        """The tree drops its hold on a node that has just been removed."""
        if self.pool.ref_count[node.block] == 1:
            self._uncount(account, node)
        if node.promised_as is not None:
            account.add_promised(node.promised_as, -1)
            node.promised_as = None
        self.node_of[node.block] = None
        if self.pool.drop_ref(node.block) == 0:
            self._freed(node.block)

    def _freed(self, block: int) -> None:
        self._owner(block).add_held(-1)
        self.owner[block] = None
        copy = self.copies.pop(block, None)
        if copy is not None:
            self.unpin(copy.src)

    def _count(self, account: NamespaceAccount, node: Node) -> None:
        is_evictable = not node.promised
        account.add_cached(1, is_evictable)
        if is_evictable and not node.children:
            account.enter(node)

    def _uncount(self, account: NamespaceAccount, node: Node) -> None:
        account.add_cached(-1, -(not node.promised))
        if node.in_order:
            account.leave(node)

    def _enter_if_leaf(self, account: NamespaceAccount, node: Node) -> None:
        if node.block < 0 or node.children or node.promised or node.in_order:
            return
        if self.pool.ref_count[node.block] == 1:
            account.enter(node)
