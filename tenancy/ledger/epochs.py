"""Ledger epochs: a new one begins when a restored database has taken the ledger's place.

Within an epoch no total ever falls. A restored backup has fewer entries than were reported before,
so its totals belong to another epoch. `accounting.backups` begins one at a restore. Beside a
database file the server also keeps the last point that it knew, so the next start detects a file
that was replaced by other means. The module knows no prices and no tenants.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec
from msgspec import Struct

from tenancy.storage.interface import Store, Transaction
from tenancy.types import WallClock


class LedgerEpoch(Struct, frozen=True):
    """An epoch of the ledger. It begins after the entry `entry_id`, which has the chain `chain`."""

    number: int
    begun_ms: int
    reason: str
    """`begun`, `restored`, `marked` by command, or `found` at a start."""
    entry_id: int
    chain: bytes


class KnownPoint(Struct, frozen=True):
    """The last entry that a server knew, its epoch, and when. `chain` in hexadecimal."""

    epoch: int
    entry_id: int
    chain: str
    at_ms: int


def ledger_epoch(store: Store) -> LedgerEpoch:
    """Return the present epoch."""
    return LedgerEpoch(*store.query(_LATEST)[0])


def begin_ledger_epoch(db: Transaction, now_ms: int, reason: str, *, above: int = 0) -> LedgerEpoch:
    """Begin a new epoch after the last entry, within the caller's transaction.

    Its number exceeds that of every earlier epoch and `above`, so two histories never share a
    number.
    """
    latest = db.rows(_LATEST)[0][0]
    entry_id, chain = _last_entry(db.rows(_LAST_ENTRY))
    epoch = LedgerEpoch(max(latest, above) + 1, now_ms, reason, entry_id, chain)
    db.execute(
        "insert into ledger_epochs (number, begun_ms, reason, entry_id, chain)"
        " values (?, ?, ?, ?, ?)",
        (epoch.number, epoch.begun_ms, epoch.reason, epoch.entry_id, epoch.chain),
    )
    return epoch


def detect_replacement(store: Store, clock: WallClock) -> LedgerEpoch | None:
    """Begin a new epoch if the known point is not part of this ledger; called at a start.

    Returns the new epoch, or None. Raises StoreError.
    """
    known = decode_known_point(store.load_marker())
    if known is None:
        return None
    latest = ledger_epoch(store)
    if latest.number >= known.epoch and has_entry(store, known.entry_id, known.chain):
        return None
    with store.change() as db:
        return begin_ledger_epoch(db, clock(), "found", above=known.epoch)


def has_entry(store: Store, entry_id: int, chain: str) -> bool:
    """Return whether this point is part of the ledger's history. Entry 0 always is."""
    rows = store.query("select chain from ledger where entry_id = ?", (entry_id,))
    return bytes(rows[0][0]).hex() == chain if rows else entry_id == 0


def has_history(store: Store) -> bool:
    """Return whether the ledger has any entry. Raises StoreError."""
    return bool(store.query(_LAST_ENTRY))


def decode_known_point(kept: bytes | None) -> KnownPoint | None:
    """Decode the point kept beside the database; None if it is missing or unreadable."""
    if kept is not None:
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(kept, type=KnownPoint)
    return None


def save_known_point(store: Store, clock: WallClock) -> None:
    """Save the last committed entry beside the database, if the store is local.

    Best effort: after a failed write the next call tries again. Raises StoreError.
    """
    if not store.is_local:
        return
    entry_id, chain = _last_entry(store.query(_LAST_ENTRY))
    point = KnownPoint(ledger_epoch(store).number, entry_id, chain.hex(), clock())
    with suppress(OSError):
        store.save_marker(msgspec.json.encode(point))


def _last_entry(rows: list[tuple[int, bytes]]) -> tuple[int, bytes]:
    return (rows[0][0], bytes(rows[0][1])) if rows else (0, b"")


_LAST_ENTRY = "select entry_id, chain from ledger order by entry_id desc limit 1"
_LATEST = (
    "select number, begun_ms, reason, entry_id, chain from ledger_epochs"
    " order by number desc limit 1"
)
