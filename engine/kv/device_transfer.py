"""Copies blocks between GPUs' KV storage and slots of host memory, beside the steps.

Two streams of each device, one for each direction, and a thread for each direction that launches
batches and waits for their ends; more threads digest. Where lanes share blocks, a batch is copied
by a stream of each lane at once, and a move is done when all its pieces are.

Nothing of it runs on the engine's thread, and no step waits for a copy, nor a copy for a step. Host
order is enough: an offload reads a block whose step has been collected, so that all of it was
computed before the copy is launched, and nothing writes a committed block; a load fills a block
that no launched step writes (`engine/levels`, rule *Load*), and is read by steps that are launched
after its outcome was polled, which comes after the copy has ended. A step is collected when the
device has done all of it, graph or not, with the copies of blocks (copy on write) that are launched
before it; with several steps in flight the last of them counts. Of several lanes the first one is
waited for: it gathers logits when all lanes have done all layers.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
import xxhash
from msgspec import Struct

from engine.kv.copy_device import Copies, CopyDevice, CopyMark, CopyStream
from engine.kv.device_packing import PACKED, BatchPacker
from engine.kv.move_queue import DamagedSlotError, Kind, MoveQueue, failure_of, verify
from engine.kv.pinned_memory import AHEAD_BYTES, PIECE_BYTES, PinnedMemory
from engine.kv.slot_formats import SlotFormats, SlotMemory
from engine.kv.storage import KvPool
from engine.moves import Move, Moved, packed_part, stride_of
from kernels.reference_kv import UnpackableError

KINDS: tuple[Kind, ...] = ("offload", "load")
BATCH_BYTES = 32 * 2**20
"""Most bytes of blocks that one event ends, of a lane: two thirds of a millisecond of copies."""
BATCHES = 6
"""Batches in flight in a direction: 4 ms of copies. While the engine's thread plans a step, for two
milliseconds and more, this thread may not get the GIL: with 64 MiB in flight a direction ran at
10 GB/s beside decoding steps."""
QUEUE_BYTES_MAX = 16 * 2**30
"""Most bytes of blocks in moves without an outcome; what is submitted beyond it fails at once."""
HELPERS = 8
"""Threads for each lane that digest and touch pages. One digests 10 to 28 GB/s, a direction copies
50. No more than half of the processors, and two."""
DIGESTED = 8
"""Slots that a thread digests at a time: to hand one over takes a good part of digesting it."""
FIRST_BYTES_PER_S = 25e9
"""A lane's rate of loads until it is measured: half of what a PCIe 5 bus has."""
LOADS_MAX = 4096
"""Most loads of a block under way, and no more than half of the queue's bytes, 160 ms of copies:
the turn of each step asks for more, and a step with prompts takes as long as that."""
OFFLOADS_MAX = 512
"""Most offloads of a block under way, and no more than a quarter of the queue's bytes: what a step
of 8,192 prompt tokens fills. With 64 most of what many long prompts had filled was evicted before
it was copied."""


class PinnableMemory(SlotMemory, Protocol):
    """Slots of host memory whose pages can be pinned."""

    def whole(self) -> memoryview:
        """Return all bytes, writable. They begin on a page."""

    def keep_pages(self) -> None:
        """Give no page back to the machine from now on: a device writes where it was pinned."""


class _Part(Struct, frozen=True, eq=False):
    """A lane's shard of a block of a move, and where its copy lies in the memory: starts and sizes
    of pieces that one copy each may have."""

    lane: int
    block: int
    pieces: list[tuple[int, int]]


class _Ready(Struct, frozen=True, eq=False):
    """A move that may be copied, its slot's bytes, and what is copied of it: a part for each KV
    group and lane, without those that a load does not touch."""

    move: Move
    slot: memoryview
    parts: list[_Part]


@dataclass(slots=True, eq=False)
class _Batch:
    """Moves of one format with one mark of each lane at the end of all its copies."""

    format: str
    ready: list[_Ready]
    digests: list[Future[list[bytes]]]
    """Of slots that are to be loaded and verified, `DIGESTED` at a time."""
    area: int = 0
    """The batch's part of the staging memory."""
    marks: list[CopyMark] = field(default_factory=list)

    def parts(self, lane: int) -> list[_Part]:
        """Return what it copies of a lane."""
        return [part for one in self.ready for part in one.parts if part.lane == lane]

    def wait(self) -> float:
        """Wait until none of its copies is under way any more; return the seconds of the lane that
        took longest. Raises the first error of a device."""
        errors, seconds = list[Exception](), [0.0]
        for mark in self.marks:
            try:
                seconds.append(mark.wait())
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return max(seconds)

    @property
    def is_digested(self) -> bool:
        """Return whether it can be verified without a wait."""
        return all(digest.done() for digest in self.digests)


