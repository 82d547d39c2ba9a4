"""States of recurrent layers on a GPU: a row of memory for each seat, at an address that graphs
know.

`engine.runner.gpu_runner` tells which seats begin, part and copy; the step's rows, as lists on the
GPU, come by `enter`. The kernels are those of `kernels.gpu.recurrent`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from engine.model_store import Architecture
from engine.states.layout import StateLayout
from engine.states.places import StateBlocks
from kernels.gpu.recurrent.convolution import convolve
from kernels.gpu.recurrent.delta import DeltaShape, delta
from kernels.gpu.recurrent.mamba2 import MambaShape, mamba2
from kernels.gpu.recurrent.states import move_states
from kernels.gpu.recurrent.step import StepRuns

WORD = 4
"""Bytes that a copy moves at once."""


CHANNELS_MAX = 128
"""Most channels of keys, values or states of a head: wider ones do not fit a program."""


def lacks_rule_kernel(config: Architecture) -> str:
    """Return why the kernels do not fit a model's recurrent layers, or "" if they do."""
    rule = config.rule
    widest = 0 if rule is None else max(rule.state[1:])
    if widest <= CHANNELS_MAX:
        return ""
    return f"a state has {widest} channels a head; kernels take up to {CHANNELS_MAX}"


class GpuStates:
    """`engine.states.interface.States` of up to `seats` sequences, and one more seat for padding.

    `pool`: the KV blocks as bytes [B, block bytes], to and from which states are copied; None for a
    model that keeps none. Memory: `layout.bytes` a seat, taken at once.
    """

    def __init__(
        self, config: Architecture, dtype: torch.dtype, device: torch.device, seats: int,
        pool: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.layout = StateLayout(config, dtype)
        self._config, self._pool = config, pool
        size = self.layout.bytes
        self.data = torch.zeros(seats + 1, size, dtype=torch.uint8, device=device)
        self._inputs = {i: self.layout.inputs(self.data, i) for i in config.recurrent_layers}
        self._matrices = {i: self.layout.matrices(self.data, i) for i in config.recurrent_layers}
        self._runs: StepRuns | None = None
        self._held = StateBlocks(pool)

    def begin(self, seats: Iterable[int]) -> None:
        """Zero the states of these seats."""
        for seat in seats:
            self.data[seat].zero_()

    def part(self, seat: int, others: Sequence[int]) -> None:
        """Give the states of a seat to others."""
        for other in others:
            self.data[other].copy_(self.data[seat])

    def restore(self, copies: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Copy states from blocks: (seat, blocks) each. One launch."""
        self._move(copies, to_pool=False)

    def keep(self, copies: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Copy states to blocks: (seat, blocks) each. One launch."""
        self._move(copies, to_pool=True)
        self._held.note(block for _, blocks in copies for block in blocks)

    def clear(self, blocks: Iterable[int]) -> None:
        """See `StateBlocks.clear`."""
        self._held.clear(blocks)

    def enter(self, runs: StepRuns) -> None:
        """Lay out the step that the layers compute next."""
        self._runs = runs

    def convolve(
        self, layer: int, x: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None,
        *, silu: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """See `engine.states.interface.States`."""
        return convolve(x, self._inputs[layer], taps, bias, self._step, silu=silu)

    def delta(
        self, layer: int, mixed: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor,
        rate: torch.Tensor, dt_bias: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """See `engine.states.interface.States`."""
        d = self._config.delta
        assert d is not None, "a layer of the delta rule"
        shape = DeltaShape(d.key_heads, d.value_heads, d.key_dim, d.value_dim)
        states = self._matrices[layer]
        return delta(mixed, beta, decay, rate, dt_bias, states, self._step, shape)

    def mamba(
        self, layer: int, mixed: torch.Tensor, step: torch.Tensor, rate: torch.Tensor,
        dt_bias: torch.Tensor, through: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """See `engine.states.interface.States`."""
        m = self._config.mamba
        assert m is not None, "a layer of Mamba-2"
        shape = MambaShape(m.heads, m.head_dim, m.state_dim, m.groups)
        states = self._matrices[layer]
        return mamba2(mixed, step, rate, dt_bias, through, states, self._step, shape)

    @property
    def _step(self) -> StepRuns:
        assert self._runs is not None, "a step is laid out before its layers run"
        return self._runs

    def _move(self, copies: Sequence[tuple[int, Sequence[int]]], *, to_pool: bool) -> None:
        if not copies:
            return
        assert self._pool is not None, "the model keeps states"
        block_words = self._pool.shape[1] // WORD
        moves = torch.tensor(
            [(b, seat, i * block_words) for seat, blocks in copies for i, b in enumerate(blocks)],
            dtype=torch.int32,
        )
        if self.data.is_cuda:
            moves = moves.pin_memory().to(self.data.device, non_blocking=True)
        words = self._pool.view(torch.int32), self.data.view(torch.int32)
        move_states(*words, moves, to_pool=to_pool)
