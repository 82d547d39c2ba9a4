"""Admission: what a waiting sequence lacks to start, and which running sequences would make room.

`BatchRoom` is what sequences compete for, the slots of the batch and the blocks of the pool; an
`Admission` is one waiting sequence that asks for a part of it. Both decide and change nothing: only
the scheduler calls them, preempts the victims that they name, and starts the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from engine.cache import PrefixCache, TreeMatch
from engine.config import EngineConfig
from engine.scheduler.batch_shares import BatchShares
from engine.scheduler.running_set import RunningSet
from engine.scheduler.sequence import Sequence

BlockedBy = Literal["", "batch_slots", "blocks", "ceiling", "others"]
"""What keeps a waiting sequence from running; empty: nothing.

`ceiling`: blocks under its payer's ceiling. `blocks`: blocks of the pool. `others`: sequences that
it waits for, without blocking any other.
"""


class BatchRoom:
    """The slots and blocks that the running sequences have, and those that are left."""

    def __init__(
        self, cache: PrefixCache, config: EngineConfig, running: RunningSet, shares: BatchShares
    ) -> None:
        self.cache = cache
        self.running = running
        self.shares = shares
        self.slots = config.sequences_max
        self.step_tokens = config.step_tokens_max
        if longest := config.prefill_chunk_tokens_max:
            self.step_tokens = min(self.step_tokens, longest)

    def available_blocks(
        self, sequence: Sequence, found: TreeMatch | None = None
    ) -> tuple[int, float]:
        """Return what the pool has and what the payer's ceiling leaves; see `PrefixCache`."""
        grant = sequence.parent.request.grant
        return self.cache.available_blocks(grant.namespace, grant.quota, found)

    def lets_in(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence may ask for room: it leaves no slots to other payers,
        and fits beside the pinned sequences. Otherwise it waits without blocking others.
        """
        slots = self.running.batch_slots + sequence.batch_slots
        if slots > self.slots and self._must_yield(sequence):
            return False
        return self._fits_beside_pinned(sequence)

    def choose_victim(self, sequence: Sequence) -> Sequence | None:
        """Return the sequence to preempt so that running `sequence` may grow, itself if it ranks
        last; None if none may be preempted.

        Lowest priority first, then furthest over its share, then youngest. Never the best-ranked
        sequence whose blocks could help; none more than `preemptions_max` times, unless for a
        higher priority.
        """
        missing = max(1, self.cache.blocks_to_grow(sequence.table, len(sequence.tokens) + 1))
        _, own = self.available_blocks(sequence)
        candidates = self.candidates(sequence, "ceiling" if own < missing else "blocks")
        first = min(candidates, key=lambda s: s.rank)
        candidates = [s for s in candidates if s is not first]
        preemptible = [s for s in candidates if not self.running.is_pinned(s)] or [
            s for s in candidates if s.parent.request.priority < sequence.parent.request.priority
        ]

        def preemption_order(s: Sequence) -> tuple[int, float, int, int]:
            over = self.cache.over_share(s.parent.payer)
            return (-s.parent.request.priority, over, s.parent.arrival, s.index)

        return max(preemptible, key=preemption_order, default=None)

    def candidates(self, sequence: Sequence, blocked_by: BlockedBy) -> list[Sequence]:
        """Return the running sequences whose preemption could help `sequence`.

        Where a ceiling blocks it, only its own payer's sequences help. Sequences of a payer inside
        its floor are never candidates for another payer (rule *Fair share* of the cache).
        """
        if blocked_by == "batch_slots":
            return list(self.running)
        payer, over_share = sequence.parent.payer, self.cache.over_share
        return [
            s
            for s in self.running
            if (payer_of := s.parent.payer) == payer
            or (blocked_by == "blocks" and over_share(payer_of) > 0)
        ]

    def _must_yield(self, sequence: Sequence) -> bool:
        """Return whether a sequence that finds no slots leaves them to other payers (rule 4): its
        payer is above its share and it outranks no running sequence.
        """
        lowest = min(s.parent.request.priority for s in self.running)
        return lowest >= sequence.parent.request.priority and not self.shares.is_due(sequence)

    def _fits_beside_pinned(self, sequence: Sequence) -> bool:
        """Return whether a sequence may run beside the pinned ones so that all of them can finish.

        A pinned sequence starts only as the best-ranked one, so that it can take any other's
        blocks. A sequence that ranks before a pinned one can neither take its blocks nor lose its
        own to it: the pool must have room for all of these to their ends.
        """
        is_pinned, running = self.running.is_pinned, self.running
        if is_pinned(sequence) and any(s.rank < sequence.rank for s in running):
            return False
        request = sequence.parent.request
        pinned = [s.rank for s in running.pinned if s.parent.request.priority >= request.priority]
        if not pinned or sequence.rank > max(pinned):
            return True
        firm = [sequence, *(s for s in running if s.rank <= max(pinned))]
        pool, own = self.available_blocks(sequence)
        own_payer = (s for s in firm if s.parent.payer == request.grant.payer)
        return pool >= self._blocks_to_end(firm) and own >= self._blocks_to_end(own_payer)

    def _blocks_to_end(self, sequences: Iterable[Sequence]) -> int:
        """Return the blocks that sequences, and the samples they will fork, may still ask for."""
        windows, size, blocks = self.cache.windows, self.cache.block_size, 0
        for sequence in sequences:
            request, attention = sequence.parent.request, sequence.parent.attention
            total = len(request.tokens) + request.max_tokens
            held = 0 if sequence.table is None else sequence.table.held_blocks
            own = -(-total // size) - len(request.tokens) // size
            if attention is not None:
                own = min(own, attention.blocks_of(own))
            copied = 1 if request.samples > 1 else 0
            more = copied + (sequence.batch_slots - 1) * own
            blocks += max(0, windows.blocks_of(total, 1, attention) - held) + more * windows.groups
        return blocks


class Admission:
    """A waiting sequence that asks to start behind `found`, its cached prefix.

    `needed`: blocks beyond those it found pinned. `blocked_by`: what it lacks, or "": blocks under
    its payer's ceiling, batch slots for all its samples, or blocks of the pool. A sequence that
    would run alone lacks nothing. One block is left for each running sequence to continue with,
    counted under its own payer's ceiling.
    """

    def __init__(self, room: BatchRoom, sequence: Sequence, found: TreeMatch | None) -> None:
        self._room, self._sequence, self.found = room, sequence, found
        grant, cache = sequence.parent.request.grant, room.cache
        self._grant, self._priority = grant, sequence.parent.request.priority
        length, attention = len(sequence.tokens) + 1, sequence.parent.attention
        self.needed = cache.blocks_to_start(
            grant.namespace, grant.quota, length, found, room.step_tokens, attention
        )
        # Each further sample writes its own block, in each group.
        self.needed += (sequence.batch_slots - 1) * cache.windows.groups
        self.blocked_by = self._blocked_by() if room.running else ""

    def _blocked_by(self) -> BlockedBy:
        room, running = self._room, len(self._room.running)
        pool, own = room.available_blocks(self._sequence, self.found)
        if own < self.needed + running:
            payer = self._sequence.parent.payer
            if own < self.needed + [s.parent.payer for s in room.running].count(payer):
                return "ceiling"
        if room.running.batch_slots + self._sequence.batch_slots > room.slots:
            return "batch_slots"
        return "blocks" if pool < self.needed + running else ""

    @property
    def is_short_of_blocks(self) -> bool:
        """Return whether it lacks blocks even if it runs alone."""
        return min(self._room.available_blocks(self._sequence, self.found)) < self.needed

    def find_lower(self) -> list[Sequence]:
        """Return one running sequence of lower priority to preempt; none if all of them together
        could not unblock this one.
        """
        lower = [
            s
            for s in self._room.candidates(self._sequence, self.blocked_by)
            if s.parent.request.priority < self._priority
        ]
        if not lower or not self._would_unblock(lower):
            return []
        return [max(lower, key=lambda s: (not self._room.running.is_pinned(s), s.rank))]

    def find_givers(self) -> list[Sequence]:
        """Return sequences of payers above their share to preempt for a payer below its own (rules
        4 to 6): those whose slots it may claim, or one whose blocks a payer inside its floor may
        claim. None if all such sequences together would not be enough.
        """
        sequence, room, cache = self._sequence, self._room, self._room.cache
        if self.blocked_by == "batch_slots":
            left = sequence.tokens_left - (0 if self.found is None else self.found.cached_tokens)
            quick = room.shares.find_quick_giver(sequence, left)
            return quick or room.shares.find_givers(sequence)
        grant = self._grant
        if self.blocked_by != "blocks" or not cache.is_inside_floor(
            grant.namespace, grant.quota, self.needed
        ):
            return []
        able = [
            s
            for s in room.running
            if s is not room.running.first
            and s.parent.payer != grant.payer
            and s.parent.request.priority <= self._priority
            and cache.over_share(s.parent.payer) > 0
            and room.shares.may_claim_from(s)
        ]
        if not able or not self._would_unblock(able):
            return []
        return [max(able, key=lambda s: (cache.over_share(s.parent.payer), s.rank))]

    def _would_unblock(self, victims: list[Sequence]) -> bool:
        """Return whether preempting all `victims` would unblock the sequence."""
        room, grant = self._room, self._grant
        if self.blocked_by == "batch_slots":
            slots = room.running.batch_slots - sum(s.batch_slots for s in victims)
            return slots + self._sequence.batch_slots <= room.slots
        freed = [
            (s.parent.payer == grant.payer, s.table.held_blocks)
            for s in victims
            if s.table is not None
        ]
        pool, ceiling = room.cache.available_blocks(
            grant.namespace,
            grant.quota,
            self.found,
            freed_by_others=sum(blocks for is_own, blocks in freed if not is_own),
            freed_own=sum(blocks for is_own, blocks in freed if is_own),
        )
        return (ceiling if self.blocked_by == "ceiling" else pool) >= self.needed
