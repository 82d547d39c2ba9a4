"""A store in a file: SQLite in WAL mode, `synchronous=FULL`, forward migrations only.

Two connections, each with its own lock: a writer, which waits for the disk, and a reader, which
never does, so that a query on an event loop costs microseconds while a commit is being made
durable. Other processes may write to the file, too (the command line does). After a disk error
neither connection's memory is trusted: the next query opens the file anew, and the next change
checks the whole file first. This module knows no tables but those of its own bookkeeping.
`tenancy.storage.backends` opens it.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from types import TracebackType

import apsw

from tenancy.errors import ConstraintBroken, StoreBusy, StoreError
from tenancy.storage.atomic_files import atomic_write
from tenancy.storage.interface import Row, Transaction, Value
from tenancy.storage.schema import check_version, migrations, other_program, unreleased

SQLITE_MIN = (3, 51, 3)
"""Oldest safe version: before it, two connections that write and checkpoint at once may corrupt the
file."""

BUSY_TIMEOUT_MS = 5_000
BUSY_RETRY_MS = 0.25
CLAIM_RETRY_S = 0.02
ROOM_BYTES = 32 * 2**20
"""Room that is held for deletions: several times the largest row and the log before its pages are
copied."""
_DISK_ERRORS = (
    apsw.IOError,
    apsw.CorruptError,
    apsw.NotADBError,
    apsw.CantOpenError,
    apsw.ReadOnlyError,
)
"""Errors that leave their effect in the connection: a page read wrong once stays wrong there."""

APPLICATION_ID = 0x74726462
"""Written to the file's header; identifies a Trunkline database."""
UNRELEASED_ID = 0x7472756E
"""The same from before the first release, whose migrations had other numbers."""
_VERSIONS = ("user_version", "application_id")
"""What the file's header says: the number of migrations that ran, and whose file it is."""


