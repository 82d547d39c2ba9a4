"""The block manager: moves blocks between free, cached and pinned, and keeps every count in step.

A block is *free*, *cached* (only the tree refers to it) or *pinned* (a block table does, or a copy
that has not been launched). Each move between these states happens here and updates the accounts.
It grants no lease and reads no clock. The modules of `engine.cache` share the one `BlockManager` of
a `PrefixCache`; nothing else has it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count as count_up

from engine.api import Namespace, Quota
from engine.cache.blocks.below import Below
from engine.cache.blocks.block_pool import BlockPool
from engine.cache.blocks.block_table import BlockTable
from engine.cache.events import CacheStats, NamespaceUse
from engine.cache.tree.accounts import NamespaceAccount, PayerAccount
from engine.cache.tree.eviction_policy import EvictionPolicy
from engine.cache.tree.fair_share import FairShare
from engine.cache.tree.lease_endpoints import LeaseEndpoints
from engine.cache.tree.leases import NO_LIMIT
from engine.cache.tree.prefix_tree import (
    NO_BLOCK,
    Node,
    PrefixTree,
    Run,
    State,
    StateBlock,
    TreeBlock,
    WindowBlock,
    all_blocks,
    tree_blocks,
)
from engine.cache.tree.stride_watch import StrideWatch
from engine.cache.tree.window_groups import HOLE, WindowGroups
from engine.errors import InvariantViolation
from engine.plan import BlockCopy

PROMISABLE = 7 / 8
"""The fraction of the pool that promises and floors together may take, and the fraction of a
payer's ceiling that its promises may take. The rest keeps work moving.
"""
FLOORS_MOST = 1 / 2
"""The fraction of the pool that floors may always take, however long one sequence may be."""


class BlockManager:
    """Own the pool, the accounts and the trees' references to blocks.

    `owner[b]`: the account that block b is allocated to. `node_of[b]`: the tree node of block b, or
    its window block. `windows`: the window groups. `resumed_at_s`: the last reason to resume at a
    window block that is not in a tree yet. `window_blocks`: how many window blocks, and blocks of
    states, the trees hold. `state_blocks`: the blocks of a state, 0 for models without.
    `copies`: pending copies by destination; each pins its source. `changed`: namespaces whose
    counts have changed since the last `take_changed`. `version`: grows on every change that does
    not come through a block table. `moving`: by block, its references from moves between levels,
    which are no use of it. `below`: the levels below the device, if there are any. `strides`: tells
    which prefixes are there.
    """

    def __init__(
        self, blocks: int, windows: WindowGroups, longest: int, policy: EvictionPolicy
    ) -> None:
        """Make a manager of `blocks` free blocks.

        `longest`: blocks of the longest sequence that a request may ask for. Floors leave room for
        it, or for half of the pool if it is longer, so no payer's floor makes another payer's
        request impossible. `policy` orders the evictable leaves of each payer.
        """
        self.windows = windows
        self.block_size = windows.block_size
        self.pool = BlockPool(blocks)
        self.accounts: dict[Namespace, NamespaceAccount] = {}
        promisable, least = int(blocks * PROMISABLE), int(blocks * FLOORS_MOST)
        floors_max = min(promisable, max(least, blocks - longest))
        self.fair_share = FairShare(promisable, floors_max, policy)
        self.changed: set[Namespace] = set()
        self.owner: list[NamespaceAccount | None] = [None] * blocks
        self.node_of: list[TreeBlock | None] = [None] * blocks
        self.resumed_at_s: dict[int, float] = {}
        self.window_blocks = 0
        self.state_blocks = 0
        self.copies: dict[int, BlockCopy] = {}
        self.tables: set[BlockTable] = set()
        self.version = 0
        self.moving: Counter[int] = Counter()
        self.below: Below | None = None
        self.strides = StrideWatch(
            windows, lambda: (account.tree for account in self.accounts.values())
        )
        self._serials = count_up(1)

    # -- accounts -----------------------------------------------------------------------------

    def account(self, namespace: Namespace, quota: Quota) -> NamespaceAccount:
        """Return the namespace's account, under its payer's present quota; create it if needed."""
        self.version += 1
        payer_account = self.fair_share.account_for(namespace, quota)
        account = self.accounts.get(namespace)
        if account is None:
            tree = PrefixTree(namespace, self.block_size, self._serials)
            self.strides.follow(tree)
            endpoints = LeaseEndpoints(self._leases_changed)
            account = NamespaceAccount(namespace, payer_account, tree, self.changed, endpoints)
            self.accounts[namespace] = account
            payer_account.add_account(account)
        elif account.payer_account is not payer_account:  # the namespace has a new payer
            payer_account.add_account(account, self._detach_from_payer(account))
        return account

    def account_of(self, node: TreeBlock) -> NamespaceAccount | None:
        """Return the account whose tree has a block; None once it has left. O(1)."""
        run = node.parent if isinstance(node, WindowBlock) else node
        return None if run is None or run.parent is None else self.accounts.get(run.namespace)

    def forget_if_idle(self, account: NamespaceAccount) -> None:
        """Delete the account of an idle namespace. A payer with a floor is kept."""
        if account.is_idle and self.accounts.get(account.namespace) is account:
            del self.accounts[account.namespace]
            self._detach_from_payer(account)

    def use(self, namespace: Namespace) -> NamespaceUse:
        """Return how many blocks a namespace holds; zeros for an unknown namespace."""
        account = self.accounts.get(namespace)
        if account is None:
            return NamespaceUse(namespace, 0, 0, {})
        pinned = account.held - account.cached
        promised = dict(account.promised_in)
        return NamespaceUse(namespace, account.held, pinned, promised, account.below, account.away)

    def take_changed(self) -> set[Namespace]:
        """Return the namespaces whose counts have changed since the last call. O(changed)."""
        names = self.changed.copy()
        self.changed.clear()
        return names

    def _detach_from_payer(self, account: NamespaceAccount) -> list[TreeBlock]:
        payer_account = account.payer_account
        leaves = payer_account.remove_account(account)
        self.fair_share.forget_if_idle(payer_account)
        return leaves

    # -- tables -------------------------------------------------------------------------------

    def add_table(self, table: BlockTable) -> None:
        """Count a new table. O(1)."""
        self.tables.add(table)
        table.account.tables += 1

    def remove_table(self, table: BlockTable) -> None:
        """Forget a table that holds no block, and its account where that is idle. O(1)."""
        self.tables.remove(table)
        self.version += 1
        table.account.tables -= 1
        self.forget_if_idle(table.account)

    # -- pins ---------------------------------------------------------------------------------

    def pin(self, node: TreeBlock) -> None:
        """Add one reference to a block of the tree, of group 0 or a window group."""
        if self.pool.add_ref(node.block) == 2:
            self._uncount_cached(self._owner_of(node.block), node)

    def pin_all(self, account: NamespaceAccount, nodes: Sequence[Node]) -> None:
        """Add one reference to each node's block. All nodes are in this account's tree."""
        add_ref = self.pool.add_ref
        cached = evictable = 0
        for node in nodes:
            if add_ref(node.block) == 2:
                cached += 1
                evictable += not node.is_bound
                if node.eviction_score is not None:
                    account.remove_evictable(node)
        if cached:
            account.add_cached(-cached, -evictable)

    def pin_again(self, block: int) -> None:
        """Add one reference to a block that is pinned already."""
        self.pool.add_ref(block)

    def unpin(self, block: int) -> None:
        """Drop one reference. A block with none left is cached if a tree holds it, else free."""
        count = self.pool.drop_ref(block)
        if count == 0:
            self._on_freed(block)
        elif count == 1:
            node = self.node_of[block]
            if node is not None:
                self._count_cached(self._owner_of(block), node)

    def unpin_all(self, account: NamespaceAccount, blocks: Iterable[int]) -> None:
        """Drop one reference from each block of this account, the end of a prefix before its
        beginning.
        """
        drop_ref, node_of = self.pool.drop_ref, self.node_of
        cached = evictable = 0
        for block in blocks:
            count = drop_ref(block)
            if count == 0:
                self._on_freed(block)
            elif count == 1 and (node := node_of[block]) is not None:
                cached += 1
                if not node.is_bound:
                    evictable += 1
                    if not node.device_children:
                        account.add_evictable(node)
        if cached:
            account.add_cached(cached, evictable)

    def is_in_use(self, block: int) -> bool:
        """Return whether a block of the tree is pinned by more than moves between levels. O(1)."""
        return block >= 0 and self.pool.ref_count[block] - self.moving.get(block, 0) > 1

    # -- copies -------------------------------------------------------------------------------

    def add_copy(self, src: int, dst: int, tokens: int) -> None:
        """Add a pending copy; its source stays pinned until `take_copies`."""
        self.pool.add_ref(src)
        self.copies[dst] = BlockCopy(src=src, dst=dst, tokens=tokens)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Return the pending copies, in order, and unpin their sources."""
        copies = tuple(self.copies.values())
        self.copies.clear()
        for copy in copies:
            self.unpin(copy.src)
        return copies

    # -- allocation ---------------------------------------------------------------------------

    def shortage(self, account: NamespaceAccount, count: int) -> tuple[int, int]:
        """Return (blocks to evict, the part that must be the payer's own) so that `account` may
        take `count`.
        """
        ceiling = account.payer_account.quota.ceiling_blocks
        own = 0 if ceiling is None else max(0, account.payer_account.held + count - ceiling)
        return max(own, count - len(self.pool.free)), own

    def available_blocks(
        self,
        namespace: Namespace,
        quota: Quota,
        pinning: int,
        freed_by_others: int,
        freed_own: int,
    ) -> tuple[int, float]:
        """Return the blocks that `namespace` could take now, from the free list and by eviction:
        (what the pool has, what the payer's own ceiling leaves). Cost: see `FairShare`.

        `pinning`: of the payer's evictable blocks, those that the taker will pin; they count as
        room. `freed_by_others`, `freed_own`: blocks that preempted sequences of other payers, and
        of this one, would leave. A payer that stays inside its floor with all that others give
        evicts none of its own.
        """
        mine = self.fair_share.get(quota.payer or namespace)
        held, own = (0, 0) if mine is None else (mine.held, mine.evictable)
        own += freed_own
        pool = len(self.pool.free) + self.fair_share.spare_of_others(mine) + freed_by_others
        is_inside = mine is not None and held + pool < self._firm_floor(mine)
        ceiling = quota.ceiling_blocks
        pool += pinning if is_inside else own
        return pool, math.inf if ceiling is None else ceiling - held + own

    def stats(self, evicted: int, expired: int, copied: int, resume_gap: int) -> CacheStats:
        """Return the gauges, together with the four given totals. Cost: see `FairShare`."""
        free, cached = len(self.pool.free), self.fair_share.cached()
        return CacheStats(
            blocks=self.pool.blocks,
            free=free,
            cached=cached,
            pinned=self.pool.blocks - free - cached,
            evicted_blocks_total=evicted,
            expired_blocks_total=expired,
            copied_blocks_total=copied,
            window_blocks=self.window_blocks,
            resume_gap_tokens_total=resume_gap,
            promisable=self.fair_share.promisable_left(),
        )

    def max_sequence_blocks(self, namespace: Namespace, quota: Quota) -> int:
        """Return the most blocks that `namespace` could ever hold beside other payers' floors.
        Cost: see `FairShare`.
        """
        payer = quota.payer or namespace
        room = self.pool.blocks - self.fair_share.floors_of_others(payer, quota.floor_blocks)
        if quota.ceiling_blocks is not None:
            room = min(room, quota.ceiling_blocks)
        return room

    def can_evict(self, account: NamespaceAccount, count: int) -> bool:
        """Return whether `make_room` would succeed. Cost: see `FairShare`."""
        wanted, own = self.shortage(account, count)
        payer_account = account.payer_account
        own_blocks = min(payer_account.evictable, self._own_to_evict(payer_account, count))
        return own <= own_blocks and wanted <= own_blocks + self.fair_share.spare_of_others(
            payer_account
        )

    def make_room(
        self, account: NamespaceAccount, count: int
    ) -> list[tuple[NamespaceAccount, list[TreeBlock]]]:
        """Evict by rule *Fair share* until `account` may take `count` blocks. Return the victims in
        order: runs of one account, each a leaf and what became one by its end.

        A leaf's window blocks leave before its own block, one for each block that is wanted, so no
        payer gives more than it must. Call it only after `can_evict` returned true. O(evicted
        log n).
        """
        wanted, own = self.shortage(account, count)
        taker, share = account.payer_account, self.fair_share
        own_left = self._own_to_evict(taker, count)
        victims: list[tuple[NamespaceAccount, list[TreeBlock]]] = []
        while wanted > 0:
            giver, most = taker, min(own, wanted)
            if own <= 0:
                giver = share.choose_victim(taker, count, own=own_left > 0)
                most = min(wanted, own_left) if giver is taker else wanted
                if most > 1:
                    most = share.given_in_a_row(giver, taker, count, most, own=own_left > 0)
            victims += self._evict(giver, most)
            wanted, own = wanted - most, own - most
            own_left -= most if giver is taker else 0
        return victims

    def allocate(self, account: NamespaceAccount, count: int) -> list[int]:
        """Allocate `count` blocks with one reference each. The caller has made room."""
        blocks = self.pool.allocate(count)
        for block in blocks:
            self.owner[block] = account
        account.add_held(count)
        return blocks

    # -- tree references ----------------------------------------------------------------------

    def insert(
        self,
        account: NamespaceAccount,
        parent: Node,
        run: tuple[int, ...],
        block: int,
        now_s: float,
        beside: Sequence[int] = (),
        known: Node | None = None,
    ) -> tuple[Node, int]:
        """Add a pinned block, and those `beside` it in the window groups, to the tree: to `known`,
        the node that has its run below the device, or to a new one. A hole beside it becomes a
        tombstone. Return the node and by how many blocks the tree has grown.

        A tail that `run` extends is replaced: the node takes over its terms and leases.
        """
        node = known or account.tree.add(parent, run)
        if known is not None and known.promised:
            account.add_away(-1)
        shorter = account.tree.put_block(node, block)
        added, lost = 1, list[WindowBlock | None]()
        if beside:
            added += len(beside) - list(beside).count(HOLE)
            lost = [None] * len(beside)
        if shorter is not None:  # may be the same block, left earlier by a fork of this sequence
            if known is None:
                node.terms = shorter.terms
            elif node.terms is not None:
                node.terms.merge(shorter.terms or NO_LIMIT)
            account.lease_endpoints.replace_node(shorter, node)
            lost = list(shorter.beside or ())
            added -= self._remove(account, shorter)
        self.pool.add_ref(block)
        self.node_of[block] = node
        node.inserted_at_s = node.last_use_s = now_s
        if not beside:
            return node, added
        node.beside = [None] * len(beside)
        for group, (window_block, before) in enumerate(zip(beside, lost, strict=True)):
            if window_block == HOLE:
                continue
            fresh = self.fill(account, node, group, window_block, now_s)
            if before is not None:
                fresh.terms = fresh.terms or before.terms
                fresh.resumed_at_s = max(fresh.resumed_at_s, before.resumed_at_s)
        return node, added

    def fill(
        self, account: NamespaceAccount, node: Node, group: int, block: int, now_s: float
    ) -> WindowBlock:
        """Give a node a pinned block in window group `group`, where it has none: one that is away
        and promised comes back. O(1).
        """
        assert node.beside is not None, "a model with window groups"
        fresh = None if node.away is None else node.away[group]
        if fresh is None:
            fresh = WindowBlock(node, group, block, next(self._serials), now_s)
        else:
            fresh.block, fresh.inserted_at_s = block, now_s
            account.add_away(-1)
            self._forget_away(fresh)
        fresh.resumed_at_s = self.resumed_at_s.pop(block, fresh.resumed_at_s)
        node.beside[group] = fresh
        self.pool.add_ref(block)
        self.node_of[block] = fresh
        self.window_blocks += 1
        account.tree.changes += 1
        account.tree.touch(node)
        return fresh

    def add_state(
        self, account: NamespaceAccount, node: Node, run: Run, blocks: Sequence[int], now_s: float
    ) -> State:
        """Hang a state on the node of the last whole block before it; `blocks` are pinned.
        O(blocks).
        """
        state = State(node, run, len(blocks))
        for block in blocks:
            fresh = StateBlock(node, -1, block, next(self._serials), now_s, now_s, state=state)
            state.blocks.append(fresh)
            self.pool.add_ref(block)
            self.node_of[block] = fresh
        self.window_blocks += len(blocks)
        node.states = [*(node.states or ()), state]
        account.tree.changes += 1
        account.tree.touch(node)
        return state

    def add_away(self, node: Node, group: int, now_s: float) -> WindowBlock:
        """Give a node a window block that is away from the device, to be promised. O(1)."""
        fresh = WindowBlock(node, group, NO_BLOCK, next(self._serials), now_s)
        node.away = node.away or [None] * len(self.windows.windows)
        node.away[group] = fresh
        return fresh

    def mark_resume(self, block: int, now_s: float) -> None:
        """Note a reason to come back to a pinned block of a window group (rule *Resume point*).
        O(1).
        """
        holder = self.node_of[block]
        if isinstance(holder, WindowBlock):
            holder.resumed_at_s = now_s
        else:
            self.resumed_at_s[block] = now_s

    def detach(self, account: NamespaceAccount, top: Node, *, is_expired: bool = False) -> int:
        """Remove a node and all nodes below it from the tree, on every level. Return how many
        blocks of the device. Pinned ones stay allocated.
        """
        parent, removed = top.parent, 0
        assert parent is not None, "the root is never removed"
        for node in top.subtree():
            account.lease_endpoints.hand_up(node, parent)
            removed += self._remove(account, node, is_expired=is_expired)
        self._add_if_evictable_leaf(account, parent)
        return removed

    # -- promises -----------------------------------------------------------------------------

    def set_promise(
        self,
        account: NamespaceAccount,
        block: TreeBlock,
        promised_class: str | None,
        *,
        is_bound: bool,
    ) -> None:
        """Set the class under which a block is promised, wherever it is (None is best effort), and
        whether it is bound to the device: what is bound is not evicted. O(log n).
        """
        self.version += 1
        is_moved = block.is_bound != is_bound
        is_cached = is_moved and block.block >= 0 and self.pool.ref_count[block.block] == 1
        if is_cached:
            self._uncount_cached(account, block)
        account.add_promise(block, -1)
        block.promised_class, block.is_bound = promised_class, is_bound
        account.add_promise(block, 1)
        if is_moved and block.parent is not None:
            block.parent.bound_below += 1 if is_bound else -1
        if is_cached:
            self._count_cached(account, block)
        if promised_class is None and block.block < 0 and isinstance(block, WindowBlock):
            self._forget_away(block)
            block.parent = None

    # -- internals ----------------------------------------------------------------------------

    def _owner_of(self, block: int) -> NamespaceAccount:
        account = self.owner[block]
        assert account is not None, "a block in use has an owner"
        return account

    def _own_to_evict(self, payer_account: PayerAccount, count: int) -> int:
        """Return how many of its own blocks a payer that takes `count` may lose for them: what it
        would hold above its floor.

        Inside its floor a payer waits rather than lose blocks that it was guaranteed (rule *Fair
        share*), however much of the pool others have pinned.
        """
        return max(0, payer_account.held + count - self._firm_floor(payer_account))

    def _firm_floor(self, payer_account: PayerAccount) -> int:
        """Return the part of a payer's floor that the pool has beside the promises and floors of
        others: all of it, unless it was raised after these were given. O(changed log n)."""
        floor = payer_account.floor_blocks
        if not floor:
            return 0
        claimed = self.fair_share.claimed_by_others(payer_account)
        return min(floor, max(0, self.pool.blocks - claimed))

    def _evict(
        self, giver: PayerAccount, count: int
    ) -> list[tuple[NamespaceAccount, list[TreeBlock]]]:
        """Evict `count` blocks of a payer that has as many; see `make_room`."""
        if self.windows.windows or self.state_blocks:
            return [self._evict_one(giver) for _ in range(count)]
        victims: list[tuple[NamespaceAccount, list[TreeBlock]]] = []
        while count > 0:
            victims.append(self._evict_upwards(giver, count))
            count -= len(victims[-1][1])
        return victims

    def _evict_upwards(
        self, giver: PayerAccount, most: int
    ) -> tuple[NamespaceAccount, list[TreeBlock]]:
        """Evict the leaf that goes first, and the blocks above it for as long as each is the next
        to go: at most `most`. Without window groups. O(evicted + log n).

        A path that no request shares leaves whole in one call, and enters the order of leaves no
        more than once.
        """
        order, refs, pool = giver.eviction_order, self.pool.ref_count, self.pool
        leaf = order.take_first()
        assert isinstance(leaf, Node), "there are no window groups"
        account, gone, away = self._owner_of(leaf.block), list[TreeBlock](), 0
        while True:
            if self.below is not None:
                self.below.evicting(leaf)
            parent, block = leaf.parent, leaf.block
            account.tree.drop_block(leaf)
            if leaf.host is None and leaf.record is None:
                if leaf.ending_leases:
                    account.lease_endpoints.hand_up(leaf, parent)
                account.tree.remove(leaf)
            away += leaf.promised_class is not None
            self.node_of[block] = self.owner[block] = None
            if pool.drop_ref(block) != 0:
                raise InvariantViolation(f"block {block} was evicted while it was in use")
            gone.append(leaf)
            assert parent is not None, "the root is never removed"
            if parent.block < 0 or parent.device_children or parent.is_bound:
                break
            if refs[parent.block] != 1:
                break
            if len(gone) == most:
                order.add(parent)
                break
            if order.add_unless_first(parent):
                break
            leaf = parent
        account.add_cached(-len(gone), -len(gone))
        account.add_held(-len(gone))
        if away:
            account.add_away(away)
        return account, gone

    def _evict_one(self, giver: PayerAccount) -> tuple[NamespaceAccount, list[TreeBlock]]:
        """Evict one block of a payer, a leaf's window blocks and states before its own. O(log n),
        and O(blocks of a state log n) for the first of one.
        """
        victim = giver.eviction_order.first()
        account = self._owner_of(victim.block)
        if isinstance(victim, Node):
            victim = tree_blocks(victim)[-1]
        if isinstance(victim, WindowBlock):
            account.tree.changes += 1
            self._drop_window_block(account, victim)
            return account, [victim]
        if self.below is not None:
            self.below.evicting(victim)
        parent = victim.parent
        assert parent is not None, "the root is never removed"
        self._drop_block(account, victim)
        if not victim.is_copied:
            account.lease_endpoints.hand_up(victim, parent)
            account.tree.remove(victim)
        for state in self._orphaned_states(parent, victim.run):
            self._give_up(account, state)
        self._add_if_evictable_leaf(account, parent)
        return account, [victim]

    def _remove(self, account: NamespaceAccount, node: Node, *, is_expired: bool = False) -> int:
        """Remove a leaf from the tree, on every level. Return how many blocks of the device."""
        parent = node.parent
        assert parent is not None, "the root is never removed"
        if self.below is not None:
            if node.bound_below:
                self._bind_above(node, parent)
            if node.is_copied:
                self.below.removed(node, is_expired=is_expired)
        removed = 0
        for window_block in all_blocks(node)[1:]:
            assert isinstance(window_block, WindowBlock), "the others"
            self._end_promise(account, window_block)
            if window_block.block >= 0:
                self._drop_window_block(account, window_block)
                removed += 1
        self._end_promise(account, node)
        if node.block >= 0:
            self._drop_block(account, node)
            removed += 1
        account.tree.remove(node)
        for state in self._orphaned_states(parent, node.run):
            for block in list(state.blocks):
                self._end_promise(account, block)
                self._drop_window_block(account, block)
                removed += 1
        self.version += 1
        return removed

    def _bind_above(self, node: Node, parent: Node) -> None:
        """Let the tables whose promises bind a node that leaves the tree bind its parent."""
        for table in self.tables:
            if table.binds is node:
                table.binds = parent if parent.run else None
                parent.bound_below += 1 if parent.run else 0
                node.bound_below -= 1

    def _end_promise(self, account: NamespaceAccount, block: TreeBlock) -> None:
        if block.is_bound or block.promised_class is not None:
            self.set_promise(account, block, None, is_bound=False)

    def _drop_block(self, account: NamespaceAccount, node: Node) -> None:
        """Take the blocks of the device from a node without children there."""
        for window_block in tree_blocks(node)[1:]:
            assert isinstance(window_block, WindowBlock), "the others"
            self._drop_window_block(account, window_block)
        block = node.block
        if self.pool.ref_count[block] == 1:
            self._uncount_cached(account, node)
        account.tree.drop_block(node)
        if node.promised:
            account.add_away(1)
        self._drop_tree_ref(block)

    def _drop_window_block(self, account: NamespaceAccount, window_block: WindowBlock) -> None:
        """Drop the tree's reference to a window block, and leave a tombstone; if it is promised, it
        is away from now on.
        """
        node, group, block = window_block.parent, window_block.group, window_block.block
        assert node is not None, "it is in a tree"
        self.window_blocks -= 1
        account.tree.touch(node)
        if isinstance(window_block, StateBlock):
            self._break_state(account, window_block)
            return
        assert node.beside is not None, "a model with window groups"
        node.beside[group] = None
        if self.pool.ref_count[block] == 1:
            self._uncount_cached(account, window_block)
        window_block.block = NO_BLOCK
        if window_block.promised_class is None:
            window_block.parent = None
        else:
            node.away = node.away or [None] * len(node.beside)
            node.away[group] = window_block
            account.add_away(1)
        self._drop_tree_ref(block)

    def _break_state(self, account: NamespaceAccount, gone: StateBlock) -> None:
        """Drop the tree's reference to a block of a state; the other blocks go next, since they are
        of no use without it.
        """
        state, block = gone.state, gone.block
        node, was_whole = state.node, state.is_whole
        if self.pool.ref_count[block] == 1:
            self._uncount_cached(account, gone)
        state.blocks.remove(gone)
        gone.block, gone.parent = NO_BLOCK, None
        if was_whole:
            self._give_up(account, state)
        if not state.blocks:
            node.states = [one for one in node.states or () if one is not state] or None
        self._drop_tree_ref(block)

    def _give_up(self, account: NamespaceAccount, state: State) -> None:
        """Let the blocks of a state that is of no use now go before all others. O(blocks log n)."""
        for block in state.blocks:
            is_ordered = block.eviction_score is not None
            if is_ordered:
                account.remove_evictable(block)
            block.resumed_at_s = -math.inf
            if is_ordered:
                account.add_evictable(block)

    def _orphaned_states(self, node: Node, run: Run) -> list[State]:
        """Return the states behind a node whose further tokens were those of `run`, a child that
        has left, and are of no other child. O(states, and their children).
        """
        orphaned = []
        for state in node.states or ():
            behind, count = state.run, len(state.run)
            is_behind = behind and behind == run[:count]
            others = node.children.values() if is_behind else ()
            if is_behind and not any(o.block >= 0 and o.run[:count] == behind for o in others):
                orphaned.append(state)
        return orphaned

    def _forget_away(self, window_block: WindowBlock) -> None:
        node = window_block.parent
        if node is not None and node.away is not None:
            node.away[window_block.group] = None
            node.away = node.away if any(node.away) else None

    def _drop_tree_ref(self, block: int) -> None:
        """Drop the tree's reference to a block."""
        self.node_of[block] = None
        if self.pool.drop_ref(block) == 0:
            self._on_freed(block)

    def _leases_changed(self, node: Node) -> None:
        if self.below is not None and node.host is not None:
            self.below.leases_changed(node)

    def _on_freed(self, block: int) -> None:
        self._owner_of(block).add_held(-1)
        self.owner[block] = None
        if self.resumed_at_s:
            self.resumed_at_s.pop(block, None)
        copy = self.copies.pop(block, None)
        if copy is not None:
            self.unpin(copy.src)

    def _count_cached(self, account: NamespaceAccount, node: TreeBlock) -> None:
        is_evictable = not node.is_bound
        account.add_cached(1, is_evictable)
        if is_evictable and not node.device_children:
            account.add_evictable(node)

    def _uncount_cached(self, account: NamespaceAccount, node: TreeBlock) -> None:
        account.add_cached(-1, -(not node.is_bound))
        if node.eviction_score is not None:
            account.remove_evictable(node)

    def _add_if_evictable_leaf(self, account: NamespaceAccount, node: Node) -> None:
        if node.block < 0 or node.device_children or node.is_bound:
            return
        if node.eviction_score is not None:
            return
        if self.pool.ref_count[node.block] == 1:
            account.add_evictable(node)
