"""Copies of blocks that lanes share: their shards side by side in one slot, moved by a stream each.

Over fake devices, and on two GPUs where there are as many.
"""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch

from engine.kv.device_packing import gpu_packers_of
from engine.kv.device_transfer import KINDS
from engine.kv.format import KvFormat, KvGroup
from engine.kv.packing import PackedName
from engine.kv.storage import KvShards, KvStorage
from engine.moves import WHOLE, Move, Moved, SlotFormat, SlotLayout, stride_of
from engine.storage.memory.arena import HostArena
from kernels import reference_kv
from tests.unit.engine.kv.fake_device import FakeDevice
from tests.unit.engine.kv.transfer_rig import WAIT_S, Place, engine_of, wait_for

LANES, BLOCKS, SLOTS = 2, 6, 4
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < LANES, reason=f"{GPUS} GPUs here; lanes need two"),
]
PLACES = ["fake", pytest.param("gpu", marks=TWO_GPUS)]
PACKING_PLACES = [
    pytest.param("fake", marks=pytest.mark.skipif(GPUS > 0, reason="kernels run on the GPU here")),
    pytest.param("gpu", marks=TWO_GPUS),
]
THREE_GROUPS = (KvGroup(0, (0,)), KvGroup(8, (1,)), KvGroup(8, (2,)))


class Lanes:
    """Blocks of two KV heads that two lanes share, and what moves them. A batch has four blocks,
    and no shard fits a piece of memory that is pinned at once."""

    def __init__(
        self, place: Place = "fake", *names: PackedName, groups: tuple[KvGroup, ...] = ()
    ) -> None:
        dtype = torch.bfloat16 if names else torch.float32
        self.form = KvFormat(1, LANES, 32, 16, dtype, groups=groups, lanes=LANES)
        gpus = [torch.device("cuda", lane) for lane in range(LANES)]
        devices = gpus if place == "gpu" else [torch.device("cpu")] * LANES
        self.pool = KvShards(
            self.form, [KvStorage(self.form.shard, BLOCKS, device) for device in devices]
        )
        for lane, shard in enumerate(self.pool.shards):
            generator = torch.Generator().manual_seed(lane)
            shard.data.copy_(torch.randn(shard.data.shape, generator=generator))
        size = self.form.block_bytes * self.form.blocks_per_run
        self.arena = HostArena.create(SlotLayout.uniform(SLOTS, size))
        self.ended = threading.Semaphore(0)
        self.devices = [FakeDevice() for _ in range(LANES)]
        self.errors: list[str] = []
        self.engine = engine_of(
            place,
            self.pool,
            self.arena,
            *self.devices,
            packers=gpu_packers_of(self.pool, names),
            batch_blocks=4,
            piece_bytes=mmap.PAGESIZE,
            on_moved=self.ended.release,
            on_error=lambda _, error: self.errors.append(str(error)),
        )

    def run(self, *moves: Move) -> list[Moved]:
        """Return the outcomes of moves, in the order of their ids."""
        self.engine.submit(moves)
        wait_for(self.ended, len(moves))
        return sorted(self.engine.poll(), key=lambda moved: moved.move_id)

    def block(self, block: int) -> bytes:
        """Return a block's bytes, one lane's shard behind the other's."""
        shards = [shard.data[block].cpu().flatten() for shard in self.pool.shards]
        return bytes(torch.cat(shards).view(torch.uint8).numpy().tobytes())

    def slot(self, slot: int, size: int) -> bytes:
        """Return a slot's bytes."""
        return bytes(self.arena.view(slot, size))


Made = list[Lanes]


@pytest.fixture
def made() -> Iterator[Made]:
    """What a test makes and puts here is closed behind it."""
    rigs: Made = []
    yield rigs
    for rig in rigs:
        for device in rig.devices:
            device.go()
        rig.engine.close()
        rig.arena.close()


def new(made: Made, rig: Lanes) -> Lanes:
    made.append(rig)
    return rig


