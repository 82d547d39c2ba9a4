"""The index's rows about promises: how each is counted and renewed, and the pages that tell them to
an engine which begins anew and takes them over.

Until when a record is promised stands in its own row. Few terms differ, so a row here names one set
of them. A record's row goes with the record, by a trigger; terms that no record has any more go at
the next opening. The caller opens transactions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import msgspec

from engine.api import FIDELITIES
from engine.moves import ROOT, PromiseTerms, Recall, Recalled, RecalledRun, RecordId
from engine.storage.index.index import RecordIndex, RecordRow
from engine.storage.index.index_file import FOREVER_MS
from engine.storage.index.remote_rows import level_of
from engine.storage.slabs.record import unpack_run

PAGE_MAX = 1_024
"""Records of a page, at about 12 us each."""
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

    def __init__(self, index: RecordIndex) -> None:
        """Make the tables if they are missing."""
        self._index, self._file = index, index.file
        self._file.db.execute(_SCHEMA)
        self._ids: dict[PromiseTerms, int] = {}
        self._recalled: list[RecordId] = []  # what the first page of a recall was about

    def set(self, record_ids: Iterable[RecordId], terms: PromiseTerms | None) -> None:
        """Note the terms of records that are there; None changes nothing. About 3 us each."""
        if terms is None:
            return
        number = self._id_of(terms)
        rows = [(record_id, number) for record_id in record_ids]
        self._file.db.executemany("insert or replace into promises values(?,?)", rows)

    def _id_of(self, terms: PromiseTerms) -> int:
        if terms not in self._ids:
            packed = _encode(terms)
            self._file.all("insert or ignore into promise_terms(packed) values(?)", packed)
            found = self._file.one("select terms_id from promise_terms where packed=?", packed)
            self._ids[terms] = found[0]
        return self._ids[terms]

    def page(self, command: Recall, now_ms: int) -> Recalled:
        """Return the next records of a recall: those that were promised when the first page was
        asked for. What has gone since is left out; what was promised since is known to the engine
        that promised it. O(promised records) for the first page, else O(page).
        """
        if command.after == ROOT:
            self._recalled = self._promised(now_ms)
        first = bisect_right(self._recalled, command.after)
        ids = self._recalled[first : first + min(command.most, PAGE_MAX)]
        is_last = first + len(ids) >= len(self._recalled)
        found = [self._run_of(row, now_ms) for one in ids if (row := self._index.row(one))]
        runs = tuple(one for one in found if one is not None)
        if is_last:
            self._recalled = []
        return Recalled(command.call_id, runs, ROOT if is_last else ids[-1])

    def _promised(self, now_ms: int) -> list[RecordId]:
        """Return the promised records and those that they hang on, parents before children.
        O(these log n)."""
        return self._file.column(
            "with recursive kept(id) as ("
            " select rec_id from records where promise_ms > ?1 and promise_ms > 0"
            " union select parent from records join kept on rec_id = id where parent <> 0)"
            " select id from kept order by id",
            now_ms,
        )

    def _run_of(self, row: RecordRow, now_ms: int) -> RecalledRun | None:
        """Return a record for a page; None if its limit has passed, or it does not open."""
        if row.limit_ms <= now_ms or not row.run:
            return None
        leases = self._file.column("select lease_id from leases where rec_id=?", row.record_id)
        return RecalledRun(
            row.record_id,
            row.parent,
            self._index.names.scope_of(row.scope_id).namespace,
            self._index.names.payer_name(row.payer_id),
            unpack_run(row.run),
            FIDELITIES[row.fidelity],
            row.payload_bytes,
            None if row.limit_ms >= FOREVER_MS else (row.limit_ms - now_ms) / 1_000,
            max(0, row.promise_ms - now_ms) / 1_000,
            self._terms_of(row.record_id),
            tuple(leases),
            level_of(row.slab),
        )

    def _terms_of(self, record_id: RecordId) -> PromiseTerms | None:
        """Return a record's terms; None where they are not known."""
        found = self._file.one(
            "select packed from promises join promise_terms using(terms_id) where rec_id=?",
            record_id,
        )
        try:
            return None if found is None else _decode(found[0])
        except msgspec.MsgspecError:
            return None
