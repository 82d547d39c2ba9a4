"""Backups of a ledger file beside a running server, and their restore.

A backup is complete or absent, and as of one commit. A restore checks the backup first: it must be
a sound ledger database, and its books must be right. Then it replaces the present database
atomically and begins a new ledger epoch. On a PostgreSQL server `pg_dump` does this. The command
line calls the module.
"""

from __future__ import annotations

import os
import shutil
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
from tenancy.storage.atomic_files import atomic_write, fsync_path
from tenancy.storage.audit_log import Actor, record
from tenancy.storage.interface import Store
from tenancy.storage.sqlite import SqliteStore, hold_writer_lock, read_marker, retry_while_busy
from tenancy.types import WallClock

_COMPANION_SUFFIXES = ("-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite keeps beside a database."""


class MissingEntries(Struct, frozen=True):
    """Entries of the replaced ledger that the restored one lacks, and when they were booked.

    `entries` and the times are None if they cannot be determined.
    """

    entries: int | None = None
    since_ms: int | None = None
    until_ms: int | None = None


class Restored(Struct, frozen=True):
    """The result of a restore."""

    epoch: LedgerEpoch
    missing: MissingEntries
    kept: Path | None
    """The path of the replaced database, if there was one."""


def backup(path: Path, target: Path) -> int:
    """Copy the database as of one commit, while others write. Returns the size of the copy in
    bytes.

    O(size). Creates `target`, readable by its owner only. Raises StoreError, also if `target`
    exists; `no_room` if its disk is full.
    """
    if target.exists():
        raise StoreError("target_exists", f"File exists: {target}; expected a new file.")
    with atomic_write(target, mode=0o600) as part:
        _copy(path, part)
    return target.stat().st_size


def restore(
    source: Path, path: Path, clock: WallClock, progress: Progress = ignore_progress
) -> Restored:
    """Replace the database by a backup and begin a new ledger epoch.

    O(size), plus the audit of the backup, which reports to `progress`. The replaced database is
    kept beside it. Raises StoreError with nothing changed if a server uses the database or the
    backup is not a complete and correct ledger.
    """
    if not source.is_file():
        raise StoreError("unusable", f"Not a file: {source}.")
    with hold_writer_lock(path):
        with atomic_write(path, mode=0o600) as part:
            _copy(source, part)
            _check_has_schema(part, source)
            with closing(_open_checked(part, source, progress)) as store:
                old_epoch, missing = _count_missing(path, store)
                with store.change() as db:
                    epoch = begin_ledger_epoch(db, clock(), "restored", above=old_epoch)
            _make_single_file(part)
            kept = _set_aside(path)
        with closing(SqliteStore(path)) as store:
            save_known_point(store, clock)
    return Restored(epoch, missing, kept)


def mark_restored(store: Store, clock: WallClock, by: Actor) -> LedgerEpoch:
    """Begin a new ledger epoch, after the database was restored by other means.

    Raises StoreError, also if a server uses the file.
    """
    store.claim()
    try:
        known = decode_known_point(store.load_marker())
        with store.change() as db:
            above = 0 if known is None else known.epoch
            epoch = begin_ledger_epoch(db, clock(), "marked", above=above)
            record(db, by, "ledger.restore", f"ledger_epoch:{epoch.number}")
        save_known_point(store, clock)
    finally:
        store.release_claim()
    return epoch


def _copy(source: Path, target: Path) -> None:
    """Copy all pages as of one commit. A reader blocks no writer, however long the copy takes."""
    try:
        with (
            closing(apsw.Connection(str(source), flags=apsw.SQLITE_OPEN_READONLY)) as there,
            closing(apsw.Connection(str(target))) as here,
        ):
            there.set_busy_handler(retry_while_busy)
            with here.backup("main", there, "main") as pages:
                pages.step(-1)
    except apsw.NotADBError as error:
        raise StoreError("unusable", f"Not a database: {source}.") from error
    except apsw.FullError as error:
        raise _no_room(source, target) from error
    except apsw.IOError as error:
        # SQLite's message would be "not an error": the result of the other connection.
        if getattr(error, "extendedresult", 0) in _READ_ERRORS:  # untyped in apsw
            raise StoreError("unusable", f"Cannot read {source}: the disk reports an error.") from (
                error
            )
        raise _no_room(source, target) from error
    except apsw.Error as error:
        raise StoreError("unusable", f"Cannot copy {source}: {error}.") from error
    _make_single_file(target)


_READ_ERRORS = (apsw.SQLITE_IOERR_READ, apsw.SQLITE_IOERR_SHORT_READ)


def _no_room(source: Path, target: Path) -> StoreError:
    """Return the error of a copy that its target's disk did not take, with the needed bytes."""
    folder = target.parent
    message = (
        f"Cannot write the copy in {folder}: it needs {source.stat().st_size} bytes, and the disk"
        f" took less ({shutil.disk_usage(folder).free} are free). Free space there, or choose a"
        " folder on another disk."
    )
    return StoreError("no_room", message)


def _make_single_file(path: Path) -> None:
    """Write the journal back, so the database is one file on disk.

    Raises StoreError, and StoreBusy if another program has it open.
    """
    try:
        with closing(apsw.Connection(str(path))) as connection:
            connection.set_busy_handler(retry_while_busy)
            mode = connection.execute("pragma journal_mode=delete").fetchall()
    except (apsw.BusyError, apsw.LockedError) as error:
        raise StoreBusy("in_use", f"Database is in use by another program: {path}.") from error
    except apsw.Error as error:
        raise StoreError("unusable", f"Cannot use {path}: {error}.") from error
    assert mode == [("delete",)], "only another open connection keeps the mode"
    fsync_path(path)


def _set_aside(path: Path) -> Path | None:
    """Link the present database to a second name, before the first name is replaced.

    A damaged database keeps its journal files.
    """
    if path.exists():
        try:
            _make_single_file(path)
        except StoreBusy:
            raise
        except StoreError:
            pass  # a damaged database may be replaced
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
    """Raise StoreError, naming the source, if the file has no schema.

    An empty file, as left by a failed copy, would otherwise be opened as a new ledger.
    """
    with closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)) as connection:
        if connection.execute("pragma user_version").fetchall() == [(0,)]:
            raise StoreError("not_ours", f"Not a ledger: {source}.")


def _open_checked(path: Path, source: Path, progress: Progress) -> SqliteStore:
    """Open a backup and audit it. Raises StoreError, naming the source, if it is not usable."""
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
        raise StoreError("damaged", f"Backup is damaged: {source}: {findings[0]}.")
    return store


def _count_missing(path: Path, backup: Store) -> tuple[int, MissingEntries]:
    """Return the present ledger's epoch and the entries that the backup lacks.

    A damaged database cannot be counted; then the last known point is used.
    """
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
    known = decode_known_point(read_marker(path))
    return (known.epoch, MissingEntries(until_ms=known.at_ms)) if known else (0, MissingEntries())
