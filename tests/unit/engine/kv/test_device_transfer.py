"""The transfer engine of a device over a fake one: batches, pinning, packing, and what fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import triton

from engine.kv.device_packing import gpu_packers_of
from engine.kv.device_transfer import BATCHES, DeviceTransferEngine
from engine.kv.format import KvFormat
from engine.kv.move_queue import MoveQueue
from engine.kv.pinned_memory import PinnedMemory
from engine.kv.storage import KvStorage
from engine.moves import Move, SlotLayout
from engine.storage.memory.arena import HostArena
from kernels import reference_kv
from tests.unit.engine.kv.fake_device import FakeDevice, FakeMark
from tests.unit.engine.kv.transfer_rig import PIECE_BYTES, WAIT_S, Place, Rig, engine_of, wait_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Return a rig over the fake device, whose batches have two blocks."""
    rig = Rig("fake")
    yield rig
    finish(rig)


def finish(rig: Rig) -> None:
    rig.slots.gate.set()
    rig.device.go()
    rig.engine.close()


def device_engine(rig: Rig) -> DeviceTransferEngine:
    assert isinstance(rig.engine, DeviceTransferEngine)
    return rig.engine


def offloads(count: int) -> list[Move]:
    """Return offloads of all blocks in turn to the three good slots in turn."""
    return [Move(index, "offload", index % 6, index % 3) for index in range(count)]


def test_no_outcome_comes_before_the_copies_have_ended(rig: Rig) -> None:
    """What is launched is not done: the fake copies when its end is waited for."""
    rig.device.hold()
    rig.engine.submit([Move(1, "offload", 0, 0), Move(2, "load", 1, 1)])
    for stream in rig.device.streams:
        assert stream.launched.acquire(timeout=WAIT_S)
    early = rig.engine.poll()
    rig.device.go()
    wait_for(rig.ended, 2)

    assert early == []
    assert all(moved.is_done for moved in rig.engine.poll())
    assert rig.slot(0) == rig.block(0)


def test_a_digest_of_bytes_that_have_not_come_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: no one waits for the copy. The slot's digest is then not that of the block."""
    monkeypatch.setattr(FakeMark, "wait", lambda self: 0.0)
    rig = Rig("fake")
    moved = rig.run(Move(1, "offload", 0, 0))[0]
    monkeypatch.undo()
    again = rig.run(Move(2, "offload", 0, 1))[0]
    finish(rig)

    assert moved.check != again.check
    assert rig.slot(0) == rig.block(0), "it came after all"


