"""A disk that fails: system calls whose outcome the test decides."""

from __future__ import annotations

import os
from collections.abc import Sequence
from threading import Event

from engine.storage.slabs.slabs import DiskCalls


class FailingCalls(DiskCalls):
    """System calls that fail, wait at a gate, or take fewer bytes, on request."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: dict[str, int] = {}
        self.bytes_max = 2**40
        self.gates: dict[str, Event] = {}
        self.has_come = Event()

    def _check(self, call: str) -> None:
        if call in self.gates:
            self.has_come.set()
            assert self.gates[call].wait(60.0), "the gate was never opened"
        if call in self.fails:
            raise OSError(self.fails[call], os.strerror(self.fails[call]))

    def lay_out(self, fd: int, length: int) -> None:
        self._check("lay_out")
        super().lay_out(fd, length)

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        self._check("write")
        data = b"".join(parts)[: self.bytes_max]
        return super().write(fd, [data], offset)

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._check("read")
        return super().read(fd, buffer[: self.bytes_max], offset)

    def sync(self, fd: int) -> None:
        self._check("sync")
        super().sync(fd)

    def erase(self, fd: int, offset: int, length: int) -> None:
        self._check("erase")
        super().erase(fd, offset, length)
