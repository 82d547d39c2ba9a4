"""The disk as a level: whether it is there, what it is told of payers, and what it promises.

It sends the storage process what the levels decide, and takes the outcomes of stores, looks,
renewals and recalls. The outcomes of fetches are for `loads`, those of erasures for `levels`. It
reads no clock: callers pass `now_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from engine.api import Namespace, Payer, Quota
from engine.cache import PrefixCache
from engine.cache.tree.prefix_tree import Node
from engine.config import LevelsConfig
from engine.levels.disk.lookups import DiskLookups
from engine.levels.disk.storing import Storing
from engine.levels.places import RunPlaces
from engine.levels.promises import KeptPromises
from engine.levels.restarts.recall import PromiseRecall
from engine.moves import (
    KeepHere,
    Looked,
    Recalled,
    Renewed,
    SetStoredQuotas,
    Storage,
    StorageStats,
    Stored,
)
from engine.statistics import NOT_ANSWERED

AWAY_S: Final = 60.0
"""Seconds without a disk after which the promises that it keeps count as lost."""


class DiskLevel:
    """One engine's disk. `stats`: the storage process's latest word of it."""

    def __init__(
        self,
        cache: PrefixCache,
        places: RunPlaces,
        storage: Storage,
        config: LevelsConfig,
        promises: KeptPromises,
        next_id: Callable[[], int],
        per_device_block: float,
    ) -> None:
        """`per_device_block`: the blocks that the disk has room for, for each of the device's. What
        the disk still promises is recalled at once.
        """
        self.storage = storage
        self.looks = DiskLookups(places, storage, promises, next_id, config.disk_tokens_min)
        self.storing = Storing(cache, places, next_id, config.disk_tokens_min, promises.confirm)
        self.recall = PromiseRecall(cache, places, promises, storage, next_id)
        self.stats = StorageStats("off", NOT_ANSWERED)
        self._places, self._config, self._promises = places, config, promises
        self._per_device_block = per_device_block
        self._quotas: dict[Payer, Quota] = {}
        self._was_heard = self._was_open = False
        self._away_s = 0.0
        promises.store_again = lambda node: self.storing.copied([node])
        self.recall.begin()

    @property
    def is_lost(self) -> bool:
        """Return whether the disk is off and was heard of."""
        return self._was_heard and self.stats.state == "off"

    @property
    def is_busy(self) -> bool:
        """Return whether outcomes of looks, stores or recalls are awaited, or stores wait."""
        return bool(self.looks) or self.storing.has_work or self.recall.is_under_way

    def take(
        self, outcome: Stored | Looked | Renewed | Recalled | StorageStats, now_s: float
    ) -> None:
        """Take an outcome of the storage."""
        if isinstance(outcome, Stored):
            self.storing.finished(outcome, now_s)
        elif isinstance(outcome, Looked):
            self.looks.take(outcome, now_s)
        elif isinstance(outcome, Renewed):
            self._promises.renewed(outcome, now_s)
        elif isinstance(outcome, Recalled):
            self.recall.take(outcome, now_s)
        else:
            self._hear(outcome)

    def notice_absence(self, passed_s: float) -> None:
        """Give up what only the disk has once it has been away for too long."""
        if self.stats.state != "off" or not self._was_open:
            self._away_s = 0.0
            return
        self._away_s += passed_s
        if self._away_s > AWAY_S:
            self._was_open = False
            self._promises.level_gone()

    def store(self, now_s: float) -> None:
        """Send the stores that may begin now."""
        for command in self.storing.next_stores(now_s):
            self.storage.send(command)

    def store_all(self, copies: Iterable[Node]) -> None:
        """Have all promised copies stored that are not, if the disk is open. O(copies)."""
        if self.stats.state == "open":
            self.storing.copied_all(copies)

    def keep_here(self, namespace: Namespace) -> None:
        """Have nothing more of a namespace put into the remote store, if there is one."""
        if self._config.remote.url:
            self.storage.send(KeepHere((namespace,)))

    def note_quota(self, payer: Payer, quota: Quota) -> None:
        """Tell the storage a payer's part of the disk if that has changed. O(1)."""
        if self._quotas.get(payer) != quota:
            self.set_quota(payer, quota)

    def set_quota(self, payer: Payer, quota: Quota) -> None:
        """Tell the storage a payer's part of the disk, in blocks."""
        self._quotas[payer] = quota
        part, ceiling = self._per_device_block, quota.ceiling_blocks
        most = None if ceiling is None else int(ceiling * part)
        scaled = Quota(int(quota.floor_blocks * part), most, quota.weight, None, payer)
        self.storage.send(SetStoredQuotas((scaled,)))

    def _hear(self, stats: StorageStats) -> None:
        """Take the disk's state; where it has come back, store and recall what was missed."""
        was, self.stats, self._was_heard = self.stats.state, stats, True
        self._was_open = self._was_open or stats.state != "off"
        if was == "off" and stats.state != "off":
            self.recall.begin()
        if was != "open":
            self.store_all(self._places)
        per_day = self._config.disk_write_gib_per_day or self._config.disk_gib
        has_budget = stats.written_bytes_today < per_day * 2**30
        self.storing.has_budget = stats.state == "open" and has_budget
