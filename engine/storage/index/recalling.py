"""The pages of a recall: which records the disk promises, told from the root on to an engine that
has just begun.

The records are those that were promised when the first page was asked for. What has gone since is
left out, and what was promised since is known to the engine that promised it.
"""

from __future__ import annotations

from bisect import bisect_right

from engine.api import FIDELITIES
from engine.moves import ROOT, Recall, Recalled, RecalledRun, RecordId
from engine.storage.index.index import RecordIndex, RecordRow
from engine.storage.index.index_file import FOREVER_MS
from engine.storage.index.promise_rows import PromiseRows
from engine.storage.index.remote_rows import level_of
from engine.storage.slabs.record import unpack_run

MOST = 1_024
"""Records of a page, at about 12 us each."""


class RecallPages:
    """The recall of one store. Every method may raise apsw.Error."""

    def __init__(self, index: RecordIndex, rows: PromiseRows) -> None:
        self._index, self._rows = index, rows
        self._ids: list[RecordId] = []

    def page(self, command: Recall, now_ms: int) -> Recalled:
        """Return the next records. O(promised records) for the first page, else O(page)."""
        if command.after == ROOT:
            self._ids = self._rows.promised(now_ms)
        first = bisect_right(self._ids, command.after)
        ids = self._ids[first : first + min(command.most, MOST)]
        is_last = first + len(ids) >= len(self._ids)
        found = [self._run_of(row, now_ms) for one in ids if (row := self._index.row(one))]
        runs = tuple(one for one in found if one is not None)
        if is_last:
            self._ids = []
        return Recalled(command.call_id, runs, ROOT if is_last else ids[-1])

    def _run_of(self, row: RecordRow, now_ms: int) -> RecalledRun | None:
        """Return a record for a page; None if its limit has passed, or it does not open."""
        if row.limit_ms <= now_ms or not row.run:
            return None
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
            self._rows.terms_of(row.record_id),
            self._rows.leases_of(row.record_id),
            level_of(row.slab),
        )
