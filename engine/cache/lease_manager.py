"""The lease manager: grants leases at admission, and applies their terms to the blocks of tables.

It implements rule *Lease* (a promise and a limit) and rule *Grant* (granted, clipped or refused,
never silently dropped). What becomes of a block's terms, `block_promises` decides. It moves no
block itself: `block_manager` does. Only `prefix_cache` and `attention_windows` call it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from engine.api import Bound, LeaseGrant, LeaseRequest, Namespace, Quota
from engine.cache.block_promises import BlockPromises
from engine.cache.blocks.block_manager import BlockManager
from engine.cache.blocks.block_table import BlockTable
from engine.cache.promise_room import NO_ROOM_ASKED, PromiseRoom, asks_promise, cover
from engine.cache.tree.accounts import NamespaceAccount
from engine.cache.tree.leases import BlockTerms, promised_seconds, spans_of
from engine.cache.tree.prefix_tree import Node, State, StateBlock, WindowBlock, whole_runs
from engine.cache.window_promises import WindowPath, cover_windows, first_promised

Spans = Sequence[tuple[int, int, BlockTerms]]
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
        *,
        reads: bool = True,
    ) -> int:
        """Grant, clip or refuse each lease of a prompt of `tokens`, and apply its terms to the
        matched blocks of `path`, and to those behind it whose promises a level below keeps.

        A promise is clipped to the room that the payer's bounds and the promisable part of the pool
        leave, and to a prefix whose last windows are there. Promised blocks that are not computed
        yet are reserved, and bind what is above them. Sets `table.leases` and
        `table.requested_leases`. A sequence that begins again takes over the room of its
        `suspended` table; returns how many blocks fewer are promised all the same. O(blocks
        promised).
        """
        prompt_tokens = len(tokens)
        if suspended is None:
            room = self._promises.room(table.account) if leases else NO_ROOM_ASKED
        else:
            prompt_tokens = min(prompt_tokens, suspended.prompt_tokens)
            room = self._take_over_room(table, suspended)
        runs = self._runs(table, path, tokens, leases) if reads else path
        known = runs[: len(path) + self._kept_behind(runs[len(path) :], now_s)]
        table.known_runs = len(known)
        windows = None
        if table.beside and leases:
            below = self._manager.below if self._promises.keeps_below else None
            windows = WindowPath(self._manager.windows, runs, len(path), len(known), below)
        covered_blocks = 0
        if leases:
            covered_blocks = self._cover(table, known, leases, windows, prompt_tokens, room)
        table.prompt_tokens = prompt_tokens
        table.account.add_reserved(table.reserved)
        if table.write:
            self._apply_granted(table, known, len(path), now_s)
            if table.reserved and known:
                last = known[min(covered_blocks, len(known)) - 1]
                self._promises.bind_under(table, last)
        if suspended is None:
            return 0
        self._promises.bind_under(suspended, None)
        if not table.write:
            return 0
        return max(0, promised_blocks(suspended, now_s) - promised_blocks(table, now_s))

    def _cover(
        self,
        table: BlockTable,
        known: Sequence[Node],
        leases: Sequence[LeaseRequest],
        windows: WindowPath | None,
        prompt_tokens: int,
        room: PromiseRoom,
    ) -> int:
        """Grant leases from the shortest on, as far as there is room; return the blocks covered."""
        size, requested, covered_blocks = self._manager.block_size, [], 0
        grants: dict[int, LeaseGrant] = {}
        for position, lease in sorted(enumerate(leases), key=lambda pair: pair[1].tokens):
            covered_tokens = min(lease.tokens, prompt_tokens)
            granted, has_gap = covered_tokens if table.write else 0, False
            if table.write and promised_seconds(lease.retention) > 0:
                if windows is None:
                    wanted = -(-covered_tokens // size)
                    if not self._cover_state(table, known, covered_blocks, covered_tokens, room):
                        wanted = covered_blocks
                    covered_blocks, reserved = cover(known, covered_blocks, wanted, room)
                    table.reserved += reserved
                else:
                    covered_blocks, has_gap = cover_windows(
                        windows, table, covered_blocks, covered_tokens, room
                    )
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
        table.leases = tuple(grants[position] for position in range(len(leases)))
        table.requested_leases = tuple(requested)
        return covered_blocks

    def _cover_state(
        self, table: BlockTable, known: Sequence[Node], covered: int, tokens: int, room: PromiseRoom
    ) -> bool:
        """Cover a promise of `tokens` tokens with the state at their end, of a model with states;
        return whether there is room for it beside the blocks behind the `covered` ones. One that is
        not kept yet is reserved; where a deeper one was found and none is kept there, none will be.
        O(blocks promised).
        """
        size, blocks = self._manager.block_size, self._manager.state_blocks
        if not blocks or tokens < size or tokens in table.state_promises:
            return True
        if tokens <= table.kv_tokens:
            if (kept := _state_at(table, known, tokens, size)) is None:
                return True
            blocks = sum(not block.promised for block in kept.blocks)
        runs = (known[i] if i < len(known) else None for i in range(covered, -(-tokens // size)))
        if room.blocks < blocks + sum(node is None or not node.promised for node in runs):
            return False
        for _ in range(blocks):
            room.take()
        table.state_promises[tokens] = blocks if tokens > table.kv_tokens else 0
        table.reserved += table.state_promises[tokens]
        return True

    def promise_state(self, table: BlockTable, position: int, state: State, now_s: float) -> None:
        """Promise a state that stands at `position` under the leases that end there, if they do.
        O(blocks of it).
        """
        if (reserved := table.state_promises.pop(position, None)) is None:
            return
        table.reserved -= reserved
        table.account.add_reserved(-reserved)
        for block in state.blocks:
            block.terms = block.terms or BlockTerms(math.inf)
            for tokens, covered_blocks, requested in table_spans(table, now_s):
                is_covered = covered_blocks * self._manager.block_size >= position
                if min(tokens, table.prompt_tokens) == position and is_covered:
                    block.terms.merge(requested)
            self._promises.update_deadlines(table.account, block, now_s)
            table.resumed.append(block)

    def _apply_granted(
        self, table: BlockTable, known: Sequence[Node], matched: int, now_s: float
    ) -> None:
        """Apply the leases of a table that begins to the `known` blocks, of which it has found the
        first `matched`; without leases these have no limit from then on. O(blocks).
        """
        if not table.requested_leases:
            for node in known[:matched]:
                if node.terms:
                    node.terms.limit_at_s = math.inf
            return
        size, spans = self._manager.block_size, table_spans(table, now_s)
        for index, node in enumerate(known):
            self._extend(table, node, index, spans, now_s, is_new=False)
        for position in list(table.state_promises):
            if position <= table.kv_tokens and (state := _state_at(table, known, position, size)):
                self.promise_state(table, position, state, now_s)
        for lease, _ in table.requested_leases:
            if last := min(matched, -(-lease.tokens // size)):
                table.account.lease_endpoints.extend(lease.lease_id, known[last - 1])

    def _take_over_room(self, table: BlockTable, suspended: BlockTable) -> PromiseRoom:
        """Release what a suspended table has reserved; return the room of the one that goes on.
        What it binds stays bound until that is granted."""
        reserved, suspended.reserved = suspended.reserved, 0
        table.account.add_reserved(-reserved)
        table.started_s = suspended.started_s
        room = self._promises.room(table.account)
        room.keep(reserved)
        return room

    def _runs(
        self,
        table: BlockTable,
        path: Sequence[Node],
        tokens: Sequence[int],
        leases: Sequence[LeaseRequest],
    ) -> Sequence[Node]:
        """Return what the tree has of a prompt, on any level; no more than was matched where no
        level below keeps promises, or none is asked. O(runs).
        """
        if not (self._promises.keeps_below and table.write and asks_promise(leases)):
            return path
        size, last = self._manager.block_size, path[-1] if path else table.account.tree.root
        return [*path, *whole_runs(last, tokens[len(path) * size :], size)]

    def _kept_behind(self, runs: Sequence[Node], now_s: float) -> int:
        """Return how many of these runs, from the first, a level below keeps the promises of, also
        if these bind them to the device again once they are there. O(these).
        """
        for index, node in enumerate(runs):
            terms, is_here = node.terms, node.block >= 0
            if terms is None or not node.promised or (node.is_bound and is_here):
                return index
            if min(terms.limit_at_s, terms.promise_at_s) <= now_s:
                return index
        return len(runs)

    def apply_leases(
        self,
        table: BlockTable,
        node: Node,
        index: int,
        spans: Spans,
        now_s: float,
        *,
        is_new: bool,
    ) -> None:
        """Apply the table's leases, with their `spans` at `now_s`, to `node`, block `index` of its
        path; its ancestors have them already.

        A request without leases is plain best effort: a block it uses has no limit from then on. A
        block beyond the leases of its request has no limit either, and leaves the tree with the
        blocks above it. `is_new`: no other request has used this block yet.
        """
        self._extend(table, node, index, spans, now_s, is_new=is_new)
        for lease, _ in table.requested_leases:
            if index * self._manager.block_size < lease.tokens:
                table.account.lease_endpoints.extend(lease.lease_id, node)

    def is_plain(self, table: BlockTable) -> bool:
        """Return whether a table asks nothing of the blocks it commits: they have no limit from
        then on. O(1).
        """
        return not (table.requested_leases or table.reserved or table.beside)

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
            terms.merge(requested, promised=promised)
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
            block = node.window_block(group)
            if block is None or index not in promises:
                continue
            if (group, index) in table.window_kept and not self._may_promise(table.account, block):
                continue
            for lease_tokens, covered_blocks, requested in spans:
                if self._is_read(table, group, index, lease_tokens, covered_blocks):
                    block.terms = block.terms or BlockTerms(math.inf)
                    block.terms.merge(requested)
            self._promises.update_deadlines(table.account, block, now_s)
            table.resumed.append(block)

    def _is_promisable(self, node: Node) -> bool:
        """Return whether a run may be promised: where a level below keeps promises, whole ones
        alone, since a tail, of which no level has a copy, would hold its whole path on the device.
        """
        return not self._promises.keeps_below or len(node.run) == self._manager.block_size

    def _is_read(
        self, table: BlockTable, group: int, index: int, lease_tokens: int, covered_blocks: int
    ) -> bool:
        """Return whether resuming at the end of what a lease's promise covers reads block `index`
        of a window group. O(1).
        """
        windows = self._manager.windows
        tokens = min(lease_tokens, table.prompt_tokens, covered_blocks * windows.block_size)
        first = first_promised(windows, group, tokens, has_level=self._promises.keeps_below)
        return first <= index < covered_blocks

    def _may_promise(self, account: NamespaceAccount, block: WindowBlock) -> bool:
        """Return whether a window block is promised, or may be now: beside its node, and where
        there is room for it and for what it binds to the device. O(depth).
        """
        node = block.parent
        if block.promised:
            return True
        if node is None or not node.promised:
            return False
        return self._promises.room_under(account, node).blocks > 0

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
        known = list(path)
        if self._promises.keeps_below and (account := self._manager.accounts.get(namespace)):
            last = path[-1] if path else account.tree.root
            behind = whole_runs(last, tokens[len(path) * size :], size)
            known += behind[: self._kept_behind(behind, now_s)]
        room = self._promises.room_of(self._manager.fair_share.get(quota.payer or namespace), quota)
        covered, _ = cover(known, 0, -(-len(tokens) // size), room)
        promisable = min(len(tokens), covered * size)
        return promisable, room.bound if promisable < len(tokens) else ""

    def release_reservation(self, table: BlockTable, index: int) -> None:
        """Release the reservations of block `index` of the table, which is now in the tree."""
        if not table.reserved or (index < table.known_runs and not table.beside):
            return
        if index < max(covered_blocks for _, covered_blocks in table.requested_leases):
            released = int(index >= table.known_runs)
            for group, promises in enumerate(table.window_promises):
                released += index in promises and (group, index) not in table.window_kept
            table.reserved -= released
            table.account.add_reserved(-released)

    def rebind(self, table: BlockTable) -> None:
        """Let what is still reserved bind the last node that the table has committed. O(1)."""
        if not table.reserved:
            self._promises.bind_under(table, None)
        elif table.committed >= table.known_runs:
            self._promises.bind_under(table, table.node)

    def release_reservations(self, table: BlockTable, now_s: float) -> None:
        """Release the promises for blocks that were never computed.

        In window groups the promise moves to where the sequence ended, whose window blocks are in
        `table.resumed`, so that what it computed can be resumed. O(blocks of the windows).
        """
        is_cut_short = table.reserved > 0
        table.account.add_reserved(-table.reserved)
        table.reserved = 0
        if is_cut_short and table.resumed:
            self._promise_last_windows(table, now_s)
        self._promises.bind_under(table, None)

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
        spans = [span for span in table_spans(table, now_s) if span[1] > table.committed]
        for block in table.resumed:
            if block.parent is None or not self._may_promise_last(table, block):
                continue
            if table.is_suspended and not block.parent.promised:
                continue
            block.terms = block.terms or BlockTerms(math.inf)
            for _, _, requested in spans:
                block.terms.merge(requested)
            self._promises.update_deadlines(table.account, block, now_s)

    def _may_promise_last(self, table: BlockTable, block: WindowBlock) -> bool:
        if not self._promises.keeps_below:
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
        self._promises.renew_on_release(table, (*used, *windows), now_s)

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
        if index >= table.known_runs or node.promised:
            return 0
        room = self._promises.room_under(table.account, node.parent)
        if room.total > 0 and room.device - room.waiting > 0:
            return 0
        dropped = table.reserved
        table.requested_leases = tuple(
            (lease, min(covered, index)) for lease, covered in table.requested_leases
        )
        table.account.add_reserved(-dropped)
        table.reserved = 0
        self._promises.bind_under(table, None)
        return dropped


def _state_at(table: BlockTable, path: Sequence[Node], tokens: int, size: int) -> State | None:
    """Return the state that stands `tokens` tokens down what a table has matched, if one is kept:
    that of the hit, or one above it. O(states there).
    """
    if table.restores and tokens == table.state_tokens:
        hit = table.resumed[0]
        return hit.state if isinstance(hit, StateBlock) else None
    behind = path[tokens // size].run if tokens // size < len(path) else ()
    at = (tokens % size, behind[: tokens % size])
    found = path[tokens // size - 1].states or ()
    return next((s for s in found if (len(s.run), s.run) == at and s.is_whole), None)


def table_spans(table: BlockTable, now_s: float) -> Spans:
    """Return what the leases of a table ask at `now_s`. O(leases)."""
    started_s, used_s = table.started_s, now_s if table.renews else table.started_s
    return [
        (
            *(lease.tokens, covered_blocks),
            spans_of(lease.retention, started_s - lease.age_s, used_s - lease.age_s),
        )
        for lease, covered_blocks in table.requested_leases
    ]


def promised_blocks(table: BlockTable, now_s: float | None = None) -> int:
    """Return how many leading blocks the leases of a table promise, beyond `now_s` if that is
    given. O(leases).
    """
    at_s = table.started_s if now_s is None else now_s
    spans = table_spans(table, at_s)
    return max((covered for _, covered, one in spans if one.promise_at_s > at_s), default=0)


def _outcome(granted: int, covered_tokens: int) -> Literal["granted", "clipped", "refused"]:
    """Return the outcome of a lease of `covered_tokens` tokens of which `granted` are granted."""
    if granted == covered_tokens:
        return "granted"
    return "clipped" if granted else "refused"
