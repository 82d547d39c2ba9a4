"""Shares of a bound that are held for payers, whatever the others take.

Half of the bound is held: by weight among the payers that use it, or as much as their floors, and
as one share for all that have nothing yet. The rest is the first comer's. So the payer that is
above its share is refused first, and a single one may take all. This module knows no index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from engine.api import Payer
from engine.storage.space.quotas import DiskQuotas

HELD_PART: Final = 1 / 2
"""The part of a bound that is held for shares."""


class HeldShares:
    """The shares of one bound, by the quotas of the disk."""

    def __init__(self, quotas: DiskQuotas, bound: int) -> None:
        self._quotas, self._bound = quotas, bound

    def may_take(
        self,
        payer: Payer,
        size: int,
        taken: Mapping[Payer, int],
        users: Iterable[Payer] = (),
        unasked: int = 0,
    ) -> bool:
        """Return whether a payer may take so many bytes more. O(payers).

        `taken`: what each payer has; `users`: payers with a share of their own also without that;
        `unasked`: bytes of `taken` that may exceed the bound, and do not touch others' shares.
        """
        free = self._bound - sum(taken.values()) - size
        shares, newcomer = self._shares(taken, users)
        mine = shares.pop(payer, newcomer)
        if taken.get(payer, 0) + size <= mine:
            return free + unasked >= 0
        held = sum(max(0.0, share - taken.get(one, 0)) for one, share in shares.items())
        return free >= held + newcomer

    def over(self, taken: Mapping[Payer, int]) -> list[Payer]:
        """Return the payers above their share, the furthest relative to its weight first."""
        shares, _ = self._shares(taken, ())
        over = {
            one: (size - shares[one]) / self._quotas.weight(one)
            for one, size in taken.items()
            if size > shares[one]
        }
        return sorted(over, key=lambda one: -over[one])

    def _shares(
        self, taken: Mapping[Payer, int], users: Iterable[Payer]
    ) -> tuple[dict[Payer, float], float]:
        """Return the share of each payer that uses the bound, and that of all others together; 0
        if there are no others."""
        quotas = self._quotas
        users = {*users, *taken, *(one for one in quotas.payers if quotas.floor(one))}
        has_others = not users.issuperset(quotas.payers)
        weights = sum(map(quotas.weight, users)) + has_others
        most = HELD_PART * self._bound
        by_weight = most / weights if weights else 0.0
        shares = {
            one: max(by_weight * quotas.weight(one), min(most, quotas.floor(one))) for one in users
        }
        newcomer = by_weight if has_others else 0.0
        scale = min(1.0, most / max(1.0, sum(shares.values()) + newcomer))
        return {one: share * scale for one, share in shares.items()}, newcomer * scale
