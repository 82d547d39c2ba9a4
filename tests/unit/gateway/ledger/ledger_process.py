"""A ledger process for tests: frames in, frames out."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.wire import FrameReader, encode_frame
from gateway.ledger.protocol import BatchResult, FromWriter, Open, error_of, read_from_writer
from tenancy.ledger.transactions import Item

ROOT = Path(__file__).parents[4]
PATIENCE_S = 60.0


class Process:
    """The process, and the gateway's end of its socket."""

    def __init__(self, process: subprocess.Popen[bytes], wire: socket.socket) -> None:
        self.process = process
        self.wire = wire
        self._reader = FrameReader()
        self._messages: list[FromWriter] = []

    def send(self, message: Open | list[Item]) -> None:
        """Send a message without waiting."""
        self.wire.sendall(encode_frame(message))

    def receive(self) -> FromWriter:
        """Return the process's next message."""
        while not self._messages:
            data = self.wire.recv(2**16)
            assert data, "the process has exited"
            self._messages += map(read_from_writer, self._reader.feed(data))
        return self._messages.pop(0)

    def write(self, *items: Item) -> list[str]:
        """Write items; return the error code of each, or ""."""
        self.send(list(items))
        codes: list[str] = []
        while len(codes) < len(items):
            answered = self.receive()
            assert isinstance(answered, BatchResult)
            errors = {at: error_of(failure) for at, failure in answered.refused.items()}
            codes += [errors[at].code if at in errors else "" for at in range(answered.count)]
        return codes

    def end(self) -> int:
        """Close the gateway's end; return the exit status."""
        self.wire.close()
        return self.process.wait(PATIENCE_S)


@contextmanager
def ledger_process() -> Iterator[Process]:
    """A process that has not received a first message; killed at the end if it still runs."""
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway.ledger.process"],
            stdin=theirs.fileno(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
    with process, ours:
        yield Process(process, ours)
        process.kill()
