"""Fakes below the device: a transfer engine and a storage over the token oracle's slots.

What they copy are the exact prefixes that the fake runner keeps in a slot, so a load that brings
other bytes than the reader's own shows up as such at the next row that reads them. A seed decides
how long each move takes, in which order moves end, which fail, and which are damaged on the way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.api import Namespace
from engine.moves import (
    ROOT,
    EraseStored,
    Fetch,
    Fetched,
    Look,
    Looked,
    Move,
    Moved,
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
from tests.fakes import BROKEN, FakeRunner, Slot

Content = tuple[Slot | None, ...]


class MoveError(AssertionError):
    """The brain asked for a move that may not be."""


@dataclass
class Weather:
    """How a fake behaves: the most polls that a move waits, and how often one fails."""

    polls_max: int = 0
    fails: float = 0.0
    seconds: float = 0.0


class FakeTransferEngine:
    """`engine.moves.TransferEngine` over the fake runner's slots. Every call is O(moves)."""

    def __init__(
        self, runner: Callable[[], FakeRunner], slots: int, chance: random.Random, weather: Weather
    ) -> None:
        self.slots = slots
        self.slot_bytes = 1000
        self.contents: list[Content] = [()] * slots
        self.is_closed = False
        self.copied = 0
        self._runner = runner
        self._chance = chance
        self._weather = weather
        self._moves: list[tuple[int, Move]] = []

    def submit(self, moves: Sequence[Move]) -> None:
        """Begin moves; the targets of loads hold no prefix from here on."""
        for move in moves:
            if not 0 <= move.slot < self.slots:
                raise MoveError(f"{move}: a slot of {self.slots}")
            if move.kind == "load":
                self._write(move.block, [BROKEN] * self._runner().block_size)
            self._moves.append((self._chance.randint(0, self._weather.polls_max), move))

    def poll(self) -> list[Moved]:
        """Return the moves whose time has come, in any order."""
        due = [move for left, move in self._moves if not left]
        self._moves = [(left - 1, move) for left, move in self._moves if left]
        self._chance.shuffle(due)
        return [self._run(move) for move in due]

    def close(self) -> None:
        """End."""
        self.is_closed = True

    def _run(self, move: Move) -> Moved:
        if self._chance.random() < self._weather.fails:
            return Moved(move.move_id, is_done=False)
        size, slots = self._runner().block_size, self._runner().slots
        if move.kind == "offload":
            content = tuple(slots[move.block * size : (move.block + 1) * size])
            self.contents[move.slot] = content
            self.copied += 1
            return Moved(move.move_id, True, digest(content), self._weather.seconds)
        content = self.contents[move.slot]
        if move.check and move.check != digest(content):
            return Moved(move.move_id, is_done=False)
        self._write(move.block, content)
        self.copied += 1
        return Moved(move.move_id, is_done=True, seconds=self._weather.seconds)

    def _write(self, block: int, content: Sequence[Slot | None]) -> None:
        size = self._runner().block_size
        self._runner().slots[block * size : (block + 1) * size] = content


@dataclass
class Record:
    """A stored run: what it holds, what it hangs on, and until when it is promised."""

    namespace: Namespace
    parent: RecordId
    tokens: tuple[int, ...]
    content: Content
    leases: frozenset[str]
    promise_at_s: float = 0.0


