"""The file of an index: SQLite in WAL mode, held by one process, made or refused at the opening.

It knows the schema, transactions and the log, and what the store says of itself (`meta`); no row of
a record. Whether a store is sealed is written down when it is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import apsw

from engine.errors import EngineError
from engine.storage.slabs.slabs import sync_folder
from engine.storage.transaction import change_or_join, transaction

INDEX_NAME = "index.db"
APPLICATION_ID = 0x74726B76
SCHEMA_VERSION = 1
FOREVER_MS = 2**62
"""The limit of a record without one."""
LOG_BYTES_MAX = 2**24
TICK_STEPS = 200_000
"""Steps of SQLite's machine, about 0.1 us each, between two ticks."""
_SCHEMA = f"""
create table meta(name text primary key, value any) without rowid, strict;
create table scopes(
    scope_id integer primary key autoincrement, namespace blob not null unique, key blob not null
) strict;
create table payers(payer_id integer primary key autoincrement, payer blob not null unique) strict;
create table records(
    rec_id integer primary key, scope_id integer not null, parent integer not null,
    key blob not null, run blob not null, payer_id integer not null, slab integer not null,
    place integer not null, payload_bytes integer not null, place_bytes integer not null,
    check128 blob not null, fidelity integer not null, limit_ms integer not null,
    promise_ms integer not null, used_ms integer not null, hits integer not null default 0,
    children integer not null default 0
) strict;
create unique index records_of_parent on records(scope_id, parent, key);
create unique index records_at on records(slab, place);
create index records_by_limit on records(limit_ms) where limit_ms < {FOREVER_MS};
create index records_promised on records(promise_ms, payer_id, place_bytes) where promise_ms > 0;
create index leaves on records(payer_id, place_bytes, hits > 0, used_ms, promise_ms)
    where children = 0;
create table leases(
    scope_id integer not null, lease_id text not null, rec_id integer not null,
    primary key(scope_id, lease_id, rec_id)
) without rowid, strict;
create index leases_of on leases(rec_id);
"""


class IndexUnusable(EngineError):
    """The index cannot be used as it is; the message says the way out."""

    def __init__(self, message: str) -> None:
        super().__init__("storage", message)


class IndexFile:
    """An open index file. One thread uses it; every method may raise apsw.Error."""

    def __init__(
        self, path: Path, *, may_make: bool, tick: Callable[[], None], is_sealed: bool
    ) -> None:
        """See `RecordIndex`. Raises IndexUnusable, apsw.Error, OSError."""
        self.path = path
        if not path.exists():
            if not may_make:
                raise IndexUnusable(
                    f"{path} is missing beside slabs. `trunkline levels rebuild` makes it from"
                    " them; `trunkline levels init` begins anew."
                )
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o600))
        self.db = apsw.Connection(str(path), apsw.SQLITE_OPEN_READWRITE)

        def progress() -> bool:
            tick()
            return False  # go on

        self.db.set_progress_handler(progress, TICK_STEPS)
        try:
            self._open(may_make, is_sealed=is_sealed)
        except BaseException:
            self.close()
            raise

    def _open(self, may_make: bool, *, is_sealed: bool) -> None:
        for pragma in (
            "locking_mode=exclusive",
            "journal_mode=wal",
            "synchronous=normal",
            "secure_delete=on",
            "cell_size_check=on",
            "trusted_schema=off",
            f"journal_size_limit={LOG_BYTES_MAX}",
        ):
            self.db.execute(f"pragma {pragma}").fetchall()
        (version,) = self.one("pragma user_version")
        (application,) = self.one("pragma application_id")
        is_empty = self.one("select 1 from sqlite_schema") is None
        if may_make and is_empty and version == application == 0:
            with self.change():
                self.db.execute(_SCHEMA)
                self.db.execute(f"pragma user_version={SCHEMA_VERSION}")
                self.db.execute(f"pragma application_id={APPLICATION_ID}")
                self.set_meta("store_id", os.urandom(16))
                self.set_meta("sealed", int(is_sealed))
            sync_folder(self.path.parent)
            return
        if application != APPLICATION_ID:
            raise IndexUnusable(f"{self.path} is the database of another program.")
        if version != SCHEMA_VERSION:
            raise IndexUnusable(
                f"{self.path} has version {version}; expected {SCHEMA_VERSION}. It was not changed:"
                " `trunkline levels init` makes a new one."
            )
        if bool(self.meta("sealed", 0)) != is_sealed:
            has, wanted = ("plain", "false") if is_sealed else ("sealed", "true")
            raise IndexUnusable(
                f"the copies in {self.path.parent} are {has}; expected engine.levels.seal ="
                f" {wanted}. They were not changed: `trunkline levels clear` begins anew."
            )

    def close(self) -> None:
        """Close the file. Safe to repeat; a disk that fails is left as it is."""
        with suppress(apsw.Error):
            self.db.close()

    def change(self) -> AbstractContextManager[None]:
        """Make one transaction of what is done in this context."""
        return transaction(self.db)

    def change_or_join(self) -> AbstractContextManager[None]:
        """Make one transaction, or be a part of the caller's."""
        return change_or_join(self.db)

    @property
    def log_path(self) -> Path:
        """The write-ahead log; a commit is durable once it is synced."""
        return self.path.with_name(f"{self.path.name}-wal")

    @property
    def file_bytes(self) -> int:
        """Bytes of the database, and the most that its log keeps."""
        return self.path.stat().st_size + LOG_BYTES_MAX

    def empty_log(self) -> None:
        """Move the log into the database and cut it: durable, and without deleted rows' bytes."""
        self.db.execute("pragma wal_checkpoint(truncate)").fetchall()

    def all(self, sql: str, *values: object) -> list[Any]:
        """Return all rows of a statement. The schema's tables are strict, so types are as
        declared."""
        return self.db.execute(sql, values).fetchall()

    def column(self, sql: str, *values: object) -> list[Any]:
        """Return the first column of a query."""
        return [row[0] for row in self.all(sql, *values)]

    def one(self, sql: str, *values: object) -> Any:
        """Return the first row of a query, or None."""
        return self.db.execute(sql, values).fetchone()

    def meta(self, name: str, default: int | bytes) -> Any:
        """Return a value of the store, or the default."""
        row = self.one("select value from meta where name=?", name)
        return default if row is None else row[0]

    def set_meta(self, name: str, value: int | bytes) -> None:
        """Set a value of the store, in the caller's transaction or its own."""
        self.db.execute("insert or replace into meta values(?,?)", (name, value))

    @property
    def store_id(self) -> bytes:
        """16 random bytes that each of its records repeats."""
        return bytes(self.meta("store_id", b""))
