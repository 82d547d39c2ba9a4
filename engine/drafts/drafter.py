"""The drafter: which sequences get drafts in a step, from which source, and how many.

A draft pays where the tokens that a step is expected to give grow by more than its time. The time
is that of steps by their tokens (`step_times`); how often a source is right is counted for each
sequence alone, and of a small model for each client, so that no tenant's answers change another's
steps. It knows no block, no step and no clock. Only `engine.core.step_drafts` calls it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, abc
from typing import Final

from msgspec import Struct

from engine.api import DraftCount, Namespace, Payer
from engine.drafts.forced import ForcedSource
from engine.drafts.model import DEPTH_MAX, ModelSource
from engine.drafts.ngram import NgramSource
from engine.drafts.prediction import PredictionSource
from engine.drafts.source import DraftSource
from engine.drafts.step_times import StepTimes
from engine.drafts.suffix import SuffixSource
from engine.errors import InvariantViolation
from engine.scheduler.sequence import Sequence

log = logging.getLogger("trunkline.engine")

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
READING_SHARE: Final = 1.0
"""The part of a step's time for which a small model may read texts before it."""
READING_STEPS: Final = 16
"""Steps over which the time is spread in which it reads a text before its first draft. A sequence
with fewer tokens to come is not read."""
FIRST_TRIALS: Final = 2
"""Sequences of unknown clients that a small model drafts for at a time. The others wait until it is
known how often the model is right for their client: to read a text takes half a step."""
TRIAL_DEPTH: Final = 2
"""Most drafts of each of these in a step."""
KNOWN_DRAFTS: Final = 6
"""Drafts after which that is known, of a client and of a sequence."""
MODEL_ROWS_MAX: Final = 8
"""Most sequences of a step for which a small model is asked. Their texts are read one after the
other, and meanwhile the step of all is longer: with 16 and 32 that took up to a quarter more than
its drafts saved."""
CLIENT_WEIGHT_MIN: Final = 0.02
"""Of the latest draft in a client's mean, which several sequences feed."""
HOPELESS: Final = 0.35
"""It is known, too, that a source is wrong where its mean is less than this: two wrong ones at
first."""
HOPED: Final = 0.8
"""How often it must be right to be worth these trials: where that would not pay, there are none."""
HOPED_GAIN: Final = 1.07
"""By how much more than other drafts they must then pay."""
FORGOTTEN_TOKENS: Final = 4096
"""Tokens without its drafts after which what is known of a client is forgotten; each time after
twice as many, at most after `FORGOTTEN_MAX`."""
FORGOTTEN_MAX: Final = 32_768
CLIENTS_MAX: Final = 1024
"""Clients of whom it is known; of more, the one that was served longest ago is forgotten."""


class Draft(Struct, frozen=True):
    """The drafts of one sequence, and the source that they come from."""

    source: str
    token_ids: tuple[int, ...]


class _Client:
    """How often a small model is right for the sequences of a client in a namespace."""

    __slots__ = ("acceptance", "forgotten_tokens", "idle_tokens", "tried")

    def __init__(self) -> None:
        self.forgotten_tokens = FORGOTTEN_TOKENS
        self.forget()

    @property
    def is_known(self) -> bool:
        """Return whether it was tried often enough."""
        return self.tried >= PRIOR_DRAFTS + KNOWN_DRAFTS or self.acceptance < HOPELESS

    def forget(self) -> None:
        """Know nothing."""
        self.acceptance, self.tried, self.idle_tokens = ACCEPTANCE_PRIOR, PRIOR_DRAFTS, 0

    def learn(self, is_right: bool) -> None:
        """Learn whether a draft was right."""
        self.idle_tokens, self.tried = 0, self.tried + 1
        weight = max(CLIENT_WEIGHT_MIN, 1 / self.tried)
        self.acceptance = min(0.99, self.acceptance + weight * (is_right - self.acceptance))

    def went_on(self, tokens: int) -> None:
        """Note tokens that came without its drafts: after many it is tried again, and then after
        twice as many."""
        self.idle_tokens += tokens
        if self.idle_tokens > self.forgotten_tokens and self.is_known:
            self.forgotten_tokens = min(FORGOTTEN_MAX, 2 * self.forgotten_tokens)
            self.forget()


