"""Transfer engines, on the CPU, over a fake device and on a GPU: order, failures, bounds, close."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import torch
import xxhash

from engine.kv.device_packing import gpu_packers_of
from engine.kv.device_transfer import DeviceTransferEngine
from engine.kv.format import KvFormat, KvGroup
from engine.kv.packing import PackedName, packers_of
from engine.kv.storage import KvStorage
from engine.kv.transfer import CpuTransferEngine
from engine.moves import WHOLE, Move, Moved, SlotFormat, SlotLayout, TransferEngine, stride_of
from engine.storage.memory.arena import HostArena
from tests.tables import each_row
from tests.unit.engine.kv.fake_device import FakeDevice
from tests.unit.engine.kv.transfer_rig import (
    BLOCKS,
    SLOTS,
    WAIT_S,
    MakeRig,
    Place,
    Rig,
    Slots,
    engine_of,
    storage,
    wait_for,
)

PLACES = ["cpu", "fake", pytest.param("gpu", marks=pytest.mark.gpu)]
PACKING_PLACES = ["cpu", "gpu" if torch.cuda.is_available() else "fake"]
"""Where blocks are packed: by Triton's interpreter, which runs only where there is no GPU."""


@pytest.fixture(params=PLACES)
def make(request: pytest.FixtureRequest) -> Iterator[MakeRig]:
    """Return what makes rigs of one kind; they are closed behind the test."""
    place: Place = request.param
    rigs: list[Rig] = []

    def new(**options: int) -> Rig:
        rigs.append(Rig(place, **options))
        return rigs[-1]

    yield new
    for rig in rigs:
        rig.slots.gate.set()
        rig.engine.close()


@pytest.fixture
def rig(make: MakeRig) -> Rig:
    return make()


def test_a_block_comes_back_as_it_left(rig: Rig) -> None:
    """A copy in the pool's own format is bit for bit what was offloaded, in any block."""
    before = rig.block(2)

    out = rig.run(Move(1, "offload", block=2, slot=1))
    back = rig.run(Move(2, "load", block=5, slot=1, check=out[0].check))

    assert [moved.is_done for moved in (*out, *back)] == [True, True]
    assert rig.block(5) == rig.block(2) == before


class Grouped:
    """An engine over a pool of three KV groups of a layer each, with these packers. On a device a
    batch has four blocks, and memory is pinned in pieces that no block fits."""

    def __init__(self, place: Place, *names: PackedName) -> None:
        groups = (KvGroup(0, (0,)), KvGroup(8, (1,)), KvGroup(8, (2,)))
        dtype = torch.float32 if place == "cpu" else torch.bfloat16
        self.form = KvFormat(1, 1, 16, 16, dtype, groups=groups)
        self.kv = KvStorage(self.form, BLOCKS, torch.device("cuda" if place == "gpu" else "cpu"))
        generator = torch.Generator().manual_seed(1)
        self.kv.data.copy_(torch.randn(self.kv.data.shape, generator=generator))
        self.arena = HostArena.create(SlotLayout.uniform(SLOTS, 3 * self.form.block_bytes))
        self.arena.view(1, 3 * self.form.block_bytes)[:] = b"x" * (3 * self.form.block_bytes)
        self.ended = threading.Semaphore(0)
        is_cpu = place == "cpu"
        self.engine = engine_of(
            *(place, self.kv, self.arena, FakeDevice()),
            packers=packers_of(self.kv, None, names) if is_cpu else gpu_packers_of(self.kv, names),
            batch_blocks=4,
            piece_bytes=mmap.PAGESIZE,
            on_moved=self.ended.release,
        )

    def run(self, *moves: Move) -> list[Moved]:
        """Return the outcomes of moves, in the order of their ids."""
        self.engine.submit(moves)
        wait_for(self.ended, len(moves))
        return sorted(self.engine.poll(), key=lambda moved: moved.move_id)

    def close(self) -> None:
        """End the engine, and close its memory."""
        self.engine.close()
        self.arena.close()


