"""The lease manager: grants leases at admission, applies their terms to blocks, keeps the
deadlines.

It implements rule 7 (a promise and a limit) and rule 8 (granted, clipped or refused, never silently
dropped). It moves no block itself: `block_manager` does. Only `prefix_cache` calls it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Literal

from engine.api import Bound, LeaseGrant, LeaseRequest
from engine.cache.accounts import NamespaceAccount
from engine.cache.block_manager import PROMISABLE, BlockManager
from engine.cache.block_table import BlockTable
from engine.cache.leases import BlockTerms, Deadlines, LeaseSpans, promised_seconds, spans_of
from engine.cache.prefix_tree import Node, TreeBlock, WindowBlock


class LeaseManager:
    """The deadlines of every block under a lease, and the promises given."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._limits: Deadlines[tuple[NamespaceAccount, Node]] = Deadlines()
        self._promises: Deadlines[tuple[NamespaceAccount, TreeBlock]] = Deadlines()

    def grant(
        self,
        table: BlockTable,
        path: Sequence[Node],
        prompt_tokens: int,
        leases: Sequence[LeaseRequest],
        now_s: float,
    ) -> None:
        """Grant, clip or refuse each lease, and apply its terms to the cached blocks of `path`.

        A promise is clipped to the room that the payer's bounds and the promisable part of the pool
        leave, and to a prefix whose last windows are there (rule 19). Promised blocks that are not
        computed yet are reserved. Sets `table.leases` and `table.requested_leases`. O(blocks
        promised).
        """
        size = self._manager.block_size
        requested, covered_blocks = [], 0
        room, bound = self._promise_room_and_bound(table.account) if leases else (0, "")
        grants: dict[int, LeaseGrant] = {}
        for position, lease in sorted(enumerate(leases), key=lambda pair: pair[1].tokens):
            covered_tokens = min(lease.tokens, prompt_tokens)
            granted, has_gap = covered_tokens if table.write else 0, False
            if table.write and promised_seconds(lease.retention) > 0:
                covered_blocks, room, has_gap = self._cover(
                    table, path, covered_blocks, covered_tokens, room
                )
                granted = min(covered_tokens, covered_blocks * size)
            grants[position] = LeaseGrant(
                lease_id=lease.lease_id,
                retention=lease.retention.name,
                outcome=_outcome(granted, covered_tokens),
                tokens=granted,
                bound=_bound_of(bound, has_gap) if table.write and granted < covered_tokens else "",
            )
            requested.append((lease, -(-granted // size)))
        table.prompt_tokens = prompt_tokens
        table.leases = tuple(grants[position] for position in range(len(leases)))
        table.requested_leases = tuple(requested)
        table.account.add_reserved(table.reserved)
        if table.write and requested:
            spans = _spans(table, now_s)
            for index, node in enumerate(path):
                self._extend(table, node, index, spans, now_s, is_new=False)
                if table.beside:
                    self._extend_windows(table, node, index, spans, now_s)
            for lease, _ in table.requested_leases:
                if last := min(len(path), -(-lease.tokens // size)):
                    table.account.lease_endpoints.extend(lease.lease_id, path[last - 1])
        elif table.write:
            for node in path:
                if node.terms:
                    node.terms.limit_at_s = math.inf

    def apply_leases(
        self, table: BlockTable, node: Node, index: int, now_s: float, *, is_new: bool = False
    ) -> None:
        """Apply the table's leases to `node`, block `index` of its path; its ancestors have them
        already.

        A request without leases is plain best effort: a block it uses has no limit from then on. A
        block beyond the leases of its request has no limit either, and leaves the tree with the
        blocks above it. `is_new`: no other request has used this block yet.
        """
        spans = _spans(table, now_s)
        self._extend(table, node, index, spans, now_s, is_new=is_new)
        if table.beside:
            self._extend_windows(table, node, index, spans, now_s)
        for lease, _ in table.requested_leases:
            if index * self._manager.block_size < lease.tokens:
                table.account.lease_endpoints.extend(lease.lease_id, node)

    def _extend(
        self,
        table: BlockTable,
        node: Node,
        index: int,
        spans: Sequence[tuple[int, int, LeaseSpans]],
        now_s: float,
        *,
        is_new: bool,
    ) -> None:
        terms = node.terms
        if not spans:
            if terms:
                terms.limit_at_s = math.inf
            return
        start = index * self._manager.block_size
        for tokens, covered_blocks, requested in spans:
            if start >= tokens:
                continue
            if terms is None:
                terms = node.terms = BlockTerms(-math.inf if is_new else math.inf)
            terms.extend(requested, promised=index < covered_blocks)
        self.update_deadlines(table.account, node, now_s)

    def _extend_windows(
        self,
        table: BlockTable,
        node: Node,
        index: int,
        spans: Sequence[tuple[int, int, LeaseSpans]],
        now_s: float,
    ) -> None:
        """Apply the terms of the leases whose last windows contain block `index` to its window
        blocks.
        """
        windows = self._manager.windows
        for group, promises in enumerate(table.window_promises):
            block = None if node.beside is None else node.beside[group]
            if block is None or index not in promises:
                continue
            for lease_tokens, covered_blocks, requested in spans:
                tokens = min(lease_tokens, table.prompt_tokens, covered_blocks * windows.block_size)
                if windows.first_read(group, tokens) <= index < covered_blocks:
                    block.terms = block.terms or BlockTerms(math.inf)
                    block.terms.extend(requested, promised=True)
            self.update_deadlines(table.account, block, now_s)
            table.resumed.append(block)

    def _cover(
        self, table: BlockTable, path: Sequence[Node], covered_blocks: int, tokens: int, room: int
    ) -> tuple[int, int, bool]:
        """Cover a promise of `tokens` tokens, beyond the `covered_blocks` that earlier leases of
        the table cover, as far as `room` allows.

        Returns the blocks then covered, the room left, and whether a freed window block stood in
        the way. Reserves the blocks that are not computed yet. O(blocks).
        """
        if table.beside:
            return self._cover_windows(table, path, covered_blocks, tokens, room)
        wanted_blocks = -(-tokens // self._manager.block_size)
        while covered_blocks < wanted_blocks:
            node = path[covered_blocks] if covered_blocks < len(path) else None
            if node is None or not node.promised:
                if room <= 0:
                    break
                room -= 1
                table.reserved += node is None
            covered_blocks += 1
        return covered_blocks, room, False

    def _cover_windows(
        self, table: BlockTable, path: Sequence[Node], covered_blocks: int, tokens: int, room: int
    ) -> tuple[int, int, bool]:
        """Cover a promise as `_cover` does, with the blocks of its last window in each window
        group.

        O(blocks of the windows) where the promise is covered whole.
        """
        size, room, has_gap = self._manager.block_size, max(0, room), False
        covered = -(-tokens // size)
        while covered > covered_blocks:
            wanted, gap = self._missing_promises(table, path, covered, min(tokens, covered * size))
            fresh = range(covered_blocks, covered)
            cost = sum(i >= len(path) or not path[i].promised for i in fresh)
            cost += sum(is_new for _, _, is_new in wanted)
            has_gap = gap is not None
            if gap is not None:
                covered = gap
            elif cost > room:  # a block less takes at most one block of each group less
                covered -= max(1, (cost - room) // self._manager.windows.groups)
            else:
                for group, index, _ in wanted:
                    table.window_promises[group].add(index)
                    table.reserved += index >= len(path)
                table.reserved += max(0, covered - max(covered_blocks, len(path)))
                return covered, room - cost, False
        return covered_blocks, room, has_gap

    def _missing_promises(
        self, table: BlockTable, path: Sequence[Node], covered: int, tokens: int
    ) -> tuple[list[tuple[int, int, bool]], int | None]:
        """Return the window blocks that a promise of `tokens` tokens in `covered` blocks adds to
        the table's promises: (group, index, whether it takes room); and the index of a block that
        has been freed, or None.
        """
        windows, wanted = self._manager.windows, []
        for group, promises in enumerate(table.window_promises):
            for index in range(covered - 1, windows.first_read(group, tokens) - 1, -1):
                if index in promises:
                    continue
                block = None
                if index < len(path):
                    beside = path[index].beside
                    block = None if beside is None else beside[group]
                    if block is None:
                        return [], index
                wanted.append((group, index, block is None or not block.promised))
        return wanted, None

    def release_reservation(self, table: BlockTable, index: int) -> None:
        """Release the reservations of block `index` of the table, which is now in the tree."""
        if table.reserved and index < max(
            covered_blocks for _, covered_blocks in table.requested_leases
        ):
            released = 1 + sum(index in promises for promises in table.window_promises)
            table.reserved -= released
            table.account.add_reserved(-released)

    def release_reservations(self, table: BlockTable, now_s: float) -> None:
        """Release the promises for blocks that were never computed.

        In window groups the promise moves to where the sequence ended, so that what it computed can
        be resumed. O(blocks of the windows).
        """
        is_cut_short = table.reserved > 0
        table.account.add_reserved(-table.reserved)
        table.reserved = 0
        if is_cut_short and table.beside:
            self._promise_last_windows(table, now_s)

    def _promise_last_windows(self, table: BlockTable, now_s: float) -> None:
        """Promise the window blocks that resuming at the end of a table reads, under the leases
        that reach beyond it, while there is room.
        """
        spans = [span for span in _spans(table, now_s) if span[1] > table.committed]
        room = self._promise_room(table.account)
        for row, first in zip(table.beside, table.first, strict=True):
            for block_id in row[first:]:
                block = self._manager.node_of[block_id]
                if not isinstance(block, WindowBlock) or not (block.promised or room > 0):
                    continue
                room -= not block.promised
                block.terms = block.terms or BlockTerms(math.inf)
                for _, _, requested in spans:
                    block.terms.extend(requested, promised=True)
                self.update_deadlines(table.account, block, now_s)

    def revoke(self, account: NamespaceAccount, lease_id: str) -> list[Node]:
        """Remove a lease. Return the topmost nodes that it alone covered.

        Sequences that run under it commit nothing more. O(tables), and see `LeaseEndpoints.revoke`.
        """
        self._manager.version += 1
        for table in self._manager.tables:
            if table.account is account and any(
                one.lease_id == lease_id for one, _ in table.requested_leases
            ):
                table.write = False
        return account.lease_endpoints.revoke(lease_id)

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

        A block may be promised if it is already, or if there is room for its promise.
        """
        room = None
        for node in nodes:
            if node.terms is None:
                continue
            has_room = node.promised
            if not has_room and node.terms.renew_promise_s > 0:
                room = self._promise_room(account) if room is None else room
                has_room = room > 0
                room -= has_room
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
        promised_class = terms.promised_class if terms.promise_at_s > now_s else None
        if promised_class is None and node.has_promise_deadline:
            # Over, but `lapse_promises` has not run yet: it handles all blocks below as well.
            promised_class = node.promised_class
        if (
            promised_class is not None
            and not node.has_promise_deadline
            and terms.promise_at_s < math.inf
        ):
            node.has_promise_deadline = True
            self._promises.add(terms.promise_at_s, (account, node))
        if promised_class != node.promised_class:
            self._manager.set_promised(account, node, promised_class)

    def lapse_promises(self, now_s: float) -> None:
        """Turn promises whose time is over into best effort. O(due log n).

        A block in use under a clock that counts from the last use keeps its promise: the use goes
        on. Its descendants' promises may begin meanwhile, and an unpromised block above promised
        ones would count as evictable without being so.
        """
        for account, node in self._promises.take_due(now_s):
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
            for account, node in self._promises.items()
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

    def _promise_room(self, account: NamespaceAccount) -> int:
        """Return the blocks that may still be promised to this namespace's payer. Cost: see
        `FairShare`.
        """
        return self._promise_room_and_bound(account)[0]

    def _promise_room_and_bound(self, account: NamespaceAccount) -> tuple[int, Bound]:
        """Return the same and the bound that limits it; of several equal bounds the payer's own
        first.
        """
        payer_account, fair_share = account.payer_account, self._manager.fair_share
        mine = payer_account.promised
        quota = payer_account.quota
        bounds: list[tuple[int | None, Bound]] = [
            (quota.promised_blocks_max, "quota"),
            (quota.ceiling_blocks and int(quota.ceiling_blocks * PROMISABLE), "ceiling"),
            (fair_share.promisable - fair_share.claimed_by_others(payer_account), "pool"),
        ]
        rooms = [(most - mine, name) for most, name in bounds if most is not None]
        return min(rooms, key=itemgetter(0))


def _spans(table: BlockTable, now_s: float) -> list[tuple[int, int, LeaseSpans]]:
    """Return for each requested lease its tokens, the blocks its promise covers, and its times."""
    return [
        (lease.tokens, covered_blocks, spans_of(lease.retention, table.started_s, now_s))
        for lease, covered_blocks in table.requested_leases
    ]


def _bound_of(bound: Bound, has_gap: bool) -> Bound:
    """Return what clipped a promise: a freed window block, or the payer's or the pool's bound."""
    return "window" if has_gap else bound


def _outcome(granted: int, covered_tokens: int) -> Literal["granted", "clipped", "refused"]:
    """Return the outcome of a lease of `covers` tokens of which `granted` are granted."""
    if granted == covered_tokens:
        return "granted"
    return "clipped" if granted else "refused"
