"""The ledger: one entry per request id, for ever, durable before anybody is told.

A hold is written when a request is admitted and settled into an entry when it ends, however it
ends. One thread writes; what arrives within a few milliseconds shares one transaction and one
fsync (group commit). On start, holds that a dead process left open become entries `interrupted`
with nothing charged. Totals are sums of entries, never counters.

It knows no event loop: answers come by `concurrent.futures.Future`.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future

import apsw
import msgspec
from msgspec import Struct

from tenancy.errors import LedgerUnavailable
from tenancy.store import Store
from tenancy.types import UsageEntry, WallClock

BATCH_MAX = 256


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


class Ledger:
    """The writer over one store. Thread-safe."""

    def __init__(self, store: Store, clock: WallClock) -> None:
        self._store = store
        self._clock = clock
        self._inbox: queue.SimpleQueue[tuple[Hold | UsageEntry, Future[None]] | None] = (
            queue.SimpleQueue()
        )
        self.interrupted = self._close_open_holds()
        self._thread = threading.Thread(target=self._main, name="ledger", daemon=True)
        self._thread.start()

    def hold(self, hold: Hold) -> Future[None]:
        """Write a hold. The future raises LedgerUnavailable if it is not durable."""
        return self._put(hold)

    def settle(self, entry: UsageEntry) -> Future[None]:
        """Turn a hold into its entry. Settling one request id again changes nothing."""
        return self._put(entry)

    @staticmethod
    def totals(store: Store, tenant: str | None = None, since_ms: int = 0) -> list[UsageTotal]:
        """Sums of entries that ended at or after `since_ms`, by tenant. Reads only."""
        rows = store.query(
            "select name, count(*), sum(prompt_tokens), sum(cache_read_tokens),"
            " sum(cache_write_tokens), sum(fresh_tokens), sum(output_tokens),"
            " sum(physical_cached_tokens) from ledger join tenants using (tenant_id)"
            " where (?1 is null or name = ?1) and ended_ms >= ?2 group by name order by name",
            (tenant, since_ms),
        )
        return [UsageTotal(*row) for row in rows]

    def open_holds(self) -> int:
        """Requests admitted and not settled."""
        return int(self._store.query("select count(*) from holds")[0][0])

    def close(self) -> None:
        """Write what has been handed in, then stop. Safe to call twice."""
        self._inbox.put(None)
        self._thread.join()

    # -- the writer ---------------------------------------------------------------------------

    def _put(self, item: Hold | UsageEntry) -> Future[None]:
        future: Future[None] = Future()
        if not self._thread.is_alive():
            future.set_exception(LedgerUnavailable("closed", "The ledger is closed."))
            return future
        self._inbox.put((item, future))
        return future

    def _main(self) -> None:
        while (first := self._inbox.get()) is not None:
            batch, is_last = [first], False
            while len(batch) < BATCH_MAX:
                try:
                    item = self._inbox.get_nowait()
                except queue.Empty:
                    break
                if item is None:
                    is_last = True
                    break
                batch.append(item)
            self._write(batch)
            if is_last:
                break
        self._refuse_rest()

    def _write(self, batch: list[tuple[Hold | UsageEntry, Future[None]]]) -> None:
        """One transaction for all; when it fails nobody is told that anything was written."""
        try:
            with self._store.transaction() as db:
                for item, _ in batch:
                    _apply(db, item)
        except apsw.Error as error:
            message = f"The ledger could not be written ({type(error).__name__})."
            for _, future in batch:
                future.set_exception(LedgerUnavailable("not_durable", message))
            return
        for _, future in batch:
            future.set_result(None)

    def _refuse_rest(self) -> None:
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[1].set_exception(LedgerUnavailable("closed", "The ledger is closed."))

    def _close_open_holds(self) -> int:
        now_ms = self._clock()
        rows = self._store.query(
            "select request_id, tenant_id, key_id, model, started_ms from holds"
        )
        if not rows:
            return 0
        with self._store.transaction() as db:
            for row in rows:
                hold = Hold(*row)
                _apply(
                    db,
                    UsageEntry(
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
                    ),
                )
        return len(rows)


_COLUMNS = UsageEntry.__struct_fields__
_INSERT = (
    f"insert into ledger ({', '.join(_COLUMNS)}) values ({', '.join('?' * len(_COLUMNS))})"  # noqa: S608
    " on conflict (request_id) do nothing"
)


def _apply(db: apsw.Connection, item: Hold | UsageEntry) -> None:
    if isinstance(item, Hold):
        db.execute(
            "insert into holds (request_id, tenant_id, key_id, model, started_ms)"
            " select ?1, ?2, ?3, ?4, ?5"
            " where not exists (select 1 from ledger where request_id = ?1)"
            " on conflict (request_id) do nothing",
            msgspec.structs.astuple(item),
        )
        return
    db.execute(_INSERT, msgspec.structs.astuple(item))
    db.execute("delete from holds where request_id = ?", (item.request_id,))
