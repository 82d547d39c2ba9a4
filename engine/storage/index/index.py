"""The index of records: SQLite in WAL mode, held by one process.

It knows rows, no slabs, no quotas and no clock: times are whole milliseconds that its caller gives.
A row's `key` is a keyed digest of its run and only finds it; the run itself proves equality, from
the root down. A record's parent exists, so a deletion takes everything under a record with it. A
record id is never used again, also where a power cut takes commits back: ids come from ranges that
are reserved durably.

In a sealed store a row's run and digest lie hidden in the column `run`, and the key of a
namespace's digests comes from its seal: the file holds no token, and none can be guessed from it.
Whether a store is sealed is written down when it is made.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import apsw
from msgspec import Struct

from engine.api import Namespace, Payer
from engine.errors import EngineError
from engine.moves import ROOT, RecordId
from engine.storage.index.promise_rows import PromiseRows
from engine.storage.index.remote_rows import REMOTE, RemoteRows
from engine.storage.index.use_notes import UseNotes
from engine.storage.sealing.seals import RecordSeal, Seals
from engine.storage.slabs.record import pack_run
from engine.storage.slabs.slabs import Place, sync_folder
from engine.storage.transaction import change_or_join, transaction

INDEX_NAME = "index.db"
APPLICATION_ID = 0x74726B76
SCHEMA_VERSION = 1
FOREVER_MS = 2**62
"""The limit of a record without one."""
IDS_RESERVED = 2**20
CHECK_BYTES = 16
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
_COLUMNS = (
    "rec_id, scope_id, parent, run, payer_id, slab, place, payload_bytes, place_bytes, check128,"
    " fidelity, limit_ms, promise_ms"
)


class IndexUnusable(EngineError):
    """The index cannot be used as it is; the message says the way out."""

    def __init__(self, message: str) -> None:
        super().__init__("storage", message)


class RecordRow(NamedTuple):
    """A record's row. Times are wall-clock milliseconds of the store."""

    record_id: RecordId
    scope_id: int
    parent: RecordId
    run: bytes
    payer_id: int
    slab: int
    position: int
    payload_bytes: int
    place_bytes: int
    check: bytes
    fidelity: int
    limit_ms: int
    promise_ms: int

    @property
    def place(self) -> Place:
        """Where its bytes lie."""
        return Place(self.slab, self.position)


class Scope(Struct, frozen=True):
    """A namespace, the key of its digests, and its seal if the store is sealed."""

    scope_id: int
    namespace: Namespace
    key: bytes
    seal: RecordSeal | None = None


