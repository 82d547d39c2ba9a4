"""The full sampler: bias, penalties, temperature, filters and one seeded draw per sequence.

It knows no model, block, batch or request, only rows of logits and the ids of the sequences that
sample from them. `engine.api.Sampling` says what each parameter means. Runners call it at the end
of a step; it keeps the token counts that penalties need, per sequence.

Cost by the parameters that a sequence uses:

    greedy                      one argmax over all such rows
    temperature alone           one pass over all such rows: inverse of the running sum in
                                vocabulary order, found by chunks
    top-k, top-p, min-p         row by row: candidates above a threshold that is lowered until
                                there are enough, then a sort of these (rarely over some hundreds)
    bias, penalties             a copy of the row, and one gather and scatter of the counted tokens
    a mask                      a copy of all rows, and one pass over the masked rows

A row's result does not depend on the other rows of the batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from engine.api import SampledToken, Sampling
from engine.plan import BegunSequence, Mask
from engine.sampling.logprobs import logprob_entries
from engine.sampling.rng import uniform
from engine.sampling.token_masks import apply_masks

_CHUNK: Final = 256
"""Tokens per chunk of the running sum."""

_PROMPT_ROWS: Final = 64
"""Rows of prompt logprobs computed at once; bounds the memory."""

_INVERSE_TEMPERATURE_MAX: Final = 1e30
"""Finite in fp32, so that 0 times it is 0 and not NaN."""

_PEAK_MAX: Final = 3e38
"""Nearly the largest fp32: an infinite best logit is taken to be this."""

_NATS_MAX: Final = 80.0
"""Logits more than this many nats below the best one have weight 0."""

_WEIGHT_MIN: Final = 2e-35
"""Just above exp(-80); smaller weights are set to 0, where the best token's weight is 1."""

_WIDTHS: Final = (8.0, 16.0, 32.0, math.inf)
"""Candidates lie within so many nats of the best token; tried in order."""


class _TokenCounts:
    """The distinct tokens of a sequence's prompt and output, for penalties.

    `ids[:size]`, and `counts[:size]`, how often the output has each; both on the device. The
    buffers double when full. `index`: position of a token in `ids`.
    """

    __slots__ = ("counts", "ids", "index", "size")

    def __init__(self, prompt: Sequence[int], outputs: Sequence[int], device: torch.device) -> None:
        counts = dict.fromkeys(prompt, 0)
        for token_id in outputs:
            counts[token_id] = counts.get(token_id, 0) + 1
        self.index = {token_id: index for index, token_id in enumerate(counts)}
        self.size = len(counts)
        spare = [0] * max(self.size, 64)
        self.ids = torch.tensor(list(counts) + spare, dtype=torch.int64, device=device)
        self.counts = torch.tensor(
            list(counts.values()) + spare, dtype=torch.float32, device=device
        )

    def add(self, token_id: int) -> None:
        """Count one more output token. O(1), amortised."""
        index = self.index.setdefault(token_id, self.size)
        if index == self.size:
            if self.size == len(self.ids):
                self.ids = torch.cat([self.ids, torch.zeros_like(self.ids)])
                self.counts = torch.cat([self.counts, torch.zeros_like(self.counts)])
            self.ids[index] = token_id
            self.size += 1
        self.counts[index] += 1.0


