"""Who waits, and who is next: priority, then fairness over payers, then deadline, then arrival.

Fairness is by virtual token counters (after Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024): a payer's counter grows by the tokens computed for it over its weight, and
the lowest counter is served next. One that comes back from idleness is lifted to the lowest of the
active ones, so that idleness earns nothing. It knows no block and no clock. Only the scheduler
calls it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator

from sortedcontainers import SortedList

from engine.api import Payer
from engine.scheduler.sequence import Sequence

Place = tuple[int, int, float, int, int]


def place_of(sequence: Sequence) -> Place:
    """Its place inside its payer. What was preempted stands before what has not begun."""
    work = sequence.work
    has_begun = work.started_at_s is not None
    due_s = float("inf") if has_begun or work.deadline_at_s is None else work.deadline_at_s
    return (-work.request.priority, 0 if has_begun else 1, due_s, work.arrival, sequence.index)


class RequestQueue:
    """Waiting sequences by payer, and every payer's counter."""

    def __init__(self) -> None:
        self._lines: dict[Payer, SortedList] = {}
        self._places: dict[int, Place] = {}
        self._live: Counter[Payer] = Counter()
        self._priorities: Counter[int] = Counter()
        self.served: dict[Payer, float] = {}
        # A number and a payer each, the lowest first: counters of payers that are not active; and
        # of those that are, what their counters have been, which is no more than what they are.
        self._idle = SortedList()
        self._active = SortedList()
        self._bounds: dict[Payer, float] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Sequence]:
        for line in self._lines.values():
            yield from (entry[1] for entry in line)

    def arrive(self, payer: Payer) -> None:
        """A request of this payer is in the engine, waiting or running. O(log payers), amortised
        over charges."""
        if self._live[payer] == 0:
            lowest = self._lowest() if self._active else 0.0
            if payer in self.served:
                self._idle.remove((self.served[payer], payer))
            self.served[payer] = max(self.served.get(payer, 0.0), lowest)
            self._bound(payer)
        self._live[payer] += 1

    def depart(self, payer: Payer) -> None:
        """It has ended. The counter of an idle payer is kept while it is above those of all that
        are active. O(log payers), amortised over charges and arrivals."""
        self._live[payer] -= 1
        if self._live[payer] == 0:
            del self._live[payer]
            self._active.remove((self._bounds.pop(payer), payer))
            self._idle.add((self.served[payer], payer))
            lowest = self._lowest()
            while self._idle and self._idle[0][0] <= lowest:
                del self.served[self._idle.pop(0)[1]]

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """`tokens` are computed for this sequence's payer, or fewer than was said. O(1), or O(log
        payers) for fewer."""
        request = sequence.work.request
        payer = request.grant.payer
        self.served[payer] += tokens / request.weight
        if self.served[payer] < self._bounds[payer]:
            self._active.remove((self._bounds[payer], payer))
            self._bound(payer)

    def add(self, sequence: Sequence) -> None:
        """O(log n)."""
        place = place_of(sequence)
        self._places[sequence.sequence_id] = place
        self._priorities[sequence.work.request.priority] += 1
        payer = sequence.work.request.grant.payer
        self._lines.setdefault(payer, SortedList(key=lambda e: e[0])).add((place, sequence))

    def remove(self, sequence: Sequence) -> bool:
        """Take it out if it waits here. O(log n)."""
        place = self._places.pop(sequence.sequence_id, None)
        if place is None:
            return False
        payer, priority = sequence.work.request.grant.payer, sequence.work.request.priority
        self._priorities[priority] -= 1
        if not self._priorities[priority]:
            del self._priorities[priority]
        line = self._lines[payer]
        line.remove((place, sequence))
        if not line:
            del self._lines[payer]
        return True

    @property
    def priority_max(self) -> float:
        """The highest of all that wait. O(priorities)."""
        return max(self._priorities, default=-math.inf)

    def in_order(
        self, running: Iterable[Sequence] = (), *, only: bool = False
    ) -> Iterator[Sequence]:
        """Each waiting sequence and each of `running` once, best first; `only` these, if so.

        Counters are read as it goes, so charging what it yields turns the order. What leaves the
        line meanwhile is skipped. O(n) to start, O(log payers) each.
        """
        lines = {} if only else {payer: list(line) for payer, line in self._lines.items()}
        joined: set[Payer] = set()
        for sequence in running:
            payer = sequence.work.request.grant.payer
            lines.setdefault(payer, []).append((place_of(sequence), sequence))
            joined.add(payer)
        for payer in joined:
            lines[payer].sort()  # no two have one place

        def turn(payer: Payer, at: int) -> tuple[int, float, Place, int, Payer]:
            place: Place = lines[payer][at][0]
            return place[0], self.served[payer], place, at, payer

        heap = [turn(payer, 0) for payer in lines]
        heapq.heapify(heap)
        while heap:
            *_, at, payer = heap[0]
            sequence = lines[payer][at][1]
            if sequence.table is not None or sequence.sequence_id in self._places:
                yield sequence
            if at + 1 < len(lines[payer]):
                heapq.heapreplace(heap, turn(payer, at + 1))
            else:
                heapq.heappop(heap)

    def _lowest(self) -> float:
        """The lowest counter of an active payer, or infinity. Looks only at those whose counters
        have grown since they were looked at."""
        while self._active:
            bound, payer = self._active[0]
            if bound == self.served[payer]:
                return float(bound)
            del self._active[0]
            self._bound(payer)
        return math.inf

    def _bound(self, payer: Payer) -> None:
        self._bounds[payer] = self.served[payer]
        self._active.add((self.served[payer], payer))