class _Trust:
    """How far a sequence's source is trusted, and what it has drafted. `client`: what is known of
    others, of a small model."""

    __slots__ = ("acceptance", "accepted", "client", "drafted", "rested", "tried")

    def __init__(self, client: _Client | None = None) -> None:
        self.drafted = self.accepted = self.rested = 0
        self.client = client
        self.forget()

    @property
    def is_resting(self) -> bool:
        """Return whether the source was too often wrong of late."""
        return 0 < self.rested < REST_TOKENS

    @property
    def is_known(self) -> bool:
        """Return whether the source was tried often enough for this sequence."""
        return self.tried >= PRIOR_DRAFTS + KNOWN_DRAFTS

    @property
    def expected(self) -> float:
        """Return how often the source is expected to be right: until that is known of the sequence,
        as often as for others of its client."""
        if self.client is not None and self.client.is_known and not self.is_known:
            return self.client.acceptance
        return self.acceptance

    def forget(self) -> None:
        """Know no more of how often the source is right than before it was tried."""
        self.acceptance, self.tried = ACCEPTANCE_PRIOR, PRIOR_DRAFTS

    def learn(self, is_right: bool) -> None:
        """Learn whether a draft was right: the mean of all so far, and later of the latest."""
        self.tried += 1
        weight = max(WEIGHT_MIN, 1 / self.tried)
        self.acceptance = min(0.99, self.acceptance + weight * (is_right - self.acceptance))
        if self.client is not None:
            self.client.learn(is_right)


class _Able(Struct, frozen=True):
    """A sequence that a small model may draft for: at most `limit` tokens, each expected to be
    right with `acceptance`. `waits`: for what others of its client find. `drafts`: those that
    another source has for it, of which `gain` are expected to be right."""

    sequence_id: int
    limit: int
    acceptance: float
    is_trial: bool
    waits: bool
    drafts: int
    gain: float


