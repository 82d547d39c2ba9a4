"""The drafter: which sequences get drafts in a step, from which source, and how many.

A draft pays where the tokens that a step is expected to give grow by more than its time. The time
is that of steps by their tokens (`step_times`); how often a source is right is counted for each
sequence alone, so that no tenant's answers change another's steps. It knows no block, no step and
no clock. Only `engine.core.step_drafts` calls it.
"""

from __future__ import annotations

from collections import abc
from typing import Final

from msgspec import Struct

from engine.api import DraftCount, Namespace
from engine.drafts.forced import ForcedSource
from engine.drafts.ngram import NgramSource
from engine.drafts.prediction import PredictionSource
from engine.drafts.source import DraftSource
from engine.drafts.step_times import StepTimes
from engine.drafts.suffix import SuffixSource
from engine.errors import InvariantViolation
from engine.scheduler.sequence import Sequence

DRAFTS_MAX: Final = 15
"""Most drafts of a sequence in a step."""
ACCEPTANCE_PRIOR: Final = 0.6
"""How often a source is taken to be right before it was tried."""
WEIGHT_MIN: Final = 0.05
"""Of the latest draft in the mean of a source's acceptance, once many were tried."""
PRIOR_DRAFTS: Final = 2
"""Drafts that what is known before the first one counts as."""
GAIN_MIN: Final = 1.03
"""How much faster the tokens of a step with drafts must be expected to come."""
GAIN_OF_ROW, GAIN_MAX = 0.01, 1.2
"""What is asked for beyond that for each further sequence, and in all: each has a context of its
own, which the table does not have, and all streams wait for a longer step."""
SLOWER_MAX: Final = 1.05
"""How much longer drafts may make a step that carries prompts, whose first tokens wait for it."""
REST_TOKENS: Final = 128
"""Sampled tokens after which a source that was too often wrong is tried again."""


class Draft(Struct, frozen=True):
    """The drafts of one sequence, and the source that they come from."""

    source: str
    token_ids: tuple[int, ...]


class _Trust:
    """How far a sequence's source is trusted, and what it has drafted."""

    __slots__ = ("acceptance", "accepted", "drafted", "rested", "tried")

    def __init__(self) -> None:
        self.drafted = self.accepted = self.rested = 0
        self.forget()

    def forget(self) -> None:
        """Know no more of how often the source is right than before it was tried."""
        self.acceptance, self.tried = ACCEPTANCE_PRIOR, PRIOR_DRAFTS

    def learn(self, is_right: bool) -> None:
        """Learn whether a draft was right: the mean of all so far, and later of the latest."""
        self.tried += 1
        weight = max(WEIGHT_MIN, 1 / self.tried)
        self.acceptance = min(0.99, self.acceptance + weight * (is_right - self.acceptance))


