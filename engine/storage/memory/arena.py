"""Host memory for copies of KV blocks, shared between the engine and the storage process.

It is one anonymous file (`memfd`), mapped by both processes, so it lives as long as either, and as
long as the gateway where that keeps it (`kept_memory`). Its layout says where a slot of a size
lies; the arena knows no block, no record and no free list: its caller decides which slot holds
what, and of what size it is. Core dumps leave it out, since it holds what prompts say.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress

from engine.moves import SlotLayout, stride_of

PIDS = 2**22
"""Bound of process ids on Linux: each process locks a byte of its own."""


class HostArena:
    """Slots as `layout` has them. Pages are taken from the machine when first written."""

    def __init__(self, fd: int, layout: SlotLayout) -> None:
        """Map an arena; `fd` belongs to it from now on.

        Raises OSError, and ValueError for a layout without slots or a file that is too small.
        """
        if not is_sound(layout):
            os.close(fd)
            raise ValueError(f"{layout}; expected room for a slot of at least a byte")
        self.fd = fd
        self.layout = layout
        length = layout.memory_bytes
        try:
            has = os.fstat(fd).st_size
            if has < length:
                raise ValueError(f"arena of {has} bytes; expected at least {length}")
            self._map = mmap.mmap(fd, length, mmap.MAP_SHARED)
        except BaseException:
            os.close(fd)
            raise
        with suppress(OSError):  # a kernel without this advice dumps the memory
            self._map.madvise(mmap.MADV_DONTDUMP)
        self._view = memoryview(self._map)
        self._keeps_pages = False

    @classmethod
    def create(cls, layout: SlotLayout) -> HostArena:
        """Make an arena. Raises OSError if the machine gives no memory, ValueError for no slots."""
        fd = os.memfd_create("trunkline-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, max(0, layout.memory_bytes))
            # A shorter file would end each process that touches the missing pages.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, layout)

    def view(self, slot: int, slot_bytes: int) -> memoryview:
        """Return the bytes of a slot of this size, writable. Raises IndexError."""
        start = self.layout.offset(slot, slot_bytes)
        return self._view[start : start + slot_bytes]

    def whole(self) -> memoryview:
        """Return all bytes, writable. They begin on a page."""
        return self._view[:]

    def keep_pages(self) -> None:
        """Let `wipe` write zeros and give no page back to the machine: a device that has pinned a
        page goes on writing to it, where nothing would read it any more."""
        self._keeps_pages = True

    def wipe(self, slot: int, slot_bytes: int) -> None:
        """Make a slot's bytes zeros, up to the next slot; whole pages go back to the machine, where
        they are not kept. Raises IndexError."""
        start = self.layout.offset(slot, slot_bytes)
        end = start + stride_of(slot_bytes)
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = max(first, end // mmap.PAGESIZE * mmap.PAGESIZE)
        if self._keeps_pages:
            self._zero(first, last)
        elif last > first:
            try:
                self._map.madvise(mmap.MADV_REMOVE, first, last - first)
            except OSError:  # a kernel without it
                self._zero(first, last)
        self._zero(start, min(first, end))
        self._zero(last, end)

    def lock_until_exit(self, generation: int) -> None:
        """Say that this process uses the memory for the engine of this generation, until it ends.

        The lock goes with the process, or when it closes a descriptor of the memory: then no thread
        of it may write any more. Raises OSError.
        """
        fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, generation * PIDS + os.getpid())

    def is_used_before(self, generation: int) -> bool:
        """Return whether a process uses the memory for an engine of an earlier generation."""
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, generation * PIDS, 0)
        except OSError:
            return True
        fcntl.lockf(self.fd, fcntl.LOCK_UN, generation * PIDS, 0)
        return False

    def _zero(self, start: int, end: int) -> None:
        if end > start:
            self._view[start:end] = bytes(end - start)

    def close(self) -> None:
        """Unmap the memory; it stays while another process or a view holds it. Safe to repeat."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._view.release()
        with suppress(BufferError):  # a view is alive: the memory goes with it
            self._map.close()


def is_sound(layout: SlotLayout) -> bool:
    """Return whether a layout has a slot. O(1)."""
    return (
        min(layout.slot_bytes_min, layout.slab_bytes, layout.memory_bytes) > 0 and layout.slots > 0
    )