@pytest.mark.parametrize("place", PLACES)
def test_blocks_of_all_groups_come_back_as_they_left(place: Place) -> None:
    """Side by side in one slot; a load leaves alone those that it is not to fill."""
    with closing(Grouped(place)) as under_test:
        run, kv = under_test.run, under_test.kv
        before = [kv.data[block].clone() for block in range(BLOCKS)]
        out = run(Move(1, "offload", 0, 1, format=WHOLE, beside=(1, 2)))
        back = run(Move(2, "load", 3, 1, out[0].check, WHOLE, (-1, 5)))
        wrong = run(
            Move(3, "offload", 0, 1, format=WHOLE, beside=(1,)),
            Move(4, "offload", 0, 1, format=WHOLE, beside=(1, -1)),
            Move(5, "load", 3, 1, format=WHOLE, beside=(4, BLOCKS)),
            Move(6, "load", 3, 1, beside=(4, 5)),
        )

    assert under_test.engine.formats[1] == SlotFormat(WHOLE, 3 * under_test.form.block_bytes)
    assert [one.is_done for one in (*out, *back, *wrong)] == [True, True, *[False] * 4]
    expected = [*before[:3], before[0], before[4], before[2]]
    assert all(torch.equal(kv.data[block], expected[block]) for block in range(BLOCKS))


@pytest.mark.parametrize("place", PLACES)
def test_copies_of_one_group_and_of_all_may_be_under_way_together(place: Place) -> None:
    """Each in batches of its own, by blocks; every slot then has what its move named."""
    with closing(Grouped(place)) as under_test:
        size = under_test.form.block_bytes
        moves = [
            Move(index, "offload", index % 6, index % 4)
            if index % 3 == 0
            else Move(
                index,
                "offload",
                index % 6,
                index % 4,
                format=WHOLE,
                beside=((index + 1) % 6, (index + 2) % 6),
            )
            for index in range(40)
        ]
        outcomes = under_test.run(*moves)
        slots = {
            move.slot: bytes(under_test.arena.view(move.slot, size * (1 + len(move.beside))))
            for move in moves[-4:]
        }
        blocks = under_test.kv.data.cpu().view(torch.uint8).flatten(1)

    assert all(one.is_done for one in outcomes)
    for move in moves[-4:]:
        expected = blocks[[move.block, *move.beside]].numpy().tobytes()
        assert slots[move.slot] == expected


@each_row("place", PACKING_PLACES)
@each_row("name", ["int8c", "int4c"])
def test_blocks_of_all_groups_are_packed_each_by_itself(name: PackedName, place: Place) -> None:
    """As a block of group 0 is; one that is no number makes the whole copy unpackable. Nothing of
    the copy before stays between them."""
    whole = f"{WHOLE}-{name}"
    with closing(Grouped(place, name)) as under_test:
        run, kv = under_test.run, under_test.kv
        sizes = {one.name: one.slot_bytes for one in under_test.engine.formats}
        out = run(Move(1, "offload", 0, 1, format=whole, beside=(1, 2)))
        slot = bytes(under_test.arena.view(1, sizes[whole]))
        back = run(Move(2, "load", 3, 1, out[0].check, whole, (-1, 5)))
        alone = run(Move(3, "offload", 2, 0, format=name))
        alone += run(Move(4, "load", 4, 0, format=name))
        kv.data[1, 0, 0, 0, 0, 0] = float("nan")
        bad, good = run(
            Move(5, "offload", 0, 1, format=whole, beside=(1, 2)),
            Move(6, "offload", 0, 2, format=whole, beside=(3, 2)),
        )

    assert [one.is_done for one in (*out, *back, *alone)] == [True] * 4
    assert torch.equal(kv.data[5], kv.data[4]), "the third group's block, as packed alone"
    assert 0 < float((kv.data[5] - kv.data[2]).abs().max()) < 0.5
    assert (bad.is_done, bad.is_unpackable, good.is_done) == (False, True, True)
    stride = stride_of(sizes[name])
    assert sizes[whole] == 3 * stride
    paddings = [
        slot[start + sizes[name] : start + stride] for start in range(0, 3 * stride, stride)
    ]
    assert not any(b"".join(paddings))


