"""Heap tuning: the start's objects are frozen, and lie in large pages."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from gateway.gc_tuning import COLLAPSE, THP, collapse, freeze_heap

PAGE = 2**21

AREAS = """\
55f000000000-55f000800000 rw-p 00000000 00:00 0                          [heap]
Size:               8192 kB
Rss:                8192 kB
AnonHugePages:         0 kB
VmFlags: rd wr mr mw me ac
7f0000100000-7f0000900000 rw-p 00000000 00:00 0
Size:               8192 kB
Rss:                4096 kB
7f1000000000-7f1000800000 rw-p 00000000 00:00 0
Size:               8192 kB
Rss:                  12 kB
7f2000000000-7f2000800000 rw-p 00000000 fe:00 5376007                    /usr/lib/library.so
Size:               8192 kB
Rss:                8192 kB
7f3000000000-7f3000800000 r--p 00000000 00:00 0
Size:               8192 kB
Rss:                8192 kB
7f4000000000-7f4000100000 rw-p 00000000 00:00 0
Size:               1024 kB
Rss:                1024 kB
7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0                          [stack]
Size:               8192 kB
Rss:                8192 kB
"""


class Ring:
    """Refers to itself: only the garbage collector can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.slow
def test_frozen_heap_is_not_traversed_and_new_garbage_is_freed() -> None:
    """Traversing the same heap repeatedly was 7 % of a small response; a leak would be worse."""
    before = gc.get_threshold()
    gc.unfreeze()  # conftest freezes what tests leave
    try:
        freeze_heap()
        young, kept = gc.get_threshold()[0], gc.get_freeze_count()
        lost = weakref.ref(Ring())
        others = [Ring() for _ in range(young + 1)]
        is_gone = lost() is None
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()

    assert kept > 10_000
    assert young > before[0]
    assert is_gone
    assert others


def test_requests_large_pages_for_heap_areas_only() -> None:
    """A thread's empty stack would take 2 MiB for its first bytes; the kernel owns a file's
    pages."""
    asked: list[tuple[int, int, int]] = []

    collapse(AREAS, PAGE, lambda *what: asked.append(what))

    assert asked == [
        (0x55F000000000, 0x800000, COLLAPSE),
        (0x7F0000200000, 0x600000, COLLAPSE),
    ]


def _has_large_pages() -> bool:
    """Return whether Linux is 6.1 or later and its operator allows large pages."""
    release = [int(part) for part in re.findall(r"\d+", os.uname().release)[:2]]
    enabled = THP / "enabled"
    return release >= [6, 1] and enabled.exists() and "[never]" not in enabled.read_text()


@pytest.mark.skipif(not _has_large_pages(), reason="this kernel moves nothing to large pages")
def test_heap_moves_to_large_pages() -> None:
    """In a separate process, since the heap's pages stay moved."""
    program = (
        "from pathlib import Path\n"
        "from gateway.gc_tuning import use_large_pages\n"
        "kept = [bytearray(1_000) for _ in range(16_000)]\n"
        "use_large_pages()\n"
        "print(Path('/proc/self/smaps_rollup').read_text())\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )

    large = re.search(r"AnonHugePages: +(\d+) kB", found.stdout)
    assert large is not None
    assert int(large[1]) >= 2 * 1024  # one page; of eight, a machine may have few together
