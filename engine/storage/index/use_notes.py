"""The latest uses of records, noted in memory until the index is written or asked for its order."""

from __future__ import annotations

import apsw

from engine.moves import RecordId
from engine.storage.transaction import change_or_join


class UseNotes:
    """Uses that the rows of one index do not have yet."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        self._uses: dict[RecordId, tuple[int, int]] = {}

    def add(self, record_id: RecordId, now_ms: int) -> None:
        """Note a use."""
        _, before = self._uses.get(record_id, (0, 0))
        self._uses[record_id] = now_ms, before + 1

    def forget(self, record_id: RecordId) -> None:
        """Drop what is noted of a record that is gone."""
        self._uses.pop(record_id, None)

    def flush(self) -> None:
        """Bring the notes to the rows. Raises apsw.Error."""
        if not self._uses:
            return
        with change_or_join(self._db):
            self._db.executemany(
                "update records set used_ms=max(used_ms, ?2), hits=hits+?3 where rec_id=?1",
                [(one, *use) for one, use in self._uses.items()],
            )
        self._uses.clear()
