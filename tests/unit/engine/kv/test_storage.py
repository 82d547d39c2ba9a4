"""KV storage and format: copies, sizes and names."""

from __future__ import annotations

import mmap
from pathlib import Path

import msgspec
import pytest
import torch

from engine.errors import ModelError
from engine.kv.format import KvFormat, Layout, kv_format
from engine.kv.storage import KvStorage, runs_of
from engine.model_store.architecture import Latent
from engine.plan import BlockCopy
from tests.models import tiny_config
from tests.tables import each_row

CPU = torch.device("cpu")


def storage(layout: Layout = "slots") -> KvStorage:
    """Return six blocks, every value different."""
    kv = KvStorage(kv_format(tiny_config(), torch.float32, 16, layout), 6, CPU)
    kv.data.copy_(torch.arange(kv.data.numel()).view_as(kv.data))
    return kv


def test_copy_takes_filled_slots_of_every_layer_and_head() -> None:
    """Slots behind the copied ones may already hold another sequence's next token."""
    kv = storage()
    before = kv.data.clone()

    kv.copy([BlockCopy(src=1, dst=4, tokens=5)])

    assert torch.equal(kv.data[4, :, :, :, :5], before[1, :, :, :, :5])
    assert torch.equal(kv.data[4, :, :, :, 5:], before[4, :, :, :, 5:])
    assert torch.equal(kv.data[[0, 1, 2, 3, 5]], before[[0, 1, 2, 3, 5]])


def test_copies_run_in_order() -> None:
    """A fork of a fork reads the block that the first copy wrote."""
    kv = storage()
    before = kv.data.clone()

    kv.copy([BlockCopy(0, 1, 16), BlockCopy(1, 2, 16), BlockCopy(3, 1, 16)])

    assert torch.equal(kv.data[2], before[0])
    assert torch.equal(kv.data[1], before[3])


@each_row(
    ("copies", "runs"),
    [
        ([(0, 1), (0, 2), (3, 4)], [3]),
        ([(0, 1), (1, 2)], [1, 1]),
        ([(1, 2), (3, 1)], [1, 1]),
        ([(0, 1), (2, 1)], [1, 1]),
        ([(0, 1), (1, 2), (3, 1)], [1, 1, 1]),
    ],
)
def test_copies_that_share_a_written_block_are_not_made_at_once(
    copies: list[tuple[int, int]], runs: list[int]
) -> None:
    """A GPU makes all copies of a run in no order."""
    found = list(runs_of([BlockCopy(src, dst, 16) for src, dst in copies]))

    assert [len(run) for run in found] == runs
    assert [(copy.src, copy.dst) for run in found for copy in run] == copies


def test_copy_takes_whole_blocks_of_panels() -> None:
    """In this layout a slot is not contiguous, and no sequence reads slots behind its end."""
    kv = storage("panels")
    before = kv.data.clone()

    kv.copy([BlockCopy(src=1, dst=4, tokens=5)])

    assert torch.equal(kv.data[4], before[1])


def test_copy_takes_whole_int8_blocks() -> None:
    """A token's scales lie behind all values of their head."""
    kv = KvStorage(kv_format(tiny_config(), torch.int8, 16), 6, CPU)
    kv.data.copy_(torch.arange(kv.data.numel()).view_as(kv.data) % 127)
    before = kv.data.clone()

    kv.copy([BlockCopy(src=1, dst=4, tokens=5)])

    assert torch.equal(kv.data[4], before[1])
    assert torch.equal(kv.data[[0, 1, 2, 3, 5]], before[[0, 1, 2, 3, 5]])


def test_int8_takes_a_byte_a_value_and_two_a_token_and_head() -> None:
    """1,064,960 bytes for Llama 3's 8B shape, where bf16 takes 2,097,152."""
    form = KvFormat(32, 8, 128, 16, torch.int8)

    assert form.block_bytes == 1_064_960
    assert (form.name, form.fidelity) == ("int8t", "near")


def test_int8_of_latents_is_refused_by_name() -> None:
    """A latent is key and value in one, and has no path in 8 bits."""
    latent = Latent(rank=32, nope=32, rope=16, value=32)
    config = msgspec.structs.replace(tiny_config(), latent=latent)
    with pytest.raises(ModelError, match=r"engine.kv_dtype is int8.*expected auto, bf16 or fp32"):
        kv_format(config, torch.int8, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_storage_takes_block_bytes_per_block(dtype: torch.dtype) -> None:
    """The number of blocks in the pool is computed from `block_bytes`."""
    kv = KvStorage(kv_format(tiny_config(), dtype, 16), 3, CPU)

    assert kv.data.dtype == dtype
    assert kv.data.nbytes == 3 * kv.format.block_bytes
    assert not kv.data.any()


def test_formats_with_different_bytes_have_different_names() -> None:
    """The name is part of every cache namespace: blocks are never read in another format."""
    formats: list[KvFormat] = [
        kv_format(tiny_config(), dtype, 16, layout)
        for dtype in (torch.float32, torch.bfloat16, torch.int8)
        for layout in ("slots", "panels")
    ]

    assert len({f.name for f in formats}) == 6


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_new_storage_is_zero_and_takes_no_memory_before_use() -> None:
    """A start does not wait for the whole pool to be written."""
    form = kv_format(tiny_config(), torch.float32, 16)
    blocks = 2**29 // form.block_bytes
    before = resident_bytes()

    kv = KvStorage(form, blocks, CPU)

    assert kv.data.shape[0] == blocks
    assert resident_bytes() - before < 2**26
    assert not kv.data[-1].any()


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
