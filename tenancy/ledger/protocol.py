"""The wire between a gateway and its ledger's process: length-prefixed msgpack over a socket pair.

Four bytes of length, little-endian, then one message. Pure: bytes in, messages out; it opens no
socket. `ledger_child` and the gateway's end share it; nobody else can reach it.

    gateway                              ledger's process
      Open ────────────────────────────▶
                             ◀─────────── Opened, or NotOpened
      up to sixteen items, once or more in a turn of its loop
        ───────────────────────────────▶
                             ◀─────────── Answered        one per commit, for so many items
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from tenancy import errors
from tenancy.errors import TenancyError
from tenancy.ledger.epochs import LedgerEpoch
from tenancy.ledger.transactions import Item

_LENGTH = struct.Struct("<I")


class Failure(Struct, frozen=True, array_like=True):
    """An error of ours as data: the name of its class, and all that it says."""

    kind: str
    facts: dict[str, str | int | float | None]


class Open(Struct, frozen=True, array_like=True):
    """First from the gateway: its database, as `backends` names it. `living`: the requests that run
    although the writer `successor_of` died, which wrote their holds."""

    place: str
    folder: str
    living: list[str] = []
    successor_of: int = 0


class Opened(Struct, frozen=True, array_like=True, tag="opened"):
    """The ledger takes items. The fields are its writer's."""

    writer_id: int
    interrupted: int
    found_epoch: LedgerEpoch | None


class NotOpened(Struct, frozen=True, array_like=True, tag="not_opened"):
    """It cannot be opened; the process ends."""

    failure: Failure


class Answered(Struct, frozen=True, array_like=True, tag="answered"):
    """The next so many items are durable, but for those that were refused, by their places."""

    count: int
    refused: dict[int, Failure] = {}


FromWriter = Opened | NotOpened | Answered

_ENCODE = msgspec.msgpack.Encoder().encode
_ITEMS = msgspec.msgpack.Decoder(list[Item])
_OPEN = msgspec.msgpack.Decoder(Open)
_FROM_WRITER: msgspec.msgpack.Decoder[FromWriter] = msgspec.msgpack.Decoder(FromWriter)


def packed(message: Struct | Sequence[Item]) -> bytes:
    """One frame. Raises ValueError and OverflowError for texts and numbers that no message has."""
    data = _ENCODE(message)
    return _LENGTH.pack(len(data)) + data


def read_open(data: bytes) -> Open:
    """Of a frame. Raises msgspec's errors, as all that read here do."""
    return _OPEN.decode(data)


def read_items(data: bytes) -> list[Item]:
    """Of a frame."""
    return _ITEMS.decode(data)


def read_from_writer(data: bytes) -> FromWriter:
    """Of a frame."""
    return _FROM_WRITER.decode(data)


def failure_of(error: TenancyError) -> Failure:
    """All of it but where it was raised."""
    return Failure(type(error).__name__, vars(error))


def error_of(failure: Failure) -> TenancyError:
    """The same error again."""
    kind: type[TenancyError] = getattr(errors, failure.kind)
    error = kind.__new__(kind, failure.facts["message"])
    error.__dict__.update(failure.facts)
    return error


class FrameReader:
    """Cuts what comes into frames, however it was cut on its way."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that are whole by now. O(bytes)."""
        rest, at, size = self._rest, 0, _LENGTH.size
        if not rest and len(data) >= size and _LENGTH.unpack_from(data)[0] == len(data) - size:
            return [data[size:]]  # nearly always: one, and whole
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
