"""Messages between a gateway and its ledger process. Pure: bytes in, messages out.

    gateway                              ledger process
      Open ────────────────────────────▶
                             ◀─────────── Opened, or NotOpened
      a list of up to sixteen items, once or more in a turn of the gateway's loop
        ───────────────────────────────▶
                             ◀─────────── BatchResult     one per commit, for several items

Each message is the body of one frame of `engine.wire`.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from tenancy import errors
from tenancy.errors import TenancyError
from tenancy.ledger.epochs import LedgerEpoch
from tenancy.ledger.transactions import Item


class Failure(Struct, frozen=True, array_like=True):
    """A TenancyError as data: the name of its class, and its attributes."""

    kind: str
    facts: dict[str, str | int | float | None]


class Open(Struct, frozen=True, array_like=True):
    """The gateway's first message: its database, as `tenancy.storage.backends` names it."""

    place: str
    folder: str
    living: list[str] = []
    """Ids of running requests. Their holds were written by the dead writer `successor_of`, and stay
    open."""
    successor_of: int = 0
    gateway: str = ""
    """Names this start of the gateway."""


class Opened(Struct, frozen=True, array_like=True, tag="opened"):
    """The ledger accepts items. The fields are those of `LedgerWriter`."""

    writer_id: int
    interrupted: int
    found_epoch: LedgerEpoch | None


class NotOpened(Struct, frozen=True, array_like=True, tag="not_opened"):
    """The database cannot be opened; the process exits."""

    failure: Failure


class BatchResult(Struct, frozen=True, array_like=True, tag="answered"):
    """The next `count` items are durable, except the `refused` ones, by their index among them."""

    count: int
    refused: dict[int, Failure] = {}


FromWriter = Opened | NotOpened | BatchResult

_ITEMS = msgspec.msgpack.Decoder(list[Item])
_OPEN = msgspec.msgpack.Decoder(Open)
_FROM_WRITER: msgspec.msgpack.Decoder[FromWriter] = msgspec.msgpack.Decoder(FromWriter)


def read_open(data: bytes) -> Open:
    """Decode a frame's body. Raises msgspec's errors, as all readers of this module do."""
    return _OPEN.decode(data)


def read_items(data: bytes) -> list[Item]:
    """Decode a frame's body."""
    return _ITEMS.decode(data)


def read_from_writer(data: bytes) -> FromWriter:
    """Decode a frame's body."""
    return _FROM_WRITER.decode(data)


def failure_of(error: TenancyError) -> Failure:
    """Return the error as data, without its traceback."""
    return Failure(type(error).__name__, vars(error))


def error_of(failure: Failure) -> TenancyError:
    """Return the error that `failure_of` was given."""
    kind: type[TenancyError] = getattr(errors, failure.kind)
    error = kind.__new__(kind, failure.facts["message"])
    error.__dict__.update(failure.facts)
    return error
