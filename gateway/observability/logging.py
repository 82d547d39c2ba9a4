"""The log: one JSON line per event on a file descriptor, written in batches of a few milliseconds.

A slow reader delays no request: up to `PENDING_BYTES_MAX` bytes of lines wait for it, and lines
beyond that are dropped and counted, in a line of its own once there is room. This module knows no
event. `app` makes one log, on standard error.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections import Counter
from collections.abc import Callable, Hashable

import msgspec

from tenancy.types import WallClock, format_utc

PENDING_BYTES_MAX = 2**20
"""Bytes that wait for a slow reader."""
WRITE_BYTES_MAX = select.PIPE_BUF
"""Bytes that a pipe takes without blocking, if it takes any."""
GATHER_S = 0.005
"""Seconds that a line waits for other lines, so that a client's next request does not wait for its
write."""
RETRY_S = 0.02
REFUSALS_PER_SECOND_MAX = 20
"""Lines of refused requests in a second, for each tenant and for all strangers together."""
FINAL_WAIT_S = 1.0
"""Longest wait, in seconds, for the reader at close and outside of an event loop."""


class LogLines:
    """A log. Thread-safe; outside of an event loop a line is written at once."""

    def __init__(self, fd: int, wall: WallClock) -> None:
        """`fd`: stays open; the caller closes it."""
        self._fd = fd
        self._wall = wall
        self._lock = threading.Lock()
        self._pending = bytearray()
        self._dropped_lines = 0
        self._flush_loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, event: str, facts: dict[str, object]) -> None:
        """Log one event with the time, `at`, in UTC to the millisecond.

        O(length of the line); does not block in an event loop.
        """
        at = format_utc(self._wall())
        line = msgspec.json.encode({"at": at, "event": event, **facts}) + b"\n"
        with self._lock:
            self._append(line)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._flush(FINAL_WAIT_S)
            return
        if self._flush_loop is not loop:
            self._flush_loop = loop
            loop.call_later(GATHER_S, self._flush_due, loop)

    def close(self) -> None:
        """Write pending lines; wait up to `FINAL_WAIT_S` for a slow reader. Safe to repeat."""
        self._flush(FINAL_WAIT_S)

    def _append(self, line: bytes) -> None:
        if len(self._pending) + len(line) > PENDING_BYTES_MAX:
            self._dropped_lines += 1
            return
        if self._dropped_lines:
            facts = {
                "at": format_utc(self._wall()),
                "event": "log_lines_dropped",
                "lines": self._dropped_lines,
            }
            self._pending += msgspec.json.encode(facts) + b"\n"
            self._dropped_lines = 0
        self._pending += line

    def _flush_due(self, loop: asyncio.AbstractEventLoop) -> None:
        self._flush_loop = None
        self._flush(0)
        if self._pending:
            self._flush_loop = loop
            loop.call_later(RETRY_S, self._flush_due, loop)

    def _flush(self, wait_s: float) -> None:
        """Write what the reader takes within `wait_s`. If the reader is gone, drop all lines.

        Waits without the lock: an event loop may have a line meanwhile.
        """
        reader = select.poll()
        reader.register(self._fd, select.POLLOUT)
        while self._pending and reader.poll(wait_s * 1_000):
            with self._lock:
                if not reader.poll(0):
                    continue  # another thread filled the pipe first
                try:
                    written = os.write(self._fd, self._next_write())
                except BlockingIOError:
                    return  # another process filled the pipe first
                except OSError:
                    written = len(self._pending)
                del self._pending[:written]

    def _next_write(self) -> bytearray:
        """Return the pending lines of the next write.

        Only complete lines: other processes write to the same pipe, and must not write into the
        middle of a line. A line longer than the pipe's atomic size is cut.
        """
        end = self._pending.rfind(b"\n", 0, WRITE_BYTES_MAX) + 1
        return self._pending[: end or WRITE_BYTES_MAX]


class RefusalLines:
    """Bounds the log lines of refused requests, which cost a client nothing and the disk 300 bytes.

    Each owner has `REFUSALS_PER_SECOND_MAX` a second; the rest is counted in a line of its own. Not
    thread-safe.
    """

    def __init__(
        self, log: Callable[[str, dict[str, object]], None], clock: Callable[[], float]
    ) -> None:
        """`clock`: monotonic seconds."""
        self._log = log
        self._clock = clock
        self._second = 0
        self._lines: Counter[Hashable] = Counter()
        self._dropped = 0

    def admit(self, owner: Hashable) -> bool:
        """Return whether a refused request of this owner gets its line now. O(1)."""
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._lines.clear()
            if self._dropped:
                self._log("log_lines_dropped", {"lines": self._dropped, "of": "refused requests"})
                self._dropped = 0
        self._lines[owner] += 1
        if self._lines[owner] > REFUSALS_PER_SECOND_MAX:
            self._dropped += 1
            return False
        return True
