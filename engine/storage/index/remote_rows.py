"""The index's rows about the remote store: which records have an object, and what is to be deleted.

A record with an object may lose its place on disk and stay findable: its row then says `REMOTE` for
a slab, and no bytes of a place. Each deletion of a record's row leaves a *tombstone* with the name
of its object, in the same transaction, by a trigger. It stays until the store has confirmed that
the object is gone. An object that is being put has a tombstone before it is there, so that a death
in between leaves nothing behind. Only records of a scope that may leave the machine are put.

The caller opens transactions. Instants are whole milliseconds that it gives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple

from engine.api import Namespace
from engine.moves import RecordId
from engine.storage.index.index_file import IndexFile

REMOTE = -1
"""The slab of a record that lies in the remote store alone; the statements below say it as -1."""
PADDING_BYTES_MAX = 4_096
"""Most bytes of an object behind a record's header and payload."""
_SCHEMA = """
create table if not exists objects(
    rec_id integer primary key, payer_id integer not null, name text not null unique,
    bytes integer not null
) strict;
create table if not exists tombstones(
    name text primary key, namespace blob not null, since_ms integer not null
) without rowid, strict;
create index if not exists tombstones_of on tombstones(namespace);
create trigger if not exists object_of_deleted after delete on records
    when exists (select 1 from objects where rec_id = old.rec_id)
    begin
        insert or ignore into tombstones select name, coalesce((select namespace from scopes
            where scope_id = old.scope_id), x''), 0 from objects where rec_id = old.rec_id;
        delete from objects where rec_id = old.rec_id;
    end;
create table if not exists leaving(scope_id integer primary key) strict;
create trigger if not exists leaving_of_deleted after delete on scopes
    begin
        delete from leaving where scope_id = old.scope_id;
    end;
create table if not exists once_leaving(scope_id integer primary key) strict;
create trigger if not exists once_leaving_of_deleted after delete on scopes
    begin
        delete from once_leaving where scope_id = old.scope_id;
    end;
"""


class Tombstone(NamedTuple):
    """An object to delete, or with a name that ends at a slash, all below that. `since_ms`: 0 where
    it was not dated yet."""

    name: str
    namespace: Namespace
    since_ms: int


class RemoteSums(NamedTuple):
    """What the remote store holds, and what is still to be deleted there. `used`: bytes by payer's
    id."""

    records: int
    used: dict[int, int]
    tombstones: int


