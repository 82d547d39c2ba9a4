"""The database: SQLite in WAL mode, `synchronous=FULL`, migrations forward only.

Two connections, each behind its own lock: a writer, which waits for the disk, and a reader, which
never does, so that a question asked on an event loop costs microseconds while a commit is being
made durable. Other processes may write beside it (the command line does). It knows no tables but
those of its own bookkeeping; `keys`, `registry` and `ledger` call it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import apsw

from tenancy.errors import StoreError

SQLITE_MIN = (3, 51, 3)
"""Before it, two connections that write and checkpoint at once may corrupt the file."""

BUSY_TIMEOUT_MS = 5_000
APPLICATION_ID = 0x7472756E
"""Stands in the file's header: how we know a database of ours."""

Value = None | int | float | str | bytes
Row = tuple[Any, ...]


class Store:
    """An open database file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Open, or make, for its owner alone, and bring it up to date. Raises StoreError."""
        check_sqlite(apsw.sqlite_lib_version())
        self.path = path
        self._write_lock = threading.RLock()
        self._read_lock = threading.Lock()
        self._open()

    def query(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Rows of one statement, as of the last commit. Waits for no writer. Raises StoreError."""
        try:
            with self._read_lock:
                return list(self._reader.execute(sql, tuple(values)))
        except apsw.Error as error:
            raise StoreError("unusable", f"{self.path} cannot be read: {error}.") from error

    @contextmanager
    def transaction(self) -> Iterator[apsw.Connection]:
        """All or nothing, durable when it has ended. Takes the write lock at once.

        Raises apsw.Error, after five seconds behind another process too. What is raised inside
        rolls back and goes on.
        """
        with self._write_lock:
            self._writer.execute("begin immediate")
            try:
                yield self._writer
                self._writer.execute("commit")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("rollback")
                raise

    @contextmanager
    def change(self) -> Iterator[apsw.Connection]:
        """A transaction for those who have nothing to decide when it fails. Raises StoreError."""
        try:
            with self.transaction() as db:
                yield db
        except apsw.Error as error:
            raise StoreError("not_written", f"{self.path} was not changed: {error}.") from error

    @contextmanager
    def snapshot(self) -> Iterator[apsw.Connection]:
        """Reads only, all as of one commit, on a connection of its own: nobody waits for it, and
        it for nobody, however long it takes. Raises StoreError."""
        try:
            with closing(apsw.Connection(str(self.path))) as connection:
                connection.set_busy_timeout(BUSY_TIMEOUT_MS)
                connection.execute("pragma query_only=on").fetchall()
                connection.execute("begin")
                yield connection
        except apsw.Error as error:
            raise StoreError("unusable", f"{self.path} cannot be read: {error}.") from error

    def registry_version(self) -> int:
        """Differs after any change of tenants or keys, by whatever process. About 12 us."""
        return int(self.query("select version from registry_version")[0][0])

    def reopen(self) -> None:
        """After an error of the disk: close, open, and check the whole file before going on.

        What a failed fsync left in memory is not trusted. O(size of the file); until it has ended
        queries raise. Raises StoreError.
        """
        with self._write_lock:
            self.close()
            self._open()
            found = [row[0] for row in self._writer.execute("pragma quick_check(1)")]
            if found != ["ok"]:
                self.close()
                raise StoreError("damaged", f"{self.path} is damaged: {found[0]}.")

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        with self._write_lock, self._read_lock:
            self._reader.close()
            self._writer.close()

    def _open(self) -> None:
        connections: list[apsw.Connection] = []
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch(mode=0o600)
            self.path.chmod(0o600)
            for _ in ("writer", "reader"):
                connection = apsw.Connection(str(self.path))
                connections.append(connection)
                connection.set_busy_timeout(BUSY_TIMEOUT_MS)
            self._writer, reader = connections
            for pragma in ("journal_mode=wal", "synchronous=full", "foreign_keys=on"):
                # A pragma that answers with a row has not run until the row is fetched.
                self._writer.execute(f"pragma {pragma}").fetchall()
            self._migrate()
            reader.execute("pragma query_only=on").fetchall()
        except (OSError, apsw.Error, StoreError) as error:
            for connection in connections:
                connection.close()
            if isinstance(error, StoreError):
                raise
            raise StoreError("unusable", f"{self.path} cannot be used: {error}.") from error
        self._reader = reader

    def _migrate(self) -> None:
        """Run what is missing, in one transaction: a killed migration never happened."""
        files = migrations()
        with self.transaction() as db:
            have = int(db.execute("pragma user_version").get)
            whose = int(db.execute("pragma application_id").get)
            if whose not in (0, APPLICATION_ID) or (
                not have and db.execute("select 1 from sqlite_schema").fetchall()
            ):
                raise StoreError("not_ours", f"{self.path} is the database of another program.")
            if have > len(files):
                raise StoreError(
                    "newer_schema",
                    f"{self.path} was written by a newer version (schema {have}; this program"
                    f" knows {len(files)}).",
                )
            for number, sql in enumerate(files[have:], have + 1):
                db.execute(sql).fetchall()
                db.execute(f"pragma user_version={number}").fetchall()
            db.execute(f"pragma application_id={APPLICATION_ID}").fetchall()


def rows_of(db: apsw.Connection, sql: str, values: Sequence[Value] = ()) -> list[Row]:
    """All rows of one statement within a transaction. Raises apsw.Error."""
    return list(db.execute(sql, tuple(values)))


def migrations() -> list[str]:
    """The schema's steps, in order: number N is the step to version N."""
    folder = resources.files("tenancy").joinpath("migrations")
    files = sorted(
        (item for item in folder.iterdir() if item.name.endswith(".sql")),
        key=lambda item: item.name,
    )
    for number, file in enumerate(files, 1):
        assert file.name.startswith(f"{number:04d}_"), f"{file.name} is out of order"
    return [file.read_text() for file in files]


def check_sqlite(version: str) -> None:
    """Raises StoreError for a SQLite that may lose what it confirmed."""
    if tuple(int(part) for part in version.split(".")) < SQLITE_MIN:
        wanted = ".".join(map(str, SQLITE_MIN))
        raise StoreError(
            "sqlite_too_old", f"SQLite {version} may damage a database; {wanted} is needed."
        )
