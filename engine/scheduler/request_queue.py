"""The request queue: waiting sequences by priority, then fairness over payers, deadline, arrival.

Fairness uses virtual token counters (after Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024): a payer's counter grows by the tokens computed for it over its weight, and the
payer with the lowest counter goes first. The counter of a payer that was idle is lifted to the
lowest counter of the active payers, so idleness earns no credit. A payer's place in the order is
its counter as it will be when its next prompt is computed, up to `TURN_TOKENS` ahead: a prompt of
two tokens does not wait until each of twenty payers that were served four tokens less has had one
of three hundred.

Of one payer, short prompts go before long ones, within bounds: a question of forty tokens that
waits for a document of its own payer is answered late for nothing, since the document is hardly
delayed if the question goes first.

The queue knows no block and no clock.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Final

from sortedcontainers import SortedList

from engine.api import Payer
from engine.errors import InvariantViolation
from engine.scheduler.sequence import Sequence

LONG_TOKENS: Final = 256
"""A prompt with fewer missing tokens is never passed: nothing is gained."""
RATIO: Final = 4
"""A prompt may pass those that miss at least so many times its tokens."""
PASSES_MAX: Final = 4
"""How often a prompt is passed: so its own first token comes at most twice as late."""
WINDOW: Final = 8
"""The prompts of a payer, from the first one on; some may pass others."""
TURN_TOKENS: Final = 256
"""The most tokens of a prompt by which the order of payers foresees its cost: so a payer is served
at most so many tokens before one that has been served less."""

QueueKey = tuple[int, int, float, int, int]
QueueEntry = tuple[QueueKey, Sequence]


def queue_key(sequence: Sequence) -> QueueKey:
    """Return a sequence's sort key within its payer. Preempted sequences come before new ones."""
    active = sequence.parent
    has_begun = active.started_at_s is not None
    due_s = float("inf") if has_begun or active.deadline_at_s is None else active.deadline_at_s
    return (-active.request.priority, 0 if has_begun else 1, due_s, active.arrival, sequence.index)


