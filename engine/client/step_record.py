"""Record of the requests in the engine's present steps, which outlives the engine's process.

The engine writes it before each step, the gateway reads it after a death: only a request that was
computed then can have caused it. Both map one memory file, since a socket's last bytes are lost
with the process. The record knows no request beyond its id. `engine.server.recorded_runner` writes,
`gateway.engines.keeper` reads.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable

RECORD_BYTES = 2**18
"""Bytes of a record: ids of about 7,000 requests. Further ids are left out."""
_LENGTH = struct.Struct("<I")


class StepRecord:
    """Request ids in shared memory. One process writes, another reads after the writer's end."""

    def __init__(self, fd: int) -> None:
        """Map the memory file `fd`, which the record owns from now on."""
        self.fd = fd
        self._memory = mmap.mmap(fd, RECORD_BYTES)

    @classmethod
    def create(cls) -> StepRecord:
        """Return an empty record in a new memory file. Raises OSError."""
        fd = os.memfd_create("engine-steps")
        os.ftruncate(fd, RECORD_BYTES)
        return cls(fd)

    def write(self, request_ids: Iterable[str]) -> None:
        """Replace the ids. O(their bytes). A reader finds the old ids, the new ones or none."""
        text = "\n".join(request_ids).encode()[: RECORD_BYTES - _LENGTH.size]
        _LENGTH.pack_into(self._memory, 0, 0)
        self._memory[_LENGTH.size : _LENGTH.size + len(text)] = text
        _LENGTH.pack_into(self._memory, 0, len(text))

    def read(self) -> frozenset[str]:
        """Return the ids that were written last."""
        (length,) = _LENGTH.unpack_from(self._memory, 0)
        text = self._memory[_LENGTH.size : _LENGTH.size + length]
        return frozenset(text.decode(errors="replace").splitlines())

    def close(self) -> None:
        """Unmap and close the file."""
        self._memory.close()
        os.close(self.fd)
