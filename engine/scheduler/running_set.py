"""The sequences that run, with the sums over them that each admission asks for.

A sequence is *pinned* that has been preempted as often as may be: it began again as the first of
all, and nobody takes its blocks. Plain bookkeeping, no decisions; only the scheduler changes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from engine.errors import InvariantViolation
from engine.scheduler.request_table import RequestTotals
from engine.scheduler.sequence import ActiveRequest, Sequence


class Running:
    """By id. `places`: those taken in the batch, where a prompt takes one for each sample it will
    have. `tally`: the requests that any of them belongs to."""

    def __init__(self, preemptions_max: int) -> None:
        self._preemptions_max = preemptions_max
        self._by_id: dict[int, Sequence] = {}
        self._places: dict[int, int] = {}
        self._pinned: dict[int, Sequence] = {}
        self._samples: dict[ActiveRequest, int] = {}
        self.tally = RequestTotals()
        self.places = 0

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._by_id

    @property
    def pinned(self) -> list[Sequence]:
        """Those whom nobody may preempt but for a higher priority. O(these)."""
        return list(self._pinned.values())

    def is_pinned(self, sequence: Sequence) -> bool:
        """Has it been preempted as often as may be?"""
        return sequence.preemptions >= self._preemptions_max

    def add(self, sequence: Sequence) -> None:
        """It runs from now on. O(1)."""
        assert sequence.sequence_id not in self._by_id, "it runs already"
        self._by_id[sequence.sequence_id] = sequence
        self._take(sequence)
        if self.is_pinned(sequence):
            self._pinned[sequence.sequence_id] = sequence
        work = sequence.work
        self._samples[work] = self._samples.get(work, 0) + 1
        if self._samples[work] == 1:
            self.tally.add(work.request)

    def forked(self, sequence: Sequence) -> None:
        """Its samples take their own places from now on. O(1)."""
        self.places -= self._places.pop(sequence.sequence_id)
        self._take(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It runs no more, if it did. O(1)."""
        if self._by_id.pop(sequence.sequence_id, None) is not None:
            self.places -= self._places.pop(sequence.sequence_id)
            self._pinned.pop(sequence.sequence_id, None)
            work = sequence.work
            self._samples[work] -= 1
            if not self._samples[work]:
                del self._samples[work]
                self.tally.remove(work.request)

    def check(self) -> None:
        """Recount. Raises InvariantViolation. O(running)."""
        places = {i: s.places for i, s in self._by_id.items()}
        pinned = {i: s for i, s in self._by_id.items() if self.is_pinned(s)}
        if places != self._places or sum(places.values()) != self.places:
            raise InvariantViolation(f"{self.places} places {self._places}, recounted: {places}")
        if pinned != self._pinned:
            raise InvariantViolation(f"pinned {list(self._pinned)}, recounted: {list(pinned)}")
        if (samples := Counter(s.work for s in self)) != self._samples:
            raise InvariantViolation(f"samples {self._samples}, recounted: {samples}")
        self.tally.check(work.request for work in samples)

    def _take(self, sequence: Sequence) -> None:
        self._places[sequence.sequence_id] = sequence.places
        self.places += sequence.places
