"""Host memory for copies of KV blocks, shared between the engine and the storage process.

It is one anonymous file (`memfd`), mapped by both processes, so it lives as long as either. Its
layout says where a slot of a size lies; the arena knows no block, no record and no free list: its
caller decides which slot holds what, and of what size it is. Core dumps leave it out, since it
holds what prompts say.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress

from engine.moves import SlotLayout


class HostArena:
    """Slots as `layout` has them. Pages are taken from the machine when first written."""

    def __init__(self, fd: int, layout: SlotLayout) -> None:
        """Map an arena; `fd` belongs to it from now on. Raises OSError, ValueError."""
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

    @classmethod
    def attach(cls, fd: int, layout: SlotLayout) -> HostArena:
        """Map an arena that another process has made; `fd`: inherited, and owned from now on.

        Raises OSError, and ValueError if the file is smaller than what was said of it.
        """
        return cls(fd, layout)

    def view(self, slot: int, slot_bytes: int) -> memoryview:
        """Return the bytes of a slot of this size, writable. Raises IndexError."""
        start = self.layout.offset(slot, slot_bytes)
        return self._view[start : start + slot_bytes]

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
