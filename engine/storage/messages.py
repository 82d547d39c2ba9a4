"""What the engine and the storage process say to each other: frames over the process's socket.

The frames are those of `engine.wire`, with one message of `engine.moves` or of this module. The
first is `DiskSettings`. Pure: bytes in, messages out.

    engine                               storage process
      DiskSettings ──────────────────▶
                             ◀─────────── HeldNamespaces   what a `Look` may find, in pieces
                             ◀─────────── StorageStats     at once, then each `heartbeat_s`
      Store, Look, Fetch … ─────────────▶
                             ◀─────────── Stored, Looked, Fetched …
      Recall ───────────────────────────▶
                             ◀─────────── Recalled         the next promised records
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from engine.api import Count, Namespace
from engine.moves import (
    EraseStored,
    Fetch,
    Fetched,
    FetchedRun,
    FetchRuns,
    KeepHere,
    Look,
    Looked,
    Recall,
    Recalled,
    Renew,
    Renewed,
    SetStoredQuotas,
    SlotLayout,
    StopFetch,
    StorageCommand,
    StorageOutcome,
    Stored,
    StoredErased,
    StoreRuns,
)
from engine.storage.remote.address import RemoteSettings
from engine.storage.sealing.unlocking import SealSettings
from engine.wire import Decoder

NAMESPACES_PER_FRAME = 4_096
STORAGE_VERSION = 4
"""Version of these messages: both ends come from one installation."""


class DiskSettings(Struct, frozen=True, tag="disk_settings", forbid_unknown_fields=True):
    """The first frame: the folder, and the arena whose descriptor the process inherits.

    No key crosses the socket.
    """

    dir: str
    disk_bytes: Count
    """Room for slabs and index."""
    arena_fd: int
    layout: SlotLayout
    slot_sizes: tuple[Count, ...]
    """The bytes of copies, by format; a record has one of them."""
    slab_bytes: Count = 2**30
    io_threads: Count = 4
    write_bytes_per_day: Count = 0
    """0 for as much as `disk_bytes`."""
    run_tokens: Count = 16
    """Tokens of a run."""
    heartbeat_s: float = 0.5
    wait_s: float = 10.0
    """How long to wait for the lock of a storage process that is about to end."""
    spare_bytes: Count = 2 * 2**30
    """Left to others on the file system."""
    seal: SealSettings | None = None
    """Where the master key is; None for a plain store."""
    remote: RemoteSettings | None = None
    """Only beside `seal`."""
    model_digest: str = ""
    """All that decides the bytes of copies: of a shared store other replicas have the same."""
    generation: Count = 0
    """The number of the engine among those that had this arena."""
    version: int = STORAGE_VERSION


class HeldNamespaces(Struct, frozen=True, tag="held_namespaces", forbid_unknown_fields=True):
    """Namespaces that have got their first record, and those that have lost their last one."""

    gained: tuple[Namespace, ...] = ()
    lost: tuple[Namespace, ...] = ()


Downward = DiskSettings | StorageCommand
Upward = HeldNamespaces | StorageOutcome

_decode_downward = msgspec.msgpack.Decoder(Downward).decode
_decode_upward = msgspec.msgpack.Decoder(Upward).decode


def command_decoder() -> Decoder[Downward]:
    """Return a decoder of the engine's messages, for the storage process."""
    return Decoder(_decode_downward)


def outcome_decoder() -> Decoder[Upward]:
    """Return a decoder of the storage process's messages, for the engine."""
    return Decoder(_decode_upward)


def failures_of(command: StorageCommand) -> Iterator[StorageOutcome]:
    """Yield the outcomes of a command while the disk or its process is away: all have failed."""
    match command:
        case StoreRuns():
            yield Stored(command.call_id, (), "closed")
        case Look():
            yield Looked(command.call_id, ())
        case Fetch():
            for record_id in command.record_ids:
                yield Fetched(command.call_id, record_id, False)
        case FetchRuns():
            for _ in command.slots:
                yield FetchedRun(command.call_id, "lost")
        case EraseStored():
            yield StoredErased(command.call_id, code="closed")
        case Renew():
            yield Renewed(command.call_id, code="closed")
        case Recall():
            yield Recalled(command.call_id, code="closed")
        case SetStoredQuotas() | KeepHere() | StopFetch():
            pass
