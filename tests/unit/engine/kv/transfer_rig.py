"""Transfer engines of tests over six blocks and four slots: the CPU's, and the device's on a fake
and on a GPU.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import Any, Literal

import torch

from engine.api import Fidelity
from engine.kv.copy_device import CudaDevice
from engine.kv.device_transfer import DeviceTransferEngine, PinnableMemory
from engine.kv.format import kv_format
from engine.kv.storage import KvPool, KvStorage
from engine.kv.transfer import Bytes, CpuTransferEngine
from engine.moves import Move, Moved, SlotLayout
from tests.models import tiny_config
from tests.unit.engine.kv.fake_device import FakeDevice

BLOCKS, SLOTS = 6, 4
PIECE_BYTES = 3 * mmap.PAGESIZE
"""Pinned at once in tests. A slot has two pages, so slot 1 lies in two pieces."""
WAIT_S = 60.0
"""Longest wait for the worker; a test that reaches it has failed."""

Place = Literal["cpu", "fake", "gpu"]
Engine = CpuTransferEngine | DeviceTransferEngine


def storage(blocks: int = 2, device: str = "cpu") -> KvStorage:
    """Return the KV storage of a tiny model."""
    return KvStorage(kv_format(tiny_config(), torch.float32, 16), blocks, torch.device(device))


def wait_for(ended: threading.Semaphore, moves: int) -> None:
    """Wait until so many moves have ended."""
    for _ in range(moves):
        assert ended.acquire(timeout=WAIT_S)


class Slots:
    """Host memory of a test. `gate`: a view waits for it, so that a move can be caught midway."""

    def __init__(self, slot_bytes: int) -> None:
        self.layout = SlotLayout.uniform(SLOTS, slot_bytes)
        self.memory = mmap.mmap(-1, self.layout.memory_bytes)
        self.memory[:] = b"\xff" * self.layout.memory_bytes
        self.keeps_pages = False
        self.viewed = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def view(self, slot: int, slot_bytes: int) -> memoryview:
        """Return a slot's bytes; slot 3 is broken."""
        self.viewed.set()
        assert self.gate.wait(WAIT_S)
        if slot == 3:
            raise IndexError("slot 3 is broken")
        start = self.layout.offset(slot, slot_bytes)
        return memoryview(self.memory)[start : start + slot_bytes]

    def whole(self) -> memoryview:
        """Return all bytes."""
        return memoryview(self.memory)

    def keep_pages(self) -> None:
        """Note that pages stay."""
        self.keeps_pages = True


class HalfPacker:
    """A packed format of a test: every second byte. On a device it takes a batch at a time.

    Block `unpackable` cannot be packed there.
    """

    fidelity: Fidelity = "near"

    def __init__(self, kv: KvStorage) -> None:
        self.data = kv.data.flatten(1).view(torch.uint8)
        self.block_bytes = self.data.shape[1] // 2
        self.unpackable = -1

    def pack(self, block: Any, out: Any, lane: int = 0) -> Any:
        """See `BlockPacker`, and `BatchPacker` for tensors."""
        if isinstance(block, torch.Tensor):
            out.copy_(self.data[block.long(), ::2])
            return (block == self.unpackable).int()
        out[:] = self.data[block, ::2].numpy()
        return None

    def unpack(
        self, first: Bytes | torch.Tensor, second: int | torch.Tensor, lane: int = 0
    ) -> None:
        """See `BlockPacker`, and `BatchPacker` for tensors."""
        block = second.long() if isinstance(second, torch.Tensor) else torch.tensor(second)
        whole = torch.zeros_like(self.data[block])
        whole[..., ::2] = torch.as_tensor(first)
        self.data[block] = whole


def engine_of(
    place: Place,
    kv: KvPool,
    memory: PinnableMemory,
    *fakes: FakeDevice,
    batch_blocks: int = 2,
    piece_bytes: int = PIECE_BYTES,
    **options: Any,
) -> Engine:
    """Return the transfer engine of a place; those of devices may have the `fakes`."""
    if place == "cpu":
        assert isinstance(kv, KvStorage)
        return CpuTransferEngine(kv, memory, **options)
    size = batch_blocks * kv.format.shard.block_bytes
    options |= {"batch_bytes": size, "piece_bytes": piece_bytes}
    if place == "fake":
        return DeviceTransferEngine(kv, memory, fakes, **options)
    devices = [CudaDevice(shard.data.device) for shard in kv.shards]
    return DeviceTransferEngine(kv, memory, devices, **options)


class Rig:
    """A transfer engine over six blocks and four slots, and what it said."""

    def __init__(
        self,
        place: Place = "cpu",
        *,
        queue_blocks: int = 100,
        work_s: float = 0.0,
        **options: Any,
    ) -> None:
        self.kv = storage(BLOCKS, "cuda" if place == "gpu" else "cpu")
        generator = torch.Generator().manual_seed(1)
        self.kv.data.copy_(torch.randn(self.kv.data.shape, generator=generator))
        size = self.kv.format.block_bytes
        self.slots = Slots(size)
        self.ended = threading.Semaphore(0)
        self.errors: list[tuple[int, str]] = []
        self.packer = HalfPacker(self.kv)
        self.device = FakeDevice(work_s)
        self.device.base = torch.frombuffer(self.slots.whole(), dtype=torch.uint8).data_ptr()
        options |= {
            "packers": {"half": self.packer},
            "queue_bytes_max": queue_blocks * size,
            "on_moved": self.ended.release,
            "on_error": lambda move, error: self.errors.append((move.move_id, str(error))),
        }
        self.engine = engine_of(place, self.kv, self.slots, self.device, **options)

    def run(self, *moves: Move) -> list[Moved]:
        """Submit moves and return their outcomes when all have ended."""
        self.engine.submit(moves)
        wait_for(self.ended, len(moves))
        return self.engine.poll()

    def slot(self, slot: int, size: int | None = None) -> bytes:
        """Return a slot's bytes, by default those of a block."""
        return bytes(self.slots.view(slot, size or self.kv.format.block_bytes))

    def block(self, block: int) -> bytes:
        """Return a block's bytes."""
        return bytes(self.kv.data[block].cpu().flatten().view(torch.uint8).numpy().tobytes())


MakeRig = Callable[..., Rig]
