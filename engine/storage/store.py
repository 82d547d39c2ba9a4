"""An open store on disk: what is found there, fetched, renewed, erased and dropped.

`DiskStore` belongs to one thread, the storage process's main one, and waits for no slab: a store is
its writer's `plan`, then `write` in another thread, then `commit`; a fetch is `plan_fetch`, the
reader's `read` in another thread, then `finish_read`. A place is written and synced before its row
is committed, and a row is gone before its place is used again. So a crash in between leaves a free
place, or a row that its place's header contradicts, which is dropped when it is read.

It knows no socket and no process. A `DiskError` that leaves a method means that the disk cannot be
used: the store is closed and opened again later.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress

import apsw

from engine.api import Namespace
from engine.errors import EngineError
from engine.moves import (
    EraseStored,
    Fetch,
    Fetched,
    Look,
    Looked,
    Recall,
    Recalled,
    RecordId,
    Renew,
    Renewed,
    StorageStats,
    StoredErased,
)
from engine.statistics import PayerBytes
from engine.storage.batch_writer import BatchWriter
from engine.storage.index.index import RecordIndex, RecordRow
from engine.storage.index.index_file import INDEX_NAME
from engine.storage.index.namespace_rows import Scope
from engine.storage.index.promise_rows import PromiseRows
from engine.storage.index.remote_rows import REMOTE, level_of
from engine.storage.plans import PlannedRead, PlannedStore
from engine.storage.reader import RecordReader
from engine.storage.remote.copies import PUT_PART, LentParts, RemoteCopies
from engine.storage.remote.link import RemoteLink
from engine.storage.remote.room import RemoteRoom
from engine.storage.remote.shared_copies import SharedCopies
from engine.storage.remote.shared_reads import SharedReads, SharedSpaces
from engine.storage.sealing.seals import Seals
from engine.storage.slabs.record import place_bytes_of
from engine.storage.slabs.slabs import DiskCalls, Place, SlabFiles
from engine.storage.space.disk_space import DiskSpace, StoreSettings
from engine.storage.space.quotas import DiskQuotas, DiskUsage
from engine.storage.space.write_budget import WriteBudget

EXPIRE_BATCH = 2_048
NOTE_MS = 30_000
"""Milliseconds between two notes of the time and of the latest uses."""
DiskError = (apsw.Error, OSError, EngineError)
"""What a store raises that cannot be opened, or used any more."""


class StoreClock:
    """Wall-clock milliseconds that never go back, also over restarts.

    Instants on disk must outlive the process, so they are of the wall clock. Where that went back,
    the store's own time goes on with the monotonic clock from the latest instant that it has seen:
    a clock that went back lengthens no limit. `went_back_ms`: how far it was behind that instant
    when the store was opened.
    """

    def __init__(
        self, wall_ms: Callable[[], int], monotonic_s: Callable[[], float], last_ms: int
    ) -> None:
        """Both clocks are read at each call; `last_ms`: the latest instant on disk."""
        self._wall_ms, self._monotonic_s = wall_ms, monotonic_s
        self.went_back_ms = max(0, last_ms - wall_ms())
        self._base_ms = max(last_ms, wall_ms())
        self._base_s = monotonic_s()

    def now_ms(self) -> int:
        """Return the present instant: the greater of the wall clock and the time that passed."""
        now_s, wall_ms = self._monotonic_s(), self._wall_ms()
        passed_ms = self._base_ms + int((now_s - self._base_s) * 1_000)
        if wall_ms > passed_ms:
            self._base_ms, self._base_s = wall_ms, now_s
            return wall_ms
        return passed_ms


class DiskStore:
    """An open store. `writer`: of records, `reader`: of their bytes, `slabs`: of their places;
    `quotas`: who may have how much, `usage`: who has; `remote`: None without a remote store,
    `shared`: the same if replicas share it.
    """

    def __init__(
        self,
        settings: StoreSettings,
        view: Callable[[int, int], memoryview],
        wall_ms: Callable[[], int],
        uptime_s: Callable[[], float],
        calls: DiskCalls,
        tick: Callable[[], None] = lambda: None,
        seals: Seals | None = None,
        link: RemoteLink | None = None,
    ) -> None:
        """Open the store of a folder that is ready, or make it. O(records).

        `view` returns a slot's bytes, of a size. `tick` is called now and then while a long query
        or change runs; it may call `stats`. `seals`: of a sealed store; closed with it. `link`: the
        way to a remote store, which only a sealed store may have. Raises IndexUnusable, apsw.Error,
        OSError.
        """
        self._settings, self._calls, self._uptime_s = settings, calls, uptime_s
        self._seals = seals
        self._view = view
        self.remote: RemoteCopies | None = None
        self.shared: SharedCopies | None = None
        self._promised: dict[int, int] = {}
        self._noted_ms = self._count_promised_at_ms = 0
        self.fetched_total = self.expired_total = self.damaged_total = 0
        self.read_bytes, self.read_seconds = 0, 0.0
        folder = settings.folder
        place_sizes = {size: place_bytes_of(size) for size in settings.slot_sizes}
        present_sizes = sorted(set(place_sizes.values()), reverse=True)
        may_make = not any(folder.glob("*.slab"))
        with ExitStack() as opened:
            index = RecordIndex(folder / INDEX_NAME, may_make=may_make, tick=tick, seals=seals)
            self._index = opened.enter_context(closing(index))
            slabs = SlabFiles(folder, settings.slab_bytes, calls)
            self.slabs = opened.enter_context(closing(slabs))
            index.reserve_ids()
            self.clock = StoreClock(wall_ms, uptime_s, int(index.file.meta("last_ms", 0)))
            self._promises = PromiseRows(index)
            self.reader = RecordReader(slabs, view, index.file.store_id, present_sizes[0], uptime_s)
            self.usage = DiskUsage()
            self.quotas = DiskQuotas(settings.disk_bytes, present_sizes[0])
            pinned: set[RecordId] = set()
            self._space = DiskSpace(
                *(settings, index, slabs, self.usage, self.quotas, present_sizes),
                pinned=pinned,
                now_ms=self.clock.now_ms,
                drop=self._drop,
                demote=self._demote,
            )
            self._take_stock()
            self.writer = BatchWriter(
                *(index, slabs, self.usage, self._space, self._promises, view),
                place_sizes=place_sizes,
                run_tokens=settings.run_tokens,
                budget=WriteBudget(
                    index.file, self.quotas, self.usage, settings.write_bytes_per_day
                ),
                pinned=pinned,
                now_ms=self.clock.now_ms,
                drop=self._drop,
                committed=self._committed,
            )
            if link is not None:
                self.remote = self._remote_copies(link)
            opened.pop_all()

    def _take_stock(self) -> None:
        """Count places and sums; delete the rows whose place does not exist."""
        index, names, sizes = self._index, self._index.names, self.slabs.sizes
        if gone := index.outside(sizes):
            with index.file.change():
                self.damaged_total += len(index.delete_under(gone))
        for number in sizes:
            self.slabs.set_used(number, index.used_places(number))
        for scope_id, payer_id, fidelity, count, places, size in index.sums():
            self.usage.add_bytes(names.payer_name(payer_id), size, fidelity, places)
            self.usage.add_records(names.scope_of(scope_id).namespace, count)
        with index.file.change():
            self._remove_scopes(lambda scope: True)
            self._note_time()
        if self._seals is not None:
            self._seals.keep_only({scope.namespace for scope in names.scopes})
        self._promised = index.promised(self.clock.now_ms())

    def _remote_copies(self, link: RemoteLink) -> RemoteCopies:
        assert self._seals is not None, "only a sealed store has copies elsewhere"
        settings, name = self._settings, self._seals.store_name
        lent = LentParts(
            self._index,
            self.slabs,
            self.reader,
            link,
            store_name=name,
            room=RemoteRoom(settings.remote_bytes, self.quotas),
            give_up_place=self._give_up_place,
            cold=self._space.order.next_dropped,
            drop=self._drop,
            now_ms=self.clock.now_ms,
            uptime_s=self._uptime_s,
        )
        if not settings.shared_model:
            return RemoteCopies(lent)
        spaces = SharedSpaces(self._seals, settings.shared_model)
        clocks = self.clock.now_ms, self._uptime_s
        reads = SharedReads(link, spaces, name, settings.run_tokens, self._view, *clocks)
        self.shared = SharedCopies(lent, spaces, reads, self.usage.keep, self.usage.let_go)
        return self.shared

    def close(self) -> None:
        """Write down what is in memory alone, and close the files. Safe to repeat."""
        with suppress(Exception):  # the disk may be why the store is closed
            with self._index.file.change():
                self._index.write_uses()
                self._note_time()
            self._index.file.empty_log()
        self._index.close()
        self.slabs.close()
        if self._seals is not None:
            self._seals.close()

    def keep_here(self, namespaces: Iterable[Namespace]) -> None:
        """Put nothing more of these namespaces into the remote store."""
        if self.remote is not None:
            with self._index.file.change():
                self.remote.keep_here(namespaces)

    def sync_log(self) -> None:
        """Make all commits survive a power cut. For another thread. Raises OSError."""
        fd = os.open(self._index.file.log_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._calls.sync(fd)
        finally:
            os.close(fd)

    def _demote(self, record_id: RecordId) -> bool:
        return self.remote is not None and self.remote.demote(record_id)

    def _committed(self, stores: Sequence[PlannedStore]) -> None:
        if self.remote is not None:
            self.remote.stored(stores)

    # -- what goes ------------------------------------------------------------------------------

    def _give_up_place(self, row: RecordRow) -> None:
        payer = self._index.names.payer_name(row.payer_id)
        self.usage.add_bytes(payer, -row.place_bytes, row.fidelity)
        self.slabs.give_back(row.place)

    def _drop(self, tops: Sequence[RecordId]) -> int:
        """Delete records with everything under them, in the caller's transaction."""
        return len(self._drop_rows(tops))

    def _drop_rows(self, tops: Sequence[RecordId]) -> list[RecordRow]:
        rows = self._index.delete_under(tops)
        for row in rows:
            self.usage.add_records(self._index.names.scope_of(row.scope_id).namespace, -1)
            if row.slab != REMOTE:
                self._give_up_place(row)
        return rows

    # -- look, fetch, renew ---------------------------------------------------------------------

    def look(self, command: Look) -> Looked:
        """Walk the tokens from the root. About 10 us a run."""
        may_fetch = None if self.remote is None else self.remote.may_fetch
        size, now_ms = self._settings.run_tokens, self.clock.now_ms()
        return self._index.walk(command, size, now_ms, may_fetch=may_fetch)

    def plan_fetch(self, command: Fetch) -> list[PlannedRead | Fetched]:
        """Return a read for each record, or its failure where there is nothing to read."""
        now_ms = self.clock.now_ms()
        scope = self._index.names.scope(command.namespace)
        plans: list[PlannedRead | Fetched] = []
        for record_id, slot in zip(command.record_ids, command.slots, strict=True):
            row = self._index.live_row(scope, record_id, now_ms)
            if row is None or row.payload_bytes != command.slot_bytes:
                plans.append(Fetched(command.call_id, record_id, False))
                continue
            assert scope is not None, "a live row has a scope"
            name = ""
            if row.slab != REMOTE:
                self.slabs.hold(row.place)
            elif self.remote is not None:
                name = self.remote.rows.name_of(record_id)
            facts = command.call_id, command.namespace, row, slot, scope.seal, name
            plans.append(PlannedRead(*facts))
        return plans

    def fetch_remote(self, plan: PlannedRead, then: Callable[[], None]) -> bool:
        """Fetch a record that lies in the remote store alone; return whether it does. `then` is
        called when it has come, or has failed."""
        if plan.row.slab != REMOTE:
            return False
        if self.remote is None:
            then()
        else:
            self.remote.fetch(plan, then)
        return True

    def finish_read(self, plan: PlannedRead) -> Fetched:
        """Return the outcome; strike a damaged record. Raises OSError if the disk failed."""
        row, now_ms = plan.row, self.clock.now_ms()
        level = level_of(row.slab)
        if level == "disk":
            self.slabs.release(row.place)
        is_there = self._index.row(row.record_id) is not None and row.limit_ms > now_ms
        if plan.verdict == "damaged" and is_there:
            if level == "disk":
                self.slabs.mark_bad(row.place)
            with self._index.file.change():
                self.damaged_total += self._drop([row.record_id])
        is_done = plan.verdict == "done" and is_there
        if is_done:
            self._index.note_use(row.record_id, now_ms)
        if is_done and level == "disk":
            self.fetched_total += 1
            self.read_bytes += row.payload_bytes
            self.read_seconds += plan.seconds
        facts = level, plan.verdict == "damaged", row.check if is_done else b""
        return Fetched(plan.call_id, row.record_id, is_done, plan.seconds, *facts)

    def renew(self, command: Renew) -> Renewed:
        """Note a use of records, and lengthen their limits and promises; tell which are gone."""
        now_ms = self.clock.now_ms()
        scope = self._index.names.scope(command.namespace)
        if scope is None:
            return Renewed(command.call_id, command.record_ids)
        gone: list[RecordId] = []
        limit_ms = 0
        if command.limit_s is not None:
            limit_ms = now_ms + int(command.limit_s * 1_000)
        promise_ms = now_ms + int(command.promise_s * 1_000) if command.promise_s else 0
        with self._index.file.change():
            for record_id in command.record_ids:
                if self._index.live_row(scope, record_id, now_ms) is None:
                    gone.append(record_id)
                    continue
                self._index.note_use(record_id, now_ms)
                if limit_ms or promise_ms:
                    self._index.lengthen(record_id, limit_ms, promise_ms)
                self._index.add_leases(scope, record_id, command.lease_ids)
            self._promises.set(set(command.record_ids).difference(gone), command.terms)
        if self.remote is not None:
            if promise_ms:
                self.remote.want(command.record_ids)
            if limit_ms:
                self.remote.renewed(command.namespace)
        return Renewed(command.call_id, tuple(gone))

    def recall(self, command: Recall) -> Recalled:
        """Tell the next records that are promised. Cost: see `PromiseRows.page`."""
        return self._promises.page(command, self.clock.now_ms())

    # -- erase, expire, drop --------------------------------------------------------------------

    def erase(self, command: EraseStored) -> tuple[StoredErased, set[Place]]:
        """Delete what is named, durably; stores of the namespace under way bring nothing. Return
        the receipt and the places that had it, or are written with it just now.

        Where all of a sealed namespace goes, its key is destroyed, so that no copy of its bytes
        opens again. The bytes are wiped by the caller: `take_dirty`, `wipe`, `put_wiped` of the
        slabs, until none of the places is `unwiped`; objects in the remote store are deleted by it,
        too: `remote.settle`.
        """
        places = self.writer.erase(command.namespace)
        scope = self._index.names.scope(command.namespace)
        is_all = command.lease_id is None and not command.tokens
        seals = self._seals if is_all else None
        rows, before = list[RecordRow](), self.usage.used_bytes
        if self.remote is not None:
            with self._index.file.change():
                self.remote.erasing(command.namespace)
        if scope is not None:
            with self._index.file.change():
                rows = self._drop_rows(self._tops_to_erase(scope, command))
                if command.lease_id is not None:
                    self._index.remove_lease(scope, command.lease_id)
                is_needed = self.usage.has(command.namespace) or self.writer.is_planned(scope)
                if seals is not None or not is_needed:
                    self._index.names.remove_scope(command.namespace)
            self._index.file.empty_log()
        if seals is not None:
            seals.destroy(command.namespace)  # also a key that is older than the scope
        gone = before - self.usage.used_bytes
        places.update(row.place for row in rows if row.slab != REMOTE)
        is_shredded = seals is not None
        return StoredErased(command.call_id, len(rows), gone, is_shredded=is_shredded), places

    def _tops_to_erase(self, scope: Scope, command: EraseStored) -> list[RecordId]:
        if command.lease_id is not None:
            return self._index.leased(scope, command.lease_id)
        return self._index.tops_under(scope, command.tokens or (), self._settings.run_tokens)

    def unwiped(self, places: set[Place]) -> set[Place]:
        """Return those of erased places whose bytes are still read, written or there. O(these)."""
        written = self.writer.places
        return {place for place in places if place in written or self.slabs.is_unwiped(place)}

    def maintain(self) -> None:
        """Delete what has expired, and drop ahead of need. Call each second.

        Writes nothing where nothing changes, but for the time, twice a minute.
        """
        now_ms = self.clock.now_ms()
        self._index.reserve_ids()
        expired = [
            one
            for one in self._index.expired(now_ms, EXPIRE_BATCH)
            if one not in self.writer.pinned
        ]
        is_due = now_ms - self._noted_ms >= NOTE_MS
        is_over = self._space.is_over and self.writer.batch is None
        if expired or is_due or is_over or self._space.is_high:
            with self._index.file.change():
                self._index.write_uses()
                self._note_time()
                self.expired_total += self._drop(expired)
                self._remove_scopes(lambda scope: not self.writer.is_planned(scope))
                if is_over:
                    self._space.shrink()
                self._space.drop_ahead()
        if self.remote is not None:
            room = self._settings.disk_bytes - self._index.file.file_bytes
            self.remote.tick(self.usage.used_bytes > PUT_PART * room)
        if now_ms >= self._count_promised_at_ms:
            began_s = self._uptime_s()
            self._promised = self._index.promised(now_ms)
            took_ms = int(1_000 * (self._uptime_s() - began_s))
            self._count_promised_at_ms = now_ms + 100 * took_ms

    def _remove_scopes(self, may_go: Callable[[Scope], bool]) -> None:
        """Remove the scopes of namespaces without records, in the caller's transaction. A key of
        theirs stays until the store is opened again. O(scopes)."""
        for scope in self._index.names.scopes:
            if not self.usage.has(scope.namespace) and may_go(scope):
                self._index.names.remove_scope(scope.namespace)

    def _note_time(self) -> None:
        self._noted_ms = self.clock.now_ms()
        self._index.file.set_meta("last_ms", self._noted_ms)

    # -- statistics -----------------------------------------------------------------------------

    def stats(self) -> StorageStats:
        """Return the heartbeat. O(payers)."""
        promised = {
            self._index.names.payer_name(number): size for number, size in self._promised.items()
        }
        return StorageStats(
            "full" if self._space.full_reason else "open",
            self._space.full_reason,
            capacity_bytes=self._settings.disk_bytes,
            used_bytes=self.usage.used_bytes,
            promised_bytes=sum(promised.values()),
            records=self.usage.records,
            stored_total=self.writer.stored_total,
            fetched_total=self.fetched_total,
            dropped_total=self.writer.replaced_total + self._space.order.dropped_total,
            expired_total=self.writer.expired_total + self.expired_total,
            damaged_total=self.damaged_total,
            written_bytes_total=self.writer.written_bytes_total,
            written_bytes_today=self.writer.written_today,
            read_bytes_per_s=self.read_bytes / self.read_seconds if self.read_seconds else 0.0,
            namespaces=len(self.usage.namespaces),
            payers=tuple(
                PayerBytes(payer, size, promised.get(payer, 0))
                for payer, size in self.usage.used.items()
            ),
            copies=self.usage.copies(),
            remote=None if self.remote is None else self.remote.stats(),
        )

    def check(self) -> None:
        """Recount usage, places and children from the index; no batch may be under way.

        O(records). Raises InvariantViolation at the first mismatch.
        """
        assert self.writer.batch is None, "planned bytes count as used, and are not in the index"
        self._space.check()
