"""The GPU sampler: plain sequences by one kernel without waiting, others by the full sampler.

A sequence is plain if it uses only temperature, and top-k, top-p or min-p without a seed. One
kernel samples a batch of plain sequences, and the tokens stay on the GPU for the next step. A batch
with penalties, bias, logprobs or a grammar goes through `engine.sampling.sampler`, which waits for
the GPU. `engine.runner.gpu_runner` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.api import SampledToken
from engine.plan import BegunSequence, Mask
from engine.sampling.rng import uniform
from engine.sampling.sampler import Sampler
from kernels.gpu.sampling import sample

Float32 = npt.NDArray[np.float32]


class _Draws:
    """Parameters and position of one sequence."""

    __slots__ = ("index", "is_plain", "parameters", "position", "seed")

    def __init__(self, begun: BegunSequence, seed: int) -> None:
        s = begun.sampling
        # The kernel adds weights in vocabulary order, the full sampler by likelihood, so a seeded
        # draw from a filtered row must use the same sampler in every batch.
        filters = s.temperature > 0 and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0)
        self.is_plain = (
            not (filters and s.seed is not None)
            and not s.logit_bias
            and s.logprobs is None
            and s.repetition_penalty == 1
            and s.presence_penalty == 0
            and s.frequency_penalty == 0
        )
        self.parameters = (s.temperature, float(s.top_k), s.top_p, s.min_p)
        self.seed = seed
        self.index = begun.sample_index
        self.position = len(begun.token_ids) - begun.prompt_tokens


class GpuSampler:
    """Samples by the kernel or by the full sampler, for the sequences begun here."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._sampler = Sampler(vocab_size, device)
        self._draws: dict[int, _Draws] = {}

    def begin(self, begun: BegunSequence) -> None:
        """Add a sequence with its history; see `Sampler.begin`."""
        self._sampler.begin(begun)
        seed = self._sampler.seed_of(begun.sequence_id)
        self._draws[begun.sequence_id] = _Draws(begun, seed)

    def end(self, sequence_id: int) -> None:
        """Remove a sequence; an unknown one is ignored."""
        self._sampler.end(sequence_id)
        self._draws.pop(sequence_id, None)

    def is_plain(self, sequence_ids: Sequence[int]) -> bool:
        """Return whether the kernel can sample all of the sequences."""
        return all(self._draws[s].is_plain for s in sequence_ids)

    def parameters(self, sequence_ids: Sequence[int]) -> Float32:
        """Return [5, rows]: temperature, top-k, top-p, min-p and the uniform number of this draw.

        Advances each sequence's position by one.
        """
        table = np.empty((5, len(sequence_ids)), np.float32)
        for row, sequence_id in enumerate(sequence_ids):
            draws = self._draws[sequence_id]
            table[:4, row] = draws.parameters
            table[4, row] = 0.0
            if draws.parameters[0] > 0:
                table[4, row] = uniform(draws.seed, draws.index, draws.position)
            draws.position += 1
        return table

    def draw(self, logits: torch.Tensor, parameters: torch.Tensor, out: torch.Tensor) -> None:
        """Write one token per row to `out` [R] int32, by the kernel; -1 for a row without a
        candidate, as in `Sampler.sample`."""
        temperatures, top_ks, top_ps, min_ps, uniforms = parameters.unbind(0)
        sample(logits, temperatures, top_ks, top_ps, min_ps, uniforms, out)

    def draw_fully(
        self,
        logits: torch.Tensor,
        sequence_ids: Sequence[int],
        masks: Mapping[int, Mask] | None = None,
    ) -> list[SampledToken]:
        """Sample by the full sampler; waits for the GPU. See `Sampler.sample`."""
        for sequence_id in sequence_ids:
            draws = self._draws[sequence_id]
            self._sampler.seek(sequence_id, draws.position)
            draws.position += 1
        return self._sampler.sample(logits.float(), sequence_ids, masks)

    def prompt_logprobs(
        self, logits: torch.Tensor, next_token_ids: Sequence[int], top: int
    ) -> tuple[SampledToken, ...]:
        """See `Sampler.prompt_logprobs`."""
        return self._sampler.prompt_logprobs(logits.float(), next_token_ids, top)
