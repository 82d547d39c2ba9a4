"""The disk's decisions: what is stored where, found, renewed, erased, and dropped for room.

`DiskStore` belongs to one thread, the storage process's main one, and waits for no slab: a store is
`plan`, then `write` in another thread, then `commit`; a fetch is `plan_fetch`, `read` in another
thread, `finish_read`. A place is written and synced before its row is committed, and a row is gone
before its place is used again. So a crash in between leaves a free place, or a row that its place's
header contradicts, which is dropped when it is read.

It knows no socket and no process. An `apsw.Error` or an `OSError` that leaves a method means that
the disk cannot be used: the store is closed and opened again later.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

import xxhash

from engine.api import FIDELITIES, Namespace, Payer, Quota
from engine.moves import (
    ROOT,
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
    RunToStore,
    StorageStats,
    Stored,
    StoredErased,
    StoreRuns,
)
from engine.statistics import PayerBytes
from engine.storage.index.audit import check_store
from engine.storage.index.drop_order import DropOrder
from engine.storage.index.index import FOREVER_MS, INDEX_NAME, RecordIndex, RecordRow, Scope
from engine.storage.index.quotas import DiskBooks, DiskQuotas
from engine.storage.index.recalling import RecallPages
from engine.storage.index.remote_rows import REMOTE, level_of
from engine.storage.index.walking import walk
from engine.storage.plans import (
    PlannedRead,
    PlannedRun,
    PlannedStore,
    StoreSettings,
    WriteBatch,
)
from engine.storage.reader import RecordReader
from engine.storage.remote.copies import PUT_PART, RemoteCopies
from engine.storage.remote.link import RemoteLink
from engine.storage.sealing.seals import Seals
from engine.storage.slabs.place_holds import PlaceHolds
from engine.storage.slabs.record import (
    NAME_BYTES_MAX,
    RecordHeader,
    encode_header,
    pack_run,
    place_bytes_of,
)
from engine.storage.slabs.slabs import DiskCalls, Place, SlabFiles
from engine.storage.wall_clock import StoreClock

BATCH_RECORDS = 64
"""Records that one sync makes durable, if so many wait."""
EXPIRE_BATCH = 2_048
DROP_AHEAD_TURNS = 128
"""How often one `maintain` makes room ahead of need, by a few records each time: a look waits."""
HIGH_PART, RESUME_PART = 0.95, 0.90
"""Parts of the disk above which records are dropped ahead of need, and below which a disk that was
full takes records again."""
NO_SLAB_MS = 60_000
NOTE_MS = 30_000
"""Milliseconds between two notes of the time and of the latest uses."""
DAY_MS = 86_400_000
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class DiskStore:
    """An open store. `view` returns a slot's bytes, of a size."""

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

        `tick` is called now and then while a long query or change runs; it may call `stats`.
        `seals`: of a sealed store; closed with it. `link`: the way to a remote store, which only a
        sealed store may have. Raises IndexUnusable, apsw.Error, OSError.
        """
        self._settings, self._view, self._calls = settings, view, calls
        self._seals = seals
        self.remote: RemoteCopies | None = None
        self._uptime_s = uptime_s
        self._place_sizes = {size: place_bytes_of(size) for size in settings.slot_sizes}
        self._present_sizes = sorted(set(self._place_sizes.values()), reverse=True)
        self._place_bytes = self._present_sizes[0]
        folder = settings.folder
        self._index = RecordIndex(
            folder / INDEX_NAME,
            may_make=not any(folder.glob("*.slab")),
            tick=tick,
            seals=seals,
        )
        try:
            self._slabs = SlabFiles(folder, settings.slab_bytes, calls)
            try:
                self._index.reserve_ids()
                last_ms = int(self._index.meta("last_ms", 0))
                self.clock = StoreClock(wall_ms, uptime_s, last_ms)
                self._quotas = DiskQuotas(settings.disk_bytes, self._place_bytes)
                self._books = DiskBooks()
                self._reset_counts()
                self._order = DropOrder(
                    self._index,
                    self._slabs,
                    self._books,
                    self._quotas,
                    self._present_sizes,
                    pinned=self._pinned,
                    now_ms=self.clock.now_ms,
                    flush_uses=self._flush_uses,
                    drop=self._drop,
                    demote=lambda one: self.remote is not None and self.remote.demote(one),
                )
                self._load()
                if link is not None:
                    self.remote = self._remote_copies(link)
            except BaseException:
                self._slabs.close()
                raise
        except BaseException:
            self._index.close()
            raise

    def _reset_counts(self) -> None:
        self._batch: WriteBatch | None = None
        self._pinned: set[RecordId] = set()
        self._holds = PlaceHolds(self._slabs)
        self._uses: dict[RecordId, tuple[int, int]] = {}
        self._full_reason = ""
        self._no_slab_until_ms = self._noted_ms = self._count_promised_at_ms = 0
        self._promised: dict[int, int] = {}
        self._written_day = int(self._index.meta("written_day", 0))
        self._written_today = int(self._index.meta("written_today", 0))
        self.stored_total = self.fetched_total = self.replaced_total = 0
        self.expired_total = self.damaged_total = self.written_bytes_total = 0
        self.read_bytes = 0
        self.read_seconds = 0.0

    def _load(self) -> None:
        """Take stock: places, sums, and rows whose place does not exist."""
        self._store_id = self._index.store_id
        self._promises = self._index.promise_rows()
        self._recall = RecallPages(self._index, self._promises)
        self._reader = RecordReader(
            self._slabs, self._view, self._store_id, self._place_bytes, self._uptime_s
        )
        sizes = self._slabs.sizes
        if gone := self._index.outside(sizes):
            with self._index.change():
                self.damaged_total += len(self._index.delete_under(gone))
        for number in sizes:
            self._slabs.set_used(number, self._index.used_places(number))
        scopes = {scope.scope_id: scope.namespace for scope in self._index.scopes}
        for scope_id, payer_id, fidelity, count, places, size in self._index.sums():
            self._books.add_bytes(self._index.payer_name(payer_id), size, fidelity, places)
            self._books.add_records(scopes[scope_id], count)
        with self._index.change():
            for scope in self._index.scopes:
                if not self._books.has(scope.namespace):
                    self._index.remove_scope(scope.namespace)
            self._note_time()
        if self._seals is not None:
            self._seals.keep_only({scope.namespace for scope in self._index.scopes})
        self._promised = self._index.promised(self.clock.now_ms())

    def _remote_copies(self, link: RemoteLink) -> RemoteCopies:
        assert self._seals is not None, "only a sealed store has copies elsewhere"
        return RemoteCopies(
            self._index,
            self._slabs,
            self._reader,
            link,
            self._holds,
            store_name=self._seals.store_name,
            bytes_max=self._settings.remote_bytes,
            give_up_place=self._give_up_place,
            cold=self._order.next_dropped,
            drop=self._drop,
            now_ms=self.clock.now_ms,
            uptime_s=self._uptime_s,
        )

    def close(self) -> None:
        """Write down what is in memory alone, and close the files. Safe to repeat."""
        with suppress(Exception):  # the disk may be why the store is closed
            with self._index.change():
                self._flush_uses()
                self._note_time()
            self._index.empty_log()
        self._index.close()
        self._slabs.close()
        if self._seals is not None:
            self._seals.close()

    @property
    def namespaces(self) -> list[Namespace]:
        """The namespaces that have records."""
        return self._books.namespaces

    def take_changes(self) -> tuple[tuple[Namespace, ...], tuple[Namespace, ...]]:
        """Return the namespaces that got their first record and lost their last one since then."""
        return self._books.take_changes()

    def set_quotas(self, quotas: Iterable[Quota]) -> None:
        """Replace the quotas of the payers that are named."""
        self._quotas.set(quotas)

    def keep_here(self, namespaces: Iterable[Namespace]) -> None:
        """Put nothing more of these namespaces into the remote store."""
        if self.remote is not None:
            with self._index.change():
                self.remote.keep_here(namespaces)

    # -- store: plan, write, commit -------------------------------------------------------------

    def plan(self, commands: Sequence[StoreRuns]) -> WriteBatch:
        """Take places for the runs that have no record yet. At most one batch is under way."""
        assert self._batch is None, "one batch at a time: no run is planned twice"
        batch = WriteBatch()
        planned: dict[tuple[int, RecordId, bytes], RecordId] = {}
        self._index.reserve_ids()
        with self._index.change():
            for command in commands:
                batch.stores.append(self._plan_store(command, planned))
        self._batch = batch
        return batch

    def _plan_store(
        self, command: StoreRuns, planned: dict[tuple[int, RecordId, bytes], RecordId]
    ) -> PlannedStore:
        now_ms = self.clock.now_ms()
        if max(len(command.namespace), len(command.payer)) > NAME_BYTES_MAX:
            return PlannedStore(command, None, code="write_failed")
        scope = self._index.scope_for(command.namespace)
        store = PlannedStore(command, scope)
        parent = command.parent
        if parent != ROOT and self._live_row(scope, parent, now_ms) is None:
            store.code = "no_parent"
            return store
        self._pinned.add(parent)
        for run in command.runs:
            one = self._plan_run(scope, command, parent, run, planned)
            if isinstance(one, str):
                store.code = one
                break
            store.runs.append(one)
            parent = one.record_id
            self._pinned.add(parent)
        return store

    def _plan_run(
        self,
        scope: Scope,
        command: StoreRuns,
        parent: RecordId,
        run: RunToStore,
        planned: dict[tuple[int, RecordId, bytes], RecordId],
    ) -> PlannedRun | str:
        """Return the plan for one run, or why there is none."""
        now_ms = self.clock.now_ms()
        try:
            packed = pack_run(run.tokens)
        except struct.error:
            packed = b""
        place_bytes = self._place_sizes.get(command.slot_bytes)
        if len(packed) != 4 * self._settings.run_tokens or place_bytes is None:
            return "write_failed"
        kind = command.slot_bytes, FIDELITIES.index(command.fidelity)
        limit_ms = FOREVER_MS if run.limit_s is None else now_ms + int(run.limit_s * 1_000)
        promise_ms = now_ms + int(run.promise_s * 1_000) if run.promise_s else 0
        key = (scope.scope_id, parent, packed)
        found = planned.get(key, ROOT)
        if not found and (row := self._index.child(scope, parent, packed)) is not None:
            if row.limit_ms <= now_ms:
                self.expired_total += self._drop([row.record_id])
            elif (row.payload_bytes, row.fidelity) == kind:
                found = row.record_id
            else:  # of another format, which no reader of this namespace takes any more
                self.replaced_total += self._drop([row.record_id])
        if found:
            return PlannedRun(run, found, packed, limit_ms, promise_ms)
        payer = command.payer or command.namespace
        place = self._take_place(payer, place_bytes, is_promised=bool(promise_ms))
        if isinstance(place, str):
            return place
        record_id = planned[key] = self._index.next_id()
        header = RecordHeader(
            self._store_id,
            record_id,
            scope.scope_id,
            parent,
            command.namespace,
            payer,
            packed,
            command.fidelity,
            command.slot_bytes,
            run.check,
            now_ms,
            limit_ms,
            promise_ms,
        )
        self._books.add_bytes(payer, place_bytes, kind[1])
        return PlannedRun(
            run, record_id, packed, limit_ms, promise_ms, place, encode_header(header), scope.seal
        )

    def write(self, batch: WriteBatch, run_all: Callable[[list[Callable[[], None]]], None]) -> None:
        """Write the batch's records and sync them. For another thread; `run_all` runs calls and
        waits for them. Errors are noted in the batch."""
        new = [(one, run) for one in batch.stores for run in one.runs if run.place is not None]
        try:
            run_all([partial(self._write_run, batch, r, one.command.slot_bytes) for one, r in new])
            self._slabs.sync(run.place.slab for _, run in new if run.place and not run.failure)
        except OSError as error:
            batch.error = error
            for _, run in new:
                run.failure = run.failure or "write_failed"

    def _write_run(self, batch: WriteBatch, run: PlannedRun, slot_bytes: int) -> None:
        assert run.place is not None, "only new runs are written"
        try:
            payload = self._view(run.run.slot, slot_bytes)
            if xxhash.xxh3_128_digest(payload) != run.run.check:
                run.failure = "damaged"
                return
            header = run.header
            if run.seal is not None:
                header, payload = run.seal.seal(header, payload)
            self._slabs.write(run.place, header, payload)
        except IndexError:
            run.failure = "damaged"
        except OSError as error:
            batch.error = error
            run.failure = "write_failed"

    def commit(self, batch: WriteBatch) -> list[Stored]:
        """Commit the rows of what was written; return the outcomes. `sync_log` makes them last."""
        assert batch is self._batch, "the batch that was planned last"
        self._batch = None
        self._pinned.clear()
        with self._index.change():
            outcomes = [self._commit_store(store) for store in batch.stores]
            if self.remote is not None:
                self.remote.stored(batch.stores)
            self._index.set_meta("written_day", self._written_day)
            self._index.set_meta("written_today", self._written_today)
        if batch.error is not None:
            self._note_write_error(batch.error)
        return outcomes

    def _commit_store(self, store: PlannedStore) -> Stored:
        stored: list[RecordId] = []
        code, parent = store.code, store.command.parent
        if code != "erased" and parent != ROOT and self._index.row(parent) is None:
            code = "no_parent"
        failure = code if code in ("erased", "no_parent") else ""
        for run in store.runs:
            failure = failure or run.failure or self._commit_run(store, run, parent)
            if failure:
                code = failure
                self._give_up(store, run)
                continue
            parent = run.record_id
            stored.append(parent)
        return Stored(store.command.call_id, tuple(stored), code)

    def _commit_run(self, store: PlannedStore, run: PlannedRun, parent: RecordId) -> str:
        scope, command = store.scope, store.command
        assert scope is not None, "a store without a scope has no runs"
        if run.place is None:
            row = self._index.row(run.record_id)
            if row is None:
                return "no_parent"
            self._index.lengthen(run.record_id, run.limit_ms, run.promise_ms)
        else:
            payer = command.payer or command.namespace
            row = RecordRow(
                run.record_id,
                scope.scope_id,
                parent,
                run.packed,
                self._index.payer_id(payer),
                run.place.slab,
                run.place.position,
                command.slot_bytes,
                self._place_sizes[command.slot_bytes],
                run.run.check,
                FIDELITIES.index(command.fidelity),
                run.limit_ms,
                run.promise_ms,
            )
            self._index.insert(row, scope, self.clock.now_ms())
            self._books.add_records(command.namespace, 1)
            self._count_write(row.place_bytes)
        self._index.add_leases(scope, run.record_id, command.lease_ids)
        self._promises.set((run.record_id,), run.run.terms)
        return ""

    def _count_write(self, size: int) -> None:
        day = self.clock.now_ms() // DAY_MS
        if day != self._written_day:
            self._written_day, self._written_today = day, 0
        self._written_today += size
        self.written_bytes_total += size
        self.stored_total += 1

    def _give_up(self, store: PlannedStore, run: PlannedRun) -> None:
        if run.place is not None:
            command = store.command
            size = self._place_sizes[command.slot_bytes]
            fidelity = FIDELITIES.index(command.fidelity)
            self._books.add_bytes(command.payer or command.namespace, -size, fidelity)
            self._slabs.give_back(run.place)
            run.place = None

    def _note_write_error(self, error: OSError) -> None:
        if error.errno not in NO_ROOM:
            raise error
        self._set_full(f"the disk is full: {error.strerror}")

    def sync_log(self) -> None:
        """Make all commits survive a power cut. For another thread. Raises OSError."""
        fd = os.open(self._index.log_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._calls.sync(fd)
        finally:
            os.close(fd)

    # -- room -----------------------------------------------------------------------------------

    def _take_place(self, payer: Payer, size: int, *, is_promised: bool) -> Place | str:
        """Take a place of a size, after dropping records by their order if none is free; or say why
        not."""
        if self._full_reason:
            return "full"
        if not is_promised and self._written_now() + size > self._settings.write_bytes_per_day:
            return "write_budget"
        ceiling = self._quotas.ceiling(payer)
        while ceiling is not None and self._books.used.get(payer, 0) + size > ceiling:
            others = set(self._slabs.place_sizes().values()).difference(self._present_sizes)
            if not self._order.drop_leaves(payer, 1, [*sorted(others), *self._present_sizes]):
                return "over_quota"
        while (place := self._slabs.take(size)) is None:
            if self._slabs.is_wiping:
                return "full"  # for a moment: nothing is dropped for it
            if not self._grow(size) and not self._order.make_room(payer, size):
                return "full"
        return place

    def _written_now(self) -> int:
        is_today = self._written_day == self.clock.now_ms() // DAY_MS
        return self._written_today if is_today else 0

    def _grow(self, size: int) -> bool:
        """Lay out one more slab of places of a size if the disk may hold it."""
        now_ms = self.clock.now_ms()
        left = self._settings.disk_bytes - self._slabs.total_bytes - self._index.file_bytes
        if now_ms < self._no_slab_until_ms or left < size:
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
            self._note_write_error(error)
            return False
        return True

    def _set_full(self, reason: str) -> None:
        self._full_reason = reason
        self._no_slab_until_ms = self.clock.now_ms() + NO_SLAB_MS

    def _give_up_place(self, row: RecordRow) -> None:
        payer = self._index.payer_name(row.payer_id)
        self._books.add_bytes(payer, -row.place_bytes, row.fidelity)
        self._holds.give_back(row.place)

    def _drop(self, tops: Sequence[RecordId]) -> int:
        """Delete records with everything under them, in the caller's transaction."""
        rows = self._index.delete_under(tops)
        for row in rows:
            payer = self._index.payer_name(row.payer_id)
            self._books.add_records(self._index.scope_of(row).namespace, -1)
            self._uses.pop(row.record_id, None)
            if row.slab != REMOTE:
                self._books.add_bytes(payer, -row.place_bytes, row.fidelity)
                self._holds.give_back(row.place)
        return len(rows)

    # -- look, fetch, renew ---------------------------------------------------------------------

    def _live_row(self, scope: Scope | None, record_id: RecordId, now_ms: int) -> RecordRow | None:
        row = self._index.row(record_id)
        if row is None or scope is None or row.scope_id != scope.scope_id:
            return None
        return row if row.limit_ms > now_ms else None

    def look(self, command: Look) -> Looked:
        """Walk the tokens from the root. About 10 us a run."""
        has_remote = self.remote is not None and self.remote.is_open
        size, now_ms = self._settings.run_tokens, self.clock.now_ms()
        return walk(self._index, command, size, now_ms, has_remote=has_remote)

    def plan_fetch(self, command: Fetch) -> list[PlannedRead | Fetched]:
        """Return a read for each record, or its failure where there is nothing to read."""
        now_ms = self.clock.now_ms()
        scope = self._index.scope(command.namespace)
        plans: list[PlannedRead | Fetched] = []
        slots = [*command.slots, *([-1] * len(command.record_ids))]
        for record_id, slot in zip(command.record_ids, slots, strict=False):
            row = self._live_row(scope, record_id, now_ms)
            if row is None or row.payload_bytes != command.slot_bytes or slot < 0:
                plans.append(Fetched(command.call_id, record_id, False))
                continue
            assert scope is not None, "a live row has a scope"
            if row.slab != REMOTE:
                self._holds.hold(row.place)
            plans.append(PlannedRead(command.call_id, command.namespace, row, slot, scope.seal))
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

    def read(self, plan: PlannedRead) -> None:
        """Read a record, check it against its row, and copy it to its slot. For any thread."""
        self._reader.read(plan)

    def finish_read(self, plan: PlannedRead) -> Fetched:
        """Return the outcome; strike a damaged record. Raises OSError if the disk failed."""
        row, now_ms = plan.row, self.clock.now_ms()
        level = level_of(row.slab)
        if level == "disk":
            self._holds.release(row.place)
        is_there = self._index.row(row.record_id) is not None and row.limit_ms > now_ms
        if plan.verdict == "damaged" and is_there:
            if level == "disk":
                self._holds.mark_bad(row.place)
            with self._index.change():
                self.damaged_total += self._drop([row.record_id])
        is_done = plan.verdict == "done" and is_there
        if is_done:
            self._note_use(row.record_id, now_ms)
        if is_done and level == "disk":
            self.fetched_total += 1
            self.read_bytes += row.payload_bytes
            self.read_seconds += plan.seconds
        facts = level, plan.verdict == "damaged", row.check if is_done else b""
        return Fetched(plan.call_id, row.record_id, is_done, plan.seconds, *facts)

    def renew(self, command: Renew) -> Renewed:
        """Note a use of records, and lengthen their limits and promises; tell which are gone."""
        now_ms = self.clock.now_ms()
        scope = self._index.scope(command.namespace)
        if scope is None:
            return Renewed(command.call_id, command.record_ids)
        gone: list[RecordId] = []
        limit_ms = 0
        if command.limit_s is not None:
            limit_ms = now_ms + int(command.limit_s * 1_000)
        promise_ms = now_ms + int(command.promise_s * 1_000) if command.promise_s else 0
        with self._index.change():
            for record_id in command.record_ids:
                if self._live_row(scope, record_id, now_ms) is None:
                    gone.append(record_id)
                    continue
                self._note_use(record_id, now_ms)
                if limit_ms or promise_ms:
                    self._index.lengthen(record_id, limit_ms, promise_ms)
                self._index.add_leases(scope, record_id, command.lease_ids)
            self._promises.set(set(command.record_ids).difference(gone), command.terms)
        if promise_ms and self.remote is not None:
            self.remote.want(command.record_ids)
        return Renewed(command.call_id, tuple(gone))

    def recall(self, command: Recall) -> Recalled:
        """Tell the next records that are promised. Cost: see `RecallPages.page`."""
        return self._recall.page(command, self.clock.now_ms())

    def _note_use(self, record_id: RecordId, now_ms: int) -> None:
        _, before = self._uses.get(record_id, (0, 0))
        self._uses[record_id] = now_ms, before + 1

    def _flush_uses(self) -> None:
        if self._uses:
            self._index.note_uses([(one, *use) for one, use in self._uses.items()])
            self._uses.clear()

    # -- erase, expire, drop --------------------------------------------------------------------

    def erase(self, command: EraseStored) -> StoredErased:
        """Delete what is named, durably; stores of the namespace under way bring nothing.

        Where all of a sealed namespace goes, its key is destroyed, so that no copy of its bytes
        opens again. The bytes are wiped by the caller: `take_dirty`, `wipe`, `put_wiped`; objects
        in the remote store are deleted by it, too: `remote.settle`.
        """
        for store in self._batch.stores if self._batch is not None else ():
            if store.command.namespace == command.namespace:
                store.code = "erased"
        scope = self._index.scope(command.namespace)
        is_all = command.lease_id is None and not command.tokens
        is_shredded = is_all and self._seals is not None
        if scope is None:
            self._shred(command.namespace, is_shredded=is_shredded)
            return StoredErased(command.call_id, is_shredded=is_shredded)
        before = self._books.used_bytes
        with self._index.change():
            if command.lease_id is not None:
                tops = self._index.leased(scope, command.lease_id)
            else:
                size = self._settings.run_tokens
                tops = self._index.tops_under(scope, command.tokens or (), size)
            count = self._drop(tops)
            if command.lease_id is not None:
                self._index.remove_lease(scope, command.lease_id)
            is_needed = self._books.has(command.namespace) or self._is_planned(scope)
            if is_shredded or not is_needed:
                self._index.remove_scope(command.namespace)
        self._index.empty_log()
        self._shred(command.namespace, is_shredded=is_shredded)
        gone = before - self._books.used_bytes
        return StoredErased(command.call_id, count, gone, is_shredded=is_shredded)

    def _shred(self, namespace: Namespace, *, is_shredded: bool) -> None:
        """Destroy the key of a namespace, which may be older than its scope."""
        if is_shredded and self._seals is not None:
            self._seals.destroy(namespace)

    def _is_planned(self, scope: Scope) -> bool:
        stores = self._batch.stores if self._batch is not None else ()
        return any(store.scope is scope for store in stores)

    def maintain(self) -> None:
        """Delete what has expired, and drop ahead of need. Call each second.

        Writes nothing where nothing changes, but for the time, twice a minute.
        """
        now_ms = self.clock.now_ms()
        self._index.reserve_ids()
        expired = [
            one for one in self._index.expired(now_ms, EXPIRE_BATCH) if one not in self._pinned
        ]
        is_due = now_ms - self._noted_ms >= NOTE_MS
        is_over = self._slabs.total_bytes > self._settings.disk_bytes and self._batch is None
        if (
            expired
            or is_due
            or is_over
            or self._full_reason
            or self._books.used_bytes > self._high_bytes
        ):
            with self._index.change():
                self._flush_uses()
                self._note_time()
                self.expired_total += self._drop(expired)
                if is_over:
                    self._shrink()
                self._drop_ahead()
        if self.remote is not None:
            room = self._settings.disk_bytes - self._index.file_bytes
            self.remote.tick(self._books.used_bytes > PUT_PART * room)
        if now_ms >= self._count_promised_at_ms:
            began_s = self._uptime_s()
            self._promised = self._index.promised(now_ms)
            took_ms = int(1_000 * (self._uptime_s() - began_s))
            self._count_promised_at_ms = now_ms + 100 * took_ms

    @property
    def _high_bytes(self) -> float:
        return HIGH_PART * self._settings.disk_bytes

    def _shrink(self) -> None:
        """Remove a slab if the disk got smaller by configuration: the last one without promises.

        Its records go, with everything under them; one slab a call. A slab with places that are
        read or wiped just now goes in a later one.
        """
        now_ms = self.clock.now_ms()
        for number in sorted(self._slabs.sizes, reverse=True):
            under = self._index.under(self._index.of_slab(number, now_ms)[0])
            if not any(row.promise_ms > now_ms for row in under.values()):
                self.replaced_total += self._drop(list(under))
                self._slabs.remove_if_empty(number)
                return

    def _drop_ahead(self) -> None:
        room = self._settings.disk_bytes
        if self._full_reason:
            room = sum(self._slabs.places(size) * size for size in self._present_sizes)
        part = RESUME_PART if self._full_reason else HIGH_PART
        turns = 0
        while self._books.used_bytes > part * room:
            turns += 1
            if turns > DROP_AHEAD_TURNS or not self._order.make_room(b""):
                return
        if self._full_reason and (room or self.clock.now_ms() >= self._no_slab_until_ms):
            self._full_reason = ""

    def _note_time(self) -> None:
        self._noted_ms = self.clock.now_ms()
        self._index.set_meta("last_ms", self._noted_ms)

    def take_dirty(self) -> list[Place]:
        """Return the free places whose old bytes are still there, for `wipe`."""
        return self._slabs.take_dirty()

    def wipe(self, places: Sequence[Place]) -> None:
        """Make their bytes read as zeros. For another thread. Raises OSError."""
        self._slabs.wipe(places)

    def put_wiped(self, places: Sequence[Place], *, is_wiped: bool) -> None:
        """Make places free again after `wipe`."""
        self._slabs.put_wiped(places, is_wiped=is_wiped)

    # -- statistics -----------------------------------------------------------------------------

    def stats(self) -> StorageStats:
        """Return the heartbeat. O(payers)."""
        promised = {self._index.payer_name(number): size for number, size in self._promised.items()}
        return StorageStats(
            "full" if self._full_reason else "open",
            self._full_reason,
            capacity_bytes=self._settings.disk_bytes,
            used_bytes=self._books.used_bytes,
            promised_bytes=sum(promised.values()),
            records=self._books.records,
            stored_total=self.stored_total,
            fetched_total=self.fetched_total,
            dropped_total=self.replaced_total + self._order.dropped_total,
            expired_total=self.expired_total,
            damaged_total=self.damaged_total,
            written_bytes_total=self.written_bytes_total,
            written_bytes_today=self._written_now(),
            read_bytes_per_s=self.read_bytes / self.read_seconds if self.read_seconds else 0.0,
            namespaces=len(self._books.namespaces),
            payers=tuple(
                PayerBytes(payer, size, promised.get(payer, 0))
                for payer, size in self._books.used.items()
            ),
            copies=self._books.copies(),
            remote=None if self.remote is None else self.remote.stats(),
        )

    def check(self) -> None:
        """Recount books, places and children from the index; no batch may be under way.

        O(records). Raises InvariantViolation at the first mismatch.
        """
        assert self._batch is None, "planned bytes are in the books, and not in the index"
        check_store(self._index, self._books, self._slabs, self._holds.out_of_use)
