"""The index of records: rows of SQLite, in the file that `index_file` has.

It knows rows, no slabs, no quotas and no clock: times are whole milliseconds that its caller gives.
A row's `key` is a keyed digest of its run and only finds it; the run itself proves equality, from
the root down. A record's parent exists, so a deletion takes everything under a record with it. A
record id is never used again, also where a power cut takes commits back: ids come from ranges that
are reserved durably.

In a sealed store a row's run and digest lie hidden in the column `run`, and the key of a
namespace's digests comes from its seal: the file holds no token, and none can be guessed from it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.api import FIDELITIES
from engine.moves import ROOT, Look, Looked, RecordId, StoredRun
from engine.storage.index.index_file import FOREVER_MS, IndexFile
from engine.storage.index.namespace_rows import NamespaceRows, Scope, digest_of
from engine.storage.index.remote_rows import REMOTE, level_of
from engine.storage.sealing.seals import Seals
from engine.storage.slabs.record import pack_run
from engine.storage.slabs.slabs import Place

IDS_RESERVED = 2**20
CHECK_BYTES = 16
_COLUMNS = (
    "rec_id, scope_id, parent, run, payer_id, slab, place, payload_bytes, place_bytes, check128,"
    " fidelity, limit_ms, promise_ms"
)


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
        self.file = IndexFile(path, may_make=may_make, tick=tick, is_sealed=seals is not None)
        self._db = self.file.db
        try:
            self.names = NamespaceRows(self._db, seals)
            self._uses: dict[RecordId, tuple[int, int]] = {}  # instant and number, not in rows yet
            self._next_id = self._ids_end = 0
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. Safe to repeat; a disk that fails is left as it is."""
        self.file.close()

    def _row(self, found: Sequence[Any]) -> RecordRow:
        """Return a row as it is told: with its run and its digest, empty if they do not open."""
        row = RecordRow(*found)
        seal = self.names.seal_of(row.scope_id)
        if seal is None:
            return row
        told = seal.show(row.parent, row.run)
        run, check = told[:-CHECK_BYTES], told[-CHECK_BYTES:]
        return RecordRow(*row[:3], run, *row[4:9], check, *row[10:])

    # -- ids ------------------------------------------------------------------------------------

    def next_id(self) -> RecordId:
        """Return a record id that was never used. O(1)."""
        assert self._next_id < self._ids_end, "`reserve_ids` is called before each transaction"
        self._next_id += 1
        return self._next_id - 1

    def reserve_ids(self) -> None:
        """Reserve record ids durably if few are left. Call outside a transaction."""
        if self._ids_end - self._next_id > IDS_RESERVED // 2:
            return
        first = int(self.file.meta("next_id", ROOT + 1))
        last = self.file.one("select max(rec_id) from records")[0] or ROOT
        self._next_id = self._next_id or max(first, int(last) + 1)
        self._ids_end = max(first, self._next_id) + IDS_RESERVED
        self._db.execute("pragma synchronous=full")
        self.file.set_meta("next_id", self._ids_end)
        self._db.execute("pragma synchronous=normal")

    # -- reading --------------------------------------------------------------------------------

    def row(self, record_id: RecordId) -> RecordRow | None:
        """Return a record's row, or None. About 10 us."""
        found = self.file.one(f"select {_COLUMNS} from records where rec_id=?", record_id)
        return None if found is None else self._row(found)

    def live_row(self, scope: Scope | None, record_id: RecordId, now_ms: int) -> RecordRow | None:
        """Return a record's row, or None where it is another scope's or past its limit."""
        row = self.row(record_id)
        if row is None or scope is None or row.scope_id != scope.scope_id:
            return None
        return row if row.limit_ms > now_ms else None

    def child(self, scope: Scope, parent: RecordId, run: bytes) -> RecordRow | None:
        """Return the record of a run below `parent`: found by digest, proved by its tokens."""
        found = self.file.one(
            f"select {_COLUMNS} from records where scope_id=? and parent=? and key=?",
            scope.scope_id,
            parent,
            digest_of(scope, run),
        )
        row = None if found is None else self._row(found)
        return row if row is not None and row.run == run else None

    def walk(
        self,
        command: Look,
        run_tokens: int,
        now_ms: int,
        *,
        may_fetch: Callable[[RecordId], bool] | None,
    ) -> Looked:
        """Return the records of the longest stored prefix. About 10 us a run.

        `may_fetch`: whether a record that lies in the remote store alone may be found; None: none.
        """
        scope = self.names.scope(command.namespace)
        if scope is None:
            return Looked(command.call_id, ())
        found, parent = list[StoredRun](), ROOT
        for at in range(0, len(command.tokens) - run_tokens + 1, run_tokens):
            try:
                packed = pack_run(command.tokens[at : at + run_tokens])
            except struct.error:
                break
            step = self._step(scope, parent, packed)
            if step is None:
                break
            parent, fidelity, limit_ms, promise_ms, slot_bytes, slab = step
            level = level_of(slab)
            if limit_ms <= now_ms:
                break
            if level == "remote" and (may_fetch is None or not may_fetch(parent)):
                break
            limit_s = None if limit_ms >= FOREVER_MS else (limit_ms - now_ms) / 1_000
            promise_s = max(0, promise_ms - now_ms) / 1_000
            word = FIDELITIES[fidelity]
            found.append(StoredRun(parent, word, limit_s, promise_s, slot_bytes, level))
        return Looked(command.call_id, tuple(found))

    def _step(
        self, scope: Scope, parent: RecordId, run: bytes
    ) -> tuple[int, int, int, int, int, int] | None:
        """Return id, fidelity, limit, promise, payload bytes and slab of a run's record: `child`,
        for long walks."""
        found = self.file.one(
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
        for found in self.file.all(sql, scope.scope_id, parent):
            yield self._row(found)

    def rows(self) -> Iterator[RecordRow]:
        """Yield all records, parents before children. O(records)."""
        sql = f"select {_COLUMNS} from records where rec_id > ? order by rec_id limit 1000"
        found = self.file.all(sql, ROOT)
        while found:
            yield from map(self._row, found)
            found = self.file.all(sql, found[-1][0])

    def used_places(self, slab: int) -> list[int]:
        """Return the places of a slab that have a record, in order. O(records of the slab)."""
        return self.file.column("select place from records where slab=?", slab)

    def outside(self, sizes: Mapping[int, int]) -> list[RecordId]:
        """Return the records whose place is in none of these slabs, or beyond its end.

        `sizes`: the number of places of each slab. O(records).
        """
        slabs = self.file.all(
            f"select slab, max(place), min(place) from records where slab<>{REMOTE} group by slab"
        )
        found: list[RecordId] = []
        for slab, last, first in slabs:
            if first < 0 or last >= sizes.get(slab, 0):
                sql = "select rec_id from records where slab=? and (place<0 or place>=?)"
                found += self.file.column(sql, slab, sizes.get(slab, 0))
        return found

    def wrong_children(self) -> list[RecordId]:
        """Return the records whose count of children is wrong. O(records log n)."""
        return self.file.column(
            "select rec_id from records as one where children <> (select count(*) from records"
            " as other where other.scope_id = one.scope_id and other.parent = one.rec_id"
            f" and other.slab<>{REMOTE})"
        )

    def sums(self) -> list[tuple[int, int, int, int, int, int]]:
        """Return scope, payer, fidelity, records, places and bytes of places, added up.
        O(records)."""
        return self.file.all(
            "select scope_id, payer_id, fidelity, count(*), sum(slab <> -1), sum(place_bytes)"
            " from records"
            " group by scope_id, payer_id, fidelity"
        )

    def promised(self, now_ms: int) -> dict[int, int]:
        """Return the promised bytes by payer. O(records with a promise)."""
        return dict(
            self.file.all(
                "select payer_id, sum(place_bytes) from records where promise_ms > ?1"
                " and promise_ms > 0 group by payer_id",
                now_ms,
            )
        )

    def leaves(self, payer_id: int, place_bytes: int, now_ms: int, limit: int) -> list[RecordId]:
        """Return unpromised records without children, in places of this size: those never used
        first, then the least recently used."""
        return self.file.column(
            "select rec_id from records indexed by leaves where payer_id=? and place_bytes=?"
            " and children=0 and promise_ms <= ? order by hits > 0, used_ms limit ?",
            payer_id,
            place_bytes,
            now_ms,
            limit,
        )

    def oldest_leaf_ms(self, place_bytes: int, now_ms: int) -> int:
        """Return when the unpromised record without children in places of this size was used that
        was used longest ago; 0 without one. O(records without children).
        """
        found = self.file.one(
            "select min(used_ms) from records indexed by leaves where place_bytes=? and children=0"
            " and promise_ms <= ?",
            place_bytes,
            now_ms,
        )
        return int(found[0] or 0)

    def expired(self, now_ms: int, limit: int) -> list[RecordId]:
        """Return records at or after their limit."""
        return self.file.column(
            f"select rec_id from records where limit_ms <= ? and limit_ms < {FOREVER_MS} limit ?",
            now_ms,
            limit,
        )

    def of_slab(self, slab: int, now_ms: int) -> tuple[list[RecordId], int, bool]:
        """Return the records of a slab, their latest use and whether one is promised."""
        rows = self.file.all("select rec_id, used_ms, promise_ms from records where slab=?", slab)
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
        return self.file.column(
            "with recursive kept(id) as ("
            " select rec_id from leases where scope_id=?1 and lease_id<>?2"
            " union select parent from records join kept on rec_id = id where parent <> 0)"
            " select rec_id from leases where scope_id=?1 and lease_id=?2"
            " and rec_id not in kept",
            scope.scope_id,
            lease_id,
        )

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

    def note_use(self, record_id: RecordId, now_ms: int) -> None:
        """Note a use in memory, until `write_uses`."""
        _, before = self._uses.get(record_id, (0, 0))
        self._uses[record_id] = now_ms, before + 1

    def write_uses(self) -> None:
        """Bring the noted uses to the rows, before their order matters."""
        if not self._uses:
            return
        with self.file.change_or_join():
            self._db.executemany(
                "update records set used_ms=max(used_ms, ?2), hits=hits+?3 where rec_id=?1",
                [(one, *use) for one, use in self._uses.items()],
            )
        self._uses.clear()

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
            waiting += self.file.column(sql, row.scope_id, record_id)
        return gone

    def delete_under(self, tops: Iterable[RecordId]) -> list[RecordRow]:
        """Delete records and everything under them; return the rows. O(deleted log n)."""
        gone = self.under(tops)
        for record_id in gone:
            self._uses.pop(record_id, None)
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
