"""The ledger: one entry per request id, for ever, durable before anybody is told.

A hold is written when a request is admitted and settled into an entry when it ends, however it
ends. One thread writes; what arrives while it waits for the disk shares the next transaction and
one fsync (group commit). On start, holds that a dead process left open become entries
`interrupted` with nothing charged. Totals are sums of entries, never counters.

When the disk fails, nobody is told that anything was written; the file is closed, opened and
checked before the next entry. It knows no event loop: answers come by `concurrent.futures.Future`.
`gateway.metering` calls it; the command line reads.
"""

from __future__ import annotations

import fcntl
import os
import queue
import threading
from concurrent.futures import Future

import apsw
import msgspec
from msgspec import Struct

from tenancy.errors import LedgerUnavailable, StoreError
from tenancy.store import Store
from tenancy.types import UsageEntry, WallClock

BATCH_MAX = 128


class Hold(Struct, frozen=True):
    """A request that has been admitted and not settled."""

    request_id: str
    tenant_id: int
    key_id: int
    model: str
    started_ms: int


class UsageTotal(Struct, frozen=True):
    """A sum of ledger entries."""

    tenant: str
    requests: int
    prompt_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    fresh_tokens: int
    output_tokens: int
    physical_cached_tokens: int


Item = Hold | UsageEntry
Batch = list[tuple[Item, "Future[None]"]]


class Ledger:
    """The one writer over a store. Thread-safe."""

    def __init__(self, store: Store, clock: WallClock) -> None:
        """Close what a dead process left open, then take entries.

        Raises StoreError if another process is writing, whose open holds are not ours to close,
        and if the file cannot be written.
        """
        self._store = store
        self._clock = clock
        self._lock_file = _lock(store)
        self._inbox: queue.SimpleQueue[tuple[Item, Future[None]] | None] = queue.SimpleQueue()
        self._door = threading.Lock()
        self._is_closed = False  # nothing more is taken
        self._is_over = False  # the writer has seen the end of its inbox
        self._is_damaged = False  # the disk has failed us; check before going on
        try:
            self.interrupted = self._close_open_holds()
        except BaseException:
            os.close(self._lock_file)
            raise
        self._thread = threading.Thread(target=self._main, name="ledger", daemon=True)
        self._thread.start()

    def hold(self, hold: Hold) -> Future[None]:
        """Write a hold. The future raises LedgerUnavailable if it is not durable, or if the
        request id was used before."""
        return self._put(hold)

    def settle(self, entry: UsageEntry) -> Future[None]:
        """Turn a hold into its entry. Settling one request id again changes nothing. The future
        raises LedgerUnavailable if it is not durable."""
        return self._put(entry)

    @staticmethod
    def totals(
        store: Store, tenant: str | None = None, since_ms: int = 0, until_ms: int | None = None
    ) -> list[UsageTotal]:
        """Sums of entries that ended in [since_ms, until_ms), by tenant. Reads only."""
        rows = store.query(
            "select name, count(*), sum(prompt_tokens), sum(cache_read_tokens),"
            " sum(cache_write_tokens), sum(fresh_tokens), sum(output_tokens),"
            " sum(physical_cached_tokens) from ledger join tenants using (tenant_id)"
            " where (?1 is null or name = ?1) and ended_ms >= ?2 and (?3 is null or ended_ms < ?3)"
            " group by name order by name",
            (tenant, since_ms, until_ms),
        )
        return [UsageTotal(*row) for row in rows]

    def open_holds(self) -> int:
        """Requests admitted and not settled."""
        return int(self._store.query("select count(*) from holds")[0][0])

    def close(self) -> None:
        """Write what has been handed in, then stop. Safe to call twice."""
        with self._door:
            was_closed, self._is_closed = self._is_closed, True
            if not was_closed:
                self._inbox.put(None)
        self._thread.join()
        if not was_closed:
            os.close(self._lock_file)

    # -- the writer ---------------------------------------------------------------------------

    def _put(self, item: Item) -> Future[None]:
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # from here on nobody can cancel it
        with self._door:
            if self._is_closed:
                future.set_exception(LedgerUnavailable("closed", "The ledger is closed."))
            else:
                self._inbox.put((item, future))
        return future

    def _main(self) -> None:
        try:
            while not self._is_over:
                self._write(self._next_batch())
        finally:
            self._refuse_rest()

    def _next_batch(self) -> Batch:
        """Wait for one item and take what else is there. Waiting for more would only add latency:
        while a commit waits for the disk, the next batch gathers by itself."""
        batch: Batch = []
        item = self._inbox.get()
        while item is not None:
            batch.append(item)
            if len(batch) == BATCH_MAX or self._inbox.empty():
                return batch
            item = self._inbox.get()
        self._is_over = True
        return batch

    def _write(self, batch: Batch) -> None:
        """One transaction for all; when it fails nobody is told that anything was written."""
        try:
            used = self._commit([item for item, _ in batch])
        except apsw.ConstraintError as error:
            if len(batch) > 1:  # one impossible entry must not take the others with it
                for one in batch:
                    self._write([one])
            else:
                _refuse(batch, "impossible_entry", error)
        except (apsw.BusyError, apsw.LockedError, apsw.FullError) as error:
            _refuse(batch, "not_durable", error)
        except (apsw.Error, StoreError) as error:
            self._is_damaged = True
            _refuse(batch, "not_durable", error)
        else:
            for number, (_, future) in enumerate(batch):
                if number in used:
                    message = "This request id was used before."
                    future.set_exception(LedgerUnavailable("duplicate_request", message))
                else:
                    future.set_result(None)
        finally:
            _refuse(batch, "failed", None)

    def _commit(self, items: list[Item]) -> set[int]:
        """Make all durable. Returns which of them are holds on a request id that was used."""
        if self._is_damaged:
            self._store.reopen()
            self._is_damaged = False
        with self._store.transaction() as db:
            return {number for number, item in enumerate(items) if not _apply(db, item)}

    def _refuse_rest(self) -> None:
        """The writer has ended: whoever still waits is told, and nobody waits from now on."""
        with self._door:
            self._is_closed = True
            while not self._inbox.empty():
                item = self._inbox.get()
                if item is not None:
                    _refuse([item], "closed", None)

    def _close_open_holds(self) -> int:
        now_ms = self._clock()
        rows = self._store.query(
            "select request_id, tenant_id, key_id, model, started_ms from holds"
        )
        holds = [Hold(*row) for row in rows]
        if holds:
            with self._store.change() as db:
                for hold in holds:
                    _apply(db, _interrupted(hold, now_ms))
        return len(holds)


