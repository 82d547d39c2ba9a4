"""The lease book: answers leases at admission, puts their terms on blocks, and keeps the deadlines.

Rule 7 (a promise and a limit) and rule 8 (granted, clipped or refused, never silently dropped) live
here. It moves no block itself: `holdings` does. Only `prefix_cache` calls it.
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
from engine.cache.leases import BlockTerms, Deadlines, LeaseSpans, promise_of, spans_of
from engine.cache.prefix_tree import Node


class LeaseManager:
    """Deadlines of every block under a lease, and the promises given out."""

    def __init__(self, holdings: BlockManager) -> None:
        self._holdings = holdings
        self._limits: Deadlines[tuple[NamespaceAccount, Node]] = Deadlines()
        self._promises: Deadlines[tuple[NamespaceAccount, Node]] = Deadlines()

    def answer(
        self,
        table: BlockTable,
        path: Sequence[Node],
        prompt_tokens: int,
        leases: Sequence[LeaseRequest],
        now_s: float,
    ) -> None:
        """Grant, clip or refuse each lease; put its terms on the blocks of `path`, already there.

        A promise is clipped to what the namespace's bounds and the promisable part of the pool
        leave. Promised blocks not computed yet are reserved. O(blocks promised).
        """
        size = self._holdings.block_size
        asked, reach = [], 0
        room, bound = self._bounded(table.account) if leases else (0, "")
        grants: dict[int, LeaseGrant] = {}
        for place, lease in sorted(enumerate(leases), key=lambda pair: pair[1].tokens):
            covers = min(lease.tokens, prompt_tokens)
            granted = covers if table.write else 0
            if table.write and promise_of(lease.retention) > 0:
                wanted = -(-covers // size)
                while reach < wanted:
                    there = path[reach] if reach < len(path) else None
                    if there is None or not there.promised:
                        if room <= 0:
                            break
                        room -= 1
                        table.reserved += there is None
                    reach += 1
                granted = min(covers, reach * size)
            grants[place] = LeaseGrant(
                lease_id=lease.lease_id,
                retention=lease.retention.name,
                outcome=_outcome(granted, covers),
                tokens=granted,
                bound=bound if table.write and granted < covers else "",
            )
            asked.append((lease, -(-granted // size)))
        table.leases = tuple(grants[place] for place in range(len(leases)))
        table.asked = tuple(asked)
        table.account.add_reserved(table.reserved)
        if table.write and asked:
            spans = _spans(table, now_s)
            for index, node in enumerate(path):
                self._extend(table, node, index, spans, now_s, is_new=False)
            for lease, _ in table.asked:
                if last := min(len(path), -(-lease.tokens // size)):
                    table.account.ends.reach(lease.lease_id, path[last - 1])
        elif table.write:
            for node in path:
                if node.terms:
                    node.terms.limit_at_s = math.inf

    def cover(
        self, table: BlockTable, node: Node, index: int, now_s: float, *, is_new: bool = False
    ) -> None:
        """Put the table's leases on `node`, block `index` of its path, whose ancestors have them.

        A request without leases is plain best effort: what it uses has no limit of its own. A block
        beyond the leases of its request rides under them: it has none either, and goes when they
        go. `is_new`: no one else has used this block yet.
        """
        self._extend(table, node, index, _spans(table, now_s), now_s, is_new=is_new)
        for lease, _ in table.asked:
            if index * self._holdings.block_size < lease.tokens:
                table.account.ends.reach(lease.lease_id, node)

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
        start = index * self._holdings.block_size
        for tokens, reach, asked in spans:
            if start >= tokens:
                continue
            if terms is None:
                terms = node.terms = BlockTerms(-math.inf if is_new else math.inf)
            terms.extend(asked, promised=index < reach)
        self.note(table.account, node, now_s)

    def computed(self, table: BlockTable, index: int) -> None:
        """Block `index` of the table is in the tree: it needs no reservation any more."""
        if table.reserved and index < max(reach for _, reach in table.asked):
            table.reserved -= 1
            table.account.add_reserved(-1)

    def close(self, table: BlockTable) -> None:
        """Promises for blocks that were never computed lapse."""
        table.account.add_reserved(-table.reserved)
        table.reserved = 0

    def strike(self, account: NamespaceAccount, lease_id: str) -> list[Node]:
        """A lease is no more: who runs under it commits nothing more. The topmost nodes that it
        alone covered. O(tables), and see `LeaseExpiry.strike`."""
        self._holdings.version += 1
        for table in self._holdings.tables:
            if table.account is account and any(one.lease_id == lease_id for one, _ in table.asked):
                table.write = False
        return account.ends.strike(lease_id)

    def read(self, account: NamespaceAccount, nodes: Iterable[Node], now_s: float) -> None:
        """Blocks were read: their leases begin anew, promises that have lapsed while there is
        room. O(blocks)."""
        for node, terms, has_room in self._under_terms(account, nodes):
            terms.renew(now_s, promise=has_room)
            self.note(account, node, now_s)

    def used(self, account: NamespaceAccount, nodes: Iterable[Node], now_s: float) -> None:
        """Their use has ended: leases that count from the last use begin anew, as in `read`."""
        for node, terms, has_room in self._under_terms(account, nodes):
            terms.use(now_s, promise=has_room)
            self.note(account, node, now_s)

    def _under_terms(
        self, account: NamespaceAccount, nodes: Iterable[Node]
    ) -> Iterator[tuple[Node, BlockTerms, bool]]:
        """Those under leases, and whether each may be promised: it is, or there is room for it."""
        room = None
        for node in nodes:
            if node.terms is None:
                continue
            has_room = node.promised
            if not has_room and node.terms.renew_promise_s > 0:
                room = self._room(account) if room is None else room
                has_room = room > 0
                room -= has_room
            yield node, node.terms, has_room

    def note(self, account: NamespaceAccount, node: Node, now_s: float) -> None:
        """Bring deadlines and the promised count in line with the node's terms."""
        terms = node.terms
        if terms is None or (
            node.timed_limit and node.timed_promise and terms.promised_as == node.promised_as
        ):
            return  # the deadlines that are noted come no later than its own
        if not node.timed_limit and terms.limit_at_s < math.inf:
            node.timed_limit = True
            self._limits.add(terms.limit_at_s, (account, node))
        promised_as = terms.promised_as if terms.promise_at_s > now_s else None
        if promised_as is None and node.timed_promise:
            # Over, and `lapse` has not been asked: with it, everything below goes at the same time.
            promised_as = node.promised_as
        if promised_as is not None and not node.timed_promise and terms.promise_at_s < math.inf:
            node.timed_promise = True
            self._promises.add(terms.promise_at_s, (account, node))
        if promised_as != node.promised_as:
            self._holdings.set_promised(account, node, promised_as)

    def lapse(self, now_s: float) -> None:
        """Promises whose time is over become best effort.

        Not of a block in use under a clock that counts from the last use: it is being used now. And
        if its promise ended while others below it began, it would count as a block that may go, and
        could not.
        """
        for account, node in self._promises.due(now_s):
            node.timed_promise = False
            if account.tree.holds(node):
                if node.terms is not None and self._holdings.pool.ref_count[node.block] > 1:
                    node.terms.keep(now_s)
                self.note(account, node, now_s)

    def expired(self, now_s: float) -> list[tuple[NamespaceAccount, Node]]:
        """Blocks whose limit has passed, to be detached.

        A block in use under a clock that counts from the last use is being used now, and stays.
        """
        gone = []
        for account, node in self._limits.due(now_s):
            node.timed_limit = False
            if not account.tree.holds(node) or node.terms is None:
                continue
            if self._holdings.pool.ref_count[node.block] > 1:
                node.terms.hold(now_s)
            if node.terms.limit_at_s > now_s:
                self.note(account, node, now_s)
            else:
                gone.append((account, node))
        return gone

    def _room(self, account: NamespaceAccount) -> int:
        """Blocks that may still be promised to this namespace's payer. See `FairShare`."""
        return self._bounded(account)[0]

    def _bounded(self, account: NamespaceAccount) -> tuple[int, Bound]:
        """The same, and by what: of several bounds the payer's own first."""
        share, shares = account.share, self._holdings.shares
        mine = share.promised
        quota = share.quota
        bounds: list[tuple[int | None, Bound]] = [
            (quota.promised_blocks_max, "quota"),
            (quota.ceiling_blocks and int(quota.ceiling_blocks * PROMISABLE), "ceiling"),
            (shares.promisable - shares.claimed_beside(share), "pool"),
        ]
        rooms = [(most - mine, name) for most, name in bounds if most is not None]
        return min(rooms, key=itemgetter(0))


def _spans(table: BlockTable, now_s: float) -> list[tuple[int, int, LeaseSpans]]:
    """Of each lease that was asked for: its tokens, the blocks that its promise reaches."""
    return [
        (lease.tokens, reach, spans_of(lease.retention, table.started_s, now_s))
        for lease, reach in table.asked
    ]


def _outcome(granted: int, covers: int) -> Literal["granted", "clipped", "refused"]:
    if granted == covers:
        return "granted"
    return "clipped" if granted else "refused"
