"""The slots of host memory: who holds them, and which copy is dropped for the next one.

Each payer has the same part of host memory as of the device's pool: floor, ceiling and weight are
those of its quota, in proportion. The payer furthest above its floor, by weight, gives first; no
payer loses slots inside its floor to another. Within a payer, copies that were never matched are on
probation: while they are more than a quarter of what it holds, they go first, so that a scan cannot
flush what is used. This module knows no token and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from sortedcontainers import SortedList

from engine.api import Payer
from engine.errors import InvariantViolation
from engine.levels.stored_prefixes import Copy

PROBATION: Final = 1 / 4
"""The part of a payer's slots that copies which were never matched may keep under pressure."""


class HostShare:
    """One payer's slots: `used` of them, of which `floor` are its own. `ceiling` None: no bound."""

    __slots__ = ("ceiling", "floor", "kept", "payer", "probation", "serial", "used", "weight")

    def __init__(self, payer: Payer, serial: int) -> None:
        self.payer = payer
        self.serial = serial
        self.used = 0
        self.floor = 0
        self.ceiling: int | None = None
        self.weight = 1.0
        self.kept = SortedList()
        self.probation = SortedList()

    def overage(self, more: int = 0) -> float:
        """Return the slots above the floor per unit of weight, with `more` added."""
        return (self.used + more - self.floor) / self.weight

    def next_dropped(self) -> Copy | None:
        """Return the copy that this payer gives next, or None. O(1)."""
        first, second = self.kept, self.probation
        if len(self.probation) > PROBATION * self.used or not self.kept:
            first, second = second, first
        order = first or second
        return order[0][2] if order else None