class RemoteRows:
    """The rows of one index about objects. Every method may raise apsw.Error."""

    def __init__(self, file: IndexFile) -> None:
        """Make the tables if they are missing."""
        self._file = file
        file.db.execute(_SCHEMA)

    # -- scopes that may leave ------------------------------------------------------------------

    def let_leave(self, scope_id: int) -> None:
        """Note that records of a scope may be put."""
        self._file.all("insert or ignore into leaving values(?)", scope_id)
        self._file.all("insert or ignore into once_leaving values(?)", scope_id)

    def keep_here(self, scope_id: int) -> None:
        """Note that records of a scope may not be put."""
        self._file.all("delete from leaving where scope_id=?", scope_id)

    def was_let_leave(self, scope_id: int) -> bool:
        """Return whether records of a scope may be put, or might once. O(log scopes)."""
        sql = "select 1 from leaving where scope_id=?1 union select 1 from once_leaving where"
        return self._file.one(f"{sql} scope_id=?1", scope_id) is not None

    def may_leave(self, scope_id: int) -> bool:
        """Return whether records of a scope may be put. O(log scopes)."""
        return self._file.one("select 1 from leaving where scope_id=?", scope_id) is not None

    # -- objects --------------------------------------------------------------------------------

    def name_of(self, record_id: RecordId) -> str:
        """Return the name of a record's object; "" if it has none. O(log n)."""
        found = self._file.one("select name from objects where rec_id=?", record_id)
        return "" if found is None else str(found[0])

    def is_known(self, name: str) -> bool:
        """Return whether a record has this object. O(log n)."""
        return self._file.one("select 1 from objects where name=?", name) is not None

    def begin_put(self, name: str, namespace: Namespace, now_ms: int) -> None:
        """Note that an object is on its way, so that it is deleted if its row never comes."""
        self._file.all("insert or ignore into tombstones values(?,?,?)", name, namespace, now_ms)

    def end_put(self, record_id: RecordId, payer_id: int, name: str, size: int) -> None:
        """Note that a record has an object now."""
        self._file.all("insert into objects values(?,?,?,?)", record_id, payer_id, name, size)
        self._file.all("delete from tombstones where name=?", name)

    def demote(self, record_id: RecordId) -> None:
        """Take a record's place away: it lies in the remote store alone."""
        self._file.all(
            "update records set children=children-1 where rec_id="
            " (select parent from records where rec_id=?)",
            record_id,
        )
        self._file.all(
            "update records set slab=-1, place=rec_id, place_bytes=0 where rec_id=?",
            record_id,
        )

    def payer_of(self, record_id: RecordId) -> int | None:
        """Return the id of a record's payer; None without a record. O(log n)."""
        found = self._file.one("select payer_id from records where rec_id=?", record_id)
        return None if found is None else int(found[0])

    def promised_without(self, now_ms: int, limit: int) -> list[RecordId]:
        """Return promised records on disk that have no object yet and may have one. O(promised)."""
        return self._file.column(
            "select rec_id from records where promise_ms > ?1 and promise_ms > 0"
            " and slab <> -1 and rec_id not in (select rec_id from objects)"
            " and scope_id in (select scope_id from leaving) limit ?2",
            now_ms,
            limit,
        )

    def coldest(self, payer_id: int, now_ms: int, limit: int) -> list[RecordId]:
        """Return a payer's unpromised records that lie in the remote store alone, without children,
        the least recently used first. O(the payer's records there)."""
        return self._file.column(
            "select rec_id from records as one where slab=-1 and promise_ms <= ?1"
            " and payer_id=?3 and not exists (select 1 from records as other where"
            " other.scope_id = one.scope_id and other.parent = one.rec_id)"
            " order by used_ms limit ?2",
            now_ms,
            limit,
            payer_id,
        )

    def duplicates(self, payer_id: int, limit: int) -> list[RecordId]:
        """Return a payer's records that have an object and a place on disk, too: those without a
        promise first. O(the payer's objects)."""
        return self._file.column(
            "select rec_id from objects join records using (rec_id)"
            " where objects.payer_id=? and slab <> -1 order by promise_ms, used_ms limit ?",
            payer_id,
            limit,
        )

    def give_up_object(self, record_id: RecordId) -> None:
        """Have the object of a record on disk deleted; the record stays."""
        self._file.all(
            "insert or ignore into tombstones select name, namespace, 0 from objects"
            " join records using (rec_id) join scopes using (scope_id) where rec_id=?",
            record_id,
        )
        self._file.all("delete from objects where rec_id=?", record_id)

    # -- a shared store -------------------------------------------------------------------------

    def stored_without(self, limit: int) -> list[RecordId]:
        """Return records on disk that have no object and may have one, the newest first.
        O(records)."""
        return self._file.column(
            "select rec_id from records where slab <> -1"
            " and rec_id not in (select rec_id from objects)"
            " and scope_id in (select scope_id from leaving) order by rec_id desc limit ?",
            limit,
        )

    def objects_of(self, scope_id: int, limit: int) -> list[tuple[str, int, int, int]]:
        """Return name, payload bytes, fidelity and limit of a scope's objects, the newest first.
        O(the scope's records)."""
        return self._file.all(
            "select name, payload_bytes, fidelity, limit_ms from objects join records"
            " using (rec_id) where scope_id=? order by rec_id desc limit ?",
            scope_id,
            limit,
        )

    def has_objects(self, scope_id: int) -> bool:
        """Return whether a record of a scope has an object."""
        sql = "select 1 from objects join records using (rec_id) where scope_id=? limit 1"
        return self._file.one(sql, scope_id) is not None

    def scopes_with_objects(self) -> list[int]:
        """Return the ids of scopes with objects. O(objects)."""
        return self._file.column(
            "select distinct scope_id from objects join records using (rec_id)"
        )

    def forget_objects(self, scope_id: int) -> None:
        """Let no record of a scope have an object: all that lies there is deleted as a whole."""
        self._file.all(
            "delete from objects where rec_id in (select rec_id from records where scope_id=?)",
            scope_id,
        )

    def others_scheme(self, pattern: str, *, is_shared: bool) -> list[RecordId]:
        """Return the records whose object has a name of a store that is shared, by a pattern, where
        this one is not, or the other way round. O(objects)."""
        sql = "select rec_id from objects where (name glob ?) <> ?"
        return self._file.column(sql, pattern, int(is_shared))

    def remote_alone(self) -> list[RecordId]:
        """Return the records without a place on disk. O(records)."""
        return self._file.column("select rec_id from records where slab = -1")

    # -- tombstones -----------------------------------------------------------------------------

    def date_tombstones(self, now_ms: int) -> None:
        """Give those an instant that the trigger has made."""
        self._file.all("update tombstones set since_ms=? where since_ms=0", now_ms)

    def tombstones_of(self, namespace: Namespace, limit: int) -> list[str]:
        """Return names of objects of a namespace that are to be deleted."""
        sql = "select name from tombstones where namespace=? limit ?"
        return self._file.column(sql, namespace, limit)

    def tombstones(self, without: Collection[str], limit: int) -> list[str]:
        """Return names of objects to delete, the oldest first, but for some."""
        sql = "select name from tombstones order by since_ms limit ?"
        found = self._file.column(sql, limit + len(without))
        return [name for name in found if name not in without][:limit]

    def oldest_tombstones(self, limit: int) -> list[Tombstone]:
        """Return tombstones, the oldest first."""
        sql = "select name, namespace, since_ms from tombstones order by since_ms limit ?"
        return [Tombstone(*one) for one in self._file.all(sql, limit)]

    def namespaces_to_clear(self) -> list[Namespace]:
        """Return the namespaces of which all is to be deleted. O(tombstones)."""
        return self._file.column("select namespace from tombstones where name glob '*/'")

    def end_tombstones_below(self, folder: str) -> None:
        """Forget the tombstone of a folder, which ends at a slash, and those of what was in it."""
        self._file.all("delete from tombstones where substr(name, 1, ?) = ?", len(folder), folder)

    def has_tombstone(self, names: Collection[str]) -> bool:
        """Return whether one of these names is to be deleted. O(these log n)."""
        sql = "select 1 from tombstones where name=?"
        return any(self._file.one(sql, name) is not None for name in names)

    def is_pending(self, namespace: Namespace) -> bool:
        """Return whether an object of a namespace is still to be deleted. O(log n)."""
        sql = "select 1 from tombstones where namespace=? limit 1"
        return self._file.one(sql, namespace) is not None

    def end_tombstones(self, names: Iterable[str]) -> None:
        """Forget tombstones: the store has confirmed that their objects are gone."""
        self._file.db.executemany(
            "delete from tombstones where name=?", [(name,) for name in names]
        )

    def sums(self) -> RemoteSums:
        """Add up. O(objects)."""
        sums = self._file.all(
            "select payer_id, count(*), sum(bytes) from objects group by payer_id"
        )
        (waiting,) = self._file.one("select count(*) from tombstones")
        return RemoteSums(sum(one[1] for one in sums), {one[0]: one[2] for one in sums}, waiting)


def object_name(store_name: str, record_id: RecordId, scope_id: int) -> str:
    """Return the name of a record's object: store, scope and record are parts of it."""
    return f"{store_name}/{scope_id:08x}/{record_id:016x}"


def level_of(slab: int) -> Literal["disk", "remote"]:
    """Return the level of a record by what its row says of its place."""
    return "remote" if slab == REMOTE else "disk"
