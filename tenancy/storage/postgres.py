"""A store on a PostgreSQL server, for several gateways at once, with the guarantees of a file's.

Every writing transaction first takes one lock in the database, so that transactions run one after
the other as in SQLite, whichever gateway runs them: chains, sums and budgets need that order, and
no transaction meets a conflict. Each transaction writes its number into its writer's row. If a
connection is lost between a commit and its answer, the next connection ends the lost session, and
the row says whether the commit was made.

One connection writes, one reads; each is opened when needed, and again when lost. A query costs a
round trip, so no event loop runs one. `tenancy.storage.backends` opens the store.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b

from tenancy.errors import ConstraintBroken, StoreBusy, StoreError, TryAgain
from tenancy.storage.interface import Row, RowReader, Value
from tenancy.storage.postgres_address import PostgresAddress
from tenancy.storage.postgres_connection import ConnectionLost, PostgresConnection, StatementFailed
from tenancy.storage.schema import check_version, migrations, other_program, unreleased

VERSION_MIN = 14
WRITE_LOCK = 0x7472756E
"""Advisory lock that the writing transaction holds."""

WRITERS = 0x7472756F
"""First key of advisory locks; with a writer's id, that writer's connection holds it while it
lives."""

GATEWAYS = b"trunkline/gateway/"
"""Before a gateway's name in what its advisory lock is a hash of."""

WRITERS_KEPT = 1_000
"""Rows kept of writers that have ended: a writer's connection may be lost for a moment only."""

RECONNECT_S = 8.0
"""Seconds that a writer retries, once, a server that went away: a crashed one is back in
seconds."""

LOCK_WAIT = "5s"
"""Longest wait for the write lock, as for SQLite's."""

_SESSION = {"synchronous_commit": "on", "search_path": "public"}
_WRITER = {
    **_SESSION,
    "idle_in_transaction_session_timeout": "60s",
    # The writer queries by key. A plan made while a table was small would scan the table, or join
    # by scanning it, for ever. With scans off, a query that must scan has so high a cost that
    # PostgreSQL would JIT-compile it each time, for 0.2 s, so JIT is off, too.
    **dict.fromkeys(("enable_seqscan", "enable_hashjoin", "enable_mergejoin", "jit"), "off"),
}
_READER = {**_SESSION, "default_transaction_read_only": "on"}
_HOLDER = {
    **_SESSION,
    # A session of a lost host ends within 20 s, and with it the lock.
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
STATEMENT_S = 60.0
"""Longest time of a writer's statement: others wait for it."""
_LONG_STATEMENT_S = 900.0
_MIGRATION_S = 86_400.0
"""Longest time of a migration, which may read a table of years, or build an index over it."""


class PostgresTransaction:
    """A transaction that `PostgresStore` has begun, and commits or rolls back."""

    def __init__(self, connection: PostgresConnection) -> None:
        self._connection = connection

    @property
    def as_of(self) -> None:
        """See `Transaction`. Unknown: other gateways write, too."""

    def execute(self, sql: str, values: Sequence[Value] = ()) -> int:
        """See `Transaction`. One round trip."""
        return self._connection.execute(sql, values)

    def execute_many(self, sql: str, rows: Sequence[Sequence[Value]]) -> None:
        """See `Transaction`. One round trip; two to insert many rows."""
        if len(rows) >= COPY_ROWS_MIN and (insert := _INSERT.fullmatch(sql)):
            self.copy_rows(insert[1], insert[2].split(", "), rows)
        elif rows:
            self._connection.execute_many(sql, rows)

    def rows(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """See `Transaction`. One round trip."""
        return self._connection.rows(sql, values)

    def copy_rows(
        self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Value]]
    ) -> None:
        """Insert rows by COPY. Two round trips."""
        self._connection.copy_rows(table, columns, rows)


_INSERT = re.compile(r"insert into (\w+) \(([\w, ]+)\) values \(\?(?:, \?)*\)")
"""A plain insert, which COPY can do."""

COPY_ROWS_MIN = 16
"""Rows from which on COPY takes less time than a statement for each row."""


