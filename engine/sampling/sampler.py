"""The full sampler: bias, penalties, temperature, filters and one seeded draw per sequence.

It knows no model, block, batch or request, only rows of logits on the CPU and the ids of the
sequences that sample from them. `engine.api.Sampling` says what each parameter means. The CPU
runner calls it at the end of a step; it keeps the token counts that penalties need, per sequence.
It specifies what `engine.sampling.gpu_sampler` draws: weights are added in vocabulary order where
only the temperature applies, and under filters by falling logit, ties by rising id.

Cost by the parameters that a sequence uses, beside one search for the best logit of all rows, which
also finds the rows with a NaN:

    greedy                      nothing more
    temperature alone           some passes over the row: inverse of the running sum in vocabulary
                                order, found by chunks
    top-k, top-p, min-p         some passes over the row; then a sort of the candidates, rarely over
                                some hundreds
    mask, bias, penalties       a copy of the row, one gather and scatter of the counted tokens, and
                                its own search for the best logit

A row's result does not depend on the other rows of the batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.api import SampledToken
from engine.plan import BegunSequence, Mask
from engine.sampling.filters import (
    NATS_MAX,
    Filter,
    draw_filtered,
    first_above,
    has_filters,
)
from engine.sampling.logprobs import logprob_entries
from engine.sampling.rng import uniform
from engine.sampling.token_masks import apply_masks

Float32 = npt.NDArray[np.float32]

_CHUNK: Final = 256
"""Tokens per chunk of the running sum."""

_INVERSE_TEMPERATURE_MAX: Final = 1e30
"""Finite in fp32, so that 0 times it is 0 and not NaN."""

_PEAK_MAX: Final = 3e38
"""Nearly the largest fp32: an infinite best logit is taken to be this, and penalties leave every
logit at most so far from 0."""

NO_LOGIT: Final = -1
"""The token of a row that contains a NaN, or nothing above minus infinity: the model's fault."""

NONE_ALLOWED: Final = -2
"""The token of a row whose mask, bias and penalties left nothing: the request's own doing."""

FAILURES: Final = {NO_LOGIT: "nan_logits", NONE_ALLOWED: "grammar_dead_end"}
"""The code with which a sequence without a token ends."""

_WEIGHT_MIN: Final = 2e-35
"""Just above exp(-80); smaller weights are set to 0, where the best token's weight is 1."""


class _TokenCounts:
    """The distinct tokens that a sequence's penalties change.

    `ids[:size]`, and `counts[:size]`, how often the output has each. The arrays double when full.
    `index`: position of a token in `ids`.
    """

    __slots__ = ("counts", "ids", "index", "size")

    def __init__(self, prompt: Sequence[int], outputs: Sequence[int]) -> None:
        counts = dict.fromkeys(prompt, 0)
        for token_id in outputs:
            counts[token_id] = counts.get(token_id, 0) + 1
        self.index = {token_id: index for index, token_id in enumerate(counts)}
        self.size = len(counts)
        spare = max(self.size, 64)
        self.ids = np.zeros(self.size + spare, np.int64)
        self.ids[: self.size] = list(counts)
        self.counts = np.zeros(self.size + spare, np.float32)
        self.counts[: self.size] = list(counts.values())

    def add(self, token_id: int) -> None:
        """Count one more output token. O(1), amortised."""
        index = self.index.setdefault(token_id, self.size)
        if index == self.size:
            if self.size == len(self.ids):
                self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)])
                self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
            self.ids[index] = token_id
            self.size += 1
        self.counts[index] += 1