class _SequenceState:
    """Parameters, token counts and position of one sequence."""

    __slots__ = (
        "adjusts",
        "bias_ids",
        "bias_values",
        "filters",
        "greedy",
        "inverse_temperature",
        "position",
        "sample_index",
        "sampling",
        "seed",
        "token_counts",
    )

    def __init__(
        self, begun: BegunSequence, seed: int, vocab_size: int, device: torch.device
    ) -> None:
        sampling = begun.sampling
        self.sampling = sampling
        self.seed = seed
        self.sample_index = begun.sample_index
        self.position = len(begun.token_ids) - begun.prompt_tokens
        self.greedy = sampling.temperature == 0
        coldest = 1 / _INVERSE_TEMPERATURE_MAX
        self.inverse_temperature = 1.0 if self.greedy else 1 / max(sampling.temperature, coldest)
        self.filters = 0 < sampling.top_k < vocab_size or sampling.top_p < 1 or sampling.min_p > 0
        self.bias_ids: Tensor | None = None
        self.bias_values: Tensor | None = None
        if sampling.logit_bias:
            assert max(sampling.logit_bias) < vocab_size, "biased token outside the vocabulary"
            self.bias_ids = torch.tensor(list(sampling.logit_bias), device=device)
            self.bias_values = torch.tensor(
                list(sampling.logit_bias.values()), dtype=torch.float32, device=device
            )
        self.token_counts: _TokenCounts | None = None
        if (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
        ):
            prompt = begun.token_ids[: begun.prompt_tokens]
            outputs = begun.token_ids[begun.prompt_tokens :]
            self.token_counts = _TokenCounts(prompt, outputs, device)
        self.adjusts = self.bias_ids is not None or self.token_counts is not None

    def adjust(self, row: Tensor) -> None:
        """Apply logit bias, then penalties. row: [vocab] fp32, written. O(tokens counted)."""
        if self.bias_ids is not None:
            assert self.bias_values is not None
            row[self.bias_ids] += self.bias_values
        if self.token_counts is None or self.token_counts.size == 0:
            return
        sampling = self.sampling
        ids = self.token_counts.ids[: self.token_counts.size]
        counts = self.token_counts.counts[: self.token_counts.size]
        values = row[ids]
        if sampling.repetition_penalty != 1:
            penalty = sampling.repetition_penalty
            values = torch.where(values > 0, values / penalty, values * penalty)
        values -= sampling.frequency_penalty * counts
        values -= sampling.presence_penalty * (counts > 0)
        row[ids] = values

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

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str = "cpu",
        rng: random.Random | None = None,
    ) -> None:
        """`rng` gives a seed to each sequence that has none; by default the system's entropy."""
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._rng = rng or random.SystemRandom()
        self._states: dict[int, _SequenceState] = {}

    def begin(self, begun: BegunSequence) -> None:
        """Add a sequence with its history. O(1), or O(history) with penalties.

        Copies what it needs from `token_ids`. Replaces the state of a sequence begun before.
        """
        seed = begun.sampling.seed
        if seed is None:
            seed = self._rng.getrandbits(64)
        self._states[begun.sequence_id] = _SequenceState(
            begun, seed, self._vocab_size, self._device
        )

    def end(self, sequence_id: int) -> None:
        """Remove a sequence; an unknown one is ignored."""
        self._states.pop(sequence_id, None)

    def seed_of(self, sequence_id: int) -> int:
        """Return the seed of a sequence, its own or the one given to it. Raises KeyError for an
        unknown sequence."""
        return self._states[sequence_id].seed

    def seek(self, sequence_id: int, position: int) -> None:
        """Set the output position of the next draw, after tokens that another sampler drew."""
        self._states[sequence_id].position = position

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, sequence_ids: Sequence[int], masks: Mapping[int, Mask] | None = None
    ) -> list[SampledToken]:
        """Return one token per sequence: row i samples for `sequence_ids[i]`, within its mask if it
        has one.

        logits: [rows, vocab] fp32, on the sampler's device, not written. A row that contains a NaN,
        or nothing above minus infinity, gives token id -1. Every other token is appended to its
        sequence's history.

        Cost per row: see the table in the module's docstring. Waits for the device.
        """
        assert logits.shape == (len(sequence_ids), self._vocab_size), tuple(logits.shape)
        states = [self._states[sequence_id] for sequence_id in sequence_ids]
        if not states:
            return []
        masked = apply_masks(logits, sequence_ids, masks) if masks else logits
        chosen = self._choose(masked, states)
        sampled = self._report(logits, states, chosen)
        has_token = (logits.amax(dim=-1) > -math.inf).tolist()  # a comparison with NaN is false
        for row, state in enumerate(states):
            if has_token[row]:
                state.append(chosen[row])
            else:
                sampled[row] = SampledToken(-1)
        return sampled

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: Tensor, next_token_ids: Sequence[int], top: int
    ) -> tuple[SampledToken, ...]:
        """Return logprobs of known tokens: of `next_token_ids[i]` under row i's logits.

        logits: [rows, vocab] fp32, not written. `top`: alternatives to report. Changes nothing.
        """
        entries: list[SampledToken] = []
        for start in range(0, len(next_token_ids), _PROMPT_ROWS):
            end = start + _PROMPT_ROWS
            known = next_token_ids[start:end]
            entries += logprob_entries(logits[start:end], known, [top] * len(known))
        return tuple(entries)

    def _choose(self, logits: Tensor, states: list[_SequenceState]) -> list[int]:
        """Return a token id per row, by kind of row: greedy, unfiltered, filtered."""
        greedy = [i for i, state in enumerate(states) if state.greedy]
        filtered = [i for i, state in enumerate(states) if state.filters and not state.greedy]
        unfiltered = [i for i, state in enumerate(states) if not state.filters and not state.greedy]
        chosen = [0] * len(states)
        if greedy:
            best = _adjusted(logits, states, greedy).argmax(dim=-1).tolist()
            for i, token_id in zip(greedy, best, strict=True):
                chosen[i] = token_id
        if unfiltered:
            drawn = _draw_unfiltered(
                _adjusted(logits, states, unfiltered),
                [states[i].inverse_temperature for i in unfiltered],
                [states[i].next_uniform() for i in unfiltered],
            )
            for i, token_id in zip(unfiltered, drawn, strict=True):
                chosen[i] = token_id
        if filtered:
            for i, row in zip(filtered, _adjusted(logits, states, filtered), strict=True):
                state = states[i]
                chosen[i] = _draw_filtered(
                    row, state.sampling, state.inverse_temperature, state.next_uniform()
                )
        return chosen

    def _report(
        self, logits: Tensor, states: list[_SequenceState], chosen: list[int]
    ) -> list[SampledToken]:
        """Return the chosen tokens, with logprobs for the sequences that report them."""
        sampled = [SampledToken(token_id) for token_id in chosen]
        reporting = [i for i, state in enumerate(states) if state.sampling.logprobs is not None]
        if reporting:
            entries = logprob_entries(
                logits if len(reporting) == len(states) else logits[reporting],
                [chosen[i] for i in reporting],
                [states[i].sampling.logprobs or 0 for i in reporting],
            )
            for i, entry in zip(reporting, entries, strict=True):
                sampled[i] = entry
        return sampled


