"""A store on a PostgreSQL server: what one in a file promises, and several servers over it at once.

Whoever writes takes one lock in the database first, so that transactions follow each other as in
SQLite, whoever's they are: chains, sums and budgets need that, and nobody meets a conflict. Each
transaction leaves its number in its writer's row. When a connection is lost between a commit and
its answer, the next one ends what is left of the last, and the row says what became of it.

One connection writes, one reads; each is made when it is needed, and anew when it was lost. A
question costs a round trip: none is asked on an event loop. `backends` opens it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import resources

from tenancy.errors import ConstraintBroken, StoreBusy, StoreError, TryAgain
from tenancy.storage.interface import Row, Value
from tenancy.storage.postgres_address import Address
from tenancy.storage.postgres_connection import Link, LinkLost, StatementFailed
from tenancy.storage.postgres_transaction import PostgresTransaction

VERSION_MIN = 14
WRITE_LOCK = 0x7472756E
"""Of the database: held by the transaction that writes."""

WRITERS = 0x7472756F
"""With a writer's number: held by its connection, as long as that lives."""

WRITERS_KEPT = 1_000
"""Rows of writers that have gone: another's connection may be away for a moment only."""

PATIENCE_S = 8.0
"""A server that fell over is back within seconds; whoever writes waits so long, once."""

LOCK_WAIT = "5s"
"""For the write lock, as for SQLite's."""

_SESSION = {"synchronous_commit": "on", "client_encoding": "UTF8", "search_path": "public"}
_WRITER = {
    **_SESSION,
    "idle_in_transaction_session_timeout": "60s",
    # It asks by keys. A plan that was made while a table was small would scan it for ever, to look
    # or to join; one that has to scan is thought so dear then that it would be compiled, for 0.2 s
    # each time.
    **dict.fromkeys(("enable_seqscan", "enable_hashjoin", "enable_mergejoin", "jit"), "off"),
}
_READER = {**_SESSION, "default_transaction_read_only": "on"}
_SILENCE_S = 60.0
_LONG_SILENCE_S = 900.0


