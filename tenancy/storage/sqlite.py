"""A store in a file: SQLite in WAL mode, `synchronous=FULL`, migrations forward only.

Two connections, each behind its own lock: a writer, which waits for the disk, and a reader, which
never does, so that a question asked on an event loop costs microseconds while a commit is being
made durable. Other processes may write beside it (the command line does). What a disk that failed
has left in memory is believed by neither: the next question opens the file anew, and the next
change checks all of it first. It knows no tables but those of its own bookkeeping; `backends` opens
it.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from importlib import resources
from pathlib import Path
from types import TracebackType

import apsw

from tenancy.errors import ConstraintBroken, StoreBusy, StoreError
from tenancy.storage.atomic_files import written_whole
from tenancy.storage.interface import Row, Transaction, Value

SQLITE_MIN = (3, 51, 3)
"""Before it, two connections that write and checkpoint at once may corrupt the file."""

BUSY_TIMEOUT_MS = 5_000
BUSY_EVERY_MS = 0.25
CLAIM_EVERY_S = 0.02
_OF_THE_DISK = (
    apsw.IOError,
    apsw.CorruptError,
    apsw.NotADBError,
    apsw.CantOpenError,
    apsw.ReadOnlyError,
)
"""Whatever came of it is still in the connection: a page that was read wrong once stays so."""

APPLICATION_ID = 0x7472756E
"""Stands in the file's header: how we know a database of ours."""


