"""The promises and limits of blocks: kept, renewed, ended in time, and bound to the device.

`BlockTerms` says how long a block is promised and may be matched; this module makes it so. It
counts promises in the accounts, lets those end whose time has come, and where a level below the
device keeps promises, lets the device evict what that level keeps. It knows no lease and no
sequence but those whose promises are still to be computed. `PrefixCache.promises` is the only
object of its class: the cache's modules and `engine.levels` call it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from engine.api import Quota
from engine.cache.blocks.block_manager import BlockManager
from engine.cache.blocks.block_table import BlockTable
from engine.cache.events import PromiseLost
from engine.cache.promise_room import PromiseRoom, room_of
from engine.cache.tree.accounts import NamespaceAccount, PayerAccount
from engine.cache.tree.leases import BlockTerms, Deadlines
from engine.cache.tree.prefix_tree import Node, TreeBlock, WindowBlock, tree_blocks


class BlockPromises:
    """The deadlines of every block under a lease, and what its promise binds to the device.

    `keeps_below`: a level below the device keeps promises.
    """

    def __init__(self, manager: BlockManager, tell: Callable[[PromiseLost], None]) -> None:
        """`tell` is called with the promises that are lost."""
        self.keeps_below = False
        self._manager = manager
        self._tell = tell
        self._limits: Deadlines[tuple[NamespaceAccount, Node]] = Deadlines()
        self._ends: Deadlines[tuple[NamespaceAccount, TreeBlock]] = Deadlines()
        self._fresh: list[Node] = []

    # -- room ---------------------------------------------------------------------------------

    def room(self, account: NamespaceAccount) -> PromiseRoom:
        """Return the room for promises to a namespace's payer. Cost: see `FairShare`."""
        return self.room_of(account.payer_account, account.payer_account.quota)

    def room_of(self, payer_account: PayerAccount | None, quota: Quota) -> PromiseRoom:
        """Return the room for promises to a payer, None for one without an account."""
        share, kept = self._manager.fair_share, self.keeps_below
        return room_of(share, payer_account, quota, is_kept_below=kept)

    def room_under(self, account: NamespaceAccount, node: Node | None) -> PromiseRoom:
        """Return the room for a promise under a node, which binds those above it. O(depth)."""
        room = self.room(account)
        while node is not None and node.promised_below:
            room.waiting, node = room.waiting + 1, node.parent
        return room

    # -- time ---------------------------------------------------------------------------------

    def renew_on_read(self, table: BlockTable, nodes: Iterable[TreeBlock], now_s: float) -> None:
        """Renew the leases on blocks that a table reads, unless it renews none; a lapsed promise
        only while there is room. O(blocks).
        """
        if not table.renews:
            return
        for node, terms, has_room in self._leased_nodes(table.account, nodes):
            terms.renew_on_read(now_s, promise=has_room)
            self.update_deadlines(table.account, node, now_s)

    def renew_on_release(self, table: BlockTable, nodes: Iterable[TreeBlock], now_s: float) -> None:
        """Restart the leases that count from the last use, on blocks whose use has ended. As
        `renew_on_read`.
        """
        if not table.renews:
            return
        for node, terms, has_room in self._leased_nodes(table.account, nodes):
            terms.hold_limit(now_s)
            if has_room:
                terms.hold_promise(now_s)
            self.update_deadlines(table.account, node, now_s)

    def extend_limit(self, node: Node, limit_at_s: float, now_s: float, *, is_new: bool) -> None:
        """Lengthen the limit of a node whose place below has one; it is the limit of one that
        `is_new`. O(log nodes).
        """
        if node.terms is not None:
            node.terms.limit_at_s = max(node.terms.limit_at_s, limit_at_s)
        elif not is_new or limit_at_s == math.inf:
            return
        else:
            node.terms = BlockTerms(limit_at_s)
        if (account := self._manager.account_of(node)) is not None:
            self.update_deadlines(account, node, now_s)

    def _leased_nodes(
        self, account: NamespaceAccount, nodes: Iterable[TreeBlock]
    ) -> Iterator[tuple[TreeBlock, BlockTerms, bool]]:
        """Yield each block under a lease, its terms, and whether it may be promised. A window
        block comes after its node.

        A block may be promised if it is already, or if there is room for its promise. Where a level
        below keeps the promise of its node, a window block's is not begun again.
        """
        room, waiting = None, 0
        for node in nodes:
            if node.terms is None:
                continue
            has_room = node.promised
            if has_room:
                waiting += isinstance(node, Node) and not node.is_bound
            elif isinstance(node, WindowBlock) and node.parent and node.parent.promised_below:
                pass
            elif node.terms.renew_promise_s > 0:
                room = self.room(account) if room is None else room
                room.waiting += waiting
                waiting = 0
                has_room = room.take()
            yield node, node.terms, has_room

    def update_deadlines(self, account: NamespaceAccount, block: TreeBlock, now_s: float) -> None:
        """Update the deadlines and the promised count after a change of the block's terms. A
        promise that begins binds the block to the device.
        """
        terms = block.terms
        if terms is None or (
            block.has_limit_deadline
            and block.has_promise_deadline
            and terms.promised_class == block.promised_class
        ):
            return  # the deadlines that are set come no later than the terms'
        if terms.limit_at_s < math.inf and isinstance(block, Node):
            self._set_limit_deadline(account, block, terms)
        promised_class = terms.promised_class if terms.promise_at_s > now_s else None
        if promised_class is None and block.has_promise_deadline:
            # Over, but `lapse_promises` has not run yet: it handles all blocks below as well.
            promised_class = block.promised_class
        if promised_class is not None:
            self._set_promise_deadline(account, block, terms)
        if promised_class != block.promised_class:
            if block.promised_class is None:
                self._bind(account, block, promised_class)
            else:
                self._set_promised(account, block, promised_class)

    def lapse_promises(self, now_s: float) -> None:
        """Turn promises whose time is over into best effort. O(due log n).

        A block in use under a clock that counts from the last use keeps its promise: the use goes
        on. Its descendants' promises may begin meanwhile, and an unpromised block above promised
        ones would count as evictable without being so.
        """
        for account, node in self._ends.take_due(now_s):
            node.has_promise_deadline = False
            if account.tree.contains(node):
                held = node.parent if isinstance(node, WindowBlock) else node
                is_in_use = held is not None and self._manager.is_in_use(held.block)
                if node.terms is not None and is_in_use:
                    node.terms.hold_promise(now_s)
                self.update_deadlines(account, node, now_s)

    def next_lapse_s(self) -> float | None:
        """Return the earliest time at which a promise ends that binds a block to the device; None
        if none does. O(promised blocks).

        The deadlines may lie earlier, since a renewed promise moves its own only when it is due.
        """
        ends = [
            node.terms.promise_at_s
            for _, node in self._ends.items()
            if node.is_bound and node.promised and node.terms is not None
        ]
        return min(ends, default=None)

    def take_expired(self, now_s: float) -> list[tuple[NamespaceAccount, Node]]:
        """Return the blocks whose limit has passed; the caller removes them from the tree.

        A block in use under a clock that counts from the last use stays: the use goes on.
        """
        gone = []
        for account, node in self._limits.take_due(now_s):
            node.has_limit_deadline = False
            if not account.tree.contains(node) or node.terms is None:
                continue
            if self._manager.is_in_use(node.block):
                node.terms.hold_limit(now_s)
            if node.terms.limit_at_s > now_s:
                self.update_deadlines(account, node, now_s)
            else:
                gone.append((account, node))
        return gone

    # -- what binds blocks to the device ------------------------------------------------------

    def keep_below(self, blocks: int) -> None:
        """Let a level of `blocks` blocks keep promises, before anything is cached."""
        assert not self._manager.accounts, "the cache is empty"
        self.keeps_below = True
        self._manager.fair_share.keep_below(blocks / self._manager.pool.blocks)

    def take_fresh(self) -> list[Node]:
        """Return the nodes that a promise binds since the last call, where a level below keeps
        promises. Some may have left the tree. O(these)."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def settle(self, node: Node) -> Node | None:
        """Let a node, and those above it, go that nothing binds to the device any more: their
        promises are over, or a place below keeps them. Return the promised node that is still to
        get such a place, if that is what this ends at. O(nodes let go).
        """
        account = self._manager.account_of(node)
        while account is not None and node.is_bound:
            for block in tree_blocks(node)[1:]:
                if block.is_bound and not self._needs_device(block):
                    self._set(account, block, block.promised_class, is_bound=False)
            if node.bound_below:
                return node if is_end(node) else None
            if self._needs_device(node):
                return node
            self._set(account, node, node.promised_class, is_bound=False)
            assert node.parent is not None, "it is in a tree"
            node = node.parent
        return None

    def settle_later(self, node: Node) -> None:
        """Let go what nothing binds; what is still to get a place is tried again."""
        waiting = self.settle(node)
        if waiting is not None and self.keeps_below:
            self._fresh.append(waiting)

    def bind_under(self, table: BlockTable, node: Node | None) -> None:
        """Let what a table has reserved bind the blocks up to `node`, and no others; None: it has
        nothing reserved any more. Without levels that keep promises it changes nothing. O(depth).
        """
        before, table.binds = table.binds, None
        if node is not None and node.run and self.keeps_below:
            table.binds = node
            node.bound_below += 1
            self._bind(table.account, node)
        if before is not None and before.parent is not None:
            before.bound_below -= 1
            self.settle_later(before)

    def take_over(self, block: TreeBlock, fresh: BlockTerms, now_s: float) -> None:
        """Take over a promise that a level below has kept since before this engine: the block has a
        place there, so nothing is bound. It is added to one that is counted already. O(log n).
        """
        account = self._manager.account_of(block)
        assert account is not None, "a place is in a tree"
        if block.terms is not None:
            block.terms.merge(fresh)
        else:
            block.terms = fresh
            if block.block >= 0:
                fresh.limit_at_s = math.inf
        if not block.promised and fresh.promise_at_s > now_s:
            self._set(account, block, fresh.promised_class, is_bound=block.is_bound)
        self.update_deadlines(account, block, now_s)

    def place_lost(self, block: TreeBlock, now_s: float) -> None:
        """Take note that a block has no place below any more, or a window block none with the
        blocks of all groups. If that kept its promise, the promise binds the block to the device if
        it is there and there is room, else it ends, which is told. O(depth).
        """
        account, terms = self._manager.account_of(block), block.terms
        if account is None or terms is None or not block.promised:
            return
        is_here = block.block >= 0
        if is_here and block.is_bound:
            return
        is_over = min(terms.promise_at_s, terms.limit_at_s) <= now_s
        if not is_over and is_here and self._may_bind(account, block):
            self._bind(account, block)
            return
        terms.end_promise()
        self._set_promised(account, block, None)
        if not is_over:
            self._tell(PromiseLost(account.namespace, 1))

    # -- internals ----------------------------------------------------------------------------

    def _needs_device(self, block: TreeBlock) -> bool:
        """Return whether the promise of a block has no place below the device that keeps it."""
        if not block.promised:
            return False
        below = self._manager.below
        return not self.keeps_below or below is None or not below.may_leave(block)

    def _may_bind(self, account: NamespaceAccount, block: TreeBlock) -> bool:
        """Return whether there is room on the device for the promise of a block, with those above
        it that it binds. That of a window block binds no node. O(depth).
        """
        room, wanted, above = self.room(account).device, 0, block
        if isinstance(above, WindowBlock):
            return above.parent is not None and above.parent.is_bound and room >= 1
        while above.parent is not None and not above.is_bound:
            wanted, above = wanted + 1, above.parent
        return room >= wanted

    def _bind(
        self, account: NamespaceAccount, block: TreeBlock, promised_class: str | None = None
    ) -> None:
        """Bind a block to the device, and those above it; promise it under a class if that is
        given.
        """
        if promised_class is not None:
            self._set(account, block, promised_class, is_bound=True)
        above: TreeBlock | None = block if promised_class is None else block.parent
        while above is not None and above.parent is not None and not above.is_bound:
            self._set(account, above, above.promised_class, is_bound=True)
            above = above.parent
        node = block if isinstance(block, Node) else block.parent
        if self.keeps_below and node is not None:
            self._fresh.append(node)

    def _set_promised(
        self, account: NamespaceAccount, block: TreeBlock, promised_class: str | None
    ) -> None:
        """Change the class of a promised block, or end its promise."""
        node = block if isinstance(block, Node) else block.parent
        assert node is not None, "it is in a tree"
        is_over = promised_class is None
        is_bound = block.is_bound and not (is_over and isinstance(block, WindowBlock))
        self._set(account, block, promised_class, is_bound=is_bound)
        if is_over:
            self.settle_later(node)

    def _set(
        self,
        account: NamespaceAccount,
        block: TreeBlock,
        promised_class: str | None,
        *,
        is_bound: bool,
    ) -> None:
        node = block if isinstance(block, Node) else block.parent
        self._manager.set_promise(account, block, promised_class, is_bound=is_bound)
        below = self._manager.below
        if below is not None and node is not None and node.is_copied:
            below.promise_changed(node)

    def _set_limit_deadline(self, account: NamespaceAccount, node: Node, terms: BlockTerms) -> None:
        if not node.has_limit_deadline:
            node.has_limit_deadline = True
            self._limits.add(terms.limit_at_s, (account, node))

    def _set_promise_deadline(
        self, account: NamespaceAccount, block: TreeBlock, terms: BlockTerms
    ) -> None:
        if not block.has_promise_deadline and terms.promise_at_s < math.inf:
            block.has_promise_deadline = True
            self._ends.add(terms.promise_at_s, (account, block))


def is_end(node: Node) -> bool:
    """Return whether nothing but its own promise, and those of its window blocks and states, binds
    a node. O(these).
    """
    others = sum(block.is_bound for block in tree_blocks(node)[1:])
    return node.is_bound and node.promised and node.bound_below == others
