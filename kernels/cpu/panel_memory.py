"""Memory for packed weights, in huge pages where the operating system grants them.

A decoded token reads every weight once. In pages of 4 KiB the CPU looks up a page for each 64 lines
of the cache and stops reading ahead at its end; in pages of 2 MiB it does neither. It knows no
weight and no layout. `engine.models.packing` packs into it.
"""

from __future__ import annotations

import contextlib
import mmap
import sys

import torch

HUGE_PAGE_BYTES = 2 * 2**20
CHUNK_BYTES = 64 * 2**20
"""Bytes that are mapped at once. The system gives memory only to what is written of them."""
LINE_BYTES = 64


class PanelMemory:
    """Tensors one behind the other in chunks of huge pages. A chunk lives as long as a tensor of
    it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, values: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros, [values] of `dtype`, at the start of a cache line. Cost: at most half of a
        matrix's page and the rest of a chunk that is too small for it, of which no page is used.
        Raises OSError without memory."""
        size = values * dtype.itemsize
        if self._used + size > len(self._chunk):
            self._chunk, self._used = _huge_pages(max(size, CHUNK_BYTES)), 0
        taken = self._chunk[self._used : self._used + size].view(dtype)
        self._used += -(-size // LINE_BYTES) * LINE_BYTES
        return taken


def _huge_pages(size: int) -> torch.Tensor:
    """Return zeros, [size] uint8, from the start of a huge page; in small pages where the system
    has no others."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # the system is built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    mapped = torch.frombuffer(memory, dtype=torch.uint8)
    return mapped[-mapped.data_ptr() % HUGE_PAGE_BYTES :][:size]
