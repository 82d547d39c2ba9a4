"""From logits to tokens: bias, penalties, temperature, filters, one seeded draw per sequence.

It knows nothing of models, blocks, batches or requests: a row of logits and the id of the sequence
that draws from it. What a setting means is written once, at `engine.api.Sampling`. The runner calls
it at the end of a step; the history that penalties need is kept here, one entry per sequence.

A sequence pays only for what it asked:

    greedy                      one argmax over all such rows
    temperature alone           one pass over all such rows: inverse of the running sum in
                                vocabulary order, found by chunks
    top-k, top-p, min-p         row by row: the candidates above a threshold that falls until they
                                are enough, then a sort of these (rarely more than some hundreds)
    bias, penalties             a copy of the row, and one gather and scatter of the tokens touched
    a mask                      a copy of all rows, and one pass over the rows that have one

No row's result depends on the rows beside it.
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
from engine.sampling.token_masks import restricted

_CHUNK: Final = 256
_PROMPT_ROWS: Final = 64
_INVERSE_TEMPERATURE_MAX: Final = 1e30  # Finite in fp32, so that 0 times it is 0 and not NaN.
_PEAK_MAX: Final = 3e38
_NATS_MAX: Final = 80.0
_WEIGHT_MIN: Final = 2e-35  # just above exp(-80): nothing, beside the best one's 1
_WIDTHS: Final = (8.0, 16.0, 32.0, math.inf)
"""Candidates lie within so many nats of the best one; tried in turn."""


class _Touched:
    """The tokens that penalties touch: those of the prompt and the output, each once.

    `ids[:size]` and how often each was put out, `counts[:size]`, on the device; the buffers double.
    """

    __slots__ = ("counts", "ids", "place", "size")

    def __init__(self, prompt: Sequence[int], outputs: Sequence[int], device: torch.device) -> None:
        tallies = dict.fromkeys(prompt, 0)
        for token_id in outputs:
            tallies[token_id] = tallies.get(token_id, 0) + 1
        self.place = {token_id: index for index, token_id in enumerate(tallies)}
        self.size = len(tallies)
        room = [0] * max(self.size, 64)
        self.ids = torch.tensor(list(tallies) + room, dtype=torch.int64, device=device)
        self.counts = torch.tensor(
            list(tallies.values()) + room, dtype=torch.float32, device=device
        )

    def add(self, token_id: int) -> None:
        """Count one more output token. O(1), amortised."""
        place = self.place.setdefault(token_id, self.size)
        if place == self.size:
            if self.size == len(self.ids):
                self.ids = torch.cat([self.ids, torch.zeros_like(self.ids)])
                self.counts = torch.cat([self.counts, torch.zeros_like(self.counts)])
            self.ids[place] = token_id
            self.size += 1
        self.counts[place] += 1.0


class _SequenceState:
    """What one sequence's draws depend on besides its logits."""

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
        "touched",
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
            assert max(sampling.logit_bias) < vocab_size, "biased token out of the vocabulary"
            self.bias_ids = torch.tensor(list(sampling.logit_bias), device=device)
            self.bias_values = torch.tensor(
                list(sampling.logit_bias.values()), dtype=torch.float32, device=device
            )
        self.touched: _Touched | None = None
        if (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
        ):
            prompt = begun.token_ids[: begun.prompt_tokens]
            outputs = begun.token_ids[begun.prompt_tokens :]
            self.touched = _Touched(prompt, outputs, device)
        self.adjusts = self.bias_ids is not None or self.touched is not None

    def adjust(self, row: Tensor) -> None:
        """Apply logit bias, then penalties. row: [vocab] fp32, written. O(tokens touched)."""
        if self.bias_ids is not None:
            assert self.bias_values is not None
            row[self.bias_ids] += self.bias_values
        if self.touched is None or self.touched.size == 0:
            return
        sampling = self.sampling
        ids = self.touched.ids[: self.touched.size]
        counts = self.touched.counts[: self.touched.size]
        values = row[ids]
        if sampling.repetition_penalty != 1:
            penalty = sampling.repetition_penalty
            values = torch.where(values > 0, values / penalty, values * penalty)
        values -= sampling.frequency_penalty * counts
        values -= sampling.presence_penalty * (counts > 0)
        row[ids] = values

    def chance(self) -> float:
        """The uniform number of the next draw."""
        return uniform(self.seed, self.sample_index, self.position)

    def append(self, token_id: int) -> None:
        """Remember a drawn token."""
        self.position += 1
        if self.touched is not None:
            self.touched.add(token_id)


