"""Moves on a GPU beside graphs of steps: what orders them, and captures while memory is pinned."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from engine.kv.copy_device import CudaDevice
from engine.kv.device_transfer import DeviceTransferEngine
from engine.kv.format import KvFormat
from engine.kv.storage import KvStorage
from engine.moves import Move, Moved, SlotLayout
from engine.plan import BlockCopy
from engine.runner.cuda_graphs import CudaGraphs
from engine.storage.memory.arena import HostArena
from tests.unit.engine.kv.transfer_rig import wait_for

pytestmark = pytest.mark.gpu

FORMAT = KvFormat(32, 8, 128, 16, torch.bfloat16)
BLOCKS, WAIT_S = 64, 60.0
PIECE_BYTES = 2**20


class Pool:
    """Blocks on a GPU, and a step that takes some milliseconds and then writes one of them."""

    def __init__(self) -> None:
        self.kv = KvStorage(FORMAT, BLOCKS, torch.device("cuda"))
        self.arena = HostArena.create(SlotLayout.uniform(BLOCKS, FORMAT.block_bytes))
        self.ended = threading.Semaphore(0)
        self.engine = DeviceTransferEngine(
            self.kv,
            self.arena,
            [CudaDevice(self.kv.data.device)],
            piece_bytes=PIECE_BYTES,
            on_moved=self.ended.release,
        )
        self.value = torch.zeros((), dtype=torch.bfloat16, device="cuda")
        self.target = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64
        self.graphs = CudaGraphs()
        self.graphs.warm(self.compute)
        self.graphs.capture("step", self.compute)

    def compute(self) -> torch.Tensor:
        """Multiply for some milliseconds, then fill the target block with the value."""
        x = self.weight
        for _ in range(40):
            x = x @ self.weight
        fill = (self.value + 0 * x.sum()).expand(self.kv.data[0].shape)
        self.kv.data.index_copy_(0, self.target, fill.unsqueeze(0).contiguous())
        return self.value

    def step(self, block: int, value: float) -> torch.cuda.Event:
        """Launch a step that fills a block; return its end."""
        self.value.fill_(value)
        self.target.fill_(block)
        self.graphs.replay("step")
        event = torch.cuda.Event()
        event.record()
        return event

    def run(self, *moves: Move) -> list[Moved]:
        """Return the outcomes of moves, in order of their ids."""
        self.engine.submit(moves)
        wait_for(self.ended, len(moves))
        return sorted(self.engine.poll(), key=lambda moved: moved.move_id)

    def slot(self, slot: int) -> torch.Tensor:
        """Return a slot's values."""
        return torch.frombuffer(self.arena.view(slot, FORMAT.block_bytes), dtype=torch.bfloat16)


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    torch.cuda.synchronize()
    pool.engine.close()
    pool.arena.close()


def test_an_offload_of_a_collected_step_has_its_bytes(pool: Pool) -> None:
    """No stream waits for another: that the step was collected is enough. The fault: an offload
    that does not wait for that copies what was there before.
    """
    for number in range(10):
        pool.step(3, number + 1.0).synchronize()
        assert pool.run(Move(2 * number, "offload", 3, number))[0].is_done
        assert set(pool.slot(number).tolist()) == {number + 1.0}
    for _ in range(40):  # a third of a second, which no copy takes on a busy machine either
        pool.step(4, 98.0)
    pool.step(3, 99.0)
    early = pool.run(Move(100, "offload", 3, 10))[0]
    torch.cuda.synchronize()

    assert early.is_done
    assert 99.0 not in set(pool.slot(10).tolist())


def test_a_load_goes_on_beside_steps_that_do_not_touch_its_block(pool: Pool) -> None:
    """Two steps are in flight, and a block is copied by a third; what was loaded is read by the
    step launched after the outcome, and nothing else was written.
    """
    pool.slot(0).fill_(7.0)
    steps = [pool.step(5, 1.0), pool.step(6, 2.0)]
    moved = pool.run(Move(1, "load", 9, 0))
    are_running = not steps[-1].query()
    pool.kv.copy([BlockCopy(9, 10, 16)])
    pool.step(11, 3.0).synchronize()

    assert moved[0].is_done
    assert are_running, "the load waited for no step"
    found = [set(pool.kv.data[block].flatten().tolist()) for block in (5, 6, 9, 10, 11, 12)]
    assert found == [{1.0}, {2.0}, {7.0}, {7.0}, {3.0}, {0.0}]


def test_a_capture_goes_on_while_memory_is_pinned_and_copied(pool: Pool) -> None:
    """The capture's stream is none of the moves', and other threads' calls are not its own."""
    is_over = threading.Event()
    failed: list[Moved] = []

    def move() -> None:
        number = 0
        while not is_over.is_set():
            moves = [
                Move(number + index, "offload", index, (number + index) % BLOCKS)
                for index in range(8)
            ]
            failed.extend(one for one in pool.run(*moves) if not one.is_done)
            number += 8

    mover = threading.Thread(target=move)
    mover.start()
    for index in range(40):  # more than there are streams that torch hands out in turn
        pool.graphs.warm(pool.compute)
        pool.graphs.capture(index, pool.compute)
    is_over.set()
    mover.join()
    pool.value.fill_(5.0)
    pool.target.fill_(60)
    pool.graphs.replay(39)
    torch.cuda.synchronize()

    assert not failed
    assert set(pool.kv.data[60].flatten().tolist()) == {5.0}
