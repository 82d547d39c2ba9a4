"""KV storage: what a copy copies, and what a format promises."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Literal

import pytest
import torch

from engine.kv.storage import KvFormat, KvStorage, kv_format
from engine.plan import BlockCopy
from tests.models import tiny_config

CPU = torch.device("cpu")


def storage(layout: Literal["slots", "panels"] = "slots") -> KvStorage:
    """Six blocks, every value different."""
    kv = KvStorage(kv_format(tiny_config(), torch.float32, 16, layout), 6, torch.float32, CPU)
    kv.data.copy_(torch.arange(kv.data.numel()).view_as(kv.data))
    return kv


def test_a_copy_takes_the_filled_slots_of_every_layer_and_head() -> None:
    """The rest of the target may already belong to somebody's next token."""
    kv = storage()
    before = kv.data.clone()

    kv.copy([BlockCopy(src=1, dst=4, tokens=5)])

    assert torch.equal(kv.data[4, :, :, :, :5], before[1, :, :, :, :5])
    assert torch.equal(kv.data[4, :, :, :, 5:], before[4, :, :, :, 5:])
    assert torch.equal(kv.data[[0, 1, 2, 3, 5]], before[[0, 1, 2, 3, 5]])


def test_copies_run_in_order() -> None:
    """A fork of a fork copies what the first copy has just made."""
    kv = storage()
    before = kv.data.clone()

    kv.copy([BlockCopy(0, 1, 16), BlockCopy(1, 2, 16), BlockCopy(3, 1, 16)])

    assert torch.equal(kv.data[2], before[0])
    assert torch.equal(kv.data[1], before[3])


def test_blocks_of_panels_are_copied_whole() -> None:
    """There a slot is no run of memory, and what lies beyond the filled ones is never seen."""
    kv = storage("panels")
    before = kv.data.clone()

    kv.copy([BlockCopy(src=1, dst=4, tokens=5)])

    assert torch.equal(kv.data[4], before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_is_as_large_as_it_says(dtype: torch.dtype) -> None:
    """The pool is sized by it."""
    form = kv_format(tiny_config(), dtype, 16)
    kv = KvStorage(form, 3, dtype, CPU)

    assert kv.data.nbytes == 3 * form.block_bytes
    assert not kv.data.any()


def test_formats_that_lay_bytes_differently_have_different_names() -> None:
    """The name is part of every namespace, so that nothing is read as what it is not."""
    forms: list[KvFormat] = [
        kv_format(tiny_config(), dtype, 16, layout)
        for dtype in (torch.float32, torch.bfloat16)
        for layout in ("slots", "panels")
    ]

    assert len({form.name for form in forms}) == 4


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_a_new_storage_is_zero_and_takes_no_memory_before_it_is_used() -> None:
    """A start waits for no block that nobody has asked for."""
    form = kv_format(tiny_config(), torch.float32, 16)
    blocks = 2**29 // form.block_bytes
    before = resident_bytes()

    kv = KvStorage(form, blocks, torch.float32, CPU)

    assert kv.data.shape[0] == blocks
    assert resident_bytes() - before < 2**26
    assert not kv.data[-1].any()


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
