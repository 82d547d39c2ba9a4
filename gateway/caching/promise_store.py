"""Keep the promises of the prefix index in the database, so that they outlive the gateway.

The index calls `note` for each entry that changes; a task writes the changes of a second in one
transaction, off the request path. A renewal is written once it moved the end by a sixtieth of the
promise, and at the close. A gateway that starts takes the promises over: a prefix that was written
for an hour is read, and billed as read, and what the new engine has to compute again is credited as
a broken promise, as after the death of an engine. A gateway that was killed loses at most the last
second of writes. If its id is not held for a minute, another gateway takes its promises over: one
of them, whichever comes first. `gateway.app` makes the store; an erasure flushes it before its
receipt.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
from msgspec import Struct

from engine.api import Clock, Retention
from gateway.caching.prefix_index import IndexedPrefix, Lease, PrefixIndex, PrefixKey, PrefixOrigin
from gateway.caching.promises import PromiseTally
from gateway.periodic_task import PeriodicTask
from tenancy.accounts.written_prefixes import (
    PrefixClass,
    WrittenPrefix,
    delete_ended,
    other_gateways,
    save,
    take_over,
    take_over_from,
)
from tenancy.errors import StoreError
from tenancy.storage.interface import Store
from tenancy.types import LATEST_MS, WallClock

FLUSH_S = 1.0
"""Seconds between two writes."""
SWEEP_FLUSHES = 60
"""Writes between two deletions of what has ended."""
SLACK_SHARE = 1 / 60
"""The share of a promise by which its end may move before it is written again."""
MS_PER_S = 1_000


class PromiseChanges(Struct, frozen=True):
    """Rows to write, and rows to delete."""

    kept: Sequence[WrittenPrefix]
    gone: Sequence[PrefixClass]


class PromiseStore:
    """The stored promises of one gateway. Belongs to one event loop; a thread writes."""

    def __init__(
        self,
        store: Store,
        gateway: str,
        entries: PrefixIndex,
        tally: PromiseTally,
        clock: Clock,
        wall: WallClock,
        log: Callable[[str, dict[str, object]], None],
        *,
        flush_s: float = FLUSH_S,
    ) -> None:
        """`gateway`: names this gateway's rows; "" for a database that has one gateway."""
        self._store, self._gateway = store, gateway
        self._entries, self._tally = entries, tally
        self._clock, self._wall, self._log = clock, wall, log
        self._changed: dict[PrefixKey, None] = {}
        self._moved: dict[PrefixKey, None] = {}
        """Entries whose end moved by less than is worth a write."""
        self._saved: dict[PrefixKey, dict[str, float]] = {}
        """The ends of promises as the database has them, by class."""
        self._turn = asyncio.Lock()
        self._rounds = 0
        self._gone: set[str] = set()
        """Gateways that were gone at the last look."""
        self._task = PeriodicTask("promises", self._run, flush_s, log, clock)
        self._is_failing = False
        entries.on_change = self.note

    def note(self, key: PrefixKey) -> None:
        """Note that an entry has changed. O(1)."""
        self._changed[key] = None

    async def start(self) -> None:
        """Take over the promises of the gateway before, and write changes from now on.

        Raises StoreError.
        """
        rows = await asyncio.to_thread(take_over, self._store, self._gateway, self._wall())
        self._restore(rows)
        if rows:
            self._log("promises_taken_over", {"promises": len(rows)})
        self._task.start()

    async def flush(self, *, is_last: bool = False) -> None:
        """Write all changes so far; `is_last`: also ends that moved a little. Durable on return.

        Raises StoreError; the changes are written by the next call then.
        """
        async with self._turn:
            changes = self._take(is_last=is_last)
            if not (changes.kept or changes.gone):
                return
            try:
                await asyncio.to_thread(
                    save, self._store, self._gateway, changes.kept, changes.gone
                )
            except BaseException:
                self._put_back(changes)
                raise

    async def take_over_dead(self) -> None:
        """Take over the promises of gateways that were gone at the last call, too. Raises
        StoreError."""
        if not self._gateway:
            return
        gone = await asyncio.to_thread(self._find_gone)
        dead, self._gone = gone & self._gone, gone
        for gateway in dead:
            await self.flush()  # what this gateway has promised itself stays
            async with self._turn:
                rows = await asyncio.to_thread(
                    take_over_from, self._store, gateway, self._gateway, self._wall()
                )
                self._restore(rows)
            if rows:
                self._log("promises_taken_over", {"promises": len(rows), "gateway": gateway})

    def _find_gone(self) -> set[str]:
        others = other_gateways(self._store, self._gateway)
        return {name for name in others if not self._store.is_gateway_held(name)}

    async def close(self) -> None:
        """Stop, and write everything. A database that fails costs the last changes. Safe to call
        twice, and without `start`."""
        await self._task.close()
        with suppress(StoreError):
            await self.flush(is_last=True)

    # -- internals ----------------------------------------------------------------------------

    async def _run(self) -> None:
        """Write the changes, and now and then delete what has ended."""
        self._rounds += 1
        try:
            await self.flush()
            if self._rounds % SWEEP_FLUSHES == 0:
                await asyncio.to_thread(delete_ended, self._store, self._wall())
                await self.take_over_dead()
        except StoreError as error:
            if not self._is_failing:
                self._log("promises_not_saved", {"reason": error.code})
            self._is_failing = True
        else:
            self._is_failing = False

    def _take(self, *, is_last: bool) -> PromiseChanges:
        """Return the changes, and note them as saved. O(changed entries)."""
        changed, self._changed = self._changed, {}
        if is_last:
            changed = {**self._moved, **changed}
            self._moved = {}
        kept: list[WrittenPrefix] = []
        gone: list[PrefixClass] = []
        now_s, now_ms = self._clock(), self._wall()
        for key in changed:
            entry, saved = self._entries.find(key), self._saved.get(key, {})
            current = {} if entry is None else _promised(entry, now_s)
            gone += [(*key, name) for name in saved if not _is_kept(name, current, saved)]
            ends: dict[str, float] = {}
            for name, lease in current.items():
                until_s, before_s = lease.promised_until_s, saved.get(name)
                if before_s is not None and (
                    before_s <= until_s <= before_s + _slack_s(lease, is_last)
                ):
                    ends[name] = before_s
                    if until_s > before_s:
                        self._moved[key] = None
                    continue
                ends[name] = until_s
                assert entry is not None, "an entry has the lease"
                kept.append(_row(entry, lease, now_s, now_ms))
            if ends:
                self._saved[key] = ends
            else:
                self._saved.pop(key, None)
                self._moved.pop(key, None)
        return PromiseChanges(kept, gone)

    def _put_back(self, changes: PromiseChanges) -> None:
        """Note that changes were not written: each class is written, or deleted, once more."""
        for row in changes.kept:
            key = (row.namespace, row.digest)
            self._saved.setdefault(key, {})[row.name] = -math.inf
            self._changed[key] = None
        for namespace, digest, name in changes.gone:
            key = (namespace, digest)
            self._saved.setdefault(key, {}).setdefault(name, -math.inf)
            self._changed[key] = None

    def _restore(self, rows: Sequence[WrittenPrefix]) -> None:
        """Fill the index. O(rows). A row with unreadable terms is left out, and deleted; so is one
        of a prefix that the index has got meanwhile."""
        now_s, now_ms = self._clock(), self._wall()
        found: dict[PrefixKey, IndexedPrefix] = {}
        for row in rows:
            key = (row.namespace, row.digest)
            left_s = (row.promised_until_ms - now_ms) / MS_PER_S
            until_s = math.inf if row.promised_until_ms == LATEST_MS else now_s + left_s
            self._saved.setdefault(key, {})[row.name] = until_s
            if self._entries.find(key) is not None:
                self.note(key)
                continue
            entry = found.get(key)
            if entry is None:
                origin = PrefixOrigin(row.writer, row.model, row.template)
                entry = IndexedPrefix(
                    key, row.tokens, row.tenant_id, row.epoch, {}, origin, row.content
                )
                found[key] = entry
            try:
                terms = msgspec.json.decode(row.retention, type=Retention)
            except msgspec.MsgspecError:
                self.note(key)
                continue
            lease = Lease(terms, now_s, is_granted=False)
            lease.promised_until_s = until_s
            lease.expires_at_s = (
                math.inf if row.expires_ms is None else now_s + (row.expires_ms - now_ms) / MS_PER_S
            )
            entry.leases[row.name] = lease
        for key, entry in found.items():
            self._entries.restore(entry)
            for name in entry.leases:
                self._tally.record_write(entry.owner, key, name, now_s)


