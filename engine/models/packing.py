"""Weights as the C kernels read them: matrices in panels, biases padded, addresses that stay valid.

It knows tensors and the kernels' layout, but no model. `cpu_decoder` and `cpu_experts` pack with
it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.models.layers import TensorSource
from engine.weights import Form
from kernels.cpu import build as cpu
from kernels.cpu.build import Kernels, padded_columns
from kernels.cpu.panel_memory import PanelMemory
from kernels.reference_weights import Packed, Weight, as_dense


def cpu_form(dtype: torch.dtype, *, keeps_packed: bool) -> Form:
    """Return the form of weights on a CPU: in `dtype`, but experts in MXFP4, which the C kernels
    multiply as they are."""

    def form(name: str, weight: Weight) -> Weight:
        is_kept = keeps_packed and dtype == torch.bfloat16 and ".experts." in name
        if is_kept and isinstance(weight, Packed) and weight.kind == "mxfp4":
            return weight
        return as_dense(weight, dtype)

    return form


class Stack(NamedTuple):
    """Addresses of the packed matrices of all experts and of their biases, if any."""

    matrices: int
    biases: int | None
    is_mxfp4: bool


class Packer:
    """Packs weights and keeps them alive, for a model's lifetime."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._kept: list[torch.Tensor] = []
        self._memory = PanelMemory()

    def keep(self, tensor: torch.Tensor) -> int:
        """Return the tensor's address, valid as long as the packer lives."""
        self._kept.append(tensor)
        return tensor.data_ptr()

    def matrix(self, weight: torch.Tensor, columns: torch.Tensor | None = None) -> int:
        """Pack a weight; see `Kernels.pack`. Return its address."""
        return self.keep(self._kernels.pack(weight, columns, self._room(weight, columns)))

    def linear(
        self, source: TensorSource, *parts: str, is_gated: bool = False
    ) -> tuple[int, int | None]:
        """Pack the joined parts; return the addresses of the panels and of the bias, if any.

        `is_gated`: the parts are gate and up, whose panels an activation reads in turns.
        """
        weight, bias = source.joined(*parts)
        assert isinstance(weight, torch.Tensor), f"{parts} are packed"
        columns = interleaved_columns(len(weight) // 2) if is_gated else None
        packed = self.matrix(weight, columns)
        return packed, None if bias is None else self.keep(padded_bias(bias, columns))

    def stacked(self, source: TensorSource, *parts: str, is_gated: bool = False) -> Stack:
        """Pack matrices of all experts, [E, N, K] each, joined along N: one expert's panels behind
        another's, and their biases [E, N] likewise. MXFP4 stays so: a quarter of the memory, and of
        the time to read it.
        """
        weights, biases = source.joined(*parts, dim=1)
        columns = interleaved_columns(weights.shape[1] // 2) if is_gated else None
        count = weights.shape[0]
        small = self._all_mxfp4(weights, columns) if isinstance(weights, Packed) else None
        packed = small
        if packed is None:
            wide = as_dense(weights, torch.bfloat16) if isinstance(weights, Packed) else weights
            packed = self._room(wide[0], columns, count).view(count, -1)
            for weight, out in zip(wide, packed, strict=True):
                self._kernels.pack(weight, columns, out)
        bias = None
        if biases is not None:
            bias = self.keep(torch.stack([padded_bias(bias, columns) for bias in biases]))
        return Stack(self.keep(packed), bias, small is not None)

    def _all_mxfp4(self, weights: Packed, columns: torch.Tensor | None) -> torch.Tensor | None:
        """Return weights [E, N, K] in panels of MXFP4, or None if a scale is beyond what these
        hold."""
        packed: list[torch.Tensor] = []
        for index in range(weights.shape[0]):
            one = self._kernels.pack_mxfp4(weights.at(index).dense(torch.bfloat16), columns)
            if one is None:
                return None
            packed.append(one)
        out = self._memory.take(len(packed) * len(packed[0]), torch.uint8).view(len(packed), -1)
        return torch.stack(packed, out=out)

    def _room(
        self, weight: torch.Tensor, columns: torch.Tensor | None, copies: int = 1
    ) -> torch.Tensor:
        """Return the memory of so many packed matrices like `weight`."""
        rows, depth = weight.shape
        padded = padded_columns(rows) if columns is None else len(columns)
        return self._memory.take(copies * padded * depth, weight.dtype)


def padded_bias(bias: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    """Return a bias in fp32 with a value for each column of the packed weight; `columns` as in
    `Kernels.pack`."""
    bias = bias.float()
    if columns is not None:
        bias = bias[columns.long()]
    return F.pad(bias, (0, -len(bias) % cpu.COLUMNS_STEP))


def interleaved_columns(intermediate: int) -> torch.Tensor:
    """Return the column order that gated epilogues read: a panel of gate, the same panel of up, the
    next panel of gate, and so on."""
    gate = torch.arange(intermediate, dtype=torch.int32).view(-1, cpu.PANEL)
    return torch.stack([gate, gate + intermediate], 1).flatten().contiguous()
