"""What a gateway has made by its start, and keeps: modules, a vocabulary, a tokenizer, tables.

The garbage collector need not look at it again, and it lies in pages of two megabytes where the
kernel can do that. An answer touches a little in a thousand places; each of them that was not used
for some microseconds is a walk through page tables, and on a virtual machine through two. It knows
nothing of what is there. `app` settles it before it is ready.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

YOUNG_OBJECTS_MAX = 10_000
"""So many more than went since the last look, before the garbage collector looks at the young."""

THP = Path("/sys/kernel/mm/transparent_hugepage")
COLLAPSE = 25
"""MADV_COLLAPSE, which Linux has since 6.1: what lies in small pages moves to large ones, now."""

Advise = Callable[[int, int, int], object]
"""The kernel's `madvise`: an address, a length and an advice."""


def settle_heap() -> None:
    """What is there by now stays for as long as this process lives: the garbage collector need not
    look at it again, nor at each few hundred objects of the answers on their way. Nearly all of
    them go without it; looking took 7 % of a tiny answer. Takes a tenth of a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX, *gc.get_threshold()[1:])
    _use_large_pages()


def _use_large_pages() -> None:
    """Where the kernel has none, or its operator wants none, nothing happens; nor where it has no
    memory for them."""
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
    """Ask for large pages wherever a heap is. O(what lies there): some 30 ms for 80 MB.

    `areas`: of this process, as /proc/self/smaps says.
    """
    for start, end in _filled(areas):
        start = -(-start // page_bytes) * page_bytes
        end = end // page_bytes * page_bytes
        if start < end:
            advise(start, end - start, COLLAPSE)


def _filled(areas: str) -> Iterator[tuple[int, int]]:
    """Areas of nobody's file of which at least half is there: a thread's stack is empty, and a
    large page for its first bytes would be lost."""
    start = end = 0
    for line in areas.splitlines():
        name, *words = line.split()
        if not name.endswith(":"):
            is_heap = words[0] == "rw-p" and (len(words) == 4 or words[4] == "[heap]")
            start, end = (int(at, 16) for at in name.split("-")) if is_heap else (0, 0)
        elif name == "Rss:" and 2 * 1024 * int(words[0]) >= end - start > 0:
            yield start, end
