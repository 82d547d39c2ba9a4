"""The index's rows about promises: how the promise of a record is counted and renewed, so that an
engine which begins anew can take it over.

Until when a record is promised stands in its own row. Few terms differ, so a row here names one set
of them. A record's row goes with the record, by a trigger; terms that no record has any more go at
the next opening. Its caller opens transactions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import apsw
import msgspec

from engine.moves import PromiseTerms, RecordId

_SCHEMA = """
create table if not exists promise_terms(
    terms_id integer primary key, packed blob not null unique
) strict;
create table if not exists promises(rec_id integer primary key, terms_id integer not null) strict;
create trigger if not exists promise_of_deleted after delete on records
    begin delete from promises where rec_id = old.rec_id; end;
delete from promise_terms where terms_id not in (select terms_id from promises);
"""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PromiseTerms).decode


class PromiseRows:
    """The rows of one index about promises. Every method may raise apsw.Error."""

    def __init__(self, db: apsw.Connection) -> None:
        """Make the tables if they are missing."""
        self._db = db
        db.execute(_SCHEMA)
        self._ids: dict[PromiseTerms, int] = {}

    def set(self, record_ids: Iterable[RecordId], terms: PromiseTerms | None) -> None:
        """Note the terms of records that are there; None changes nothing. About 3 us each."""
        if terms is None:
            return
        number = self._id_of(terms)
        rows = [(record_id, number) for record_id in record_ids]
        self._db.executemany("insert or replace into promises values(?,?)", rows)

    def terms_of(self, record_id: RecordId) -> PromiseTerms | None:
        """Return a record's terms; None where they are not known."""
        found = self._all(
            "select packed from promises join promise_terms using(terms_id) where rec_id=?",
            record_id,
        )
        try:
            return _decode(found[0][0]) if found else None
        except msgspec.MsgspecError:
            return None

    def promised(self, now_ms: int) -> list[RecordId]:
        """Return the promised records and those that they hang on, parents before children.
        O(these log n).
        """
        return [
            row[0]
            for row in self._all(
                "with recursive kept(id) as ("
                " select rec_id from records where promise_ms > ?1 and promise_ms > 0"
                " union select parent from records join kept on rec_id = id where parent <> 0)"
                " select id from kept order by id",
                now_ms,
            )
        ]

    def leases_of(self, record_id: RecordId) -> tuple[str, ...]:
        """Return the leases that cover a record."""
        sql = "select lease_id from leases where rec_id=?"
        return tuple(row[0] for row in self._all(sql, record_id))

    def _id_of(self, terms: PromiseTerms) -> int:
        if terms not in self._ids:
            packed = _encode(terms)
            self._all("insert or ignore into promise_terms(packed) values(?)", packed)
            found = self._all("select terms_id from promise_terms where packed=?", packed)
            self._ids[terms] = found[0][0]
        return self._ids[terms]

    def _all(self, sql: str, *values: object) -> list[Any]:
        return self._db.execute(sql, values).fetchall()
