"""Lives of a ledger: a new one begins where a restored database has taken its place.

Within an epoch no sum ever falls. A backup that is put back has fewer entries than were told of
before; its sums are those of another epoch, and say so. Who restores says it (`backups`, or the
command that marks it); beside a file a point is kept that the server knew last, so that a file
which was exchanged behind our back is found at the next start. It knows no prices and no tenants.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec
from msgspec import Struct

from tenancy.storage.interface import Store, Transaction
from tenancy.types import WallClock


class LedgerEpoch(Struct, frozen=True):
    """From the entry after `entry_id` on, behind whose `chain`. `reason`: `begun`, `restored`,
    `marked` by hand, or `found` at a start."""

    number: int
    begun_ms: int
    reason: str
    entry_id: int
    chain: bytes


class KnownPoint(Struct, frozen=True):
    """The last entry that a server knew, of which epoch, and when. `chain` in hex."""

    epoch: int
    entry_id: int
    chain: str
    at_ms: int


def list_ledger_epochs(store: Store) -> list[LedgerEpoch]:
    """All, the first one first."""
    return [LedgerEpoch(*row) for row in store.query(f"{_SELECT} order by number")]


def ledger_epoch(store: Store) -> LedgerEpoch:
    """The present one."""
    return LedgerEpoch(*store.query(_LATEST)[0])


def begin_ledger_epoch(db: Transaction, now_ms: int, reason: str, *, above: int = 0) -> LedgerEpoch:
    """A new one, within the caller's transaction, behind what is there. Its number is above that of
    any before, and `above` another: two histories never share one."""
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
    """At a start: if what was known of this ledger is not in it, it is another one, and a new epoch
    begins. Raises StoreError."""
    known = decode_known_point(store.recall())
    if known is None:
        return None
    latest = ledger_epoch(store)
    if latest.number >= known.epoch and has_entry(store, known.entry_id, known.chain):
        return None
    with store.change() as db:
        return begin_ledger_epoch(db, clock(), "found", above=known.epoch)


def has_entry(store: Store, entry_id: int, chain: str) -> bool:
    """Is this point part of its history? The point before all entries is part of each."""
    rows = store.query("select chain from ledger where entry_id = ?", (entry_id,))
    return bytes(rows[0][0]).hex() == chain if rows else entry_id == 0


def has_history(store: Store) -> bool:
    """Has anything been booked yet? Raises StoreError."""
    return bool(store.query(_LAST_ENTRY))


def decode_known_point(kept: bytes | None) -> KnownPoint | None:
    """What was kept beside the database; None for nothing, and for what cannot be read."""
    if kept is not None:
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(kept, type=KnownPoint)
    return None


def save_known_point(store: Store, clock: WallClock) -> None:
    """Keep the last entry that is committed, beside the database, where there is a place for it. A
    defence and no promise: where it cannot be written now, the next time will do. Raises
    StoreError."""
    if not store.is_near:
        return
    entry_id, chain = _last_entry(store.query(_LAST_ENTRY))
    point = KnownPoint(ledger_epoch(store).number, entry_id, chain.hex(), clock())
    with suppress(OSError):
        store.remember(msgspec.json.encode(point))


def _last_entry(rows: list[tuple[int, bytes]]) -> tuple[int, bytes]:
    return (rows[0][0], bytes(rows[0][1])) if rows else (0, b"")


_LAST_ENTRY = "select entry_id, chain from ledger order by entry_id desc limit 1"
_SELECT = "select number, begun_ms, reason, entry_id, chain from ledger_epochs"
_LATEST = f"{_SELECT} order by number desc limit 1"
