"""Stores of runs, in batches: planned, written to their places, committed as rows.

A batch is planned and committed by the store's one thread, in transactions of its own, and written
by another one. At most one is under way, so that no run is planned twice. This module knows no
outcome but `Stored`; `engine.storage.store` calls it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import xxhash

from engine.api import Namespace
from engine.moves import ROOT, RecordId, RunToStore, Stored, StoreRuns
from engine.storage.index.index import RecordIndex, RecordRow
from engine.storage.index.index_file import FOREVER_MS
from engine.storage.index.namespace_rows import Scope
from engine.storage.index.promise_rows import PromiseRows
from engine.storage.plans import PlannedRun, PlannedStore, WriteBatch
from engine.storage.slabs.record import (
    NAME_BYTES_MAX,
    RecordHeader,
    encode_header,
    pack_run,
)
from engine.storage.slabs.slabs import Place, SlabFiles
from engine.storage.space.disk_space import DiskSpace
from engine.storage.space.quotas import DiskUsage
from engine.storage.space.write_budget import WriteBudget

RunAll = Callable[[list[Callable[[], None]]], None]


class BatchWriter:
    """The writer of one open store.

    `batch`: the one under way. `pinned`: records that it needs, which are not dropped for room.
    """

    def __init__(
        self,
        index: RecordIndex,
        slabs: SlabFiles,
        usage: DiskUsage,
        space: DiskSpace,
        promises: PromiseRows,
        view: Callable[[int, int], memoryview],
        *,
        budget: WriteBudget,
        place_sizes: Mapping[int, int],
        run_tokens: int,
        pinned: set[RecordId],
        now_ms: Callable[[], int],
        drop: Callable[[Sequence[RecordId]], int],
        committed: Callable[[Sequence[PlannedStore]], None],
    ) -> None:
        """`view` returns a slot's bytes, of a size; `place_sizes`: of places, by the bytes of their
        slots. `drop` deletes records with all under them. `committed` learns of stores in the
        transaction that commits them."""
        self._index, self._slabs, self._usage, self._space = index, slabs, usage, space
        self._promises, self._view, self._place_sizes = promises, view, place_sizes
        self._run_tokens, self._budget = run_tokens, budget
        self._now_ms, self._drop, self._committed = now_ms, drop, committed
        self._store_id = index.file.store_id
        self.batch: WriteBatch | None = None
        self.pinned = pinned
        self.stored_total = self.written_bytes_total = 0
        self.replaced_total = self.expired_total = 0

    def plan(self, commands: Sequence[StoreRuns]) -> WriteBatch:
        """Take places for the runs that have no record yet. At most one batch is under way."""
        assert self.batch is None, "one batch at a time: no run is planned twice"
        batch = WriteBatch()
        self._budget.begin_batch()
        planned: dict[tuple[int, RecordId, bytes], RecordId] = {}
        self._index.reserve_ids()
        with self._index.file.change():
            for command in commands:
                batch.stores.append(self._plan_store(command, planned))
        self.batch = batch
        return batch

    def _plan_store(
        self, command: StoreRuns, planned: dict[tuple[int, RecordId, bytes], RecordId]
    ) -> PlannedStore:
        now_ms = self._now_ms()
        if max(len(command.namespace), len(command.payer)) > NAME_BYTES_MAX:
            return PlannedStore(command, None, code="write_failed")
        scope = self._index.names.scope_for(command.namespace)
        store = PlannedStore(command, scope)
        parent = command.parent
        if parent != ROOT and self._index.live_row(scope, parent, now_ms) is None:
            store.code = "no_parent"
            return store
        self.pinned.add(parent)
        for run in command.runs:
            one = self._plan_run(store, scope, parent, run, planned)
            if isinstance(one, str):
                store.code = one
                break
            store.runs.append(one)
            parent = one.record_id
            self.pinned.add(parent)
        return store

    def _plan_run(
        self,
        store: PlannedStore,
        scope: Scope,
        parent: RecordId,
        run: RunToStore,
        planned: dict[tuple[int, RecordId, bytes], RecordId],
    ) -> PlannedRun | str:
        """Return the plan for one run, or why there is none."""
        command, now_ms = store.command, self._now_ms()
        try:
            packed = pack_run(run.tokens)
        except struct.error:
            packed = b""
        place_bytes = self._place_sizes.get(command.slot_bytes)
        if len(packed) != 4 * self._run_tokens or place_bytes is None:
            return "write_failed"
        limit_ms = FOREVER_MS if run.limit_s is None else now_ms + int(run.limit_s * 1_000)
        promise_ms = now_ms + int(run.promise_s * 1_000) if run.promise_s else 0
        key = (scope.scope_id, parent, packed)
        found = planned.get(key, ROOT)
        if not found and (row := self._index.child(scope, parent, packed)) is not None:
            if row.limit_ms <= now_ms:
                self.expired_total += self._drop([row.record_id])
            elif (row.payload_bytes, row.fidelity) == (command.slot_bytes, store.fidelity):
                found = row.record_id
            else:  # of another format, which no reader of this namespace takes any more
                self.replaced_total += self._drop([row.record_id])
        if found:
            return PlannedRun(run, found, packed, limit_ms, promise_ms)
        if not promise_ms and not self._budget.may_write(store.payer, place_bytes, now_ms):
            return "write_budget"
        place = self._space.take(store.payer, place_bytes)
        if isinstance(place, str):
            return place
        record_id = planned[key] = self._index.next_id()
        header = RecordHeader(
            self._store_id,
            record_id,
            scope.scope_id,
            parent,
            command.namespace,
            store.payer,
            packed,
            command.fidelity,
            command.slot_bytes,
            run.check,
            now_ms,
            limit_ms,
            promise_ms,
        )
        self._usage.add_bytes(store.payer, place_bytes, store.fidelity)
        self._budget.plan(store.payer, place_bytes, is_promised=promise_ms > 0)
        return PlannedRun(
            run, record_id, packed, limit_ms, promise_ms, place, encode_header(header), scope.seal
        )

    def write(self, batch: WriteBatch, run_all: RunAll) -> None:
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
        assert batch is self.batch, "the batch that was planned last"
        self.batch = None
        self.pinned.clear()
        self._budget.begin_batch()
        with self._index.file.change():
            outcomes = [self._commit_store(store) for store in batch.stores]
            self._committed(batch.stores)
            self._budget.save(self._index.file)
        if batch.error is not None:
            self._space.note_write_error(batch.error)
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
            row = RecordRow(
                run.record_id,
                scope.scope_id,
                parent,
                run.packed,
                self._index.names.payer_id(store.payer),
                run.place.slab,
                run.place.position,
                command.slot_bytes,
                self._place_sizes[command.slot_bytes],
                run.run.check,
                store.fidelity,
                run.limit_ms,
                run.promise_ms,
            )
            self._index.insert(row, scope, self._now_ms())
            self._usage.add_records(command.namespace, 1)
            is_promised = run.promise_ms > 0
            self._budget.count(
                store.payer, row.place_bytes, self._now_ms(), is_promised=is_promised
            )
            self.written_bytes_total += row.place_bytes
            self.stored_total += 1
        self._index.add_leases(scope, run.record_id, command.lease_ids)
        self._promises.set((run.record_id,), run.run.terms)
        return ""

    @property
    def written_today(self) -> int:
        """Bytes that were written on this day of the store's clock."""
        return self._budget.written(self._now_ms())

    def is_planned(self, scope: Scope) -> bool:
        """Return whether the batch under way has a store of this scope."""
        return any(one.scope is scope for one in self._stores)

    def erase(self, namespace: Namespace) -> set[Place]:
        """Have what is under way of a namespace bring nothing; return the places of it."""
        places: set[Place] = set()
        for store in self._stores:
            if store.command.namespace == namespace:
                store.code = "erased"
                places |= store.places
        return places

    @property
    def places(self) -> set[Place]:
        """The places that the batch under way writes."""
        return {place for store in self._stores for place in store.places}

    @property
    def _stores(self) -> list[PlannedStore]:
        return [] if self.batch is None else self.batch.stores

    def _give_up(self, store: PlannedStore, run: PlannedRun) -> None:
        if run.place is not None:
            size = self._place_sizes[store.command.slot_bytes]
            self._usage.add_bytes(store.payer, -size, store.fidelity)
            self._slabs.give_back(run.place)
            run.place = None
