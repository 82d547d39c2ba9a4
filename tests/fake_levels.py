"""Fakes below the device: a transfer engine and a storage over the token oracle's slots.

What they copy are the exact prefixes that the fake runner keeps in a slot, so a load that brings
other bytes than the reader's own shows up as such at the next row that reads them. A seed decides
how long each move takes, in which order moves end, which fail, and which are damaged on the way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import xxhash

from engine.api import Namespace, Payer
from engine.cache import PrefixCache
from engine.config import LevelsConfig
from engine.levels.levels import Levels
from engine.moves import (
    LOADS_MAX,
    OFFLOADS_MAX,
    ROOT,
    WHOLE,
    EraseStored,
    Fetch,
    Fetched,
    KeepHere,
    Look,
    Looked,
    Move,
    Moved,
    PromiseTerms,
    Recall,
    Recalled,
    RecalledRun,
    RecordId,
    Renew,
    Renewed,
    SetStoredQuotas,
    SlotFormat,
    SlotLayout,
    StorageCommand,
    StorageOutcome,
    StorageStats,
    Stored,
    StoredErased,
    StoredRun,
    StoreRuns,
    is_whole_format,
    packed_part,
    stride_of,
    whole_format,
)
from engine.storage.memory.slot_table import SlotTable, table_bytes
from tests.fakes import BROKEN, FakeRunner, Slot

Content = tuple[Slot | None, ...]


BOOT_S = 5_000.0
"""What the boot clock says when the first engine's says nothing."""
RECALLED_MAX = 2
"""Records that the fake storage tells at once of those that are promised."""


def whole_of(groups: int) -> tuple[SlotFormat, SlotFormat]:
    """Return the formats of a model with so many KV groups."""
    return PLAIN, SlotFormat(WHOLE, groups * PLAIN.slot_bytes)


def packed_whole_of(groups: int) -> tuple[SlotFormat, ...]:
    """Return the formats of a model with so many KV groups, with packed ones."""
    packed = PACKED[1:]
    wholes = [
        SlotFormat(whole_format(one.name), groups * one.slot_bytes, one.fidelity) for one in packed
    ]
    return (*whole_of(groups), *packed, *wholes)


class MoveError(AssertionError):
    """The engine asked for a move that may not be."""


@dataclass
class Weather:
    """How a fake behaves: the most polls that a move waits, how often one fails, and whether a
    fetch that fails has read damaged bytes."""

    polls_max: int = 0
    fails: float = 0.0
    is_damaging: bool = False
    seconds: float = 0.0


PLAIN = SlotFormat("", 1000)
PACKED = (PLAIN, SlotFormat("int8c", 500, "near"), SlotFormat("int4c", 300, "rough"))
"""Formats of the fake: it packs nothing, and notes in which format a slot was written."""


def layout_of(blocks: int, formats: Sequence[SlotFormat], slab_blocks: int = 3) -> SlotLayout:
    """Return memory for so many plain blocks, in slabs of a few."""
    if len(formats) == 1:
        return SlotLayout.uniform(blocks, formats[0].slot_bytes)
    stride = stride_of(formats[0].slot_bytes)
    least = min(one.slot_bytes for one in formats)
    return SlotLayout(blocks * stride, slab_blocks * stride, least)


