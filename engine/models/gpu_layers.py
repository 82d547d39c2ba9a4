"""The layers on a GPU: fused kernels around cuBLAS matrix products, and experts.

It knows no architecture and no attention. Runner builders pass `GpuOps` to a model's constructor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.models.gpu_experts import GpuExperts
from engine.models.layers import Activation, ExpertWeights, Linear, MixedExperts
from kernels.gpu import fused_ops
from kernels.reference_experts import ExpertActivation, Routing

SPLIT_ROWS = 256
"""Batch size, in tokens, at which wide products are split in two.

For 256 tokens cuBLAS picks one row of 256 x 128 tiles, and a last wave that is half empty costs as
much as a full one.
"""

TILE_COLUMNS = 128
"""Columns of a cuBLAS output tile at `SPLIT_ROWS` tokens."""


def columns_in_full_waves(columns: int, multiprocessors: int) -> int:
    """Return how many columns fill whole waves of tiles, or 0 where a split would not pay.

    A split pays after at least one full wave, where the rest fills between a quarter and three
    quarters of a wave.
    """
    wave = multiprocessors * TILE_COLUMNS
    full, rest = columns // wave * wave, columns % wave
    return full if full and wave // 4 <= rest <= wave - wave // 4 else 0


class GpuOps:
    """`engine.models.layers.Ops` on a GPU: fused kernels, and cuBLAS for matrix products."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        if weight.is_cuda and bias is None:
            properties = torch.cuda.get_device_properties(weight.device)
            split = columns_in_full_waves(len(weight), properties.multi_processor_count)
            if split:
                return lambda x: split_linear(x, weight, split)
        return lambda x: F.linear(x, weight, bias)

    def norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.contiguous()  # queries beside keys and values are rows of a wider matrix
        out = torch.empty_like(x)
        fused_ops.residual_rms_norm(x, residual, weight, out, eps)
        return out, x if residual is None else residual

    def norm_heads(
        self, qkv: torch.Tensor, heads: int, queries: torch.Tensor, keys: torch.Tensor, eps: float
    ) -> None:
        fused_ops.norm_heads(qkv, heads, queries, keys, eps)

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        fused_ops.gated_mul(x, out, gelu=activation == "gelu_tanh")
        return out

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