def _adjusted(logits: Tensor, states: list[_SequenceState], rows: list[int]) -> Tensor:
    """Return `rows` of the logits with bias and penalties applied, or `logits` itself when these
    are all rows and none has bias or penalties."""
    adjusting = any(states[i].adjusts for i in rows)
    if len(rows) == len(states) and not adjusting:
        return logits
    picked = logits[rows]
    if adjusting:
        for row, i in enumerate(rows):
            if states[i].adjusts:
                states[i].adjust(picked[row])
    return picked


def _scaled(logits: Tensor, inverse_temperature: Tensor | float) -> Tensor:
    """Return logits over temperature, shifted so that the best is 0; overflow gives no NaN.

    logits: [..., vocab] fp32, not written. Plus infinity becomes 0, minus infinity stays.
    """
    peak = logits.amax(dim=-1, keepdim=True).clamp_(-_PEAK_MAX, _PEAK_MAX)
    return (logits - peak).clamp_(max=0).mul_(inverse_temperature)


def _draw_unfiltered(
    logits: Tensor, inverse_temperatures: list[float], uniforms: list[float]
) -> list[int]:
    """Return one token per row by the inverse of the running sum of weights, in vocabulary order.

    logits: [rows, vocab] fp32, not written. The sum runs over chunks first, then inside one chunk:

        |---- 256 ----|---- 256 ----|---- 256 ----|
              ^ before        ^ the first chunk whose running sum exceeds uniform * total
    """
    rows, vocab_size = logits.shape
    device = logits.device
    scale = torch.tensor(inverse_temperatures, dtype=torch.float32, device=device)
    # On subnormal results exp takes tens of times as long, and their weight is negligible.
    weights = _scaled(logits, scale[:, None]).clamp_(min=-_NATS_MAX).exp_()
    weights = torch.threshold_(weights, _WEIGHT_MIN, 0.0)
    if vocab_size % _CHUNK:
        weights = torch.nn.functional.pad(weights, (0, -vocab_size % _CHUNK))
    chunks = weights.view(rows, -1, _CHUNK)

    sums = chunks.sum(dim=-1).double().cumsum(dim=-1)
    target = torch.tensor(uniforms, dtype=torch.float64, device=device)[:, None] * sums[:, -1:]
    chunk = _first_above(sums, target)
    before = torch.where(chunk > 0, sums.gather(1, (chunk - 1).clamp_(min=0)), 0.0)

    inside = chunks[torch.arange(rows, device=device), chunk[:, 0]].double().cumsum(dim=-1)
    token_ids = chunk * _CHUNK + _first_above(inside, target - before)
    return [int(token_id) for token_id in token_ids[:, 0].tolist()]


