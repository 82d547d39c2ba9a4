"""Packed formats of a storage: sizes, refusals, and C and torch in turn."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
import torch

from engine.kv.format import KvFormat, KvGroup, Layout
from engine.kv.packing import PackedFormat, StoragePacker, packed_format, packers_of
from engine.kv.storage import KvStorage
from engine.kv.transfer import BlockPacker, CpuTransferEngine
from engine.moves import Move
from kernels import reference_kv
from kernels.cpu.build import compile_library
from kernels.reference_kv import PackedName
from tests.bench.kv_moves import HostSlots
from tests.tables import each_row
from tests.unit.engine.kv.transfer_rig import wait_for

NAMES: tuple[PackedName, ...] = get_args(PackedName)
FORMAT = KvFormat(2, 2, 32, 16, torch.bfloat16)
CPU = torch.device("cpu")


def storage(dtype: torch.dtype = torch.bfloat16, layout: Layout = "slots") -> KvStorage:
    """Return three blocks of noise; as bits any layout is as good."""
    kv = KvStorage(msgspec.structs.replace(FORMAT, dtype=dtype, layout=layout), 3, CPU)
    kv.data.copy_(torch.randn(kv.data.shape, generator=torch.Generator().manual_seed(4)))
    return kv


def test_formats_say_their_bytes_and_fidelity() -> None:
    """The core counts levels in these bytes, and keeps lossy copies from exact requests."""
    assert packed_format("int8c", FORMAT) == PackedFormat("int8c", 4480, "near")
    assert packed_format("int4c", FORMAT) == PackedFormat("int4c", 2816, "rough")
    assert packed_format("int8t", FORMAT) == PackedFormat("int8t", 4352, "near")
    groups = (KvGroup(0, (0, 1)), KvGroup(4, (2, 3)))
    in_groups = msgspec.structs.replace(FORMAT, groups=groups)
    assert packed_format("int8c", in_groups) == packed_format("int8c", FORMAT), "a block's"


@each_row(
    ("name", "change", "message"),
    [
        ("int2", {}, "no packed format 'int2'; expected one of: int8c, int4c, int8t"),
        ("int4c", {"head_dim": 80}, "a power of two; this model's have 80; int8c takes any"),
        ("int8c", {"parts": 1}, "this model keeps latents"),
        ("int8c", {"block_size": 32}, "blocks of 16 tokens; these have 32"),
        ("int8t", {"dtype": torch.int8}, "this pool is int8t, copied as it is"),
    ],
)
def test_pools_that_a_format_does_not_fit_are_refused(
    name: str, change: dict[str, object], message: str
) -> None:
    """At the start, by name: not when the first block is packed."""
    with pytest.raises(ValueError, match=message):
        packed_format(name, msgspec.structs.replace(FORMAT, **change))


@each_row("name", NAMES)
@each_row("layout", ["slots", "panels"])
@each_row("dtype", [torch.bfloat16, torch.float32])
def test_c_and_torch_write_the_same_bytes(
    name: PackedName, layout: Layout, dtype: torch.dtype
) -> None:
    """A record that a machine with a compiler wrote is read by one without."""
    kv = storage(dtype, layout)
    plain, fast = StoragePacker(kv, name), StoragePacker(kv, name, compile_library())
    first = np.zeros(plain.block_bytes, np.uint8)
    second = np.ones(plain.block_bytes, np.uint8)
    plain.pack(0, first)
    fast.pack(0, second)
    plain.unpack(first, 1)
    fast.unpack(first, 2)

    assert np.array_equal(first, second)
    assert torch.equal(kv.data[1], kv.data[2])


def test_a_storage_has_the_packers_that_fit_it() -> None:
    """A model that one format refuses still has the others."""
    wide = KvStorage(msgspec.structs.replace(FORMAT, head_dim=80), 1, CPU)
    latents = KvStorage(msgspec.structs.replace(FORMAT, parts=1), 1, CPU)

    assert set(packers_of(storage())) == set(NAMES)
    assert set(packers_of(wide, compile_library())) == {"int8c", "int8t"}
    assert packers_of(latents) == {}
    int8 = KvStorage(msgspec.structs.replace(FORMAT, dtype=torch.int8), 1, CPU)
    assert packers_of(int8, compile_library()) == {}


def test_a_space_of_another_size_is_refused() -> None:
    """C would write behind its end."""
    packer = StoragePacker(storage(), "int8c")

    with pytest.raises(ValueError, match="4479 bytes for a packed block; expected 4480"):
        packer.pack(0, np.zeros(4479, np.uint8))


@pytest.mark.parametrize("library", [None, compile_library()])
def test_packed_blocks_move_through_the_transfer_engine(library: Path | None) -> None:
    """A move with a format packs into the slot, and back; a block with a NaN fails alone."""
    kv = storage()
    kv.data[1].fill_(torch.nan)
    packers: dict[str, BlockPacker] = {name: StoragePacker(kv, name, library) for name in NAMES}
    memory = HostSlots(3, kv.format.block_bytes)
    ended = threading.Semaphore(0)
    engine = CpuTransferEngine(kv, memory, packers=packers, on_moved=ended.release)
    before = kv.data[0].clone()
    engine.submit([
        Move(1, "offload", 0, 0, format="int8c"),
        Move(2, "offload", 1, 1, format="int8c"),
        Move(3, "load", 2, 0, format="int8c"),
    ])  # fmt: skip
    wait_for(ended, 3)
    moved = engine.poll()
    engine.close()

    assert [outcome.is_done for outcome in moved] == [True, False, True]
    assert [outcome.is_unpackable for outcome in moved] == [False, True, False]
    assert {one.name: one.fidelity for one in engine.formats} == {
        "": "exact", "int8c": "near", "int4c": "rough", "int8t": "near",
    }  # fmt: skip
    packed = reference_kv.pack(before, "int8c")
    expected = reference_kv.unpack(packed, "int8c", (2, 2, 32), torch.bfloat16)
    assert torch.equal(kv.data[2], expected)
