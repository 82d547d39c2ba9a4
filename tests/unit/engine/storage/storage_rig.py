"""A storage of either kind with its slots and its clock, and the commands of a test in one line."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count

import xxhash

from engine.moves import (
    ROOT,
    EraseStored,
    Fetch,
    Fetched,
    Fidelity,
    Look,
    Looked,
    RecordId,
    Renew,
    RunToStore,
    Storage,
    StorageOutcome,
    StorageStats,
    Stored,
    StoredErased,
    StoredRun,
    StoreRuns,
)
from engine.storage.arena import HostArena
from tests.fakes import FakeClock

RUN = 4
"""Tokens of a run in these tests."""
SLOT_BYTES = 8_192
SLOTS = 32
A, B = b"namespace a", b"namespace b"


def content_of(namespace: bytes, tokens: Sequence[int]) -> bytes:
    """Return the bytes that the last run of these tokens must have: they depend on all before."""
    return random.Random(repr((namespace, tuple(tokens)))).randbytes(SLOT_BYTES)


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
                mine = not isinstance(one, StorageStats) and one.call_id == call_id
                (found if mine else rest).append(one)
            self.unclaimed = rest
            if len(found) >= wanted:
                return found
            self.unclaimed += self._settle()

    def store_command(
        self,
        namespace: bytes,
        tokens: Sequence[int],
        *,
        parent: RecordId = ROOT,
        above: Sequence[int] = (),
        limit_s: float | None = None,
        promise_s: float = 0.0,
        lease_ids: tuple[str, ...] = (),
        payer: bytes = b"payer",
        fidelity: Fidelity = "exact",
    ) -> StoreRuns:
        """Fill slots from 0 on, and return the command that stores them below `above`."""
        runs = []
        for number, at in enumerate(range(0, len(tokens), RUN)):
            data = content_of(namespace, [*above, *tokens[: at + RUN]])
            self.arena.view(number)[:] = data
            run = tuple(tokens[at : at + RUN])
            check = xxhash.xxh3_128_digest(data)
            runs.append(RunToStore(run, number, check, limit_s, promise_s))
        return StoreRuns(self.call_id(), namespace, payer, parent, tuple(runs), lease_ids, fidelity)

    def send_store(self, command: StoreRuns) -> Stored:
        """Send a store and return its outcome."""
        self.storage.send(command)
        (outcome,) = self.answers(command.call_id)
        assert isinstance(outcome, Stored)
        return outcome

    def store(
        self,
        namespace: bytes,
        tokens: Sequence[int],
        *,
        parent: RecordId = ROOT,
        above: Sequence[int] = (),
        limit_s: float | None = None,
        promise_s: float = 0.0,
        lease_ids: tuple[str, ...] = (),
        payer: bytes = b"payer",
    ) -> tuple[RecordId, ...]:
        """StoreRuns runs, all of which must succeed."""
        outcome = self.send_store(
            self.store_command(
                namespace,
                tokens,
                parent=parent,
                above=above,
                limit_s=limit_s,
                promise_s=promise_s,
                lease_ids=lease_ids,
                payer=payer,
            )
        )
        assert outcome.code == ""
        assert len(outcome.record_ids) == len(tokens) // RUN
        return outcome.record_ids

    def look(self, namespace: bytes, tokens: Sequence[int], skip: int = 0) -> tuple[StoredRun, ...]:
        """Return what a look finds."""
        command = Look(self.call_id(), namespace, tuple(tokens), skip)
        self.storage.send(command)
        (outcome,) = self.answers(command.call_id)
        assert isinstance(outcome, Looked)
        return outcome.runs

    def found(self, namespace: bytes, tokens: Sequence[int]) -> list[RecordId]:
        """Return the ids of the records that a look finds."""
        return [run.record_id for run in self.look(namespace, tokens)]

    def fetch(self, namespace: bytes, record_ids: Sequence[RecordId]) -> list[bytes | None]:
        """Return the bytes of records, None for each that failed."""
        slots = tuple(range(SLOTS - len(record_ids), SLOTS))
        for slot in slots:
            self.arena.view(slot)[:] = bytes(SLOT_BYTES)
        command = Fetch(self.call_id(), namespace, tuple(record_ids), slots)
        self.storage.send(command)
        done = {
            one.record_id: one.is_done
            for one in self.answers(command.call_id, len(record_ids))
            if isinstance(one, Fetched)
        }
        assert done.keys() == set(record_ids)
        return [
            bytes(self.arena.view(slot)) if done[record_id] else None
            for record_id, slot in zip(record_ids, slots, strict=True)
        ]

    def renew(
        self,
        namespace: bytes,
        record_ids: Sequence[RecordId],
        limit_s: float | None = None,
        promise_s: float = 0.0,
        lease_ids: tuple[str, ...] = (),
    ) -> None:
        """Renew records."""
        self.storage.send(Renew(namespace, tuple(record_ids), limit_s, promise_s, lease_ids))

    def erase(
        self, namespace: bytes, lease_id: str | None = None, tokens: Sequence[int] | None = None
    ) -> StoredErased:
        """Erase, and return the receipt."""
        prefix = None if tokens is None else tuple(tokens)
        command = EraseStored(self.call_id(), namespace, lease_id, prefix)
        self.storage.send(command)
        (outcome,) = self.answers(command.call_id)
        assert isinstance(outcome, StoredErased)
        return outcome