class RecordIndex:
    """An open index. One thread uses it; every method may raise apsw.Error."""

    def __init__(
        self,
        path: Path,
        *,
        may_make: bool,
        tick: Callable[[], None] = lambda: None,
        seals: Seals | None = None,
    ) -> None:
        """Open the index; `may_make`: make it where there is none.

        `tick` is called about each 20 ms of a long query or change; it may not use the index.
        `seals`: of a sealed store. Rows of a namespace whose key was destroyed are deleted.
        Raises IndexUnusable, apsw.Error, OSError.
        """
        self.path = path
        self._seals = seals
        if not path.exists():
            if not may_make:
                raise IndexUnusable(
                    f"{path} is missing beside slabs. `trunkline levels rebuild` makes it from"
                    " them; `trunkline levels init` begins anew."
                )
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o600))
        self._db = apsw.Connection(str(path), apsw.SQLITE_OPEN_READWRITE)

        def progress() -> bool:
            tick()
            return False  # go on

        self._db.set_progress_handler(progress, TICK_STEPS)
        try:
            self._open(may_make)
            self._scopes: dict[Namespace, Scope] = {}
            self._scopes_by_id: dict[int, Scope] = {}
            sql = "select scope_id, namespace, key from scopes"
            for scope_id, namespace, key in self._all(sql):
                seal = None if seals is None else seals.seal_of(namespace)
                if seals is not None and seal is None:
                    self._delete_shredded(scope_id)
                else:
                    key = key if seal is None else seal.digest_key
                    self._add_scope(Scope(scope_id, namespace, key, seal))
            self._payers: dict[Payer, int] = {}
            self._payer_names: dict[int, Payer] = {}
            for number, payer in self._all("select payer_id, payer from payers"):
                self._payers[payer], self._payer_names[number] = number, payer
            self.uses = UseNotes(self._db)
            self._next_id = self._ids_end = 0
        except BaseException:
            self.close()
            raise

    def _open(self, may_make: bool) -> None:
        for pragma in (
            "locking_mode=exclusive",
            "journal_mode=wal",
            "synchronous=normal",
            "secure_delete=on",
            "cell_size_check=on",
            "trusted_schema=off",
            f"journal_size_limit={LOG_BYTES_MAX}",
        ):
            self._db.execute(f"pragma {pragma}").fetchall()
        version = int(self._one("pragma user_version")[0])
        application = int(self._one("pragma application_id")[0])
        is_empty = not self._db.execute("select 1 from sqlite_schema").fetchall()
        if may_make and is_empty and version == application == 0:
            with self.change():
                self._db.execute(_SCHEMA)
                self._db.execute(f"pragma user_version={SCHEMA_VERSION}")
                self._db.execute(f"pragma application_id={APPLICATION_ID}")
                self.set_meta("store_id", os.urandom(16))
                self.set_meta("sealed", int(self._seals is not None))
            sync_folder(self.path.parent)
            return
        if application != APPLICATION_ID:
            raise IndexUnusable(f"{self.path} is the database of another program.")
        if version != SCHEMA_VERSION:
            raise IndexUnusable(
                f"{self.path} has version {version}; expected {SCHEMA_VERSION}. It was not changed:"
                " `trunkline levels init` makes a new one."
            )
        if (is_sealed := bool(self.meta("sealed", 0))) != (self._seals is not None):
            has, wanted = ("sealed", "true") if is_sealed else ("plain", "false")
            raise IndexUnusable(
                f"the copies in {self.path.parent} are {has}; expected engine.levels.seal ="
                f" {wanted}. They were not changed: `trunkline levels clear` begins anew."
            )

    def _delete_shredded(self, scope_id: int) -> None:
        """Delete what is left of a namespace whose key was destroyed."""
        with self.change():
            for table in ("records", "leases", "scopes"):
                self._db.execute(f"delete from {table} where scope_id=?", (scope_id,))

    def _row(self, found: Sequence[Any]) -> RecordRow:
        """Return a row as it is told: with its run and its digest, empty if they do not open."""
        row = RecordRow(*found)
        scope = self._scopes_by_id.get(row.scope_id)
        if scope is None or scope.seal is None:
            return row
        told = scope.seal.show(row.parent, row.run)
        run, check = told[:-CHECK_BYTES], told[-CHECK_BYTES:]
        return RecordRow(*row[:3], run, *row[4:9], check, *row[10:])

    def _all(self, sql: str, *values: object) -> list[Any]:
        """Return all rows of a query. The schema's tables are strict, so types are as declared."""
        return self._db.execute(sql, values).fetchall()

    def _one(self, sql: str, *values: object) -> Any:
        """Return the first row of a query, or None."""
        return self._db.execute(sql, values).fetchone()

    def close(self) -> None:
        """Close the file. Safe to repeat; a disk that fails is left as it is."""
        with suppress(apsw.Error):
            self._db.close()

    def change(self) -> AbstractContextManager[None]:
        """Make one transaction of what is done in this context."""
        return transaction(self._db)

    def change_or_join(self) -> AbstractContextManager[None]:
        """Make one transaction, or be a part of the caller's."""
        return change_or_join(self._db)

    @property
    def log_path(self) -> Path:
        """The write-ahead log; a commit is durable once it is synced."""
        return self.path.with_name(f"{self.path.name}-wal")

    @property
    def file_bytes(self) -> int:
        """Bytes of the database, and the most that its log keeps."""
        return self.path.stat().st_size + LOG_BYTES_MAX

    def remote_rows(self) -> RemoteRows:
        """Return the rows about objects in a remote store; make their tables if needed."""
        return RemoteRows(self._db)

    def promise_rows(self) -> PromiseRows:
        """Return the rows about promises; make their tables if needed."""
        return PromiseRows(self._db)

    def empty_log(self) -> None:
        """Move the log into the database and cut it: durable, and without deleted rows' bytes."""
        self._db.execute("pragma wal_checkpoint(truncate)").fetchall()

    def quick_check(self) -> str:
        """Return "" for a sound file, else the first thing that is wrong. O(size)."""
        found = [str(row[0]) for row in self._db.execute("pragma quick_check(1)")]
        return "" if found == ["ok"] else found[0]

    # -- meta, scopes, payers -------------------------------------------------------------------

    def meta(self, name: str, default: int | bytes) -> Any:
        """Return a value of the store, or the default."""
        row = self._one("select value from meta where name=?", name)
        return default if row is None else row[0]

    def set_meta(self, name: str, value: int | bytes) -> None:
        """Set a value of the store, in the caller's transaction or its own."""
        self._db.execute("insert or replace into meta values(?,?)", (name, value))

    @property
    def store_id(self) -> bytes:
        """16 random bytes that each of its records repeats."""
        return bytes(self.meta("store_id", b""))

    def next_id(self) -> RecordId:
        """Return a record id that was never used. O(1)."""
        assert self._next_id < self._ids_end, "`reserve_ids` is called before each transaction"
        self._next_id += 1
        return self._next_id - 1

    def reserve_ids(self) -> None:
        """Reserve record ids durably if few are left. Call outside a transaction."""
        if self._ids_end - self._next_id > IDS_RESERVED // 2:
            return
        first = int(self.meta("next_id", ROOT + 1))
        last = self._one("select max(rec_id) from records")[0] or ROOT
        self._next_id = self._next_id or max(first, int(last) + 1)
        self._ids_end = max(first, self._next_id) + IDS_RESERVED
        self._db.execute("pragma synchronous=full")
        self.set_meta("next_id", self._ids_end)
        self._db.execute("pragma synchronous=normal")

    @property
    def scopes(self) -> list[Scope]:
        """All scopes, also those that have lost their last record."""
        return list(self._scopes.values())

    def scope_of(self, row: RecordRow) -> Scope:
        """Return a record's scope. Raises KeyError for a row of no scope."""
        return self._scopes_by_id[row.scope_id]

    def scope(self, namespace: Namespace) -> Scope | None:
        """Return the namespace's scope, or None. O(1)."""
        return self._scopes.get(namespace)

    def scope_for(self, namespace: Namespace) -> Scope:
        """Return the namespace's scope; make it if needed."""
        scope = self._scopes.get(namespace)
        if scope is None:
            seal = None if self._seals is None else self._seals.seal_for(namespace)
            key = os.urandom(16) if seal is None else b""
            self._db.execute("insert into scopes(namespace, key) values(?,?)", (namespace, key))
            key = key if seal is None else seal.digest_key
            scope = Scope(self._db.last_insert_rowid(), namespace, key, seal)
            self._add_scope(scope)
        return scope

    def _add_scope(self, scope: Scope) -> None:
        self._scopes[scope.namespace] = self._scopes_by_id[scope.scope_id] = scope

    def remove_scope(self, namespace: Namespace) -> None:
        """Delete the scope of a namespace that has no records."""
        scope = self._scopes.pop(namespace)
        del self._scopes_by_id[scope.scope_id]
        self._db.execute("delete from scopes where scope_id=?", (scope.scope_id,))

    def payer_id(self, payer: Payer) -> int:
        """Return the payer's number; make it if needed."""
        found = self._payers.get(payer)
        if found is None:
            self._db.execute("insert into payers(payer) values(?)", (payer,))
            found = self._payers[payer] = self._db.last_insert_rowid()
            self._payer_names[found] = payer
        return found

    def payer_name(self, payer_id: int) -> Payer:
        """Return the payer of a number. Raises KeyError."""
        return self._payer_names[payer_id]

    # -- reading --------------------------------------------------------------------------------

    def row(self, record_id: RecordId) -> RecordRow | None:
        """Return a record's row, or None. About 10 us."""
        found = self._one(f"select {_COLUMNS} from records where rec_id=?", record_id)
        return None if found is None else self._row(found)

    def live_row(self, scope: Scope | None, record_id: RecordId, now_ms: int) -> RecordRow | None:
        """Return a record's row, or None where it is another scope's or past its limit."""
        row = self.row(record_id)
        if row is None or scope is None or row.scope_id != scope.scope_id:
            return None
        return row if row.limit_ms > now_ms else None

    def child(self, scope: Scope, parent: RecordId, run: bytes) -> RecordRow | None:
        """Return the record of a run below `parent`: found by digest, proved by its tokens."""
        found = self._one(
            f"select {_COLUMNS} from records where scope_id=? and parent=? and key=?",
            scope.scope_id,
            parent,
            digest_of(scope, run),
        )
        row = None if found is None else self._row(found)
        return row if row is not None and row.run == run else None

    def step(
        self, scope: Scope, parent: RecordId, run: bytes
    ) -> tuple[int, int, int, int, int, int] | None:
        """Return id, fidelity, limit, promise, payload bytes and slab of a run's record: `child`,
        for long walks."""
        found = self._one(
            "select rec_id, fidelity, limit_ms, promise_ms, payload_bytes, slab, run from records"
            " where scope_id=? and parent=? and key=?",
            scope.scope_id,
            parent,
            digest_of(scope, run),
        )
        if found is None:
            return None
        told = found[6]
        if scope.seal is not None:
            told = scope.seal.show(parent, told)[:-CHECK_BYTES]
        return found[:6] if told == run else None

    def children(self, scope: Scope, parent: RecordId) -> Iterator[RecordRow]:
        """Yield the records below `parent`. O(children)."""
        sql = f"select {_COLUMNS} from records where scope_id=? and parent=?"
        for found in self._all(sql, scope.scope_id, parent):
            yield self._row(found)

    def rows(self) -> Iterator[RecordRow]:
        """Yield all records, parents before children. O(records)."""
        sql = f"select {_COLUMNS} from records where rec_id > ? order by rec_id limit 1000"
        found = self._all(sql, ROOT)
        while found:
            yield from map(self._row, found)
            found = self._all(sql, found[-1][0])

    def used_places(self, slab: int) -> list[int]:
        """Return the places of a slab that have a record, in order. O(records of the slab)."""
        return [row[0] for row in self._all("select place from records where slab=?", slab)]

    def outside(self, sizes: Mapping[int, int]) -> list[RecordId]:
        """Return the records whose place is in none of these slabs, or beyond its end.

        `sizes`: the number of places of each slab. O(records).
        """
        slabs = self._all(
            f"select slab, max(place), min(place) from records where slab<>{REMOTE} group by slab"
        )
        found: list[RecordId] = []
        for slab, last, first in slabs:
            if first < 0 or last >= sizes.get(slab, 0):
                sql = "select rec_id from records where slab=? and (place<0 or place>=?)"
                found += [row[0] for row in self._all(sql, slab, sizes.get(slab, 0))]
        return found

    def wrong_children(self) -> list[RecordId]:
        """Return the records whose count of children is wrong. O(records log n)."""
        return [
            row[0]
            for row in self._all(
                "select rec_id from records as one where children <> (select count(*) from records"
                " as other where other.scope_id = one.scope_id and other.parent = one.rec_id"
                f" and other.slab<>{REMOTE})"
            )
        ]

    def sums(self) -> list[tuple[int, int, int, int, int, int]]:
        """Return scope, payer, fidelity, records, places and bytes of places, added up.
        O(records)."""
        return self._all(
            "select scope_id, payer_id, fidelity, count(*), sum(slab <> -1), sum(place_bytes)"
            " from records"
            " group by scope_id, payer_id, fidelity"
        )

    def promised(self, now_ms: int) -> dict[int, int]:
        """Return the promised bytes by payer. O(records with a promise)."""
        return dict(
            self._all(
                "select payer_id, sum(place_bytes) from records where promise_ms > ?1"
                " and promise_ms > 0 group by payer_id",
                now_ms,
            )
        )

    def leaves(self, payer_id: int, place_bytes: int, now_ms: int, limit: int) -> list[RecordId]:
        """Return unpromised records without children, in places of this size: those never used
        first, then the least recently used."""
        return [
            row[0]
            for row in self._all(
                "select rec_id from records indexed by leaves where payer_id=? and place_bytes=?"
                " and children=0 and promise_ms <= ? order by hits > 0, used_ms limit ?",
                payer_id,
                place_bytes,
                now_ms,
                limit,
            )
        ]

    def oldest_leaf_ms(self, place_bytes: int, now_ms: int) -> int:
        """Return when the unpromised record without children in places of this size was used that
        was used longest ago; 0 without one. O(records without children).
        """
        found = self._one(
            "select min(used_ms) from records indexed by leaves where place_bytes=? and children=0"
            " and promise_ms <= ?",
            place_bytes,
            now_ms,
        )
        return int(found[0] or 0)

    def expired(self, now_ms: int, limit: int) -> list[RecordId]:
        """Return records at or after their limit."""
        return [
            row[0]
            for row in self._all(
                f"select rec_id from records where limit_ms <= ? and limit_ms < {FOREVER_MS}"
                " limit ?",
                now_ms,
                limit,
            )
        ]

    def of_slab(self, slab: int, now_ms: int) -> tuple[list[RecordId], int, bool]:
        """Return the records of a slab, their latest use and whether one is promised."""
        rows = self._all("select rec_id, used_ms, promise_ms from records where slab=?", slab)
        used_ms = max((row[1] for row in rows), default=0)
        return [row[0] for row in rows], used_ms, any(row[2] > now_ms for row in rows)

    def tops_under(self, scope: Scope, tokens: Sequence[int], size: int) -> list[RecordId]:
        """Return the topmost records whose path, of runs of `size`, begins with all of `tokens`."""
        parent, at = ROOT, 0
        try:
            packed = pack_run(tokens)
        except struct.error:
            return []
        while len(tokens) - at > size:
            row = self.child(scope, parent, packed[4 * at : 4 * (at + size)])
            if row is None:
                return []
            parent, at = row.record_id, at + size
        rest = packed[4 * at :]
        return [row.record_id for row in self.children(scope, parent) if row.run.startswith(rest)]

    def leased(self, scope: Scope, lease_id: str) -> list[RecordId]:
        """Return what a lease alone covers: no other one covers it or anything under it."""
        return [
            row[0]
            for row in self._all(
                "with recursive kept(id) as ("
                " select rec_id from leases where scope_id=?1 and lease_id<>?2"
                " union select parent from records join kept on rec_id = id where parent <> 0)"
                " select rec_id from leases where scope_id=?1 and lease_id=?2"
                " and rec_id not in kept",
                scope.scope_id,
                lease_id,
            )
        ]

    # -- writing --------------------------------------------------------------------------------

    def insert(self, row: RecordRow, scope: Scope, now_ms: int) -> None:
        """Add a record below its parent, which exists. Its place and its run are free."""
        run, check = row.run, row.check
        if scope.seal is not None:
            run, check = scope.seal.hide(row.parent, run + check), b""
        self._db.execute(
            "insert into records values(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,0,0)",
            (
                row.record_id,
                row.scope_id,
                row.parent,
                digest_of(scope, row.run),
                run,
                row.payer_id,
                row.slab,
                row.position,
                row.payload_bytes,
                row.place_bytes,
                check,
                row.fidelity,
                row.limit_ms,
                row.promise_ms,
                now_ms,
            ),
        )
        if row.parent != ROOT and row.slab != REMOTE:
            self._db.execute("update records set children=children+1 where rec_id=?", (row.parent,))

    def lengthen(self, record_id: RecordId, limit_ms: int, promise_ms: int) -> None:
        """Move limit and promise to the later of both instants."""
        self._db.execute(
            "update records set limit_ms=max(limit_ms, ?2), promise_ms=max(promise_ms, ?3)"
            " where rec_id=?1 and (limit_ms < ?2 or promise_ms < ?3)",
            (record_id, limit_ms, promise_ms),
        )

    def add_leases(self, scope: Scope, record_id: RecordId, lease_ids: Iterable[str]) -> None:
        """Note that leases cover a record."""
        for lease_id in lease_ids:
            self._db.execute(
                "insert or ignore into leases values(?,?,?)", (scope.scope_id, lease_id, record_id)
            )

    def remove_lease(self, scope: Scope, lease_id: str) -> None:
        """Forget a lease; its records stay."""
        self._db.execute(
            "delete from leases where scope_id=? and lease_id=?", (scope.scope_id, lease_id)
        )

    def under(self, tops: Iterable[RecordId]) -> dict[RecordId, RecordRow]:
        """Return records and everything under them. O(these log n)."""
        gone: dict[RecordId, RecordRow] = {}
        waiting = list(tops)
        while waiting:
            record_id = waiting.pop()
            row = None if record_id in gone else self.row(record_id)
            if row is None:
                continue
            gone[record_id] = row
            sql = "select rec_id from records where scope_id=? and parent=?"
            waiting += [found[0] for found in self._all(sql, row.scope_id, record_id)]
        return gone

    def delete_under(self, tops: Iterable[RecordId]) -> list[RecordRow]:
        """Delete records and everything under them; return the rows. O(deleted log n)."""
        gone = self.under(tops)
        for record_id in gone:
            self.uses.forget(record_id)
        ids = [(record_id,) for record_id in gone]
        self._db.executemany("delete from records where rec_id=?", ids)
        self._db.executemany("delete from leases where rec_id=?", ids)
        self._db.executemany(
            "update records set children=children-1 where rec_id=?",
            [
                (row.parent,)
                for row in gone.values()
                if row.parent not in gone and row.slab != REMOTE
            ],
        )
        return list(gone.values())


def digest_of(scope: Scope, run: bytes) -> bytes:
    """Return the keyed digest by which a run is found. 1 us."""
    return hashlib.blake2b(run, digest_size=16, key=scope.key).digest()