class HostAccounts:
    """`slots` slots, their references and their payers.

    A slot has a reference for the copy that lies in it and one for each move or store that reads or
    fills it; it is free at none. `dropped_total` counts copies dropped for room.
    """

    def __init__(self, slots: int, on_dropped: Callable[[Copy], None]) -> None:
        """`on_dropped` is called with a copy that has just lost its slot to make room."""
        self.slots = slots
        self.dropped_total = 0
        self._on_dropped = on_dropped
        self._free = list(range(slots - 1, -1, -1))
        self._refs = [0] * slots
        self._owner: list[HostShare | None] = [None] * slots
        self._copy_in: list[Copy | None] = [None] * slots
        self._shares: dict[Payer, HostShare] = {}
        self._serial = 0

    @property
    def used(self) -> int:
        """Return the slots in use."""
        return self.slots - len(self._free)

    def shares(self) -> Iterable[HostShare]:
        """Return the share of every payer that was ever seen and holds slots or has a floor."""
        return self._shares.values()

    def set_share(self, payer: Payer, floor: int, ceiling: int | None, weight: float) -> None:
        """Set a payer's floor, ceiling (slots) and weight. O(1)."""
        share = self._share(payer)
        share.floor, share.ceiling, share.weight = floor, ceiling, weight

    def forget_if_idle(self, payer: Payer) -> None:
        """Forget a payer that holds no slot and has no floor. O(1)."""
        if (share := self._shares.get(payer)) is not None:
            self._forget_if_idle(share)

    # -- slots --------------------------------------------------------------------------------

    def take(self, payer: Payer, used_at_s: float | None = None) -> int | None:
        """Return a slot with one reference, free or made free; None without room. O(payers).

        `used_at_s`: when what will lie there was used; of the payer's own copies only older ones
        are dropped for it, so that two cannot take each other's place for ever.
        """
        share = self._share(payer)
        if share.ceiling is not None and share.used >= share.ceiling:
            victim = _older(share.next_dropped(), used_at_s)
            if victim is None:
                return None
            self._drop(victim)
        if not self._free and not self._make_room(share, used_at_s):
            self._forget_if_idle(share)
            return None
        self._shares[payer] = share  # a drop of its only copy forgets it
        slot = self._free.pop()
        self._refs[slot] = 1
        self._owner[slot] = share
        share.used += 1
        return slot

    def hold(self, slot: int) -> None:
        """Add a reference to a slot in use. O(log copies)."""
        if self._refs[slot] < 1:
            raise InvariantViolation(f"slot {slot} is free; expected a slot in use")
        self._refs[slot] += 1
        self._update_slot(slot)

    def release(self, slot: int) -> None:
        """Drop a reference; without any the slot is free. O(log copies)."""
        if self._refs[slot] < 1:
            raise InvariantViolation(f"slot {slot} was freed twice")
        self._refs[slot] -= 1
        if self._refs[slot]:
            self._update_slot(slot)
            return
        share = self._owner[slot]
        assert share is not None, "a slot in use has an owner"
        self._owner[slot] = None
        self._free.append(slot)
        share.used -= 1
        self._forget_if_idle(share)

    def give(self, copy: Copy, slot: int, check: bytes) -> None:
        """Let a copy have a slot; the caller's reference becomes the copy's. O(log copies)."""
        if copy.slot >= 0 or self._copy_in[slot] is not None:
            raise InvariantViolation(f"slot {slot} or its copy is taken")
        copy.slot, copy.check = slot, check
        self._copy_in[slot] = copy
        self.update(copy)

    def take_back(self, copy: Copy) -> None:
        """Take the slot from a copy, if it has one. O(log copies)."""
        if copy.slot < 0:
            return
        self._leave_order(copy)
        slot, copy.slot, copy.check = copy.slot, -1, b""
        self._copy_in[slot] = None
        self.release(slot)

    # -- order --------------------------------------------------------------------------------

    def touch(self, copy: Copy, now_s: float) -> None:
        """Note a use of a copy: it is the last to go, and on probation no more. O(log copies)."""
        self._leave_order(copy)
        copy.last_use_s = now_s
        copy.hits += 1
        self.update(copy)

    def update(self, copy: Copy) -> None:
        """Put a copy into the order of those that may be dropped, or take it out, as it now is.

        It may be dropped while nothing reads its slot, and it is on disk too or nothing lies below
        it and it keeps no promise. O(log copies), O(1) where nothing changes.
        """
        may_drop = (
            copy.slot >= 0
            and self._refs[copy.slot] == 1
            and (copy.record_id != 0 or not (copy.children or copy.terms))
        )
        if may_drop == (copy.order_key is not None):
            return
        if not may_drop:
            self._leave_order(copy)
            return
        share = self._owner[copy.slot]
        assert share is not None, "a slot in use has an owner"
        copy.order_key = (copy.last_use_s, copy.serial)
        copy.is_kept = copy.hits > 0
        (share.kept if copy.is_kept else share.probation).add((*copy.order_key, copy))

    def check(self, copies: Iterable[Copy], moves: dict[int, int]) -> None:
        """Recount. `moves`: the references that moves and stores hold, by slot. Raises
        InvariantViolation. O(slots).
        """
        refs = [moves.get(slot, 0) for slot in range(self.slots)]
        ordered = 0
        for copy in copies:
            if copy.slot < 0:
                continue
            refs[copy.slot] += 1
            if self._copy_in[copy.slot] is not copy:
                raise InvariantViolation(f"slot {copy.slot} holds another copy")
            has_key = copy.order_key is not None
            is_needed = not copy.record_id and (copy.children or copy.terms is not None)
            may_drop = self._refs[copy.slot] == 1 and not is_needed
            if has_key != may_drop:
                raise InvariantViolation(f"slot {copy.slot} in the order of drops: {has_key}")
            ordered += has_key
        if refs != self._refs:
            raise InvariantViolation(f"references of slots {self._refs}, recounted: {refs}")
        if sorted(self._free) != [slot for slot, refs_ in enumerate(refs) if not refs_]:
            raise InvariantViolation("free slots differ from those without references")
        used: dict[Payer, int] = {}
        for share in self._owner:
            if share is not None:
                used[share.payer] = used.get(share.payer, 0) + 1
        has = {share.payer: share.used for share in self._shares.values() if share.used}
        if has != used:
            raise InvariantViolation(f"slots by payer {has}, recounted: {used}")
        noted = sum(len(share.kept) + len(share.probation) for share in self._shares.values())
        if noted != ordered:
            raise InvariantViolation(f"{noted} copies may be dropped, recounted: {ordered}")

    # -- internals ----------------------------------------------------------------------------

    def _share(self, payer: Payer) -> HostShare:
        share = self._shares.get(payer)
        if share is None:
            self._serial += 1
            share = self._shares[payer] = HostShare(payer, self._serial)
        return share

    def _forget_if_idle(self, share: HostShare) -> None:
        if not share.used and not share.floor:
            self._shares.pop(share.payer, None)

    def _make_room(self, taker: HostShare, used_at_s: float | None) -> bool:
        """Drop one copy: of the payer furthest over its floor, the taker itself at a tie. Inside
        its own floor the taker drops nothing of its own.
        """
        givers = [s for s in self._shares.values() if s is not taker and s.used > s.floor]
        candidates = [(s.overage(), -s.serial, s) for s in givers if s.kept or s.probation]
        best = max(candidates, key=lambda one: one[:2], default=None)
        giver = None if best is None else best[2]
        has_own = bool(taker.kept or taker.probation) and taker.used + 1 > taker.floor
        if giver is None or taker.overage(1) >= giver.overage():
            # What is copied ahead of need takes nothing from a payer that has no more than its own:
            # two payers would take each other's slots for ever.
            giver = taker if has_own else (giver if used_at_s is None else None)
        victim = None if giver is None else giver.next_dropped()
        if giver is taker:
            victim = _older(victim, used_at_s)
        if victim is None:
            return False
        self._drop(victim)
        return True

    def _drop(self, copy: Copy) -> None:
        self.dropped_total += 1
        self.take_back(copy)
        self._on_dropped(copy)

    def _update_slot(self, slot: int) -> None:
        copy = self._copy_in[slot]
        if copy is not None:
            self.update(copy)

    def _leave_order(self, copy: Copy) -> None:
        if copy.order_key is None:
            return
        share = self._owner[copy.slot]
        assert share is not None, "a slot in use has an owner"
        (share.kept if copy.is_kept else share.probation).remove((*copy.order_key, copy))
        copy.order_key = None


def _older(copy: Copy | None, used_at_s: float | None) -> Copy | None:
    """Return the copy if it was used before `used_at_s`, or if that does not matter."""
    if copy is None or used_at_s is None or copy.last_use_s < used_at_s:
        return copy
    return None
