"""Host memory for copies of KV blocks, shared between the engine and the storage process.

It is one anonymous file (`memfd`) of equal slots, mapped by both processes, so it lives as long as
either, and as long as the gateway where that keeps it (`kept_memory`). The arena knows no block, no
record and no free list: its caller decides which slot holds what. Core dumps leave it out, since it
holds what prompts say.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress

ALIGNMENT = 64
"""Bytes: slots begin at multiples, for the vector instructions that pack and unpack them."""
PIDS = 2**22
"""Bound of process ids on Linux: each process locks a byte of its own."""


class HostArena:
    """Slots of `slot_bytes` bytes each. Pages are taken from the machine when first written."""

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        """Map an arena; `fd` belongs to it from now on. Raises OSError, ValueError."""
        if slots < 1 or slot_bytes < 1:
            os.close(fd)
            raise ValueError(f"arena of {slots} slots of {slot_bytes} bytes; expected at least 1")
        self.fd = fd
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._stride = -(-slot_bytes // ALIGNMENT) * ALIGNMENT
        length = arena_bytes(slots, slot_bytes)
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

    @classmethod
    def create(cls, slots: int, slot_bytes: int) -> HostArena:
        """Make an arena. Raises OSError if the machine gives no memory, ValueError for no slots."""
        fd = os.memfd_create("trunkline-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, arena_bytes(slots, slot_bytes))
            # A shorter file would end each process that touches the missing pages.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, slots, slot_bytes)

    @classmethod
    def attach(cls, fd: int, slots: int, slot_bytes: int) -> HostArena:
        """Map an arena that another process has made; `fd`: inherited, and owned from now on.

        Raises OSError, and ValueError if the file is smaller than what was said of it.
        """
        return cls(fd, slots, slot_bytes)

    def view(self, slot: int) -> memoryview:
        """Return the slot's bytes, writable. Raises IndexError."""
        start = self._start_of(slot)
        return self._view[start : start + self.slot_bytes]

    def wipe(self, slot: int) -> None:
        """Make a slot's bytes zeros; its whole pages go back to the machine. Raises IndexError."""
        start = self._start_of(slot)
        end = start + self.slot_bytes
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = max(first, end // mmap.PAGESIZE * mmap.PAGESIZE)
        if last > first:
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

    def _start_of(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot}; expected 0 to {self.slots - 1}")
        return slot * self._stride

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


def arena_bytes(slots: int, slot_bytes: int) -> int:
    """Return the bytes of an arena."""
    return max(0, slots) * (-(-slot_bytes // ALIGNMENT) * ALIGNMENT)
