"""Analytics as a process: `python -m gateway.analytics.process SOCKET`, started by a gateway.

SOCKET is the number of its end of a socket pair that it has inherited. It adds up what it is told,
and answers what it is asked; when the other end closes, however that came, it goes, and nothing of
it is kept. One thread; it knows no request and no HTTP. `gateway.analytics.client` is the other
end.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import suppress

from gateway.analytics.aggregates import Analytics
from gateway.analytics.protocol import (
    Begin,
    MissedTokens,
    Overview,
    Question,
    Said,
    Tenant,
    Told,
    read_to_analytics,
)
from tenancy.ledger.child_process import run
from tenancy.ledger.protocol import FrameReader, packed

READ_BYTES = 2**16


class _Desk:
    """Analytics by the gateway's clocks: it is as late as the last answer that it was told of."""

    def __init__(self, begin: Begin) -> None:
        self._now_s = self._wall_ms = 0.0
        self._analytics = Analytics(
            lambda: self._now_s,
            lambda: round(self._wall_ms + 1_000 * self._now_s),
            begin.tenants_max,
            begin.classes,
        )

    def take(self, told: Told) -> None:
        """Add them up."""
        self._wall_ms = told.wall_ms
        for self._now_s, facts in told.facts:
            self._analytics.note(facts)

    def answer(self, question: Question) -> object:
        """What a dashboard shows."""
        match question:
            case Overview():
                return self._analytics.overview()
            case Tenant(name, card, blocks):
                return self._analytics.tenant(name, card, blocks)
            case MissedTokens(name, cause):
                return self._analytics.missed_tokens(name, cause)


def serve(wire: socket.socket) -> int:
    """Until the other end closes. Returns the exit status."""
    desk: _Desk | None = None
    for frame in _frames(wire):
        message = read_to_analytics(frame)
        if isinstance(message, Begin):
            desk = _Desk(message)
            continue
        assert desk is not None, "what begins comes first"
        if isinstance(message, Told):
            desk.take(message)
            continue
        with suppress(OSError):  # nobody is there to hear it any more
            wire.sendall(packed(Said(desk.answer(message))))
    return 0


def _frames(wire: socket.socket) -> Iterator[bytes]:
    reader = FrameReader()
    while True:
        try:
            data = wire.recv(READ_BYTES)
        except ConnectionError:  # it was killed, with answers that it had not read
            return
        if not data:
            return
        yield from reader.feed(data)


def main() -> int:
    """Serve the gateway that started this."""
    return run("analytics", serve)


if __name__ == "__main__":
    sys.exit(main())
