"""Mixers with a recurrent state: short convolutions, the gated delta rule, Mamba-2.

They stand where attention stands in other layers, around the states of the step's sequences.
`engine.models.decoder` builds them.
"""

from __future__ import annotations

import torch

from engine.attention.interface import LayerAttention
from engine.model_store import Architecture
from engine.models.layers import Ops, Rows, TensorSource
from engine.states.interface import States

DELTA_PARTS = tuple(f"linear_attn.{name}_proj" for name in ("q", "k", "v", "z", "b", "a"))
"""Parts of the first linear map of a layer of the gated delta rule."""


class ConvolutionBlock:
    """A gated short convolution of C channels (LFM2).

    Its linear map gives two gates and an input: the first gate multiplies the input before the
    convolution, the second its output.
    """

    def __init__(self, source: TensorSource, ops: Ops, states: States) -> None:
        self._states = states
        self.reader = ops.linear(*source.joined("conv.in_proj"))
        self._taps, self._bias = source.whole("conv.conv")
        self.output = ops.part_linear(*source.joined("conv.out_proj"))

    def attend(self, layer: int, x: Rows, attention: LayerAttention) -> torch.Tensor:
        """Return the gated convolution, [T, C], before the output map. Only `reader` reads x."""
        before, after, inputs = self.reader(x).chunk(3, dim=-1)
        return after * self._states.convolve(layer, before * inputs, self._taps, self._bias)


class DeltaBlock:
    """A layer of the gated delta rule, H value heads of V channels over key heads of K.

    One linear map gives queries, keys and values, which pass a short convolution, a gate for what
    is read, and the strength and decay of each head.
    """

    def __init__(
        self, config: Architecture, source: TensorSource, ops: Ops, states: States
    ) -> None:
        assert config.delta is not None, "a layer of the delta rule"
        self._delta, self._eps, self._states = config.delta, config.norm_eps, states
        self._gated_norm = ops.gated_norm
        self.reader = ops.linear(*source.joined(*DELTA_PARTS))
        self._taps = source.weight("linear_attn.conv")
        self._rate = source.tensor("linear_attn.A_log").float().exp()
        self._dt_bias = source.tensor("linear_attn.dt_bias").float()
        self._norm = source.weight("linear_attn.norm")
        self.output = ops.part_linear(*source.joined("linear_attn.out_proj"))

    def attend(self, layer: int, x: Rows, attention: LayerAttention) -> torch.Tensor:
        """Return what the heads read, normed and gated, [T, H * V], before the output projection.
        Only `reader` reads x."""
        delta = self._delta
        heads, values = delta.value_heads, delta.values
        mixed, gate, beta, decay = torch.split(
            self.reader(x), [delta.channels, values, heads, heads], dim=1
        )
        mixed = self._states.convolve(layer, mixed, self._taps, None, silu=True)
        read = self._states.delta(layer, mixed, beta, decay, self._rate, self._dt_bias)
        return self._gated_norm(read, gate, self._norm, self._eps, gate_first=False)


class MambaBlock:
    """A layer of Mamba-2, H heads of P channels with S states each, in G groups.

    One linear map gives a gate for what is read, the inputs with what is written and read, which
    pass a short convolution, and the step of each head.
    """

    def __init__(
        self, config: Architecture, source: TensorSource, ops: Ops, states: States
    ) -> None:
        assert config.mamba is not None, "a layer of Mamba-2"
        self._mamba, self._eps, self._states = config.mamba, config.norm_eps, states
        self._gated_norm = ops.gated_norm
        self.reader = ops.linear(*source.joined("mamba.in_proj"))
        self._taps, self._bias = source.whole("mamba.conv")
        self._rate = source.tensor("mamba.A_log").float().exp()
        self._dt_bias = source.tensor("mamba.dt_bias").float()
        self._through = source.tensor("mamba.D").float()
        self._norm = source.weight("mamba.norm")
        self.output = ops.part_linear(*source.joined("mamba.out_proj"))

    def attend(self, layer: int, x: Rows, attention: LayerAttention) -> torch.Tensor:
        """Return what the heads read, gated and normed, [T, H * P], before the output projection.
        Only `reader` reads x."""
        mamba = self._mamba
        gate, mixed, step = torch.split(
            self.reader(x), [mamba.inner, mamba.channels, mamba.heads], dim=1
        )
        mixed = self._states.convolve(layer, mixed, self._taps, self._bias, silu=True)
        read = self._states.mamba(
            layer, mixed, step, self._rate, self._dt_bias, self._through
        )  # [T, H, P]
        groups = read.reshape(len(read), mamba.groups, -1)
        return self._gated_norm(groups, gate, self._norm, self._eps, gate_first=True)
