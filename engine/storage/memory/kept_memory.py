"""Host memory that outlives the engine: an arena and its slot table, in files of the gateway.

The gateway makes two empty memory files and gives them to each engine that it starts
(`engine.client.host_memory`). The first engine sizes them. The next one takes them over if they are
of the same *shape*: model, format, number and size of slots. Otherwise it empties them first.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress

import xxhash

from engine.moves import SlotLayout
from engine.storage.memory.arena import HostArena, is_sound
from engine.storage.memory.slot_table import SlotTable, table_bytes

BOOT_CLOCK = time.CLOCK_BOOTTIME
"""Seconds since the machine's start: one clock for all processes, which nothing sets back, and
which ends when host memory does."""

READINGS = 4


def boot_later_s() -> float:
    """Return by how many seconds the boot clock is ahead of `time.monotonic`: it counts while the
    machine sleeps, too. Of some pairs of readings the one counts between which least time passed,
    so that two answers differ by microseconds where the thread did not run in between.
    """
    found: list[tuple[float, float]] = []
    for _ in range(READINGS):
        before_s, boot_s = time.monotonic(), time.clock_gettime(BOOT_CLOCK)
        after_s = time.monotonic()
        found.append((after_s - before_s, boot_s - (before_s + after_s) / 2))
    return min(found)[1]


class KeptMemory:
    """An arena and its table, as one engine has them.

    `generation`: the number of that engine. `is_new`: it found nothing to take over.
    """

    def __init__(self, arena_fd: int, table_fd: int, layout: SlotLayout, shape: str) -> None:
        """Take over what an engine of the same `shape` has left; otherwise begin anew.

        Owns both descriptors, also where it fails. Raises OSError if the machine gives no memory,
        and ValueError for no slots.
        """
        fingerprint = xxhash.xxh3_128_digest(f"{layout} {shape}".encode())
        slots = layout.slots if is_sound(layout) else 0
        try:
            sizes = (max(0, layout.memory_bytes), table_bytes(slots))
            found = (os.fstat(arena_fd).st_size, os.fstat(table_fd).st_size)
            generations = _generations(table_fd)
            if found != sizes or not _is_of(table_fd, slots, fingerprint):
                for fd, size in zip((table_fd, arena_fd), reversed(sizes), strict=True):
                    os.ftruncate(fd, 0)  # gives the pages back
                    os.ftruncate(fd, size)
            self._map = mmap.mmap(table_fd, sizes[1])
        except BaseException:
            os.close(arena_fd)
            raise
        finally:
            os.close(table_fd)
        with suppress(OSError):  # its runs are what prompts say
            self._map.madvise(mmap.MADV_DONTDUMP)
        try:
            self.arena = HostArena(arena_fd, layout)
        except BaseException:
            self._map.close()
            raise
        self.later_s: Callable[[], float] = boot_later_s
        self.table = SlotTable(self._map, slots)
        self.is_new = not self.table.is_of(fingerprint)
        if self.is_new:
            self.table.begin(fingerprint, generations)
        self.generation = self.table.next_generation()

    def is_alone(self) -> bool:
        """Return whether no process of an earlier engine uses the memory any more: until then no
        slot may be written that such a process may read or write."""
        return not self.arena.is_used_before(self.generation)

    def close(self) -> None:
        """Unmap arena and table; the gateway has both. Safe to repeat."""
        self.arena.close()
        self._map.close()


def _generations(table_fd: int) -> int:
    """Return how many engines have had a table of any shape: locks of their processes count on."""
    if os.fstat(table_fd).st_size < table_bytes(1):
        return 0
    with mmap.mmap(table_fd, table_bytes(1)) as memory:
        return SlotTable(memory, 1).generation


def _is_of(table_fd: int, slots: int, fingerprint: bytes) -> bool:
    with mmap.mmap(table_fd, table_bytes(slots)) as memory:
        return SlotTable(memory, slots).is_of(fingerprint)