class FakeStorage:
    """`engine.moves.Storage` in memory. `records` outlive the engine that made them.

    Beyond `records_max` it drops records that are not promised and nothing hangs on, the oldest
    first, and refuses more if there are none.
    """

    def __init__(
        self,
        memory: FakeTransferEngine,
        chance: random.Random,
        weather: Weather,
        clock: Callable[[], float] = lambda: 0.0,
        records_max: int = 10**9,
    ) -> None:
        self.memory = memory
        self.records_max = records_max
        self._clock = clock
        self.records: dict[RecordId, Record] = {}
        self.is_closed = False
        self.is_away = False  # stores and fetches fail
        self.commands: list[StorageCommand] = []
        self._chance = chance
        self._weather = weather
        self._last: RecordId = 0
        self._outcomes: list[tuple[int, StorageCommand]] = []
        self._ready: list[StorageOutcome] = []
        self._told: set[Namespace] = set()

    def send(self, command: StorageCommand) -> None:
        """Take a command; it is done at a later poll, those before an erasure before it."""
        self.commands.append(command)
        if isinstance(command, SetStoredQuotas):
            return
        if isinstance(command, EraseStored | Look):
            for _, earlier in self._outcomes:
                self._do(earlier)
            self._outcomes = []
        self._outcomes.append((self._chance.randint(0, self._weather.polls_max), command))

    def poll(self) -> list[StorageOutcome]:
        """Return what has been done since the last call."""
        waiting, self._outcomes = self._outcomes, []
        for left, command in waiting:
            if left:
                self._outcomes.append((left - 1, command))
            else:
                self._do(command)
        ready, self._ready = self._ready, []
        return ready

    def has_records(self, namespace: Namespace) -> bool:
        """Return whether any record is of this namespace."""
        return any(record.namespace == namespace for record in self.records.values())

    def namespaces(self) -> set[Namespace]:
        """Return the namespaces that have records."""
        return {record.namespace for record in self.records.values()}

    def take_changed(self) -> set[Namespace]:
        """Return those that got or lost records since the last call."""
        before, self._told = self._told, self.namespaces()
        return before ^ self._told

    def close(self) -> None:
        """End."""
        self.is_closed = True

    def take_over(self, before: FakeStorage | None) -> None:
        """Continue with the records of an earlier process, which finishes what it was given."""
        if before is not None:
            before.finish()
            self.records, self._last = before.records, before._last

    def finish(self) -> None:
        """Do all that was asked for."""
        waiting, self._outcomes = self._outcomes, []
        for _, command in waiting:
            self._do(command)

    def lose(self, record_id: RecordId) -> None:
        """Lose a record, and with it those that hang on it; nobody is told."""
        self._drop([record_id])

    def beat(self, stats: StorageStats) -> None:
        """Send a heartbeat."""
        self._ready.append(stats)

    def _do(self, command: StorageCommand) -> None:
        if isinstance(command, StoreRuns):
            self._store(command)
        elif isinstance(command, Look):
            self._look(command)
        elif isinstance(command, Fetch):
            self._fetch(command)
        elif isinstance(command, Renew):
            self._renew(command)
        elif isinstance(command, EraseStored):
            self._erase(command)

    def _fails(self) -> bool:
        return self.is_away or self._chance.random() < self._weather.fails

    def _store(self, command: StoreRuns) -> None:
        parent, made, code = command.parent, list[RecordId](), ""
        for run in command.runs:
            if self._fails():
                code = "write_failed"
                break
            if parent != ROOT and parent not in self.records:
                code = "no_parent"
                break
            content = self.memory.contents[run.slot]
            if digest(content) != run.check:
                raise MoveError(f"slot {run.slot} changed while it was held for a store")
            known = self._child(command.namespace, parent, run.tokens)
            if known is None:
                if len(self.records) >= self.records_max and not self._make_room(parent):
                    code = "full"
                    break
                self._last += 1
                known = self._last
                leases = frozenset(command.lease_ids)
                self.records[known] = Record(command.namespace, parent, run.tokens, content, leases)
            self._promise(known, run.promise_s)
            made.append(known)
            parent = known
        self._ready.append(Stored(command.call_id, tuple(made), code))

    def _look(self, command: Look) -> None:
        found, parent, at = list[StoredRun](), ROOT, 0
        while at < len(command.tokens):
            own = next(
                (
                    record_id
                    for record_id, record in self.records.items()
                    if (record.namespace, record.parent) == (command.namespace, parent)
                    and command.tokens[at : at + len(record.tokens)] == record.tokens
                ),
                None,
            )
            if own is None:
                break
            promise_s = max(0.0, self.records[own].promise_at_s - self._clock())
            found.append(StoredRun(own, "exact", None, promise_s))
            parent, at = own, at + len(self.records[own].tokens)
        self._ready.append(Looked(command.call_id, tuple(found[command.skip :])))

    def _fetch(self, command: Fetch) -> None:
        for record_id, slot in zip(command.record_ids, command.slots, strict=True):
            record = self.records.get(record_id)
            is_done = record is not None and record.namespace == command.namespace
            if self._fails():
                is_done = False
                self._drop([record_id])
            if record is not None and is_done:
                self.memory.contents[slot] = record.content
            self._ready.append(Fetched(command.call_id, record_id, is_done, self._weather.seconds))

    def _renew(self, command: Renew) -> None:
        if self.is_away:
            self._ready.append(Renewed(command.call_id, code="closed"))
            return
        gone = list[RecordId]()
        for record_id in command.record_ids:
            record = self.records.get(record_id)
            if record is None or record.namespace != command.namespace:
                gone.append(record_id)
            else:
                self._promise(record_id, command.promise_s)
                record.leases |= frozenset(command.lease_ids)
        self._ready.append(Renewed(command.call_id, tuple(gone)))

    def _promise(self, record_id: RecordId, promise_s: float) -> None:
        record = self.records[record_id]
        record.promise_at_s = max(record.promise_at_s, self._clock() + promise_s)

    def _make_room(self, parent: RecordId) -> bool:
        """Drop the oldest record that may go; return whether there was one."""
        parents = {record.parent for record in self.records.values()} | {parent}
        for record_id, record in self.records.items():
            if record_id not in parents and record.promise_at_s <= self._clock():
                self._drop([record_id])
                return True
        return False

    def _erase(self, command: EraseStored) -> None:
        before = len(self.records)
        named = [
            record_id
            for record_id, record in self.records.items()
            if record.namespace == command.namespace and self._is_named(record_id, command)
        ]
        self._drop(named)
        gone = before - len(self.records)
        self._ready.append(StoredErased(command.call_id, gone, gone * self.memory.slot_bytes))

    def _is_named(self, record_id: RecordId, command: EraseStored) -> bool:
        if command.lease_id is not None:
            return self.records[record_id].leases == {command.lease_id}
        if command.tokens is None:
            return True
        path = self.path(record_id)
        return path[: len(command.tokens)] == command.tokens

    def path(self, record_id: RecordId) -> tuple[int, ...]:
        """Return the tokens from the root to the end of a record."""
        record = self.records[record_id]
        above = () if record.parent == ROOT else self.path(record.parent)
        return above + record.tokens

    def _child(
        self, namespace: Namespace, parent: RecordId, tokens: tuple[int, ...]
    ) -> RecordId | None:
        for record_id, record in self.records.items():
            if (record.namespace, record.parent, record.tokens) == (namespace, parent, tokens):
                return record_id
        return None

    def _drop(self, record_ids: Sequence[RecordId]) -> None:
        stack = list(record_ids)
        while stack:
            gone = stack.pop()
            if self.records.pop(gone, None) is not None:
                stack += [i for i, record in self.records.items() if record.parent == gone]


def digest(content: Content) -> bytes:
    """Return what stands for the digest of a slot's bytes."""
    return repr(content).encode()
