"""States of recurrent layers in torch, on any device: a place for each running sequence.

A runner lays a step out once (`begin`), then each recurrent layer of the model calls `convolve`,
and `delta` or `mamba` if it has that; `end` follows. What they compute for each row is specified
in `kernels.reference_convolution`, `kernels.reference_delta` and `kernels.reference_mamba2`. On a
GPU with kernels `engine.states.gpu_states` stands in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.model_store import Architecture
from engine.plan import StateCopy, StepPlan
from engine.states.layout import StateLayout
from kernels.reference_delta import delta_inputs, gated_delta_chunk, gated_delta_token
from kernels.reference_mamba2 import mamba2_chunk, mamba2_inputs, mamba2_token

SEQUENCES_AT_START = 8

Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Maps a layer's inputs and states to what is read and the states after it."""


class SequenceStates:
    """`engine.states.interface.States` of all sequences that a runner knows, as bytes, which
    `StateLayout` lays out.

    `pool`: the KV blocks as bytes [B, block bytes], to and from which states are copied; None for a
    model that keeps none.
    """

    def __init__(
        self, config: Architecture, dtype: torch.dtype, device: torch.device,
        pool: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.layout = StateLayout(config, dtype)
        self._config = config
        self._kept = config.conv_width - 1
        self._pool = pool
        self._data = torch.zeros(
            SEQUENCES_AT_START, self.layout.bytes, dtype=torch.uint8, device=device
        )
        self._free = list(range(SEQUENCES_AT_START))
        self._slots: dict[int, int] = {}
        self._rows = torch.empty(0, dtype=torch.int64)
        self._reads = self._keeps = self._rows
        self._singles = self._single_slots = self._rows
        self._longer: list[tuple[int, int, int]] = []

    @property
    def places(self) -> int:
        """Sequences for which there is memory."""
        return len(self._data)

    def begin(self, plan: StepPlan) -> None:
        """Lay out a step. Sequences begin from zeros, or from restored states. O(tokens)."""
        for copy in plan.keeps:
            if copy.sequence_id in plan.ended:
                self._keep(copy)
        for sequence_id in plan.ended:
            if (slot := self._slots.pop(sequence_id, None)) is not None:
                self._free.append(slot)
        for begun in plan.begun:
            self._data[self._slot(begun.sequence_id)] = 0
        for copy in plan.restores:
            self._restore(copy)
        kept, rows = self._kept, len(plan.rows)
        taps = torch.arange(kept + 1)
        reads, keeps, end = list[torch.Tensor](), list[torch.Tensor](), rows * kept
        slots, singles = list[int](), list[tuple[int, int]]()
        self._longer = []
        for index, row in enumerate(plan.rows):
            # Inputs lie as one list: the kept ones of each row, oldest first, then the step's.
            known = torch.arange(index * kept, (index + 1) * kept)
            inputs = torch.cat([known, torch.arange(end, end + row.count)])
            first = end - rows * kept
            slots.append(self._slot(row.sequence_id))
            if row.count == 1:
                singles.append((first, slots[-1]))
            else:
                self._longer.append((slots[-1], first, first + row.count))
            end += row.count
            reads.append(inputs[torch.arange(row.count)[:, None] + taps])
            keeps.append(inputs[len(inputs) - kept :])
        device = self._data.device
        self._rows = torch.tensor(slots, dtype=torch.int64).to(device)
        places = torch.tensor(singles, dtype=torch.int64).view(-1, 2).to(device)
        self._singles, self._single_slots = places.unbind(1)
        if plan.rows:
            self._reads, self._keeps = torch.cat(reads).to(device), torch.stack(keeps).to(device)

    def convolve(
        self, layer: int, x: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None,
        *, silu: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """See `engine.states.interface.States`."""
        states = self.layout.inputs(self._data, layer)
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

    def end(self, plan: StepPlan) -> None:
        """Keep what the plan keeps after the rows, and give the states of rows to the sequences
        that part from them.
        """
        for copy in plan.keeps:
            if copy.sequence_id not in plan.ended:
                self._keep(copy)
        for row in plan.rows:
            for sample in row.samples:
                if sample != row.sequence_id:
                    self._data[self._slot(sample)] = self._data[self._slots[row.sequence_id]]

    def _follow(
        self, layer: int, token: Rule, chunk: Rule, inputs: tuple[torch.Tensor, ...],
        like: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return what the step's tokens read, as `like` [T, ...]: rows of one token together by
        `token`, the others one by one by `chunk`."""
        states, out = self.layout.matrices(self._data, layer), torch.empty_like(like)
        if len(self._singles):
            given = [x[self._singles] for x in inputs]
            out[self._singles], after = token(*given, states[self._single_slots])
            states[self._single_slots] = after
        for slot, first, end in self._longer:
            given = [x[first:end] for x in inputs]
            out[first:end], states[slot] = chunk(*given, states[slot])
        return out

    def _keep(self, copy: StateCopy) -> None:
        """Copy a sequence's states to blocks."""
        pool, data = self._pool, self._data[self._slots[copy.sequence_id]]
        assert pool is not None, "the model keeps states"
        for block, part in zip(copy.blocks, torch.split(data, pool.shape[1]), strict=True):
            pool[block, : len(part)] = part

    def _restore(self, copy: StateCopy) -> None:
        """Copy states from blocks to a sequence."""
        pool, data = self._pool, self._data[self._slots[copy.sequence_id]]
        assert pool is not None, "the model keeps states"
        for block, part in zip(copy.blocks, torch.split(data, pool.shape[1]), strict=True):
            part.copy_(pool[block, : len(part)])

    def _slot(self, sequence_id: int) -> int:
        """Return a sequence's place; a new one's has any values."""
        if (slot := self._slots.get(sequence_id)) is not None:
            return slot
        if not self._free:
            count = len(self._data)
            self._data = torch.cat([self._data, torch.zeros_like(self._data)])
            self._free.extend(range(count, 2 * count))
        self._slots[sequence_id] = self._free.pop()
        return self._slots[sequence_id]


def blocks_of_state(layout: StateLayout, block_bytes: int) -> int:
    """Return the blocks that a kept state takes."""
    return math.ceil(layout.bytes / block_bytes)
