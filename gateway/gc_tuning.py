"""Heap tuning after the start: freeze the garbage collector's view, use large pages.

A gateway makes modules, a vocabulary, a tokenizer and tables at its start and keeps them. The
garbage collector need not traverse these objects again, and pages of 2 MiB make them cheap to
reach: an answer touches a few bytes in a thousand places, and each place that was not used for some
microseconds costs a walk through the page tables, on a virtual machine through two. This module
knows no object of the heap. `gateway.app` calls `freeze_heap` before it is ready, and
`use_large_pages` once nothing else starts.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

YOUNG_OBJECTS_MAX = 10_000
"""Net new objects before a collection of the youngest generation."""

THP = Path("/sys/kernel/mm/transparent_hugepage")
COLLAPSE = 25
"""MADV_COLLAPSE (Linux 6.1 and later): move small pages to large ones, synchronously."""

Advise = Callable[[int, int, int], object]
"""The kernel's `madvise`: address, length in bytes, advice."""


def freeze_heap() -> None:
    """Freeze all live objects, and let collections begin. Takes about 0.1 s.

    Call it once, when everything that lives as long as the process exists. Later collections skip
    these objects, and run after `YOUNG_OBJECTS_MAX` new objects, not after a few hundred: reference
    counts free nearly all objects of an answer, and collections took 7 % of a small response.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(YOUNG_OBJECTS_MAX, *gc.get_threshold()[1:])


def use_large_pages() -> None:
    """Move the heap to large pages if the kernel has them and its operator allows them; else do
    nothing.

    Zeroing a page takes 2 to 5 ms on a virtual machine: half a second and more beside a large
    vocabulary. Call it in a thread: others run meanwhile.
    """
    try:
        if "[never]" in (THP / "enabled").read_text():
            return
        page_bytes = int((THP / "hpage_pmd_size").read_text())
        areas = Path("/proc/self/smaps").read_text()
    except (OSError, ValueError):
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    collapse(areas, page_bytes, advise)


def collapse(areas: str, page_bytes: int, advise: Advise) -> None:
    """Ask the kernel for large pages in every heap area. O(bytes): about 30 ms for 80 MB.

    `areas`: text of /proc/self/smaps of this process.
    """
    for start, end in _heap_areas(areas):
        start = -(-start // page_bytes) * page_bytes
        end = end // page_bytes * page_bytes
        if start < end:
            advise(start, end - start, COLLAPSE)


def _heap_areas(areas: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of anonymous areas of which at least half is resident.

    The stack of a thread is nearly empty: a large page for its first bytes would waste memory.
    """
    start = end = 0
    for line in areas.splitlines():
        name, *words = line.split()
        if not name.endswith(":"):
            is_heap = words[0] == "rw-p" and (len(words) == 4 or words[4] == "[heap]")
            start, end = (int(at, 16) for at in name.split("-")) if is_heap else (0, 0)
        elif name == "Rss:" and 2 * 1024 * int(words[0]) >= end - start > 0:
            yield start, end