def test_a_worker_that_keeps_no_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: a load does not wait for the offload that fills its slot, and reads what was
    there. With the order kept it is not even launched.
    """
    found = []
    for has_fault in (True, False):
        if has_fault:
            monkeypatch.setattr(MoveQueue, "_may_begin", lambda self, move: True)
        rig = Rig("fake")
        first = rig.block(0)
        rig.device.hold()
        rig.engine.submit([Move(1, "offload", 0, 0), Move(2, "load", 3, 0)])
        out, back = rig.device.streams
        assert out.launched.acquire(timeout=WAIT_S)
        if has_fault:
            back.gate.set()
            assert rig.ended.acquire(timeout=WAIT_S)
        monkeypatch.undo()
        rig.device.go()
        assert rig.ended.acquire(timeout=WAIT_S)
        assert has_fault or rig.ended.acquire(timeout=WAIT_S)
        finish(rig)
        found.append(rig.block(3) == first)

    assert found == [False, True]


def test_batches_are_bounded_in_number_and_size(rig: Rig) -> None:
    """What is urgent waits behind so many blocks and no more; all of them have outcomes."""
    rig.device.hold()
    rig.engine.submit([Move(index, "load", index % 6, index % 3) for index in range(60)])
    assert rig.device.streams[1].launched.acquire(timeout=WAIT_S)
    rig.device.go()
    wait_for(rig.ended, 60)

    assert len(rig.engine.poll()) == 60
    assert rig.device.streams[1].in_flight_max <= BATCHES


def test_seconds_are_a_moves_share_of_its_batch() -> None:
    """The core's estimate of a level's speed is the sum of these over its blocks."""
    rig = Rig("fake", work_s=3.0)
    rig.slots.gate.clear()
    rig.engine.submit([Move(1, "load", 0, 0), Move(2, "load", 1, 1)])
    rig.slots.gate.set()
    wait_for(rig.ended, 2)
    finish(rig)

    assert [moved.seconds for moved in rig.engine.poll()] == [1.5, 1.5]


# -- pinned memory ----------------------------------------------------------------------------


def test_memory_is_pinned_at_its_first_use_and_a_little_ahead() -> None:
    """Nothing at the start, which would come later for it; never on the thread that submits."""
    rig = Rig("fake", ahead_bytes=PIECE_BYTES)
    at_start = list(rig.device.pins)
    rig.run(Move(1, "offload", 0, 0))
    rig.run(Move(2, "offload", 0, 1))  # it lies in the first two pieces
    used = list(rig.device.pins)
    rig.run(Move(3, "offload", 0, 2))
    finish(rig)

    assert at_start == []
    assert rig.slots.keeps_pages
    assert used[:2] == [0, PIECE_BYTES]
    assert set(rig.device.pins) <= {0, PIECE_BYTES, 2 * PIECE_BYTES}
    assert rig.device.pinning_threads == {"kv-pin"}


def test_all_is_unpinned_when_the_engine_is_closed(rig: Rig) -> None:
    """Before the arena is: the machine could not take back memory that a device holds."""
    rig.run(*offloads(3))
    before = dict(rig.device.pinned)
    rig.engine.close()

    assert before
    assert not rig.device.pinned


def test_memory_that_cannot_be_pinned_is_not_used() -> None:
    """Its moves fail, with a reason, also later ones; it is told and counted once. Others go on."""
    told: list[tuple[int, str]] = []
    rig = Rig(
        "fake", ahead_bytes=0, on_unpinned=lambda size, error: told.append((size, str(error)))
    )
    rig.device.unpinnable = {0}
    bad = rig.run(Move(1, "offload", 0, 0))
    rig.device.unpinnable = set()
    again = rig.run(Move(2, "offload", 0, 0))
    good = rig.run(Move(3, "offload", 0, 2))
    engine = device_engine(rig)
    sizes = engine.unusable_bytes, engine.pinned_bytes
    finish(rig)

    assert [moved.is_done for moved in (*bad, *again, *good)] == [False, False, True]
    assert told == [(PIECE_BYTES, "no more memory may be locked")]
    assert sizes == (PIECE_BYTES, PIECE_BYTES)
    reason = "piece 0 of host memory is not pinned: no more memory may be locked"
    assert rig.errors == [(1, reason), (2, reason)]


def test_copies_do_not_cross_from_one_pinned_piece_to_the_next() -> None:
    """A device refuses a copy over two pinned ranges."""
    arena = HostArena.create(SlotLayout.uniform(4, 5000))
    with ThreadPoolExecutor(1) as helpers:
        pinned = PinnedMemory(FakeDevice(), arena.whole(), helpers, piece_bytes=4096, ahead_bytes=0)
        parts = pinned.need(arena.layout.offset(1, 5000), 5000)
        pinned.close()
    arena.close()

    assert parts == [(5056, 3136), (8192, 1864)]


def test_wiped_pages_stay_where_a_device_has_pinned_them() -> None:
    """A page that went back to the machine would be another one for the host from then on."""
    arena = HostArena.create(SlotLayout.uniform(4, 8192))
    arena.keep_pages()
    arena.view(1, 8192)[:] = b"x" * 8192
    arena.wipe(1, 8192)

    assert bytes(arena.view(1, 8192)) == bytes(8192)
    arena.close()


# -- what fails -------------------------------------------------------------------------------


def test_an_error_of_the_device_fails_its_batch_alone(rig: Rig) -> None:
    """The engine goes on: whether the device is lost is the runner's to say."""
    rig.device.errors = [RuntimeError("an illegal address was met")]
    bad = rig.run(Move(1, "offload", 0, 0))
    good = rig.run(Move(2, "offload", 0, 0))

    assert [moved.is_done for moved in (*bad, *good)] == [False, True]
    assert rig.errors == [(1, "an illegal address was met")]


def test_a_launch_that_fails_fails_its_batch_alone(rig: Rig) -> None:
    """Each of its moves has its outcome."""
    rig.device.launch_errors = [RuntimeError("out of memory")]
    bad = rig.run(Move(1, "load", 0, 0))
    good = rig.run(Move(2, "load", 1, 0))

    assert [moved.is_done for moved in (*bad, *good)] == [False, True]
    assert rig.errors == [(1, "out of memory")]


