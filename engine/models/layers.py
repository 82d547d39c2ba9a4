"""Layer operations between attentions: linear maps, RMS norm, activation.

`Ops` is the set of operations of one device; a model's constructor receives one and builds its
layers from it. `TorchOps` here is plain torch; `engine.models.gpu_layers` launches fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from kernels import reference

Linear = Callable[[torch.Tensor], torch.Tensor]


class Ops(Protocol):
    """The layer operations of one device."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Return the map x [T, C] → x @ weight.T + bias, weight [N, C]."""

    def norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (rms_norm(x + residual) * weight, x + residual). May write to `residual`."""

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu(x[:, :C]) * x[:, C:], x [T, 2C]."""


class TorchOps:
    """`Ops` in plain torch, on any device."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return lambda x: F.linear(x, weight, bias)

    def norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else residual + x
        return F.rms_norm(total, (total.shape[-1],), weight, eps), total

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return reference.silu_mul(x)
