"""Fakes below the device: a transfer engine and a storage over the token oracle's slots.

What they copy are the exact prefixes that the fake runner keeps in a slot, so a load that brings
other bytes than the reader's own shows up as such at the next row that reads them. A seed decides
how long each move takes, in which order moves end, which fail, and which are damaged on the way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash
from msgspec.structs import replace

from engine.api import Fidelity, Namespace
from engine.cache import PrefixCache
from engine.config import LevelsConfig
from engine.levels.levels import Levels
from engine.moves import (
    LOADS_MAX,
    OFFLOADS_MAX,
    WHOLE,
    EraseStored,
    Fetch,
    Fetched,
    KeepHere,
    Look,
    Looked,
    Move,
    Moved,
    Recall,
    Recalled,
    RecordId,
    Renew,
    SetStoredQuotas,
    SlotFormat,
    SlotLayout,
    StorageCommand,
    StorageOutcome,
    StorageStats,
    Stored,
    StoreRuns,
    is_whole_format,
    packed_part,
    stride_of,
    whole_format,
)
from engine.storage.memory.slot_table import SlotTable, table_bytes
from engine.storage.messages import failures_of
from tests.fakes import BROKEN, FakeRunner, Slot
from tests.memory_storage import MemoryRecord, MemoryStorage

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

    `unpackable`: how often a block cannot be packed. `lanes`: pieces of a move, each of which takes
    its time and may fail; where one does, the others have been written.
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
        lanes: int = 1,
    ) -> None:
        self.formats = tuple(formats)
        self.layout = layout_of(slots, self.formats)
        self.contents: list[Content] = [()] * self.layout.slots
        self.written: list[str] = [""] * self.layout.slots  # the format of each slot
        self.unpackable = unpackable
        self.lanes = range(lanes)
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
            polls = [self._chance.randint(0, self._weather.polls_max) for _ in self.lanes]
            self._moves.append((max(polls), move))

    def poll(self) -> list[Moved]:
        """Return the moves whose time has come, in any order."""
        due = [move for left, move in self._moves if not left]
        self._moves = [(left - 1, move) for left, move in self._moves if left]
        self._chance.shuffle(due)
        return [self._run(move) for move in due]

    def close(self) -> None:
        """End."""
        self.is_closed = True

    @property
    def block_size(self) -> int:
        """Return the tokens of a block."""
        return self._runner().block_size

    def form_of(self, fidelity: Fidelity, slot_bytes: int) -> SlotFormat:
        """Return the format of a fidelity and size. Raises MoveError if there is none."""
        for one in self.formats:
            if (one.fidelity, one.slot_bytes) == (fidelity, slot_bytes):
                return one
        raise MoveError(f"no format of {fidelity} and {slot_bytes} bytes")

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
            self._break(move)

    def _break(self, move: Move) -> None:
        """End in the middle of a move; the targets of loads are broken already."""
        if move.kind == "offload":
            size = self._runner().block_size * (1 + len(move.beside))
            self.write(move.slot, (BROKEN,) * size, move.format)

    def _run(self, move: Move) -> Moved:
        """Copy a block, or the blocks of all KV groups; a load leaves those below 0 alone."""
        failed = [self._chance.random() < self._weather.fails for _ in self.lanes]
        if any(failed):
            if not all(failed):
                self._break(move)
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

    def __init__(self, slots: int, later_s: Callable[[], float]) -> None:
        self.memory = KillableMemory(table_bytes(slots))
        self.table = SlotTable(self.memory, slots)
        self.later_s = later_s
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


class FakeStorage(MemoryStorage):
    """A `MemoryStorage` over the fake's slots, with a weather. `records` outlive the engine that
    made them.

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
        super().__init__(memory, clock, records_max=records_max)
        self._slots = memory
        self.is_away = False  # stores and fetches fail
        self.is_deaf = False  # looks find nothing
        self.commands: list[StorageCommand] = []
        self._chance = chance
        self._weather = weather
        self._waiting: list[tuple[int, StorageCommand]] = []

    def send(self, command: StorageCommand) -> None:
        """Take a command; it is done at a later poll, those before an erasure before it, and those
        after one after it, as the storage process does."""
        self.commands.append(command)
        if isinstance(command, SetStoredQuotas | KeepHere):
            return
        if isinstance(command, Recall) and not self.records:
            self._outcomes.append(Recalled(command.call_id))  # no draw: there is nothing to tell
            return
        if isinstance(command, EraseStored | Look):
            self.finish()
        self._waiting.append((self._chance.randint(0, self._weather.polls_max), command))

    def poll(self) -> list[StorageOutcome]:
        """Return what has been done since the last call."""
        waiting, self._waiting = self._waiting, []
        is_erasing = False
        for left, command in waiting:
            if left or is_erasing:
                self._waiting.append((max(0, left - 1), command))
                is_erasing = is_erasing or isinstance(command, EraseStored)
            else:
                self._outcomes += self.do(command)
        return super().poll()

    def close(self) -> None:
        """End; the records stay."""
        self.is_closed = True

    def take_over(self, before: FakeStorage | None) -> None:
        """Continue with the records of an earlier process, which finishes what it was given."""
        if before is not None:
            before.finish()
            self.records, self._last = before.records, before._last

    def finish(self) -> None:
        """Do all that was asked for."""
        waiting, self._waiting = self._waiting, []
        for _, command in waiting:
            self._outcomes += self.do(command)

    def lose(self, record_id: RecordId) -> None:
        """Lose a record, and with it those that hang on it; nobody is told."""
        self._delete(record_id)

    def beat(self, stats: StorageStats) -> None:
        """Send a heartbeat."""
        self._outcomes.append(stats)

    def do(self, command: StorageCommand) -> Sequence[StorageOutcome]:
        """Carry out a command, if the disk is there and hears it."""
        if self.is_away and isinstance(command, Renew | Recall):
            return list(failures_of(command))
        if self.is_deaf and isinstance(command, Look):
            return [Looked(command.call_id, ())]
        if isinstance(command, Recall):
            command = replace(command, most=min(RECALLED_MAX, command.most))
        return super().do(command)

    def read(self, slot: int, form: SlotFormat) -> Content:
        """Return what a slot holds."""
        return self._slots.contents[slot]

    def fill(self, slot: int, record: MemoryRecord) -> None:
        """Write a record into a slot."""
        self._slots.write(slot, record.content, record.form.name)

    def digest(self, content: Content) -> bytes:
        """Return what stands for the digest of a slot's bytes."""
        return digest(content)

    def form_of(self, command: StoreRuns) -> SlotFormat:
        """Return the format of a store's slots."""
        return self._slots.form_of(command.fidelity, command.slot_bytes)

    def run_tokens(self) -> int:
        """Return the tokens of a run."""
        return self._slots.block_size

    def fails(self) -> bool:
        """Return whether the weather, or being away, makes a run fail."""
        return self.is_away or self._chance.random() < self._weather.fails

    def refusal(self, parent: RecordId) -> str:
        """Make room by dropping the oldest records that may go; return `full` if there are none."""
        parents = {record.parent for record in self.records.values()} | {parent}
        for record_id, record in list(self.records.items()):
            if not super().refusal(parent):
                break
            if record_id not in parents and record.promise_at_s <= self._clock():
                self._delete(record_id)
        return super().refusal(parent)

    def _store(self, command: StoreRuns) -> Stored:
        for run in command.runs:
            if digest(self._slots.contents[run.slot]) != run.check:
                raise MoveError(f"slot {run.slot} changed while it was held for a store")
        return super()._store(command)

    def _fetch(self, command: Fetch, record_id: RecordId, slot: int) -> Fetched:
        record = self.records.get(record_id)
        if record is not None and record.form.slot_bytes != command.slot_bytes:
            raise MoveError(f"{command}: the record has {record.form.slot_bytes} bytes")
        fetched = super()._fetch(command, record_id, slot)
        is_damaged = record is not None and not fetched.is_done and self._weather.is_damaging
        return replace(fetched, seconds=self._weather.seconds, is_damaged=is_damaged)


class LevelsBelow:
    """What lies below one engine after another; `make_levels` makes the levels of each.

    `memory`, `levels`: of the present engine. `storage`: its disk, if it `has_disk`, with the
    records of those before; `kept`: host memory that outlives engines, where it `is_kept`.
    """

    has_disk = True
    is_kept = False
    formats: Sequence[SlotFormat] = (PLAIN,)
    unpackable = 0.0
    lanes = 1

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
            runner, slots, self.chance, self.weather, self.formats, self.unpackable, self.lanes
        )
        if self.has_disk:
            disk = FakeStorage(self.memory, self.chance, self.weather, self.disk_s, records_max)
            disk.take_over(self.storage)
            self.storage = disk
        outlives: dict[str, Any] = {}
        if self.is_kept:
            if self.kept is None:
                self.kept = FakeKeptSlots(self.memory.layout.slots, self.later_s)
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
    def records(self) -> dict[RecordId, MemoryRecord]:
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

    def later_s(self) -> float:
        """Return by how much the machine's boot clock is ahead."""
        return BOOT_S


def digest(content: Content) -> bytes:
    """Return what stands for the digest of a slot's bytes."""
    return xxhash.xxh3_128_digest(repr(content).encode())