def test_the_digest_is_that_of_the_whole_slot(rig: Rig) -> None:
    """The disk stores whole slots, and checks them by it."""
    moved = rig.run(Move(1, "offload", block=0, slot=2))[0]

    assert rig.slot(2) == rig.block(0)
    assert moved.check == xxhash.xxh3_128_digest(rig.slot(2))


def test_moves_run_in_order(rig: Rig) -> None:
    """A slot is given back and taken again in one batch: the load must see the first copy."""
    first, second = rig.block(0), rig.block(1)

    outcomes = rig.run(
        Move(1, "offload", block=0, slot=0),
        Move(2, "load", block=3, slot=0),
        Move(3, "offload", block=1, slot=0),
        Move(4, "load", block=4, slot=0),
    )

    assert [moved.move_id for moved in outcomes] == [1, 2, 3, 4]
    assert rig.block(3) == first
    assert rig.block(4) == second


def test_one_move_fails_alone(rig: Rig) -> None:
    """Bad memory, a bad block and an unknown format cost that copy, not the engine."""
    outcomes = rig.run(
        Move(1, "offload", block=0, slot=3),
        Move(2, "offload", block=BLOCKS, slot=0),
        Move(3, "offload", block=-1, slot=0),
        Move(4, "offload", block=0, slot=0, format="quarter"),
        Move(5, "offload", block=0, slot=0),
    )

    assert [moved.is_done for moved in outcomes] == [False, False, False, False, True]
    assert [move_id for move_id, _ in rig.errors] == [1, 2, 3, 4]
    assert rig.errors[3][1] == "no packed format 'quarter'; expected one of: half"


@pytest.mark.parametrize("byte", [0, 1000, -1])
def test_damaged_bytes_are_found_before_they_reach_a_block(rig: Rig, byte: int) -> None:
    """One changed bit anywhere in the slot fails the load, and the block keeps its bytes."""
    check = rig.run(Move(1, "offload", block=0, slot=0))[0].check
    rig.slots.memory[byte % rig.kv.format.block_bytes] ^= 4
    before = rig.block(1)

    checked = rig.run(Move(2, "load", block=1, slot=0, check=check))

    assert [moved.is_done for moved in checked] == [False]
    assert rig.block(1) == before
    assert "expected " + check.hex() in rig.errors[0][1]
    assert rig.run(Move(3, "load", block=1, slot=0))[0].is_done  # unchecked, as it was asked


def test_a_packed_copy_takes_its_own_bytes(rig: Rig) -> None:
    """What lies behind them belongs to another slot; the digest is that of its own bytes."""
    before = rig.slot(0)
    moved = rig.run(Move(1, "offload", block=0, slot=0, format="half"))[0]
    rig.run(Move(2, "load", block=1, slot=0, check=moved.check, format="half"))

    packed = rig.block(0)[::2]
    assert rig.slot(0) == packed + before[len(packed) :]
    assert moved.check == xxhash.xxh3_128_digest(rig.slot(0, len(packed)))
    assert rig.block(1)[::2] == packed


def test_what_the_queue_has_no_room_for_fails_at_once(make: MakeRig) -> None:
    """A caller that submits too much gets outcomes, never a wait; polling makes room again."""
    rig = make(queue_blocks=2)
    rig.slots.gate.clear()

    rig.engine.submit([Move(index, "offload", block=0, slot=0) for index in range(4)])
    refused = rig.engine.poll()
    rig.slots.gate.set()
    wait_for(rig.ended, 2)
    done = rig.engine.poll()
    again = rig.run(Move(9, "offload", block=0, slot=0))
    rig.engine.close()

    assert refused == [Moved(2, is_done=False), Moved(3, is_done=False)]
    assert [(moved.move_id, moved.is_done) for moved in done] == [(0, True), (1, True)]
    assert again[0].is_done


