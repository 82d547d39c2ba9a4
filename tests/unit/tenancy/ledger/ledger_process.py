"""The ledger's process, held by a test: frames in, frames out, and its life."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tenancy.ledger.child_process import FrameReader, packed
from tenancy.ledger.protocol import BatchResult, FromWriter, Open, error_of, read_from_writer
from tenancy.ledger.transactions import Item

ROOT = Path(__file__).parents[4]
PATIENCE_S = 60.0


class Process:
    """The process, and the gateway's end of its socket."""

    def __init__(self, process: subprocess.Popen[bytes], wire: socket.socket) -> None:
        self.process = process
        self.wire = wire
        self._reader = FrameReader()
        self._heard: list[FromWriter] = []

    def say(self, message: Open | list[Item]) -> None:
        """Send it, and wait for nothing."""
        self.wire.sendall(packed(message))

    def hear(self) -> FromWriter:
        """Its next word."""
        while not self._heard:
            data = self.wire.recv(2**16)
            assert data, "it has ended"
            self._heard += map(read_from_writer, self._reader.feed(data))
        return self._heard.pop(0)

    def write(self, *items: Item) -> list[str]:
        """For each item the code of its refusal, or nothing."""
        self.say(list(items))
        codes: list[str] = []
        while len(codes) < len(items):
            answered = self.hear()
            assert isinstance(answered, BatchResult)
            errors = {at: error_of(failure) for at, failure in answered.refused.items()}
            codes += [errors[at].code if at in errors else "" for at in range(answered.count)]
        return codes

    def end(self) -> int:
        """Nobody is at the other end any more: its exit status."""
        self.wire.close()
        return self.process.wait(PATIENCE_S)


@contextmanager
def ledger_process() -> Iterator[Process]:
    """A process that has not been told which database; killed if it is still there at the end."""
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tenancy.ledger.process"],
            stdin=theirs.fileno(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
    with process, ours:
        yield Process(process, ours)
        process.kill()
