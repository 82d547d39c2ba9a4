"""A process of a gateway's group: it tells its parent that it serves, and drains at its end.

Its standard input is a socket. It writes one line when it serves; the parent writes nothing, and
closes its end to drain the process, or by its own death.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec
from msgspec import Struct

LINE_BYTES_MAX = 2**16


class Announcement(Struct, frozen=True):
    """What a process tells when it serves: the URLs of its listeners, and the state of each
    model."""

    urls: Sequence[str]
    states: Mapping[str, str]


class GroupMember:
    """The end of the socket to the parent in a process of the group."""

    def __init__(self, number: int, fd: int = 0) -> None:
        """`number`: of this process, from 0. `fd`: the socket."""
        self.number = number
        self._wire = socket.socket(fileno=os.dup(fd))
        self._wire.setblocking(False)

    def announce(self, serving: Announcement) -> None:
        """Tell the parent that this process serves."""
        with suppress(OSError):  # the parent is gone: the loop sees that
            self._wire.send(msgspec.json.encode(serving) + b"\n")

    def follow(self, drain: Callable[[], None]) -> None:
        """Call `drain` when the parent's end is closed, on the running event loop."""
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(self._wire)
            drain()

        loop.add_reader(self._wire, ended)

    def close(self) -> None:
        """Close the socket, outside of the event loop."""
        self._wire.close()


async def read_announcement(wire: socket.socket) -> Announcement | None:
    """Return what a process tells when it serves; None if it ends before."""
    loop, line = asyncio.get_running_loop(), b""
    while not line.endswith(b"\n"):
        data = await loop.sock_recv(wire, LINE_BYTES_MAX)
        if not data or len(line) > LINE_BYTES_MAX:
            return None
        line += data
    return msgspec.json.decode(line, type=Announcement)