def test_close_ends_the_move_under_way_and_fails_the_rest(rig: Rig) -> None:
    """Each move has exactly one outcome, whenever the engine is closed."""
    rig.slots.gate.clear()
    rig.engine.submit([Move(index, "offload", block=0, slot=index) for index in range(3)])
    assert rig.slots.viewed.wait(WAIT_S)
    closing = threading.Thread(target=rig.engine.close)
    closing.start()
    refused: list[Moved] = []
    while len(refused) < 2:  # the two that had not begun are refused while the first one runs
        refused += rig.engine.poll()
    rig.slots.gate.set()
    closing.join(WAIT_S)
    rig.engine.submit([Move(7, "offload", block=0, slot=0)])

    outcomes = [*refused, *rig.engine.poll()]

    assert sorted((moved.move_id, moved.is_done) for moved in outcomes) == [
        (0, True), (1, False), (2, False), (7, False),
    ]  # fmt: skip
    rig.engine.close()


@pytest.mark.parametrize("place", ["cpu", "fake"])
def test_a_hook_that_raises_takes_no_outcome_away(place: Place) -> None:
    """A logger on a full disk must not end the worker, whose moves would then never end."""
    kv = storage()
    ended = threading.Semaphore(0)
    slots = Slots(kv.format.block_bytes)

    def fail(move: Move, error: Exception) -> None:
        raise OSError(f"no room to log {move.move_id}: {error}")

    def wake_and_fail() -> None:
        ended.release()
        raise RuntimeError("the waiting thread is gone")

    engine = engine_of(place, kv, slots, FakeDevice(), on_error=fail, on_moved=wake_and_fail)
    engine.submit([Move(1, "offload", 0, 3), Move(2, "offload", 0, 0), Move(3, "load", 1, 0)])
    wait_for(ended, 3)

    assert [moved.is_done for moved in engine.poll()] == [False, True, True]
    engine.close()


def test_copies_that_do_not_fit_a_slot_are_refused_at_the_start() -> None:
    """The engine must not start and then fail every move."""
    kv = storage()
    size = kv.format.block_bytes

    with pytest.raises(ValueError, match=f"a block takes {size} bytes"):
        CpuTransferEngine(kv, Slots(size - 64))
    with pytest.raises(ValueError, match=f"a block takes {size} bytes"):
        DeviceTransferEngine(kv, Slots(size - 64), [FakeDevice()])


def test_formats_are_told_with_their_bytes(rig: Rig) -> None:
    """The core chooses among them, the pool's own first, and counts host memory in them."""
    engine: TransferEngine = rig.engine
    size = rig.kv.format.block_bytes

    assert engine.formats == (SlotFormat("", size), SlotFormat("half", size // 2, "near"))
    assert engine.layout.capacity(size) == SLOTS
    assert 0 < engine.loads_max * size <= 512 * 2**20
    assert engine.bytes_per_s > 0


def test_moves_are_timed_by_the_clock_given() -> None:
    """The core's estimate of a level's speed comes from these seconds."""
    kv = storage()
    ticks = iter(np.arange(0.0, 10.0, 0.5).tolist())
    ended = threading.Semaphore(0)
    engine = CpuTransferEngine(
        kv, Slots(kv.format.block_bytes), clock=lambda: next(ticks), on_moved=ended.release
    )

    engine.submit([Move(1, "offload", 0, 0), Move(2, "offload", 0, 1)])
    wait_for(ended, 2)

    assert [moved.seconds for moved in engine.poll()] == [0.5, 0.5]
    engine.close()