def test_a_block_that_cannot_be_packed_fails_alone(rig: Rig) -> None:
    """The core then copies it as it is."""
    rig.packer.unpackable = 1
    outcomes = rig.run(
        Move(1, "offload", 0, 0, format="half"), Move(2, "offload", 1, 1, format="half")
    )
    found = {moved.move_id: (moved.is_done, moved.is_unpackable) for moved in outcomes}

    assert found == {1: (True, False), 2: (False, True)}
    assert "block 1 has values that half cannot hold" in rig.errors[0][1]


def test_plain_and_packed_moves_go_in_batches_of_their_own(rig: Rig) -> None:
    """For any order of formats, each slot has the bytes of its move's."""
    rig.slots.gate.clear()
    moves = [
        Move(index, "offload", index % 6, index % 3, format=("", "half", "half", "")[index % 4])
        for index in range(40)
    ]
    rig.engine.submit(moves)
    rig.slots.gate.set()
    wait_for(rig.ended, len(moves))

    assert all(moved.is_done for moved in rig.engine.poll())
    for move in moves[-3:]:
        whole = rig.block(move.block)
        expected = whole[::2] if move.format else whole
        assert rig.slot(move.slot, len(expected)) == expected


def test_close_comes_while_copies_are_under_way(rig: Rig) -> None:
    """What was launched is done, the rest has failed; nothing is without an outcome."""
    rig.device.hold()
    rig.engine.submit(offloads(30))
    closing = threading.Thread(target=rig.engine.close)
    closing.start()
    rig.device.go()
    closing.join(WAIT_S)

    assert sorted(moved.move_id for moved in rig.engine.poll()) == list(range(30))
    assert not rig.device.pinned


# -- the kernels' formats -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8c", "int4c"])
def test_packed_blocks_have_the_references_bytes(name: str) -> None:
    """On a GPU, or in Triton's interpreter over the fake device: any machine reads them."""
    kv = KvStorage(KvFormat(2, 2, 16, 16, torch.bfloat16), 4, DEVICE)
    kv.data.copy_(torch.randn(kv.data.shape, generator=torch.Generator().manual_seed(1)))
    kv.data[1].fill_(torch.nan)
    names: Any = [name]
    packers = gpu_packers_of(kv, names)
    arena = HostArena.create(SlotLayout.uniform(3, kv.format.block_bytes))
    ended = threading.Semaphore(0)
    place: Place = "fake" if DEVICE.type == "cpu" else "gpu"
    engine = engine_of(place, kv, arena, FakeDevice(), packers=packers, on_moved=ended.release)
    engine.submit([
        Move(1, "offload", 0, 0, format=name),
        Move(2, "offload", 1, 1, format=name),
        Move(3, "load", 2, 0, format=name),
    ])  # fmt: skip
    wait_for(ended, 3)
    moved = {one.move_id: one for one in engine.poll()}
    packed = bytes(arena.view(0, packers[name].block_bytes))
    engine.close()
    arena.close()

    assert [moved[index].is_done for index in (1, 2, 3)] == [True, False, True]
    assert moved[2].is_unpackable
    expected = reference_kv.pack(kv.data[0].cpu(), names[0])
    assert packed == bytes(expected.numpy().tobytes())
    unpacked = reference_kv.unpack(expected, names[0], (2, 2, 16), torch.bfloat16)
    assert torch.equal(kv.data[2].cpu(), unpacked)


@pytest.mark.gpu
def test_no_batch_waits_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of blocks and any place in memory: a load would reach its deadline."""
    kv = KvStorage(KvFormat(3, 1, 16, 16, torch.bfloat16), 40, DEVICE)
    packers = gpu_packers_of(kv, ["int8c", "int4c"])
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **facts: compiled.append(str(facts))
    )
    for packer in packers.values():
        room = torch.empty(100 * packer.block_bytes, dtype=torch.uint8, device=DEVICE)
        ids = torch.arange(40, dtype=torch.int32, device=DEVICE)
        for count in (1, 2, 3, 16, 17, 32):
            for start in (0, 1, 4, 5):
                packed = room[: count * packer.block_bytes].view(count, -1)
                packer.pack(ids[start : start + count], packed, 0)
                packer.unpack(packed, ids[start : start + count], 0)

    assert compiled == []
