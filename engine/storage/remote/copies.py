"""What of a store lies in the remote store: which records are put there, fetched and deleted.

Promised records are put as soon as they are stored, others when the disk gets full: the ones that
would be dropped next; of namespaces that may leave the machine, and of no others. An object is a
record's bytes as they lie on disk, sealed. A record with an object is *demoted* instead of
dropped: its place is freed, its row stays. Nothing waits for it: what cannot be put in time is
dropped, and what does not come back in time is a miss.

`DiskStore` owns it, and lends it what it needs; the rules of rows are in `remote_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from engine.api import Namespace, Payer
from engine.moves import RecordId, RemoteStats, SharedErased
from engine.storage.index.index import RecordIndex, RecordRow
from engine.storage.index.remote_rows import (
    PADDING_BYTES_MAX,
    REMOTE,
    RemoteRows,
    object_name,
)
from engine.storage.plans import PlannedRead, PlannedStore
from engine.storage.reader import RecordReader
from engine.storage.remote.link import RemoteLink, Work
from engine.storage.remote.objects import ObjectMissing, RemoteFailed, RemoteStore
from engine.storage.remote.room import RemoteRoom
from engine.storage.slabs.record import HEADER_BYTES, DamagedRecord
from engine.storage.slabs.slabs import SlabFiles

PUT_PART = 0.85
"""Part of the disk above which unpromised records are put, before they have to be dropped."""
PUTS_MAX = 8
SHARED_PATTERN = "*/o/*"
"""The names of objects in shared stores, and no other ones."""
COLD_MAX = 64
"""Records that are looked at for the next puts: some may not leave the machine."""
DELETES_MAX = 256
WANTED_MAX = 65_536
"""Promised records without an object that the start looks for."""
DELETIONS: Payer = b""
"""What deletions, which may concern several payers, count as."""
COUNT_MS = 5_000
"""Milliseconds between two counts of the objects."""


@dataclass(frozen=True)
class LentParts:
    """What a store on disk lends its remote part."""

    index: RecordIndex
    slabs: SlabFiles
    reader: RecordReader
    link: RemoteLink
    store_name: str
    room: RemoteRoom
    give_up_place: Callable[[RecordRow], None]
    """Of a record on disk."""
    cold: Callable[[int], Iterable[RecordId]]
    """Records that are dropped next for room."""
    drop: Callable[[list[RecordId]], int]
    now_ms: Callable[[], int]
    uptime_s: Callable[[], float]


class RemoteCopies:
    """The remote part of one open store. One thread uses it.

    `is_shared`: other owners put and fetch the same objects; an erasure waits for its deletions.
    """

    is_shared = False

    def __init__(self, lent: LentParts) -> None:
        self.rows = RemoteRows(lent.index.file)
        self._index, self._slabs, self._reader = lent.index, lent.slabs, lent.reader
        self._link, self._store_name, self._room = lent.link, lent.store_name, lent.room
        self._give_up_place, self._cold, self._drop = lent.give_up_place, lent.cold, lent.drop
        self._now_ms, self._uptime_s = lent.now_ms, lent.uptime_s
        # By payer; the payer whose turn is next comes first.
        self._wanted: dict[Payer, dict[RecordId, None]] = {}
        self._kept_here: set[Namespace] = set()
        self._putting: set[str] = set()  # until the outcome
        self._writing: set[str] = set()  # until the thread ends, which may be later
        self._is_full = False
        self._deleting: set[str] = set()
        self.put_total = self.fetched_total = self.damaged_total = self.dropped_total = 0
        self._read_bytes, self._read_s = 0, 0.0
        self._count_at_ms = 0
        self._leave_other_scheme()
        self._count()
        self.want(self._first_wanted())

    def _leave_other_scheme(self) -> None:
        """Give up what was put while the store was shared, and now is not, or the other way."""
        with self._index.file.change():
            if self.is_shared:
                self._drop(self.rows.remote_alone())
            for one in self.rows.others_scheme(SHARED_PATTERN, is_shared=self.is_shared):
                self.rows.give_up_object(one)

    @property
    def is_open(self) -> bool:
        """Whether the store answers, as far as is known."""
        return self._link.is_open

    def _first_wanted(self) -> list[RecordId]:
        """Return the records that have no object yet and should."""
        return self.rows.promised_without(self._now_ms(), WANTED_MAX)

    def may_fetch(self, record_id: RecordId) -> bool:
        """Return whether the store answers for the payer of a record, as far as is known. O(log
        n)."""
        row = self._index.row(record_id)
        return row is not None and self._link.is_open_for(self._payer(row))

    def _payer(self, row: RecordRow) -> Payer:
        return self._index.names.payer_name(row.payer_id)

    def want(self, record_ids: Iterable[RecordId]) -> None:
        """Have promised records put."""
        for record_id in record_ids:
            payer_id = self.rows.payer_of(record_id)
            if payer_id is not None:
                payer = self._index.names.payer_name(payer_id)
                self._wanted.setdefault(payer, {})[record_id] = None

    # -- who may leave --------------------------------------------------------------------------

    def stored(self, stores: Sequence[PlannedStore]) -> None:
        """Note which namespaces may leave the machine, and have promised records put. In the
        transaction that has committed their rows."""
        for one in stores:
            scope = self._index.names.scope(one.command.namespace)
            if scope is None or scope is not one.scope:
                continue  # erased meanwhile
            if one.command.may_leave and scope.namespace not in self._kept_here:
                self.rows.let_leave(scope.scope_id)
            else:
                self.rows.keep_here(scope.scope_id)
        self.want(self._wanted_of(stores))

    def _wanted_of(self, stores: Sequence[PlannedStore]) -> list[RecordId]:
        """Return the records of stores that get an object at once."""
        return [run.record_id for one in stores for run in one.runs if run.run.promise_s]

    def keep_here(self, namespaces: Iterable[Namespace]) -> None:
        """Put nothing more of these namespaces, also where a store under way says that they may
        leave. In the caller's transaction."""
        for namespace in namespaces:
            self._kept_here.add(namespace)
            scope = self._index.names.scope(namespace)
            if scope is not None:
                self.rows.keep_here(scope.scope_id)

    # -- fetch ----------------------------------------------------------------------------------

    def fetch(self, plan: PlannedRead, then: Callable[[], None]) -> None:
        """Fetch a record's object; set the plan's verdict and payload, then call `then`."""
        if not plan.object_name:  # a row that no program of ours has written
            plan.verdict = "damaged"
            then()
            return
        found: list[memoryview] = []
        got = partial(self._got, plan, found, then)
        self._link.run(self._payer(plan.row), partial(self._get, plan, found), got)

    def _get(self, plan: PlannedRead, found: list[memoryview], store: RemoteStore) -> None:
        """Read and open an object; what is missing or does not open is not `found`. For another
        thread."""
        size = HEADER_BYTES + plan.row.payload_bytes
        began_s = self._uptime_s()
        try:
            data = store.get(plan.object_name, size + PADDING_BYTES_MAX)
            payload = self._reader.opened(plan, data)
        except (DamagedRecord, ObjectMissing):
            return
        plan.seconds = self._uptime_s() - began_s
        found.append(memoryview(bytes(payload)))  # this thread's next one uses the buffer

    def _got(
        self, plan: PlannedRead, found: list[memoryview], then: Callable[[], None], failure: str
    ) -> None:
        """Take what came. After a deadline nothing more does."""
        if failure:
            plan.verdict = "failed"
        elif not found:
            plan.verdict = "damaged"
            self.damaged_total += 1
        elif self._reader.fill(plan, found[0]):
            self.fetched_total += 1
            self._read_bytes += plan.row.payload_bytes
            self._read_s += plan.seconds
        then()

    # -- put, delete, make room -----------------------------------------------------------------

    def tick(self, is_full: bool) -> None:
        """Begin what is to be done now. Call each second, outside a transaction.

        `is_full`: records will soon be dropped for room.
        """
        now_ms, self._is_full = self._now_ms(), is_full
        if now_ms >= self._count_at_ms:
            self._count()
        with self._index.file.change():
            self.rows.date_tombstones(now_ms - 1)
        if not self._link.is_open:
            return
        self._delete_some()
        if refusals := self._room.begin_turn():
            with self._index.file.change():
                for payer, givers in refusals.items():
                    any(self._give_up(one, now_ms, for_others=one != payer) for one in givers)
            self._count()
        self._put_some()

    def _count(self) -> None:
        """Count objects and tombstones. O(objects)."""
        self._count_at_ms = self._now_ms() + COUNT_MS
        self._sums = self.rows.sums()
        payer_name = self._index.names.payer_name
        self._room.recount({payer_name(one): size for one, size in self._sums.used.items()})

    def _give_up(self, payer: Payer, now_ms: int, *, for_others: bool) -> bool:
        """Give up objects of a payer, those first that were not used; return whether it had any.
        For others those, too, whose record lies on disk as well."""
        payer_id = self._index.names.payer_id(payer)
        coldest = self.rows.coldest(payer_id, now_ms, PUTS_MAX)
        self.dropped_total += self._drop(coldest)
        twice = self.rows.duplicates(payer_id, PUTS_MAX) if for_others and not coldest else []
        for record_id in twice:
            self.rows.give_up_object(record_id)
        return bool(coldest or twice)

    def _put_some(self) -> None:
        """Begin to put what is wanted, of one payer after another, and what would be dropped
        next."""
        while self.is_open and len(self._writing) < PUTS_MAX:
            payer = next(filter(self._may_put, self._wanted), None)
            if payer is None:
                break
            records = self._wanted.pop(payer)
            record_id = next(iter(records))
            del records[record_id]
            if records:
                self._wanted[payer] = records
            self._begin_put(record_id, is_cold=False)
        left = PUTS_MAX - len(self._writing) if self._is_full else 0
        for record_id in self._cold(COLD_MAX) if left > 0 else ():
            if self.rows.name_of(record_id):
                left -= self.demote(record_id)
            else:
                left -= self._begin_put(record_id, is_cold=True)
            if left <= 0:
                break

    def _may_put(self, payer: Payer) -> bool:
        return self._link.is_open_for(payer) and not self._room.has_refused(payer)

    def demote(self, record_id: RecordId) -> bool:
        """Free the place of a record that has an object; return whether it has one."""
        row = self._index.row(record_id)
        if row is None or row.slab == REMOTE or not self.rows.name_of(record_id):
            return False
        with self._index.file.change_or_join():
            self.rows.demote(record_id)
        self._give_up_place(row)
        return True

    def _begin_put(self, record_id: RecordId, *, is_cold: bool) -> bool:
        """Begin to put a record, if it has no object and may leave; return whether it is begun, or
        under way already."""
        row = self._index.row(record_id)
        if row is None or row.slab == REMOTE or self.rows.name_of(record_id):
            return False
        if not self.is_open or not self.rows.may_leave(row.scope_id):
            return False
        payer = self._payer(row)
        name = self._name_of(row)
        if name in self._putting or name in self._writing:
            return True
        if not self._may_begin(row, name):
            return False
        if not (self._may_put(payer) and self._room.take(payer, row.place_bytes)):
            if not is_cold:
                self.want([record_id])
            return False
        with self._index.file.change():
            self.rows.begin_put(
                name, self._index.names.scope_of(row.scope_id).namespace, self._now_ms()
            )
        self._putting.add(name)
        self._writing.add(name)
        self._slabs.hold(row.place)
        ended = partial(self._put_ended, row, name, is_cold)
        self._link.run(payer, self._work_of(row, name), ended)
        return True

    def _name_of(self, row: RecordRow) -> str:
        """Return the name of the object that a record gets."""
        return object_name(self._store_name, row.record_id, row.scope_id)

    def _may_begin(self, row: RecordRow, name: str) -> bool:
        """Return whether an object of this name may be put now."""
        return True

    def _work_of(self, row: RecordRow, name: str) -> Work:
        """Return what puts a record's object, in another thread."""
        return partial(self._put, row, name)

    def _put(self, row: RecordRow, name: str, store: RemoteStore) -> None:
        """Copy a place's bytes to an object. For another thread."""
        try:
            store.put(name, self._bytes_on_disk(row))
        finally:
            self._writing.discard(name)

    def _bytes_on_disk(self, row: RecordRow) -> memoryview:
        buffer = memoryview(bytearray(row.place_bytes))
        try:
            came = self._slabs.read(row.place, buffer)
        except (OSError, KeyError) as error:
            raise RemoteFailed("the record could not be read") from error
        if came < row.place_bytes:
            raise RemoteFailed("the record could not be read")
        return buffer

    def _put_ended(self, row: RecordRow, name: str, is_cold: bool, failure: str) -> None:
        """Note an object that is there, or try again later. One whose record is gone, or may not
        leave any more, keeps its tombstone."""
        self._putting.discard(name)
        self._slabs.release(row.place)
        if failure and not is_cold:
            self.want([row.record_id])
        now = self._index.row(row.record_id)
        is_there = not failure and now is not None and now.place == row.place
        is_there = is_there and self.rows.may_leave(row.scope_id)
        self._room.end_put(self._payer(row), row.place_bytes, is_there=is_there)
        if not is_there:
            return
        with self._index.file.change():
            self.rows.end_put(row.record_id, row.payer_id, name, row.place_bytes)
        self.put_total += 1
        if is_cold:
            self.demote(row.record_id)
        self._put_some()

    def _delete_some(self) -> None:
        busy = {*self._putting, *self._writing, *self._deleting}
        if names := self.rows.tombstones(busy, DELETES_MAX):
            self._delete(names, lambda: None)

    def _delete(self, names: list[str], then: Callable[[], None]) -> None:
        self._deleting.update(names)
        self._link.run(DELETIONS, partial(_delete, names), partial(self._deleted, names, then))

    def _deleted(self, names: list[str], then: Callable[[], None], failure: str) -> None:
        self._deleting.difference_update(names)
        try:
            if not failure:
                with self._index.file.change():
                    self.rows.end_tombstones(names)
                self._count_at_ms = 0
        finally:
            then()

    def renewed(self, namespace: Namespace) -> None:
        """Note that limits of a namespace's records have moved."""

    def erasing(self, namespace: Namespace) -> None:
        """Note that something of a namespace is erased. In the caller's transaction, before its
        rows go."""

    def take_erased(self, namespace: Namespace) -> SharedErased | None:
        """Return what a shared store has deleted for an erasure that is settled; None for a store
        of this disk alone."""
        return None

    def settle(self, namespace: Namespace, then: Callable[[], None]) -> None:
        """Delete what an erasure in a namespace has left; call `then` when that is done, or has
        failed."""
        busy = {*self._putting, *self._writing}
        found = self.rows.tombstones_of(namespace, DELETES_MAX)
        if names := [name for name in found if name not in busy]:
            self._delete(names, then)
        else:
            then()

    # -- statistics -----------------------------------------------------------------------------

    def stats(self) -> RemoteStats:
        """Return what the heartbeat tells. O(1)."""
        is_full = self._room.is_full
        state: Literal["open", "full", "off"] = "full" if is_full else "open"
        return RemoteStats(
            state if self._link.is_open else "off",
            self._link.reason or ("engine.levels.remote.gib is reached" if is_full else ""),
            capacity_bytes=self._room.bytes_max,
            used_bytes=sum(self._sums.used.values()),
            records=self._sums.records,
            stored_total=self.put_total,
            fetched_total=self.fetched_total,
            failed_total=self._link.failed_total,
            damaged_total=self.damaged_total,
            dropped_total=self.dropped_total,
            pending_erasures=self._sums.tombstones,
            read_bytes_per_s=self._read_bytes / self._read_s if self._read_s else 0.0,
        )


def _delete(names: list[str], store: RemoteStore) -> None:
    store.delete(names)
