"""Promises that a level below the device keeps: how they get there, and what the level is told.

The lowest durable level keeps promises: the disk, else host memory where the configuration says
that it is good enough. A promise binds its block to the device until a place there is durable: a
slot of host memory, or a record of which the disk has said until when it keeps it. From then on the
device may evict the block, and a place that keeps a promise is not given up for room. The cache
counts, renews and ends promises; this module says which place is durable, has places made for what
is bound, and tells the disk of a promise's end when that moves, at the latest a while before the
end that it knows. From the disk and the slot table the next engine takes promises over
(`take_over`). It moves no bytes and reads no clock: callers pass `now_s`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile
from typing import Final

from engine.api import LevelName, Namespace
from engine.cache import PrefixCache
from engine.cache.block_promises import is_end
from engine.cache.blocks.block_manager import PROMISABLE
from engine.cache.tree.leases import Deadlines
from engine.cache.tree.prefix_tree import Node, TreeBlock, all_blocks, upward
from engine.errors import InvariantViolation
from engine.levels.places import RunPlaces
from engine.levels.promise_terms import terms_of, told_terms
from engine.levels.window_copies import WindowCopies
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
FOREVER_S: Final = 10 * 365 * 86_400.0
"""What the disk is told of a promise or a limit without an end."""


class KeptPromises:
    """The promises of one level."""

    def __init__(
        self,
        cache: PrefixCache,
        places: RunPlaces,
        windows: WindowCopies,
        level: LevelName,
        next_id: Callable[[], int],
        send: Callable[[Renew], None],
    ) -> None:
        self.level = level
        self.copy_again: Callable[[Node], None] = lambda node: None
        self.store_again: Callable[[Node], None] = lambda node: None
        self._cache, self._places, self._windows = cache, places, windows
        self._next_id, self._send = next_id, send
        self._ends: dict[Node, float] = {}
        self._due: Deadlines[Node] = Deadlines()
        self._renewals: dict[int, tuple[list[Node], Renew, float]] = {}
        self._renewing: set[Node] = set()
        self._watched: set[Node] = set()
        self._whole: dict[Node, int] = {}
        self._whole_bytes = 0
        self._now_s = 0.0

    @property
    def renewals(self) -> int:
        """Return the renewals that the disk has not answered."""
        return len(self._renewals)

    @property
    def has_ends(self) -> bool:
        """Return whether any promise waits for a durable place."""
        return bool(self._ends)

    # -- which place is durable ---------------------------------------------------------------

    def may_leave(self, block: TreeBlock) -> bool:
        """Return whether a place of this level keeps the promise of a block; that of a window block
        with those of all nodes above it whose window blocks are bound to the device, since a resume
        needs them all. O(these).
        """
        node: Node | None = block if isinstance(block, Node) else block.parent
        if node is None or not self._is_durable(node) or not self._has_room(node):
            return False
        while node is not None and _binds_windows(node):
            if not self._is_durable(node) or not self._windows.keeps_whole(node, self.level):
                return False
            node = node.parent
        return True

    def is_fixed(self, node: Node) -> bool:
        """Return whether a place stays without window blocks: a record is not exchanged."""
        record = node.record
        return self.level == "disk" and record is not None and not record.has_windows

    def changed(self, node: Node) -> None:
        """Take note that a promise of a node, or a place, has come, has gone, or that it is bound
        otherwise. O(log nodes)."""
        if node.host is not None:
            self._places.accounts.update(node)
            if self._places.notes is not None:
                self._places.notes.terms_moved(node)
        self._count_room(node)
        self._watch(node, self._now_s)

    # -- what became of places ----------------------------------------------------------------

    def confirm(self, nodes: Sequence[Node], until_s: Sequence[float], now_s: float) -> None:
        """Note until when the level keeps each of these nodes, from the root on; let go what their
        promises bind to the device.
        """
        for node, until in zip(nodes, until_s, strict=True):
            record = node.record
            if record is not None and until > record.kept_until_s:
                record.kept_until_s = until
                ahead_s = min(AHEAD_S_MAX, AHEAD_PART * max(0.0, until - now_s))
                record.renew_at_s = until - ahead_s
        for node in reversed(nodes):
            if node.parent is not None:
                self.settle(node, now_s)
                self._watch(node, now_s)
        self._renew_moved(nodes, now_s)

    def settle(self, node: Node, now_s: float) -> None:
        """Let a node go from the device, and those above it, as far as they may, and tell the disk
        how far their promises have moved. O(these).
        """
        if not node.is_bound:
            return
        waiting = self._cache.promises.settle(node)
        if waiting is not None:
            self._ends.setdefault(waiting, now_s + RETRY_S)
        kept = list(takewhile(lambda one: not one.is_bound, upward(node)))
        for one in kept:
            self._ends.pop(one, None)
        self._renew_moved(reversed(kept), now_s)

    def renew(
        self,
        nodes: Iterable[Node],
        promise_at_s: float,
        limit_at_s: float,
        now_s: float,
        lease_ids: tuple[str, ...] = (),
        terms: PromiseTerms | None = None,
    ) -> None:
        """Tell the disk that records are used and promised until then. `nodes`: of one namespace.
        `terms`: None where the disk knows them.
        """
        stored = [node for node in nodes if node.record is not None and node.parent is not None]
        if not stored:
            return
        promise_s = min(FOREVER_S, max(0.0, promise_at_s - now_s))
        limit_s = min(FOREVER_S, max(0.0, limit_at_s - now_s))
        ids, call_id = tuple(node.record_id for node in stored), self._next_id()
        told = Renew(call_id, stored[0].namespace, ids, limit_s, promise_s, lease_ids, terms)
        self._renewals[call_id] = stored, told, now_s + promise_s
        self._renewing.update(stored)
        self._send(told)

    def renewed(self, outcome: Renewed, now_s: float) -> None:
        """Take the outcome of a renewal."""
        found = self._renewals.pop(outcome.call_id, None)
        if found is None:
            return
        nodes, told, until_s = found
        gone = set(outcome.gone)
        there: list[Node] = []
        for node, record_id in zip(nodes, told.record_ids, strict=True):
            self._renewing.discard(node)
            record = node.record
            if node.parent is None or record is None or record.record_id != record_id:
                continue
            if outcome.code:
                continue
            if record_id in gone:
                self._record_gone(node)
            else:
                there.append(node)
                if told.terms is not None:
                    record.told_windows = told.terms.window_groups
        self.confirm(there, [until_s] * len(there), now_s)

    def take_over(
        self, node: Node, until_s: float, told: PromiseTerms | None, now_s: float
    ) -> None:
        """Keep the promise of a node that an engine before has made, until then, and charge it to
        its payer; where it is promised already, that lasts as long. O(log nodes).

        `told`: how it is counted and renewed, None where that is not known. What is above it is
        promised for as long.
        """
        for top in upward(node):
            if top.promised and top.terms is not None and top.terms.promise_at_s >= until_s:
                break
            terms = terms_of(told, until_s, max(top.limit_at_s, node.limit_at_s))
            if min(until_s, terms.limit_at_s) <= now_s:
                return
            self._cache.promises.take_over(top, terms, now_s)
        if told is not None and self._windows.keeps_whole(node):
            for group in range(len(self._cache.windows.windows)):
                if group in told.window_groups and until_s > now_s:
                    block = self._cache.window_block(node, group, now_s)
                    self._cache.promises.take_over(block, terms_of(told, until_s, math.inf), now_s)

    def tell_all(self, now_s: float) -> None:
        """Tell the level what it does not know yet of the ends of promises: this engine ends.
        O(nodes)."""
        moved = [
            node for node in self._places if node.record is not None and self._knows_less(node)
        ]
        self._renew_each(reversed(moved), now_s)

    def read(self, node: Node, now_s: float) -> None:
        """Renew on the level what a read up to `node` has renewed here. O(1), or O(depth) if much
        has moved since.
        """
        moved = list(takewhile(lambda one: self._has_moved(one, now_s), upward(node)))
        if self._places.notes is not None:
            for one in moved:
                self._places.notes.terms_moved(one)
        self._renew_each(reversed(moved), now_s)

    def level_gone(self) -> None:
        """Give up everything that only the disk has: it has been away for too long. O(nodes)."""
        for node in list(self._places):
            if node.parent is not None and node.record is not None:
                self._record_gone(node)

    # -- turns --------------------------------------------------------------------------------

    def turn(self, now_s: float) -> None:
        """Take note of new promises, and try again what did not reach the level."""
        self._now_s = now_s
        self._cache.expire(now_s)
        for node in self._cache.promises.take_fresh():
            if node.parent is not None and is_end(node):
                self._ends[node] = now_s + RETRY_S
                if node.is_copied:
                    self._push(node, now_s)
        self._renew_due(now_s)
        for node in list(islice(self._ends, ENDS_MAX)):
            if self._ends.get(node, math.inf) > now_s:
                break
            del self._ends[node]
            if node.parent is not None and is_end(node):
                self._ends[node] = now_s + RETRY_S
                self._push(node, now_s)

    def check(self) -> None:
        """Check that what is promised below has a place there. Raises InvariantViolation.
        O(nodes).
        """
        whole = 0
        for root in self._cache.roots():
            for node in root.subtree():
                for block in all_blocks(node):
                    keeps = node.is_copied
                    if not isinstance(block, Node):
                        keeps = self._windows.keeps_whole(node)
                    if block.promised_below and not keeps:
                        raise InvariantViolation(f"a promise of {node.run} that no place keeps")
                whole += self._whole.get(node, 0)
                if self._whole.get(node, 0) != self._room_of(node):
                    raise InvariantViolation(f"a place of {node.run} that keeps promises uncounted")
        if whole != self._whole_bytes:
            raise InvariantViolation(f"{self._whole_bytes} bytes keep promises, recounted: {whole}")

    # -- internals ----------------------------------------------------------------------------

    def _is_durable(self, node: Node) -> bool:
        if self.level == "host":
            return node.host is not None
        return node.record is not None and node.record.kept_until_s > self._now_s

    def _has_room(self, node: Node) -> bool:
        """Return whether there is room for a place to keep a promise. In host memory a copy of all
        groups takes a block's room in each until the promise of its run ends. So that floors of
        others keep their bytes, all that keep promises take no more room, beside the floors, than
        promises may. O(payers) where more than half is taken, else O(1).
        """
        if node in self._whole or not self._counts_room:
            return True
        accounts, size = self._places.accounts, self._bytes_of(node)
        most, total = PROMISABLE * accounts.capacity_bytes, self._whole_bytes + size
        if 2 * total <= most:
            return True
        payer = self._cache.payer_of(node.namespace)
        floors = sum(one.floor for one in accounts.shares() if one.payer != payer)
        return total + floors <= most

    @property
    def _counts_room(self) -> bool:
        return self._windows.is_on and self.level == "host"

    def _count_room(self, node: Node) -> None:
        if self._counts_room:
            self._whole_bytes -= self._whole.pop(node, 0)
            if size := self._room_of(node):
                self._whole[node] = size
                self._whole_bytes += size

    def _room_of(self, node: Node) -> int:
        return self._bytes_of(node) if self._counts_room and node.keeps_promise else 0

    def _bytes_of(self, node: Node) -> int:
        form = None if node.host is None else self._places.formats.formats[node.host.form]
        return 0 if form is None else form.slot_bytes

    def _push(self, node: Node, now_s: float) -> None:
        """Do what is next for a path that is bound to get durable places."""
        if not node.is_copied or self._windows.lacks(node):
            self.copy_again(node)
        if not node.is_copied:
            return
        self.settle(node, now_s)
        if not node.is_bound or self.level == "host":
            return
        if node.record is None:
            self.store_again(node)
            return
        waiting = [
            one
            for one in takewhile(lambda one: one.is_bound, upward(node))
            if one.record is not None
            and one.record.kept_until_s <= now_s
            and one not in self._renewing
        ]
        self._renew_each(reversed(waiting), now_s)

    def _renew_each(self, nodes: Iterable[Node], now_s: float) -> None:
        """Renew records, those with the same times in one command."""
        groups: dict[tuple[Namespace, float, float, PromiseTerms | None], list[Node]] = {}
        for node in nodes:
            if node.promised and (terms := node.terms) is not None:
                times = terms.promise_at_s, terms.limit_at_s
                groups.setdefault((node.namespace, *times, told_terms(node)), []).append(node)
        for (_, promise_at_s, limit_at_s, told), some in groups.items():
            self.renew(some, promise_at_s, limit_at_s, now_s, terms=told)

    def _renew_moved(self, nodes: Iterable[Node], now_s: float) -> None:
        """Renew those on disk whose promise has moved since the disk was told of it."""
        if self.level == "disk":
            there = [node for node in nodes if node.parent is not None]
            self._renew_each([node for node in there if self._has_moved(node, now_s)], now_s)

    def _has_moved(self, node: Node, now_s: float) -> bool:
        """Return whether the level is to be told of a promise's later end."""
        if not node.promised_below or node.terms is None or node in self._renewing:
            return False
        if node.record is not None:
            if _lacks_windows(node):
                return True
            told_s = node.record.kept_until_s
        else:
            is_noted = node.host is not None and self._places.notes is not None
            told_s = node.host.noted_s[1] if is_noted and node.host else math.inf
        promise_at_s = min(node.terms.promise_at_s, now_s + FOREVER_S / 2)
        return promise_at_s - told_s > RENEWED_PART * max(0.0, told_s - now_s)

    def _knows_less(self, node: Node) -> bool:
        """Return whether the disk keeps a record for less long than is promised, or was not told of
        all that is. O(groups).
        """
        if self.level == "host" or node.record is None:
            return False
        known_s = node.record.kept_until_s + CLOCK_SLACK_S
        return _lacks_windows(node) or any(
            min(block.terms.promise_at_s, self._now_s + FOREVER_S / 2) > known_s
            for block in all_blocks(node)
            if block.promised_below and block.terms is not None
        )

    def _watch(self, node: Node, now_s: float) -> None:
        """Have a node examined when its promise has to be renewed on disk, or stored again."""
        if self.level == "host" or node in self._watched:
            return
        if not node.is_copied or not node.keeps_promise:
            return
        record, due_s = node.record, math.inf
        if record is not None and record.renew_at_s > now_s:
            due_s = record.renew_at_s
        elif record is None or self._knows_less(node):
            due_s = now_s + RETRY_S
        if due_s < math.inf:
            self._watched.add(node)
            self._due.add(due_s, node)

    def _renew_due(self, now_s: float) -> None:
        """Renew on disk the promises that go on; store again those that only host memory keeps."""
        renewed: list[Node] = []
        for node in self._due.take_due(now_s):
            self._watched.discard(node)
            if node.parent is None or not node.keeps_promise:
                continue
            if node.record is None:
                self.store_again(node)
            elif self._knows_less(node) and node not in self._renewing:
                renewed.append(node)
            self._watch(node, now_s)
        self._renew_each(renewed, now_s)

    def _record_gone(self, node: Node) -> None:
        """The disk has lost a record."""
        self._places.lose_record(node)
        if node.host is not None and node.promised:
            self.store_again(node)


def _lacks_windows(node: Node) -> bool:
    """Return whether the disk was not told of a window block whose promise it keeps with that of
    its run.
    """
    told = () if node.record is None else node.record.told_windows
    kept = [one for one in all_blocks(node)[1:] if one.promised_below]
    return node.promised_below and any(
        not isinstance(one, Node) and one.group not in told for one in kept
    )


def _binds_windows(node: Node) -> bool:
    """Return whether a window block of a node is bound to the device."""
    return any(one is not None and one.is_bound for one in node.beside or ())
