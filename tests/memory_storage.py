"""A storage in memory: what `engine.storage` does with a disk, without disk, process or threads.

The simplest right implementation of `engine.moves.Storage`: the same conformance suite runs over it
and over the real one (`tests/unit/engine/storage/test_conformance.py`). Outcomes are there at the
next `poll`, in the order of the commands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import xxhash

from engine.api import Clock, Namespace, Payer
from engine.moves import (
    ROOT,
    EraseStored,
    Fetch,
    Fetched,
    FetchRuns,
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
    SlotFormat,
    StopFetch,
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


@dataclass
class MemoryRecord:
    """A stored run: its place in the tree of runs, its content and its times on the clock."""

    record_id: RecordId
    namespace: Namespace
    payer: Payer
    parent: RecordId
    tokens: tuple[int, ...]
    content: Any
    check: bytes
    form: SlotFormat
    limit_at_s: float
    promise_at_s: float
    leases: set[str] = field(default_factory=set)
    terms: PromiseTerms | None = None


class MemoryStorage:
    """Implements `engine.moves.Storage` over a dict of records.

    `records_max`: further runs are refused as `full`. `records` is open to tests, for damage.
    """

    def __init__(
        self, memory: Any, clock: Clock, *, run_tokens: int = 16, records_max: int = 10**9
    ) -> None:
        """`memory` is what `read`, `fill` and `form_of` know: here, slots with a `view`."""
        self.memory = memory
        self.records_max = records_max
        self.records: dict[RecordId, MemoryRecord] = {}
        self.level: Literal["disk", "remote"] = "disk"  # where looks and fetches find records
        self.is_closed = False
        self._clock = clock
        self._run_tokens = run_tokens
        self._outcomes: list[StorageOutcome] = []
        self._last: RecordId = ROOT
        self._told: set[Namespace] = set()

    # -- slots ----------------------------------------------------------------------------------

    def read(self, slot: int, form: SlotFormat) -> Any:
        """Return what a slot holds."""
        return bytes(self.memory.view(slot, form.slot_bytes))

    def fill(self, slot: int, record: MemoryRecord) -> None:
        """Write a record into a slot."""
        self.memory.view(slot, record.form.slot_bytes)[:] = record.content

    def digest(self, content: Any) -> bytes:
        """Return the digest of what a slot holds."""
        return xxhash.xxh3_128_digest(content)

    def form_of(self, command: StoreRuns) -> SlotFormat:
        """Return the format of a store's slots."""
        return SlotFormat("", command.slot_bytes, command.fidelity)

    def run_tokens(self) -> int:
        """Return the tokens of a run."""
        return self._run_tokens

    # -- the port -------------------------------------------------------------------------------

    def send(self, command: StorageCommand) -> None:
        """See `Storage`."""
        self._outcomes += failures_of(command) if self.is_closed else self.do(command)

    def do(self, command: StorageCommand) -> Sequence[StorageOutcome]:
        """Carry out a command; return its outcomes."""
        match command:
            case StoreRuns():
                return [self._store(command)]
            case FetchRuns() | StopFetch():
                return [*failures_of(command)]
            case Look():
                return [self._look(command)]
            case Fetch():
                pairs = zip(command.record_ids, command.slots, strict=True)
                return [self._fetch(command, record_id, slot) for record_id, slot in pairs]
            case Renew():
                return [self._renew(command)]
            case Recall():
                return [self._recall(command)]
            case EraseStored():
                return [self._erase(command)]
            case SetStoredQuotas() | KeepHere():
                return []  # it has neither quotas nor a remote store

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
        self.is_closed = True
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
            size = record.form.slot_bytes
            used[record.payer] = used.get(record.payer, 0) + size
            if record.promise_at_s > self._clock():
                promised[record.payer] = promised.get(record.payer, 0) + size
        return StorageStats(
            "off" if self.is_closed else "open",
            used_bytes=sum(used.values()),
            promised_bytes=sum(promised.values()),
            records=len(self.records),
            namespaces=len({record.namespace for record in self.records.values()}),
            payers=tuple(
                PayerBytes(payer, size, promised.get(payer, 0)) for payer, size in used.items()
            ),
        )

    # -- commands -------------------------------------------------------------------------------

    def fails(self) -> bool:
        """Return whether the next run fails to be written, or read."""
        return False

    def refusal(self, parent: RecordId) -> str:
        """Return why no further record may be stored below `parent`; empty if one may."""
        return "full" if len(self.records) >= self.records_max else ""

    def _store(self, command: StoreRuns) -> Stored:
        stored: list[RecordId] = []
        code, parent = "", command.parent
        if parent != ROOT and not self._is_found(command.namespace, parent):
            return Stored(command.call_id, (), "no_parent")
        form = self.form_of(command)
        for run in command.runs:
            if self.fails():
                code = "write_failed"
                break
            record = self._child(command.namespace, parent, run.tokens)
            if record is not None and not _is_alike(record.form, form):
                self._delete(record.record_id)
                record = None
            if record is None:
                content = self.read(run.slot, form)
                is_right = self.digest(content) == run.check
                code = self.refusal(parent) if is_right else "damaged"
                if code:
                    break
                self._last += 1
                record = self.records[self._last] = MemoryRecord(
                    self._last,
                    command.namespace,
                    command.payer or command.namespace,
                    parent,
                    run.tokens,
                    content,
                    run.check,
                    form,
                    NEVER if run.limit_s is None else self._clock() + run.limit_s,
                    self._clock() + run.promise_s,
                )
            limit_s = NEVER if run.limit_s is None else run.limit_s
            self._lengthen(record, limit_s, run.promise_s, command.lease_ids, run.terms)
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
            parent, form = record.record_id, record.form
            limit_s, promise_s = _times(record, now_s)
            found.append(
                StoredRun(parent, form.fidelity, limit_s, promise_s, form.slot_bytes, self.level)
            )
        return Looked(command.call_id, tuple(found))

    def _fetch(self, command: Fetch, record_id: RecordId, slot: int) -> Fetched:
        record = self.records.get(record_id)
        if self._is_found(command.namespace, record_id) and record is not None:
            if self.fails() or self.digest(record.content) != record.check:
                self._delete(record_id)
            elif record.form.slot_bytes == command.slot_bytes:
                self.fill(slot, record)
                return Fetched(
                    command.call_id, record_id, True, level=self.level, check=record.check
                )
        return Fetched(command.call_id, record_id, False, level=self.level)

    def _renew(self, command: Renew) -> Renewed:
        gone = list[RecordId]()
        for record_id in command.record_ids:
            if not self._is_found(command.namespace, record_id):
                gone.append(record_id)
                continue
            limit_s = 0.0 if command.limit_s is None else command.limit_s
            record = self.records[record_id]
            self._lengthen(record, limit_s, command.promise_s, command.lease_ids, command.terms)
        return Renewed(command.call_id, tuple(gone))

    def _recall(self, command: Recall) -> Recalled:
        now_s, kept = self._clock(), set[RecordId]()
        for record in self.records.values():
            if record.promise_at_s > now_s:
                kept |= self._with_above(record)
        left = sorted(one for one in kept if one > command.after)
        runs = [_recalled(self.records[one], now_s, self.level) for one in left[: command.most]]
        last = left[command.most - 1] if len(left) > command.most else ROOT
        return Recalled(command.call_id, tuple(runs), last)

    def _erase(self, command: EraseStored) -> StoredErased:
        sizes = [self._delete(top) for top in self._tops_to_erase(command)]
        return StoredErased(command.call_id, sum(map(len, sizes)), sum(map(sum, sizes)))

    # -- the tree of runs -----------------------------------------------------------------------

    def path(self, record_id: RecordId) -> tuple[int, ...]:
        """Return the tokens from the root to the end of a record."""
        record = self.records[record_id]
        return (*(self.path(record.parent) if record.parent else ()), *record.tokens)

    def _with_above(self, record: MemoryRecord) -> set[RecordId]:
        """Return a record and those that it hangs on."""
        above = self.records.get(record.parent)
        return {record.record_id} | (self._with_above(above) if above else set())

    def _runs_of(self, tokens: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        size = self.run_tokens()
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
        terms: PromiseTerms | None,
    ) -> None:
        record.limit_at_s = max(record.limit_at_s, self._clock() + limit_s)
        record.promise_at_s = max(record.promise_at_s, self._clock() + promise_s)
        record.leases.update(lease_ids)
        record.terms = terms or record.terms

    def _delete(self, record_id: RecordId) -> list[int]:
        """Delete a record and everything under it; return the sizes."""
        record = self.records.pop(record_id, None)
        if record is None:
            return []
        below = [child.record_id for child in self.records.values() if child.parent == record_id]
        return [record.form.slot_bytes, *(size for child in below for size in self._delete(child))]

    def _tops_to_erase(self, command: EraseStored) -> list[RecordId]:
        mine = [one for one in self.records.values() if one.namespace == command.namespace]
        if command.lease_id is None:
            begin = command.tokens or ()
            named = [one.record_id for one in mine]
            return [one for one in named if self.path(one)[: len(begin)] == begin]
        covered = [one.record_id for one in mine if command.lease_id in one.leases]
        kept: set[RecordId] = set()
        for record in mine:
            record.leases.discard(command.lease_id)
            if record.leases:
                kept |= self._with_above(record)
        return [record_id for record_id in covered if record_id not in kept]


def _is_alike(one: SlotFormat, other: SlotFormat) -> bool:
    """Return whether two formats have the same size and fidelity."""
    return (one.slot_bytes, one.fidelity) == (other.slot_bytes, other.fidelity)


def _times(record: MemoryRecord, now_s: float) -> tuple[float | None, float]:
    """Return the seconds left of a record's limit and promise."""
    limit_s = None if record.limit_at_s == NEVER else record.limit_at_s - now_s
    return limit_s, max(0.0, record.promise_at_s - now_s)


def _recalled(record: MemoryRecord, now_s: float, level: Literal["disk", "remote"]) -> RecalledRun:
    return RecalledRun(
        record.record_id,
        record.parent,
        record.namespace,
        record.payer,
        record.tokens,
        record.form.fidelity,
        record.form.slot_bytes,
        *_times(record, now_s),
        record.terms,
        tuple(sorted(record.leases)),
        level,
    )