class _Staging:
    """Device memory through which packed blocks of one direction go, made when the first one comes.

    Each batch in flight has an area of it, aligned as the kernels are compiled for, with the
    blocks' ids on host and device, and the outcomes of packing them.
    """

    def __init__(self, device: torch.device, batch_blocks: int, packed_bytes: int) -> None:
        """`packed_bytes`: most bytes of a packed block."""
        self._device = device
        self._shape = (BATCHES, batch_blocks)
        self._area_bytes = stride_of(batch_blocks * packed_bytes)
        self._is_made = False

    def begin(self, area: int, blocks: Sequence[int], size: int) -> tuple[torch.Tensor, ...]:
        """Return the blocks of a batch, int32 [n], and room for them packed, uint8 [n, size], both
        on the device. Only launches, after the first time."""
        if not self._is_made:
            self._make()
        count = len(blocks)
        self._ids[area, :count].copy_(torch.tensor(blocks, dtype=torch.int32))
        on_device = self._device_ids[area, :count]
        on_device.copy_(self._ids[area, :count], non_blocking=True)
        return on_device, self._packed[area, : count * size].view(count, size)

    def note(self, area: int, outcomes: torch.Tensor) -> None:
        """Launch the copy of the outcomes of packing a batch."""
        self._outcomes[area, : len(outcomes)].copy_(outcomes, non_blocking=True)

    def outcomes(self, area: int) -> list[int]:
        """Return the outcomes of packing a batch that has ended."""
        found: list[int] = self._outcomes[area].tolist()
        return found

    def _make(self) -> None:
        is_cuda = self._device.type == "cuda"
        self._ids = torch.zeros(self._shape, dtype=torch.int32, pin_memory=is_cuda)
        self._outcomes = torch.zeros(self._shape, dtype=torch.int32, pin_memory=is_cuda)
        self._device_ids = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        size = (BATCHES, self._area_bytes)
        self._packed = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._is_made = True


class _Way(NamedTuple):
    """How a lane's shards go in one direction."""

    stream: CopyStream
    staging: _Staging


