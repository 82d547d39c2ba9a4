"""Seats of live sequences: numbered places for their state on the GPU, block tables first.

Each sequence has a seat from its beginning to its end. The block tables of all seats are kept on
the host as they are on the GPU, so that a step's KV slots are one lookup, and only new entries are
sent. Arrays instead of objects: a step of 256 rows costs the host a few dozen microseconds here.
`engine.runner.gpu_runner` owns it; it knows no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from engine.plan import Row

Int32 = npt.NDArray[np.int32]

MEMBERSHIPS_MAX = 4
"""Lists of sequences with seats that are remembered: a batch's rows and its draws, old and new."""

_counts, _starts = attrgetter("count"), attrgetter("start")
_block_ids, _versions = attrgetter("block_ids"), attrgetter("table_version")
_token_ids = attrgetter("token_ids")


class StepRows:
    """A step's rows as int32 arrays [R]: query tokens, first positions and seats."""

    def __init__(self, rows: Sequence[Row], seats: Int32) -> None:
        self.rows = rows
        self.counts = np.fromiter(map(_counts, rows), np.int32, len(rows))
        self.starts = np.fromiter(map(_starts, rows), np.int32, len(rows))
        self.seats = seats
        self.total = int(self.counts.sum())

    def positions(self) -> tuple[Int32, Int32]:
        """Return the position and the seat of each query token, [T] each."""
        if self.total == len(self.rows):
            return self.starts, self.seats
        ends = np.cumsum(self.counts, dtype=np.int32)
        first = np.repeat(self.starts - ends + self.counts, self.counts)
        return first + np.arange(self.total, dtype=np.int32), np.repeat(self.seats, self.counts)

    def write_token_ids(self, out: Int32) -> None:
        """Write the token ids to `out` [T]; -1 if a row has the seat's last token."""
        out[:] = -1
        known = list(map(_token_ids, self.rows))
        if known.count(None) == len(known):
            return
        place = 0
        for token_ids, row in zip(known, self.rows, strict=True):
            if token_ids is not None:
                out[place : place + row.count] = token_ids
            place += row.count


class Seats:
    """Seats by sequence id, and their block tables of `stride` entries each, in each KV group.

    `tables` [groups, seats, stride] int32: what the GPU has after the last `new_entries`. A hole of
    a window group is any block: no query reads it. The `ahead` entries behind a table's last name
    that entry's block again.
    """

    def __init__(self, seats: int, stride: int, groups: int = 1, ahead: int = 0) -> None:
        self._ahead = ahead
        self.tables = np.zeros((groups, seats, stride), np.int32)
        self._seat_of: dict[int, int] = {}
        self._free = list(range(seats - 1, -1, -1))
        self._known = np.zeros(seats, np.int32)
        self._versions = np.full(seats, -1, np.int64)
        self._remembered: dict[tuple[int, ...], Int32] = {}

    def take(self, sequence_id: int) -> None:
        """Give a sequence a seat. Raises IndexError if none is free."""
        seat = self._free.pop()
        self._seat_of[sequence_id] = seat
        self._versions[seat] = -1
        self._remembered.clear()

    def release(self, sequence_id: int) -> None:
        """Free a sequence's seat; an unknown one is ignored: the step that began it may have failed
        before it took a seat.
        """
        seat = self._seat_of.pop(sequence_id, None)
        if seat is not None:
            self._free.append(seat)
            self._remembered.clear()

    def seat(self, sequence_id: int) -> int:
        """Return a sequence's seat. Raises KeyError for one without."""
        return self._seat_of[sequence_id]

    def of(self, sequence_ids: tuple[int, ...]) -> Int32:
        """Return the seats of sequences, as an array that must not be written."""
        seats = self._remembered.get(sequence_ids)
        if seats is None:
            if len(self._remembered) == MEMBERSHIPS_MAX:
                self._remembered.clear()
            found = map(self._seat_of.__getitem__, sequence_ids)
            seats = np.fromiter(found, np.int32, len(sequence_ids))
            self._remembered[sequence_ids] = seats
        return seats

    def new_entries(self, rows: Sequence[Row], seats: Int32) -> tuple[Int32, Int32] | None:
        """Take over the rows' block tables; return what the GPU lacks, or None.

        Returns (indices into the flat tables, block ids): a whole table where its version has
        changed, else the appended entries. O(rows + new entries).
        """
        counts = np.fromiter(map(len, map(_block_ids, rows)), np.int32, len(rows))
        versions = np.fromiter(map(_versions, rows), np.int64, len(rows))
        known = np.where(versions == self._versions[seats], self._known[seats], 0)
        changed = np.flatnonzero(known < counts)
        if len(changed) == 0:
            return None
        blocks: list[int] = []
        begins, ends = known[changed], counts[changed]
        groups, places, stride = self.tables.shape
        ahead = np.minimum(self._ahead, stride - ends)
        for group in range(groups):
            for i, first, more in zip(
                changed.tolist(), begins.tolist(), ahead.tolist(), strict=True
            ):
                table = rows[i].beside[group - 1] if group else rows[i].block_ids
                blocks += table[first:]
                blocks += table[-1:] * more
        length = ends - begins + ahead
        base = seats[changed] * stride + begins
        first_of = np.cumsum(length) - length
        one = np.repeat(base - first_of, length) + np.arange(int(length.sum()))
        indices = (one + np.arange(groups)[:, None] * (places * stride)).reshape(-1)
        ids = np.maximum(np.array(blocks, np.int32), 0)
        self.tables.reshape(-1)[indices] = ids
        self._known[seats[changed]] = ends
        self._versions[seats[changed]] = versions[changed]
        return indices.astype(np.int32), ids
