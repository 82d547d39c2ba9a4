"""Promises that a level below the device keeps: when a promise moves down, back up, and ends.

The lowest durable level keeps promises: the disk, else host memory where the configuration says
that it is good enough. A block's promise moves down when its copy is there and the level has said
until when it keeps it; from then on the device may evict the block. A copy that keeps a promise is
not given up for room. What the level loses all the same returns to the device where its block still
is and there is room, else it is told as lost, once.

The disk is told of a promise's end when it moves, at the latest a while before the end that it
knows; the slot table is, too. From there the next engine takes promises over (`take_over`), charges
them to their payers and keeps them. This module moves no bytes and reads no clock: callers pass
`now_s`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from engine.api import LevelName, Namespace, Payer
from engine.cache import PrefixCache
from engine.cache.kept_below import FoundPromise
from engine.cache.tree.accounts import NamespaceAccount
from engine.cache.tree.leases import BlockTerms, Deadlines
from engine.cache.tree.prefix_tree import Node
from engine.errors import InvariantViolation
from engine.levels.copies import CopyBook
from engine.levels.stored_prefixes import Copy
from engine.moves import PromiseTerms, RecordId, Renew, Renewed

RENEWED_PART: Final = 1 / 8
"""A promise is renewed on disk when it has moved by this part of what was left of it."""
AHEAD_PART: Final = 1 / 4
AHEAD_S_MAX: Final = 30.0
"""How long before the end that the disk knows a promise is renewed there: a part of what was left,
and no longer than this."""
RETRY_S: Final = 1.0
"""Seconds until what did not reach the level is tried again."""
ENDS_MAX: Final = 64
"""Promised paths that one turn tries again."""
CLOCK_SLACK_S: Final = 0.01
"""Seconds by which the disk may round a time."""
UNKNOWN_CLASS: Final = "unknown"
"""The class of a promise of which a level knows the end alone."""
FOREVER_S: Final = 10 * 365 * 86_400.0
"""What the disk is told of a promise or a limit without an end."""


class KeptPromises:
    """The promises of one level; implements `engine.cache.kept_below.KeptBelow`.

    `kept`: blocks whose promise the level keeps; `kept_by_payer`: by payer. `lost_total`: promises
    that it lost. `is_erasing`: what leaves the book of copies now leaves by an erasure.
    `is_keeping` False: promises stay on the device, and the level is told of them alone.
    """

    def __init__(
        self,
        cache: PrefixCache,
        book: CopyBook,
        level: LevelName,
        next_id: Callable[[], int],
        send: Callable[[Renew], None],
    ) -> None:
        self.level = level
        self.kept = self.lost_total = 0
        self.kept_by_payer: Counter[Payer] = Counter()
        self.is_erasing = False
        self.is_keeping = True
        self.copy_again: Callable[[Node], None] = lambda node: None
        self.store_again: Callable[[Copy], None] = lambda copy: None
        self._cache, self._book = cache, book
        self._next_id, self._send = next_id, send
        self._ends: dict[Node, float] = {}
        self._due: Deadlines[Copy] = Deadlines()
        self._renewals: dict[int, tuple[list[Copy], list[RecordId], float]] = {}
        self._renewing: set[Copy] = set()
        self._spared: list[tuple[Node, float, str]] = []
        """Nodes whose copies an erasure has taken, with their promises: it may not take them."""
        self._now_s = 0.0
        book.on_removed = self._removed

    @property
    def renewals(self) -> int:
        """Return the renewals that the disk has not answered."""
        return len(self._renewals)

    @property
    def has_ends(self) -> bool:
        """Return whether any promise on the device waits to move down."""
        return bool(self._ends)

    # -- what the cache asks ------------------------------------------------------------------

    def terms_of(
        self, namespace: Namespace, tokens: Sequence[int], now_s: float
    ) -> list[BlockTerms | None]:
        """See `KeptBelow`."""
        found: list[BlockTerms | None] = []
        children = self._book.prefixes.root(namespace).children
        for run in zip(*[iter(tokens)] * self._cache.block_size, strict=False):
            copy = children.get(run)
            if copy is None:
                break
            terms = copy.terms
            is_live = terms is not None and min(terms.limit_at_s, terms.promise_at_s) > now_s
            found.append(terms if is_live else None)
            children = copy.children
        return found

    def adopt(self, account: NamespaceAccount, node: Node, now_s: float) -> BlockTerms | None:
        """See `KeptBelow`. The copy stands for the node from now on."""
        above = node.parent
        assert above is not None, "it has just entered the tree"
        parent = self._book.of_node(above)
        if not above.run:
            parent = self._book.prefixes.root(account.namespace)
        copy = None if parent is None else parent.children.get(node.run)
        if copy is None:
            return None
        self._book.link(copy, node)
        is_over = copy.terms is None or copy.terms.limit_at_s <= now_s
        return None if is_over else copy.terms

    def returned(self, node: Node) -> None:
        """See `KeptBelow`."""
        copy = self._book.of_node(node)
        if copy is not None:
            self._forget(copy)

    # -- what became of copies ----------------------------------------------------------------

    def confirm(self, copies: Sequence[Copy], until_s: Sequence[float], now_s: float) -> None:
        """Note until when the level keeps each of these copies, from the root on; let their
        promises move down.
        """
        for copy, until in zip(copies, until_s, strict=True):
            if until > copy.kept_until_s:
                copy.kept_until_s = until
                copy.renew_at_s = until - min(AHEAD_S_MAX, AHEAD_PART * max(0.0, until - now_s))
        for copy in reversed(copies):
            if copy.node is not None and copy.parent is not None:
                self.settle(copy.node, now_s)

    def settle(self, node: Node, now_s: float) -> None:
        """Let the promises from a node upward move down, as far as they may. O(these)."""
        above: Node | None = node if self.is_keeping else None
        while above is not None and above.promised and not above.promised_children:
            copy = self._book.of_node(above)
            if copy is None or not self._is_durable(copy, now_s):
                return
            if not self._cache.keep_below(above):
                return
            copy.terms = above.terms
            self.kept += 1
            self.kept_by_payer[copy.payer] += 1
            self._book.accounts.update(copy)
            self._watch(copy, now_s)
            self._ends.pop(above, None)
            above = above.parent

    def renew(
        self,
        copies: Iterable[Copy],
        promise_at_s: float,
        limit_at_s: float,
        now_s: float,
        lease_ids: tuple[str, ...] = (),
        terms: PromiseTerms | None = None,
    ) -> None:
        """Tell the disk that records are used and promised until then. `copies`: of one
        namespace. `terms`: None where the disk knows them.
        """
        stored = [copy for copy in copies if copy.record_id and copy.parent is not None]
        if not stored:
            return
        promise_s = min(FOREVER_S, max(0.0, promise_at_s - now_s))
        limit_s = min(FOREVER_S, max(0.0, limit_at_s - now_s))
        ids, call_id = [copy.record_id for copy in stored], self._next_id()
        self._renewals[call_id] = stored, ids, now_s + promise_s
        self._renewing.update(stored)
        namespace = stored[0].namespace
        self._send(Renew(call_id, namespace, tuple(ids), limit_s, promise_s, lease_ids, terms))

    def renewed(self, outcome: Renewed, now_s: float) -> None:
        """Take the outcome of a renewal."""
        found = self._renewals.pop(outcome.call_id, None)
        if found is None:
            return
        copies, ids, until_s = found
        gone = set(outcome.gone)
        there: list[Copy] = []
        for copy, record_id in zip(copies, ids, strict=True):
            self._renewing.discard(copy)
            if copy.parent is None or copy.record_id != record_id or outcome.code:
                continue
            if record_id in gone:
                self._record_gone(copy)
            else:
                there.append(copy)
        self.confirm(there, [until_s] * len(there), now_s)

    def take_over(
        self, copy: Copy, until_s: float, told: PromiseTerms | None, now_s: float
    ) -> None:
        """Keep the promise of a copy that an engine before has made, until then, and charge it to
        its payer; where the device promises the block already, that lasts as long. O(log copies).

        `told`: how it is counted and renewed, None where that is not known. What it hangs on is
        promised for as long.
        """
        top: Copy | None = copy
        while top is not None and not top.is_root and self._end_of(top) < until_s:
            terms = _terms_of(told, until_s, max(top.limit_at_s, copy.limit_at_s))
            if min(until_s, terms.limit_at_s) <= now_s:
                return
            self._take_over(top, terms, now_s)
            top = top.parent

    def tell_all(self, now_s: float) -> None:
        """Tell the level what it does not know yet of the ends of promises: this engine ends.
        O(copies)."""
        moved = [
            copy
            for copy in self._book.prefixes
            if copy.terms is not None and copy.record_id and self._is_short(copy, copy.terms)
        ]
        self._renew_each(reversed(moved), now_s)

    def read(self, node: Node, now_s: float) -> None:
        """Renew on the level what a read up to `node` has renewed here. O(1), or O(depth) if much
        has moved since.
        """
        copies: list[Copy] = []
        above: Node | None = node
        while above is not None and (copy := self._book.of_node(above)) is not None:
            if not self._has_moved(copy, now_s):
                break
            copies.append(copy)
            above = above.parent
        for copy in copies:
            self._book.note_promise(copy)
        self._renew_each(reversed(copies), now_s)

    def level_gone(self) -> None:
        """Give up everything that only the disk has: it has been away for too long. O(copies)."""
        for copy in list(self._book.prefixes):
            if copy.parent is not None and copy.record_id:
                self._record_gone(copy)

    # -- turns --------------------------------------------------------------------------------

    def turn(self, now_s: float) -> None:
        """Take note of new promises, end those that are over, and try again what did not reach the
        level.
        """
        self._now_s = now_s
        self._cache.expire(now_s)
        spared, self._spared = self._spared, []
        for node, until_s, name in reversed(spared):  # those above first
            if node.parent is not None:
                self.lost_total += not self._cache.promise_again(node, until_s, name, now_s)
        for node in self._cache.take_promised():
            if node.parent is not None and node.promised and not node.promised_children:
                self._ends[node] = now_s + RETRY_S
                if self._book.of_node(node) is not None:
                    self._push(node, now_s)
        self._end_overdue(now_s)
        for node in list(islice(self._ends, ENDS_MAX)):
            if self._ends.get(node, math.inf) > now_s:
                break
            del self._ends[node]
            if node.parent is not None and node.promised and not node.promised_children:
                self._ends[node] = now_s + RETRY_S
                self._push(node, now_s)

    def check(self) -> None:
        """Recount. Raises InvariantViolation. O(copies)."""
        kept = away = 0
        classes: Counter[tuple[Namespace, str]] = Counter()
        gone: Counter[Namespace] = Counter()
        for copy in self._book.prefixes:
            terms = copy.terms
            if terms is None:
                continue
            if terms.below_class is None or (copy.slot < 0 and not copy.record_id):
                raise InvariantViolation(f"a promise of {copy.run} that no copy keeps")
            kept += 1
            classes[copy.namespace, terms.below_class] += 1
            if not _is_here(copy, terms):
                away += 1
                gone[copy.namespace] += 1
        if kept != self.kept or kept != self.kept_by_payer.total():
            raise InvariantViolation(f"{self.kept} promises kept below, recounted: {kept}")
        for namespace, below, away_here in self._cache.promises_below():
            own = {name: n for (space, name), n in classes.items() if space == namespace}
            if own != below or gone[namespace] != away_here:
                found = f"{own}, {gone[namespace]} away"
                raise InvariantViolation(
                    f"{namespace!r}: {below} promised below, {away_here} away, recounted: {found}"
                )
            kept -= sum(own.values())
        if kept:
            raise InvariantViolation(f"{kept} promises kept below of namespaces without an account")

    # -- internals ----------------------------------------------------------------------------

    def _is_durable(self, copy: Copy, now_s: float) -> bool:
        if self.level == "host":
            return copy.slot >= 0
        return copy.record_id != 0 and copy.kept_until_s > now_s

    def _push(self, node: Node, now_s: float) -> None:
        """Do what is next for the promise of a path to move down."""
        copy = self._book.of_node(node)
        if copy is None:
            self.copy_again(node)
            return
        self._book.sync(copy, node)
        self.settle(node, now_s)
        if not node.promised or self.level == "host":
            return
        if not copy.record_id:
            self.store_again(copy)
            return
        copies: list[Copy] = []
        above: Node | None = node
        while above is not None and above.promised:
            one = self._book.of_node(above)
            if one is not None and one.kept_until_s <= now_s and one not in self._renewing:
                self._book.sync(one, above)
                copies.append(one)
            above = above.parent
        self._renew_each(reversed(copies), now_s)

    def _renew_each(self, copies: Iterable[Copy], now_s: float) -> None:
        """Renew copies, those with the same times in one command."""
        groups: dict[tuple[Namespace, float, float, PromiseTerms | None], list[Copy]] = {}
        for copy in copies:
            terms = copy.terms
            if terms is None and copy.node is not None:
                terms = copy.node.terms
            if terms is not None:
                times = terms.promise_at_s, terms.limit_at_s
                key = copy.namespace, *times, copy.promise_terms()
                groups.setdefault(key, []).append(copy)
        for (_, promise_at_s, limit_at_s, told), some in groups.items():
            self.renew(some, promise_at_s, limit_at_s, now_s, terms=told)

    def _has_moved(self, copy: Copy, now_s: float) -> bool:
        if copy.terms is None or copy in self._renewing:
            return False
        told_s = copy.kept_until_s if copy.record_id else copy.promise_at_s
        return copy.terms.promise_at_s - told_s > RENEWED_PART * max(0.0, told_s - now_s)

    def _is_short(self, copy: Copy, terms: BlockTerms) -> bool:
        """Return whether the disk keeps a record for less long than is promised."""
        if self.level == "host":
            return False
        promise_at_s = min(terms.promise_at_s, self._now_s + FOREVER_S / 2)
        return promise_at_s > copy.kept_until_s + CLOCK_SLACK_S

    def _end_of(self, copy: Copy) -> float:
        """Return until when a copy is promised, here or on the device."""
        terms, node = copy.terms, copy.node
        if terms is None and node is not None and node.parent is not None and node.promised:
            terms = node.terms
        return -math.inf if terms is None else terms.promise_at_s

    def _take_over(self, copy: Copy, terms: BlockTerms, now_s: float) -> None:
        node = self._book.find_node(copy)
        found = FoundPromise(copy.namespace, copy.payer, terms, copy.terms, node)
        if self._cache.take_over(found, now_s):
            copy.terms = terms
            self.kept += 1
            self.kept_by_payer[copy.payer] += 1
        self._book.note_promise(copy)
        if copy.terms is not None:
            self._book.accounts.update(copy)
            self._watch(copy, now_s)

    def _watch(self, copy: Copy, now_s: float) -> None:
        """Have a kept promise examined when it may end, or has to be renewed on disk."""
        assert copy.terms is not None, "it keeps a promise"
        if copy.has_promise_deadline:
            return
        due_s = copy.terms.promise_at_s
        if self.level == "disk":
            if copy.record_id and copy.renew_at_s > now_s:
                due_s = min(due_s, copy.renew_at_s)
            elif not copy.record_id or self._is_short(copy, copy.terms):
                due_s = min(due_s, now_s + RETRY_S)
        if due_s < math.inf:
            copy.has_promise_deadline = True
            self._due.add(due_s, copy)

    def _end_overdue(self, now_s: float) -> None:
        """End the kept promises whose time is over; renew on disk those that go on."""
        renewed: list[Copy] = []
        for copy in self._due.take_due(now_s):
            copy.has_promise_deadline = False
            terms = copy.terms
            if terms is None or copy.parent is None:
                continue
            node = copy.node
            if node is not None and _is_here(copy, terms) and self._cache.is_in_use(node):
                terms.hold_promise(now_s)
            if terms.promise_at_s <= now_s:
                self._forget(copy)
                if terms.limit_at_s > copy.limit_at_s:
                    self._book.prefixes.set_limit(copy, terms.limit_at_s)
                is_away = not _is_here(copy, terms)
                self._cache.end_below(copy.namespace, terms, is_away=is_away)
                continue
            if self.level == "disk" and not copy.record_id:
                copy.promise_at_s = max(copy.promise_at_s, terms.promise_at_s)
                self.store_again(copy)
            elif self._is_short(copy, terms) and copy not in self._renewing:
                renewed.append(copy)
            self._watch(copy, now_s)
        self._renew_each(renewed, now_s)

    def _record_gone(self, copy: Copy) -> None:
        """The disk has lost a record."""
        self._book.set_record(copy, 0)
        copy.kept_until_s = -math.inf
        if copy.slot < 0:
            self._book.prefixes.remove(copy)
        elif copy.terms is not None:
            copy.promise_at_s = max(copy.promise_at_s, copy.terms.promise_at_s)
            self.store_again(copy)

    def _removed(self, copy: Copy) -> None:
        """A copy has left the book: its promise returns to the device, or ends."""
        terms = copy.terms
        if terms is None:
            return
        self._forget(copy)
        if terms.below_class is None:
            return  # it returned with one of a block under it
        is_over = self.is_erasing or min(terms.promise_at_s, terms.limit_at_s) <= self._now_s
        is_here = _is_here(copy, terms)
        node = copy.node
        can_return = is_here and node is not None and not is_over
        if can_return and node is not None and self._cache.take_back(node, self._now_s):
            return
        self.lost_total += not is_over
        until_s, name = terms.promise_at_s, terms.promised_class
        self._cache.end_below(copy.namespace, terms, is_away=not is_here, is_lost=not is_over)
        if self.is_erasing and is_here and node is not None:
            terms.end_promise()
            self._spared.append((node, until_s, name))

    def _forget(self, copy: Copy) -> None:
        """Note that a copy keeps no promise any more."""
        if copy.terms is None:
            return
        copy.terms = None
        self.kept -= 1
        self.kept_by_payer[copy.payer] -= 1
        if not self.kept_by_payer[copy.payer]:
            del self.kept_by_payer[copy.payer]
        if copy.parent is not None:
            self._book.accounts.update(copy)


def _is_here(copy: Copy, terms: BlockTerms) -> bool:
    """Return whether the device has the block of a copy that keeps a promise."""
    node = copy.node
    return node is not None and node.parent is not None and node.terms is terms


def _terms_of(told: PromiseTerms | None, until_s: float, limit_at_s: float) -> BlockTerms:
    """Return the terms of a promise that an engine before has made."""
    terms = BlockTerms(limit_at_s)
    if told is None:
        terms.extend_promise(until_s, UNKNOWN_CLASS)
        return terms
    terms.extend_promise(until_s, told.name)
    terms.renew_class, terms.use_class = told.renew_name, told.use_name
    terms.renew_limit_s, terms.renew_promise_s = told.renew_limit_s, told.renew_promise_s
    terms.use_limit_s, terms.use_promise_s = told.use_limit_s, told.use_promise_s
    return terms
