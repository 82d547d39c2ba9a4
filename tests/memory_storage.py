"""A storage in memory: what `engine.storage` does with a disk, without disk, process or threads.

The simplest right implementation of `engine.moves.Storage`: the same conformance suite runs over it
and over the real one (`tests/unit/engine/storage/test_conformance.py`). Outcomes are there at the
next `poll`, in the order of the commands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import xxhash

from engine.api import Clock, Fidelity, Namespace, Payer
from engine.moves import (
    ROOT,
    EraseStored,
    Fetch,
    Fetched,
    KeepHere,
    Look,
    Looked,
    PromiseTerms,
    Recall,
    Recalled,
    RecalledRun,
    RecordId,
    Renew,
    Renewed,
    SetStoredQuotas,
    StorageCommand,
    StorageOutcome,
    StorageStats,
    Stored,
    StoredErased,
    StoredRun,
    StoreRuns,
)
from engine.statistics import PayerBytes
from engine.storage.messages import failures_of

NEVER = float("inf")


class SlotMemory(Protocol):
    """Slots of host memory."""

    def view(self, slot: int, slot_bytes: int) -> memoryview:
        """Return the bytes of a slot of this size, writable."""


@dataclass
class MemoryRecord:
    """A stored run: its place in the tree of runs, its bytes and its times on the clock."""

    record_id: RecordId
    namespace: Namespace
    payer: Payer
    parent: RecordId
    tokens: tuple[int, ...]
    data: bytes
    check: bytes
    fidelity: Fidelity
    limit_at_s: float
    promise_at_s: float
    leases: set[str] = field(default_factory=set)
    terms: PromiseTerms | None = None


class MemoryStorage:
    """Implements `engine.moves.Storage` over a dict of records.

    `records_max`: further runs are refused as `full`. `records` is open to tests, for damage.
    """

    def __init__(
        self, memory: SlotMemory, clock: Clock, *, run_tokens: int = 16, records_max: int = 10**9
    ) -> None:
        self._memory = memory
        self._clock = clock
        self._run_tokens = run_tokens
        self._records_max = records_max
        self._outcomes: list[StorageOutcome] = []
        self._next_id = ROOT + 1
        self._is_closed = False
        self._told: set[Namespace] = set()
        self.records: dict[RecordId, MemoryRecord] = {}
        self.quotas: SetStoredQuotas | None = None

    def send(self, command: StorageCommand) -> None:
        """See `Storage`."""
        if self._is_closed:
            self._outcomes += failures_of(command)
            return
        match command:
            case StoreRuns():
                self._outcomes.append(self._store(command))
            case Look():
                self._outcomes.append(self._look(command))
            case Fetch():
                self._outcomes += self._fetch(command)
            case Renew():
                self._outcomes.append(self._renew(command))
            case Recall():
                self._outcomes.append(self._recall(command))
            case EraseStored():
                self._outcomes.append(self._erase(command))
            case SetStoredQuotas():
                self.quotas = command
            case KeepHere():
                pass  # it has no remote store

    def poll(self) -> list[StorageOutcome]:
        """See `Storage`."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def has_records(self, namespace: Namespace) -> bool:
        """See `Storage`."""
        return any(record.namespace == namespace for record in self.records.values())

    def namespaces(self) -> set[Namespace]:
        """See `Storage`."""
        return {record.namespace for record in self.records.values()}

    def take_changed(self) -> set[Namespace]:
        """See `Storage`."""
        before, self._told = self._told, self.namespaces()
        return before ^ self._told

    def close(self) -> None:
        """See `Storage`: later commands fail."""
        self._is_closed = True
        self.records.clear()

    def expire(self) -> None:
        """Delete what has reached its limit, with everything under it."""
        now_s = self._clock()
        for record in list(self.records.values()):
            if record.limit_at_s <= now_s:
                self._delete(record.record_id)

    def stats(self) -> StorageStats:
        """Return what a heartbeat would say."""
        used: dict[Payer, int] = {}
        promised: dict[Payer, int] = {}
        for record in self.records.values():
            size = len(record.data)
            used[record.payer] = used.get(record.payer, 0) + size
            if record.promise_at_s > self._clock():
                promised[record.payer] = promised.get(record.payer, 0) + size
        return StorageStats(
            "off" if self._is_closed else "open",
            used_bytes=sum(used.values()),
            promised_bytes=sum(promised.values()),
            records=len(self.records),
            namespaces=len({record.namespace for record in self.records.values()}),
            payers=tuple(
                PayerBytes(payer, size, promised.get(payer, 0)) for payer, size in used.items()
            ),
        )

    # -- commands -------------------------------------------------------------------------------

    def _store(self, command: StoreRuns) -> Stored:
        stored: list[RecordId] = []
        code, parent = "", command.parent
        if parent != ROOT and not self._is_found(command.namespace, parent):
            return Stored(command.call_id, (), "no_parent")
        for run in command.runs:
            record = self._child(command.namespace, parent, run.tokens)
            if record is not None and not _is_alike(record, command):
                self._delete(record.record_id)
                record = None
            if record is None:
                data = bytes(self._memory.view(run.slot, command.slot_bytes))
                if xxhash.xxh3_128_digest(data) != run.check:
                    code = "damaged"
                elif len(self.records) >= self._records_max:
                    code = "full"
                if code:
                    break
                record = MemoryRecord(
                    self._next_id,
                    command.namespace,
                    command.payer or command.namespace,
                    parent,
                    run.tokens,
                    data,
                    run.check,
                    command.fidelity,
                    NEVER if run.limit_s is None else self._clock() + run.limit_s,
                    self._clock() + run.promise_s,
                )
                self._next_id += 1
                self.records[record.record_id] = record
            limit_s = NEVER if run.limit_s is None else run.limit_s
            self._lengthen(record, limit_s, run.promise_s, command.lease_ids)
            record.terms = run.terms or record.terms
            parent = record.record_id
            stored.append(parent)
        return Stored(command.call_id, tuple(stored), code)

    def _look(self, command: Look) -> Looked:
        found: list[StoredRun] = []
        parent, now_s = ROOT, self._clock()
        for tokens in self._runs_of(command.tokens):
            record = self._child(command.namespace, parent, tokens)
            if record is None:
                break
            parent = record.record_id
            limit_s = None if record.limit_at_s == NEVER else record.limit_at_s - now_s
            promise_s = max(0.0, record.promise_at_s - now_s)
            size = len(record.data)
            found.append(StoredRun(parent, record.fidelity, limit_s, promise_s, size))
        return Looked(command.call_id, tuple(found))

    def _fetch(self, command: Fetch) -> Iterator[Fetched]:
        for record_id, slot in zip(command.record_ids, command.slots, strict=True):
            is_done = self._is_found(command.namespace, record_id)
            check = b""
            if is_done:
                record = self.records[record_id]
                is_done = xxhash.xxh3_128_digest(record.data) == record.check
                if not is_done:
                    self._delete(record_id)
                elif is_done := len(record.data) == command.slot_bytes:
                    self._memory.view(slot, command.slot_bytes)[:] = record.data
                    check = record.check
            yield Fetched(command.call_id, record_id, is_done, check=check)

    def _renew(self, command: Renew) -> Renewed:
        gone = list[RecordId]()
        for record_id in command.record_ids:
            if not self._is_found(command.namespace, record_id):
                gone.append(record_id)
                continue
            limit_s = 0.0 if command.limit_s is None else command.limit_s
            record = self.records[record_id]
            self._lengthen(record, limit_s, command.promise_s, command.lease_ids)
            record.terms = command.terms or record.terms
        return Renewed(command.call_id, tuple(gone))

    def _recall(self, command: Recall) -> Recalled:
        now_s, kept = self._clock(), set[RecordId]()
        for record in self.records.values():
            above: MemoryRecord | None = record
            while record.promise_at_s > now_s and above is not None:
                kept.add(above.record_id)
                above = self.records.get(above.parent)
        left = sorted(one for one in kept if one > command.after)
        runs = [_recalled(self.records[one], now_s) for one in left[: command.most]]
        last = left[command.most - 1] if len(left) > command.most else ROOT
        return Recalled(command.call_id, tuple(runs), last)

    def _erase(self, command: EraseStored) -> StoredErased:
        sizes = [self._delete(top) for top in self._tops_to_erase(command)]
        return StoredErased(command.call_id, sum(map(len, sizes)), sum(map(sum, sizes)))

    # -- the tree of runs -----------------------------------------------------------------------

    def _runs_of(self, tokens: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        size = self._run_tokens
        for at in range(0, len(tokens) - size + 1, size):
            yield tokens[at : at + size]

    def _child(
        self, namespace: Namespace, parent: RecordId, tokens: tuple[int, ...]
    ) -> MemoryRecord | None:
        for record in self.records.values():
            if (record.namespace, record.parent, record.tokens) == (namespace, parent, tokens):
                if record.limit_at_s > self._clock():
                    return record
                self._delete(record.record_id)
                break
        return None

    def _is_found(self, namespace: Namespace, record_id: RecordId) -> bool:
        record = self.records.get(record_id)
        return (
            record is not None
            and record.namespace == namespace
            and record.limit_at_s > self._clock()
        )

    def _lengthen(
        self,
        record: MemoryRecord,
        limit_s: float,
        promise_s: float,
        lease_ids: tuple[str, ...],
    ) -> None:
        record.limit_at_s = max(record.limit_at_s, self._clock() + limit_s)
        record.promise_at_s = max(record.promise_at_s, self._clock() + promise_s)
        record.leases.update(lease_ids)

    def _delete(self, record_id: RecordId) -> list[int]:
        """Delete a record and everything under it; return the sizes."""
        record = self.records.pop(record_id, None)
        if record is None:
            return []
        below = [child.record_id for child in self.records.values() if child.parent == record_id]
        return [len(record.data), *(size for child in below for size in self._delete(child))]

    def _tops_to_erase(self, command: EraseStored) -> list[RecordId]:
        mine = [one for one in self.records.values() if one.namespace == command.namespace]
        if command.lease_id is not None:
            kept: set[RecordId] = set()
            for record in mine:
                if record.leases - {command.lease_id}:
                    above: MemoryRecord | None = record
                    while above is not None:
                        kept.add(above.record_id)
                        above = self.records.get(above.parent)
            covered = [one.record_id for one in mine if command.lease_id in one.leases]
            for record in mine:
                record.leases.discard(command.lease_id)
            return [record_id for record_id in covered if record_id not in kept]
        if not command.tokens:
            return [one.record_id for one in mine if one.parent == ROOT]
        return self._under(mine, ROOT, command.tokens)

    def _under(
        self, mine: list[MemoryRecord], parent: RecordId, tokens: tuple[int, ...]
    ) -> list[RecordId]:
        """Return the first records whose path begins with all of `tokens`."""
        size = self._run_tokens
        children = [one for one in mine if one.parent == parent]
        if len(tokens) <= size:
            return [one.record_id for one in children if one.tokens[: len(tokens)] == tokens]
        for child in children:
            if child.tokens == tokens[:size]:
                return self._under(mine, child.record_id, tokens[size:])
        return []


def _is_alike(record: MemoryRecord, command: StoreRuns) -> bool:
    """Return whether a record has the format of a store."""
    return (len(record.data), record.fidelity) == (command.slot_bytes, command.fidelity)


def _recalled(record: MemoryRecord, now_s: float) -> RecalledRun:
    return RecalledRun(
        record.record_id,
        record.parent,
        record.namespace,
        record.payer,
        record.tokens,
        record.fidelity,
        len(record.data),
        None if record.limit_at_s == NEVER else record.limit_at_s - now_s,
        max(0.0, record.promise_at_s - now_s),
        record.terms,
        tuple(sorted(record.leases)),
    )
