"""The room of the remote store: how much each payer has there, and who gives some up for others.

It has only counts; `copies` puts, drops and deletes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from engine.api import Payer
from engine.storage.space.held_shares import HeldShares
from engine.storage.space.quotas import DiskQuotas


class RemoteRoom:
    """The bytes of all objects by payer, those on their way included."""

    def __init__(self, bytes_max: int, quotas: DiskQuotas) -> None:
        """`bytes_max`: 0 for no bound."""
        self.bytes_max = bytes_max
        self._shares = HeldShares(quotas, bytes_max)
        self._used: Counter[Payer] = Counter()
        self._on_their_way: Counter[Payer] = Counter()
        self._refused: set[Payer] = set()
        self.is_full = False

    def recount(self, used: Mapping[Payer, int]) -> None:
        """Take the bytes by payer of the objects that are there. O(payers)."""
        self._used = Counter(used)

    def take(self, payer: Payer, size: int) -> bool:
        """Take room for an object that is about to be put; return whether there is some."""
        taken = self._used + self._on_their_way
        if self.bytes_max and not self._shares.may_take(payer, size, taken):
            self._refused.add(payer)
            return False
        self._on_their_way[payer] += size
        return True

    def end_put(self, payer: Payer, size: int, *, is_there: bool) -> None:
        """Note that an object on its way is there, or does not come."""
        self._on_their_way[payer] -= size
        self._used[payer] += size if is_there else 0

    def has_refused(self, payer: Payer) -> bool:
        """Return whether a payer was refused since the last turn."""
        return payer in self._refused

    def begin_turn(self) -> dict[Payer, list[Payer]]:
        """Forget refusals; return for each payer refused who may give up objects, first to last:
        the payer itself if it is above its share, else those that are. O(payers log payers)."""
        is_over = self.bytes_max and self._used.total() > self.bytes_max
        self.is_full = bool(self._refused or is_over)
        if not self.is_full:
            return {}
        over = self._shares.over(self._used)
        givers = {one: [one] if one in over else over for one in self._refused}
        self._refused.clear()
        return givers or {b"": over}
