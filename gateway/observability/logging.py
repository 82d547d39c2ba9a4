"""The log: one JSON line for each event, on a file descriptor; those of a few milliseconds in one
write.

A reader that does not keep up holds nobody up: lines wait for it, up to `WAITING_BYTES_MAX`, and
what does not fit any more is counted, which a line says when there is room. It knows no event.
`app` makes one, on standard error.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading

import msgspec

from tenancy.types import WallClock

WAITING_BYTES_MAX = 2**20
PIECE_BYTES = select.PIPE_BUF
"""A pipe that takes any takes this much without waiting."""
GATHER_S = 0.005
"""So long a line waits for others: somebody who asks again at once does not wait for its write."""
RETRY_S = 0.02
PATIENCE_S = 1.0
"""So long a reader is waited for at the end, and outside of an event loop."""


class LogLines:
    """A log. May be called by any thread; outside of an event loop a line is written at once."""

    def __init__(self, fd: int, wall: WallClock) -> None:
        """`fd`: stays its owner's."""
        self._fd = fd
        self._wall = wall
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._left_out = 0
        self._due: asyncio.AbstractEventLoop | None = None
        self._room = select.poll()
        self._room.register(fd, select.POLLOUT)

    def __call__(self, event: str, facts: dict[str, object]) -> None:
        """One line. O(its length); in an event loop never a wait."""
        line = msgspec.json.encode({"at_ms": self._wall(), "event": event, **facts}) + b"\n"
        with self._lock:
            self._add(line)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._flush(PATIENCE_S)
            return
        if self._due is not loop:
            self._due = loop
            loop.call_later(GATHER_S, self._flush_due, loop)

    def close(self) -> None:
        """Write what waits; a reader that is behind has `PATIENCE_S`. Safe to call twice."""
        self._flush(PATIENCE_S)

    def _add(self, line: bytes) -> None:
        if len(self._waiting) + len(line) > WAITING_BYTES_MAX:
            self._left_out += 1
            return
        if self._left_out:
            facts = {"at_ms": self._wall(), "event": "log_lines_left_out", "lines": self._left_out}
            self._waiting += msgspec.json.encode(facts) + b"\n"
            self._left_out = 0
        self._waiting += line

    def _flush_due(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = None
        self._flush(0)
        if self._waiting:
            self._due = loop
            loop.call_later(RETRY_S, self._flush_due, loop)

    def _flush(self, patience_s: float) -> None:
        """As much as is taken now. A reader that is gone for good gets nothing more."""
        with self._lock:
            while self._waiting and self._room.poll(patience_s * 1_000):
                try:
                    written = os.write(self._fd, self._piece())
                except BlockingIOError:
                    return  # somebody else who writes there was faster
                except OSError:
                    written = len(self._waiting)
                del self._waiting[:written]

    def _piece(self) -> bytearray:
        """Whole lines: other processes write there too, and what they say must not stand in the
        middle of one. Only of a line that no pipe takes at once a part."""
        end = self._waiting.rfind(b"\n", 0, PIECE_BYTES) + 1
        return self._waiting[: end or PIECE_BYTES]
