"""The room of one disk: places for records, slabs laid out and removed, a disk that is full.

It knows no command and no batch; `engine.storage.store` and `engine.storage.batch_writer` call it,
in their transactions.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from engine.api import Payer
from engine.errors import InvariantViolation
from engine.moves import ROOT, RecordId
from engine.storage.index.index import RecordIndex
from engine.storage.index.remote_rows import REMOTE
from engine.storage.slabs.slabs import Place, SlabFiles
from engine.storage.space.eviction_order import DiskEvictionOrder
from engine.storage.space.quotas import DiskQuotas, DiskUsage

HIGH_PART, RESUME_PART = 0.95, 0.90
"""Parts of the disk above which records are dropped ahead of need, and below which a disk that was
full takes records again."""
DROP_AHEAD_TURNS = 128
"""How often one `drop_ahead` makes room, by a few records each time: a look waits."""
NO_SLAB_MS = 60_000
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
SLABS_MIN = 32
"""Slabs that a disk has room for, at least, where records have several sizes."""


@dataclass
class StoreSettings:
    """How much a store may take."""

    folder: Path
    disk_bytes: int
    slot_sizes: tuple[int, ...]
    """The bytes of copies, by format."""
    slab_bytes: int = 2**30
    write_bytes_per_day: int = 0
    """0 for as much as `disk_bytes`."""
    run_tokens: int = 16
    spare_bytes: int = 2 * 2**30
    """Left to others on its file system."""
    remote_bytes: int = 0
    """In the remote store; 0: without a bound."""
    shared_model: str = ""
    """The digest of the model whose replicas share the remote store; empty: it is this disk's."""

    def __post_init__(self) -> None:
        """Cut slabs so that each size may have some of its own."""
        if len(self.slot_sizes) > 1:
            self.slab_bytes = min(self.slab_bytes, self.disk_bytes // SLABS_MIN)
        self.write_bytes_per_day = self.write_bytes_per_day or self.disk_bytes


class DiskSpace:
    """The room of one open store. `full_reason`: why the disk takes nothing new; "" if it does.
    `order`: what goes first.

    Methods may raise apsw.Error and OSError.
    """

    def __init__(
        self,
        settings: StoreSettings,
        index: RecordIndex,
        slabs: SlabFiles,
        usage: DiskUsage,
        quotas: DiskQuotas,
        sizes: Sequence[int],
        *,
        pinned: Set[RecordId],
        now_ms: Callable[[], int],
        drop: Callable[[Sequence[RecordId]], int],
        demote: Callable[[RecordId], bool],
    ) -> None:
        """`sizes`: of the places that this engine's records take, the largest first. Others: as in
        `DiskEvictionOrder`."""
        self._settings, self._index, self._slabs, self._usage = settings, index, slabs, usage
        self._sizes, self._now_ms, self._drop = sizes, now_ms, drop
        self._quotas = quotas
        self.order = DiskEvictionOrder(
            *(index, slabs, usage, quotas, sizes),
            pinned=pinned,
            now_ms=now_ms,
            drop=drop,
            demote=demote,
        )
        self.full_reason = ""
        self._no_slab_until_ms = 0

    # -- places ---------------------------------------------------------------------------------

    def take(self, payer: Payer, size: int) -> Place | str:
        """Take a place of a size, after dropping records by their order if none is free; or say why
        not."""
        if self.full_reason:
            return "full"
        ceiling = self._quotas.ceiling(payer)
        while ceiling is not None and self._usage.used.get(payer, 0) + size > ceiling:
            others = set(self._slabs.place_sizes().values()).difference(self._sizes)
            if not self.order.drop_leaves(payer, 1, [*sorted(others), *self._sizes]):
                return "over_quota"
        while (place := self._slabs.take(size)) is None:
            if self._slabs.is_wiping:
                return "full"  # for a moment: nothing is dropped for it
            if not self._grow(size) and not self.order.make_room(payer, size):
                return "full"
        return place

    def _grow(self, size: int) -> bool:
        """Lay out one more slab of places of a size if the disk may hold it."""
        left = self._settings.disk_bytes - self._slabs.total_bytes - self._index.file.file_bytes
        if self._now_ms() < self._no_slab_until_ms or left < size:
            return False
        found = os.statvfs(self._settings.folder)
        wanted = min(left, self._slabs.new_slab_bytes(size))
        free = found.f_bavail * found.f_frsize - self._settings.spare_bytes
        if free < wanted:
            self._set_full("the file system has less than 2 GiB to spare")
            return False
        try:
            self._slabs.make_slab(size, left)
        except OSError as error:
            self.note_write_error(error)
            return False
        return True

    def note_write_error(self, error: OSError) -> None:
        """Take nothing new for a while if the disk is full; raise another error."""
        if error.errno not in NO_ROOM:
            raise error
        self._set_full(f"the disk is full: {error.strerror}")

    def _set_full(self, reason: str) -> None:
        self.full_reason = reason
        self._no_slab_until_ms = self._now_ms() + NO_SLAB_MS

    # -- ahead of need --------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether there are more slabs than the disk may have: it got smaller by configuration."""
        return self._slabs.total_bytes > self._settings.disk_bytes

    @property
    def is_high(self) -> bool:
        """Whether `drop_ahead` has something to do."""
        high = self._usage.used_bytes > HIGH_PART * self._settings.disk_bytes
        return high or bool(self.full_reason)

    def shrink(self) -> None:
        """Remove the last slab without promises; no batch may be under way.

        Its records go, with everything under them; one slab a call. A slab with places that are
        read or wiped just now goes in a later one.
        """
        now_ms = self._now_ms()
        for number in sorted(self._slabs.sizes, reverse=True):
            under = self._index.under(self._index.of_slab(number, now_ms)[0])
            if not any(row.promise_ms > now_ms for row in under.values()):
                self.order.dropped_total += self._drop(list(under))
                self._slabs.remove_if_empty(number)
                return

    def drop_ahead(self) -> None:
        """Drop what goes first while the disk is nearly full; take new records again below."""
        room, part = self._settings.disk_bytes, HIGH_PART
        if self.full_reason:
            room = sum(self._slabs.places(size) * size for size in self._sizes)
            part = RESUME_PART
        turns = 0
        while self._usage.used_bytes > part * room:
            turns += 1
            if turns > DROP_AHEAD_TURNS or not self.order.make_room(b""):
                return
        if self.full_reason and (room or self._now_ms() >= self._no_slab_until_ms):
            self.full_reason = ""

    # -- the checker ----------------------------------------------------------------------------

    def check(self) -> None:
        """Recount usage, places and children from the index.

        O(records). Raises InvariantViolation at the first mismatch.
        """
        names, recount = self._index.names, DiskUsage()
        children: Counter[RecordId] = Counter()
        places: set[Place] = set()
        ids: set[RecordId] = set()
        for row in self._index.rows():
            recount.add_records(names.scope_of(row.scope_id).namespace, 1)
            ids.add(row.record_id)
            children[row.parent] += 1
            if row.slab != REMOTE:
                recount.add_bytes(names.payer_name(row.payer_id), row.place_bytes, row.fidelity)
                places.add(row.place)
        if self._usage.sums() != recount.sums():
            raise InvariantViolation(f"usage {self._usage.sums()}, recounted: {recount.sums()}")
        if not children.keys() <= ids | {ROOT}:
            raise InvariantViolation(f"parents {children.keys() - ids} have no row")
        if wrong := self._index.wrong_children():
            raise InvariantViolation(f"records {wrong} have other children than they say")
        self._slabs.check(places)
