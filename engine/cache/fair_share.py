"""Every payer's share of the pool: who gives a block when none is free, and what others leave.

The share furthest over gives first; a floor is never touched by others (rule 9). This is weighted
max-min fairness by water-filling, and needs no total: a tenant that streams unique prompts stands
highest and so turns over its own blocks, however many namespaces it makes of them.

Sums and order are brought in line when they are asked for, with the shares that have moved since:
what a call costs does not grow with the number of payers. It knows no pool, no tree and no clock.
Only `holdings` and `lease_book` call it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from sortedcontainers import SortedList

from engine.api import Namespace, Payer, Quota
from engine.cache.accounts import PayerAccount
from engine.errors import InvariantViolation


class FairShare:
    """By payer. `promisable`: blocks that promises and floors together may take; `floors_max`: that
    floors may take of them."""

    def __init__(self, promisable: int, floors_max: int) -> None:
        self.promisable = promisable
        self.floors_max = floors_max
        self._by_payer: dict[Payer, PayerAccount] = {}
        self._floored: dict[Payer, PayerAccount] = {}
        self._asked = 0
        self._spare = self._claimed = self._cached = 0
        self._order = SortedList()
        self._stale: list[PayerAccount] = []
        self._serials = count()

    def __iter__(self) -> Iterator[PayerAccount]:
        return iter(self._by_payer.values())

    def get(self, payer: Payer) -> PayerAccount | None:
        """Its share, if it has one."""
        return self._by_payer.get(payer)

    def under(self, namespace: Namespace, quota: Quota) -> PayerAccount:
        """The share of whoever pays for a namespace, under the present quota. O(1) unless floors
        change that ask for more than there is."""
        payer = quota.payer or namespace
        share = self._by_payer.get(payer)
        if share is None:
            share = PayerAccount(payer, Quota(), next(self._serials), self._stale)
            self._by_payer[payer] = share
        if share.quota != quota:
            self._put_under(share, quota)
        return share

    def set_quota(self, quota: Quota) -> None:
        """Its payer's from now on, where there is a share: who has none has nothing. As `under`."""
        share = self._by_payer.get(quota.payer)
        if share is not None:
            self._put_under(share, quota)
            self.forget_if_idle(share)

    def forget_if_idle(self, share: PayerAccount) -> None:
        """A payer that holds nothing and is guaranteed nothing costs nothing."""
        if share.is_idle:
            del self._by_payer[share.payer]
            self._uncount(share)

    # -- floors -------------------------------------------------------------------------------

    def floors_beside(self, payer: Payer, floor_blocks: int) -> int:
        """What is guaranteed to all others, where this payer asks for such a floor. O(1), or
        O(floors) where they ask for more than there is."""
        mine = self._floored.get(payer)
        others = self._asked - (mine.quota.floor_blocks if mine else 0)
        asked = others + floor_blocks
        if asked <= self.floors_max:
            return others
        return sum(
            self._guaranteed(share.quota.floor_blocks, asked)
            for name, share in self._floored.items()
            if name != payer
        )

    def _put_under(self, share: PayerAccount, quota: Quota) -> None:
        """Floors that ask for more than may be guaranteed are cut in one proportion."""
        before = self._asked
        self._asked += quota.floor_blocks - share.quota.floor_blocks
        share.quota = quota
        if quota.floor_blocks:
            self._floored[share.payer] = share
        else:
            self._floored.pop(share.payer, None)
        share.floor_blocks = self._guaranteed(quota.floor_blocks, self._asked)
        share.moved()
        if self._asked != before and max(self._asked, before) > self.floors_max:
            for other in self._floored.values():
                other.floor_blocks = self._guaranteed(other.quota.floor_blocks, self._asked)
                other.moved()

    def _guaranteed(self, floor: int, asked: int) -> int:
        """What is guaranteed of a floor where all floors together ask for so much."""
        room = self.floors_max
        return floor if asked <= room else floor * room // asked

    # -- sums and order -----------------------------------------------------------------------

    def spare_beside(self, share: PayerAccount | None) -> int:
        """Blocks that all others would give. O(moved log n)."""
        self._catch_up()
        return self._spare - (share.counted[0] if share else 0)

    def claimed_beside(self, share: PayerAccount) -> int:
        """Blocks that all others are promised or guaranteed. O(moved log n)."""
        self._catch_up()
        return self._claimed - share.counted[1]

    def cached(self) -> int:
        """Blocks that only trees refer to. O(moved log n)."""
        self._catch_up()
        return self._cached

    def giver(self, taker: PayerAccount, wanted: int, *, own: bool) -> PayerAccount:
        """Who gives the next block to `taker`, which wants `wanted` more. O(moved log n).

        `own`: the taker's own blocks may go; at equal distance they go first. The caller has made
        sure that somebody can give.
        """
        self._catch_up()
        others = (share for _, _, share in self._order if share is not taker)
        best: PayerAccount | None = next(others, None)
        if own and taker.evictable and (best is None or taker.over(wanted) >= best.over()):
            best = taker
        assert best is not None, "asked for a victim where nobody can give"
        return best

    def check(self) -> Iterator[int]:
        """Raises InvariantViolation where a share has moved and nobody was told. O(payers), in
        steps that say how much of it each was, as `audit` counts."""
        self._catch_up()
        asked = sum(share.quota.floor_blocks for share in self._floored.values())
        sums, places = [0, 0, 0], 0
        for number, share in enumerate(self):
            found = _counts(share)
            place = (-share.over(), share.serial, share) if found[0] else None
            if share.floor_blocks != self._guaranteed(share.quota.floor_blocks, asked):
                raise InvariantViolation(f"{share.payer!r}: a floor of {share.floor_blocks}")
            if share.counted != found or share.place != place:
                raise InvariantViolation(f"{share.payer!r}: has moved unseen, recounted: {found}")
            if place is not None and place not in self._order:
                raise InvariantViolation(f"{share.payer!r}: is not in the order of shares")
            sums = [a + b for a, b in zip(sums, found, strict=True)]
            places += place is not None
            if number % 32 == 0:
                yield 32
        has = (self._asked, self._spare, self._claimed, self._cached, len(self._order))
        if has != (asked, *sums, places):
            raise InvariantViolation(f"sums over shares {has}, recounted: {sums} in {places}")

    def _catch_up(self) -> None:
        for share in self._stale:
            share.is_stale = False
            self._uncount(share)
            if self._by_payer.get(share.payer) is share:
                self._count(share)
        self._stale.clear()

    def _count(self, share: PayerAccount) -> None:
        share.counted = spare, claimed, cached = _counts(share)
        self._spare += spare
        self._claimed += claimed
        self._cached += cached
        if spare:
            share.place = (-share.over(), share.serial, share)
            self._order.add(share.place)

    def _uncount(self, share: PayerAccount) -> None:
        spare, claimed, cached = share.counted
        self._spare -= spare
        self._claimed -= claimed
        self._cached -= cached
        share.counted = (0, 0, 0)
        if share.place is not None:
            self._order.remove(share.place)
            share.place = None


def _counts(share: PayerAccount) -> tuple[int, int, int]:
    return share.spare(), share.claimed(), share.cached
