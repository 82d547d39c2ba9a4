"""Weights as the C kernels read them: matrices in panels, biases padded, addresses that stay valid.

It knows tensors and the kernels' layout, but no model. `cpu_decoder` and `cpu_experts` pack with
it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.models.layers import TensorSource
from engine.weights import Form
from kernels.cpu import build as cpu
from kernels.cpu.build import Kernels, padded_columns
from kernels.cpu.panel_memory import PanelMemory
from kernels.reference_weights import Packed, Weight, as_dense


def cpu_form(dtype: torch.dtype, kernels: Kernels | None) -> Form:
    """Return the form of weights on a CPU: in `dtype`, but packed ones that the C kernels multiply
    as they are: experts in MXFP4, and, where the CPU multiplies pairs of bf16 or has AVX2, codes of
    4 and 8 bits in groups of 32, and of 8 bits in groups of 16."""
    has_packed = kernels is not None and dtype == torch.bfloat16
    has_codes = has_packed and kernels is not None and kernels.has_codes

    def form(name: str, weight: Weight) -> Weight:
        is_map = name.endswith("_proj.weight")
        if isinstance(weight, Packed) and (is_map or name in _HEADS):
            if weight.kind == "mxfp4" and has_packed and ".experts." in name:
                return weight
            if has_codes and ".shared_expert." not in name and (codes := _codes(weight)):
                return codes
        return as_dense(weight, dtype)

    return form


def _codes(weight: Packed) -> Packed | None:
    """Return codes in groups that the C kernels multiply, or None."""
    if weight.kind not in ("int4", "int8"):
        return None
    group = math.gcd(weight.group, 32)
    if weight.kind == "int8" or group == 16:
        return weight.as_int8(group) if group >= 16 else None
    return weight.in_groups(group) if group == 32 else None


_HEADS = ("lm_head.weight", "model.embed_tokens.weight")
"""The head, and embeddings, which may be the head."""


class Stack(NamedTuple):
    """Addresses of a packed matrix, or of those of all experts, and of its biases, if any, and how
    it is packed."""

    matrix: int
    bias: int | None
    packing: int


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

    def linear(self, source: TensorSource, *parts: str, is_gated: bool = False) -> Stack:
        """Pack the joined parts; codes stay so.

        `is_gated`: the parts are gate and up, whose panels an activation reads in turns.
        """
        weight, bias = source.joined(*parts)
        columns = interleaved_columns(weight.shape[0] // 2) if is_gated else None
        kept = None if bias is None else self.keep(padded_bias(bias, columns))
        if isinstance(weight, Packed):
            return Stack(self.codes(weight, columns), kept, packing_of(weight))
        return Stack(self.matrix(weight, columns), kept, cpu.NOT_PACKED)

    def codes(self, weight: Packed, columns: torch.Tensor | None = None) -> int:
        """Pack codes; see `Kernels.pack_codes`. Return their address."""
        return self._kept_words([self._kernels.pack_codes(weight, columns)])

    def head(self, weight: Weight, *, is_tied: bool) -> Stack:
        """Pack the head; codes stay so. A tied one is also the embeddings, whose columns are read
        one by one: no codes of 4 bits."""
        if not isinstance(weight, Packed):
            return Stack(self.matrix(weight), None, cpu.NOT_PACKED)
        if is_tied and weight.kind == "int4":
            weight = weight.as_int8(weight.group)
        return Stack(self.codes(weight), None, packing_of(weight))

    def stacked(self, source: TensorSource, *parts: str, is_gated: bool = False) -> Stack:
        """Pack matrices of all experts, [E, N, K] each, joined along N: one expert's panels behind
        another's, and their biases [E, N] likewise. MXFP4 and codes stay so: less memory, and
        less time to read it.
        """
        weights, biases = source.joined(*parts, dim=1)
        columns = interleaved_columns(weights.shape[1] // 2) if is_gated else None
        count, packing, address = weights.shape[0], cpu.NOT_PACKED, None
        if isinstance(weights, Packed) and weights.kind != "mxfp4":
            each = (self._kernels.pack_codes(weights.at(i), columns) for i in range(count))
            address, packing = self._kept_words(list(each)), packing_of(weights)
        elif isinstance(weights, Packed):
            small = self._all_mxfp4(weights, columns)
            if small is not None:
                address, packing = self.keep(small), cpu.MXFP4
        if address is None:
            wide = as_dense(weights, torch.bfloat16) if isinstance(weights, Packed) else weights
            packed = self._room(wide[0], columns, count).view(count, -1)
            for weight, out in zip(wide, packed, strict=True):
                self._kernels.pack(weight, columns, out)
            address = self.keep(packed)
        bias = None
        if biases is not None:
            bias = self.keep(torch.stack([padded_bias(bias, columns) for bias in biases]))
        return Stack(address, bias, packing)

    def _kept_words(self, matrices: list[torch.Tensor]) -> int:
        """Keep matrices of words behind each other; return the address of the first."""
        room = self._memory.take(sum(map(len, matrices)), torch.int32)
        return self.keep(torch.cat(matrices, out=room))

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


def packing_of(weight: Packed) -> int:
    """Return how the C kernels name the packing of codes."""
    return cpu.CODE_PACKINGS[weight.kind, weight.group]


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
