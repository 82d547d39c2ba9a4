"""A storage of either kind with its slots and its clock, and the commands of a test in one line."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import TypedDict, TypeVar, Unpack

import xxhash

from engine.api import Fidelity
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
    RecordId,
    Renew,
    Renewed,
    RunToStore,
    SetStoredQuotas,
    SlotLayout,
    Storage,
    StorageCommand,
    StorageOutcome,
    StorageStats,
    Stored,
    StoredErased,
    StoredRun,
    StoreRuns,
)
from engine.storage.client import StorageClient, StorageProcess, start_process
from engine.storage.memory.arena import HostArena
from engine.storage.messages import DiskSettings
from engine.storage.process import serve
from engine.storage.remote.address import RemoteSettings, open_remote
from engine.storage.remote.objects import RemoteStore
from engine.storage.sealing.unlocking import SealSettings
from engine.storage.slabs.record import RecordHeader, pack_run
from engine.storage.slabs.slabs import DiskCalls
from tests.fakes import FakeClock
from tests.unit.engine.storage.failing_calls import FailingCalls

RUN = 4
"""Tokens of a run in these tests."""
SLOT_BYTES = 8_192
SLOTS = 32
LAYOUT = SlotLayout.uniform(SLOTS, SLOT_BYTES)
A, B = b"namespace a", b"namespace b"
LONG = tuple(range(5 * RUN))
"""A prefix of five runs."""
HEADER = RecordHeader(
    store_id=b"s" * 16,
    record_id=9,
    scope_id=3,
    parent=7,
    namespace=b"namespace",
    payer=b"payer",
    run=pack_run((1, 2, 2**32 - 1)),
    fidelity="near",
    payload_bytes=SLOT_BYTES,
    check=b"c" * 16,
    written_ms=1,
    limit_ms=2**62,
    promise_ms=3,
)
Outcome = TypeVar("Outcome")


class StoreOptions(TypedDict, total=False):
    """How runs are stored. `above`: the tokens of the records that `parent` ends."""

    parent: RecordId
    above: Sequence[int]
    limit_s: float | None
    promise_s: float
    lease_ids: tuple[str, ...]
    payer: bytes
    fidelity: Fidelity
    slot_bytes: int
    may_leave: bool


def path_of(number: int) -> tuple[int, ...]:
    """Return the only run of a prefix."""
    return (number, 1, 2, 3)


def content_of(namespace: bytes, tokens: Sequence[int], slot_bytes: int = SLOT_BYTES) -> bytes:
    """Return the bytes that the last run of these tokens must have: they depend on all before."""
    return random.Random(repr((namespace, tuple(tokens)))).randbytes(slot_bytes)


class StorageRig:
    """`settle` brings outcomes: a poll for a storage in memory, a wait for one in a process."""

    def __init__(
        self,
        storage: Storage,
        arena: HostArena,
        clock: FakeClock,
        settle: Callable[[], list[StorageOutcome]],
    ) -> None:
        self.storage, self.arena, self.clock = storage, arena, clock
        self._settle = settle
        self._call_ids = count(1)
        self.stats: StorageStats | None = None
        self.unclaimed: list[StorageOutcome] = []

    def call_id(self) -> int:
        """Return a fresh number."""
        return next(self._call_ids)

    def answers(self, call_id: int, wanted: int = 1) -> list[StorageOutcome]:
        """Return the outcomes of a call; those of other calls stay `unclaimed`."""
        found: list[StorageOutcome] = []
        while True:
            rest: list[StorageOutcome] = []
            for one in self.unclaimed:
                is_mine = not isinstance(one, StorageStats) and one.call_id == call_id
                (found if is_mine else rest).append(one)
            self.unclaimed = rest
            if len(found) >= wanted:
                return found
            self.unclaimed += self._settle()

    def ask(self, command: StorageCommand, kind: type[Outcome]) -> Outcome:
        """Send a command and return its one outcome."""
        assert not isinstance(command, SetStoredQuotas | KeepHere), "it has none"
        self.storage.send(command)
        (outcome,) = self.answers(command.call_id)
        assert isinstance(outcome, kind)
        return outcome

    def store_command(
        self, namespace: bytes, tokens: Sequence[int], **options: Unpack[StoreOptions]
    ) -> StoreRuns:
        """Fill slots from 0 on, and return the command that stores them."""
        runs, size = [], options.get("slot_bytes", self.slot_bytes)
        limit_s, promise_s = options.get("limit_s"), options.get("promise_s", 0.0)
        for number, at in enumerate(range(0, len(tokens), RUN)):
            data = content_of(namespace, [*options.get("above", ()), *tokens[: at + RUN]], size)
            self.arena.view(number, size)[:] = data
            run = tuple(tokens[at : at + RUN])
            check = xxhash.xxh3_128_digest(data)
            runs.append(RunToStore(run, number, check, limit_s, promise_s))
        return StoreRuns(
            self.call_id(),
            namespace,
            options.get("payer", b"payer"),
            options.get("parent", ROOT),
            tuple(runs),
            size,
            options.get("lease_ids", ()),
            options.get("fidelity", "exact"),
            options.get("may_leave", True),
        )

    def send_store(self, command: StoreRuns) -> Stored:
        """Send a store and return its outcome."""
        return self.ask(command, Stored)

    def store(
        self, namespace: bytes, tokens: Sequence[int], **options: Unpack[StoreOptions]
    ) -> tuple[RecordId, ...]:
        """Store runs, all of which must succeed; return their records."""
        outcome = self.send_store(self.store_command(namespace, tokens, **options))
        assert outcome.code == ""
        assert len(outcome.record_ids) == len(tokens) // RUN
        return outcome.record_ids

    def look(self, namespace: bytes, tokens: Sequence[int]) -> tuple[StoredRun, ...]:
        """Return what a look finds."""
        return self.ask(Look(self.call_id(), namespace, tuple(tokens)), Looked).runs

    def found(self, namespace: bytes, tokens: Sequence[int]) -> list[RecordId]:
        """Return the ids of the records that a look finds."""
        return [run.record_id for run in self.look(namespace, tokens)]

    @property
    def slot_bytes(self) -> int:
        """The bytes of a slot, unless a call says others."""
        return self.arena.layout.slot_bytes_min

    def fetch(
        self, namespace: bytes, record_ids: Sequence[RecordId], slot_bytes: int | None = None
    ) -> list[bytes | None]:
        """Return the bytes of records, None for each that failed."""
        slots, size = tuple(range(SLOTS - len(record_ids), SLOTS)), slot_bytes or self.slot_bytes
        for slot in slots:
            self.arena.view(slot, size)[:] = bytes(size)
        command = Fetch(self.call_id(), namespace, tuple(record_ids), slots, size)
        self.storage.send(command)
        done = {
            one.record_id: one.is_done
            for one in self.answers(command.call_id, len(record_ids))
            if isinstance(one, Fetched)
        }
        assert done.keys() == set(record_ids)
        return [
            bytes(self.arena.view(slot, size)) if done[record_id] else None
            for record_id, slot in zip(record_ids, slots, strict=True)
        ]

    def renew(
        self,
        namespace: bytes,
        record_ids: Sequence[RecordId],
        limit_s: float | None = None,
        promise_s: float = 0.0,
        lease_ids: tuple[str, ...] = (),
        terms: PromiseTerms | None = None,
    ) -> tuple[RecordId, ...]:
        """Renew records; return those that are gone."""
        options = limit_s, promise_s, lease_ids, terms
        outcome = self.ask(Renew(self.call_id(), namespace, tuple(record_ids), *options), Renewed)
        assert not outcome.code
        return outcome.gone

    def recall(self, most: int = 100, after: RecordId = ROOT) -> Recalled:
        """Return the next promised records."""
        return self.ask(Recall(self.call_id(), after, most), Recalled)

    def erase(
        self, namespace: bytes, lease_id: str | None = None, tokens: Sequence[int] | None = None
    ) -> StoredErased:
        """Erase, and return the receipt."""
        prefix = None if tokens is None else tuple(tokens)
        return self.ask(EraseStored(self.call_id(), namespace, lease_id, prefix), StoredErased)


class ProcessInThread:
    """A storage process as a thread of this one, with the test's clock as its wall clock."""

    def __init__(
        self,
        arena: HostArena,
        clock: FakeClock,
        calls: DiskCalls,
        monotonic_s: Callable[[], float] = time.monotonic,
        remote: RemoteStore | None = None,
    ) -> None:
        self._remote = remote
        self.wire, self._theirs = socket.socketpair()
        self._arena, self._clock, self._calls = arena, clock, calls
        self._monotonic_s = monotonic_s
        self.log: list[tuple[str, dict[str, object]]] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with self._theirs:
            serve(
                self._theirs,
                wall_ms=lambda: int(self._clock() * 1_000),
                uptime_s=self._clock,
                monotonic_s=self._monotonic_s,
                attach=self._attach,
                calls=self._calls,
                log=lambda event, **facts: self.log.append((event, facts)),
                open_remote=self._open_remote,
            )

    def _open_remote(self, url: str, timeout_s: float) -> RemoteStore:
        return open_remote(url, timeout_s) if self._remote is None else self._remote

    def _attach(self, settings: DiskSettings) -> HostArena:
        return HostArena(os.dup(self._arena.fd), settings.layout)

    def kill(self) -> None:
        """End it as if its engine had gone; a thread cannot be killed."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class DiskRig(StorageRig):
    """A `StorageClient` and its process, as a thread, over a folder."""

    def __init__(
        self,
        folder: Path,
        clock: FakeClock,
        *,
        disk_bytes: int = 64 * 2**20,
        slab_bytes: int = 2**20,
        write_bytes_per_day: int = 0,
        spare_bytes: int = 0,
        monotonic_s: Callable[[], float] = time.monotonic,
        wait_s: float = 10.0,
        seal: SealSettings | None = None,
        remote: RemoteSettings | None = None,
        objects: RemoteStore | None = None,
        is_real: bool = False,
        model_digest: str = "",
    ) -> None:
        """`objects`: the remote store, instead of the one at the address of `remote`. `is_real`: a
        process of its own, with the clock of the machine."""
        arena = HostArena.create(LAYOUT)
        self.settings = DiskSettings(
            str(folder),
            disk_bytes,
            arena.fd,
            LAYOUT,
            (SLOT_BYTES, SLOT_BYTES // 2),
            slab_bytes,
            io_threads=2,
            write_bytes_per_day=write_bytes_per_day,
            run_tokens=RUN,
            heartbeat_s=0.05,
            wait_s=wait_s,
            spare_bytes=spare_bytes,
            seal=seal,
            remote=remote,
            model_digest=model_digest,
        )
        self.faults = FailingCalls()
        self.processes: list[StorageProcess] = []

        def start(settings: DiskSettings) -> StorageProcess:
            self.processes.append(
                start_process(settings)
                if is_real
                else ProcessInThread(arena, clock, self.faults, monotonic_s, objects)
            )
            return self.processes[-1]

        self.client = StorageClient(self.settings, start=start, silence_s=60.0)
        super().__init__(self.client, arena, clock, self.next_outcomes)
        self.await_stats()

    def next_outcomes(self) -> list[StorageOutcome]:
        """Wait for outcomes; heartbeats go to `stats`."""
        assert self.client.wait(60.0), "no outcome in 60 s"
        outcomes = self.client.poll()
        for one in outcomes:
            if isinstance(one, StorageStats):
                self.stats = one
        return [one for one in outcomes if not isinstance(one, StorageStats)]

    def await_stats(self) -> StorageStats:
        """Wait for the next heartbeat."""
        before = self.stats
        while self.stats is before or self.stats is None:
            self.unclaimed += self.next_outcomes()
        return self.stats

    def await_state(self, state: str) -> StorageStats:
        """Wait for a heartbeat with this state."""
        while True:
            stats = self.await_stats()
            if stats.state == state:
                return stats

    def close(self) -> None:
        """Close the client, and wait for the process."""
        self.faults.open_all()
        self.client.close()
        for process in self.processes:
            assert process.wait(60.0), "the process has not ended"
        self.arena.close()