class Sampler:
    """Draws tokens for the sequences it was told of. Not for use by two threads."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str = "cpu",
        chance: random.Random | None = None,
    ) -> None:
        """`chance` gives a seed to each sequence that brought none; by default the system's."""
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._chance = chance or random.SystemRandom()
        self._states: dict[int, _SequenceState] = {}

    def begin(self, begun: BegunSequence) -> None:
        """Take up a sequence with its history. O(1), or O(history) if it has penalties.

        Copies what it needs of `token_ids`. A sequence begun before is begun anew.
        """
        seed = begun.sampling.seed
        if seed is None:
            seed = self._chance.getrandbits(64)
        self._states[begun.sequence_id] = _SequenceState(
            begun, seed, self._vocab_size, self._device
        )

    def end(self, sequence_id: int) -> None:
        """Forget a sequence; nothing happens if it is not known."""
        self._states.pop(sequence_id, None)

    def seed_of(self, sequence_id: int) -> int:
        """The seed a sequence draws with, its own or the one it was given."""
        return self._states[sequence_id].seed

    def seek(self, sequence_id: int, position: int) -> None:
        """Draw output `position` next: others were drawn elsewhere."""
        self._states[sequence_id].position = position

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, sequence_ids: Sequence[int], masks: Mapping[int, Mask] | None = None
    ) -> list[SampledToken]:
        """One token for each sequence: row i draws for `sequence_ids[i]`, within its mask if any.

        logits: [rows, vocab] fp32, device of the sampler, not written. A row with a NaN in it, or
        with nothing above minus infinity, gives token id -1; every other one a token, which is
        appended to its sequence's history.

        Cost per row: the list at the head of this file. Waits for the device.
        """
        assert logits.shape == (len(sequence_ids), self._vocab_size), tuple(logits.shape)
        states = [self._states[sequence_id] for sequence_id in sequence_ids]
        if not states:
            return []
        limited = restricted(logits, sequence_ids, masks) if masks else logits
        chosen = self._choose(limited, states)
        sampled = self._report(logits, states, chosen)
        has_token = (logits.amax(dim=-1) > -math.inf).tolist()  # no NaN is above anything
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
        """What the model thought of known tokens: row i's logits against `next_token_ids[i]`.

        logits: [rows, vocab] fp32, not written. Changes nothing.
        """
        entries: list[SampledToken] = []
        for start in range(0, len(next_token_ids), _PROMPT_ROWS):
            end = start + _PROMPT_ROWS
            known = next_token_ids[start:end]
            entries += logprob_entries(logits[start:end], known, [top] * len(known))
        return tuple(entries)

    def _choose(self, logits: Tensor, states: list[_SequenceState]) -> list[int]:
        greedy = [i for i, state in enumerate(states) if state.greedy]
        filtered = [i for i, state in enumerate(states) if state.filters and not state.greedy]
        whole = [i for i, state in enumerate(states) if not state.filters and not state.greedy]
        chosen = [0] * len(states)
        if greedy:
            best = _adjusted(logits, states, greedy).argmax(dim=-1).tolist()
            for i, token_id in zip(greedy, best, strict=True):
                chosen[i] = token_id
        if whole:
            drawn = _draw_from_all(
                _adjusted(logits, states, whole),
                [states[i].inverse_temperature for i in whole],
                [states[i].chance() for i in whole],
            )
            for i, token_id in zip(whole, drawn, strict=True):
                chosen[i] = token_id
        if filtered:
            for i, row in zip(filtered, _adjusted(logits, states, filtered), strict=True):
                state = states[i]
                chosen[i] = _draw_filtered(
                    row, state.sampling, state.inverse_temperature, state.chance()
                )
        return chosen

    def _report(
        self, logits: Tensor, states: list[_SequenceState], chosen: list[int]
    ) -> list[SampledToken]:
        sampled = [SampledToken(token_id) for token_id in chosen]
        asked = [i for i, state in enumerate(states) if state.sampling.logprobs is not None]
        if asked:
            entries = logprob_entries(
                logits if len(asked) == len(states) else logits[asked],
                [chosen[i] for i in asked],
                [states[i].sampling.logprobs or 0 for i in asked],
            )
            for i, entry in zip(asked, entries, strict=True):
                sampled[i] = entry
        return sampled


