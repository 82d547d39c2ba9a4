"""Host memory for copies of KV blocks, shared between the engine and the storage process.

It is one anonymous file (`memfd`) of equal slots, mapped by both processes, so it lives as long as
either. The arena knows no block, no record and no free list: its caller decides which slot holds
what. Core dumps leave it out, since it holds what prompts say.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress

ALIGNMENT = 64
"""Bytes: slots begin at multiples, for the vector instructions that pack and unpack them."""


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
        length = slots * self._stride
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
        stride = -(-slot_bytes // ALIGNMENT) * ALIGNMENT
        fd = os.memfd_create("trunkline-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, max(0, slots * stride))
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
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot}; expected 0 to {self.slots - 1}")
        start = slot * self._stride
        return self._view[start : start + self.slot_bytes]

    def close(self) -> None:
        """Unmap the memory; it stays while another process or a view holds it. Safe to repeat."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._view.release()
        with suppress(BufferError):  # a view is alive: the memory goes with it
            self._map.close()
