"""Who holds which block: the pool, the accounts, and the trees' holds kept in step.

A block is *free*, *cached* (only the tree refers to it) or *pinned* (a table does, or a copy that
has not been launched). Each move between these states happens here, and moves the account's counts
with it. It knows no lease and no clock. Only `prefix_cache` and `lease_book` call it.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.api import Namespace, Payer, Quota
from engine.cache.block_pool import BlockPool
from engine.cache.block_table import BlockTable
from engine.cache.eviction import Account, Share, next_victim
from engine.cache.prefix_tree import Node
from engine.cache.report import CacheStats
from engine.plan import BlockCopy

PROMISABLE = 7 / 8
"""The part of the pool that promises and floors together may take; the rest keeps work moving."""


class Holdings:
    """`owner[b]` is the account that block b is allocated to; `node_of[b]` its node in a tree.

    `copies` are pending: by destination, each pinning its source. `promisable`: blocks that
    promises and floors together may take.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(blocks)
        self.promisable = int(blocks * PROMISABLE)
        self.accounts: dict[Namespace, Account] = {}
        self.shares: dict[Payer, Share] = {}
        self.owner: list[Account | None] = [None] * blocks
        self.node_of: list[Node | None] = [None] * blocks
        self.copies: dict[int, BlockCopy] = {}
        self.tables: set[BlockTable] = set()

    # -- accounts -----------------------------------------------------------------------------

    def account(self, namespace: Namespace, quota: Quota) -> Account:
        """The namespace's account, in its payer's share under the present quota."""
        payer = quota.payer or namespace
        share = self.shares.get(payer)
        if share is None:
            share = self.shares[payer] = Share(payer, quota)
            self._share_out_floors()
        elif share.quota != quota:
            share.quota = quota
            self._share_out_floors()
        account = self.accounts.get(namespace)
        if account is None:
            account = self.accounts[namespace] = Account(namespace, share, self.block_size)
            share.take(account)
        elif account.share is not share:  # another pays for it from now on
            self._leave_share(account)
            share.take(account)
        return account

    def set_quota(self, quota: Quota) -> None:
        """Its payer's from now on, where there is a share: who has none has nothing. O(shares)."""
        share = self.shares.get(quota.payer)
        if share is not None:
            share.quota = quota
            self._forget_share_if_idle(share)
            self._share_out_floors()

    def forget_if_idle(self, account: Account) -> None:
        """A namespace that holds nothing costs nothing; a payer that is guaranteed something is
        remembered."""
        if account.is_idle and self.accounts.get(account.namespace) is account:
            del self.accounts[account.namespace]
            self._leave_share(account)

    def _leave_share(self, account: Account) -> None:
        share = account.share
        share.let_go(account)
        self._forget_share_if_idle(share)

    def _forget_share_if_idle(self, share: Share) -> None:
        if share.is_idle:
            del self.shares[share.payer]

    def _share_out_floors(self) -> None:
        """Floors that ask for more than may be guaranteed are cut in one proportion. O(shares)."""
        asked = sum(share.quota.floor_blocks for share in self.shares.values())
        for share in self.shares.values():
            share.floor_blocks = self._guaranteed(share.quota.floor_blocks, asked)

    def _guaranteed(self, floor: int, asked: int) -> int:
        """What is guaranteed of a floor where all floors together ask for so much."""
        room = self.promisable
        return floor if asked <= room else floor * room // asked

    # -- pins ---------------------------------------------------------------------------------

    def pin(self, node: Node) -> None:
        """One more hold on a block of the tree."""
        if self.pool.add_ref(node.block) == 2:
            self._uncount(self._owner(node.block), node)

    def pin_all(self, nodes: Sequence[Node]) -> None:
        """One more hold on each."""
        add_ref = self.pool.add_ref
        for node in nodes:
            if add_ref(node.block) == 2:
                self._uncount(self._owner(node.block), node)

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

    def shortage(self, account: Account, count: int) -> tuple[int, int]:
        """(blocks to evict in all, of these its payer's own) so that `account` may take `count`."""
        ceiling = account.share.quota.ceiling_blocks
        own = 0 if ceiling is None else max(0, account.share.held + count - ceiling)
        return max(own, count - len(self.pool.free)), own

    def available(self, namespace: Namespace, quota: Quota) -> int:
        """Blocks that `namespace` could take now, by free list and eviction. O(accounts)."""
        mine = self.shares.get(quota.payer or namespace)
        room = len(self.pool.free)
        room += sum(share.spare() for share in self.shares.values() if share is not mine)
        held = own = 0
        if mine is not None:
            held, own = mine.held, mine.evictable
        if quota.ceiling_blocks is not None:
            room = min(room, quota.ceiling_blocks - held)
        return room + own

    def stats(self, evicted: int, expired: int, copied: int) -> CacheStats:
        """Gauges, with these totals beside them. O(namespaces)."""
        free = len(self.pool.free)
        cached = sum(account.cached for account in self.accounts.values())
        return CacheStats(
            blocks=self.pool.blocks,
            free=free,
            cached=cached,
            pinned=self.pool.blocks - free - cached,
            evictable=sum(account.evictable for account in self.accounts.values()),
            promised=sum(account.promised for account in self.accounts.values()),
            evicted_blocks_total=evicted,
            expired_blocks_total=expired,
            copied_blocks_total=copied,
        )

    def fits(self, namespace: Namespace, quota: Quota, blocks: int) -> bool:
        """Could `namespace` ever have as many blocks? Others' floors are theirs. O(shares)."""
        mine = quota.payer or namespace
        others = [share.quota.floor_blocks for payer, share in self.shares.items() if payer != mine]
        asked = sum(others) + quota.floor_blocks
        room = self.pool.blocks - sum(self._guaranteed(floor, asked) for floor in others)
        if quota.ceiling_blocks is not None:
            room = min(room, quota.ceiling_blocks)
        return blocks <= room

    def can_evict(self, account: Account, count: int) -> bool:
        """Would `make_room` succeed? O(shares)."""
        wanted, own = self.shortage(account, count)
        share = account.share
        can_give = share.evictable if self._may_evict_own(share, count) else 0
        if own > can_give:
            return False
        others = sum(other.spare() for other in self.shares.values() if other is not share)
        return wanted <= can_give + others

    def make_room(self, account: Account, count: int) -> list[tuple[Account, Node]]:
        """Evict by rule 9 until `account` may take `count` blocks; who gave each, and which.

        Call it only when `can_evict` said so. O(evicted * (shares + accounts of who
        gives + log n)).
        """
        wanted, own = self.shortage(account, count)
        share = account.share
        may_own = self._may_evict_own(share, count)
        victims = []
        for index in range(wanted):
            giving = share
            if index >= own:
                giving = next_victim(share, self.shares.values(), count, may_own)
            victim = giving.giver()
            victims.append((victim, self._evict(victim)))
        return victims

    def allocate(self, account: Account, count: int) -> list[int]:
        """`count` blocks, each with one reference; there must be room."""
        blocks = [self.pool.allocate() for _ in range(count)]
        for block in blocks:
            self.owner[block] = account
        account.add_held(count)
        return blocks

    # -- the trees' holds ---------------------------------------------------------------------

    def insert(
        self, account: Account, parent: Node, run: tuple[int, ...], block: int, now_s: float
    ) -> Node:
        """The tree takes a hold on a pinned block. A tail that `run` extends gives way to it."""
        node, shorter = account.tree.insert(parent, run, block)
        if shorter is not None:  # it may be the same block, left earlier by a fork of this sequence
            node.terms = shorter.terms
            account.ends.move(shorter, node)
            self._let_go(account, shorter)
        self.pool.add_ref(block)
        self.node_of[block] = node
        node.since_s = node.last_use_s = now_s
        return node

    def detach(self, account: Account, top: Node) -> int:
        """Take a node and all below it out of the tree; how many. Pinned blocks stay allocated."""
        parent, gone = top.parent, 0
        for node in top.below():
            account.ends.goes(node)
            account.tree.remove(node)
            self._let_go(account, node)
            gone += 1
        if parent is not None:
            self._enter_if_leaf(account, parent)
        return gone

    def set_promised(self, account: Account, node: Node, promised_as: str | None) -> None:
        """Move a node between best effort (None) and promised in a class."""
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

    def _owner(self, block: int) -> Account:
        account = self.owner[block]
        assert account is not None, "a block in use belongs to somebody"
        return account

    def _may_evict_own(self, share: Share, count: int) -> bool:
        """Inside its floor a payer waits rather than lose what it was guaranteed (T3)."""
        return share.held + count > share.floor_blocks

    def _evict(self, account: Account) -> Node:
        node = account.oldest()
        parent = node.parent
        account.ends.goes(node)
        account.tree.remove(node)
        self._let_go(account, node)
        if parent is not None:
            self._enter_if_leaf(account, parent)
        return node

    def _let_go(self, account: Account, node: Node) -> None:
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

    def _count(self, account: Account, node: Node) -> None:
        account.cached += 1
        if not node.promised:
            account.add_evictable(1)
            if not node.children:
                account.enter(node)

    def _uncount(self, account: Account, node: Node) -> None:
        account.cached -= 1
        if not node.promised:
            account.add_evictable(-1)
        if node.in_order:
            account.leave(node)

    def _enter_if_leaf(self, account: Account, node: Node) -> None:
        if node.block < 0 or node.children or node.promised or node.in_order:
            return
        if self.pool.ref_count[node.block] == 1:
            account.enter(node)
