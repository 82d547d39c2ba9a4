"""The promises and limits of blocks: kept, renewed, ended in time, and moved to a level below.

`BlockTerms` says how long a block is promised and may be matched; this module makes it so. It
counts promises in the accounts, lets those end whose time has come, and where a level below the
device keeps promises, moves them there and back (rules 8 and 37). It knows no lease and no sequence
but those whose promises are still to be computed. `PrefixCache.promises` is the only object of its
class: the cache's modules and `engine.levels` call it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from engine.api import Namespace, Quota
from engine.cache.blocks.block_manager import BlockManager
from engine.cache.blocks.block_table import BlockTable
from engine.cache.events import PromiseLost
from engine.cache.kept_below import FoundPromise, KeptBelow
from engine.cache.promise_room import PromiseRoom, room_of
from engine.cache.tree.accounts import NamespaceAccount, PayerAccount
from engine.cache.tree.leases import BlockTerms, Deadlines
from engine.cache.tree.prefix_tree import Node, TreeBlock, WindowBlock


class BlockPromises:
    """The deadlines of every block under a lease, and where its promise is kept.

    `below`: the level that keeps promises below the device, if there is one.
    """

    def __init__(self, manager: BlockManager, tell: Callable[[PromiseLost], None]) -> None:
        """`tell` is called with the promises that are lost."""
        self.below: KeptBelow | None = None
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
        kept = self.below is not None
        return room_of(self._manager.fair_share, payer_account, quota, is_kept_below=kept)

    def room_under(self, account: NamespaceAccount, node: Node | None) -> PromiseRoom:
        """Return the room for a promise on the device under a node: those above it that a level
        below keeps return with it. O(depth).
        """
        room = self.room(account)
        while node is not None and node.promised_below:
            room.waiting, node = room.waiting + 1, node.parent
        return room

    # -- time ---------------------------------------------------------------------------------

    def renew_on_read(
        self, account: NamespaceAccount, nodes: Iterable[TreeBlock], now_s: float
    ) -> None:
        """Renew the leases on blocks that were read; a lapsed promise only while there is room.
        O(blocks).
        """
        for node, terms, has_room in self._leased_nodes(account, nodes):
            terms.renew_on_read(now_s, promise=has_room)
            self.update_deadlines(account, node, now_s)

    def renew_on_release(
        self, account: NamespaceAccount, nodes: Iterable[TreeBlock], now_s: float
    ) -> None:
        """Restart the leases that count from the last use, on blocks whose use has ended. As
        `renew_on_read`.
        """
        for node, terms, has_room in self._leased_nodes(account, nodes):
            terms.renew_on_release(now_s, promise=has_room)
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
            if node.terms.below_class is not None:
                has_room, waiting = True, waiting + isinstance(node, Node)
            elif isinstance(node, WindowBlock) and node.parent and node.parent.promised_below:
                has_room = False
            elif not has_room and node.terms.renew_promise_s > 0:
                room = self.room(account) if room is None else room
                room.waiting += waiting
                waiting = 0
                has_room = room.take()
            yield node, node.terms, has_room

    def update_deadlines(self, account: NamespaceAccount, node: TreeBlock, now_s: float) -> None:
        """Update the deadlines and the promised count after a change of the block's terms."""
        terms = node.terms
        if terms is None or (
            node.has_limit_deadline
            and node.has_promise_deadline
            and terms.promised_class == node.promised_class
        ):
            return  # the deadlines that are set come no later than the terms'
        if terms.limit_at_s < math.inf and isinstance(node, Node) and not node.has_limit_deadline:
            node.has_limit_deadline = True
            self._limits.add(terms.limit_at_s, (account, node))
        if terms.below_class is not None:
            self.follow_below(account, terms)
            return
        promised_class = terms.promised_class if terms.promise_at_s > now_s else None
        if promised_class is None and node.has_promise_deadline:
            # Over, but `lapse_promises` has not run yet: it handles all blocks below as well.
            promised_class = node.promised_class
        if promised_class is not None:
            self._set_promise_deadline(account, node, terms)
        if promised_class != node.promised_class:
            is_new = node.promised_class is None
            self._manager.set_promised(account, node, promised_class)
            if is_new and self.below is not None:
                if isinstance(node, Node):
                    self._fresh.append(node)
                self.return_to_device(account, node.parent)

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
        """Return the earliest time at which a promise ends; None if none does. O(promised blocks).

        The deadlines may lie earlier, since a renewed promise moves its own only when it is due.
        """
        ends = [
            node.terms.promise_at_s
            for account, node in self._ends.items()
            if node.promised and node.terms is not None and account.tree.contains(node)
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

    # -- promises that a level below keeps ----------------------------------------------------

    def keep_in(self, below: KeptBelow, blocks: int) -> None:
        """Let a level of `blocks` blocks keep promises, before anything is cached."""
        assert not self._manager.accounts, "the cache is empty"
        self.below = below
        self._manager.fair_share.keep_below(blocks / self._manager.pool.blocks)

    def take_fresh(self) -> list[Node]:
        """Return the blocks that have been promised on the device since the last call, where a
        level below keeps promises. Some may have left the tree. O(these)."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def kept_below(self) -> Iterator[tuple[Namespace, Counter[str], int]]:
        """Iterate over the namespaces with promises kept below: by class, and how many of them the
        device has evicted. For the checker."""
        for account in self._manager.accounts.values():
            if account.below or account.away:
                yield account.namespace, account.below_in, account.away

    def keep_below(self, node: TreeBlock) -> bool:
        """Let the level below keep the promise of a block, so that the device may evict it; return
        whether that may be: not while a block under it, or of its windows, is promised on the
        device, or will be, for a sequence that has yet to compute it. Block and level share
        `node.terms` from then on. O(log n), and O(tables) where there are such sequences.
        """
        account, terms, promised_class = (
            self._manager.account_of(node),
            node.terms,
            node.promised_class,
        )
        if account is None or terms is None or promised_class is None:
            return False
        if isinstance(node, Node):
            beside = node.beside or ()
            if node.promised_children or any(one is not None and one.promised for one in beside):
                return False
        if account.reserved and any(
            table.reserved and _last_on_device(table) is node for table in self._manager.tables
        ):
            return False
        self._manager.set_promised(account, node, None)
        terms.below_class = promised_class
        account.add_below(promised_class, 1)
        return True

    def take_over(self, found: FoundPromise, now_s: float) -> bool:
        """Charge a promise that a level below has kept since before this engine to its payer, whose
        quota may not be known yet. Return False where it is added to one that is counted already:
        of the same copy, or on the device. O(log n).
        """
        account, node, fresh = self._account_of(found), found.node, found.fresh
        promised = node.terms if node is not None and node.promised else None
        if (longer := found.known or promised) is not None:
            longer.merge(fresh)
            self.follow_below(account, longer)
        else:
            self._manager.version += 1
            fresh.below_class = fresh.promised_class
            account.add_below(fresh.promised_class, 1)
            if node is None:
                account.add_away(1)
            elif node.terms is None:
                fresh.limit_at_s = math.inf
            else:
                fresh.merge(node.terms)
            if node is not None:
                node.terms = fresh
        if node is not None:
            self.update_deadlines(account, node, now_s)
        return longer is None

    def end_below(
        self, namespace: Namespace, terms: BlockTerms, *, is_away: bool, is_lost: bool = False
    ) -> None:
        """End a promise that the level below kept: its time is over, it was erased, or it
        `is_lost`, which is told. `is_away`: the device has no block of it. O(1).
        """
        account = self._manager.accounts[namespace]
        self._uncount_below(account, terms, is_away=is_away)
        if is_lost:
            terms.end_promise()
            self._tell(PromiseLost(namespace, 1))
        self._manager.forget_if_idle(account)

    def take_back(self, node: TreeBlock) -> bool:
        """Bring the promise of a block back to the device, with those of the blocks above it, if
        there is room for all of them; return whether there was. That of a window block returns to
        a node that is promised there. O(depth).
        """
        if (account := self._manager.account_of(node)) is None:
            return False
        if isinstance(node, WindowBlock):
            return self._take_back_window(account, node)
        wanted, above = 0, node
        while above.promised_below and above.parent is not None:
            wanted, above = wanted + 1, above.parent
        if self.room(account).device < wanted:
            return False
        self.return_to_device(account, node)
        return True

    def _take_back_window(self, account: NamespaceAccount, block: WindowBlock) -> bool:
        node, terms = block.parent, block.terms
        if node is None or terms is None or not node.promised or self.room(account).device < 1:
            return False
        self._uncount_below(account, terms, is_away=False)
        self._set_promise_deadline(account, block, terms)
        self._manager.set_promised(account, block, terms.promised_class)
        return True

    def promise_again(self, node: TreeBlock, until_s: float, name: str, now_s: float) -> None:
        """Promise a block on the device again whose keeping below an erasure has ended, but that
        the erasure did not take: another lease covers it. Without room that is told as a loss.
        O(depth).
        """
        account = self._manager.account_of(node)
        if account is None or node.promised or node.promised_below or until_s <= now_s:
            return
        above, is_alone = node.parent, False
        if isinstance(node, WindowBlock):
            is_alone = above is None or not above.promised
        if is_alone or node.terms is None or not self.room_under(account, above).take():
            self._tell(PromiseLost(account.namespace, 1))
            return
        node.terms.extend_promise(until_s, name)
        self.update_deadlines(account, node, now_s)

    def adopt(self, account: NamespaceAccount, node: Node, now_s: float) -> None:
        """Give a node that has just entered the tree the terms of the promise that a level below
        keeps of its tokens: its use is a read. O(1).
        """
        assert self.below is not None, "a level that keeps promises"
        if (terms := self.below.adopt(account, node, now_s)) is not None:
            self._adopt(account, node, terms, now_s)
        for block in filter(None, node.beside or ()):
            self.adopt_window(account, block, now_s)

    def adopt_window(self, account: NamespaceAccount, block: WindowBlock, now_s: float) -> None:
        """Give a window block that a node has just got the terms of the promise that a level below
        keeps of it. O(1).
        """
        terms = None if self.below is None else self.below.adopt_window(account, block, now_s)
        if terms is not None:
            self._adopt(account, block, terms, now_s)

    def return_to_device(self, account: NamespaceAccount, node: Node | None) -> None:
        """Bring the promises from a node upward back to the device, up to one that is there."""
        assert self.below is not None, "a level that keeps promises"
        while node is not None and node.terms is not None and node.terms.below_class is not None:
            self._uncount_below(account, node.terms, is_away=False)
            self._set_promise_deadline(account, node, node.terms)
            self._manager.set_promised(account, node, node.terms.promised_class)
            self.below.returned(node)
            self._fresh.append(node)
            node = node.parent

    def follow_below(self, account: NamespaceAccount, terms: BlockTerms) -> None:
        """Count a promise that is kept below under the class that promises it longest."""
        if terms.below_class is not None and terms.below_class != terms.promised_class:
            account.add_below(terms.below_class, -1)
            account.add_below(terms.promised_class, 1)
            terms.below_class = terms.promised_class

    def is_in_use(self, node: TreeBlock) -> bool:
        """Return whether a sequence uses a node of the tree, or a window block. O(1)."""
        return node.parent is not None and self._manager.is_in_use(node.block)

    # -- internals ----------------------------------------------------------------------------

    def _uncount_below(
        self, account: NamespaceAccount, terms: BlockTerms, *, is_away: bool
    ) -> None:
        assert terms.below_class is not None, "a level keeps this promise"
        self._manager.version += 1
        account.add_below(terms.below_class, -1)
        terms.below_class = None
        if is_away:
            account.add_away(-1)

    def _adopt(
        self, account: NamespaceAccount, node: TreeBlock, terms: BlockTerms, now_s: float
    ) -> None:
        if node.terms is not None:
            terms.merge(node.terms)
        node.terms = terms
        account.add_away(-1)
        self.renew_on_read(account, (node,), now_s)

    def _account_of(self, found: FoundPromise) -> NamespaceAccount:
        account = self._manager.accounts.get(found.namespace)
        if account is None:
            share = self._manager.fair_share.get(found.payer)
            quota = replace(Quota() if share is None else share.quota, payer=found.payer)
            account = self._manager.account(found.namespace, quota)
        return account

    def _set_promise_deadline(
        self, account: NamespaceAccount, node: TreeBlock, terms: BlockTerms
    ) -> None:
        if not node.has_promise_deadline and terms.promise_at_s < math.inf:
            node.has_promise_deadline = True
            self._ends.add(terms.promise_at_s, (account, node))


def _last_on_device(table: BlockTable) -> Node | None:
    """Return the last node of a table's path whose promise no level below keeps. O(depth)."""
    node: Node | None = table.node
    while node is not None and node.promised_below:
        node = node.parent
    return node
