"""The gateway's end of the socket to a process of its own: frames out and in, and nobody waits.

It knows no item, no answer and no process; `ledger_link` and `analytics_link` put frames in and are
told of those that come. Here is also how such a process begins and ends. Belongs to one loop.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from tenancy.ledger.protocol import FrameReader

READ_BYTES = 2**12
"""Answers are small."""


class ChildWire:
    """An open end. When the other one closes, however that comes, `ended` is called once, and this
    is closed then."""

    def __init__(
        self, end: socket.socket, heard: Callable[[bytes], None], ended: Callable[[], None]
    ) -> None:
        """`end`: its own from now on. `heard`: told of each frame's body."""
        self._loop = asyncio.get_running_loop()
        self._end = end
        self._heard, self._ended = heard, ended
        self._reader = FrameReader()
        self._unsent = bytearray()  # what the socket has not taken
        end.setblocking(False)
        self._loop.add_reader(end, self._read)

    @property
    def unsent(self) -> int:
        """Bytes that the socket has not taken."""
        return len(self._unsent)

    def send(self, frame: bytes) -> None:
        """All of it, after what was sent before; what the socket does not take now leaves later."""
        if self._unsent:
            self._unsent += frame
            return
        sent = self._try_to_send(frame)
        if sent < len(frame):
            self._unsent += memoryview(frame)[sent:]
            self._loop.add_writer(self._end, self._send_rest)

    def end(self) -> None:
        """Nothing more will be sent: the other end finishes, and closes. Safe to call twice."""
        try:
            self._end.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it is gone already

    def close(self) -> None:
        """Hear no more. What was not sent is lost. Safe to call twice."""
        if self._end.fileno() >= 0:
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)
            self._end.close()

    def _send_rest(self) -> None:
        sent = self._try_to_send(self._unsent)
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._end)

    def _try_to_send(self, data: bytes | bytearray) -> int:
        try:
            return self._end.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)  # it is gone, and its end is about to be read

    def _read(self) -> None:
        try:
            data = self._end.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            self._ended()
            return
        for frame in self._reader.feed(data):
            self._heard(frame)


async def spawned(command: Sequence[str], end: socket.socket) -> asyncio.subprocess.Process:
    """A process that inherits this end, whose number is its last argument. Raises OSError."""
    return await asyncio.create_subprocess_exec(
        *command,
        str(end.fileno()),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        pass_fds=(end.fileno(),),
        start_new_session=True,
    )


async def reaped(process: asyncio.subprocess.Process, patience_s: float) -> int | None:
    """Its status. One that has closed its socket has nothing left to do but to say why; it is
    killed when it takes longer."""
    try:
        async with asyncio.timeout(patience_s):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    return process.returncode