class SqliteTransaction:
    """A transaction that has begun and not ended."""

    __slots__ = ("_connection", "as_of")

    def __init__(self, connection: apsw.Connection) -> None:
        """`as_of`: a connection's pager counts all commits that it has seen, its own and others';
        another connection's count is unrelated."""
        self._connection = connection
        self.as_of: object = (connection, connection.data_version())

    def commit(self) -> None:
        """Commit. Raises apsw.Error, with everything rolled back."""
        try:
            self._connection.execute("commit")
        except BaseException:
            self.roll_back()
            raise
        self.as_of = (self._connection, self._connection.data_version())

    def roll_back(self) -> None:
        """Roll back, unless an error has done so."""
        if self._connection.in_transaction:
            self._connection.execute("rollback")

    def execute(self, sql: str, values: Sequence[Value] = ()) -> int:
        """See `Transaction`."""
        self._connection.execute(sql, tuple(values)).fetchall()
        return int(self._connection.changes())

    def execute_many(self, sql: str, rows: Sequence[Sequence[Value]]) -> None:
        """See `Transaction`."""
        if rows:
            self._connection.executemany(sql, rows)

    def rows(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """See `Transaction`."""
        return list(self._connection.execute(sql, tuple(values)))


class LockedTransaction:
    """A transaction with its lock, for one `with`.

    Written out, without generators: each request waits for one of these, and two generator context
    managers were a tenth of the Python time of a transaction.
    """

    __slots__ = ("_count", "_db", "_lock", "_store_error", "_writer")

    def __init__(
        self,
        lock: AbstractContextManager[object],
        writer: Callable[[], apsw.Connection],
        store_error: Callable[[apsw.Error], StoreError],
        count: Callable[[], None],
    ) -> None:
        """`writer`: returns the connection, called under the lock. `store_error`: converts apsw's
        errors. `count`: called after the commit, under the lock."""
        self._lock, self._writer, self._store_error, self._count = lock, writer, store_error, count

    def __enter__(self) -> SqliteTransaction:
        self._lock.__enter__()
        try:
            writer = self._writer()
            writer.execute("begin immediate")
            self._db = SqliteTransaction(writer)
        except BaseException as error:
            self._lock.__exit__(None, None, None)
            if isinstance(error, apsw.Error):
                raise self._store_error(error) from error
            raise
        return self._db

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._db.commit()
                self._count()
            else:
                self._db.roll_back()
                if isinstance(error, apsw.Error):
                    raise error
        except apsw.Error as failure:
            raise self._store_error(failure) from failure
        finally:
            self._lock.__exit__(None, None, None)


class SqliteStore:
    """An open database file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it only for its owner, and run missing migrations. Raises
        StoreError."""
        check_sqlite(apsw.sqlite_lib_version())
        self.path = path
        self._room = path.with_name(f"{path.name}.room")
        self._write_lock = threading.RLock()
        self._read_lock = threading.Lock()
        self._claim: int | None = None
        self._reader: apsw.Connection | None = None  # opened on first use
        self._is_closed = False
        self._needs_check = False  # a disk error occurred; check the file before the next change
        self.changes = 0
        self._writer = self._open_writer()

    @property
    def place(self) -> str:
        """Path of the file."""
        return str(self.path)

    def query(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """See `Store`. Waits for no writer. Raises StoreError."""
        try:
            with self._read_lock:
                try:
                    return list(self._reader_connection().execute(sql, tuple(values)))
                except _DISK_ERRORS:
                    self._close_reader()
                    raise
        except apsw.Error as error:
            raise self._read_error(error) from error

    def change(self) -> AbstractContextManager[Transaction]:
        """See `Store`. Takes the write lock at once; after a disk error it reopens and checks the
        file first.

        Raises StoreError; StoreBusy also after five seconds behind another process.
        """
        return LockedTransaction(
            self._write_lock, self._checked_writer, self._write_error, self._count
        )

    @contextmanager
    def snapshot(self) -> Iterator[Transaction]:
        """See `Store`. Uses a connection of its own. Raises StoreError."""
        try:
            with closing(apsw.Connection(str(self.path))) as connection:
                connection.set_busy_handler(retry_while_busy)
                connection.execute("pragma query_only=on").fetchall()
                connection.execute("begin")
                yield SqliteTransaction(connection)
        except apsw.Error as error:
            raise self._read_error(error) from error

    def registry_version(self) -> int:
        """See `Store`. About 12 us."""
        return int(self.query("select version from registry_version")[0][0])

    @property
    def is_local(self) -> bool:
        """True: a query reads the page cache."""
        return True

    def claim(self, successor_of: int = 0, patience_s: float = 0.0) -> int:
        """See `Store`. Locks a file beside the database, which the kernel unlocks when the process
        ends.

        The lock's holder owns all holds, so every writer has the id 0. Raises StoreError.
        """
        assert self._claim is None, "claimed once"
        until_s = time.monotonic() + patience_s
        while True:
            try:
                self._claim = _lock(self.path)
                return 0
            except StoreError:
                if time.monotonic() >= until_s:
                    raise
                time.sleep(CLAIM_RETRY_S)

    def release_claim(self) -> None:
        """See `Store`."""
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def is_writer_gone(self, writer_id: int) -> bool:
        """See `Store`. True: the holder of the lock is the only writer."""
        return True

    def hold_gateway(self, name: str) -> bool:
        """See `Store`. True: a file has one gateway, the one that may `claim` it."""
        return True

    def is_gateway_held(self, name: str) -> bool:
        """See `Store`. True for the one gateway."""
        return True

    def save_marker(self, marker: bytes) -> None:
        """See `Store`. Durable. Raises OSError."""
        with atomic_write(_marker_path(self.path), mode=0o600) as part:
            part.write_bytes(marker)

    def load_marker(self) -> bytes | None:
        """See `Store`."""
        return read_marker(self.path)

    def keep_room(self) -> None:
        """See `Store`. The room is a file beside the database."""
        disk = os.statvfs(self.path.parent)
        with suppress(OSError):  # the disk has less by now
            self._room.touch(mode=0o600)
            held = self._room.stat().st_size
            size = min(ROOM_BYTES, held + disk.f_bavail * disk.f_frsize * 7 // 8)
            if size > held:
                with self._room.open("ab") as file:
                    os.posix_fallocate(file.fileno(), 0, size)

    def make_room(self) -> None:
        """See `Store`."""
        disk = os.statvfs(self.path.parent)
        if disk.f_bavail * disk.f_frsize < ROOM_BYTES:
            self._room.unlink(missing_ok=True)

    def open_another(self) -> SqliteStore:
        """See `Store`."""
        return SqliteStore(self.path)

    def reopen(self) -> None:
        """Open the file again after a disk error, check it completely, and continue with it.

        The memory of the old connections is not trusted. O(size of the file); queries are answered
        meanwhile, since reading spreads no damage. Raises StoreError; the next change tries again.
        """
        with self._write_lock:
            self._needs_check = True
            with self._read_lock:
                self._close_reader()
            # The old writer stays open until the check has passed: the only connection of a file
            # moves the log into it when it closes, and drops the log's invalid end when it opens.
            writer = self._open_writer()
            try:
                found = [row[0] for row in writer.execute("pragma quick_check(1)")]
            except apsw.Error as error:  # the disk still fails
                found = [str(error)]
            if found != ["ok"]:
                _close_quietly(writer)
                raise StoreError("damaged", f"{self.path} is damaged: {found[0]}.")
            _close_quietly(self._writer)
            self._writer, self._needs_check = writer, False

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        with self._write_lock, self._read_lock:
            self._is_closed = True
            self._close_reader()
            _close_quietly(self._writer)

    def _open_writer(self) -> apsw.Connection:
        """Return a writing connection to an up-to-date file."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch(mode=0o600)
            self.path.chmod(0o600)
            writer = self._connect()
            try:
                # Deleted content is overwritten: erased prompts must not remain in free pages.
                for pragma in ("journal_mode=wal", "synchronous=full", "secure_delete=on"):
                    # A pragma with a result row has not run until the row is fetched.
                    writer.execute(f"pragma {pragma}").fetchall()
                # Foreign keys are switched on after migrations: without them a referenced table can
                # be rebuilt.
                self._migrate(writer)
                writer.execute("pragma foreign_keys=on").fetchall()
            except BaseException:
                _close_quietly(writer)
                raise
        except (OSError, apsw.Error) as error:
            raise StoreError("unusable", f"{self.path} cannot be used: {error}.") from error
        return writer

    def _connect(self) -> apsw.Connection:
        connection = apsw.Connection(str(self.path))
        connection.set_busy_handler(retry_while_busy)
        return connection

    def _reader_connection(self) -> apsw.Connection:
        """Return the reading connection, which takes a millisecond to open. Call under its lock."""
        if self._reader is None:
            if self._is_closed:
                raise apsw.ConnectionClosedError("the store is closed")
            self._reader = self._connect()
            self._reader.execute("pragma query_only=on").fetchall()
        return self._reader

    def _close_reader(self) -> None:
        if self._reader is not None:
            _close_quietly(self._reader)
            self._reader = None

    def _checked_writer(self) -> apsw.Connection:
        if self._needs_check and not self._is_closed:
            self.reopen()
        return self._writer

    def _migrate(self, writer: apsw.Connection) -> None:
        """Run missing migrations in one transaction: a killed migration leaves nothing.

        A file that lacks none is not written: it opens on a full disk, and behind a long change.
        """
        files = migrations("sqlite")
        found = [writer.execute(f"pragma {name}").fetchall()[0][0] for name in _VERSIONS]
        if found == [len(files), APPLICATION_ID]:
            return
        with LockedTransaction(
            self._write_lock, lambda: writer, self._write_error, self._count
        ) as db:
            have, application_id = (int(db.rows(f"pragma {name}")[0][0]) for name in _VERSIONS)
            if application_id == UNRELEASED_ID:
                raise unreleased(self.place, have)
            is_new = have == application_id == 0 and not db.rows("select 1 from sqlite_schema")
            if not is_new and application_id != APPLICATION_ID:
                raise other_program(self.place)
            check_version(self.place, have, len(files))
            for number, sql in enumerate(files[have:], have + 1):
                db.execute(sql)
                db.execute(f"pragma user_version={number}")
            db.execute(f"pragma application_id={APPLICATION_ID}")

    def _count(self) -> None:
        self.changes += 1

    def _write_error(self, error: apsw.Error) -> StoreError:
        """Return the StoreError for a failed change; remember a disk error."""
        if isinstance(error, _DISK_ERRORS):
            self._needs_check = True
        message = f"{self.path} was not changed: {error}."
        match error:
            case apsw.ConstraintError():
                return ConstraintBroken("not_written", message)
            case apsw.BusyError() | apsw.LockedError() | apsw.FullError():
                return StoreBusy("not_written", message)
            case _:
                return StoreError("not_written", message)

    def _read_error(self, error: apsw.Error) -> StoreError:
        return StoreError("unusable", f"{self.path} cannot be read: {error}.")


def _close_quietly(connection: apsw.Connection) -> None:
    """Close a connection; the disk may fail this, too."""
    with suppress(apsw.Error):
        connection.close()


def retry_while_busy(tries: int) -> bool:
    """Busy handler: retry every quarter of a millisecond for at least five seconds.

    SQLite's own handler ends up retrying ten times a second; beside a process that writes without a
    pause it never finds the file free: two commits of the ledger are some 20 us apart.
    """
    if tries * BUSY_RETRY_MS >= BUSY_TIMEOUT_MS:
        return False
    time.sleep(BUSY_RETRY_MS / 1000)
    return True


def read_marker(path: Path) -> bytes | None:
    """Return the marker that a store of this file has kept, if it is readable."""
    try:
        return _marker_path(path).read_bytes()
    except OSError:
        return None


@contextmanager
def hold_writer_lock(path: Path) -> Iterator[None]:
    """Hold the writer's lock of this file, so that no server writes holds meanwhile. Raises
    StoreError."""
    file = _lock(path)
    try:
        yield
    finally:
        os.close(file)


def _lock(path: Path) -> int:
    file = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        cure = "stop that server, or use another data directory (--data-dir)"
        raise StoreError("in_use", f"{path} is in use by another server; {cure}.") from error
    return file


def _marker_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.known")


def check_sqlite(version: str) -> None:
    """Raise StoreError for a SQLite version that may lose confirmed commits."""
    if tuple(int(part) for part in version.split(".")) < SQLITE_MIN:
        wanted = ".".join(map(str, SQLITE_MIN))
        raise StoreError(
            "sqlite_too_old", f"SQLite {version} may damage a database; expected {wanted} or newer."
        )
