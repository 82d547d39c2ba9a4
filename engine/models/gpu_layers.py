"""The layers on a GPU: fused kernels around cuBLAS matrix products, and experts.

It knows no architecture and no attention. Runner builders pass `GpuOps` to a model's constructor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.config import WeightsKind
from engine.models.gpu_experts import GpuExperts
from engine.models.layers import (
    Activation,
    ExpertWeights,
    Linear,
    MixedExperts,
    PartLinear,
    Rows,
    WholeOps,
)
from engine.weights import Form
from kernels.gpu import fused_ops, int4_products, products
from kernels.gpu.int4_products import Int4, fits_int4, int4_of
from kernels.gpu.products import Fp8, Fp8Rows
from kernels.gpu.recurrent.states import gated_norm
from kernels.reference_experts import ExpertActivation, Routing
from kernels.reference_weights import TURN, Packed, Weight, fits_panels, to_fp8

SPLIT_ROWS = 256
"""Batch size, in tokens, at which wide products are split in two.

For 256 tokens cuBLAS picks one row of 256 x 128 tiles, and a last wave that is half empty costs as
much as a full one.
"""

TILE_COLUMNS = 128
"""Columns of a cuBLAS output tile at `SPLIT_ROWS` tokens."""


def columns_in_full_waves(columns: int, multiprocessors: int) -> int:
    """Return how many columns fill whole waves of tiles, or 0 if a split would not pay.

    A split pays after at least one full wave, where the rest fills between a quarter and three
    quarters of a wave.
    """
    wave = multiprocessors * TILE_COLUMNS
    full, rest = columns // wave * wave, columns % wave
    return full if full and wave // 4 <= rest <= wave - wave // 4 else 0


SWAPPED_ROWS_MAX = 64
"""Most rows that multiply weights in fp8 as their right operand; above, the library's product is as
fast, where each row of the weights has one scale."""

UNPACKED_ROWS_MAX = 256
"""Most rows that multiply weights of 4 bits as they are; above, they are unpacked for the library's
product, which takes 1.3 times as long as with weights that are not packed."""

WIDTH_STEP = 16
"""The number of which N and K of a weight in fp8 must be a multiple, as the library wants it."""

TICKETS = 1 << 14
"""Tiles of a product that is cut along K, at most."""

_DENSE = ("k_b_proj.weight", "v_b_proj.weight")
"""Linear maps that are multiplied head by head, and not packed."""


def gpu_form(kind: WeightsKind) -> Form:
    """Return the form of weights on a GPU: packed if its kernels take them as they are.

    `kind` "fp8" rounds linear maps that are not packed, but the head; "bf16" packs none.
    """

    def form(name: str, weight: Weight) -> Weight:
        is_map = name.endswith("_proj.weight") and not name.endswith(_DENSE)
        if isinstance(weight, Packed):
            is_head = name == "lm_head.weight"
            fits = (is_map or is_head) and weight.kind == "fp8" and _fits_fp8(weight)
            fits |= ".experts." in name and is_map and fits_panels(weight)
            fits |= (is_map or is_head) and fits_int4(weight)
            return weight if fits and kind != "bf16" else form(name, weight.dense(torch.bfloat16))
        return to_fp8(weight) if kind == "fp8" and is_map and _fits_fp8(weight) else weight

    return form


def _fits_fp8(weight: Weight) -> bool:
    rows, columns = weight.shape[-2:]
    is_grouped = isinstance(weight, Packed) and weight.group < columns
    fits = not is_grouped or (isinstance(weight, Packed) and weight.group == TURN)
    return fits and not rows % WIDTH_STEP and not columns % WIDTH_STEP


class Fp8Linear:
    """A linear map with weights and rows in fp8, and its result in `dtype`."""

    def __init__(
        self, weight: Fp8, bias: torch.Tensor | None, tickets: torch.Tensor, dtype: torch.dtype
    ) -> None:
        self._weight, self._bias, self._tickets, self._dtype = weight, bias, tickets, dtype
        self.groups = len(weight.scales)

    def __call__(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        """Return x @ weight.T + bias; x in bf16 is rounded by a launch of its own."""
        rows = x if isinstance(x, Fp8Rows) else products.round_rows(x, self.groups)
        tokens, columns = rows.codes.shape
        weight = self._weight
        if tokens > SWAPPED_ROWS_MAX and self.groups == 1 and rows.codes.is_cuda:
            by_row = F.ScalingType.RowWise
            return F.scaled_mm(
                rows.codes, weight.codes.T, rows.scales, by_row, weight.scales, by_row,
                bias=self._bias, output_dtype=self._dtype, use_fast_accum=True,
            )  # fmt: skip
        tile = products.fp8_tile(tokens)
        split = products.split_of(len(weight.codes), columns, tile)
        return products.fp8_linear(
            rows, weight, self._bias, self._tickets, self._dtype, tile, split
        )


class Int4Linear:
    """A linear map with weights of 4 bits. `scratch` has room for any of the model's such matrices
    in bf16, which steps of many rows multiply: one at a time, in the order of the stream."""

    def __init__(
        self, weight: Int4, bias: torch.Tensor | None, tickets: torch.Tensor, scratch: Scratch
    ) -> None:
        self._weight, self._bias, self._tickets, self._scratch = weight, bias, tickets, scratch
        scratch.reserve(weight.rows * weight.columns)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias."""
        weight, tokens = self._weight, len(x)
        if tokens > UNPACKED_ROWS_MAX:
            whole = self._scratch.take(weight.rows, weight.columns, x)
            return F.linear(x, int4_products.unpack(weight, whole), self._bias)
        tile = int4_products.int4_tile(tokens, is_plain=weight.is_plain)
        split = int4_products.int4_split(tokens, weight, tile)
        return int4_products.int4_linear(
            x.contiguous(), weight, self._bias, self._tickets, tile, split
        )