class PostgresStore:
    """An open database on a server. Thread-safe."""

    def __init__(self, address: PostgresAddress, *, is_ready: bool = False) -> None:
        """Connect and run missing migrations, unless the database `is_ready`. Raises StoreError."""
        self._address = address
        self._write_lock = threading.RLock()
        self._read_lock = threading.Lock()
        self._hold_lock = threading.Lock()
        self._closing = threading.Event()
        self._writer: PostgresConnection | None = None
        self._reader: PostgresConnection | None = None
        self._holder: PostgresConnection | None = None  # of a gateway's name
        self._writer_id = 0  # id of the writer's row; 0 without one
        self._number = 0  # number of the last transaction begun
        self._retry_until_s: float | None = None  # set while the server is unreachable
        self.changes = 0
        if not is_ready:
            self._migrate()

    @property
    def place(self) -> str:
        """Database, host and port, without a secret."""
        return self._address.shown

    @property
    def is_local(self) -> bool:
        """False: a query costs a round trip."""
        return False

    def query(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """See `Store`. One round trip, and a new connection if the last one was lost."""
        with self._read_lock, self._translate_errors("cannot be read", "unusable"):
            if self._reader is not None:
                with suppress(ConnectionLost):  # while it was idle
                    return self._reader.rows(sql, values)
            self._reader = self._connect(_READER, _LONG_STATEMENT_S)
            return self._reader.rows(sql, values)

    @contextmanager
    def change(self) -> Iterator[PostgresTransaction]:
        """See `Store`. Two round trips besides those of its statements.

        Raises StoreError: StoreBusy after five seconds behind other writers, TryAgain if the
        connection was lost and nothing was changed.
        """
        with self._write_lock, self._translate_errors("was not changed", "not_written"):
            connection = self._begin()
            try:
                yield PostgresTransaction(connection)
                try:
                    self._commit(connection)
                finally:
                    self.changes += 1  # also if the outcome is unknown
            except BaseException:
                with suppress(ConnectionLost):  # a lost connection has ended the transaction, too
                    connection.execute("rollback")
                raise

    @contextmanager
    def snapshot(self) -> Iterator[PostgresTransaction]:
        """See `Store`. Opens a connection."""
        with self._translate_errors("cannot be read", "unusable"):
            connection = self._connect(_READER, _LONG_STATEMENT_S)
            try:
                connection.execute("begin isolation level repeatable read read only")
                yield PostgresTransaction(connection)
            finally:
                connection.close()

    def registry_version(self) -> int:
        """See `Store`. One round trip."""
        return int(self.query("select version from registry_version")[0][0])

    def claim(self, successor_of: int = 0, patience_s: float = 0.0) -> int:
        """See `Store`. Each gateway has an id of its own, so `patience_s` is not used.

        A successor takes over the id it is given once the server has ended the old session, or gets
        a new id if that one is no longer known. Raises StoreError.
        """
        with self._write_lock, self._translate_errors("was not changed", "not_written"):
            self.release_claim()
            self._writer_id = successor_of
            connection = self._writer_connection()
            rows = connection.rows(_SELECT_NUMBER, (self._writer_id,))
            if rows:
                self._number = rows[0][0]
            else:
                self.release_claim()
                connection = self._writer_connection()
            connection.execute(_DELETE_ENDED_WRITERS, (self._writer_id - WRITERS_KEPT, WRITERS))
            return self._writer_id

    def is_writer_gone(self, writer_id: int) -> bool:
        """See `Store`. Raises StoreError."""
        if writer_id == self._writer_id:
            return False
        with self.change() as db:
            if not db.rows("select 1 from writers where writer_id = ?", (writer_id,)):
                return True  # the writer released its id; its session may still end
            sql = "select pg_try_advisory_xact_lock(?::int, ?::int)"
            return bool(db.rows(sql, (WRITERS, writer_id))[0][0])

    def release_claim(self) -> None:
        """See `Store`."""
        with self._write_lock:
            if self._writer is not None:
                with suppress(ConnectionLost, StatementFailed):
                    sql = "delete from writers where writer_id = ?"
                    self._writer.execute(sql, (self._writer_id,))
                self._writer.close()
            self._writer, self._writer_id = None, 0

    def hold_gateway(self, name: str) -> bool:
        """See `Store`. A session has the name's advisory lock. One round trip. Raises
        StoreError."""
        with self._hold_lock, self._translate_errors("cannot be read", "unusable"):
            if self._holder is not None:
                with suppress(ConnectionLost):  # while it was idle
                    self._holder.rows("select 1")
                    return True
                self._holder.close()
                self._holder = None
            holder = self._connect(_HOLDER, STATEMENT_S)
            sql = "select pg_try_advisory_lock(?::bigint)"
            if holder.rows(sql, (_gateway_lock(name),))[0][0]:
                self._holder = holder
                return True
            holder.close()
            return False

    def is_gateway_held(self, name: str) -> bool:
        """See `Store`. Raises StoreError."""
        with self.change() as db:
            sql = "select pg_try_advisory_xact_lock(?::bigint)"
            return not db.rows(sql, (_gateway_lock(name),))[0][0]

    def save_marker(self, marker: bytes) -> None:
        """See `Store`. Does nothing: a server has no place beside the database."""

    def load_marker(self) -> bytes | None:
        """See `Store`. None."""
        return None

    def keep_room(self) -> None:
        """See `Store`: the server's disk is its own."""

    def make_room(self) -> None:
        """See `Store`: the server's disk is its own."""

    def open_another(self) -> PostgresStore:
        """See `Store`."""
        return PostgresStore(self._address, is_ready=True)

    def reopen(self) -> None:
        """See `Store`. Checks the server and the schema. Raises StoreError."""
        with self._write_lock:
            if self._writer is not None:
                self._writer.close()
            self._migrate()

    def close(self) -> None:
        """See `Store`."""
        self._closing.set()
        with self._write_lock, self._read_lock, self._hold_lock:
            self.release_claim()
            if self._holder is not None:
                self._holder.close()
            if self._reader is not None:
                self._reader.close()

    # -- writing ------------------------------------------------------------------------------

    def _begin(self) -> PostgresConnection:
        """Begin the only writing transaction, and write its number into its writer's row."""
        try:
            return self._begin_on(self._writer_connection())
        except ConnectionLost:  # lost while idle: no transaction was begun
            return self._begin_on(self._writer_connection())

    def _begin_on(self, connection: PostgresConnection) -> PostgresConnection:
        number = self._number + 1
        try:
            changed = connection.execute(
                f"begin; select pg_advisory_xact_lock({WRITE_LOCK}); update writers set"
                f" number = {number} where writer_id = {self._writer_id}"
            )
        except StatementFailed:
            connection.execute("rollback")
            raise
        if not changed:
            connection.execute("rollback")
            message = f"{self.place} was replaced by another database: restart the gateway."
            raise StoreError("replaced", message)
        self._number = number
        return connection

    def _commit(self, connection: PostgresConnection) -> None:
        try:
            connection.commit()
        except ConnectionLost as error:
            if self._last_number() != self._number:
                raise ConnectionLost("nothing was committed") from error

    def _last_number(self) -> int:
        """Return the number of the writer's last committed transaction.

        A transaction that was not committed is rolled back by then.
        """
        try:
            connection = self._writer_connection()
            return int(connection.rows(_SELECT_NUMBER, (self._writer_id,))[0][0])
        except (ConnectionLost, StatementFailed, StoreError, IndexError) as error:
            message = f"{self.place} does not answer whether the last change was committed."
            raise StoreError("outcome_unknown", message) from error

    def _writer_connection(self) -> PostgresConnection:
        """Return the writing connection, which holds the lock of its writer's row.

        If there was one before, the server has ended its session when this returns.
        """
        if self._writer is None or self._writer.is_lost:
            if self._writer is not None:
                self._writer.close()  # its loop has descriptors, also where the session has ended
            connection = self._connect_with_retry(STATEMENT_S)
            try:
                _check_server(connection)
                if self._writer_id:
                    connection.execute(_END_SESSION, (WRITERS, self._writer_id))
                    connection.execute(f"select pg_advisory_lock({WRITERS}, {self._writer_id})")
                else:
                    self._writer_id, self._number = (
                        connection.rows(_REGISTER_WRITER, (WRITERS,))[0][0],
                        0,
                    )
            except BaseException:
                connection.close()
                raise
            self._writer = connection
        return self._writer

    def _connect_with_retry(self, statement_s: float) -> PostgresConnection:
        """Connect. If the server was reachable before, it may be restarting: retry for
        `RECONNECT_S`, once."""
        if self._writer is not None and self._retry_until_s is None:
            self._retry_until_s = time.monotonic() + RECONNECT_S
        while True:
            try:
                connection = self._connect({**_WRITER, "lock_timeout": LOCK_WAIT}, statement_s)
                self._retry_until_s = None
                return connection
            except (ConnectionLost, StatementFailed) as error:
                is_away = isinstance(error, ConnectionLost) or error.state in _AWAY
                until_s = self._retry_until_s or 0.0
                if not is_away or time.monotonic() >= until_s or self._closing.wait(0.05):
                    message = f"{self.place} cannot be reached: {error}.{self._login_hint(error)}"
                    raise StoreError("unusable", message) from error

    def _login_hint(self, error: ConnectionLost | StatementFailed) -> str:
        """Return what a refused login may mean."""
        match error:
            # a pooler does not know these settings, a server does
            case StatementFailed(state="08P01"):
                return f" {_POOLER_MESSAGE}"
            case StatementFailed(state="28P01") if self._address.password is None:
                return " No password for it is in PGPASSWORD or in a password file (~/.pgpass)."
            case _:
                return ""

    def _connect(self, settings: Mapping[str, str], timeout_s: float) -> PostgresConnection:
        if self._closing.is_set():
            raise StoreError("unusable", f"{self.place}: the store is closed.")
        return PostgresConnection(self._address, settings, timeout_s)

    # -- the schema ---------------------------------------------------------------------------

    def _migrate(self) -> None:
        """Check the server, and run missing migrations in one transaction."""
        files = migrations("postgres")
        with self._translate_errors("cannot be used", "unusable"):
            connection = self._connect_with_retry(_MIGRATION_S)
            try:
                _check_server(connection)
                if self._version(connection.rows) < len(files):
                    connection.execute(f"begin; select pg_advisory_xact_lock({WRITE_LOCK})")
                    have = self._version(connection.rows)  # another gateway may have run some
                    for number, sql in enumerate(files[have:], have + 1):
                        connection.execute(sql)
                        connection.execute("update trunkline_version set version = ?", (number,))
                    connection.commit()
            finally:
                connection.close()

    def is_empty(self) -> bool:
        """Return whether the database is empty, as before the first start. Raises StoreError for
        tables that are not of this version or an earlier one."""
        return self._version(self.query) == 0

    def _version(self, rows: RowReader) -> int:
        is_ours, is_unreleased, has_tables = rows(_FIND_SCHEMA, ())[0]
        if is_unreleased:
            raise unreleased(self.place, rows("select version from trunkline_schema", ())[0][0])
        if is_ours:
            version = int(rows("select version from trunkline_version", ())[0][0])
            check_version(self.place, version, len(migrations("postgres")))
            return version
        if has_tables:
            raise other_program(self.place)
        return 0

    @contextmanager
    def _translate_errors(self, failure: str, code: str) -> Iterator[None]:
        """Turn the connection's errors into StoreErrors."""
        try:
            yield
        except ConnectionLost as error:
            raise TryAgain(code, f"{self.place} {failure}: {error}.") from error
        except StatementFailed as error:
            kind = StoreError
            if error.state[:2] in ("22", "23") or error.state == "P0001":
                kind = ConstraintBroken
            elif error.state in ("40001", "40P01"):
                kind = TryAgain
            elif error.state in ("55P03", "57014") or error.state[:2] == "53":
                kind = StoreBusy
            raise kind(code, f"{self.place} {failure}: {error}.") from error


def _gateway_lock(name: str) -> int:
    """Return the key of a gateway's advisory lock, of 64 bits."""
    digest = blake2b(GATEWAYS + name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


_AWAY = ("57P01", "57P02", "57P03")
"""SQLSTATEs of a server that shuts down, has crashed, or starts."""

_POOLER_MESSAGE = (
    "There is a pooler in between: connect to the server itself. Writers are known by the locks of"
    " their sessions, and a pooler lends one session to many clients, or its locks to others."
)

_SELECT_NUMBER = "select number from writers where writer_id = ?"
_END_SESSION = (
    "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and granted"
    " and database = (select oid from pg_database where datname = current_database())"
    " and classid::bigint = ? and objid::bigint = ? and objsubid = 2 and pid <> pg_backend_pid()"
)
_DELETE_ENDED_WRITERS = (
    "delete from writers where writer_id < ?1 and pg_try_advisory_lock(?2::int, writer_id::int)"
    " and pg_advisory_unlock(?2::int, writer_id::int)"
)
_REGISTER_WRITER = (
    "with made as (insert into writers (number) values (0) returning writer_id)"
    " select writer_id, pg_advisory_lock(?::int, writer_id::int) from made"
)
_FIND_SCHEMA = (
    "select to_regclass('public.trunkline_version') is not null,"
    " to_regclass('public.trunkline_schema') is not null,"
    " exists (select from pg_tables where schemaname = 'public')"
)


def _check_server(connection: PostgresConnection) -> None:
    """Raise StoreError for a pooler, and for a server that is too old, a standby, in another
    encoding, or may lose confirmed commits."""
    names = ("server_version_num", "server_encoding", "fsync", "synchronous_commit")
    settings = ", ".join(f"current_setting('{name}')" for name in names)
    row = connection.rows(f"select {settings}, pg_is_in_recovery(), pg_backend_pid()")[0]
    version, encoding, fsync, commit, is_standby, pid = row
    if pid != connection.server_pid:
        raise StoreError("pooled", _POOLER_MESSAGE)
    if int(version) // 10_000 < VERSION_MIN:
        message = (
            f"PostgreSQL {int(version) // 10_000} is too old; expected {VERSION_MIN} or newer."
        )
        raise StoreError("postgres_too_old", message)
    if encoding != "UTF8":
        raise StoreError("unusable", f"The database's encoding is {encoding}; expected UTF8.")
    if fsync != "on" or commit != "on":
        message = (
            f"The server may lose commits: fsync is {fsync}, synchronous_commit is {commit};"
            " expected on."
        )
        raise StoreError("not_durable", message)
    if is_standby:
        raise StoreError("unusable", "The server is a standby; expected the primary.")