class Drafter:
    """Drafts for sequences. `step_s`, `exposed_s`: see `StepTimes`; steps of more decoding
    sequences than there are times get none.
    """

    def __init__(
        self,
        step_s: abc.Sequence[float],
        sources: abc.Sequence[DraftSource] | None = None,
        exposed_s: float = 0.0,
    ) -> None:
        self.times = StepTimes(step_s, exposed_s)
        self._sources = tuple(
            (ForcedSource(), PredictionSource(), NgramSource(), SuffixSource())
            if sources is None
            else sources
        )
        self._trust: dict[int, dict[str, _Trust]] = {}

    def propose(
        self, sequences: abc.Sequence[Sequence], tokens_max: int, prompt_tokens: int = 0
    ) -> dict[int, Draft]:
        """Return drafts for the decoding sequences of a step by id; `tokens_max`: most drafts of
        all. `prompt_tokens`: those of the step. O(sequences * sources), some 10 us each.
        """
        rows, most = len(sequences), min(tokens_max, len(self.times) - len(sequences))
        if not self._may_pay(rows, prompt_tokens, most):
            return {}
        found: dict[int, Draft] = {}
        gains: list[tuple[float, int]] = []
        for sequence in sequences:
            best = self._best(sequence, most)
            if best is not None:
                draft, acceptance = best
                found[sequence.sequence_id] = draft
                gains += _gains(sequence, acceptance, len(draft.token_ids))
        counts = self._how_many(rows, prompt_tokens, sorted(gains, reverse=True)[:most])
        return {
            sequence_id: Draft(draft.source, draft.token_ids[:count])
            for sequence_id, draft in found.items()
            if (count := counts.get(sequence_id, 0))
        }

    def expects(self, sequences: abc.Sequence[Sequence], tokens_max: int) -> bool:
        """Return whether the next step of decoding sequences is expected to gain by drafts, once
        the tokens that they have in flight are known. Costs what `propose` does.
        """
        rows, most = len(sequences), min(tokens_max, len(self.times) - len(sequences))
        if not self._may_pay(rows, 0, most):
            return False
        gains: list[tuple[float, int]] = []
        for sequence in sequences:
            ahead = sequence.in_flight
            best = self._best(sequence, most + ahead)
            if best is not None:
                draft, acceptance = best
                gains += _gains(sequence, acceptance, len(draft.token_ids))[ahead:]
        return bool(self._how_many(rows, 0, sorted(gains, reverse=True)[:most]))

    def _may_pay(self, rows: int, prompt_tokens: int, most: int) -> bool:
        """Return whether drafts would pay if all were right: sources need not be asked else."""
        most, tokens = min(most, DRAFTS_MAX * rows), rows + prompt_tokens
        least = rows / self.times.seconds(tokens) * _gain_min(rows)
        counts = [1 << power for power in range(most.bit_length())] if most > 0 else []
        return any(
            (rows + count) / (self.times.seconds(tokens + count) + self.times.exposed_s) > least
            for count in counts
        )

    def _best(self, sequence: Sequence, most: int) -> tuple[Draft, float] | None:
        """Return the drafts that are expected to give most tokens, and how often their source is
        right.
        """
        request, sequence_id = sequence.parent.request, sequence.sequence_id
        limit = min(most, DRAFTS_MAX, request.max_tokens - sequence.output_tokens - 1)
        if limit <= 0 or not request.drafts:
            return None
        if sequence_id not in self._trust:
            self._trust[sequence_id] = {source.name: _Trust() for source in self._sources}
            for source in self._sources:
                source.begin(sequence)
        best: tuple[float, Draft, float] | None = None
        for source in self._sources:
            trust = self._trust[sequence_id][source.name]
            if trust.rested and trust.rested < REST_TOKENS:
                continue
            token_ids = tuple(source.propose(sequence_id, limit))
            if token_ids:
                rate = trust.acceptance
                expected = rate * (1 - rate ** len(token_ids)) / (1 - rate)
                if best is None or expected > best[0]:
                    best = expected, Draft(source.name, token_ids), rate
        return None if best is None else best[1:]

    def _how_many(
        self, rows: int, prompt_tokens: int, gains: abc.Sequence[tuple[float, int]]
    ) -> dict[int, int]:
        """Return the drafts of each sequence: of the most likely ones so many that the expected
        tokens a second are highest. A sequence's later drafts are never likelier than its earlier.
        """
        times, tokens = self.times, rows + prompt_tokens
        plain_s = times.seconds(tokens)
        longest_s = plain_s * SLOWER_MAX if prompt_tokens else float("inf")
        expected, best, chosen = float(rows), rows / plain_s * _gain_min(rows), 0
        for number, (gain, _) in enumerate(gains, 1):
            expected += gain
            drafted_s = times.seconds(tokens + number) + times.exposed_s
            if drafted_s > longest_s:
                break
            if expected / drafted_s > best:
                best, chosen = expected / drafted_s, number
        counts: dict[int, int] = {}
        for _, sequence_id in gains[:chosen]:
            counts[sequence_id] = counts.get(sequence_id, 0) + 1
        return counts

    def note(self, sequence: Sequence, draft: Draft | None, token_ids: abc.Sequence[int]) -> None:
        """Learn the tokens that a step sampled of a sequence, and how well they were drafted."""
        trusts = self._trust.get(sequence.sequence_id)
        if trusts is None:
            return
        for source in self._sources:
            source.extend(sequence.sequence_id, token_ids)
        for trust in trusts.values():
            if trust.rested:
                trust.rested += len(token_ids)
                if trust.rested > REST_TOKENS:
                    trust.rested = 0
                    trust.forget()
        if draft is not None:
            self._learn(trusts[draft.source], draft, token_ids)

    def _learn(self, trust: _Trust, draft: Draft, token_ids: abc.Sequence[int]) -> None:
        right = 0
        for drafted, sampled in zip(draft.token_ids, token_ids, strict=False):
            is_right = drafted == sampled
            right += is_right
            trust.learn(is_right)
            if not is_right:
                break
        # An accepted draft that ended the answer saved no step.
        trust.accepted += min(right, max(0, len(token_ids) - 1))
        trust.drafted += len(draft.token_ids)
        if self._never_pays(trust.acceptance):
            trust.rested = 1

    def _never_pays(self, acceptance: float) -> bool:
        """Return whether one draft beside one row is expected to be no gain, even in a step that
        overlaps with no other for the sake of other drafts."""
        one_s, two_s = self.times.seconds(1), self.times.seconds(2)
        return (1 + acceptance) / two_s < GAIN_MIN / one_s

    def counts(self, sequence_id: int) -> tuple[DraftCount, ...]:
        """Return what was drafted for a sequence, by source."""
        return tuple(
            DraftCount(name, trust.drafted, trust.accepted)
            for name, trust in self._trust.get(sequence_id, {}).items()
            if trust.drafted
        )

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended. An unknown one is ignored."""
        if self._trust.pop(sequence.sequence_id, None) is not None:
            for source in self._sources:
                source.end(sequence.sequence_id)

    def erase(self, namespace: Namespace) -> None:
        """Forget what the sources have kept of a namespace."""
        for source in self._sources:
            source.erase(namespace)

    def check(self, live: abc.Collection[int]) -> None:
        """Check that only live sequences are known. Raises InvariantViolation. O(sequences)."""
        if unknown := self._trust.keys() - set(live):
            raise InvariantViolation(f"the drafter knows ended sequences {sorted(unknown)}")


def _gain_min(rows: int) -> float:
    """Return how much faster tokens of so many sequences must be expected to come."""
    return min(GAIN_MAX, GAIN_MIN + GAIN_OF_ROW * (rows - 1))


def _gains(sequence: Sequence, acceptance: float, drafts: int) -> list[tuple[float, int]]:
    """Return how many tokens each of a sequence's drafts is expected to give, with its id."""
    return [(acceptance**number, sequence.sequence_id) for number in range(1, drafts + 1)]