class Drafter:
    """Drafts for sequences. `step_s`, `exposed_s`: see `StepTimes`; steps of more decoding
    sequences than there are times get none. `model`: a small model, whose guesses take time.
    `computes_twice`: the step behind one with drafts computes those once more that were accepted.

    `model_s`: seconds that it took in the last call of `propose`.
    """

    def __init__(
        self,
        step_s: abc.Sequence[float],
        sources: abc.Sequence[DraftSource] | None = None,
        exposed_s: float = 0.0,
        model: ModelSource | None = None,
        *,
        computes_twice: bool = False,
    ) -> None:
        self.times = StepTimes(step_s, exposed_s)
        self._computes_twice = computes_twice
        self.model = model
        self.model_s = 0.0
        self._sources = tuple(
            (ForcedSource(), PredictionSource(), NgramSource(), SuffixSource())
            if sources is None
            else sources
        )
        self._trust: dict[int, dict[str, _Trust]] = {}
        self._clients: OrderedDict[tuple[Namespace, Payer], _Client] = OrderedDict()

    def propose(
        self, sequences: abc.Sequence[Sequence], tokens_max: int, prompt_tokens: int = 0
    ) -> dict[int, Draft]:
        """Return drafts for the decoding sequences of a step by id; `tokens_max`: most drafts of
        all. `prompt_tokens`: those of the step. O(sequences * sources), some 10 us each.
        """
        self.model_s = 0.0
        rows, most = len(sequences), min(tokens_max, len(self.times) - len(sequences))
        if not self._may_pay(rows, prompt_tokens, most):
            return {}
        found, guesses = self._found(sequences, most), {}
        if self.model is not None and not prompt_tokens:
            guesses = self._guesses(self.model, sequences, found, most)
            found |= guesses
        gains = [
            gain
            for sequence_id, (draft, acceptance) in found.items()
            for gain in _gains(sequence_id, acceptance, len(draft.token_ids))
        ]
        gains = sorted(gains, reverse=True)[:most]
        counts, _ = self._how_many(rows, prompt_tokens, gains, has_waited=bool(guesses))
        return {
            sequence_id: Draft(draft.source, draft.token_ids[:count])
            for sequence_id, (draft, _) in found.items()
            if (count := counts.get(sequence_id, 0))
        }

    def expects(self, sequences: abc.Sequence[Sequence], tokens_max: int) -> bool:
        """Return whether the next step of decoding sequences is expected to gain by drafts, once
        the tokens that they have in flight are known. Costs what `propose` does, without a model's
        guesses.
        """
        rows, most = len(sequences), min(tokens_max, len(self.times) - len(sequences))
        if not self._may_pay(rows, 0, most):
            return False
        gains: list[tuple[float, int]] = []
        ahead = {sequence.sequence_id: sequence.in_flight for sequence in sequences}
        found = self._found(sequences, most + max(ahead.values(), default=0))
        for sequence_id, (draft, acceptance) in found.items():
            gains += _gains(sequence_id, acceptance, len(draft.token_ids))[ahead[sequence_id] :]
        counts, _ = self._how_many(rows, 0, sorted(gains, reverse=True)[:most])
        if not counts and self.model is not None:
            return bool(self._limits(self.model, sequences, found, most))
        return bool(counts)

    def _found(
        self, sequences: abc.Sequence[Sequence], most: int
    ) -> dict[int, tuple[Draft, float]]:
        """Return the drafts of each sequence that has some, and how often their source is right."""
        found = {sequence.sequence_id: self._best(sequence, most) for sequence in sequences}
        return {sequence_id: best for sequence_id, best in found.items() if best is not None}

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
        limit, sequence_id = min(most, _limit_of(sequence)), sequence.sequence_id
        if limit <= 0:
            return None
        trusts = self._trusts(sequence)
        best: tuple[float, Draft, float] | None = None
        for source in self._sources:
            trust = trusts[source.name]
            if trust.is_resting:
                continue
            token_ids = tuple(source.propose(sequence_id, limit))
            if token_ids:
                rate = trust.acceptance
                expected = _expected(rate, len(token_ids))
                if best is None or expected > best[0]:
                    best = expected, Draft(source.name, token_ids), rate
        return None if best is None else best[1:]

    def _trusts(self, sequence: Sequence) -> dict[str, _Trust]:
        """Return how far each source is trusted for a sequence, which they take if it is new."""
        trusts = self._trust.get(sequence.sequence_id)
        if trusts is None:
            trusts = {source.name: _Trust() for source in self._sources}
            self._trust[sequence.sequence_id] = trusts
            for source in self._sources:
                source.begin(sequence)
            if self.model is not None:
                trusts[self.model.name] = _Trust(self._client(sequence))
                self.model.begin(sequence)
        return trusts

    def _client(self, sequence: Sequence) -> _Client:
        """Return what is known of a sequence's client. Tenants that share a namespace are two."""
        grant = sequence.parent.request.grant
        key = grant.namespace, grant.payer
        client = self._clients.setdefault(key, _Client())
        self._clients.move_to_end(key)
        if len(self._clients) > CLIENTS_MAX:
            self._clients.popitem(last=False)
        return client

    def _guesses(
        self,
        model: ModelSource,
        sequences: abc.Sequence[Sequence],
        found: abc.Mapping[int, tuple[Draft, float]],
        most: int,
    ) -> dict[int, tuple[Draft, float]]:
        """Return the drafts of a model for the sequences for which they are expected to pay.

        A model that fails is not asked again.
        """
        limits = self._limits(model, sequences, found, most)
        if not limits:
            return {}
        reading = model.tokens_within(READING_SHARE * self.times.seconds(len(sequences)))
        try:
            guesses = model.guess(limits, reading)
        except InvariantViolation:
            raise
        except Exception as error:
            log.warning("draft_model_lost: its step failed (%s)", type(error).__name__)
            self.model = None
            return {}
        self.model_s = model.spent_s
        return {
            sequence_id: (
                Draft(model.name, token_ids),
                self._trust[sequence_id][model.name].expected,
            )
            for sequence_id, token_ids in guesses.items()
        }

    def _limits(
        self,
        model: ModelSource,
        sequences: abc.Sequence[Sequence],
        found: abc.Mapping[int, tuple[Draft, float]],
        most: int,
    ) -> dict[int, int]:
        """Return how many drafts a model is to guess for each sequence: as deep for all as gives
        most tokens a second, its own time counted; nothing where that is less than without it.
        """
        rows = len(sequences)
        if rows > MODEL_ROWS_MAX:
            return {}
        gains = [
            gain
            for sequence_id, (draft, acceptance) in found.items()
            for gain in _gains(sequence_id, acceptance, len(draft.token_ids))
        ]
        best = rows / self.times.seconds(rows) * GAIN_MIN
        if gains:
            _, other = self._how_many(rows, 0, sorted(gains, reverse=True)[:most])
            best = max(best, other)
        able = self._able(model, sequences, found, most)
        if any(one.is_trial for one in able):
            best *= HOPED_GAIN
        one_s, reading_s = model.seconds([one.sequence_id for one in able])
        waited_s = self.times.exposed_s + reading_s / READING_STEPS
        chosen: dict[int, int] = {}
        for depth in range(1, DEPTH_MAX + 1):
            limits: dict[int, int] = {}
            expected, tokens = float(rows), rows
            for one in able:
                drafts, gain = one.drafts, one.gain
                own = _expected(one.acceptance, min(depth, one.limit))
                if own > gain:
                    gain, drafts = own, min(depth, one.limit)
                    if not one.waits:
                        limits[one.sequence_id] = drafts
                expected, tokens = expected + gain, tokens + drafts
            if not limits or tokens - rows > most:
                break
            step_s = self._seconds(tokens, expected - rows)
            rate = expected / (step_s + waited_s + depth * one_s)
            if rate > best:
                best, chosen = rate, limits
            elif chosen:
                break  # what further drafts add is less and less
        if able and not chosen:
            model.times.forget()
        return chosen

    def _able(
        self,
        model: ModelSource,
        sequences: abc.Sequence[Sequence],
        found: abc.Mapping[int, tuple[Draft, float]],
        most: int,
    ) -> list[_Able]:
        """Return the sequences that a model may draft for. Some sequences of unknown clients try
        it, as if it were right `HOPED` of the time; the others wait."""
        able: list[_Able] = []
        trials = 0
        for sequence in sequences:
            sequence_id = sequence.sequence_id
            trust = self._trusts(sequence)[model.name]
            limit = min(most, DEPTH_MAX, _limit_of(sequence))
            to_come = sequence.parent.request.max_tokens - sequence.output_tokens
            if limit <= 0:
                continue
            if to_come < READING_STEPS <= model.unread(sequence_id):
                continue
            is_trial = trust.client is not None and not trust.client.is_known
            trials += is_trial
            draft, rate = found.get(sequence_id, (None, 0.0))
            drafts = 0 if draft is None else len(draft.token_ids)
            acceptance = HOPED if is_trial else trust.expected
            waits = is_trial and trials > FIRST_TRIALS
            limit = min(limit, TRIAL_DEPTH) if is_trial else limit
            gain = _expected(rate, drafts)
            able.append(_Able(sequence_id, limit, acceptance, is_trial, waits, drafts, gain))
        return able

    def _how_many(
        self,
        rows: int,
        prompt_tokens: int,
        gains: abc.Sequence[tuple[float, int]],
        *,
        has_waited: bool = False,
    ) -> tuple[dict[int, int], float]:
        """Return the drafts of each sequence: of the most likely ones so many that the expected
        tokens a second are highest. A sequence's later drafts are never likelier than its earlier.

        And that rate; without drafts, the one that they would have had to exceed. `has_waited`: the
        device waits for this step in any case, since a model has guessed.
        """
        times, tokens = self.times, rows + prompt_tokens
        plain_s = times.seconds(tokens)
        longest_s = plain_s * SLOWER_MAX if prompt_tokens else float("inf")
        expected, best, chosen = float(rows), rows / plain_s * _gain_min(rows), 0
        if has_waited:
            best = rows / (plain_s + times.exposed_s)
        for number, (gain, _) in enumerate(gains, 1):
            expected += gain
            drafted_s = self._seconds(tokens + number, expected - rows) + times.exposed_s
            if drafted_s > longest_s:
                break
            if expected / drafted_s > best:
                best, chosen = expected / drafted_s, number
        counts: dict[int, int] = {}
        for _, sequence_id in gains[:chosen]:
            counts[sequence_id] = counts.get(sequence_id, 0) + 1
        return counts, best

    def _seconds(self, tokens: int, accepted: float) -> float:
        """Return the seconds of a step, with what its accepted drafts cost the next one."""
        if not self._computes_twice:
            return self.times.seconds(tokens)
        whole, part = divmod(accepted, 1)
        tokens += int(whole)
        least = self.times.seconds(tokens)
        return least + part * (self.times.seconds(tokens + 1) - least)

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
        model = None if self.model is None else trusts[self.model.name].client
        if model is not None and (draft is None or trusts[draft.source].client is None):
            model.went_on(len(token_ids))

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
        self._rest(trust)

    def forbidden(self, sequence: Sequence, draft: Draft) -> None:
        """Learn that a sequence's grammar forbids a draft: it is wrong, and takes no step."""
        trust = self._trust[sequence.sequence_id][draft.source]
        trust.learn(False)
        self._rest(trust)

    def _rest(self, trust: _Trust) -> None:
        """Let a source rest that is expected to be no gain with one draft beside one row, even in a
        step that overlaps with no other for the sake of other drafts.

        A small model is asked for all sequences of a step or for none: for one it only forgets what
        it was long ago.
        """
        drafted_s = self._seconds(2, trust.acceptance)
        if trust.client is not None or (1 + trust.acceptance) / drafted_s < (
            GAIN_MIN / self.times.seconds(1)
        ):
            trust.rested = 1

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
            if self.model is not None:
                self.model.end(sequence.sequence_id)

    def erase(self, namespace: Namespace) -> None:
        """Forget what the sources have kept of a namespace. A small model keeps nothing of one."""
        for source in self._sources:
            source.erase(namespace)
        for key in [key for key in self._clients if key[0] == namespace]:
            self._clients.pop(key).forget()

    def check(self, live: abc.Collection[int]) -> None:
        """Check that only live sequences are known. Raises InvariantViolation. O(sequences)."""
        if unknown := self._trust.keys() - set(live):
            raise InvariantViolation(f"the drafter knows ended sequences {sorted(unknown)}")
        if self.model is not None:
            self.model.check(live)


def _gain_min(rows: int) -> float:
    """Return how much faster tokens of so many sequences must be expected to come."""
    return min(GAIN_MAX, GAIN_MIN + GAIN_OF_ROW * (rows - 1))


def _limit_of(sequence: Sequence) -> int:
    """Return how many drafts a sequence may have in a step: none behind its last token."""
    request = sequence.parent.request
    return min(DRAFTS_MAX, request.max_tokens - sequence.output_tokens - 1) * request.drafts


def _expected(acceptance: float, drafts: int) -> float:
    """Return how many of so many drafts are expected to be right, up to the first wrong one."""
    return acceptance * (1 - acceptance**drafts) / (1 - acceptance)


def _gains(sequence_id: int, acceptance: float, drafts: int) -> list[tuple[float, int]]:
    """Return how many tokens each of a sequence's drafts is expected to give, with its id."""
    return [(acceptance**number, sequence_id) for number in range(1, drafts + 1)]
