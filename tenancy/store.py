"""The database: SQLite in WAL mode, `synchronous=FULL`, migrations forward only.

One connection with one lock; whoever writes holds it for a transaction. Other processes may write
beside it (the command line does): `changed` says cheaply whether anybody has.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import apsw

from tenancy.errors import StoreError

SQLITE_MIN = (3, 51, 3)
"""The WAL-reset fault is fixed from here on."""

BUSY_TIMEOUT_MS = 5_000

Value = None | int | float | str | bytes
Row = tuple[Any, ...]


class Store:
    """An open database file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Open, or make, and bring it up to date. Raises StoreError."""
        version = tuple(int(part) for part in apsw.sqlite_lib_version().split("."))
        if version < SQLITE_MIN:
            raise StoreError("sqlite_too_old", f"SQLite {apsw.sqlite_lib_version()} is too old.")
        self.path = path
        self._lock = threading.RLock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            self._db = apsw.Connection(str(path))
            self._db.set_busy_timeout(BUSY_TIMEOUT_MS)
            for pragma in ("journal_mode=wal", "synchronous=full", "foreign_keys=on"):
                self._db.execute(f"pragma {pragma}").fetchall()
            self._migrate()
        except (OSError, apsw.Error) as error:
            raise StoreError("unusable", f"{path} cannot be used: {error}.") from error
        self._seen = self._data_version()

    def query(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Rows of one statement."""
        with self._lock:
            return list(self._db.execute(sql, tuple(values)))

    @contextmanager
    def transaction(self) -> Iterator[apsw.Connection]:
        """All or nothing, durable when it has ended. Takes the write lock at once."""
        with self._lock:
            self._db.execute("begin immediate")
            try:
                yield self._db
            except BaseException:
                self._db.execute("rollback")
                raise
            try:
                self._db.execute("commit")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("rollback")
                raise

    def changed(self) -> bool:
        """Has another process written since the last time this was asked? About 5 us."""
        version = self._data_version()
        changed, self._seen = version != self._seen, version
        return changed

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        with self._lock:
            self._db.close()

    def _data_version(self) -> int:
        with self._lock:
            return int(self._db.execute("pragma data_version").get)

    def _migrate(self) -> None:
        folder = resources.files("tenancy").joinpath("migrations")
        files = [item for item in folder.iterdir() if item.name.endswith(".sql")]
        files.sort(key=lambda item: item.name)
        with self.transaction() as db:
            have = int(db.execute("pragma user_version").get)
            if have > len(files):
                raise StoreError(
                    "newer_schema",
                    f"{self.path} was written by a newer version (schema {have}, this program"
                    f" knows {len(files)}).",
                )
            for number, file in enumerate(files[have:], have + 1):
                db.execute(file.read_text())
                db.execute(f"pragma user_version={number}")