class _SequenceState:
    """Parameters, token counts and position of one sequence."""

    __slots__ = (
        "adjusts",
        "bias_ids",
        "bias_values",
        "filter",
        "greedy",
        "inverse_temperature",
        "position",
        "sample_index",
        "sampling",
        "seed",
        "token_counts",
    )

    def __init__(self, begun: BegunSequence, seed: int, vocab_size: int) -> None:
        sampling = begun.sampling
        self.sampling = sampling
        self.seed = seed
        self.sample_index = begun.sample_index
        self.position = len(begun.token_ids) - begun.prompt_tokens
        self.greedy = sampling.temperature == 0
        self.inverse_temperature = inverse_temperature(sampling.temperature)
        self.filter: Filter | None = None
        if has_filters(sampling, vocab_size):
            self.filter = Filter.of(sampling, self.inverse_temperature, vocab_size)
        self.bias_ids = np.fromiter(sampling.logit_bias, np.int64, len(sampling.logit_bias))
        assert max(sampling.logit_bias, default=0) < vocab_size, "biased token out of vocabulary"
        self.bias_values = np.fromiter(
            sampling.logit_bias.values(), np.float32, len(sampling.logit_bias)
        )
        self.token_counts: _TokenCounts | None = None
        repeats = sampling.repetition_penalty != 1
        if repeats or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
            prompt = begun.token_ids[: begun.prompt_tokens] if repeats else ()
            self.token_counts = _TokenCounts(prompt, begun.token_ids[begun.prompt_tokens :])
        self.adjusts = len(self.bias_ids) > 0 or self.token_counts is not None

    def adjust(self, row: Float32) -> None:
        """Apply logit bias, then penalties. row: [vocab], written. O(tokens counted).

        No parameter makes a NaN: a token at minus infinity stays there, the others stay finite.
        """
        if len(self.bias_ids):
            row[self.bias_ids] += self.bias_values
        if self.token_counts is None or self.token_counts.size == 0:
            return
        sampling = self.sampling
        ids = self.token_counts.ids[: self.token_counts.size]
        counts = self.token_counts.counts[: self.token_counts.size]
        values = row[ids]
        is_possible = values > -math.inf
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            if sampling.repetition_penalty != 1:
                penalty = np.float32(sampling.repetition_penalty)
                values = np.where(values > 0, values / penalty, values * penalty)
            values -= np.float32(sampling.frequency_penalty) * counts
            values -= np.float32(sampling.presence_penalty) * (counts > 0)
        row[ids] = np.where(is_possible, np.clip(values, -_PEAK_MAX, _PEAK_MAX), -math.inf)

    def next_uniform(self) -> float:
        """Return the uniform number of the next draw."""
        return uniform(self.seed, self.sample_index, self.position)

    def append(self, token_id: int) -> None:
        """Add a sampled token to the history."""
        self.position += 1
        if self.token_counts is not None:
            self.token_counts.add(token_id)


class Sampler:
    """Samples tokens for the sequences begun here. Not thread-safe."""

    def __init__(self, vocab_size: int, rng: random.Random | None = None) -> None:
        """`rng` gives a seed to each sequence that has none; by default the system's entropy."""
        self._vocab_size = vocab_size
        self._rng = rng or random.SystemRandom()
        self._states: dict[int, _SequenceState] = {}
        # A new buffer of this size would be paged in at every draw.
        self._weights = torch.zeros(vocab_size + -vocab_size % _CHUNK)

    def begin(self, begun: BegunSequence) -> None:
        """Add a sequence with its history. O(1), or O(history) with penalties.

        Copies what it needs from `token_ids`. Replaces the state of a sequence begun before.
        """
        seed = begun.sampling.seed
        if seed is None:
            seed = self._rng.getrandbits(64)
        self._states[begun.sequence_id] = _SequenceState(begun, seed, self._vocab_size)

    def end(self, sequence_id: int) -> None:
        """Remove a sequence; an unknown one is ignored."""
        self._states.pop(sequence_id, None)

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, sequence_ids: Sequence[int], masks: Mapping[int, Mask] | None = None
    ) -> list[SampledToken]:
        """Return one token per sequence: row i samples for `sequence_ids[i]`, within its mask if it
        has one.

        logits: [rows, vocab] fp32 on the CPU, not written. A row without a token gives `NO_LOGIT`
        or `NONE_ALLOWED` as its id. Every other token is appended to its sequence's history. Cost
        per row: see the table in the module's docstring.
        """
        assert logits.shape == (len(sequence_ids), self._vocab_size), tuple(logits.shape)
        states = [self._states[sequence_id] for sequence_id in sequence_ids]
        if not states:
            return []
        # numpy's search takes a tenth of torch's time, and stops at a NaN.
        best = logits.numpy().argmax(axis=1)
        peaks = logits.numpy()[np.arange(len(states)), best]
        has_logit = peaks > -math.inf  # a comparison with NaN is false
        has_token = has_logit.tolist()
        rows = list(logits)
        changed = [
            i
            for i, state in enumerate(states)
            if has_token[i] and (state.adjusts or (masks and sequence_ids[i] in masks))
        ]
        if changed:
            copies = _changed_rows(logits, states, sequence_ids, masks or {}, changed)
            best[changed] = copies.numpy().argmax(axis=1)
            peaks[changed] = copies.numpy()[np.arange(len(changed)), best[changed]]
            for i, row in zip(changed, copies, strict=True):
                rows[i], has_token[i] = row, bool(peaks[i] > -math.inf)
        chosen = _choose(rows, peaks, best, states, has_token, self._weights)
        sampled = self._report(logits, states, chosen)
        for i, state in enumerate(states):
            if has_token[i]:
                state.append(chosen[i])
            else:
                sampled[i] = SampledToken(NONE_ALLOWED if has_logit[i] else NO_LOGIT)
        return sampled

    def _report(
        self, logits: Tensor, states: list[_SequenceState], chosen: list[int]
    ) -> list[SampledToken]:
        """Return the chosen tokens, with logprobs for the sequences that report them."""
        sampled = [SampledToken(token_id) for token_id in chosen]
        reporting = [i for i, state in enumerate(states) if state.sampling.logprobs is not None]
        if reporting:
            entries = logprob_entries(
                [logits[i] for i in reporting],
                [chosen[i] for i in reporting],
                [states[i].sampling.logprobs or 0 for i in reporting],
            )
            for i, entry in zip(reporting, entries, strict=True):
                sampled[i] = entry
        return sampled


