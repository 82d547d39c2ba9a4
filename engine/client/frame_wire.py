"""The end of a child's socket that belongs to an event loop: frames leave and arrive.

The gateway speaks with it to each of its children. It knows no message and no process.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from engine.wire import READ_BYTES, FrameError, FrameReader


class FrameWire:
    """An event loop's end of a child's socket.

    `on_end` is called once when the child closes its end for any reason, or breaks the framing;
    this end is closed by then. Frames leave in order, and a child that reads slowly delays no
    caller.
    """

    def __init__(
        self,
        end: socket.socket,
        on_frame: Callable[[bytes], None],
        on_end: Callable[[], None],
        on_sent: Callable[[], None] = lambda: None,
    ) -> None:
        """`end`: owned by the wire from now on. `on_frame`: called with each frame's body; a
        FrameError that it raises ends the wire. `on_sent`: called when the socket has taken what it
        had not taken at once.
        """
        self._loop = asyncio.get_running_loop()
        self._end = end
        self._on_frame, self._on_end, self._on_sent = on_frame, on_end, on_sent
        self.error: FrameError | None = None  # that has ended the wire
        self._reader = FrameReader()
        self._unsent = bytearray()  # bytes that the socket has not taken
        end.setblocking(False)
        self._loop.add_reader(end, self._read)

    @property
    def unsent(self) -> int:
        """Number of bytes that the socket has not taken."""
        return len(self._unsent)

    def send(self, frame: bytes) -> None:
        """Send a frame after all earlier ones; bytes that the socket does not take now are sent
        later.

        One system call if the child keeps up.
        """
        if self._unsent:
            self._unsent += frame
            return
        sent = self._send_now(frame)
        if sent < len(frame):
            self._unsent += memoryview(frame)[sent:]
            self._loop.add_writer(self._end, self._send_rest)

    def end(self) -> None:
        """Tell the child that no more frames come; the child finishes and closes its end. Safe to
        repeat."""
        with suppress(OSError):  # the child has exited
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Stop reading and drop unsent bytes. Safe to repeat."""
        if self._end.fileno() >= 0:
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)
            self._end.close()

    def _send_rest(self) -> None:
        sent = self._send_now(self._unsent)
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._end)
            self._on_sent()

    def _send_now(self, data: bytes | bytearray) -> int:
        try:
            return self._end.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)  # the child has exited; `_read` notices next

    def _read(self) -> None:
        try:
            data = self._end.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            self._on_end()
            return
        try:
            for frame in self._reader.feed(data):
                self._on_frame(frame)
                if self._end.fileno() < 0:
                    return  # `on_frame` has closed it
        except FrameError as error:
            self.error = error
            self.close()
            self._on_end()
