"""The messages between gateway and engine, each in one frame over the socket of the process.

A frame is four bytes of length, little-endian, then one msgpack message. A prompt's token ids
travel as four bytes each, in this machine's order. Pure: bytes in, messages out. Server and client
share it.

    client                               server
      Hello(version, model) ───────────▶
                             ◀─────────── Welcome(info)   once the engine answers, or Rejected
      Submit, Cancel, Peek… ───────────▶
                             ◀─────────── Frame           one per step: all events and replies of it
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from engine.api import Command, EngineInfo, Frame, Request, Submit
from engine.errors import EngineError

FRAME_BYTES_MAX = 64 * 2**20
_LENGTH = struct.Struct("<I")

T = TypeVar("T")


class Hello(Struct, frozen=True, tag="hello"):
    """The client's first message: the model to load, and an `EngineConfig` as plain data.

    Open to unknown fields, so that another version is answered by a `Rejected` that says so.
    """

    version: int
    model_dir: str = ""
    config: dict[str, Any] = {}


class Welcome(Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """The engine is loaded and has produced a token."""

    info: EngineInfo


class Rejected(Struct, frozen=True, tag="rejected", forbid_unknown_fields=True):
    """The version is not this engine's, or the model cannot be loaded; the process exits."""

    code: str
    message: str


class PackedSubmit(Struct, frozen=True, tag="packed_submit", forbid_unknown_fields=True):
    """A `Submit` on the wire: its request without tokens, and these packed. Reading two thousand
    packed ids takes half the time that reading as many numbers does."""

    request: Request
    token_ids: bytes


Upward = Hello | Command
Downward = Welcome | Rejected | Frame


class FrameError(EngineError):
    """The peer does not speak this protocol; the connection is closed."""

    def __init__(self, message: str) -> None:
        super().__init__("unsupported", message)


def encode(message: Upward | Downward) -> bytes:
    """One frame. Raises FrameError if it is longer than a peer would take."""
    body = msgspec.msgpack.encode(_packed(message) if type(message) is Submit else message)
    if len(body) > FRAME_BYTES_MAX:
        raise FrameError(f"a message of {len(body)} bytes; at most {FRAME_BYTES_MAX} are sent")
    return _LENGTH.pack(len(body)) + body


def _packed(message: Submit) -> PackedSubmit:
    request = message.request
    try:
        token_ids = struct.pack(f"={len(request.tokens)}I", *request.tokens)
    except struct.error as error:
        raise FrameError("a token id that is not of four bytes") from error
    return PackedSubmit(replace(request, tokens=()), token_ids)


def _unpacked(body: bytes) -> Upward:
    """Raises struct.error for half a token id."""
    message: PackedSubmit | Upward = _read_upward(body)
    if not isinstance(message, PackedSubmit):
        return message
    token_ids = struct.unpack(f"={len(message.token_ids) // 4}I", message.token_ids)
    return Submit(replace(message.request, tokens=token_ids))


class Decoder(Generic[T]):
    """Cuts a byte stream into messages of one type, however it arrives in pieces."""

    def __init__(self, read: Callable[[bytes], T]) -> None:
        self._read = read
        self._buffer = bytearray()
        self._is_broken = False

    def feed(self, data: bytes) -> Iterator[T]:
        """Messages that are whole now. Raises FrameError for what cannot be one."""
        if self._is_broken:
            raise FrameError("nothing can follow a broken frame")
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > FRAME_BYTES_MAX:
                self._is_broken = True
                raise FrameError(f"a frame of {length} bytes; at most {FRAME_BYTES_MAX} are taken")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            message = self._decode(body)
            if message is None:
                # Without the decoder's own words: they may quote what came, a prompt perhaps.
                self._is_broken = True
                raise FrameError(f"a frame of {length} bytes that is no message")
            yield message

    def _decode(self, body: bytes) -> T | None:
        try:
            return self._read(body)
        except (msgspec.MsgspecError, RecursionError, ValueError, struct.error):
            return None


_read_upward = msgspec.msgpack.Decoder(PackedSubmit | Upward).decode
_read_downward = msgspec.msgpack.Decoder(Downward).decode


def upward_decoder() -> Decoder[Upward]:
    """What a server reads."""
    return Decoder(_unpacked)


def downward_decoder() -> Decoder[Downward]:
    """What a client reads."""
    return Decoder(_read_downward)
