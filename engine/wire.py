"""Frames: how a process and the child that it started speak, over the child's standard input.

The input is one end of a socket pair. A frame is four bytes of length, little-endian, then one
msgpack message, both ways, for every child: engine, storage, encoder, ledger and analytics. The
messages belong to their owners. `engine.client.frame_wire` is the end of a parent with an event
loop; a child reads with `receive` and writes with `send`.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, Generic, TypeVar

import msgspec

from engine.errors import EngineError

FRAME_BYTES_MAX: Final = 64 * 2**20
"""Bytes of a message. The reader refuses a longer one before its bytes arrive."""
READ_BYTES: Final = 2**16
"""Bytes per read of a child: as many as a transaction of small ledger items."""

_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode

T = TypeVar("T")


class FrameError(EngineError):
    """The peer violates the protocol; the connection is closed."""

    def __init__(self, message: str) -> None:
        super().__init__("unsupported", message)


def frame_body(body: bytes) -> bytes:
    """Return the frame of an encoded message. Raises FrameError if it exceeds FRAME_BYTES_MAX."""
    if len(body) > FRAME_BYTES_MAX:
        raise FrameError(f"message of {len(body)} bytes; limit {FRAME_BYTES_MAX}")
    return _LENGTH.pack(len(body)) + body


def encode_frame(message: object) -> bytes:
    """Encode one frame. Raises FrameError, and ValueError and OverflowError for text and numbers
    that msgpack cannot hold.
    """
    return frame_body(_encode(message))


class FrameReader:
    """Splits a byte stream into the bodies of frames, wherever it is cut."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies of the frames that are complete now. Raises FrameError for one that is
        too long, and again after that. O(bytes).
        """
        rest, at, size = self._rest, 0, _LENGTH.size
        if not rest and len(data) >= size and _LENGTH.unpack_from(data)[0] == len(data) - size:
            yield data[size:]  # the usual case: exactly one frame
            return
        rest += data
        try:
            while len(rest) - at >= size:
                (length,) = _LENGTH.unpack_from(rest, at)
                if length > FRAME_BYTES_MAX:
                    raise FrameError(f"frame of {length} bytes; limit {FRAME_BYTES_MAX}")
                if len(rest) - at - size < length:
                    return
                at += size + length
                yield bytes(rest[at - length : at])
        finally:
            del rest[:at]


def read_body(decode: Callable[[bytes], T], body: bytes) -> T:
    """Return the message of a frame's body. Raises FrameError, without the decoder's own message,
    which may quote a prompt.
    """
    try:
        return decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError, struct.error):
        raise FrameError(f"frame of {len(body)} bytes is not a valid message") from None


class Decoder(Generic[T]):
    """Splits a byte stream into messages of one type. `decode`: reads one body."""

    def __init__(self, decode: Callable[[bytes], T]) -> None:
        self._decode = decode
        self._frames = FrameReader()

    def feed(self, data: bytes) -> Iterator[T]:
        """Yield the messages that are complete now. Raises FrameError for an invalid frame."""
        return (read_body(self._decode, body) for body in self._frames.feed(data))


def receive(wire: socket.socket) -> Iterator[list[bytes]]:
    """Yield the frames of each read, at least one at a time, until the parent closes its end."""
    reader = FrameReader()
    while True:
        try:
            data = wire.recv(READ_BYTES)
        except ConnectionError:  # the parent was killed before it read the last answers
            return
        if not data:
            return
        if frames := list(reader.feed(data)):
            yield frames


def send(wire: socket.socket, message: object) -> None:
    """Send one message, or nothing if the parent has gone."""
    with suppress(OSError):
        wire.sendall(encode_frame(message))
