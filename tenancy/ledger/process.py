"""The ledger process: `python -m tenancy.ledger.process SOCKET`, started by a gateway.

SOCKET is the number of its end of a socket pair that it has inherited. It opens the database that
it is told first, writes what comes, as much at once as is there, and answers once for each commit.
When the other end closes, however that came, it finishes what was sent, closes what nobody will
settle any more, and goes; no signal but SIGKILL ends it before. One thread, which waits for the
socket or for the disk; it knows no request and no HTTP. `gateway.ledger.client` is the other end.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path

from tenancy.errors import StoreError
from tenancy.ledger.child_process import run
from tenancy.ledger.protocol import (
    Answered,
    FrameReader,
    FromWriter,
    NotOpened,
    Open,
    Opened,
    failure_of,
    packed,
    read_items,
    read_open,
)
from tenancy.ledger.transactions import Item
from tenancy.ledger.writer import BATCH_MAX, Answers, LedgerWriter
from tenancy.storage.backends import open_store
from tenancy.types import WallClock

PATIENCE_S = 5.0
"""How long the process of a gateway that was killed may take to finish."""

READ_BYTES = 2**16
"""As much as a transaction of small items."""


def serve(wire: socket.socket, environment: Mapping[str, str], clock: WallClock) -> int:
    """Keep the ledger until the other end closes. Returns the exit status. `environment`: where
    passwords for servers may stand."""
    arriving = _Arriving(wire)
    opening = arriving.opening()
    if opening is None:
        return 0
    try:
        store = open_store(opening.place, Path(opening.folder), environment)
    except StoreError as error:
        _say(wire, NotOpened(failure_of(error)))
        return 1
    with closing(store):
        try:
            writer = LedgerWriter(
                store,
                clock,
                living=frozenset(opening.living),
                successor_of=opening.successor_of,
                patience_s=PATIENCE_S,
            )
        except StoreError as error:
            _say(wire, NotOpened(failure_of(error)))
            return 1
        _say(wire, Opened(writer.writer_id, writer.interrupted, writer.found_epoch))
        for items in arriving.batches():
            _say(wire, _answered(writer.write(items)))
            writer.look_after()
        with suppress(StoreError):  # the next start will
            writer.abandon()
        writer.close()
    return 0


class _Arriving:
    """What the gateway sends, until there is no more."""

    def __init__(self, wire: socket.socket) -> None:
        self._wire = wire
        self._reader = FrameReader()
        self._frames: deque[bytes] = deque()
        self._items: list[Item] = []
        self._is_over = False

    def opening(self) -> Open | None:
        """The first frame; None for an end before it."""
        while not self._frames and not self._is_over:
            self._receive()
        return read_open(self._frames.popleft()) if self._frames else None

    def batches(self) -> Iterator[list[Item]]:
        """As many items as are there, each time one is. Waiting for more would only add latency:
        while a commit waits for the disk, the next batch gathers by itself."""
        while True:
            while self._frames:
                self._items += read_items(self._frames.popleft())
            if self._items:
                batch, self._items = self._items[:BATCH_MAX], self._items[BATCH_MAX:]
                yield batch
            elif self._is_over:
                return
            else:
                self._receive()

    def _receive(self) -> None:
        try:
            data = self._wire.recv(READ_BYTES)
        except ConnectionError:  # it was killed, with answers that it had not read
            data = b""
        self._is_over = not data
        self._frames.extend(self._reader.feed(data))


def _answered(answers: Answers) -> Answered:
    if not any(answers):
        return Answered(len(answers))
    refused = {at: failure_of(error) for at, error in enumerate(answers) if error is not None}
    return Answered(len(answers), refused)


def _say(wire: socket.socket, message: FromWriter) -> None:
    try:
        wire.sendall(packed(message))
    except OSError:
        return  # nobody is there to hear it any more


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


def main() -> int:
    """Serve the gateway that started this."""
    return run("ledger", lambda wire: serve(wire, os.environ, _wall_ms))


if __name__ == "__main__":
    sys.exit(main())