@pytest.mark.parametrize("place", PLACES)
def test_a_copy_has_the_lanes_shards_side_by_side(place: Place, made: Made) -> None:
    """A slot has the size of the whole block, and all of it comes back, on each lane its own."""
    rig = new(made, Lanes(place))
    size = rig.form.block_bytes
    before = [rig.block(block) for block in range(BLOCKS)]
    out = rig.run(*(Move(block, "offload", block, block) for block in range(3)))
    back = rig.run(*(Move(n, "load", 5 - n, n, out[n].check) for n in range(3)))

    assert rig.engine.formats == (SlotFormat("", size),)
    assert all(one.is_done for one in (*out, *back))
    assert [rig.slot(slot, size) for slot in range(3)] == before[:3]
    assert [rig.block(5 - n) for n in range(3)] == before[:3]


@pytest.mark.parametrize("place", PLACES)
def test_copies_of_all_groups_have_the_lanes_shards_of_each(place: Place, made: Made) -> None:
    """A load leaves alone the blocks of groups that it is not to fill, on every lane."""
    rig = new(made, Lanes(place, groups=THREE_GROUPS))
    before = [rig.block(block) for block in range(BLOCKS)]
    out = rig.run(Move(1, "offload", 0, 1, format=WHOLE, beside=(1, 2)))
    back = rig.run(Move(2, "load", 3, 1, out[0].check, WHOLE, (-1, 5)))

    assert [one.is_done for one in (*out, *back)] == [True, True]
    assert rig.slot(1, 3 * rig.form.block_bytes) == b"".join(before[:3])
    assert [rig.block(b) for b in range(BLOCKS)] == [*before[:3], before[0], before[4], before[2]]


@pytest.mark.parametrize("place", PACKING_PLACES)
@pytest.mark.parametrize("name", ["int8c", "int4c"])
@pytest.mark.parametrize("groups", [(), THREE_GROUPS], ids=["one group", "three groups"])
def test_each_shard_is_packed_by_itself(
    name: PackedName, groups: tuple[KvGroup, ...], place: Place, made: Made
) -> None:
    """Each begins where a slot may, with nothing of another copy between them. A value of one lane
    that cannot be packed makes the whole copy unpackable, and no other."""
    rig = new(made, Lanes(place, name, groups=groups))
    count = rig.form.blocks_per_run
    whole = f"{WHOLE}-{name}" if groups else name
    beside = (1, 2)[: count - 1]
    size = next(one.slot_bytes for one in rig.engine.formats if one.name == whole)
    rig.arena.view(1, size)[:] = b"x" * size
    out = rig.run(Move(1, "offload", 0, 1, format=whole, beside=beside))
    packed = rig.slot(1, size)
    back = rig.run(Move(2, "load", 3, 1, out[0].check, whole, (4, 5)[: count - 1]))
    found = [[shard.data[b].cpu().clone() for shard in rig.pool.shards] for b in range(BLOCKS)]
    rig.pool.shards[1].data[0, 0, 0, 0, 0, 0] = float("nan")
    bad, good = rig.run(
        Move(3, "offload", 0, 1, format=whole, beside=beside),
        Move(4, "offload", 3, 2, format=whole, beside=beside),
    )

    assert [one.is_done for one in (*out, *back, bad, good)] == [True, True, False, True]
    assert bad.is_unpackable
    shard = rig.form.shard
    shape = shard.layers, shard.kv_heads, shard.head_dim
    expected = b""
    for block, lane in product(range(count), range(LANES)):
        part = reference_kv.pack(found[block][lane], name)
        expected += bytes(part.numpy().tobytes()).ljust(stride_of(len(part)), b"\0")
        unpacked = reference_kv.unpack(part, name, shape, torch.bfloat16)
        assert torch.equal(found[3 + block][lane], unpacked)
    assert packed == expected


@pytest.mark.parametrize("late", range(LANES))
def test_a_move_is_done_when_the_pieces_of_all_lanes_are(late: int, made: Made) -> None:
    """One lane's GPU may be busier than another's."""
    rig = new(made, Lanes())
    rig.devices[late].hold()
    rig.engine.submit([Move(1, "offload", 0, 0), Move(2, "load", 1, 1)])
    for device in rig.devices:
        for stream in device.streams:
            assert stream.launched.acquire(timeout=WAIT_S)
    early = rig.engine.poll()
    rig.devices[late].go()
    wait_for(rig.ended, 2)

    assert early == []
    assert all(one.is_done for one in rig.engine.poll())
    assert rig.slot(0, rig.form.block_bytes) == rig.block(0)


