"""States of recurrent layers in torch, on any device: a place for each running sequence.

A runner lays a step out once (`begin`), then each recurrent layer of the model calls `convolve`,
and `delta` or `mamba` if it has that; `end` follows. What they compute for each row is specified
in `kernels.reference_convolution`, `kernels.reference_delta` and `kernels.reference_mamba2`. On a
GPU with kernels `engine.states.gpu_states` stands in its place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.model_store import Architecture
from engine.plan import StepPlan
from engine.states.places import StatePlaces
from kernels.reference_delta import delta_inputs, gated_delta_chunk, gated_delta_token
from kernels.reference_mamba2 import mamba2_chunk, mamba2_inputs, mamba2_token

Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Maps a layer's inputs and states to what is read and the states after it."""


class SequenceStates(StatePlaces):
    """`engine.states.interface.States` of all sequences that a runner knows."""

    def __init__(
        self, config: Architecture, dtype: torch.dtype, device: torch.device,
        pool: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, dtype, device, pool)
        self._config = config
        self._kept = config.conv_width - 1
        self._rows = torch.empty(0, dtype=torch.int64)
        self._reads = self._keeps = self._rows
        self._singles = self._single_slots = self._rows
        self._longer: list[tuple[int, int, int, int]] = []
        """Of rows of several tokens: place, first, first draft, end."""

    def begin(self, plan: StepPlan) -> list[int]:
        """Lay out a step; see `StatePlaces.begin`. O(tokens)."""
        slots = super().begin(plan)
        kept, rows = self._kept, len(plan.rows)
        taps = torch.arange(kept + 1)
        reads, keeps, end = list[torch.Tensor](), list[torch.Tensor](), rows * kept
        singles = list[tuple[int, int]]()
        self._longer = []
        for index, row in enumerate(plan.rows):
            # Inputs lie as one list: the kept ones of each row, oldest first, then the step's.
            known = torch.arange(index * kept, (index + 1) * kept)
            inputs = torch.cat([known, torch.arange(end, end + row.count)])
            first = end - rows * kept
            if row.count == 1:
                singles.append((first, slots[index]))
            else:
                drafts = first + row.count - row.drafts
                self._longer.append((slots[index], first, drafts, first + row.count))
            end += row.count
            reads.append(inputs[torch.arange(row.count)[:, None] + taps])
            keeps.append(inputs[row.count - row.drafts :][:kept])
        device = self.data.device
        self._rows = torch.tensor(slots, dtype=torch.int64).to(device)
        places = torch.tensor(singles, dtype=torch.int64).view(-1, 2).to(device)
        self._singles, self._single_slots = places.unbind(1)
        if plan.rows:
            self._reads, self._keeps = torch.cat(reads).to(device), torch.stack(keeps).to(device)
        return slots

    def convolve(
        self, layer: int, x: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None,
        *, silu: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """See `engine.states.interface.States`."""
        states = self.layout.inputs(self.data, layer)
        inputs = torch.cat([states[self._rows].flatten(0, 1), x])
        wide = torch.promote_types(x.dtype, torch.float32)
        total = (inputs[self._reads].to(wide) * taps.T.to(wide)).sum(1)
        if bias is not None:
            total += bias.to(wide)
        states[self._rows] = inputs[self._keeps]
        return F.silu(total.to(x.dtype)) if silu else total.to(x.dtype)

    def delta(
        self, layer: int, mixed: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor,
        rate: torch.Tensor, dt_bias: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """See `engine.states.interface.States`."""
        delta = self._config.delta
        assert delta is not None, "a layer of the delta rule"
        q, k, v, fades, strengths = delta_inputs(
            mixed, beta, decay, rate, dt_bias, delta.keys, delta.key_dim
        )
        inputs = (q, k, v, fades, strengths)
        return self._follow(layer, gated_delta_token, gated_delta_chunk, inputs, v)

    def mamba(
        self, layer: int, mixed: torch.Tensor, step: torch.Tensor, rate: torch.Tensor,
        dt_bias: torch.Tensor, through: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """See `engine.states.interface.States`."""
        mamba = self._config.mamba
        assert mamba is not None, "a layer of Mamba-2"
        x, decay, b, c, heads = mamba2_inputs(mixed, step, rate, dt_bias, mamba.inner, mamba.groups)
        read = self._follow(layer, mamba2_token, mamba2_chunk, (x, decay, b, c), x)
        return read + heads * through.to(read.dtype)[:, None]

    def _follow(
        self, layer: int, token: Rule, chunk: Rule, inputs: tuple[torch.Tensor, ...],
        like: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return what the step's tokens read, as `like` [T, ...]: rows of one token together by
        `token`, the others one by one by `chunk`, and behind each its drafts."""
        states, out = self.layout.matrices(self.data, layer), torch.empty_like(like)
        if len(self._singles):
            given = [x[self._singles] for x in inputs]
            out[self._singles], after = token(*given, states[self._single_slots])
            states[self._single_slots] = after
        for slot, first, drafts, end in self._longer:
            out[first:drafts], after = chunk(*(x[first:drafts] for x in inputs), states[slot])
            states[slot] = after
            if drafts < end:
                out[drafts:end], _ = chunk(*(x[drafts:end] for x in inputs), after)
        return out
