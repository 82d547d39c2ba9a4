"""Weights as the C kernels read them: matrices in panels, biases padded, addresses that stay valid.

It knows tensors and the kernels' layout, but no model. `cpu_llama` and `cpu_experts` pack with it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.models.layers import TensorSource
from kernels.cpu import build as cpu
from kernels.cpu.build import Kernels


class Packer:
    """Packs weights and keeps them alive, for a model's lifetime."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._kept: list[torch.Tensor] = []

    def keep(self, tensor: torch.Tensor) -> int:
        """Return the tensor's address, valid as long as the packer lives."""
        self._kept.append(tensor)
        return tensor.data_ptr()

    def matrix(self, weight: torch.Tensor, columns: torch.Tensor | None = None) -> int:
        """Pack a weight; see `Kernels.pack`. Return its address."""
        return self.keep(self._kernels.pack(weight, columns))

    def linear(
        self, source: TensorSource, *parts: str, is_gated: bool = False
    ) -> tuple[int, int | None]:
        """Pack the joined parts; return the addresses of the panels and of the bias, if any.

        `is_gated`: the parts are gate and up, whose panels an activation reads in turns.
        """
        weight, bias = source.joined(*parts)
        columns = interleaved_columns(len(weight) // 2) if is_gated else None
        packed = self.matrix(weight, columns)
        return packed, None if bias is None else self.keep(padded_bias(bias, columns))

    def stacked(
        self, source: TensorSource, *parts: str, is_gated: bool = False
    ) -> tuple[int, int | None]:
        """Pack matrices of all experts, [E, N, K] each, joined along N: one expert's panels behind
        another's, and their biases [E, N] likewise. Returns addresses as `linear` does."""
        weights, biases = source.joined(*parts, dim=1)
        experts, rows, depth = weights.shape
        columns = interleaved_columns(rows // 2) if is_gated else None
        padded = rows + -rows % cpu.COLUMNS_STEP
        packed = torch.empty(experts, padded * depth, dtype=weights.dtype)
        for expert in range(experts):
            packed[expert] = self._kernels.pack(weights[expert], columns)
        if biases is None:
            return self.keep(packed), None
        every = torch.stack([padded_bias(bias, columns) for bias in biases])
        return self.keep(packed), self.keep(every)


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
