"""The layers on a GPU: fused kernels around the library's matrix products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.models.layers import Linear
from kernels import fused_ops


class DeviceOps:
    """Fused kernels on a GPU; matrix products stay the library's."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
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