def _promised(entry: IndexedPrefix, now_s: float) -> dict[str, Lease]:
    return {name: lease for name, lease in entry.leases.items() if lease.promised_until_s > now_s}


def _is_kept(name: str, current: dict[str, Lease], saved: dict[str, float]) -> bool:
    """Whether a saved row may stay: its promise runs, and does not end before the row does."""
    lease = current.get(name)
    return lease is not None and lease.promised_until_s >= saved[name]


def _slack_s(lease: Lease, is_last: bool) -> float:
    return 0.0 if is_last else lease.retention.promise_s * SLACK_SHARE


def _row(entry: IndexedPrefix, lease: Lease, now_s: float, now_ms: int) -> WrittenPrefix:
    namespace, digest = entry.key
    expires_ms = _at_ms(lease.expires_at_s, now_s, now_ms)
    return WrittenPrefix(
        namespace=namespace,
        digest=digest,
        name=lease.retention.name,
        tenant_id=entry.owner,
        tokens=entry.tokens,
        retention=msgspec.json.encode(lease.retention).decode(),
        expires_ms=None if expires_ms == LATEST_MS else expires_ms,
        promised_until_ms=_at_ms(lease.promised_until_s, now_s, now_ms),
        epoch=entry.epoch,
        writer=entry.origin.writer,
        model=entry.origin.model,
        template=entry.origin.template,
        content=entry.content,
    )


def _at_ms(at_s: float, now_s: float, now_ms: int) -> int:
    """Return the wall-clock time of an instant of the monotonic clock."""
    left_ms = (at_s - now_s) * MS_PER_S
    return LATEST_MS if left_ms >= LATEST_MS - now_ms else now_ms + round(left_ms)