class SqliteTransaction:
    """Between a `begin` that has been made and its end."""

    __slots__ = ("_connection", "as_of")

    def __init__(self, connection: apsw.Connection) -> None:
        """`as_of`: a connection's pager counts all commits that it has seen, its own and those of
        others; another connection's begins anew."""
        self._connection = connection
        self.as_of: object = (connection, connection.data_version())

    def commit(self) -> None:
        """Raises apsw.Error, with all of it undone."""
        try:
            self._connection.execute("commit")
        except BaseException:
            self.roll_back()
            raise
        self.as_of = (self._connection, self._connection.data_version())

    def roll_back(self) -> None:
        """Some errors have done it."""
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

    Written out, without generators: each answer waits for one of these, and two context managers
    made of generators were a tenth of all that Python does for it.
    """

    __slots__ = ("_count", "_db", "_lock", "_named", "_writer")

    def __init__(
        self,
        lock: AbstractContextManager[object],
        writer: Callable[[], apsw.Connection],
        named: Callable[[apsw.Error], StoreError],
        count: Callable[[], None],
    ) -> None:
        """`writer`: asked for under the lock. `named`: what an error is called outside. `count`:
        told of the commit, under the lock."""
        self._lock, self._writer, self._named, self._count = lock, writer, named, count

    def __enter__(self) -> SqliteTransaction:
        self._lock.__enter__()
        try:
            writer = self._writer()
            writer.execute("begin immediate")
            self._db = SqliteTransaction(writer)
        except BaseException as error:
            self._lock.__exit__(None, None, None)
            if isinstance(error, apsw.Error):
                raise self._named(error) from error
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
            raise self._named(failure) from failure
        finally:
            self._lock.__exit__(None, None, None)


class SqliteStore:
    """An open database file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Open, or make, for its owner alone, and bring it up to date. Raises StoreError."""
        check_sqlite(apsw.sqlite_lib_version())
        self.path = path
        self._write_lock = threading.RLock()
        self._read_lock = threading.Lock()
        self._claim: int | None = None
        self._reader: apsw.Connection | None = None  # made when it is needed
        self._is_closed = False
        self._is_doubtful = False  # the disk has failed the writer; check before going on
        self.changes = 0
        self._writer = self._opened()

    @property
    def place(self) -> str:
        """Its path."""
        return str(self.path)

    def query(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Rows of one statement, as of the last commit. Waits for no writer. Raises StoreError."""
        try:
            with self._read_lock:
                try:
                    return list(self._reading().execute(sql, tuple(values)))
                except _OF_THE_DISK:
                    self._end_reading()
                    raise
        except apsw.Error as error:
            raise self._unreadable(error) from error

    def change(self) -> AbstractContextManager[Transaction]:
        """All or nothing, durable when it has ended. Takes the write lock at once; after an error
        of the disk it is a `reopen` first.

        Raises StoreError, StoreBusy after five seconds behind another process too.
        """
        return LockedTransaction(
            self._write_lock, self._sound_writer, self._not_written, self._count
        )

    @contextmanager
    def snapshot(self) -> Iterator[Transaction]:
        """Reads only, all as of one commit, on a connection of its own. Raises StoreError."""
        try:
            with closing(apsw.Connection(str(self.path))) as connection:
                connection.set_busy_handler(is_patient)
                connection.execute("pragma query_only=on").fetchall()
                connection.execute("begin")
                yield SqliteTransaction(connection)
        except apsw.Error as error:
            raise self._unreadable(error) from error

    def registry_version(self) -> int:
        """Differs after any change of tenants or keys, by whatever process. About 12 us."""
        return int(self.query("select version from registry_version")[0][0])

    @property
    def is_near(self) -> bool:
        """A question is a look into the page cache."""
        return True

    def claim(self, successor_of: int = 0, patience_s: float = 0.0) -> int:
        """One process keeps holds: a lock on a file beside the database, which the kernel lets go
        of when the process ends, however it does. They are whose the lock is. Raises StoreError."""
        assert self._claim is None, "claimed once"
        until_s = time.monotonic() + patience_s
        while True:
            try:
                self._claim = _locked(self.path)
                return 0
            except StoreError:
                if time.monotonic() >= until_s:
                    raise
                time.sleep(CLAIM_EVERY_S)

    def disclaim(self) -> None:
        """Let another. Safe to call twice."""
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def is_over(self, writer_id: int) -> bool:
        """Who holds the lock is alone."""
        return True

    def remember(self, point: bytes) -> None:
        """Keep it beside the file, durably. Raises OSError."""
        with written_whole(_known(self.path), mode=0o600) as part:
            part.write_bytes(point)

    def recall(self) -> bytes | None:
        """What was kept beside it."""
        return recalled(self.path)

    def another(self) -> SqliteStore:
        """The same file, opened again. Raises StoreError."""
        return SqliteStore(self.path)

    def reopen(self) -> None:
        """After an error of the disk: open, check the whole file, and go on with that.

        What the disk left in the memory of the connections before is not trusted. O(size of the
        file); questions are answered meanwhile, for they spread nothing. Raises StoreError; the
        next change tries again.
        """
        with self._write_lock:
            self._is_doubtful = True
            with self._read_lock:
                self._end_reading()
            # The old one stays until the file was found sound: who is alone at a file moves its
            # log into it at the end, and throws away at the start what it reads wrong there.
            writer = self._opened()
            try:
                found = [row[0] for row in writer.execute("pragma quick_check(1)")]
            except apsw.Error as error:  # the disk is no better yet
                found = [str(error)]
            if found != ["ok"]:
                _end(writer)
                raise StoreError("damaged", f"{self.path} is damaged: {found[0]}.")
            _end(self._writer)
            self._writer, self._is_doubtful = writer, False

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        with self._write_lock, self._read_lock:
            self._is_closed = True
            self._end_reading()
            _end(self._writer)

    def _opened(self) -> apsw.Connection:
        """A writer, on a file that is up to date; the reader comes when it is needed."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch(mode=0o600)
            self.path.chmod(0o600)
            writer = self._connected()
            try:
                # What is deleted is written over: erased contents must not lie in free pages.
                for pragma in ("journal_mode=wal", "synchronous=full", "secure_delete=on"):
                    # A pragma that answers with a row has not run until the row is fetched.
                    writer.execute(f"pragma {pragma}").fetchall()
                # Foreign keys later: a table that others refer to can only be made anew without.
                self._migrate(writer)
                writer.execute("pragma foreign_keys=on").fetchall()
            except BaseException:
                _end(writer)
                raise
        except (OSError, apsw.Error) as error:
            raise StoreError("unusable", f"{self.path} cannot be used: {error}.") from error
        return writer

    def _connected(self) -> apsw.Connection:
        connection = apsw.Connection(str(self.path))
        connection.set_busy_handler(is_patient)
        return connection

    def _reading(self) -> apsw.Connection:
        """The connection that reads; it takes a millisecond to make. Under its lock."""
        if self._reader is None:
            if self._is_closed:
                raise apsw.ConnectionClosedError("it is closed here")
            self._reader = self._connected()
            self._reader.execute("pragma query_only=on").fetchall()
        return self._reader

    def _end_reading(self) -> None:
        if self._reader is not None:
            _end(self._reader)
            self._reader = None

    def _sound_writer(self) -> apsw.Connection:
        if self._is_doubtful and not self._is_closed:
            self.reopen()
        return self._writer

    def _migrate(self, writer: apsw.Connection) -> None:
        """Run what is missing, in one transaction: a killed migration never happened."""
        files = migrations()
        with LockedTransaction(
            self._write_lock, lambda: writer, self._not_written, self._count
        ) as db:
            have = int(db.rows("pragma user_version")[0][0])
            whose = int(db.rows("pragma application_id")[0][0])
            if whose not in (0, APPLICATION_ID) or (
                not have and db.rows("select 1 from sqlite_schema")
            ):
                raise StoreError("not_ours", f"{self.path} is the database of another program.")
            if have > len(files):
                raise StoreError(
                    "newer_schema",
                    f"{self.path} was written by a newer version (schema {have}; this program"
                    f" knows {len(files)}).",
                )
            for number, sql in enumerate(files[have:], have + 1):
                db.execute(sql)
                db.execute(f"pragma user_version={number}")
            db.execute(f"pragma application_id={APPLICATION_ID}")

    def _count(self) -> None:
        self.changes += 1

    def _not_written(self, error: apsw.Error) -> StoreError:
        """What it is called outside; one of the disk is remembered."""
        if isinstance(error, _OF_THE_DISK):
            self._is_doubtful = True
        message = f"{self.path} was not changed: {error}."
        match error:
            case apsw.ConstraintError():
                return ConstraintBroken("not_written", message)
            case apsw.BusyError() | apsw.LockedError() | apsw.FullError():
                return StoreBusy("not_written", message)
            case _:
                return StoreError("not_written", message)

    def _unreadable(self, error: apsw.Error) -> StoreError:
        return StoreError("unusable", f"{self.path} cannot be read: {error}.")


def _end(connection: apsw.Connection) -> None:
    """The disk may fail this too."""
    with suppress(apsw.Error):
        connection.close()


def is_patient(tries: int) -> bool:
    """A busy handler: asks again every quarter of a millisecond, for five seconds at least.
    SQLite's own asks ten times a second in the end, and beside a process that writes without a
    pause it comes too late each time: between two commits of the ledger's lie some 20 us."""
    if tries * BUSY_EVERY_MS >= BUSY_TIMEOUT_MS:
        return False
    time.sleep(BUSY_EVERY_MS / 1000)
    return True


def recalled(path: Path) -> bytes | None:
    """What a store of this file has kept beside it, if it can be read."""
    try:
        return _known(path).read_bytes()
    except OSError:
        return None


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """No server keeps holds in this file meanwhile, whatever becomes of it. Raises StoreError."""
    file = _locked(path)
    try:
        yield
    finally:
        os.close(file)


def _locked(path: Path) -> int:
    file = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise StoreError("in_use", f"{path} is in use by another server.") from error
    return file


def _known(path: Path) -> Path:
    return path.with_name(f"{path.name}.known")


def migrations() -> list[str]:
    """The schema's steps, in order: number N is the step to version N."""
    folder = resources.files("tenancy.storage").joinpath("migrations", "sqlite")
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
