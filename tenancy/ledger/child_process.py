"""The child's end of its socket to the gateway: frames over standard input.

A frame is four bytes of length, little-endian, then one msgpack message. The ledger process and the
analytics process each `run` one loop over the frames that they `receive`. The gateway's end is
`gateway.child_process`. This module knows no message.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec

from tenancy.types import format_utc

READ_BYTES = 2**16
"""Bytes per read: as many as a transaction of small ledger items."""

_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode


def encode_frame(message: object) -> bytes:
    """Encode one frame. Raises ValueError and OverflowError for text and numbers that msgpack
    cannot hold."""
    data = _encode(message)
    return _LENGTH.pack(len(data)) + data


class FrameReader:
    """Splits a byte stream into frames, wherever it is cut."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies of the frames that are complete now. O(bytes)."""
        rest, at, size = self._rest, 0, _LENGTH.size
        if not rest and len(data) >= size and _LENGTH.unpack_from(data)[0] == len(data) - size:
            return [data[size:]]  # the usual case: exactly one frame
        rest += data
        frames = []
        while len(rest) - at >= size:
            end = at + size + _LENGTH.unpack_from(rest, at)[0]
            if end > len(rest):
                break
            frames.append(bytes(rest[at + size : end]))
            at = end
        del rest[:at]
        return frames


def receive(wire: socket.socket) -> Iterator[list[bytes]]:
    """Yield the frames of each read, at least one at a time, until the gateway closes its end."""
    reader = FrameReader()
    while True:
        try:
            data = wire.recv(READ_BYTES)
        except ConnectionError:  # the gateway was killed before it read the last answers
            return
        if not data:
            return
        if frames := reader.feed(data):
            yield frames


def send(wire: socket.socket, message: object) -> None:
    """Send one message, or nothing if the gateway has gone."""
    with suppress(OSError):
        wire.sendall(encode_frame(message))


def run(name: str, serve: Callable[[socket.socket], int]) -> int:
    """Serve the gateway over standard input and return the exit status.

    SIGINT, SIGTERM and SIGHUP are ignored: the process ends when its gateway closes the socket,
    after the work that it was sent. An exception is logged as one line `NAME_failed` on standard
    error, without its message, which may quote a value; the gateway sees the socket end.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # imported modules live as long as the process
    try:
        with socket.socket(fileno=sys.stdin.fileno()) as wire:
            return serve(wire)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-6:]
        facts = {
            "at": format_utc(time.time_ns() // 1_000_000),
            "event": f"{name}_failed",
            "error": type(error).__name__,
            "frames": [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames],
        }
        with suppress(OSError):
            os.write(2, msgspec.json.encode(facts) + b"\n")
        return 1
