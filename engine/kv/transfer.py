"""Copies blocks between a CPU's KV storage and slots of host memory, on a thread of its own.

It decides nothing: `engine.levels` says which block goes to which slot, and holds both until the
outcome. Copies, packing and digests release the GIL, so that steps run beside them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from engine.kv.move_queue import MoveQueue, failure_of, verify
from engine.kv.slot_formats import SizedPacker, SlotFormats, SlotMemory, SlotShape
from engine.kv.storage import KvStorage
from engine.moves import LOADS_MAX, OFFLOADS_MAX, Move, Moved

Bytes = npt.NDArray[np.uint8]

QUEUE_BYTES_MAX = 256 * 2**20
"""Most bytes of blocks in moves without an outcome; what is submitted beyond it fails at once."""
FIRST_BYTES_PER_S = 4e9
"""The rate of loads until it is measured."""


class BlockPacker(SizedPacker, Protocol):
    """Packs the blocks of one storage into a smaller format, and back."""

    def pack(self, block: int, out: Bytes) -> None:
        """Write the block to `out` [block_bytes]. Raises ValueError for what is no number."""

    def unpack(self, packed: Bytes, block: int) -> None:
        """Fill the block from `packed` [block_bytes]."""


class CpuTransferEngine:
    """`engine.moves.TransferEngine` for KV in host memory: one worker thread, moves in order.

    A move that fails in any way is not done, and no other fails with it; a load that fails has not
    touched its block. A slot has the bytes of the move's format, and the digest is that of all of
    it. One thread submits, polls and closes.
    """

    bytes_per_s = FIRST_BYTES_PER_S
    loads_max = LOADS_MAX
    offloads_max = OFFLOADS_MAX
    unusable_bytes = 0

    def __init__(
        self,
        storage: KvStorage,
        memory: SlotMemory,
        *,
        packers: Mapping[str, BlockPacker] | None = None,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
        clock: Callable[[], float] = time.perf_counter,
        on_moved: Callable[[], None] = lambda: None,
        on_error: Callable[[Move, Exception], None] = lambda _move, _error: None,
    ) -> None:
        """`packers`: by the name that `Move.format` gives; without a format a block is copied as it
        is. `on_moved` runs after each outcome, `on_error` before that of a move that failed, both
        on the worker: they may wake or log; what they raise is ignored, since the next move has to
        have its outcome. Raises ValueError if the storage is on a device, or if the memory has no
        room for a copy.
        """
        if storage.data.device.type != "cpu":
            raise ValueError(f"KV on {storage.data.device}; this transfer engine expects the CPU's")
        self.layout = memory.layout
        self._blocks: Bytes = storage.data.flatten(1).view(torch.uint8).numpy()
        self._memory = memory
        self._formats: SlotFormats[BlockPacker] = SlotFormats(storage, packers or {}, self.layout)
        self.formats = self._formats.all
        self._clock = clock
        self._on_moved = on_moved
        self._on_error = on_error
        self._queue = MoveQueue(self._blocks.shape[1], queue_bytes_max)
        self._thread = threading.Thread(target=self._work, name="kv-transfer", daemon=True)
        self._thread.start()

    def submit(self, moves: Sequence[Move]) -> None:
        """See `TransferEngine`. Moves that the queue has no room for have failed."""
        self._queue.submit(moves)

    def poll(self) -> list[Moved]:
        """See `TransferEngine`."""
        return self._queue.poll()

    def close(self) -> None:
        """Wait for the move under way, fail those that have not begun, and end the thread.

        Their outcomes can still be polled. The arena stays open for its maker. Safe to repeat.
        """
        self._queue.close()
        self._thread.join()

    def _work(self) -> None:
        """Run moves until the engine is closed."""
        while (move := self._queue.take()) is not None:
            self._queue.end([(move, self._run(move))])
            with contextlib.suppress(Exception):
                self._on_moved()

    def _run(self, move: Move) -> Moved:
        """Make one move. Any exception makes it a failed one."""
        started_s = self._clock()
        try:
            check = self._offload(move) if move.kind == "offload" else self._load(move)
        except Exception as error:
            with contextlib.suppress(Exception):
                self._on_error(move, error)
            return failure_of(move, error)
        return Moved(move.move_id, is_done=True, check=check, seconds=self._clock() - started_s)

    def _offload(self, move: Move) -> bytes:
        """Copy or pack the blocks into the slot. Returns the digest of the slot."""
        blocks, shape = self._formats.blocks_of(move), self._formats.shape(move.format)
        slot = self._slot(move, shape)
        for part, number in zip(slot.reshape(shape.parts, -1), blocks, strict=True):
            if shape.packer is None:
                np.copyto(part, self._blocks[number])
                continue
            shape.packer.pack(number, part[: shape.stored_bytes])
            part[shape.stored_bytes :] = 0  # what lay there before is of another copy
        return xxhash.xxh3_128_digest(slot.data)

    def _load(self, move: Move) -> bytes:
        """Check the slot's bytes, then copy or unpack them into the blocks."""
        blocks, shape = self._formats.blocks_of(move), self._formats.shape(move.format)
        slot = self._slot(move, shape)
        if move.check:
            verify(move, xxhash.xxh3_128_digest(slot.data))
        for part, number in zip(slot.reshape(shape.parts, -1), blocks, strict=True):
            if number < 0:
                continue
            if shape.packer is None:
                np.copyto(self._blocks[number], part)
            else:
                shape.packer.unpack(part[: shape.stored_bytes], number)
        return move.check

    def _slot(self, move: Move, shape: SlotShape[BlockPacker]) -> Bytes:
        return np.frombuffer(self._memory.view(move.slot, shape.slot_bytes), np.uint8)