class FakeTransferEngine:
    """`engine.moves.TransferEngine` over the fake runner's slots. Every call is O(moves).

    `unpackable`: how often a block cannot be packed.
    """

    bytes_per_s = 4e9
    loads_max = LOADS_MAX
    offloads_max = OFFLOADS_MAX
    unusable_bytes = 0

    def __init__(
        self,
        runner: Callable[[], FakeRunner],
        slots: int,
        chance: random.Random,
        weather: Weather,
        formats: Sequence[SlotFormat] = (PLAIN,),
        unpackable: float = 0.0,
    ) -> None:
        self.formats = tuple(formats)
        self.layout = layout_of(slots, self.formats)
        self.contents: list[Content] = [()] * self.layout.slots
        self.written: list[str] = [""] * self.layout.slots  # the format of each slot
        self.unpackable = unpackable
        self.packed: set[Namespace] = set()  # of the blocks that were packed or unpacked
        self.is_closed = False
        self.copied = 0
        self._runner = runner
        self._chance = chance
        self._weather = weather
        self._moves: list[tuple[int, Move]] = []

    def submit(self, moves: Sequence[Move]) -> None:
        """Begin moves; the targets of loads hold no prefix from here on."""
        for move in moves:
            self.layout.offset(move.slot, self.size_of(move.format))
            if move.kind == "load":
                for block in (move.block, *move.beside):
                    if block >= 0:
                        self._write(block, [BROKEN] * self._runner().block_size)
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

    def size_of(self, name: str) -> int:
        """Return the bytes of a format. Raises MoveError for an unknown one."""
        for one in self.formats:
            if one.name == name:
                return one.slot_bytes
        raise MoveError(f"no format {name!r}")

    def write(self, slot: int, content: Content, name: str) -> None:
        """Fill a slot; whatever lay in the same bytes in another size is gone."""
        self.wipe(slot, self.size_of(name))
        self.contents[slot], self.written[slot] = content, name

    def wipe(self, slot: int, slot_bytes: int) -> None:
        """Forget what lies in the bytes of a slot."""
        start = self.layout.offset(slot, slot_bytes)
        slab, per_slab = slot // self.layout.slots_per_slab, self.layout.slots_per_slab
        for other in range(slab * per_slab, (slab + 1) * per_slab):
            size = self.size_of(self.written[other])
            if self.contents[other] and other - slab * per_slab < self.layout.slots_in(slab, size):
                at = self.layout.offset(other, size)
                if at < start + slot_bytes and start < at + size:
                    self.contents[other] = ()

    def break_off(self) -> None:
        """End in the middle of every move."""
        for _, move in self._moves:
            if move.kind == "offload":
                size = self._runner().block_size * (1 + len(move.beside))
                self.write(move.slot, (BROKEN,) * size, move.format)

    def _run(self, move: Move) -> Moved:
        """Copy a block, or the blocks of all KV groups; a load leaves those below 0 alone."""
        if self._chance.random() < self._weather.fails:
            return Moved(move.move_id, is_done=False)
        part = packed_part(move.format)
        if part and move.kind == "offload" and self._chance.random() < self.unpackable:
            return Moved(move.move_id, is_done=False, is_unpackable=True)
        size, slots = self._runner().block_size, self._runner().slots
        is_whole = is_whole_format(move.format)
        blocks = (move.block, *move.beside) if is_whole else (move.block,)
        if is_whole and len(blocks) * self.size_of(part) != self.size_of(move.format):
            raise MoveError(f"{move}: blocks of {len(blocks)} groups")
        if part:
            found = self.contents[move.slot] if move.kind == "load" else slots[move.block * size :]
            self.packed |= {one[0] for one in found[:size] if one is not None}
        if move.kind == "offload":
            content = tuple(x for b in blocks for x in slots[b * size : (b + 1) * size])
            self.write(move.slot, content, move.format)
            self.copied += 1
            return Moved(move.move_id, True, digest(content), self._weather.seconds)
        content = self.contents[move.slot]
        if self.written[move.slot] != move.format:
            raise MoveError(f"{move}: the slot was written as {self.written[move.slot]!r}")
        if move.check and move.check != digest(content):
            return Moved(move.move_id, is_done=False, is_damaged=True)
        for number, block in enumerate(blocks):
            if block >= 0:
                self._write(block, content[number * size : (number + 1) * size])
        self.copied += 1
        return Moved(move.move_id, is_done=True, seconds=self._weather.seconds)

    def _write(self, block: int, content: Sequence[Slot | None]) -> None:
        size = self._runner().block_size
        self._runner().slots[block * size : (block + 1) * size] = content


class WriterKilled(BaseException):
    """The process ended in the middle of a write."""


class KillableMemory(bytearray):
    """Memory in which a writer may be killed: within the write after `left` others, of which
    `bytes_left` bytes are still written. `writes` counts them.
    """

    left = -1
    bytes_left = 0
    writes = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        self.writes += 1
        if self.left == 0:
            part = bytes(value)[: self.bytes_left]
            super().__setitem__(slice(key.start or 0, (key.start or 0) + len(part)), part)
            raise WriterKilled
        self.left -= 1
        super().__setitem__(key, value)


class FakeKeptSlots:
    """`engine.levels.restarts.recovery.KeptSlots` in memory: a table, and the slots of each engine
    in turn.

    `is_shared`: a process of the engine before still uses the slots.
    """

    def __init__(self, slots: int, boot_s: Callable[[], float]) -> None:
        self.memory = KillableMemory(table_bytes(slots))
        self.table = SlotTable(self.memory, slots)
        self.boot_s = boot_s
        self.generation = 0
        self.is_new = True
        self.is_shared = False
        self.contents: list[Content] = [()] * slots
        self.written = [""] * slots
        self._wipe: Callable[[int, int], None] = lambda slot, slot_bytes: None

    def start(self, memory: FakeTransferEngine, before: FakeTransferEngine | None) -> None:
        """Let the next engine have the slots; what its predecessor was copying is half done."""
        self.is_new = self.generation == 0
        self.memory.left = -1
        self.generation = self.table.next_generation()
        if before is not None:
            before.break_off()
        memory.contents, memory.written = self.contents, self.written
        self._wipe = memory.wipe

    def is_alone(self) -> bool:
        """Return whether no process of an earlier engine uses the slots."""
        return not self.is_shared

    def wipe(self, slot: int, slot_bytes: int) -> None:
        """Forget what lies in a slot."""
        self._wipe(slot, slot_bytes)


