"""Fair sharing of the pool: which payer gives a block when none is free, and what other payers
leave.

The payer with the highest overage gives first; no payer takes blocks inside another payer's floor
(rule *Fair share*). This is weighted max-min fairness by water-filling, and needs no total: a
tenant that streams unique prompts has the highest overage and so replaces its own blocks, however
many namespaces it makes of them.

Sums and order are updated on demand, for the payers that have changed since the last query, so a
call's cost does not grow with the number of payers. This module knows no pool, no tree and no
clock. The cache's modules reach it as `BlockManager.fair_share`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from typing import Final

from sortedcontainers import SortedList

from engine.api import Namespace, Payer, Quota
from engine.cache.tree.accounts import NOT_COUNTED, PayerAccount, PayerCounts
from engine.cache.tree.eviction_policy import EvictionOrder, EvictionPolicy
from engine.errors import InvariantViolation

RESTING_AFTER_S: Final = 3600.0
"""Seconds without a request after which a payer rests: what it has beyond its floor goes sooner."""


class FairShare:
    """The accounts of all payers, and the order in which they give blocks.

    `promisable`: blocks that promises and floors together may take on the device. `floors_max`: the
    part of these that floors may take. `policy` is passed on to each payer's account. `scale`: how
    many times the device's blocks the lowest level has that keeps promises; `promisable_below`: the
    blocks that promises and floors together may take there. Without such a level both are the
    device's.
    """

    def __init__(self, promisable: int, floors_max: int, policy: EvictionPolicy) -> None:
        self.promisable = promisable
        self.floors_max = floors_max
        self._policy = policy
        self._by_payer: dict[Payer, PayerAccount] = {}
        self._with_floor: dict[Payer, PayerAccount] = {}
        self._floors_requested = 0
        self.promisable_below = promisable
        self.scale = 1.0
        self._spare = self._claimed = self._cached = self._claimed_below = 0
        self._order = SortedList()
        self._stale: list[PayerAccount] = []
        self._serials = count()
        self._used_at_s: dict[Payer, float] = {}
        """When each payer last asked for something, the longest ago first, of those that do not
        rest."""

    def __iter__(self) -> Iterator[PayerAccount]:
        return iter(self._by_payer.values())

    def get(self, payer: Payer) -> PayerAccount | None:
        """Return the payer's account, or None."""
        return self._by_payer.get(payer)

    def over_share(self, payer: Payer) -> float:
        """Return the blocks that a payer has borrowed above its floor, per unit of weight (rule
        *Fair share*). O(1).
        """
        account = self._by_payer.get(payer)
        return account.overage() if account else 0.0

    def is_inside_floor(self, namespace: Namespace, quota: Quota, wanted: int) -> bool:
        """Return whether a namespace's payer that takes `wanted` more blocks, its own evictable
        ones first, stays inside its floor. O(1)."""
        account = self._by_payer.get(quota.payer or namespace)
        if account is None:
            return wanted <= quota.floor_blocks
        return account.held - account.evictable + wanted <= account.floor_blocks

    def account_for(self, namespace: Namespace, quota: Quota) -> PayerAccount:
        """Return the account of the namespace's payer under the present quota; create it if needed.

        O(1), or O(floors) when floors change that together exceed `floors_max`.
        """
        payer = quota.payer or namespace
        account = self._by_payer.get(payer)
        if account is None:
            order = EvictionOrder(self._policy)
            account = PayerAccount(payer, Quota(), next(self._serials), self._stale, order)
            self._by_payer[payer] = account
        if account.quota != quota:
            self._apply_quota(account, quota)
        return account

    def set_quota(self, quota: Quota) -> None:
        """Apply a changed quota to its payer, if the payer has an account. Cost: as
        `account_for`.
        """
        account = self._by_payer.get(quota.payer)
        if account is not None:
            self._apply_quota(account, quota)
            self.forget_if_idle(account)

    def forget_if_idle(self, account: PayerAccount) -> None:
        """Delete the account of a payer that holds nothing and has no floor."""
        if account.is_idle:
            del self._by_payer[account.payer]
            self._used_at_s.pop(account.payer, None)
            self._uncount(account)

    def note_use(self, account: PayerAccount, now_s: float) -> None:
        """Note that a payer asks for something: it has its whole weight. O(1)."""
        self._used_at_s.pop(account.payer, None)
        self._used_at_s[account.payer] = now_s
        if account.is_resting:
            account.is_resting = False
            account.mark_stale()

    def rest(self, now_s: float) -> None:
        """Let the payers rest that have asked for nothing for `RESTING_AFTER_S` and run nothing.
        O(these).
        """
        used = self._used_at_s
        while used and now_s - used[payer := next(iter(used))] >= RESTING_AFTER_S:
            account = self._by_payer[payer]
            if any(one.tables for one in account.accounts.values()):
                self.note_use(account, now_s)
                continue
            del used[payer]
            account.is_resting = True
            account.mark_stale()

    def keep_below(self, scale: float) -> None:
        """Charge promises to a level of `scale` times the device's blocks, before any payer has an
        account. A level that is smaller than the device takes nothing from what may be promised.
        """
        self.scale = max(1.0, scale)
        self.promisable_below = int(self.promisable * self.scale)

    # -- floors -------------------------------------------------------------------------------

    def floors_of_others(self, payer: Payer, floor_blocks: int) -> int:
        """Return the blocks guaranteed to all other payers if this payer asked for `floor_blocks`.

        O(1), or O(floors) when the floors together exceed `floors_max`.
        """
        mine = self._with_floor.get(payer)
        others = self._floors_requested - (mine.quota.floor_blocks if mine else 0)
        requested = others + floor_blocks
        if requested <= self.floors_max:
            return others
        return sum(
            self._guaranteed(account.quota.floor_blocks, requested)
            for name, account in self._with_floor.items()
            if name != payer
        )

    def _apply_quota(self, account: PayerAccount, quota: Quota) -> None:
        """Set the payer's quota. Floors that together exceed `floors_max` are cut in one
        proportion.
        """
        before = self._floors_requested
        self._floors_requested += quota.floor_blocks - account.quota.floor_blocks
        account.quota = quota
        if quota.floor_blocks:
            self._with_floor[account.payer] = account
        else:
            self._with_floor.pop(account.payer, None)
        account.floor_blocks = self._guaranteed(quota.floor_blocks, self._floors_requested)
        account.mark_stale()
        if (
            self._floors_requested != before
            and max(self._floors_requested, before) > self.floors_max
        ):
            for other in self._with_floor.values():
                other.floor_blocks = self._guaranteed(
                    other.quota.floor_blocks, self._floors_requested
                )
                other.mark_stale()

    def _guaranteed(self, floor: int, requested: int) -> int:
        """Return the guaranteed part of `floor` when all floors together ask for `requested`."""
        room = self.floors_max
        return floor if requested <= room else floor * room // requested

    # -- sums and order -----------------------------------------------------------------------

    def spare_of_others(self, account: PayerAccount | None) -> int:
        """Return the blocks that all other payers would give. O(changed log n)."""
        self._refresh()
        return self._spare - (account.counted.spare if account else 0)

    def spare_beyond_floors(self) -> int:
        """Return the blocks that payers would give, less those that unfilled floors may still
        claim. O(changed log n + floors).
        """
        self._refresh()
        unfilled = (max(0, one.floor_blocks - one.held) for one in self._with_floor.values())
        return self._spare - sum(unfilled)

    def claimed_by_others(self, account: PayerAccount | None) -> int:
        """Return the blocks promised or guaranteed to all other payers. O(changed log n)."""
        self._refresh()
        return self._claimed - (account.counted.claimed if account else 0)

    def claimed_below_by_others(self, account: PayerAccount | None) -> int:
        """Return the same on the level that keeps promises. O(changed log n)."""
        self._refresh()
        return self._claimed_below - (account.counted.claimed_below if account else 0)

    def promisable_left(self) -> int:
        """Return the blocks that may still be promised, on the level that keeps promises; none
        while those above its floor leave nothing. O(changed log n).
        """
        return max(0, self.promisable_below - self.claimed_below_by_others(None))

    def cached(self) -> int:
        """Return the blocks that only trees refer to. O(changed log n)."""
        self._refresh()
        return self._cached

    def choose_victim(self, taker: PayerAccount, wanted: int, *, own: bool) -> PayerAccount:
        """Return the payer that gives the next block to `taker`, which wants `wanted` more.

        `own`: the taker's own blocks may go; at equal overage they go first. The caller has checked
        that some payer can give. O(changed log n).
        """
        self._refresh()
        others = (account for _, _, account in self._order if account is not taker)
        best: PayerAccount | None = next(others, None)
        if own and taker.evictable and (best is None or taker.overage(wanted) >= best.overage()):
            best = taker
        assert best is not None, "no payer can give a block"
        return best

    def given_in_a_row(
        self, giver: PayerAccount, taker: PayerAccount, wanted: int, most: int, *, own: bool
    ) -> int:
        """Return how many of `most` blocks the payer that `choose_victim` has chosen gives before
        another one could be chosen: at least 1. O(1) after `choose_victim`.
        """
        next_overage = -math.inf
        for _, _, account in self._order:
            if account is not giver and account is not taker:
                next_overage = account.overage()
                break
        if giver is taker:
            spare, more = giver.evictable, wanted
        else:
            spare, more = giver.spare_blocks(), 0
            if own and taker.evictable:
                next_overage = max(next_overage, taker.overage(wanted))
        most = min(most, spare)
        if next_overage == -math.inf:
            return most
        # The last of them is given at an overage that is at least a block above the next payer's.
        borrowed = giver.held + more - giver.floor_blocks
        return max(1, min(most, int(borrowed - next_overage * giver.weight)))

    def givers(self) -> Iterator[PayerAccount]:
        """Iterate over the payers with blocks to give, the one that gives first at the beginning.
        O(changed log n), and nothing may change meanwhile.
        """
        self._refresh()
        return (account for _, _, account in self._order)

    def check(self) -> Iterator[int]:
        """Recount all payers, and check that every change was reported.

        O(payers). Yields the amount of work after each piece, in the checker's units. Raises:
        InvariantViolation.
        """
        self._refresh()
        requested = sum(account.quota.floor_blocks for account in self._with_floor.values())
        sums, entries = [0, 0, 0, 0], 0
        for number, account in enumerate(self):
            found = _counts(account, self.scale)
            entry = (-account.overage(), account.serial, account) if found.spare else None
            if account.floor_blocks != self._guaranteed(account.quota.floor_blocks, requested):
                raise InvariantViolation(f"{account.payer!r}: a floor of {account.floor_blocks}")
            if account.counted != found or account.order_entry != entry:
                raise InvariantViolation(
                    f"{account.payer!r}: changed without a report, recounted: {found}"
                )
            if entry is not None and entry not in self._order:
                raise InvariantViolation(f"{account.payer!r}: missing in the order of payers")
            sums = [a + b for a, b in zip(sums, found, strict=True)]
            entries += entry is not None
            if number % 32 == 0:
                yield 32
        totals = (self._spare, self._claimed, self._cached, self._claimed_below)
        has = (self._floors_requested, *totals, len(self._order))
        if has != (requested, *sums, entries):
            raise InvariantViolation(f"sums over payers {has}, recounted: {sums} in {entries}")

    def _refresh(self) -> None:
        for account in self._stale:
            account.is_stale = False
            self._uncount(account)
            if self._by_payer.get(account.payer) is account:
                self._count(account)
        self._stale.clear()

    def _count(self, account: PayerAccount) -> None:
        account.counted = counted = _counts(account, self.scale)
        self._spare += counted.spare
        self._claimed += counted.claimed
        self._cached += counted.cached
        self._claimed_below += counted.claimed_below
        if counted.spare:
            account.order_entry = (-account.overage(), account.serial, account)
            self._order.add(account.order_entry)

    def _uncount(self, account: PayerAccount) -> None:
        counted, account.counted = account.counted, NOT_COUNTED
        self._spare -= counted.spare
        self._claimed -= counted.claimed
        self._cached -= counted.cached
        self._claimed_below -= counted.claimed_below
        if account.order_entry is not None:
            self._order.remove(account.order_entry)
            account.order_entry = None


def _counts(account: PayerAccount, scale: float) -> PayerCounts:
    spare, claimed = account.spare_blocks(), account.claimed_blocks()
    return PayerCounts(spare, claimed, account.cached, account.claimed_below(scale))
