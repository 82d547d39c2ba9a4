"""Copies of a ledger in a file: one beside a running server, and one put in its place.

A backup is whole or not there, and as of one commit. What is restored is looked through first: it
has to be a sound database of ours whose books are right; then it takes the place of the one that is
there at once, and begins a new epoch of the ledger. On a server that is `pg_dump`'s work. The
command line calls it.
"""

from __future__ import annotations

import os
from contextlib import closing, suppress
from pathlib import Path

import apsw
from msgspec import Struct

from tenancy.accounting.audit import Progress, check_books, ignore_progress
from tenancy.errors import StoreBusy, StoreError
from tenancy.ledger.epochs import (
    LedgerEpoch,
    begin_ledger_epoch,
    decode_known_point,
    has_entry,
    ledger_epoch,
    save_known_point,
)
from tenancy.storage.atomic_files import synced, written_whole
from tenancy.storage.interface import Store
from tenancy.storage.sqlite import SqliteStore, claimed, is_patient, recalled
from tenancy.types import WallClock

_COMPANION_SUFFIXES = ("-wal", "-shm", "-journal")


class MissingEntries(Struct, frozen=True):
    """Entries of the ledger that was there which the restored one has not, and when they were made.
    `entries`: None where nobody can say, as are the times."""

    entries: int | None = None
    since_ms: int | None = None
    until_ms: int | None = None


class Restored(Struct, frozen=True):
    """What took the ledger's place. `kept`: where the one that was there is now."""

    epoch: LedgerEpoch
    missing: MissingEntries
    kept: Path | None


def backup(path: Path, target: Path) -> int:
    """Copy the database, as of one commit, while others write. Returns the copy's bytes.

    O(size). Makes `target`, for its owner alone, and nothing else. Raises StoreError, also where
    there is something already.
    """
    if target.exists():
        raise StoreError("target_exists", f"{target} is there already: name another file.")
    with written_whole(target, mode=0o600) as part:
        _copy(path, part)
    return target.stat().st_size


def restore(
    source: Path, path: Path, clock: WallClock, progress: Progress = ignore_progress
) -> Restored:
    """Put a backup in the place of the database, with a new epoch of its ledger.

    O(size), and the check of its books, of which `progress` is told. What was there is kept beside
    it. Raises StoreError with nothing changed: if a server runs, or if the file is not a whole and
    right ledger of ours.
    """
    if not source.is_file():
        raise StoreError("unusable", f"{source} is no file.")
    with claimed(path):
        with written_whole(path, mode=0o600) as part:
            _copy(source, part)
            _check_has_schema(part, source)
            with closing(_open_checked(part, source, progress)) as store:
                before, missing = _count_missing(path, store)
                with store.change() as db:
                    epoch = begin_ledger_epoch(db, clock(), "restored", above=before)
            _make_single_file(part)
            kept = _set_aside(path)
        with closing(SqliteStore(path)) as store:
            save_known_point(store, clock)
    return Restored(epoch, missing, kept)


def mark_restored(store: Store, clock: WallClock) -> LedgerEpoch:
    """Begin a new epoch: the database was restored by other means. Raises StoreError, also where a
    server keeps the file."""
    store.claim()
    try:
        known = decode_known_point(store.recall())
        with store.change() as db:
            above = 0 if known is None else known.epoch
            epoch = begin_ledger_epoch(db, clock(), "marked", above=above)
        save_known_point(store, clock)
    finally:
        store.disclaim()
    return epoch


def _copy(source: Path, target: Path) -> None:
    """All pages as of one commit. A reader stops nobody, however long it takes."""
    try:
        with (
            closing(apsw.Connection(str(source), flags=apsw.SQLITE_OPEN_READONLY)) as there,
            closing(apsw.Connection(str(target))) as here,
        ):
            there.set_busy_handler(is_patient)
            with here.backup("main", there, "main") as pages:
                pages.step(-1)
    except apsw.NotADBError as error:
        raise StoreError("unusable", f"{source} is no database.") from error
    except apsw.Error as error:
        raise StoreError("unusable", f"{source} cannot be copied: {error}.") from error
    _make_single_file(target)


def _make_single_file(path: Path) -> None:
    """One file, with nothing beside it, and on the disk. Raises StoreError, StoreBusy where another
    program has it open."""
    try:
        with closing(apsw.Connection(str(path))) as connection:
            connection.set_busy_handler(is_patient)
            mode = connection.execute("pragma journal_mode=delete").fetchall()
    except (apsw.BusyError, apsw.LockedError) as error:
        raise StoreBusy("in_use", f"{path} is in use by another program.") from error
    except apsw.Error as error:
        raise StoreError("unusable", f"{path} cannot be used: {error}.") from error
    assert mode == [("delete",)], "it cannot be left only while others have it"
    synced(path)


def _set_aside(path: Path) -> Path | None:
    """A second name for what is there, whole: the first one is about to be another's. What is
    damaged keeps what lies beside it."""
    if path.exists():
        try:
            _make_single_file(path)
        except StoreBusy:
            raise
        except StoreError:
            pass  # that may be why it is replaced
    kept = path.with_name(f"{path.name}.replaced")
    for suffix in ("", *_COMPANION_SUFFIXES):
        _companion(kept, suffix).unlink(missing_ok=True)
    for suffix in _COMPANION_SUFFIXES:
        with suppress(FileNotFoundError):
            _companion(path, suffix).replace(_companion(kept, suffix))
    if not path.exists():
        return None
    os.link(path, kept)
    return kept


def _companion(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}{suffix}")


def _check_has_schema(path: Path, source: Path) -> None:
    """What has no schema would be opened as a new ledger: an empty file, where copying one to its
    place had failed. Raises StoreError, naming the source."""
    with closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)) as connection:
        if connection.execute("pragma user_version").fetchall() == [(0,)]:
            raise StoreError("not_ours", f"{source} has no ledger in it.")


def _open_checked(path: Path, source: Path, progress: Progress) -> SqliteStore:
    """Sound, ours, of no later version, and right. Raises StoreError, naming the source."""
    try:
        store = SqliteStore(path)
    except StoreError as error:
        raise StoreError(error.code, error.message.replace(str(path), str(source))) from error
    try:
        found = [str(row[0]) for row in store.query("pragma integrity_check(1)")]
        findings = check_books(store, progress) if found == ["ok"] else found
    except BaseException:
        store.close()
        raise
    if findings:
        store.close()
        raise StoreError("damaged", f"{source} is not restored: {findings[0]}.")
    return store


def _count_missing(path: Path, backup: Store) -> tuple[int, MissingEntries]:
    """The epoch of the ledger that is there now, and what of it the backup has not. It may be
    damaged, which is why it is replaced: then what was last known of it must do."""
    entry_id, chain = 0, ""
    for row in backup.query("select entry_id, chain from ledger order by entry_id desc limit 1"):
        entry_id, chain = row[0], bytes(row[1]).hex()
    if not path.exists():
        return 0, MissingEntries()
    with suppress(StoreError), closing(SqliteStore(path)) as store:
        number = ledger_epoch(store).number
        if not has_entry(store, entry_id, chain):
            return number, MissingEntries()
        sql = "select count(*), min(booked_ms), max(ended_ms) from ledger where entry_id > ?"
        return number, MissingEntries(*store.query(sql, (entry_id,))[0])
    known = decode_known_point(recalled(path))
    return (known.epoch, MissingEntries(until_ms=known.at_ms)) if known else (0, MissingEntries())