class RequestQueue:
    """Waiting sequences by payer, and every payer's counter.

    A payer here is the one that gives a request its turn. `waiting_slots`: the batch slots that the
    waiting sequences of each payer will take. `weights`: of the payers with live requests.
    """

    def __init__(self) -> None:
        self.waiting_slots: Counter[Payer] = Counter()
        self.weights: dict[Payer, float] = {}
        self._slots: dict[int, int] = {}
        self._queues: dict[Payer, SortedList] = {}
        self._keys: dict[int, QueueKey] = {}
        self._live: Counter[Payer] = Counter()
        self._priorities: Counter[int] = Counter()
        self.served: dict[Payer, float] = {}
        # (counter, payer) pairs, lowest first: exact counters of idle payers, and for active payers
        # an earlier value of the counter, which is a lower bound.
        self._idle = SortedList()
        self._active = SortedList()
        self._bounds: dict[Payer, float] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from (entry[1] for entry in queue)

    def count_arrival(self, payer: Payer, weight: float) -> None:
        """Count a new live request of this payer, waiting or running. O(log payers), amortised over
        charges.
        """
        self.weights[payer] = weight
        if self._live[payer] == 0:
            lowest = self._lowest_active() if self._active else 0.0
            if payer in self.served:
                self._idle.remove((self.served[payer], payer))
            self.served[payer] = max(self.served.get(payer, 0.0), lowest)
            self._refresh_bound(payer)
        self._live[payer] += 1

    def count_departure(self, payer: Payer) -> None:
        """Count the end of a live request of this payer.

        An idle payer's counter is kept while it is above the counters of all active payers. O(log
        payers), amortised over charges and arrivals.
        """
        self._live[payer] -= 1
        if self._live[payer] == 0:
            del self._live[payer], self.weights[payer]
            self._active.remove((self._bounds.pop(payer), payer))
            self._idle.add((self.served[payer], payer))
            lowest = self._lowest_active()
            while self._idle and self._idle[0][0] <= lowest:
                del self.served[self._idle.pop(0)[1]]

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Add `tokens` to the counter of the sequence's payer; negative `tokens` take a charge
        back.

        O(1), or O(log payers) for negative `tokens`.
        """
        payer = sequence.parent.turn
        self.served[payer] += tokens / sequence.parent.request.weight
        if self.served[payer] < self._bounds[payer]:
            self._active.remove((self._bounds[payer], payer))
            self._refresh_bound(payer)

    def charge_each(self, sequences: Iterable[Sequence]) -> None:
        """Add a token to the counter of each sequence's payer. O(sequences)."""
        served = self.served
        for sequence in sequences:
            active = sequence.parent
            served[active.turn] += active.token_cost

    def add(self, sequence: Sequence) -> None:
        """Add a waiting sequence. O(log n)."""
        key = queue_key(sequence)
        self._keys[sequence.sequence_id] = key
        self._priorities[sequence.parent.request.priority] += 1
        payer = sequence.parent.turn
        self._slots[sequence.sequence_id] = slots = sequence.batch_slots
        self.waiting_slots[payer] += slots
        self._queues.setdefault(payer, SortedList(key=lambda e: e[0])).add((key, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence if it waits here. O(log n)."""
        key = self._keys.pop(sequence.sequence_id, None)
        if key is None:
            return
        payer, priority = sequence.parent.turn, sequence.parent.request.priority
        self._priorities[priority] -= 1
        if not self._priorities[priority]:
            del self._priorities[priority]
        queue = self._queues[payer]
        queue.remove((key, sequence))
        self.waiting_slots[payer] -= self._slots.pop(sequence.sequence_id)
        if not queue:
            del self._queues[payer], self.waiting_slots[payer]

    @property
    def priority_max(self) -> float:
        """Return the highest priority of all waiting sequences. O(priorities)."""
        return max(self._priorities, default=-inf)

    def in_order(
        self,
        running: Iterable[Sequence],
        *,
        only: bool,
        count_missing: Callable[[Sequence], int],
    ) -> Iterator[Sequence]:
        """Iterate over the waiting sequences and `running`, best first; `only`: over nothing but
        `running`. `count_missing`: returns the tokens that a sequence has to compute.

        Counters are read during the iteration, so charging a yielded sequence changes the order. A
        sequence that leaves the queue meanwhile is skipped. O(n) to start, O(log payers) each.
        """
        queues = {} if only else {payer: list(queue) for payer, queue in self._queues.items()}
        joined: set[Payer] = set()
        for sequence in running:
            payer = sequence.parent.turn
            queues.setdefault(payer, []).append((queue_key(sequence), sequence))
            joined.add(payer)
        for payer in joined:
            queues[payer].sort()  # keys are unique
        for entries in queues.values():
            _advance_short(entries, count_missing)

        def heap_entry(payer: Payer, at: int) -> tuple[int, float, bool, QueueKey, int, Payer]:
            # Of payers served alike, one that has just arrived goes before one with prompts under
            # way: its counter was lifted to theirs.
            key, sequence = queues[payer][at]
            due = self.served[payer]
            if len(queues) > 1:
                cost = min(TURN_TOKENS, count_missing(sequence))
                due += cost / sequence.parent.request.weight
            return key[0], due, payer in joined, key, at, payer

        heap = [heap_entry(payer, 0) for payer in queues]
        heapq.heapify(heap)
        while heap:
            *_, at, payer = heap[0]
            sequence = queues[payer][at][1]
            if sequence.table is not None or sequence.sequence_id in self._keys:
                yield sequence
            if at + 1 < len(queues[payer]):
                heapq.heapreplace(heap, heap_entry(payer, at + 1))
            else:
                heapq.heappop(heap)

    def check(self) -> None:
        """Recount the waiting slots. Raises InvariantViolation on a mismatch. O(waiting)."""
        slots: Counter[Payer] = Counter()
        for sequence in self:
            slots[sequence.parent.turn] += sequence.batch_slots
        if slots != self.waiting_slots:
            raise InvariantViolation(f"waiting slots {self.waiting_slots}, recounted: {slots}")
        if self.weights.keys() != self._live.keys():
            raise InvariantViolation(f"weights of {set(self.weights)}, live: {set(self._live)}")

    def _lowest_active(self) -> float:
        """Return the lowest counter of an active payer, or infinity.

        It looks only at payers with counters that have grown since its last look.
        """
        while self._active:
            bound, payer = self._active[0]
            if bound == self.served[payer]:
                return float(bound)
            del self._active[0]
            self._refresh_bound(payer)
        return inf

    def _refresh_bound(self, payer: Payer) -> None:
        self._bounds[payer] = self.served[payer]
        self._active.add((self.served[payer], payer))


def _advance_short(entries: list[QueueEntry], count_missing: Callable[[Sequence], int]) -> None:
    """Move the short prompts of a payer before its long ones; its entries are in order.

    O(1) if the first prompt is not long, else O(WINDOW) and at most as many look-ups.
    """
    if len(entries) < 2 or entries[0][1].tokens_to_compute < LONG_TOKENS:
        return
    window, bound = entries[:WINDOW], inf
    ahead: list[QueueEntry] = []
    behind: list[QueueEntry] = []
    for entry in window:
        key, sequence = entry
        is_ahead = behind and key[0] == behind[0][0][0]
        if is_ahead and not sequence.has_passed:
            is_ahead = bound > 0 and _is_short(sequence, bound, count_missing)
            if is_ahead:
                sequence.has_passed = True
                for _, passed in behind:
                    passed.passes += 1
                bound = min(_bound(passed, count_missing) for _, passed in behind)
        if is_ahead:
            ahead.append(entry)
        else:
            behind.append(entry)
            bound = min(bound, _bound(sequence, count_missing))
    entries[:WINDOW] = ahead + behind


def _bound(sequence: Sequence, count_missing: Callable[[Sequence], int]) -> float:
    """Return the most missing tokens of a prompt that may pass this one."""
    if sequence.passes >= PASSES_MAX:
        return 0.0
    missing = count_missing(sequence)
    return missing / RATIO if missing >= LONG_TOKENS else 0.0


def _is_short(sequence: Sequence, bound: float, count_missing: Callable[[Sequence], int]) -> bool:
    return sequence.tokens_to_compute <= bound or count_missing(sequence) <= bound
