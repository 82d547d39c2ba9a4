"""The slots of host memory: who holds them, and which node is dropped for the next one.

Each payer has the same part of host memory as of the device's pool: floor, ceiling and weight are
those of its quota, in proportion, and count bytes, since copies have several sizes. The payer
furthest above its floor, by weight, gives first; no payer loses bytes inside its floor to another.
Within a payer, copies that were never matched are on probation: while they are more than a quarter
of what it holds, they go first, so that a scan cannot flush what is used.

A slot of one format is of no use to another. So a copy of the wanted format goes, or a whole slab
of another one, with what hangs on it: if all of that was used longer ago, or no node of the wanted
format may go. This module knows no token and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import chain, islice
from typing import Final

from sortedcontainers import SortedList

from engine.api import Payer
from engine.cache.tree.places import HostPlace
from engine.cache.tree.prefix_tree import Node
from engine.errors import InvariantViolation
from engine.levels.host.slot_pool import SlotPool

PROBATION: Final = 1 / 4
"""The part of a payer's bytes that copies which were never matched may keep under pressure."""
SLABS_SEEN: Final = 4
COLDEST_SEEN: Final = 32
"""Slabs of other formats that are considered for one slot, and copies of each payer by which they
are found."""
SLAB_COPIES_MAX: Final = 256
"""Copies that may go for one slab: its own, and those that hang on them."""


@dataclass(slots=True, eq=False, repr=False)
class HostShare:
    """One payer's bytes: `used`, of which `floor` are its own. `ceiling` None: no bound.

    `kept`, `probation`: the copies that may be dropped, by format, those that go first in front.
    `probation_bytes`: of the latter.
    """

    payer: Payer
    serial: int
    kept: list[SortedList]
    probation: list[SortedList]
    used: int = 0
    floor: int = 0
    ceiling: int | None = None
    weight: float = 1.0
    probation_bytes: int = 0

    def overage(self, more: int = 0) -> float:
        """Return the bytes above the floor per unit of weight, with `more` added."""
        return (self.used + more - self.floor) / self.weight

    def gives(self, form: int) -> bool:
        """Return whether a copy of a format may be dropped. O(1)."""
        return bool(self.kept[form] or self.probation[form])

    def coldest(self, formats: Sequence[int], before_s: float) -> Iterator[Node]:
        """Yield the copies of these formats that may be dropped and were used before `before_s`,
        those used longest ago first; at most `COLDEST_SEEN` of each order.
        """
        orders = [one[form] for one in (self.kept, self.probation) for form in formats]
        colder = [order for order in orders if order and order[0][0] < before_s]
        for last_use_s, _, node in merge(*(islice(order, COLDEST_SEEN) for order in colder)):
            if last_use_s >= before_s:
                return
            yield node

    def next_dropped(self, form: int) -> Node | None:
        """Return the node of a format that this payer gives next, or None. O(1)."""
        first, second = self.kept[form], self.probation[form]
        if self.probation_bytes > PROBATION * self.used:
            first, second = second, first
        order = first or second
        return order[0][2] if order else None

    def next_of_all(self) -> Node | None:
        """Return the node of any format that this payer gives next, or None. O(formats)."""
        first, second = self.kept, self.probation
        if self.probation_bytes > PROBATION * self.used:
            first, second = second, first
        found = [order[0] for order in first if order] or [order[0] for order in second if order]
        return min(found)[2] if found else None