def _lock(store: Store) -> int:
    """One process writes. The kernel lets go of it when the process ends, however it does."""
    path = store.path.with_name(f"{store.path.name}.lock")
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise StoreError("in_use", f"{store.path} is in use by another server.") from error
    return file


def _refuse(batch: Batch, code: str, error: Exception | None) -> None:
    """Tell those who have not been told. The message names the kind of error, never a value."""
    kind = "the writer has stopped" if error is None else type(error).__name__
    for _, future in batch:
        if not future.done():
            message = f"The ledger could not be written ({kind})."
            future.set_exception(LedgerUnavailable(code, message))


def _interrupted(hold: Hold, now_ms: int) -> UsageEntry:
    return UsageEntry(
        request_id=hold.request_id,
        tenant_id=hold.tenant_id,
        key_id=hold.key_id,
        model=hold.model,
        ending="interrupted",
        started_ms=hold.started_ms,
        ended_ms=now_ms,
        prompt_tokens=0,
        cache_read_tokens=0,
        cache_write_tokens=0,
        fresh_tokens=0,
        output_tokens=0,
        physical_cached_tokens=0,
    )


_HOLD = (
    "insert into holds (request_id, tenant_id, key_id, model, started_ms)"
    " select ?1, ?2, ?3, ?4, ?5 where not exists (select 1 from ledger where request_id = ?1)"
    " on conflict (request_id) do nothing"
)
_SETTLE = (
    "insert into ledger (request_id, tenant_id, key_id, model, ending, started_ms, ended_ms,"
    " prompt_tokens, cache_read_tokens, cache_write_tokens, fresh_tokens, output_tokens,"
    " physical_cached_tokens) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    " on conflict (request_id) do nothing"
)


def _apply(db: apsw.Connection, item: Item) -> bool:
    """False for a hold on a request id that was used before; nothing is written then."""
    if isinstance(item, Hold):
        db.execute(_HOLD, msgspec.structs.astuple(item))
        return db.changes() == 1
    db.execute(_SETTLE, msgspec.structs.astuple(item))
    db.execute("delete from holds where request_id = ?", (item.request_id,))
    return True