class PostgresStore:
    """An open database on a server. Thread-safe."""

    def __init__(self, address: Address, *, is_ready: bool = False) -> None:
        """Connect and bring it up to date, unless it `is_ready`. Raises StoreError."""
        self._address = address
        self._write_lock = threading.RLock()
        self._read_lock = threading.Lock()
        self._closing = threading.Event()
        self._writer: Link | None = None
        self._reader: Link | None = None
        self._writer_id = 0  # its row's; 0 while it has none
        self._number = 0  # of the transaction that was begun last
        self._patient_until_s: float | None = None  # while the server is away
        self.changes = 0
        if not is_ready:
            self._prepare()

    @property
    def place(self) -> str:
        """Database, host and port."""
        return self._address.shown

    @property
    def is_near(self) -> bool:
        """It is not: a question is a round trip."""
        return False

    def query(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Rows of one statement, as of the last commit. Waits for no writer. Raises StoreError."""
        with self._read_lock, self._failing("cannot be read", "unusable"):
            if self._reader is not None:
                with suppress(LinkLost):  # since it was used last
                    return self._reader.run(sql, values)[0]
            self._reader = self._link(_READER, _LONG_SILENCE_S)
            return self._reader.run(sql, values)[0]

    @contextmanager
    def change(self) -> Iterator[PostgresTransaction]:
        """All or nothing, durable when it has ended; after everybody's who began before.

        Raises StoreError: StoreBusy after five seconds behind others, TryAgain where the connection
        was lost and nothing was changed.
        """
        with self._write_lock, self._failing("was not changed", "not_written"):
            link = self._begin()
            db = PostgresTransaction(link)
            try:
                yield db
                try:
                    self._commit(db)
                finally:
                    self.changes += 1  # what became of it may not be known
            except BaseException:
                with suppress(LinkLost):  # which ends it too
                    link.script("rollback")
                raise

    @contextmanager
    def snapshot(self) -> Iterator[PostgresTransaction]:
        """Reads only, all as of one commit, on a connection of its own. Raises StoreError."""
        with self._failing("cannot be read", "unusable"):
            link = self._link(_READER, _LONG_SILENCE_S)
            try:
                link.script("begin isolation level repeatable read read only")
                yield PostgresTransaction(link)
            finally:
                link.close()

    def registry_version(self) -> int:
        """Differs after any change of tenants or keys, by whatever process. A round trip."""
        return int(self.query("select version from registry_version")[0][0])

    def claim(self, successor_of: int = 0, patience_s: float = 0.0) -> int:
        """A number for the holds that are kept here from now on; others have theirs. A successor
        has the one that it is given, once the server has done with what was sent under it: or a new
        one, where nobody knows that any more. Raises StoreError."""
        with self._write_lock, self._failing("was not changed", "not_written"):
            self.disclaim()
            self._writer_id = successor_of
            link = self._writing()
            rows, _ = link.run("select number from writers where writer_id = ?", (self._writer_id,))
            if rows:
                self._number = rows[0][0]
            else:
                self.disclaim()
                link = self._writing()
            link.run(
                "delete from writers where writer_id < ? and pg_try_advisory_lock(?::int,"
                " writer_id::int) and pg_advisory_unlock(?::int, writer_id::int)",
                (self._writer_id - WRITERS_KEPT, WRITERS, WRITERS),
            )
            return self._writer_id

    def is_over(self, writer_id: int) -> bool:
        """Is nobody connected who keeps holds by this number? Raises StoreError."""
        if writer_id == self._writer_id:
            return False
        with self.change() as db:
            if not db.rows("select 1 from writers where writer_id = ?", (writer_id,)):
                return True  # it took its leave; the server may not have ended its session yet
            sql = "select pg_try_advisory_xact_lock(?::int, ?::int)"
            return bool(db.rows(sql, (WRITERS, writer_id))[0][0])

    def disclaim(self) -> None:
        """From now on the holds that were kept here are nobody's. Safe to call twice."""
        with self._write_lock:
            if self._writer is not None:
                with suppress(LinkLost, StatementFailed):
                    self._writer.run("delete from writers where writer_id = ?", (self._writer_id,))
                self._writer.close()
            self._writer, self._writer_id = None, 0

    def remember(self, point: bytes) -> None:
        """There is no place beside a server's database that only it has."""

    def recall(self) -> bytes | None:
        """Nothing is kept."""
        return None

    def another(self) -> PostgresStore:
        """The same database, with connections of its own."""
        return PostgresStore(self._address, is_ready=True)

    def reopen(self) -> None:
        """Connect anew, with the checks of a start. Raises StoreError."""
        with self._write_lock:
            if self._writer is not None:
                self._writer.close()
            self._prepare()

    def close(self) -> None:
        """End its connections. Safe to call twice."""
        self._closing.set()
        with self._write_lock, self._read_lock:
            self.disclaim()
            if self._reader is not None:
                self._reader.close()

    # -- writing ------------------------------------------------------------------------------

    def _begin(self) -> Link:
        """A transaction that alone writes, with its number in its writer's row."""
        try:
            return self._begin_on(self._writing())
        except LinkLost:  # since it was used last: nothing was begun
            return self._begin_on(self._writing())

    def _begin_on(self, link: Link) -> Link:
        number = self._number + 1
        try:
            rows = link.script(
                f"begin; select pg_advisory_xact_lock({WRITE_LOCK}); update writers set"
                f" number = {number} where writer_id = {self._writer_id}"
            )
        except StatementFailed:
            link.script("rollback")
            raise
        if rows != 2:
            link.script("rollback")
            message = f"{self.place} is not what it was: our row is gone. Start again."
            raise StoreError("replaced", message)
        self._number = number
        return link

    def _commit(self, db: PostgresTransaction) -> None:
        try:
            db.finish()
        except LinkLost as error:
            if self._last_number() != self._number:
                raise LinkLost("nothing was committed") from error

    def _last_number(self) -> int:
        """Of the last transaction of ours that was committed; what was not is undone by now."""
        try:
            link, writer_id = self._writing(), self._writer_id
            rows, _ = link.run("select number from writers where writer_id = ?", (writer_id,))
            return int(rows[0][0])
        except (LinkLost, StatementFailed, StoreError, IndexError) as error:
            message = f"{self.place} may have been changed or not: it cannot be asked."
            raise StoreError("outcome_unknown", message) from error

    def _writing(self) -> Link:
        """The connection that writes, and holds the lock of its writer's row. Where there was one
        before, the server has done with it when this returns."""
        if self._writer is None or self._writer.is_lost:
            link = self._patient_link()
            _check(link)
            if self._writer_id:
                link.run(_END, (WRITERS, self._writer_id))
                link.script(f"select pg_advisory_lock({WRITERS}, {self._writer_id})")
            else:
                rows, _ = link.run(_REGISTER, (WRITERS,))
                self._writer_id, self._number = rows[0][0], 0
            self._writer = link
        return self._writer

    def _patient_link(self) -> Link:
        """A server that knew us before and is away may be starting again: wait for it, once."""
        if self._writer is not None and self._patient_until_s is None:
            self._patient_until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                link = self._link({**_WRITER, "lock_timeout": LOCK_WAIT}, _SILENCE_S)
                self._patient_until_s = None
                return link
            except (LinkLost, StatementFailed) as error:
                is_away = isinstance(error, LinkLost) or error.state in _AWAY
                until_s = self._patient_until_s or 0.0
                if not is_away or time.monotonic() >= until_s or self._closing.wait(0.05):
                    message = f"{self.place} cannot be reached: {error}.{self._hint(error)}"
                    raise StoreError("unusable", message) from error

    def _hint(self, error: LinkLost | StatementFailed) -> str:
        """What may be meant by a refusal to let us in."""
        match error:
            case StatementFailed(
                state="08P01"
            ):  # to settings that it does not know; no server does
                return f" {_POOLED}"
            case StatementFailed(state="28P01") if self._address.password is None:
                return " No password for it is in PGPASSWORD or in a password file (~/.pgpass)."
            case _:
                return ""

    def _link(self, settings: Mapping[str, str], silence_s: float) -> Link:
        if self._closing.is_set():
            raise StoreError("unusable", f"{self.place} is closed here.")
        return Link(self._address, settings, silence_s)

    # -- the schema ---------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Check the server, and run what is missing, in one transaction."""
        files = migrations()
        with self._failing("cannot be used", "unusable"):
            link = self._patient_link()
            try:
                _check(link)
                if self._version(link, files) < len(files):
                    link.script(f"begin; select pg_advisory_xact_lock({WRITE_LOCK})")
                    have = self._version(link, files)  # another may have been here first
                    for number, sql in enumerate(files[have:], have + 1):
                        link.script(sql)
                        link.run("update trunkline_schema set version = ?", (number,))
                    link.script("commit")
            finally:
                link.close()

    def _version(self, link: Link, files: Sequence[str]) -> int:
        ours, tables = link.run(_TABLES)[0][0]
        if not ours and tables:
            raise StoreError("not_ours", f"{self.place} is the database of another program.")
        have = int(link.run("select version from trunkline_schema")[0][0][0]) if ours else 0
        if have > len(files):
            raise StoreError(
                "newer_schema",
                f"{self.place} was written by a newer version (schema {have}; this program"
                f" knows {len(files)}).",
            )
        return have

    @contextmanager
    def _failing(self, what: str, code: str) -> Iterator[None]:
        """What the server or the way to it did, in our words."""
        try:
            yield
        except LinkLost as error:
            raise TryAgain(code, f"{self.place} {what}: {error}.") from error
        except StatementFailed as error:
            kind = StoreError
            if error.state[:2] in ("22", "23") or error.state == "P0001":
                kind = ConstraintBroken
            elif error.state in ("40001", "40P01"):
                kind = TryAgain
            elif error.state in ("55P03", "57014") or error.state[:2] == "53":
                kind = StoreBusy
            raise kind(code, f"{self.place} {what}: {error}.") from error


_AWAY = ("57P01", "57P02", "57P03")
"""It shuts down, it crashed, it starts."""

_POOLED = (
    "There is a pooler in between: connect to the server itself. Writers are known by the locks of"
    " their sessions, and a pooler lends one session to many, or its locks to others."
)

_END = (
    "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and granted"
    " and database = (select oid from pg_database where datname = current_database())"
    " and classid::bigint = ? and objid::bigint = ? and objsubid = 2 and pid <> pg_backend_pid()"
)
_REGISTER = (
    "with made as (insert into writers (number) values (0) returning writer_id)"
    " select writer_id, pg_advisory_lock(?::int, writer_id::int) from made"
)
_TABLES = (
    "select to_regclass('public.trunkline_schema') is not null,"
    " exists (select from pg_tables where schemaname = 'public')"
)


def migrations() -> list[str]:
    """The schema's steps, in order: number N is the step to version N."""
    folder = resources.files("tenancy.storage").joinpath("migrations", "postgres")
    files = sorted(folder.iterdir(), key=lambda item: item.name)
    for number, file in enumerate(files, 1):
        assert file.name.startswith(f"{number:04d}_"), f"{file.name} is out of order"
    return [file.read_text() for file in files]


def _check(link: Link) -> None:
    """Raises StoreError for a server that may lose what it confirmed, or keeps other letters, and
    for one that is not at the other end."""
    names = ("server_version_num", "server_encoding", "fsync", "synchronous_commit")
    asked = ", ".join(f"current_setting('{name}')" for name in names)
    row = link.run(f"select {asked}, pg_is_in_recovery(), pg_backend_pid()")[0][0]
    version, encoding, fsync, commit, is_standby, pid = row
    if pid != link.server_pid:
        raise StoreError("pooled", _POOLED)
    if int(version) // 10_000 < VERSION_MIN:
        message = f"PostgreSQL {int(version) // 10_000} is too old; {VERSION_MIN} is needed."
        raise StoreError("postgres_too_old", message)
    if encoding != "UTF8":
        raise StoreError("unusable", f"The database's encoding is {encoding}; UTF8 is needed.")
    if fsync != "on" or commit != "on":
        message = "The server runs with fsync off, and would lose what it confirmed."
        raise StoreError("not_durable", message)
    if is_standby:
        raise StoreError("unusable", "The server is a standby: nothing can be written there.")