@dataclass
class Record:
    """A stored run: what it holds, what it hangs on, and until when it is promised."""

    namespace: Namespace
    parent: RecordId
    tokens: tuple[int, ...]
    content: Content
    leases: frozenset[str]
    form: SlotFormat = PLAIN
    promise_at_s: float = 0.0
    payer: Payer = b""
    terms: PromiseTerms | None = None


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
        self.is_deaf = False  # looks find nothing
        self.level: Literal["disk", "remote"] = "disk"  # where looks and fetches find records
        self.commands: list[StorageCommand] = []
        self._chance = chance
        self._weather = weather
        self._last: RecordId = 0
        self._outcomes: list[tuple[int, StorageCommand]] = []
        self._ready: list[StorageOutcome] = []
        self._told: set[Namespace] = set()

    def send(self, command: StorageCommand) -> None:
        """Take a command; it is done at a later poll, those before an erasure before it, and those
        after one after it, as the storage process does."""
        self.commands.append(command)
        if isinstance(command, SetStoredQuotas | KeepHere):
            return
        if isinstance(command, Recall) and not self.records:
            self._ready.append(Recalled(command.call_id))  # no draw: nothing is there to be told
            return
        if isinstance(command, EraseStored | Look):
            for _, earlier in self._outcomes:
                self._do(earlier)
            self._outcomes = []
        self._outcomes.append((self._chance.randint(0, self._weather.polls_max), command))

    def poll(self) -> list[StorageOutcome]:
        """Return what has been done since the last call."""
        waiting, self._outcomes = self._outcomes, []
        is_erasing = False
        for left, command in waiting:
            if left or is_erasing:
                self._outcomes.append((max(0, left - 1), command))
                is_erasing = is_erasing or isinstance(command, EraseStored)
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
        elif isinstance(command, Recall):
            self._recall(command)
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
            form = self._form_of(command)
            if known is not None and self.records[known].form != form:
                self._drop([known])
                known = None
            if known is None:
                if len(self.records) >= self.records_max and not self._make_room(parent):
                    code = "full"
                    break
                self._last += 1
                known = self._last
                leases = frozenset(command.lease_ids)
                self.records[known] = Record(
                    command.namespace, parent, run.tokens, content, leases, form
                )
                self.records[known].payer = command.payer
            self._promise(known, run.promise_s, run.terms)
            made.append(known)
            parent = known
        self._ready.append(Stored(command.call_id, tuple(made), code))

    def _look(self, command: Look) -> None:
        found, parent, at = list[StoredRun](), ROOT, 0
        while at < len(command.tokens) and not self.is_deaf:
            own = self._child(command.namespace, parent, command.tokens[at:])
            if own is None:
                break
            form, level = self.records[own].form, self.level
            promise_s = max(0.0, self.records[own].promise_at_s - self._clock())
            found.append(StoredRun(own, form.fidelity, None, promise_s, form.slot_bytes, level))
            parent, at = own, at + len(self.records[own].tokens)
        self._ready.append(Looked(command.call_id, tuple(found)))

    def _fetch(self, command: Fetch) -> None:
        for record_id, slot in zip(command.record_ids, command.slots, strict=True):
            record = self.records.get(record_id)
            is_done = record is not None and record.namespace == command.namespace
            if record is not None and record.form.slot_bytes != command.slot_bytes:
                raise MoveError(f"{command}: the record has {record.form.slot_bytes} bytes")
            if has_failed := self._fails():
                is_done = False
                self._drop([record_id])
            if record is not None and is_done:
                self.memory.write(slot, record.content, record.form.name)
            outcome = Fetched(
                command.call_id,
                record_id,
                is_done,
                self._weather.seconds,
                self.level,
                is_damaged=has_failed and self._weather.is_damaging,
                check=digest(record.content) if record is not None and is_done else b"",
            )
            self._ready.append(outcome)

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
                self._promise(record_id, command.promise_s, command.terms)
                record.leases |= frozenset(command.lease_ids)
        self._ready.append(Renewed(command.call_id, tuple(gone)))

    def _promise(self, record_id: RecordId, promise_s: float, terms: PromiseTerms | None) -> None:
        record = self.records[record_id]
        record.terms = terms or record.terms
        record.promise_at_s = max(record.promise_at_s, self._clock() + promise_s)

    def _recall(self, command: Recall) -> None:
        if self.is_away:
            self._ready.append(Recalled(command.call_id, code="closed"))
            return
        now_s, kept = self._clock(), set[RecordId]()
        for record_id, record in self.records.items():
            above = record_id
            while record.promise_at_s > now_s and above != ROOT:
                kept.add(above)
                above = self.records[above].parent
        left = sorted(one for one in kept if one > command.after)
        runs = [self._recalled(one, now_s) for one in left[:RECALLED_MAX]]
        last = left[RECALLED_MAX - 1] if len(left) > RECALLED_MAX else ROOT
        self._ready.append(Recalled(command.call_id, tuple(runs), last))

    def _recalled(self, record_id: RecordId, now_s: float) -> RecalledRun:
        one = self.records[record_id]
        return RecalledRun(
            record_id,
            one.parent,
            one.namespace,
            one.payer,
            one.tokens,
            one.form.fidelity,
            one.form.slot_bytes,
            promise_s=max(0.0, one.promise_at_s - now_s),
            terms=one.terms,
            lease_ids=tuple(sorted(one.leases)),
            level=self.level,
        )

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
        self._ready.append(StoredErased(command.call_id, gone, gone * PLAIN.slot_bytes))

    def _form_of(self, command: StoreRuns) -> SlotFormat:
        """Return the format of a store's slots."""
        kind = command.fidelity, command.slot_bytes
        for one in self.memory.formats:
            if (one.fidelity, one.slot_bytes) == kind:
                return one
        raise MoveError(f"no format of {kind}")

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
        """Return the record below `parent` with which `tokens` begin."""
        for record_id, record in self.records.items():
            is_there = (record.namespace, record.parent) == (namespace, parent)
            if is_there and tokens[: len(record.tokens)] == record.tokens:
                return record_id
        return None

    def _drop(self, record_ids: Sequence[RecordId]) -> None:
        stack = list(record_ids)
        while stack:
            gone = stack.pop()
            if self.records.pop(gone, None) is not None:
                stack += [i for i, record in self.records.items() if record.parent == gone]


