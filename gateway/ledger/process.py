"""The ledger's writer as a process: `python -m gateway.ledger.process`, started by a gateway.

Its standard input is a socket (`engine.wire`). The first frame names the database;
the process then writes the items that have arrived, in one transaction per batch, and answers once
per commit. When the gateway closes its end for any reason, the process writes the items it was
sent, closes the remaining holds, and exits; only SIGKILL ends it before. One thread, which waits
for the socket or for the disk. It knows no HTTP. `gateway.ledger.client` is the other end.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path

from engine.processes import run_child
from engine.wire import receive, send
from gateway.ledger.protocol import (
    BatchResult,
    NotOpened,
    Opened,
    failure_of,
    read_items,
    read_open,
)
from tenancy.errors import StoreError
from tenancy.ledger.transactions import Item
from tenancy.ledger.writer import BATCH_MAX, Answers, LedgerWriter
from tenancy.storage.backends import open_store
from tenancy.types import WallClock, wall_ms

CLAIM_TIMEOUT_S = 5.0
"""Seconds that a new writer waits for the process of a killed gateway to finish."""


def serve(wire: socket.socket, environment: Mapping[str, str], clock: WallClock) -> int:
    """Write the ledger until the gateway closes its end. Returns the exit status.

    `environment`: may hold passwords of database servers.
    """
    received = receive(wire)
    frames = next(received, None)
    if frames is None:
        return 0
    opening = read_open(frames[0])
    try:
        store = open_store(opening.place, Path(opening.folder), environment)
    except StoreError as error:
        send(wire, NotOpened(failure_of(error)))
        return 1
    with closing(store):
        try:
            writer = LedgerWriter(
                store,
                clock,
                living=frozenset(opening.living),
                successor_of=opening.successor_of,
                patience_s=CLAIM_TIMEOUT_S,
                gateway=opening.gateway,
            )
        except StoreError as error:
            send(wire, NotOpened(failure_of(error)))
            return 1
        send(wire, Opened(writer.writer_id, writer.interrupted, writer.found_epoch))
        for items in _batches(chain([frames[1:]], received)):
            send(wire, _batch_result(writer.write(items)))
            writer.run_maintenance()
        with suppress(StoreError):  # the next start closes the holds
            writer.close_own_holds()
        writer.close()
    return 0


def _batches(received: Iterable[list[bytes]]) -> Iterator[list[Item]]:
    """Yield the items of each read, at most BATCH_MAX at a time.

    Waiting for more would only add latency: while a commit waits for the disk, the next batch
    gathers in the socket.
    """
    for frames in received:
        items = [item for frame in frames for item in read_items(frame)]
        for at in range(0, len(items), BATCH_MAX):
            yield items[at : at + BATCH_MAX]


def _batch_result(answers: Answers) -> BatchResult:
    if not any(answers):
        return BatchResult(len(answers))
    refused = {at: failure_of(error) for at, error in enumerate(answers) if error is not None}
    return BatchResult(len(answers), refused)


def main() -> int:
    """Serve the gateway that started this process."""
    return run_child("ledger", lambda wire: serve(wire, os.environ, wall_ms))


if __name__ == "__main__":
    sys.exit(main())