@pytest.mark.parametrize("failing", range(LANES))
def test_a_move_that_fails_on_one_lane_has_no_piece_under_way(failing: int, made: Made) -> None:
    """Its slot and its block are given to others as soon as it has an outcome."""
    rig = new(made, Lanes())
    other = rig.devices[1 - failing]
    rig.devices[failing].errors = [RuntimeError("the device has failed")]
    other.hold()
    rig.engine.submit([Move(1, "offload", 0, 0)])
    assert other.streams[0].launched.acquire(timeout=WAIT_S)
    early = rig.engine.poll()
    other.go()
    wait_for(rig.ended, 1)
    failed = rig.engine.poll()
    good = rig.run(Move(2, "offload", 1, 0))

    assert early == []
    assert [one.is_done for one in (*failed, *good)] == [False, True]
    assert rig.errors == ["the device has failed"]
    assert not other.streams[0].waiting


def test_a_launch_that_fails_on_a_lane_waits_for_what_others_launched(made: Made) -> None:
    """The same where the second lane's copies were never launched."""
    rig = new(made, Lanes())
    rig.devices[1].launch_errors = [RuntimeError("out of memory")]
    bad = rig.run(Move(1, "load", 0, 0))
    is_waiting = rig.devices[0].streams[1].waiting
    good = rig.run(Move(2, "load", 1, 0))

    assert [one.is_done for one in (*bad, *good)] == [False, True]
    assert not is_waiting


@pytest.mark.parametrize("seed", range(4))
def test_random_moves_give_what_copying_whole_blocks_does(seed: int, made: Made) -> None:
    """Over moves of one block and of a block of each group, with failures of either lane: what was
    done equals a plain copy, and what failed has touched only its own slot and blocks."""
    chance = random.Random(seed)
    rig = new(made, Lanes(groups=THREE_GROUPS))
    size = rig.form.block_bytes
    for turn in range(30):
        moves = _moves(chance, turn)
        blocks = [rig.block(block) for block in range(BLOCKS)]
        slots = [rig.slot(slot, 3 * size) for slot in range(SLOTS)]
        if chance.random() < 0.3:
            chance.choice(rig.devices).errors.append(RuntimeError("planted"))
        done = {one.move_id for one in rig.run(*moves) if one.is_done}
        for device in rig.devices:
            device.errors.clear()
        touched = {block for move in moves if move.kind == "load" for block in _of(move)}
        for move in moves:
            parts = [slots[move.slot][n * size : (n + 1) * size] for n in range(3)]
            for part, block in zip(parts, _of(move), strict=False):
                if move.move_id in done and move.kind == "load":
                    assert rig.block(block) == part
            if move.move_id in done and move.kind == "offload":
                expected = b"".join(blocks[block] for block in _of(move))
                assert rig.slot(move.slot, len(expected)) == expected
        for block in set(range(BLOCKS)) - touched:
            assert rig.block(block) == blocks[block]
        for slot in set(range(SLOTS)) - {m.slot for m in moves if m.kind == "offload"}:
            assert rig.slot(slot, 3 * size) == slots[slot]


def _of(move: Move) -> Sequence[int]:
    """Return the blocks of a move."""
    return move.block, *move.beside


def _moves(chance: random.Random, turn: int) -> list[Move]:
    """Return moves of which no two share a slot or a block."""
    blocks, slots = chance.sample(range(BLOCKS), BLOCKS), chance.sample(range(SLOTS), SLOTS)
    moves: list[Move] = []
    while slots and len(blocks) >= 3:
        kind = chance.choice(KINDS)
        name, count = chance.choice((("", 1), (WHOLE, 3)))
        own = [blocks.pop() for _ in range(count)]
        number = 100 * turn + len(moves)
        moves.append(Move(number, kind, own[0], slots.pop(), b"", name, tuple(own[1:])))
    return moves
