"""The analytics process: `python -m gateway.analytics.process`, started by a gateway.

Its standard input is a socket (`engine.wire`). The process aggregates finished
requests and answers questions. It exits when the gateway closes its end, and stores nothing. One
thread; it knows no HTTP. `gateway.analytics.client` is the other end.
"""

from __future__ import annotations

import secrets
import socket
import sys
from itertools import chain

from engine.processes import end_with_parent, run_child
from engine.wire import receive, send
from gateway.analytics.aggregates import Analytics
from gateway.analytics.protocol import (
    CompletedRequests,
    QuestionResult,
    StartAnalytics,
    read_to_analytics,
)


class GatewayAnalytics:
    """Analytics on the gateway's clocks: the time is that of the last request."""

    def __init__(self, begin: StartAnalytics) -> None:
        self._now_s = self._wall_ms = 0.0
        self.analytics = Analytics(
            lambda: self._now_s,
            lambda: round(self._wall_ms + 1_000 * self._now_s),
            begin.tenants_max,
            begin.classes,
            secrets.randbits(64),
        )

    def add(self, batch: CompletedRequests) -> None:
        """Aggregate finished requests."""
        self._wall_ms = batch.wall_ms
        for self._now_s, completed in batch.prompts:
            self.analytics.note(completed)


def serve(wire: socket.socket) -> int:
    """Serve until the gateway closes its end. Returns the exit status."""
    own: GatewayAnalytics | None = None
    for frame in chain.from_iterable(receive(wire)):
        message = read_to_analytics(frame)
        if isinstance(message, StartAnalytics):
            own = GatewayAnalytics(message)
            continue
        assert own is not None, "the first message is StartAnalytics"
        if isinstance(message, CompletedRequests):
            own.add(message)
        else:
            send(wire, QuestionResult(message.answer(own.analytics)))
    return 0


def main() -> int:
    """Serve the gateway that started this process."""
    end_with_parent(sys.stdin.fileno())
    return run_child("analytics", serve)


if __name__ == "__main__":
    sys.exit(main())
