"""A network that is cut one way, as the kernel sees it: a socket gets nothing any more.

A filter of the kernel drops every packet to a connected socket of a process before TCP sees it:
data, and acknowledgements too. So what such a socket sends is sent again until it is given up, as
if the way back were cut. A proxy cannot do that: its own sockets acknowledge.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
PIDFD_GETFD = 438
RETURN = 0x06
"""The opcode of a classic filter that returns how many bytes of a packet are kept."""


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("true", ctypes.c_ubyte),
        ("false", ctypes.c_ubyte),
        ("value", ctypes.c_uint),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.POINTER(_Instruction)))


_CODE = (_Instruction * 1)(_Instruction(RETURN, 0, 0, 0))
KEEP_NOTHING = bytes(_Program(1, _CODE))


@contextmanager
def deaf(pid: int, port: int) -> Iterator[int]:
    """Let nothing reach the connections of a process from or to a port of this machine; yield how
    many they are. Later connections hear."""
    with _sockets(pid, port) as found:
        for one in found:
            one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, KEEP_NOTHING)
    try:
        yield len(found)
    finally:
        with suppress(OSError), _sockets(pid, port) as left:
            for one in left:
                with suppress(OSError):  # it is a later one
                    one.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


@contextmanager
def _sockets(pid: int, port: int) -> Iterator[list[socket.socket]]:
    """Yield copies of a process's connections from or to a port, as long as the block takes."""
    found: list[socket.socket] = []
    with ExitStack() as opened:
        process = os.pidfd_open(pid)
        opened.callback(os.close, process)
        for entry in list(Path(f"/proc/{pid}/fd").iterdir()):
            with suppress(OSError):
                if not str(entry.readlink()).startswith("socket:"):
                    continue
                copied = ctypes.CDLL(None).syscall(PIDFD_GETFD, process, int(entry.name), 0)
                end = opened.enter_context(socket.socket(fileno=copied))
                if end.family == socket.AF_INET and port in _ports(end):
                    found.append(end)
        yield found


def _ports(end: socket.socket) -> tuple[int, ...]:
    """Return the ports of both ends of a connection; none of what only listens."""
    try:
        return end.getsockname()[1], end.getpeername()[1]
    except OSError:
        return ()
