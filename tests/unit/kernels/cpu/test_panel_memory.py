"""Memory of packed weights: where tensors lie, and how long."""

from __future__ import annotations

import gc
import mmap
import sys
from pathlib import Path

import pytest
import torch

from kernels.cpu.panel_memory import CHUNK_BYTES, HUGE_PAGE_BYTES, LINE_BYTES, PanelMemory

SIZES = (1, 15, 16, 17, 1000, 4096)


def test_tensors_lie_apart_at_starts_of_lines() -> None:
    """A tensor that is written changes no other, and a vector lies in one line."""
    memory = PanelMemory()
    taken = [memory.take(size, torch.bfloat16) for size in SIZES]

    for number, tensor in enumerate(taken):
        tensor.fill_(number)

    for number, (tensor, size) in enumerate(zip(taken, SIZES, strict=True)):
        assert tensor.shape == (size,)
        assert tensor.data_ptr() % LINE_BYTES == 0
        assert tensor.eq(number).all()


def test_chunks_begin_with_a_huge_page() -> None:
    """A matrix that no chunk holds has one of its own, and so has the one behind a full chunk."""
    memory = PanelMemory()
    whole = memory.take(CHUNK_BYTES, torch.uint8)
    next_one = memory.take(8, torch.float32)
    large = memory.take(CHUNK_BYTES + 1, torch.uint8)

    starts = [tensor.data_ptr() % HUGE_PAGE_BYTES for tensor in (whole, next_one, large)]
    assert starts == [0, 0, 0]
    large[-1] = 1


def test_a_chunk_lives_as_long_as_its_tensors() -> None:
    """And no longer: models come and go."""
    memory = PanelMemory()
    taken = memory.take(8, torch.float32)
    taken.fill_(3)
    before = mapped_bytes()

    del memory
    gc.collect()
    assert taken.eq(3).all()
    del taken
    gc.collect()

    if sys.platform == "linux":
        assert before - mapped_bytes() >= CHUNK_BYTES


def mapped_bytes() -> int:
    """Return the size of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def test_small_pages_serve_where_the_system_has_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class SmallPages(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", SmallPages)

    assert PanelMemory().take(100, torch.float32).eq(0).all()


def test_nothing_takes_no_memory() -> None:
    assert PanelMemory().take(0, torch.float32).shape == (0,)