def _adjusted(logits: Tensor, states: list[_SequenceState], rows: list[int]) -> Tensor:
    """Those rows with bias and penalties applied; `logits` itself when nothing is to do."""
    adjusting = any(states[i].adjusts for i in rows)
    if len(rows) == len(states) and not adjusting:
        return logits
    picked = logits[rows]
    if adjusting:
        for place, i in enumerate(rows):
            if states[i].adjusts:
                states[i].adjust(picked[place])
    return picked


def _scaled(logits: Tensor, inverse_temperature: Tensor | float) -> Tensor:
    """Logits over temperature, shifted so that the best is 0 and none is above or NaN by overflow.

    logits: [..., vocab] fp32, not written. Infinite logits: plus becomes 0, minus stays.
    """
    peak = logits.amax(dim=-1, keepdim=True).clamp_(-_PEAK_MAX, _PEAK_MAX)
    return (logits - peak).clamp_(max=0).mul_(inverse_temperature)


def _draw_from_all(
    logits: Tensor, inverse_temperatures: list[float], chances: list[float]
) -> list[int]:
    """Inverse of the running sum of probabilities, in vocabulary order.

    logits: [rows, vocab] fp32, not written. The sum runs over chunks first, then inside one chunk:

        |---- 256 ----|---- 256 ----|---- 256 ----|
              ^ before        ^ the first chunk whose running sum exceeds chance * total
    """
    rows, vocab_size = logits.shape
    device = logits.device
    scale = torch.tensor(inverse_temperatures, dtype=torch.float32, device=device)
    # Beyond fp32's normal numbers exp takes tens of times as long, and weighs nothing anyway.
    weights = _scaled(logits, scale[:, None]).clamp_(min=-_NATS_MAX).exp_()
    weights = torch.threshold_(weights, _WEIGHT_MIN, 0.0)
    if vocab_size % _CHUNK:
        weights = torch.nn.functional.pad(weights, (0, -vocab_size % _CHUNK))
    chunks = weights.view(rows, -1, _CHUNK)

    sums = chunks.sum(dim=-1).double().cumsum(dim=-1)
    target = torch.tensor(chances, dtype=torch.float64, device=device)[:, None] * sums[:, -1:]
    chunk = _first_above(sums, target)
    before = torch.where(chunk > 0, sums.gather(1, (chunk - 1).clamp_(min=0)), 0.0)

    inside = chunks[torch.arange(rows, device=device), chunk[:, 0]].double().cumsum(dim=-1)
    token_ids = chunk * _CHUNK + _first_above(inside, target - before)
    return [int(token_id) for token_id in token_ids[:, 0].tolist()]


def _first_above(sums: Tensor, target: Tensor) -> Tensor:
    """Index of the first running sum above the target, never beyond the last that grew.

    sums: [rows, n] fp64, never falling; target: [rows, 1] fp64. Gives [rows, 1] int64. The bound
    matters when rounding lifts the target to the total: what follows has no weight.
    """
    return torch.minimum(
        (sums <= target).sum(dim=-1, keepdim=True),
        (sums < sums[:, -1:]).sum(dim=-1, keepdim=True),
    )


def _draw_filtered(
    logits: Tensor, sampling: Sampling, inverse_temperature: float, chance: float
) -> int:
    """Draw among the tokens that top-k, top-p and min-p leave, in order of (logit down, id up).

    logits: [vocab] fp32, not written. All three leave a prefix of that order, so the shortest
    decides. Top-p's whole is what top-k left. Ties at the edge go to the lower id.
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
    whole = total if total is not None else float(sums[-1])
    kept = len(values)
    if sampling.top_p < 1:
        kept = min(kept, int((sums - weights < sampling.top_p * whole).sum()))
    if sampling.min_p > 0:
        kept = min(kept, int((values >= floor).sum()))
    kept = max(kept, 1)

    target = chance * sums[kept - 1]
    index = _first_above(sums[None, :kept], target[None, None])
    return int(token_ids[order.indices[int(index)]])


def _candidates(
    scaled: Tensor, top_k: int, top_p: float, floor: float, total: float | None
) -> tuple[Tensor, Tensor]:
    """Values and ids, in id order, of all tokens above a threshold low enough for the filters.

    scaled: [vocab] fp32, best 0, not written. `total`: the weight of all tokens, where top-k does
    not cut. O(vocab) per width tried; a peaked distribution needs one.
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
    possible = scaled > -math.inf  # under a mask they are few
    token_ids = (possible if bool(possible.any()) else ~possible).nonzero()[:, 0]
    return scaled[token_ids], token_ids
