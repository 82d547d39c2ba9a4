"""The layers on a GPU: fused kernels around the library's matrix products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.models.layers import Linear
from kernels.gpu import fused_ops

CUT_ROWS = 256
"""Tokens at which wide products are cut: there the library takes tiles of 256 x 128, one row of
them, and a last wave that is half empty costs as much as a full one."""

TILE_COLUMNS = 128


def whole_waves(columns: int, multiprocessors: int) -> int:
    """How many columns fill whole waves of tiles; 0 where a cut there is worth nothing.

    Worth it after one wave at least, with a rest that leaves a quarter of a wave or more idle.
    """
    wave = multiprocessors * TILE_COLUMNS
    full, rest = columns // wave * wave, columns % wave
    return full if full and wave // 4 <= rest <= wave - wave // 4 else 0


class GpuOps:
    """Fused kernels on a GPU; matrix products stay the library's."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        if weight.is_cuda and bias is None:
            properties = torch.cuda.get_device_properties(weight.device)
            cut = whole_waves(len(weight), properties.multi_processor_count)
            if cut:
                return lambda x: in_two(x, weight, cut)
        return lambda x: F.linear(x, weight, bias)

    def norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(x)
        fused_ops.residual_rms_norm(x, residual, weight, out, eps)
        return out, x if residual is None else residual

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        fused_ops.silu_mul(x, out)
        return out


def in_two(x: torch.Tensor, weight: torch.Tensor, cut: int) -> torch.Tensor:
    """x @ weight.T, for CUT_ROWS tokens as two products of columns: up to `cut`, and from it."""
    if len(x) != CUT_ROWS:
        return F.linear(x, weight)
    out = x.new_empty(len(x), len(weight))
    torch.mm(x, weight[:cut].T, out=out[:, :cut])
    torch.mm(x, weight[cut:].T, out=out[:, cut:])
    return out
