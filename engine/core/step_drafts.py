"""The drafts of steps: added to decoding rows as far as grammars and free blocks allow, verified by
a runner, and committed as far as they were right.

A step with drafts overlaps with no other: the next one goes on from tokens that only its result
tells. So where steps overlap, one that is expected to have drafts is planned after the one before
was collected. It decides nothing of how many pay; `engine.drafts.drafter` does.
"""

from __future__ import annotations

from collections import abc
from typing import Final

from msgspec.structs import replace

from engine.api import Namespace
from engine.cache import PrefixCache
from engine.core.constraints import Constraints
from engine.core.planner import InFlightStep
from engine.drafts.drafter import Draft, Drafter
from engine.plan import StepResult
from engine.scheduler.scheduler import Scheduler, Slice
from engine.scheduler.sequence import Sequence

EXPOSED_S: Final = 0.00025
"""Seconds that a device is taken to wait for the host between two steps that do not overlap, before
that is measured."""


class StepDrafts:
    """What core asks of the `drafter`; without one there are no drafts.

    `tokens_max`: most tokens of a step.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        scheduler: Scheduler,
        constraints: Constraints,
        cache: PrefixCache,
        tokens_max: int,
    ) -> None:
        self.drafter = drafter
        self._scheduler = scheduler
        self._constraints = constraints
        self._cache = cache
        self._tokens_max = tokens_max
        self._is_drained = False

    def must_collect(self, in_flight: abc.Sequence[InFlightStep]) -> bool:
        """Return whether the steps in flight are to be collected before the next one is planned:
        one has drafts, or the next one is expected to have some. O(running).
        """
        self._is_drained = False
        if self.drafter is None or not in_flight:
            return False
        if in_flight[-1].drafts:
            return True
        running = [s for s in self._scheduler.running if not s.is_halted]
        if any(sequence.tokens_to_compute > 1 for sequence in running):
            return False  # prompts: launching ahead is worth more
        waiting = [sequence for sequence in running if sequence.length < sequence.length_max]
        return self.drafter.expects(waiting, self._tokens_max - len(waiting))

    def drained(self) -> None:
        """Note that all steps were collected for the sake of drafts, and the next is planned."""
        self._is_drained = True
        if self.drafter is not None:
            self.drafter.model_s = 0.0

    def launched(self, in_flight: InFlightStep) -> None:
        """Note in a step that was launched whether the device has waited for it."""
        if self._is_drained and self.drafter is not None:
            in_flight.guessed_s = self.drafter.model_s
        self._is_drained = False

    def add(self, slices: list[Slice], now_s: float) -> tuple[list[Slice], dict[int, Draft]]:
        """Return the slices of a step with the drafts that pay, and these by sequence.

        No block is evicted for a draft.
        """
        rows = [piece.sequence for piece in slices if _takes_drafts(piece)]
        if self.drafter is None or not rows:
            return slices, {}
        tokens = sum(piece.count + piece.silent for piece in slices)
        again = sum(sequence.state_lag for sequence in rows)
        later = sum(sequence.state_lag for sequence in self._scheduler.running) - again
        draws = sum(piece.sequence.batch_slots for piece in slices)
        # What is accepted, here and before, fits into a later step, which computes it again.
        most = min(self._tokens_max - tokens - later, len(self.drafter.times) - draws - again)
        found = self.drafter.propose(rows, most, tokens - len(rows) - again)
        if not found:
            return slices, found
        drafted: list[Slice] = []
        drafts: dict[int, Draft] = {}
        for piece in slices:
            sequence_id = piece.sequence.sequence_id
            draft = found.get(sequence_id)
            if draft is not None:
                token_ids, masks = self._constraints.follow(piece.sequence, draft.token_ids)
                if len(token_ids) < len(draft.token_ids):
                    self.drafter.forbidden(piece.sequence, draft)
                count = self._room_for(piece, len(token_ids), now_s)
                if count:
                    token_ids = token_ids[:count]
                    piece = replace(piece, drafts=token_ids, draft_masks=masks[:count])
                    drafts[sequence_id] = replace(draft, token_ids=token_ids)
            drafted.append(piece)
        return drafted, drafts

    def _room_for(self, piece: Slice, drafts: int, now_s: float) -> int:
        """Return how many drafts of a row free blocks have room for, and make it: with too few of
        them, what the row's last block still takes.
        """
        start, table = piece.start, piece.table
        in_blocks = len(table.blocks) * self._cache.block_size - start - 1
        for count in (drafts, min(drafts, in_blocks)):
            if count > 0 and self._cache.grow_freely(table, start + 1 + count, now_s, start=start):
                return count
        return 0

    def note(
        self, sequence: Sequence, draft: Draft | None, token_ids: abc.Sequence[int], now_s: float
    ) -> None:
        """Take the tokens that a step sampled of a sequence, which has them already; make the
        blocks of accepted drafts findable: their row has computed them.
        """
        if self.drafter is not None:
            self.drafter.note(sequence, draft, token_ids)
        if len(token_ids) > 1:
            table, end = sequence.table, len(sequence.tokens) - 1
            assert table is not None, "a sequence with drafts in flight is not preempted"
            sequence.computed = end
            if self._scheduler.has_states:
                sequence.state_lag = len(token_ids) - 1
            sequence.computed_before = max(sequence.computed_before, end)
            self._cache.commit(table, sequence.tokens, end, now_s)
            self._scheduler.prefix_sharing.resume_reached(sequence)

    def record(self, in_flight: InFlightStep, result: StepResult) -> None:
        """Learn what a step of decoding rows took on the device, and how long the device waited for
        the host before it; nothing if that was not measured."""
        if self.drafter is None or not result.elapsed_s:
            return
        if in_flight.guessed_s is not None:
            self.drafter.times.record_exposed(result.waited_s - in_flight.guessed_s)
        rows = in_flight.slices[: in_flight.rows]
        if all(piece.count == 1 for piece in rows):
            tokens = sum(piece.silent + 1 + len(piece.drafts) for piece in rows)
            self.drafter.times.record(tokens, result.elapsed_s)

    def end(self, sequence: Sequence) -> None:
        """Count a sequence's drafts for its request, and forget it."""
        if self.drafter is not None:
            sequence.parent.count_drafts(self.drafter.counts(sequence.sequence_id))
            self.drafter.end(sequence)

    def erase(self, namespace: Namespace) -> None:
        """Forget what was kept of a namespace."""
        if self.drafter is not None:
            self.drafter.erase(namespace)

    def check(self, live: abc.Collection[int]) -> None:
        """Check that only live sequences are known. Raises InvariantViolation. O(sequences)."""
        if self.drafter is not None:
            self.drafter.check(live)


def _takes_drafts(piece: Slice) -> bool:
    """Return whether a slice is a row of a known output token."""
    sequence = piece.sequence
    has_run_up = piece.silent > sequence.state_lag
    is_row = piece.count == 1 and not piece.keeps and not has_run_up
    return is_row and sequence.prompt_tokens <= piece.start == len(sequence.tokens) - 1
