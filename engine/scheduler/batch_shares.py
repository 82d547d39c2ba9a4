"""Shares of the batch: how many of its slots each payer may hold while others want some.

The slots are a quota like blocks. With several payers that run or wait, each is due a part of the
batch in proportion to its weight; a single payer may hold all. A payer that waits below its share
claims slots of payers above theirs: its first slot of any payer that has been served no less, by
the counters of the request queue, and further slots once it is behind by `CLAIM_STEPS` steps. So
claims never work against the fair order, and payers that are served alike claim nothing of each
other. With more payers than slots no share is a whole slot: then only a quick request claims, its
payer's first slot from one that was served more and has more left. With turns and no shares it
would wait for requests of every other payer. The module changes nothing. Only the scheduler calls
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from engine.api import Payer
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.running_set import RunningSet
from engine.scheduler.sequence import Sequence

CLAIM_STEPS = 4
"""Steps of a full batch by which a payer must be behind another before it claims a further slot."""
QUICK_TOKENS = 64
"""Tokens, prompt and answer together, that a request may have left to compute to claim its payer's
first slot where there are more payers than slots: the giver waits for a few steps."""
ROUNDING = 1e-9
"""The most that a share may be off by."""


class BatchShares:
    """The shares of `slots` batch slots, as of the last `refresh`.

    `claims_max`: how often one sequence gives its slots to another payer.
    """

    def __init__(
        self, queue: RequestQueue, running: RunningSet, slots: int, claims_max: int
    ) -> None:
        self._queue, self._running = queue, running
        self._slots, self._claims_max = slots, claims_max
        self._slots_per_weight = inf

    def refresh(self) -> None:
        """Read which payers run or wait now. O(payers), and O(1) if nothing waits."""
        self._slots_per_weight = inf
        if self._queue:
            payers = self._queue.waiting_slots.keys() | self._running.slots_of.keys()
            if len(payers) > 1:
                weights = self._queue.weights
                self._slots_per_weight = self._slots / sum(weights[payer] for payer in payers)

    def share(self, payer: Payer) -> float:
        """Return the slots that a payer is due; infinity for a single payer. O(1)."""
        return self._slots_per_weight * self._queue.weights[payer]

    def is_due(self, sequence: Sequence) -> bool:
        """Return whether a sequence stays within its payer's share, or is its first. O(1)."""
        held = self._running.slots_of[sequence.parent.turn]
        return held == 0 or self._stays_within(sequence, held)

    def has_claim(self) -> bool:
        """Return whether a waiting payer may claim slots. O(payers + running)."""
        if self._slots_per_weight == inf:
            return False
        served, held = self._queue.served, self._running.slots_of
        due = [p for p in self._queue.waiting_slots if held[p] + 1 <= self.share(p) + ROUNDING]
        least = min((self._claimable_from(payer) for payer in due), default=inf)
        if least < inf and any(
            served[s.parent.turn] >= least and self._may_give(s, held[s.parent.turn])
            for s in self._running
        ):
            return True
        return self.has_quick_claim()

    def has_quick_claim(self) -> bool:
        """Return whether a quick request could claim a slot: a payer waits that holds none and is
        due less than one, and another was served more. O(payers + running)."""
        served, held = self._queue.served, self._running.slots_of
        due = (served[p] for p in self._queue.waiting_slots if not held[p] and self.share(p) < 1)
        least = min(due, default=inf)
        return least < inf and any(
            served[s.parent.turn] > least and self.may_claim_from(s) for s in self._running
        )

    def may_claim_quickly(self, sequence: Sequence, left: int) -> bool:
        """Return whether a waiting sequence is quick, `left` tokens being left of it, and its payer
        holds no slot and is due less than one. O(1)."""
        turn = sequence.parent.turn
        is_first = sequence.batch_slots == 1 and not self._running.slots_of[turn]
        return left <= QUICK_TOKENS and is_first and self.share(turn) < 1

    def find_quick_giver(self, sequence: Sequence, left: int) -> list[Sequence]:
        """Return the running sequence to preempt for a quick waiting one, of one slot and `left`
        tokens, whose payer holds no slot and is due less than one; none if none may give.
        O(running).

        The one whose payer was served most, and then the youngest; none that has no more left, of a
        payer that was not served more, of a higher priority, or that has given often enough.
        """
        turn, served = sequence.parent.turn, self._queue.served
        if not self.may_claim_quickly(sequence, left):
            return []
        able = [
            s
            for s in self._running
            if s is not self._running.first
            and s.parent.request.priority <= sequence.parent.request.priority
            and served[s.parent.turn] > served[turn]
            and s.tokens_left > left
            and self.may_claim_from(s)
        ]
        return [max(able, key=lambda s: (served[s.parent.turn], s.rank))] if able else []

    def find_givers(self, sequence: Sequence) -> list[Sequence]:
        """Return the running sequences to preempt so that a waiting one gets its slots; none if
        they would not be enough, or if its payer is not due so many.

        Of the payer furthest above its share, per weight, the sequence of the lowest priority and
        then the youngest gives its slots first. The best-ranked sequence, higher priorities, payers
        that were not served more, and sequences that have given often enough give none. O(running),
        for each sequence found.
        """
        turn, held = sequence.parent.turn, self._running.slots_of.copy()
        if self._slots_per_weight == inf or not self._stays_within(sequence, held[turn]):
            return []
        missing = sequence.batch_slots - (self._slots - self._running.batch_slots)
        priority, served = sequence.parent.request.priority, self._queue.served
        least = self._claimable_from(turn)
        candidates = [
            s
            for s in self._running
            if s is not self._running.first
            and s.parent.turn != turn
            and s.parent.request.priority <= priority
            and served[s.parent.turn] >= least
        ]
        givers: list[Sequence] = []
        while missing > 0:
            able = [s for s in candidates if self._may_give(s, held[s.parent.turn])]
            if not able:
                return []
            giver = max(able, key=lambda s: (self._overage(s.parent.turn, held), s.rank))
            candidates.remove(giver)
            givers.append(giver)
            held[giver.parent.turn] -= giver.batch_slots
            missing -= giver.batch_slots
        return givers

    def may_claim_from(self, sequence: Sequence) -> bool:
        """Return whether a running sequence may still give way to another payer. O(1)."""
        return sequence.claims < self._claims_max and not self._running.is_pinned(sequence)

    # -- internals ----------------------------------------------------------------------------

    def _claimable_from(self, payer: Payer) -> float:
        """Return the counter from which on another payer's slots may be claimed. O(1)."""
        served = self._queue.served[payer]
        if self._running.slots_of[payer] == 0:
            return served
        return served + CLAIM_STEPS * self._slots_per_weight

    def _stays_within(self, sequence: Sequence, held: int) -> bool:
        return held + sequence.batch_slots <= self.share(sequence.parent.turn) + ROUNDING

    def _may_give(self, sequence: Sequence, held: int) -> bool:
        left = held - sequence.batch_slots
        return left >= self.share(sequence.parent.turn) - ROUNDING and self.may_claim_from(sequence)

    def _overage(self, payer: Payer, held: Mapping[Payer, int]) -> float:
        return (held[payer] - self.share(payer)) / self._queue.weights[payer]