def inverse_temperature(temperature: float) -> float:
    """Return the reciprocal of a temperature, bounded; 1 for greedy."""
    return 1 / max(temperature, 1 / _INVERSE_TEMPERATURE_MAX) if temperature > 0 else 1.0


def _changed_rows(
    logits: Tensor, states: list[_SequenceState], sequence_ids: Sequence[int],
    masks: Mapping[int, Mask], changed: list[int],
) -> Tensor:  # fmt: skip
    """Return copies of some rows after their biases, penalties and masks."""
    copies = logits[changed]
    for row, i in zip(copies.numpy(), changed, strict=True):
        if states[i].adjusts:
            states[i].adjust(row)
    return apply_masks(copies, [sequence_ids[i] for i in changed], masks)


def _choose(
    rows: list[Tensor], peaks: Float32, best: npt.NDArray[np.int64],
    states: list[_SequenceState], has_token: list[bool], weights: Tensor,
) -> list[int]:  # fmt: skip
    """Return a token id per row, by kind of row: greedy, unfiltered, filtered.

    rows: of the logits, or changed copies. peaks, best: their best logits, and these tokens, which
    are the result of greedy rows and of rows without a token. weights: scratch. One row after the
    other, because its weights stay in the CPU's cache.
    """
    chosen: list[int] = best.tolist()
    drawing = [i for i, state in enumerate(states) if has_token[i] and not state.greedy]
    bounded = np.minimum(peaks, np.float32(_PEAK_MAX))
    for i in drawing:
        state, row, peak = states[i], rows[i], float(bounded[i])
        number = state.next_uniform()
        if state.filter is not None:
            chosen[i] = draw_filtered(row, peak, state.filter, number, weights[: len(row)])
        else:
            chosen[i] = _draw_unfiltered(row, peak, state.inverse_temperature, number, weights)
    return chosen


def _draw_unfiltered(
    row: Tensor, peak: float, inverse_temperature: float, number: float, scratch: Tensor
) -> int:
    """Return the token of the inverse of the running sum of weights, in vocabulary order.

    row: [vocab] fp32, not written; scratch: fp32, written: whole chunks, 0 after the vocabulary.
    The sum runs over chunks first, then inside one chunk:

        |---- 256 ----|---- 256 ----|---- 256 ----|
              ^ before        ^ the first chunk whose running sum exceeds number * total
    """
    weights = scratch[: len(row)]
    torch.sub(row, peak, out=weights)
    weights.mul_(inverse_temperature).clamp_(-NATS_MAX, 0.0).exp_()
    # On subnormal results exp takes tens of times as long, and their weight is negligible.
    torch.threshold_(weights, _WEIGHT_MIN, 0.0)
    chunks = scratch.view(-1, _CHUNK)
    sums = chunks.sum(dim=-1).numpy().cumsum(dtype=np.float64)
    target = number * sums[-1]
    chunk = first_above(sums, target)
    before = sums[chunk - 1] if chunk else 0.0
    inside = chunks[chunk].numpy().cumsum(dtype=np.float64)
    return chunk * _CHUNK + first_above(inside, target - before)
