"""The lease manager: grants leases at admission, and applies their terms to the blocks of tables.

It implements rule 7 (a promise and a limit) and rule 8 (granted, clipped or refused, never silently
dropped). What becomes of a block's terms, `block_promises` decides. It moves no block itself:
`block_manager` does. Only `prefix_cache` and `attention_windows` call it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from engine.api import Bound, LeaseGrant, LeaseRequest, Namespace, Quota
from engine.cache.block_promises import BlockPromises
from engine.cache.blocks.block_manager import BlockManager
from engine.cache.blocks.block_table import BlockTable
from engine.cache.kept_below import KeptWindows
from engine.cache.promise_room import NO_ROOM_ASKED, PromiseRoom, asks_promise, cover
from engine.cache.tree.accounts import NamespaceAccount
from engine.cache.tree.leases import BlockTerms, LeaseSpans, promised_seconds, spans_of
from engine.cache.tree.prefix_tree import Node, WindowBlock
from engine.cache.window_promises import WindowCover, first_promised

Spans = Sequence[tuple[int, int, LeaseSpans]]
"""For each lease of a table its tokens, the blocks that its promise covers, and its times."""


class LeaseManager:
    """The leases of block tables, from their grant to the end of their sequence."""

    def __init__(self, manager: BlockManager, promises: BlockPromises) -> None:
        self._manager = manager
        self._promises = promises

    def grant(
        self,
        table: BlockTable,
        path: Sequence[Node],
        tokens: Sequence[int],
        leases: Sequence[LeaseRequest],
        now_s: float,
        suspended: BlockTable | None = None,
    ) -> int:
        """Grant, clip or refuse each lease of a prompt of `tokens`, and apply its terms to the
        cached blocks of `path`, and to those behind it whose promises a level below keeps.

        A promise is clipped to the room that the payer's bounds and the promisable part of the pool
        leave, and to a prefix whose last windows are there (rule 19). Promised blocks that are not
        computed yet are reserved. Sets `table.leases` and `table.requested_leases`. A sequence that
        begins again takes over the room of its `suspended` table; returns how many blocks fewer are
        promised all the same. O(blocks promised).
        """
        size, prompt_tokens = self._manager.block_size, len(tokens)
        requested, covered_blocks = [], 0
        if suspended is None:
            room = self._promises.room(table.account) if leases else NO_ROOM_ASKED
        else:
            prompt_tokens = min(prompt_tokens, suspended.prompt_tokens)
            room = self._take_over_room(table, suspended)
        kept = self._kept_below(table, len(path), tokens, leases, now_s)
        windows = self._window_cover(table, path, kept, tokens, leases, now_s)
        grants: dict[int, LeaseGrant] = {}
        for position, lease in sorted(enumerate(leases), key=lambda pair: pair[1].tokens):
            covered_tokens = min(lease.tokens, prompt_tokens)
            granted, has_gap = covered_tokens if table.write else 0, False
            if table.write and promised_seconds(lease.retention) > 0:
                if windows is None:
                    covered_blocks = self._cover(
                        table, path, kept, covered_blocks, covered_tokens, room
                    )
                else:
                    covered_blocks, has_gap = windows.cover(covered_blocks, covered_tokens, room)
                granted = min(covered_tokens, covered_blocks * size)
            bound: Bound = "window" if has_gap else room.bound
            grants[position] = LeaseGrant(
                lease_id=lease.lease_id,
                retention=lease.retention.name,
                outcome=_outcome(granted, covered_tokens),
                tokens=granted,
                bound=bound if table.write and granted < covered_tokens else "",
            )
            requested.append((lease, -(-granted // size)))
        table.prompt_tokens = prompt_tokens
        table.leases = tuple(grants[position] for position in range(len(leases)))
        table.requested_leases = tuple(requested)
        table.account.add_reserved(table.reserved)
        if table.write:
            self._apply_granted(table, path, kept, windows, now_s)
        if suspended is None or not table.write:
            return 0
        return max(0, promised_blocks(suspended, now_s) - promised_blocks(table, now_s))

    def _apply_granted(
        self,
        table: BlockTable,
        path: Sequence[Node],
        kept: Sequence[BlockTerms],
        windows: WindowCover | None,
        now_s: float,
    ) -> None:
        """Apply the leases of a table that begins to the blocks it found, here and below; without
        leases they have no limit from then on. O(blocks).
        """
        if not table.requested_leases:
            for node in path:
                if node.terms:
                    node.terms.limit_at_s = math.inf
            return
        size, spans = self._manager.block_size, _spans(table, now_s)
        for index, node in enumerate(path):
            self._extend(table, node, index, spans, now_s, is_new=False)
        self._extend_below(table, path, kept, spans, now_s)
        if windows is not None:
            self._extend_kept_windows(table, windows, spans)
        for lease, _ in table.requested_leases:
            if last := min(len(path), -(-lease.tokens // size)):
                table.account.lease_endpoints.extend(lease.lease_id, path[last - 1])

    def _take_over_room(self, table: BlockTable, suspended: BlockTable) -> PromiseRoom:
        """Release what a suspended table has reserved; return the room of the one that goes on."""
        reserved, held_up = suspended.reserved, suspended.held_up
        table.account.add_reserved(-reserved)
        self._release_held_up(suspended, held_up)
        suspended.reserved = 0
        table.started_s = suspended.started_s
        room = self._promises.room(table.account)
        room.keep(reserved, held_up)
        return room

    def apply_leases(
        self, table: BlockTable, node: Node, index: int, now_s: float, *, is_new: bool = False
    ) -> None:
        """Apply the table's leases to `node`, block `index` of its path; its ancestors have them
        already.

        A request without leases is plain best effort: a block it uses has no limit from then on. A
        block beyond the leases of its request has no limit either, and leaves the tree with the
        blocks above it. `is_new`: no other request has used this block yet.
        """
        self._extend(table, node, index, _spans(table, now_s), now_s, is_new=is_new)
        for lease, _ in table.requested_leases:
            if index * self._manager.block_size < lease.tokens:
                table.account.lease_endpoints.extend(lease.lease_id, node)

    def is_plain(self, table: BlockTable) -> bool:
        """Return whether a table asks nothing of the blocks it commits: it has no lease, and none
        of its blocks has a promise that a level below keeps. They have no limit from then on. O(1).
        """
        return not (
            table.requested_leases
            or table.reserved
            or table.held_up
            or table.kept_to > table.kept_from
            or table.beside
        )

    def _extend(
        self,
        table: BlockTable,
        node: Node,
        index: int,
        spans: Spans,
        now_s: float,
        *,
        is_new: bool,
    ) -> None:
        """Apply the terms of a table's leases to block `index` of its path, in each KV group."""
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
            promised = index < covered_blocks and self._is_promisable(node)
            terms.extend(requested, promised=promised)
        self._promises.update_deadlines(table.account, node, now_s)
        if table.beside:
            self._extend_windows(table, node, index, spans, now_s)

    def _extend_windows(
        self,
        table: BlockTable,
        node: Node,
        index: int,
        spans: Spans,
        now_s: float,
    ) -> None:
        """Apply the terms of the leases whose last windows contain block `index` to its window
        blocks.
        """
        if not self._is_promisable(node):
            return
        for group, promises in enumerate(table.window_promises):
            block = None if node.beside is None else node.beside[group]
            if block is None or index not in promises:
                continue
            if (group, index) in table.window_kept and not self._may_promise(table.account, block):
                continue
            for lease_tokens, covered_blocks, requested in spans:
                if self._is_read(table, group, index, lease_tokens, covered_blocks):
                    block.terms = block.terms or BlockTerms(math.inf)
                    block.terms.extend(requested, promised=True)
            self._promises.update_deadlines(table.account, block, now_s)
            table.resumed.append(block)

    def _is_promisable(self, node: Node) -> bool:
        """Return whether a run may be promised: where a level below keeps promises, whole ones
        alone, since a tail, of which no level has a copy, would hold its whole path on the device.
        """
        return self._promises.below is None or len(node.run) == self._manager.block_size

    def _is_read(
        self, table: BlockTable, group: int, index: int, lease_tokens: int, covered_blocks: int
    ) -> bool:
        """Return whether resuming at the end of what a lease's promise covers reads block `index`
        of a window group. O(1).
        """
        windows = self._manager.windows
        tokens = min(lease_tokens, table.prompt_tokens, covered_blocks * windows.block_size)
        first = first_promised(windows, group, tokens, has_level=self._promises.below is not None)
        return first <= index < covered_blocks

    def _may_promise(self, account: NamespaceAccount, block: WindowBlock) -> bool:
        """Return whether a window block is promised, or may be now: beside its node, and where
        there is room for it and for the promises that return to the device with it. O(depth).
        """
        node = block.parent
        if block.promised or block.promised_below:
            return True
        if node is None or not (node.promised or node.promised_below):
            return False
        return self._promises.room_under(account, node).blocks > 0

    def _extend_kept_windows(
        self,
        table: BlockTable,
        windows: WindowCover,
        spans: Spans,
    ) -> None:
        """Apply the leases of a table to window blocks that a level below alone has, and keeps the
        promises of. O(these).
        """
        table.window_kept = windows.kept.keys()
        for (group, index), terms in windows.kept.items():
            for tokens, covered_blocks, requested in spans:
                if self._is_read(table, group, index, tokens, covered_blocks):
                    terms.extend(requested, promised=True)
            self._promises.follow_below(table.account, terms)

    def _cover(
        self,
        table: BlockTable,
        path: Sequence[Node],
        kept: Sequence[BlockTerms],
        covered_blocks: int,
        tokens: int,
        room: PromiseRoom,
    ) -> int:
        """Cover a promise of `tokens` tokens, beyond the `covered_blocks` that earlier leases of
        the table cover, as far as `room` allows.

        `kept`: the terms of the blocks behind `path` whose promises a level below keeps. Returns
        the blocks then covered. Reserves the blocks that are not computed yet. O(blocks).
        """
        wanted_blocks = -(-tokens // self._manager.block_size)
        covered, reserved = cover(path, len(kept), covered_blocks, wanted_blocks, room)
        if reserved and not table.reserved:
            table.held_up = len(kept)
        table.reserved += reserved
        return covered

    def _window_cover(
        self,
        table: BlockTable,
        path: Sequence[Node],
        kept: Sequence[BlockTerms],
        tokens: Sequence[int],
        leases: Sequence[LeaseRequest],
        now_s: float,
    ) -> WindowCover | None:
        """Return what covers a table's promises with window blocks; None without window groups."""
        if not table.beside or not leases:
            return None
        below: Sequence[KeptWindows] | None = None
        if self._promises.below is not None:
            is_asked = table.write and asks_promise(leases)
            level = self._promises.below
            below = level.windows_of(table.namespace, tokens, now_s) if is_asked else ()
        return WindowCover(self._manager.windows, table, path, len(kept), below)

    def promisable(
        self,
        namespace: Namespace,
        path: Sequence[Node],
        tokens: Sequence[int],
        quota: Quota,
        now_s: float,
    ) -> tuple[int, Bound]:
        """Return how many leading tokens of a prompt, of which `path` is cached, a lease could
        promise now, and the bound that would clip more. Changes nothing. O(blocks).
        """
        size = self._manager.block_size
        kept = len(self._terms_below(namespace, tokens, len(path), now_s))
        room = self._promises.room_of(self._manager.fair_share.get(quota.payer or namespace), quota)
        covered, _ = cover(path, kept, 0, -(-len(tokens) // size), room)
        promisable = min(len(tokens), covered * size)
        return promisable, room.bound if promisable < len(tokens) else ""

    def _kept_below(
        self,
        table: BlockTable,
        matched: int,
        tokens: Sequence[int],
        leases: Sequence[LeaseRequest],
        now_s: float,
    ) -> list[BlockTerms]:
        """Return the terms of the blocks right behind the `matched` ones whose promises a level
        below keeps. O(blocks), where leases promise anything.
        """
        table.kept_from = table.kept_to = matched
        if self._promises.below is None or not table.write or not asks_promise(leases):
            return []
        kept = self._terms_below(table.namespace, tokens, matched, now_s)
        table.kept_to = matched + len(kept)
        return kept

    def _terms_below(
        self, namespace: Namespace, tokens: Sequence[int], matched: int, now_s: float
    ) -> list[BlockTerms]:
        """Return the terms of the runs right behind the `matched` ones whose promises a level below
        keeps. O(runs).
        """
        kept: list[BlockTerms] = []
        if self._promises.below is None:
            return kept
        for terms in self._promises.below.terms_of(namespace, tokens, now_s)[matched:]:
            if terms is None or terms.below_class is None:
                break
            kept.append(terms)
        return kept

    def _extend_below(
        self,
        table: BlockTable,
        path: Sequence[Node],
        kept: Sequence[BlockTerms],
        spans: Spans,
        now_s: float,
    ) -> None:
        """Apply the leases of a table to the blocks behind its match that a level below keeps, and
        bring the promises of its path back to the device if new blocks under it are promised.
        """
        if self._promises.below is None:
            return
        table.account.add_held_up(table.held_up)
        if table.reserved and path:
            self._promises.return_to_device(table.account, path[-1])
        for index, terms in enumerate(kept, start=len(path)):
            for tokens, covered_blocks, requested in spans:
                if index * self._manager.block_size < tokens:
                    terms.extend(requested, promised=index < covered_blocks)
            self._promises.follow_below(table.account, terms)

    def release_reservation(self, table: BlockTable, index: int) -> None:
        """Release the reservations of block `index` of the table, which is now in the tree."""
        if table.held_up and table.node.promised:  # so are the blocks above it
            self._release_held_up(table, min(index + 1, table.kept_to) - table.kept_from)
        if not table.reserved or (index < table.kept_to and not table.beside):
            return
        if index < max(covered_blocks for _, covered_blocks in table.requested_leases):
            released = int(index >= table.kept_to)
            for group, promises in enumerate(table.window_promises):
                released += index in promises and (group, index) not in table.window_kept
            table.reserved -= released
            table.account.add_reserved(-released)

    def release_reservations(self, table: BlockTable, now_s: float) -> None:
        """Release the promises for blocks that were never computed.

        In window groups the promise moves to where the sequence ended, whose window blocks are in
        `table.resumed`, so that what it computed can be resumed. O(blocks of the windows).
        """
        is_cut_short = table.reserved > 0
        table.account.add_reserved(-table.reserved)
        table.reserved = 0
        self._release_held_up(table, table.held_up)
        if is_cut_short and table.resumed:
            self._promise_last_windows(table, now_s)

    def last_windows(self, table: BlockTable) -> list[WindowBlock]:
        """Return the blocks of the tree that resuming at the end of a table reads in window groups.
        O(these).
        """
        found = (self._manager.node_of[block] for block in table.window_blocks)
        return [block for block in found if isinstance(block, WindowBlock)]

    def _promise_last_windows(self, table: BlockTable, now_s: float) -> None:
        """Promise the window blocks that resuming at the end of a table reads, under the leases
        that reach beyond it, while there is room. Those that have left the tree since the table was
        suspended, or whose nodes are no longer promised, are passed over.
        """
        spans = [span for span in _spans(table, now_s) if span[1] > table.committed]
        for block in table.resumed:
            if block.parent is None or not self._may_promise_last(table, block):
                continue
            if table.is_suspended and not (block.parent.promised or block.parent.promised_below):
                continue
            block.terms = block.terms or BlockTerms(math.inf)
            for _, _, requested in spans:
                block.terms.extend(requested, promised=True)
            self._promises.update_deadlines(table.account, block, now_s)

    def _may_promise_last(self, table: BlockTable, block: WindowBlock) -> bool:
        if self._promises.below is None:
            return block.promised or self._promises.room(table.account).blocks > 0
        node = block.parent
        is_promisable = node is not None and self._is_promisable(node)
        return is_promisable and self._may_promise(table.account, block)

    def end_use(self, table: BlockTable, now_s: float) -> None:
        """Note that a sequence uses the committed blocks of its table no more: their last use is
        now, and the leases that count from there begin anew. Promises are renewed from the root on,
        those of window blocks after their nodes', so that none holds without those above it.
        O(blocks).
        """
        found = (self._manager.node_of[block] for block in table.blocks[: table.committed])
        used = [node for node in found if isinstance(node, Node)]  # deeper ones may have left
        for node in used:
            node.last_use_s = now_s
        windows = (block for block in table.resumed if block.parent is not None)
        self._promises.renew_on_release(table.account, (*used, *windows), now_s)

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

    def regain(self, table: BlockTable, node: Node, index: int) -> int:
        """Make room for the promise of block `index`, which a level below kept when the table began
        and has lost since; without room the table's promises end above it. Return how many blocks
        behind those that the level kept are no longer promised by that. O(depth).
        """
        if not table.kept_from <= index < table.kept_to or node.promised or node.promised_below:
            return 0
        room = self._promises.room_under(table.account, node.parent)
        has_device = table.held_up > 0 or room.device - room.waiting > 0
        if room.total > 0 and has_device:
            return 0
        dropped = table.reserved
        table.requested_leases = tuple(
            (lease, min(covered, index)) for lease, covered in table.requested_leases
        )
        table.account.add_reserved(-dropped)
        table.reserved = 0
        self._release_held_up(table, table.held_up)
        return dropped

    def _release_held_up(self, table: BlockTable, blocks: int) -> None:
        released = max(0, min(blocks, table.held_up))
        if released:
            table.held_up -= released
            table.kept_from += released
            table.account.add_held_up(-released)


def _spans(table: BlockTable, now_s: float) -> Spans:
    return [
        (lease.tokens, covered_blocks, spans_of(lease.retention, table.started_s, now_s))
        for lease, covered_blocks in table.requested_leases
    ]


def promised_blocks(table: BlockTable, now_s: float | None = None) -> int:
    """Return how many leading blocks the leases of a table promise, beyond `now_s` if that is
    given. O(leases).
    """
    at_s = table.started_s if now_s is None else now_s
    spans = _spans(table, at_s)
    return max((covered for _, covered, one in spans if one.promise_at_s > at_s), default=0)


def _outcome(granted: int, covered_tokens: int) -> Literal["granted", "clipped", "refused"]:
    """Return the outcome of a lease of `covered_tokens` tokens of which `granted` are granted."""
    if granted == covered_tokens:
        return "granted"
    return "clipped" if granted else "refused"