def _first_above(sums: Tensor, target: Tensor) -> Tensor:
    """Return the index of the first running sum above the target, at most that of the last sum
    that grew.

    sums: [rows, n] fp64, ascending; target: [rows, 1] fp64. Returns [rows, 1] int64. The bound
    matters when rounding lifts the target to the total: later tokens have weight 0.
    """
    return torch.minimum(
        (sums <= target).sum(dim=-1, keepdim=True),
        (sums < sums[:, -1:]).sum(dim=-1, keepdim=True),
    )


def _draw_filtered(
    logits: Tensor, sampling: Sampling, inverse_temperature: float, uniform_number: float
) -> int:
    """Draw from the tokens that top-k, top-p and min-p keep, ordered by falling logit, then id.

    logits: [vocab] fp32, not written. Each filter keeps a prefix of that order, so the shortest
    prefix applies. Top-p's total is over the tokens that top-k keeps. Ties at the edge go to the
    lower id.
    """
    vocab_size = logits.shape[0]
    scaled = _scaled(logits, inverse_temperature)
    top_k = min(sampling.top_k or vocab_size, vocab_size)
    floor = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    total = None
    if top_k == vocab_size:
        total = float(scaled.clamp(min=-_NATS_MAX).exp_().sum(dtype=torch.float64))

    values, token_ids = _candidates(scaled, top_k, sampling.top_p, floor, total)
    order = torch.sort(values, descending=True, stable=True)
    values = order.values[:top_k].double()
    weights = values.exp()
    sums = weights.cumsum(dim=0)
    kept_total = total if total is not None else float(sums[-1])
    kept = len(values)
    if sampling.top_p < 1:
        kept = min(kept, int((sums - weights < sampling.top_p * kept_total).sum()))
    if sampling.min_p > 0:
        kept = min(kept, int((values >= floor).sum()))
    kept = max(kept, 1)

    target = uniform_number * sums[kept - 1]
    index = _first_above(sums[None, :kept], target[None, None])
    return int(token_ids[order.indices[int(index)]])


def _candidates(
    scaled: Tensor, top_k: int, top_p: float, floor: float, total: float | None
) -> tuple[Tensor, Tensor]:
    """Return values and ids, in id order, of all tokens above a threshold low enough for the
    filters.

    scaled: [vocab] fp32, best 0, not written. `total`: the weight of all tokens, or None if top-k
    applies. O(vocab) per width tried; a peaked distribution needs one.
    """
    for width in _WIDTHS[:-1]:
        token_ids = (scaled >= -width).nonzero()[:, 0]
        values = scaled[token_ids]
        if not len(token_ids):
            enough = False  # every logit is minus infinity
        elif total is None:
            enough = len(token_ids) >= top_k
        else:
            enough = width >= -floor or (
                top_p < 1 and float(values.exp().sum(dtype=torch.float64)) > top_p * total
            )
        if enough:
            return values, token_ids
    possible = scaled > -math.inf  # few under a mask
    token_ids = (possible if bool(possible.any()) else ~possible).nonzero()[:, 0]
    return scaled[token_ids], token_ids