class Scratch:
    """Memory that maps of a model use in turn, taken at the first use: before graphs have it."""

    def __init__(self) -> None:
        self._values = 0
        self._memory: torch.Tensor | None = None

    def reserve(self, values: int) -> None:
        """Make room for so many values, before the first use."""
        assert self._memory is None, "a graph may have the memory already"
        self._values = max(self._values, values)

    def take(self, rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
        """Return [rows, columns] in the dtype of `like`."""
        if self._memory is None:
            self._memory = like.new_empty(self._values)
        return self._memory[: rows * columns].view(rows, columns)


class GpuOps(WholeOps):
    """`engine.models.layers.Ops` on a GPU: fused kernels, and cuBLAS for matrix products of
    tensors."""

    def __init__(self) -> None:
        self._tickets: torch.Tensor | None = None
        self._scratch = Scratch()

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        if isinstance(weight, Packed):
            if self._tickets is None:
                self._tickets = weight.scales.new_zeros(TICKETS, dtype=torch.int32)
            if weight.kind == "int4":
                return Int4Linear(int4_of(weight), bias, self._tickets, self._scratch)
            return Fp8Linear(products.fp8_of(weight), bias, self._tickets, torch.bfloat16)
        if weight.is_cuda and bias is None:
            properties = torch.cuda.get_device_properties(weight.device)
            split = columns_in_full_waves(len(weight), properties.multi_processor_count)
            if split:
                return lambda x: split_linear(x, weight, split)
        return lambda x: F.linear(x, weight, bias)

    def norm(
        self, x: Rows, residual: torch.Tensor | None, weight: torch.Tensor, eps: float,
        into: PartLinear | None = None,
    ) -> tuple[Rows, torch.Tensor]:  # fmt: skip
        x = x.contiguous()  # queries beside keys and values are rows of a wider matrix
        total = x if residual is None else residual
        if isinstance(into, Fp8Linear):
            rows = products.empty_rows(x, x.shape[1], into.groups)
            fused_ops.residual_rms_norm(x, residual, weight, rows.codes, eps, rows.scales)
            return rows, total
        out = torch.empty_like(x)
        fused_ops.residual_rms_norm(x, residual, weight, out, eps)
        return out, total

    def norm_heads(
        self, qkv: torch.Tensor, heads: int, queries: torch.Tensor, keys: torch.Tensor, eps: float
    ) -> None:
        fused_ops.norm_heads(qkv, heads, queries, keys, eps)

    def gated(
        self, x: torch.Tensor, activation: Activation, into: PartLinear | None = None
    ) -> Rows:
        columns, is_gelu = x.shape[1] // 2, activation == "gelu_tanh"
        if isinstance(into, Fp8Linear):
            rows = products.empty_rows(x, columns, into.groups)
            fused_ops.gated_mul(x, rows.codes, gelu=is_gelu, scales=rows.scales)
            return rows
        out = x.new_empty(len(x), columns)
        fused_ops.gated_mul(x, out, gelu=is_gelu)
        return out

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *,
        gate_first: bool,
    ) -> torch.Tensor:  # fmt: skip
        return gated_norm(x, gate, weight, eps, gate_first=gate_first)

    def experts(
        self, weights: ExpertWeights, routing: Routing, activation: ExpertActivation
    ) -> MixedExperts:
        return GpuExperts(weights, routing, activation)


def split_linear(x: torch.Tensor, weight: torch.Tensor, split: int) -> torch.Tensor:
    """Return x @ weight.T; for `SPLIT_ROWS` tokens as two products, columns before `split` and
    from it."""
    if len(x) != SPLIT_ROWS:
        return F.linear(x, weight)
    out = x.new_empty(len(x), len(weight))
    torch.mm(x, weight[:split].T, out=out[:, :split])
    torch.mm(x, weight[split:].T, out=out[:, split:])
    return out