class HostAccounts:
    """The slots of `pool`, their references and their payers.

    A slot has a reference for the node that lies in it and one for each move or store that reads or
    fills it; it is free at none. `dropped_total` counts copies dropped for room. `is_closed`: no
    slot is given out. `capacity_bytes`: what copies in the device's own format could take.
    """

    def __init__(
        self,
        pool: SlotPool,
        on_dropped: Callable[[Node, int], None],
        on_emptied: Callable[[Node, int], None] = lambda node, slot: None,
    ) -> None:
        """`on_dropped` is called with a node that has just lost its slot to make room, and with the
        bytes of that slot; `on_emptied` with each node that loses its slot, before that can be
        free."""
        self.pool = pool
        size = pool.formats[0].slot_bytes
        self.capacity_bytes = pool.layout.capacity(size) * size
        self.dropped_total = 0
        self.is_closed = False
        self._on_dropped = on_dropped
        self._on_emptied = on_emptied
        self._all = range(len(pool.formats))
        self._refs = [0] * pool.layout.slots
        self._owner: list[HostShare | None] = [None] * pool.layout.slots
        self._node_in: list[Node | None] = [None] * pool.layout.slots
        self._shares: dict[Payer, HostShare] = {}
        self._serial = 0

    def shares(self) -> Iterable[HostShare]:
        """Return the share of every payer that was ever seen and holds slots or has a floor."""
        return self._shares.values()

    def set_share(self, payer: Payer, floor: int, ceiling: int | None, weight: float) -> None:
        """Set a payer's floor, ceiling (bytes) and weight. O(1)."""
        share = self._share(payer)
        share.floor, share.ceiling, share.weight = floor, ceiling, weight

    def forget_if_idle(self, payer: Payer) -> None:
        """Forget a payer that holds no slot and has no floor. O(1)."""
        if (share := self._shares.get(payer)) is not None:
            self._forget_if_idle(share)

    # -- slots --------------------------------------------------------------------------------

    def take(self, payer: Payer, form: int = 0, used_at_s: float | None = None) -> int | None:
        """Return a slot of a format with one reference, free or made free; None without room.
        O(payers), and O(copies of a slab) where a slab changes its format.

        `used_at_s`: when what will lie there was used; of the payer's own copies only older ones
        are dropped for it, so that two cannot take each other's place for ever.
        """
        if self.is_closed:
            return None
        share, size = self._share(payer), self.pool.formats[form].slot_bytes
        while share.ceiling is not None and share.used + size > share.ceiling:
            victim = _older(share.next_of_all(), used_at_s)
            if victim is None:
                return None
            self._drop(victim)
        slot = self.pool.take(form)
        if slot is None and self._make_room(share, form, used_at_s):
            slot = self.pool.take(form)
        if slot is None:
            self._forget_if_idle(share)
            return None
        self._shares[payer] = share  # a drop of its only node forgets it
        self._refs[slot] = 1
        self._owner[slot] = share
        share.used += size
        return slot

    def claim(self, owners: Mapping[int, tuple[Payer, int]]) -> None:
        """Take free slots for copies that lie in them already, one reference each, by their payers
        and formats. O(slots)."""
        for slot, (payer, form) in owners.items():
            self.pool.claim(slot, form)
            share = self._shares[payer] = self._share(payer)
            self._refs[slot], self._owner[slot] = 1, share
            share.used += self.pool.formats[form].slot_bytes

    def payer_of(self, slot: int) -> Payer:
        """Return the payer of a slot in use. O(1)."""
        share = self._owner[slot]
        assert share is not None, "a slot in use has an owner"
        return share.payer

    def is_free(self, slot: int) -> bool:
        """Return whether a slot has no reference. O(1)."""
        return not self._refs[slot]

    def has_node(self, slot: int) -> bool:
        """Return whether a node has this slot. O(1)."""
        return self._node_in[slot] is not None

    def hold(self, slot: int) -> None:
        """Add a reference to a slot in use. O(log nodes)."""
        if self._refs[slot] < 1:
            raise InvariantViolation(f"slot {slot} is free; expected a slot in use")
        self._refs[slot] += 1
        node = self._node_in[slot]
        if node is not None:  # what is read may not be dropped
            self._leave_order(node)

    def release(self, slot: int) -> None:
        """Drop a reference; without any the slot is free. O(log nodes)."""
        if self._refs[slot] < 1:
            raise InvariantViolation(f"slot {slot} was freed twice")
        self._refs[slot] -= 1
        if self._refs[slot]:
            node = self._node_in[slot]
            if node is not None:
                self.update(node)  # it may be dropped now
            return
        share = self._owner[slot]
        assert share is not None, "a slot in use has an owner"
        self._owner[slot] = None
        share.used -= self.pool.bytes_of(slot)
        self.pool.give_back(slot)
        self._forget_if_idle(share)

    def give(self, node: Node, place: HostPlace) -> None:
        """Let a node have a slot; the caller's reference becomes the node's. O(log nodes)."""
        if node.host is not None or self._node_in[place.slot] is not None:
            raise InvariantViolation(f"slot {place.slot} or its node is taken")
        node.host = place
        self._node_in[place.slot] = node
        self.update(node)

    def take_back(self, node: Node) -> None:
        """Take the slot from a node, if it has one. O(log nodes)."""
        if node.host is None:
            return
        self._leave_order(node)
        slot, node.host = node.host.slot, None
        self._node_in[slot] = None
        self._on_emptied(node, slot)
        self.release(slot)

    # -- order --------------------------------------------------------------------------------

    def touch(self, node: Node, now_s: float) -> None:
        """Note a use of a node: it is the last to go, and on probation no more. O(log nodes)."""
        node.last_use_s = now_s
        node.hits += 1
        self.reorder(node)

    def reorder(self, node: Node) -> None:
        """Put a node where its last use belongs, which the device has moved. O(log nodes)."""
        self._leave_order(node)
        self.update(node)

    def update(self, node: Node) -> None:
        """Put a node into the order of those that may be dropped, or take it out, as it now is.

        It may be dropped while nothing reads its slot, and it is on disk too or nothing below it is
        copied and it keeps no promise. O(log nodes), O(1) where nothing changes.
        """
        place = node.host
        if place is None:
            return
        may_drop = self._may_drop(node)
        if may_drop == (place.order_key is not None):
            return
        if not may_drop:
            self._leave_order(node)
            return
        share = self._owner[place.slot]
        assert share is not None, "a slot in use has an owner"
        place.order_key = (node.last_use_s, node.serial)
        place.is_kept = node.hits > 0
        order = share.kept if place.is_kept else share.probation
        order[place.form].add((*place.order_key, node))
        if not place.is_kept:
            share.probation_bytes += self.pool.bytes_of(place.slot)

    def check(self, copies: Iterable[Node], moves: dict[int, int]) -> None:
        """Recount. `moves`: the references that moves and stores hold, by slot. Raises
        InvariantViolation. O(slots).
        """
        self.pool.check()
        refs = [moves.get(slot, 0) for slot in range(self.pool.layout.slots)]
        ordered = 0
        for node in copies:
            if node.host is None:
                continue
            slot, has_key = node.host.slot, node.host.order_key is not None
            refs[slot] += 1
            if self._node_in[slot] is not node:
                raise InvariantViolation(f"slot {slot} holds another node")
            if has_key != self._may_drop(node):
                raise InvariantViolation(f"slot {slot} in the order of drops: {has_key}")
            ordered += has_key
        if refs != self._refs:
            raise InvariantViolation(f"references of slots {self._refs}, recounted: {refs}")
        if [self.pool.is_used(slot) for slot in range(len(refs))] != [bool(n) for n in refs]:
            raise InvariantViolation("slots in use differ from those with references")
        self._check_shares(ordered)

    def _check_shares(self, ordered: int) -> None:
        used: dict[Payer, int] = {}
        for slot, share in enumerate(self._owner):
            if share is not None:
                used[share.payer] = used.get(share.payer, 0) + self.pool.bytes_of(slot)
        has = {share.payer: share.used for share in self._shares.values() if share.used}
        if has != used:
            raise InvariantViolation(f"bytes by payer {has}, recounted: {used}")
        noted = 0
        for share in self._shares.values():
            noted += sum(map(len, share.kept)) + sum(map(len, share.probation))
            trial = sum(
                len(order) * form.slot_bytes
                for order, form in zip(share.probation, self.pool.formats, strict=True)
            )
            if trial != share.probation_bytes:
                raise InvariantViolation(
                    f"{share.probation_bytes} bytes on probation, recounted: {trial}"
                )
        if noted != ordered:
            raise InvariantViolation(f"{noted} copies may be dropped, recounted: {ordered}")

    # -- internals ----------------------------------------------------------------------------

    def _share(self, payer: Payer) -> HostShare:
        share = self._shares.get(payer)
        if share is None:
            self._serial += 1
            kept, probation = ([SortedList() for _ in self._all] for _ in range(2))
            share = self._shares[payer] = HostShare(payer, self._serial, kept, probation)
        return share

    def _forget_if_idle(self, share: HostShare) -> None:
        if not share.used and not share.floor:
            self._shares.pop(share.payer, None)

    def _make_room(self, taker: HostShare, form: int, used_at_s: float | None) -> bool:
        """Make a slot of a format free: drop a copy of it, or all that keeps a slab in another."""
        victim = self._next_victim(taker, form, used_at_s)
        for node in self._coldest_slab(taker, form, victim, used_at_s):
            if node.host is not None:  # those below one that has gone are gone
                self._drop(node)
                victim = None
        if victim is not None:
            self._drop(victim)
        return victim is not None or self.pool.has_room(form)

    def _next_victim(self, taker: HostShare, form: int, used_at_s: float | None) -> Node | None:
        """Return the node of a format that goes next: of the payer furthest over its floor, the
        taker itself at a tie. Inside its own floor the taker drops nothing of its own.
        """
        size = self.pool.formats[form].slot_bytes
        givers = [s for s in self._shares.values() if s is not taker and s.used - size >= s.floor]
        candidates = [(s.overage(), -s.serial, s) for s in givers if s.gives(form)]
        best = max(candidates, key=lambda one: one[:2], default=None)
        giver = None if best is None else best[2]
        has_own = taker.used + size > taker.floor and taker.gives(form)
        if giver is None or taker.overage(size) >= giver.overage():
            # What is copied ahead of need takes nothing from a payer that has no more than its own:
            # two payers would take each other's slots for ever.
            giver = taker if has_own else (giver if used_at_s is None else None)
        victim = None if giver is None else giver.next_dropped(form)
        return _older(victim, used_at_s) if giver is taker else victim

    def _coldest_slab(
        self, taker: HostShare, form: int, victim: Node | None, used_at_s: float | None
    ) -> list[Node]:
        """Return the copies that keep a slab in another format and may go for this one, children
        before parents. `victim`: the node that would go otherwise, which was used later than all of
        them.
        """
        others = [one for one in self._all if one != form and self.pool.used_slots[one]]
        if not others:
            return []
        givers = sorted(self._shares.values(), key=lambda s: (-s.overage(), s.serial))
        before_s = math.inf if victim is None else victim.last_use_s
        seen = set[int]()
        for node in chain.from_iterable(giver.coldest(others, before_s) for giver in givers):
            slab = self.pool.slab_of(node.slot)
            if slab in seen or not self.pool.fits(slab, form):
                continue
            if len(seen) >= SLABS_SEEN:
                break
            seen.add(slab)
            found = self._all_that_hangs_on(self.pool.slots_of(slab), before_s)
            if found and self._may_go(found, taker, form, used_at_s):
                return sorted(found, key=lambda one: -one.serial)
        return []

    def _all_that_hangs_on(self, slots: Sequence[int], before_s: float) -> list[Node]:
        """Return the copies in these slots, with those below them that would go too; none if one is
        read or filled, was used since `before_s`, or is on disk below one that is not, or if they
        are too many.
        """
        found: dict[Node, None] = {}
        stack = [self._node_in[slot] for slot in slots]
        while stack:
            node = stack.pop()
            if node is None or len(found) >= SLAB_COPIES_MAX:
                return []
            if node.host is not None and (self._is_bound(node) or node.last_use_s >= before_s):
                return []
            if node not in found:
                found[node] = None
                children = () if node.record else node.children.values()
                below = [child for child in children if child.is_copied]
                if any(child.record for child in below):
                    return []  # what is known of its record would go, too
                stack += below
        return list(found)

    def _may_go(
        self,
        copies: Sequence[Node],
        taker: HostShare,
        form: int,
        used_at_s: float | None,
    ) -> bool:
        """Return whether these copies may be dropped at once for a slot of the taker: no payer gets
        below its floor, and for what is copied ahead of need none gives that would have less than
        the taker after it. What is lost counts where that is more than the slot: else two payers
        would take each other's slab for ever.
        """
        size = self.pool.formats[form].slot_bytes
        given: dict[Payer, int] = {}
        for node in copies:
            share = self._owner[node.host.slot] if node.host is not None else None
            if share is None:
                continue
            if share is taker and _older(node, used_at_s) is None:
                return False
            given[share.payer] = given.get(share.payer, 0) + self.pool.bytes_of(node.slot)
        for payer, lost in given.items():
            share = self._shares[payer]
            if share is taker:
                if share.used + size <= share.floor:
                    return False
                continue
            has_less = taker.overage(max(size, lost)) >= share.overage()
            if share.used - lost < share.floor or (has_less and used_at_s is not None):
                return False
        return True

    def _may_drop(self, node: Node) -> bool:
        """Return whether the node in a slot may be dropped by itself; see `update`."""
        return not self._is_bound(node) and (node.record is not None or not node.copied_children)

    def _is_bound(self, node: Node) -> bool:
        """Return whether a node has to keep its slot, even if all that hangs on it went too: a move
        or a store reads it, or it alone keeps a promise."""
        return self._refs[node.slot] != 1 or (node.record is None and node.keeps_promise)

    def _drop(self, node: Node) -> None:
        self.dropped_total += 1
        size = self.pool.bytes_of(node.slot)
        self.take_back(node)
        self._on_dropped(node, size)

    def _leave_order(self, node: Node) -> None:
        place = node.host
        if place is None or place.order_key is None:
            return
        share = self._owner[place.slot]
        assert share is not None, "a slot in use has an owner"
        order = share.kept if place.is_kept else share.probation
        order[place.form].remove((*place.order_key, node))
        if not place.is_kept:
            share.probation_bytes -= self.pool.bytes_of(place.slot)
        place.order_key = None


def _older(node: Node | None, used_at_s: float | None) -> Node | None:
    """Return the node if it was used before `used_at_s`, or if that does not matter."""
    if node is None or used_at_s is None or node.last_use_s < used_at_s:
        return node
    return None
