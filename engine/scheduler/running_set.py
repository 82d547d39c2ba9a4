"""The running sequences, and the sums over them that each admission needs.

A *pinned* sequence has been preempted as often as allowed: it runs again only when it can finish,
and only a request of higher priority preempts it. Bookkeeping without decisions; only the scheduler
changes it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter

from engine.api import Payer
from engine.errors import InvariantViolation
from engine.scheduler.request_table import RequestTotals
from engine.scheduler.sequence import ActiveRequest, Sequence

_rank = attrgetter("rank")


class RunningSet:
    """Running sequences by id.

    `batch_slots`: occupied slots of the batch; a prompt takes one for each sample it will have.
    `slots_of`: the same for each payer with running sequences. `totals`: counts of the requests
    that the sequences belong to.
    """

    def __init__(self, preemptions_max: int) -> None:
        self._preemptions_max = preemptions_max
        self._by_id: dict[int, Sequence] = {}
        self._ranked: list[Sequence] = []
        self._slots: dict[int, int] = {}
        self._pinned: dict[int, Sequence] = {}
        self._samples: dict[ActiveRequest, int] = {}
        self.totals = RequestTotals()
        self.batch_slots = 0
        self.slots_of: Counter[Payer] = Counter()

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def ranked(self) -> list[Sequence]:
        """Return the sequences by rank, best first. O(running), without a comparison."""
        return self._ranked.copy()

    @property
    def first(self) -> Sequence | None:
        """Return the sequence of best rank; None in an empty set. O(1)."""
        return self._ranked[0] if self._ranked else None

    @property
    def pinned(self) -> list[Sequence]:
        """Return the sequences that only a higher priority may preempt. O(these)."""
        return list(self._pinned.values())

    @property
    def prompt_tokens_left(self) -> int:
        """Return the prompt tokens that running sequences have yet to compute. O(running)."""
        return sum(max(0, one.prompt_tokens - one.computed) for one in self._by_id.values())

    def is_pinned(self, sequence: Sequence) -> bool:
        """Return whether a sequence has been preempted as often as allowed."""
        return sequence.preemptions >= self._preemptions_max

    def add(self, sequence: Sequence) -> None:
        """Add a sequence. O(log running)."""
        assert sequence.sequence_id not in self._by_id, "a sequence is added only once"
        self._by_id[sequence.sequence_id] = sequence
        insort(self._ranked, sequence, key=_rank)
        self._take_slots(sequence)
        if self.is_pinned(sequence):
            self._pinned[sequence.sequence_id] = sequence
        active = sequence.parent
        self._samples[active] = self._samples.get(active, 0) + 1
        if self._samples[active] == 1:
            self.totals.add(active.request)

    def split_slots(self, sequence: Sequence) -> None:
        """Recount a sequence's slots after its fork: each sample takes its own slot from now on.
        O(1).
        """
        self._leave_slots(sequence)
        self._take_slots(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence if it is running. O(log running)."""
        if self._by_id.pop(sequence.sequence_id, None) is not None:
            del self._ranked[bisect_left(self._ranked, sequence.rank, key=_rank)]
            self._leave_slots(sequence)
            self._pinned.pop(sequence.sequence_id, None)
            active = sequence.parent
            self._samples[active] -= 1
            if not self._samples[active]:
                del self._samples[active]
                self.totals.remove(active.request)

    def check(self) -> None:
        """Recount the set. Raises InvariantViolation on a mismatch. O(running)."""
        slots = {i: s.batch_slots for i, s in self._by_id.items()}
        pinned = {i: s for i, s in self._by_id.items() if self.is_pinned(s)}
        if slots != self._slots or sum(slots.values()) != self.batch_slots:
            raise InvariantViolation(f"{self.batch_slots} slots {self._slots}, recounted: {slots}")
        slots_of: Counter[Payer] = Counter()
        for sequence in self:
            slots_of[sequence.parent.turn] += sequence.batch_slots
        if slots_of != self.slots_of:
            raise InvariantViolation(f"slots by payer {self.slots_of}, recounted: {slots_of}")
        if (ranked := sorted(self, key=_rank)) != self._ranked:
            found = [s.sequence_id for s in ranked]
            raise InvariantViolation(
                f"by rank {[s.sequence_id for s in self._ranked]}, recounted: {found}"
            )
        if pinned != self._pinned:
            raise InvariantViolation(f"pinned {list(self._pinned)}, recounted: {list(pinned)}")
        if (samples := Counter(s.parent for s in self)) != self._samples:
            raise InvariantViolation(f"samples {self._samples}, recounted: {samples}")
        self.totals.check(active.request for active in samples)

    def _take_slots(self, sequence: Sequence) -> None:
        self._slots[sequence.sequence_id] = slots = sequence.batch_slots
        self.batch_slots += slots
        self.slots_of[sequence.parent.turn] += slots

    def _leave_slots(self, sequence: Sequence) -> None:
        slots, turn = self._slots.pop(sequence.sequence_id), sequence.parent.turn
        self.batch_slots -= slots
        self.slots_of[turn] -= slots
        if not self.slots_of[turn]:
            del self.slots_of[turn]