class DeviceTransferEngine:
    """`engine.moves.TransferEngine` for KV on a device, or shared by the lanes of an engine: a
    thread for each direction, and a stream for each direction and lane.

    A move that fails is not done, and no other fails with it, except that an error of the device
    fails all moves of its batch; the block of such a load holds anything. Moves that share a slot
    or a block run in order. `Moved.seconds` is a move's share of what the device took for its
    batch. One thread submits, polls and closes.
    """

    def __init__(
        self,
        pool: KvPool,
        memory: PinnableMemory,
        devices: Sequence[CopyDevice],
        *,
        packers: Mapping[str, BatchPacker] | None = None,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
        batch_bytes: int = BATCH_BYTES,
        piece_bytes: int = PIECE_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
        on_moved: Callable[[], None] = lambda: None,
        on_error: Callable[[Move, Exception], None] = lambda _move, _error: None,
        on_unpinned: Callable[[int, Exception], None] = lambda _size, _error: None,
    ) -> None:
        """`devices`: of the pool's shards. `packers`, `on_moved`, `on_error`: as for
        `CpuTransferEngine`; hooks run on any of its threads. `on_unpinned` runs once for each piece
        of memory that could not be pinned, with its bytes. Raises ValueError if the memory has no
        room for a copy.
        """
        form, lanes = pool.format, len(devices)
        self.layout = memory.layout
        self.bytes_per_s = lanes * FIRST_BYTES_PER_S
        self._shards = [shard.data.flatten().view(torch.uint8) for shard in pool.shards]
        self._shard_bytes = form.shard.block_bytes
        self._memory = memory
        self._host = torch.frombuffer(memory.whole(), dtype=torch.uint8)
        self._formats: SlotFormats[BatchPacker] = SlotFormats(pool, packers or {}, self.layout)
        self.formats = self._formats.all
        move_bytes = form.blocks_per_run * form.block_bytes
        self.loads_max = max(1, min(LOADS_MAX, queue_bytes_max // 2 // move_bytes))
        self.offloads_max = max(1, min(OFFLOADS_MAX, queue_bytes_max // 4 // move_bytes))
        self._batch_blocks = max(form.blocks_per_run, batch_bytes // self._shard_bytes)
        self._on_moved = on_moved
        self._on_error = on_error
        self._queue = MoveQueue(form.block_bytes, queue_bytes_max, is_by_kind=True)
        helpers = max(2, min(lanes * HELPERS, (os.cpu_count() or 1) // 2))
        self._helpers = ThreadPoolExecutor(helpers, thread_name_prefix="kv-digest")
        memory.keep_pages()
        self._pinned = PinnedMemory(
            devices[0],
            memory.whole(),
            self._helpers,
            piece_bytes=piece_bytes,
            ahead_bytes=ahead_bytes,
            on_failed=on_unpinned,
        )
        ways = {kind: [self._way(device) for device in devices] for kind in KINDS}
        self._threads = [
            threading.Thread(
                target=self._work, args=(kind, ways[kind]), name=f"kv-{kind}", daemon=True
            )
            for kind in KINDS
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pinned_bytes(self) -> int:
        """Return the bytes of host memory that are pinned so far."""
        return self._pinned.pinned_bytes

    @property
    def unusable_bytes(self) -> int:
        """Return the bytes of host memory that could not be pinned: every move there fails."""
        return self._pinned.failed_bytes

    def submit(self, moves: Sequence[Move]) -> None:
        """See `TransferEngine`. Moves that the queue has no room for have failed."""
        self._queue.submit(moves)

    def poll(self) -> list[Moved]:
        """See `TransferEngine`."""
        return self._queue.poll()

    def close(self) -> None:
        """Wait for the moves under way, fail those that have not begun, and end the threads.

        Their outcomes can still be polled. Host memory is unpinned, and stays open for its maker.
        Safe to repeat.
        """
        self._queue.close()
        for thread in self._threads:
            thread.join()
        self._helpers.shutdown()
        self._pinned.close()
        self._host = torch.empty(0, dtype=torch.uint8)  # releases the memory

    # -- a direction's thread -----------------------------------------------------------------

    def _way(self, device: CopyDevice) -> _Way:
        staging = _Staging(device.torch_device, self._batch_blocks, self._formats.packed_bytes_max)
        return _Way(device.stream(), staging)

    def _work(self, kind: Kind, ways: Sequence[_Way]) -> None:
        """Prepare batches, launch and end them, oldest first, until the engine is closed."""
        prepared, in_flight = deque[_Batch](), deque[_Batch]()
        launched = 0
        move: Move | None = None
        while True:
            is_idle = not (prepared or in_flight)
            may_launch = bool(prepared) and len(in_flight) < BATCHES
            if not (may_launch and prepared[0].is_digested) and len(prepared) < BATCHES:
                move = move or self._queue.take(kind, is_waiting=is_idle)
                if move is not None:
                    batch, move = self._prepare_batch(kind, move)
                    if batch is not None:
                        prepared.append(batch)
                    continue
                if is_idle:
                    return
            if may_launch and (prepared[0].is_digested or not in_flight):
                batch = prepared.popleft()
                batch.area = launched % BATCHES
                if self._begin(batch, ways):
                    in_flight.append(batch)
                    launched += 1
            elif in_flight:
                self._end(in_flight.popleft(), ways)

    def _prepare_batch(self, kind: Kind, move: Move | None) -> tuple[_Batch | None, Move | None]:
        """Return a batch of moves of one format, from `move` on, and one that was taken and is of
        another. Those that cannot be made have failed.
        """
        name = "" if move is None else move.format
        found: list[_Ready] = []
        room = self._batch_blocks
        while move is not None and move.format == name:
            try:
                found.append(self._prepare(move))
                room -= len(found[-1].parts) // len(self._shards)
            except Exception as error:
                self._fail_one(move, error)
            is_full = room < 1 + len(move.beside)
            move = None if is_full else self._queue.take(kind, is_waiting=False)
        if not found:
            return None, move
        slots = [one.slot for one in found if kind == "load" and one.move.check]
        digests = [
            self._helpers.submit(_digests, slots[start : start + DIGESTED])
            for start in range(0, len(slots), DIGESTED)
        ]
        return _Batch(name, found, digests), move

    def _verify(self, batch: _Batch) -> None:
        """Wait for the digests of a batch, and leave out the loads of damaged slots, which have
        failed."""
        checked = [one for one in batch.ready if one.move.check]
        damaged: set[int] = set()
        found = [digest for future in batch.digests for digest in future.result()]
        for one, digest in zip(checked, found, strict=True):
            try:
                verify(one.move, digest)
            except DamagedSlotError as error:
                damaged.add(one.move.move_id)
                self._fail_one(one.move, error)
        batch.ready = [one for one in batch.ready if one.move.move_id not in damaged]

    def _begin(self, batch: _Batch, ways: Sequence[_Way]) -> bool:
        """Launch the copies of a batch; return whether any is under way."""
        try:
            if batch.digests:
                self._verify(batch)
            if not batch.ready:
                return False
            for lane, way in enumerate(ways):
                batch.marks.append(way.stream.launch(partial(self._copy, batch, lane, way)))
        except Exception as error:
            with contextlib.suppress(Exception):  # the first error says more
                batch.wait()
            self._fail(batch, error)
            return False
        return True

    def _prepare(self, move: Move) -> _Ready:
        """Return a move with its slot, pinned. Raises what makes it fail."""
        blocks, shape = self._formats.blocks_of(move), self._formats.shape(move.format)
        slot = self._memory.view(move.slot, shape.slot_bytes)
        start = self.layout.offset(move.slot, shape.slot_bytes)
        size, is_whole = shape.stored_bytes, len(self._pinned.need(start, shape.slot_bytes)) == 1
        parts = list[_Part]()
        for block in blocks:
            for lane in range(shape.lanes):
                if block >= 0:
                    pieces = [(start, size)] if is_whole else self._pinned.need(start, size)
                    parts.append(_Part(lane, block, pieces))
                start += shape.part_bytes
        return _Ready(move, slot, parts)

    def _copy(self, batch: _Batch, lane: int, way: _Way) -> None:
        """Launch a lane's copies of a batch, on its direction's stream."""
        is_load = batch.ready[0].move.kind == "load"
        packer, parts = self._formats.shape(batch.format).packer, batch.parts(lane)
        if packer is None:
            places = [part.block * self._shard_bytes for part in parts]
            way.stream.copy(self._copies(self._shards[lane], places, parts), is_load=is_load)
            return
        size = packer.block_bytes
        blocks, packed = way.staging.begin(batch.area, [part.block for part in parts], size)
        if not is_load:
            way.staging.note(batch.area, packer.pack(blocks, packed, lane))
        places = [index * size for index in range(len(parts))]
        way.stream.copy(self._copies(packed.view(-1), places, parts), is_load=is_load)
        if is_load:
            packer.unpack(packed, blocks, lane)

    def _copies(
        self, device: torch.Tensor, places: Sequence[int], parts: Sequence[_Part]
    ) -> Copies:
        """Return the copies between places on the device and parts in the memory."""
        device_starts, host_starts, sizes = list[int](), list[int](), list[int]()
        for place, part in zip(places, parts, strict=True):
            for start, size in part.pieces:
                device_starts.append(place + start - part.pieces[0][0])
                host_starts.append(start)
                sizes.append(size)
        return Copies(device, self._host, device_starts, host_starts, sizes)

    def _end(self, batch: _Batch, ways: Sequence[_Way]) -> None:
        """Wait for a batch and give its moves their outcomes."""
        try:
            share_s = batch.wait() / len(batch.ready)
        except Exception as error:
            self._fail(batch, error)
            return
        is_packing = bool(packed_part(batch.format)) and batch.ready[0].move.kind == "offload"
        outcomes = [iter(way.staging.outcomes(batch.area)) for way in ways] if is_packing else []
        offloaded, loaded = list[_Ready](), list[tuple[Move, Moved]]()
        for one in batch.ready:
            packed = one.parts if is_packing else ()
            bad = [part.block for part in packed if next(outcomes[part.lane]) != PACKED]
            if bad:
                what = f"block {bad[0]} has values that {batch.format} cannot hold"
                self._fail_one(one.move, UnpackableError(what))
            elif one.move.kind == "offload":
                offloaded.append(one)
            else:
                loaded.append(_done(one.move, one.move.check, share_s))
        self._note(loaded)
        for start in range(0, len(offloaded), DIGESTED):
            self._helpers.submit(self._digest, offloaded[start : start + DIGESTED], share_s)

    # -- outcomes -----------------------------------------------------------------------------

    def _digest(self, ready: Sequence[_Ready], seconds: float) -> None:
        """End offloads: the device has written all of their slots but the padding."""
        ended = list[tuple[Move, Moved]]()
        for one in ready:
            try:
                self._clear_padding(one)
                check = xxhash.xxh3_128_digest(one.slot)
            except Exception as error:
                self._fail_one(one.move, error)
                continue
            ended.append(_done(one.move, check, seconds))
        self._note(ended)

    def _clear_padding(self, one: _Ready) -> None:
        """Clear what lies between the parts of a slot: it is of another copy."""
        shape = self._formats.shape(one.move.format)
        stored, stride = shape.stored_bytes, shape.part_bytes
        if stored < stride:
            for end in range(stored, len(one.slot), stride):
                one.slot[end : end + stride - stored] = bytes(stride - stored)

    def _fail(self, batch: _Batch, error: Exception) -> None:
        for one in batch.ready:
            self._fail_one(one.move, error)

    def _fail_one(self, move: Move, error: Exception) -> None:
        with contextlib.suppress(Exception):
            self._on_error(move, error)
        self._note([(move, failure_of(move, error))])

    def _note(self, ended: Sequence[tuple[Move, Moved]]) -> None:
        self._queue.end(ended)
        for _ in ended:
            with contextlib.suppress(Exception):
                self._on_moved()


def _done(move: Move, check: bytes, seconds: float) -> tuple[Move, Moved]:
    return move, Moved(move.move_id, is_done=True, check=check, seconds=seconds)


def _digests(slots: Sequence[memoryview]) -> list[bytes]:
    return [xxhash.xxh3_128_digest(slot) for slot in slots]
