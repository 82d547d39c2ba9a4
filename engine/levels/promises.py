"""Promises that a level below the device keeps: when a promise moves down, back up, and ends.

The lowest durable level keeps promises: the disk, else host memory where the configuration says
that it is good enough. A block's promise moves down when its copy is there and the level has said
until when it keeps it; from then on the device may evict the block. A copy that keeps a promise is
not given up for room. What the level loses all the same returns to the device where its block still
is and there is room, else it is told as lost, once.

A copy keeps the promise of its run, and those of the run's window blocks where it has the blocks
of all groups. These move down before the run's does, which else stays; they end, return and are
lost each by itself, since a run's promise may return to the device while its window blocks are
gone from there.

The disk is told of a promise's end when it moves, at the latest a while before the end that it
knows; the slot table is, too. From there the next engine takes promises over (`take_over`), charges
them to their payers and keeps them. This module moves no bytes and reads no clock: callers pass
`now_s`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile
from operator import attrgetter
from typing import Final

from engine.api import LevelName, Namespace, Payer
from engine.cache import PrefixCache
from engine.cache.kept_below import FoundPromise, KeptWindows
from engine.cache.tree.accounts import NamespaceAccount
from engine.cache.tree.leases import BlockTerms, Deadlines
from engine.cache.tree.prefix_tree import Node, TreeBlock, WindowBlock, upward
from engine.errors import InvariantViolation
from engine.levels.copies import CopyBook
from engine.levels.stored_prefixes import Copy
from engine.levels.window_copies import WholeCopies, WindowCopies
from engine.moves import PromiseTerms, Renew, Renewed

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
RUN: Final = -1
"""In place of a window group: the promise of a run, for its block in KV group 0."""
FOREVER_S: Final = 10 * 365 * 86_400.0
"""What the disk is told of a promise or a limit without an end."""


class KeptPromises:
    """The promises of one level; implements `engine.cache.kept_below.KeptBelow`.

    `kept`: blocks whose promise the level keeps; `kept_by_payer`: by payer. `is_erasing`: what
    leaves the book of copies now leaves by an erasure.
    """

    def __init__(
        self,
        cache: PrefixCache,
        book: CopyBook,
        windows: WindowCopies,
        level: LevelName,
        next_id: Callable[[], int],
        send: Callable[[Renew], None],
    ) -> None:
        self.level = level
        self.kept = 0
        self.kept_by_payer: Counter[Payer] = Counter()
        self.is_erasing = False
        self.copy_again: Callable[[Node], None] = lambda node: None
        self.store_again: Callable[[Copy, float], None] = lambda copy, now_s: None
        self._cache, self._book, self._windows = cache, book, windows
        self._room = WholeCopies(book, windows, level)
        self._next_id, self._send = next_id, send
        self._ends: dict[Node, float] = {}
        self._due: Deadlines[Copy] = Deadlines()
        self._renewals: dict[int, tuple[list[Copy], Renew, float]] = {}
        self._renewing: set[Copy] = set()
        self._spared: list[tuple[TreeBlock, float, str]] = []
        """Blocks whose copies an erasure has taken, with their promises: it may not take them."""
        self._now_s = 0.0
        book.on_removed = self._removed
        book.on_lesser = self._lesser

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
        for copy in self._book.prefixes.along(namespace, tokens):
            terms = copy.terms
            is_live = terms is not None and min(terms.limit_at_s, terms.promise_at_s) > now_s
            found.append(terms if is_live else None)
        return found

    def adopt(self, account: NamespaceAccount, node: Node, now_s: float) -> BlockTerms | None:
        """See `KeptBelow`. The copy stands for the node from now on."""
        copy = self._copy_of(account, node)
        terms = None if copy is None else copy.terms
        return None if terms is None or terms.limit_at_s <= now_s else terms

    def windows_of(
        self, namespace: Namespace, tokens: Sequence[int], now_s: float
    ) -> list[KeptWindows]:
        """See `KeptBelow`."""
        found: list[KeptWindows] = []
        for copy in self._book.prefixes.along(namespace, tokens):
            if copy.is_over(now_s):
                break
            terms = [_live(one, now_s) for one in copy.window_terms]
            found.append(KeptWindows(terms, self._is_fixed(copy)))
        return found

    def adopt_window(
        self, account: NamespaceAccount, block: WindowBlock, now_s: float
    ) -> BlockTerms | None:
        """See `KeptBelow`."""
        assert block.parent is not None, "it has just entered the tree"
        copy = self._copy_of(account, block.parent)
        if copy is None or not copy.window_terms or copy.is_over(now_s):
            return None
        return copy.window_terms[block.group]

    def returned(self, node: Node) -> None:
        """See `KeptBelow`."""
        copy = self._book.of_node(node)
        if copy is not None:
            self._forget(copy, RUN)

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
        self._renew_moved(copies, now_s)

    def settle(self, node: Node, now_s: float) -> None:
        """Let the promises from a node upward move down, as far as they may, and tell the disk how
        far they have moved. O(these).
        """
        above: Node | None = node
        seen, kept = set[Node](), list[Copy]()
        while above is not None and above.promised and not above.promised_children:
            copy = self._book.of_node(above)
            if copy is None or not self._may_keep(copy, above, seen, now_s):
                self._ends.setdefault(above, now_s + RETRY_S)
                break
            for block in filter(None, above.beside or ()):
                if block.promised and self._cache.promises.keep_below(block):
                    self._keep(copy, block.group, block.terms)
                    self._book.terms_changed(copy)
            if is_kept := self._cache.promises.keep_below(above):
                self._keep(copy, RUN, above.terms)
                self._ends.pop(above, None)
                kept.append(copy)
            self._book.accounts.update(copy)
            self._watch(copy, now_s)
            above = above.parent if is_kept else None
        self._renew_moved(reversed(kept), now_s)

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
        ids, call_id = tuple(copy.record_id for copy in stored), self._next_id()
        told = Renew(call_id, stored[0].namespace, ids, limit_s, promise_s, lease_ids, terms)
        self._renewals[call_id] = stored, told, now_s + promise_s
        self._renewing.update(stored)
        self._send(told)

    def renewed(self, outcome: Renewed, now_s: float) -> None:
        """Take the outcome of a renewal."""
        found = self._renewals.pop(outcome.call_id, None)
        if found is None:
            return
        copies, told, until_s = found
        gone = set(outcome.gone)
        there: list[Copy] = []
        for copy, record_id in zip(copies, told.record_ids, strict=True):
            self._renewing.discard(copy)
            if copy.parent is None or copy.record_id != record_id or outcome.code:
                continue
            if record_id in gone:
                self._record_gone(copy)
            else:
                there.append(copy)
                if told.terms is not None:
                    copy.told_windows = told.terms.window_groups
        self.confirm(there, [until_s] * len(there), now_s)

    def take_over(
        self, copy: Copy, until_s: float, told: PromiseTerms | None, now_s: float
    ) -> None:
        """Keep the promise of a copy that an engine before has made, until then, and charge it to
        its payer; where the device promises the block already, that lasts as long. O(log copies).

        `told`: how it is counted and renewed, None where that is not known. What it hangs on is
        promised for as long.
        """
        for top in upward(copy):
            if self._end_of(top) >= until_s:
                break
            terms = _terms_of(told, until_s, max(top.limit_at_s, copy.limit_at_s))
            if min(until_s, terms.limit_at_s) <= now_s:
                return
            self._take_over(top, RUN, terms, now_s)
        if told is not None and self._windows.keeps_whole(copy):
            for group in range(len(self._cache.windows.windows)):
                if group in told.window_groups:
                    terms = _terms_of(told, until_s, math.inf)
                    self._take_over(copy, group, terms, now_s)

    def tell_all(self, now_s: float) -> None:
        """Tell the level what it does not know yet of the ends of promises: this engine ends.
        O(copies)."""
        moved = [copy for copy in self._book.prefixes if copy.record_id and self._knows_less(copy)]
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
        spared.sort(key=lambda one: isinstance(one[0], Node))
        for node, until_s, name in reversed(spared):  # those above first, then window blocks
            if node.parent is not None:
                self._cache.promises.promise_again(node, until_s, name, now_s)
        for node in self._cache.promises.take_fresh():
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
            for group, terms in _kept_by(copy):
                has_bytes = copy.slot >= 0 or copy.record_id != 0
                if group != RUN:
                    has_bytes = self._windows.keeps_whole(copy)
                if terms.below_class is None or not has_bytes:
                    raise InvariantViolation(f"a promise of {copy.run} that no copy keeps")
                kept += 1
                classes[copy.namespace, terms.below_class] += 1
                if _block_of(copy, group, terms) is None:
                    away += 1
                    gone[copy.namespace] += 1
        if kept != self.kept or kept != self.kept_by_payer.total():
            raise InvariantViolation(f"{self.kept} promises kept below, recounted: {kept}")
        for namespace, below, away_here in self._cache.promises.kept_below():
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

    def _copy_of(self, account: NamespaceAccount, node: Node) -> Copy | None:
        """Return the copy that has the tokens of a node, and link them. O(1)."""
        above = node.parent
        assert above is not None, "it is in the tree"
        parent = self._book.of_node(above)
        if not above.run:
            parent = self._book.prefixes.root(account.namespace)
        copy = None if parent is None else parent.children.get(node.run)
        if copy is not None:
            self._book.link(copy, node)
        return copy

    def _may_keep(self, copy: Copy, node: Node, seen: set[Node], now_s: float) -> bool:
        """Return whether a copy may keep the promises of a node and of its window blocks: these
        with those of all nodes above it whose window blocks are promised on the device, since a
        resume needs them all. `seen`: nodes that were looked at; it adds to them. O(these).
        """
        if not self._is_durable(copy, now_s) or not self._room.may_keep(copy):
            return False
        above: Node | None = node
        while above is not None and above not in seen and _has_promised_windows(above):
            one = self._book.of_node(above)
            if one is None or not self._is_durable(one, now_s):
                return False
            if not self._windows.keeps_whole(one, self.level):
                return False
            seen.add(above)
            above = above.parent
        return True

    def _is_fixed(self, copy: Copy) -> bool:
        """Return whether a copy stays without window blocks: a record is not exchanged."""
        has_record = self.level == "disk" and copy.record_id != 0
        return has_record and not self._windows.keeps_whole(copy, "disk")

    def _keep(self, copy: Copy, group: int, terms: BlockTerms | None) -> None:
        """Note that a copy keeps the promise of its run (`RUN`), or of its window block."""
        if group == RUN:
            copy.terms = terms
        else:
            kept = list(copy.window_terms) or [None] * len(self._cache.windows.windows)
            assert kept[group] is None, "a window block adopts what its copy keeps"
            kept[group] = terms
            copy.window_terms = kept
        self.kept += 1
        self.kept_by_payer[copy.payer] += 1
        self._room.keep(copy)

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
        if self._windows.lacks(copy, node):
            self.copy_again(node)
        self._book.sync(copy, node)
        self.settle(node, now_s)
        if not node.promised or self.level == "host":
            return
        if not copy.record_id:
            self.store_again(copy, now_s)
            return
        copies: list[Copy] = []
        for above in takewhile(attrgetter("promised"), upward(node)):
            one = self._book.of_node(above)
            if one is not None and one.kept_until_s <= now_s and one not in self._renewing:
                self._book.sync(one, above)
                copies.append(one)
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

    def _renew_moved(self, copies: Iterable[Copy], now_s: float) -> None:
        """Renew those copies on disk whose promise has moved since the disk was told of it."""
        if self.level == "disk":
            there = [copy for copy in copies if copy.parent is not None]
            self._renew_each([copy for copy in there if self._has_moved(copy, now_s)], now_s)

    def _has_moved(self, copy: Copy, now_s: float) -> bool:
        if copy.terms is None or copy in self._renewing:
            return False
        if copy.record_id and _lacks_windows(copy):
            return True
        told_s = copy.kept_until_s if copy.record_id else copy.promise_at_s
        promise_at_s = min(copy.terms.promise_at_s, now_s + FOREVER_S / 2)
        return promise_at_s - told_s > RENEWED_PART * max(0.0, told_s - now_s)

    def _knows_less(self, copy: Copy) -> bool:
        """Return whether the disk keeps a record for less long than is promised, or was not told of
        all that is. O(groups).
        """
        if self.level == "host":
            return False
        known_s = copy.kept_until_s + CLOCK_SLACK_S
        return _lacks_windows(copy) or any(
            min(terms.promise_at_s, self._now_s + FOREVER_S / 2) > known_s
            for _, terms in _kept_by(copy)
        )

    def _end_of(self, copy: Copy) -> float:
        """Return until when a copy is promised, here or on the device."""
        terms, node = copy.terms, copy.node
        if terms is None and node is not None and node.parent is not None and node.promised:
            terms = node.terms
        return -math.inf if terms is None else terms.promise_at_s

    def _take_over(self, copy: Copy, group: int, terms: BlockTerms, now_s: float) -> None:
        block: TreeBlock | None = self._book.find_node(copy)
        known = copy.terms
        if group != RUN:
            block = block.beside[group] if isinstance(block, Node) and block.beside else None
            known = copy.window_terms[group] if copy.window_terms else None
        found = FoundPromise(copy.namespace, copy.payer, terms, known, block)
        if self._cache.promises.take_over(found, now_s):
            self._keep(copy, group, terms)
        self._book.note_promise(copy)
        if copy.keeps_promise:
            self._book.accounts.update(copy)
            self._watch(copy, now_s)

    def _watch(self, copy: Copy, now_s: float) -> None:
        """Have a kept promise examined when it may end, or has to be renewed on disk."""
        kept = [terms for _, terms in _kept_by(copy)]
        if copy.has_promise_deadline or not kept:
            return
        due_s = min(terms.promise_at_s for terms in kept)
        if self.level == "disk":
            if copy.record_id and copy.renew_at_s > now_s:
                due_s = min(due_s, copy.renew_at_s)
            elif not copy.record_id or self._knows_less(copy):
                due_s = min(due_s, now_s + RETRY_S)
        if due_s < math.inf:
            copy.has_promise_deadline = True
            self._due.add(due_s, copy)

    def _end_overdue(self, now_s: float) -> None:
        """End the kept promises whose time is over; renew on disk those that go on."""
        renewed: list[Copy] = []
        for copy in self._due.take_due(now_s):
            copy.has_promise_deadline = False
            if copy.parent is None:
                continue
            for group, terms in _kept_by(copy):
                block = _block_of(copy, group, terms)
                if block is not None and self._cache.promises.is_in_use(block):
                    terms.hold_promise(now_s)
                if terms.promise_at_s <= now_s:
                    self._end(copy, group, terms)
            if not copy.keeps_promise:
                continue
            kept = [terms for _, terms in _kept_by(copy)]
            if self.level == "disk" and not copy.record_id:
                ends = [copy.promise_at_s, *(terms.promise_at_s for terms in kept)]
                copy.promise_at_s = max(ends)
                self.store_again(copy, now_s)
            elif self._knows_less(copy) and copy not in self._renewing:
                renewed.append(copy)
            self._watch(copy, now_s)
        self._renew_each(renewed, now_s)

    def _end(self, copy: Copy, group: int, terms: BlockTerms) -> None:
        """End a kept promise whose time is over."""
        self._forget(copy, group)
        if group == RUN and terms.limit_at_s > copy.limit_at_s:
            self._book.prefixes.set_limit(copy, terms.limit_at_s)
        is_away = _block_of(copy, group, terms) is None
        self._cache.promises.end_below(copy.namespace, terms, is_away=is_away)

    def _record_gone(self, copy: Copy) -> None:
        """The disk has lost a record."""
        self._book.set_record(copy, 0)
        copy.kept_until_s = -math.inf
        if copy.slot < 0:
            self._book.prefixes.remove(copy)
        elif copy.terms is not None:
            copy.promise_at_s = max(copy.promise_at_s, copy.terms.promise_at_s)
            self.store_again(copy, self._now_s)

    def _removed(self, copy: Copy) -> None:
        """A copy has left the book: its promises return to the device, or end."""
        for group, terms in _kept_by(copy):  # its run's first: those of window blocks stand on it
            self._lost(copy, group, terms)

    def _lesser(self, copy: Copy) -> None:
        """A copy has lost its slot or its record: with the blocks of all groups go the promises of
        its window blocks."""
        if not self._windows.keeps_whole(copy):
            for group, terms in _kept_by(copy):
                if group != RUN:
                    self._lost(copy, group, terms)

    def _lost(self, copy: Copy, group: int, terms: BlockTerms) -> None:
        self._forget(copy, group)
        if terms.below_class is None:
            return  # it returned with one of a block under it
        limit_at_s = terms.limit_at_s if group == RUN else copy.limit_at_s
        is_over = self.is_erasing or min(terms.promise_at_s, limit_at_s) <= self._now_s
        block = _block_of(copy, group, terms)
        if block is not None and not is_over and self._cache.promises.take_back(block):
            return
        until_s, name = terms.promise_at_s, terms.promised_class
        is_away = block is None
        self._cache.promises.end_below(copy.namespace, terms, is_away=is_away, is_lost=not is_over)
        if self.is_erasing and block is not None:
            terms.end_promise()
            self._spared.append((block, until_s, name))

    def _forget(self, copy: Copy, group: int) -> None:
        """Note that a copy keeps the promise of its run, or of its window block, no more."""
        if group == RUN:
            if copy.terms is None:
                return
            copy.terms = None
        else:
            kept = [None if at == group else one for at, one in enumerate(copy.window_terms)]
            copy.window_terms = kept if any(kept) else ()
        self.kept -= 1
        self.kept_by_payer[copy.payer] -= 1
        if not self.kept_by_payer[copy.payer]:
            del self.kept_by_payer[copy.payer]
        if not copy.keeps_promise:
            self._room.forget(copy)
        if copy.parent is not None:
            self._book.accounts.update(copy)


def _kept_by(copy: Copy) -> list[tuple[int, BlockTerms]]:
    """Return the promises that a copy keeps: of its run (`RUN`), and by group of window blocks."""
    found: list[tuple[int, BlockTerms]] = [] if copy.terms is None else [(RUN, copy.terms)]
    if copy.window_terms:
        found += [(group, one) for group, one in enumerate(copy.window_terms) if one is not None]
    return found


def _lacks_windows(copy: Copy) -> bool:
    """Return whether the disk was not told of a window block whose promise a copy keeps with that
    of its run.
    """
    return copy.terms is not None and any(
        group != RUN and group not in copy.told_windows for group, _ in _kept_by(copy)
    )


def _has_promised_windows(node: Node) -> bool:
    """Return whether the device keeps the promise of a window block of a node."""
    return any(one is not None and one.promised for one in node.beside or ())


def _live(terms: BlockTerms | None, now_s: float) -> BlockTerms | None:
    """Return the terms of a kept promise, None where it is over."""
    return None if terms is None or terms.promise_at_s <= now_s else terms


def _block_of(copy: Copy, group: int, terms: BlockTerms) -> TreeBlock | None:
    """Return the device's block of which a copy keeps the promise, None where it is gone."""
    node = copy.node
    if node is None or node.parent is None:
        return None
    block: TreeBlock | None = node
    if group != RUN:
        block = None if node.beside is None else node.beside[group]
    return block if block is not None and block.terms is terms else None


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
