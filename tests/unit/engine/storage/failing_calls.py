"""A disk that fails: system calls whose outcome the test decides."""

from __future__ import annotations

import os
from collections.abc import Sequence
from threading import Event

from engine.storage.slabs.slabs import DiskCalls


class Gates:
    """Calls that wait, by name, until the test lets them pass."""

    def __init__(self) -> None:
        super().__init__()
        self._gates: dict[str, Event] = {}
        self._has_come = Event()

    def shut(self, call: str, gate: Event | None = None) -> Event:
        """Have these calls wait from now on; they go on when the event is set."""
        self._has_come.clear()
        self._gates[call] = gate or Event()
        return self._gates[call]

    def await_call(self) -> None:
        """Wait until a call waits."""
        assert self._has_come.wait(60.0), "no call came"

    def open_all(self) -> None:
        """Let all calls pass, those that wait too."""
        for gate in self._gates.values():
            gate.set()
        self._gates.clear()

    def wait_for_gate(self, call: str) -> None:
        """Wait where the gate is shut."""
        if (gate := self._gates.get(call)) is not None:
            self._has_come.set()
            assert gate.wait(60.0), "the gate was never opened"


class FailingCalls(Gates, DiskCalls):
    """System calls that fail with an error number, wait, or take fewer bytes, on request."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: dict[str, int] = {}
        self.bytes_max = 2**40

    def _check(self, call: str) -> None:
        self.wait_for_gate(call)
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