class LevelsBelow:
    """What lies below one engine after another; `make_levels` makes the levels of each.

    `memory`, `levels`: of the present engine. `storage`: its disk, if it `has_disk`, with the
    records of those before; `kept`: host memory that outlives engines, where it `is_kept`.
    """

    has_disk = True
    is_kept = False
    formats: Sequence[SlotFormat] = (PLAIN,)
    unpackable = 0.0

    def prepare(self, config: LevelsConfig, slots: int, records_max: int = 10**9) -> None:
        """Take the size of what lies below; nothing is kept of engines before."""
        self.chance, self.weather = random.Random(1), Weather()
        self.storage: FakeStorage | None = None
        self.kept: FakeKeptSlots | None = None
        self.memory: FakeTransferEngine
        self._sizes = config, slots, records_max

    def make_levels(self, cache: PrefixCache, runner: Callable[[], FakeRunner]) -> Levels:
        """Return the levels of the next engine."""
        config, slots, records_max = self._sizes
        before = None if self.kept is None else self.memory
        self.memory = FakeTransferEngine(
            runner, slots, self.chance, self.weather, self.formats, self.unpackable
        )
        if self.has_disk:
            disk = FakeStorage(self.memory, self.chance, self.weather, self.disk_s, records_max)
            disk.take_over(self.storage)
            self.storage = disk
        outlives: dict[str, Any] = {}
        if self.is_kept:
            if self.kept is None:
                self.kept = FakeKeptSlots(self.memory.layout.slots, self.boot_s)
            self.kept.start(self.memory, before)
            outlives = {"wipe": self.kept.wipe, "kept": self.kept, "now_s": self.now_s()}
        self.levels = Levels(cache, config, self.memory, self.storage, **outlives)
        return self.levels

    @property
    def disk(self) -> FakeStorage:
        """Return the disk, which there must be."""
        assert self.storage is not None
        return self.storage

    @property
    def records(self) -> dict[RecordId, Record]:
        """Return the records of the disk; none without one."""
        return {} if self.storage is None else self.storage.records

    @property
    def kept_memory(self) -> FakeKeptSlots:
        """Return host memory that outlives engines, which there must be."""
        assert self.kept is not None
        return self.kept

    def now_s(self) -> float:
        """Return the engine's present instant, also while the first one is made."""
        raise NotImplementedError

    def disk_s(self) -> float:
        """Return the disk's present instant."""
        return self.now_s()

    def boot_s(self) -> float:
        """Return the instant of the machine's boot clock."""
        return self.now_s() + BOOT_S


def digest(content: Content) -> bytes:
    """Return what stands for the digest of a slot's bytes."""
    return xxhash.xxh3_128_digest(repr(content).encode())
