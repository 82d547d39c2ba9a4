"""What the models are built of between attention and attention: linear maps, norm, activation.

`Ops` is one set for one device; a model is given one and asks it for its layers. Plain torch here;
`device_layers` launches the fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from kernels import reference

Linear = Callable[[torch.Tensor], torch.Tensor]


class Ops(Protocol):
    """A device's way of doing the layers."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """x [T, C] → x @ weight.T + bias, weight [N, C]."""

    def norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual) * weight, x + residual)."""

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """silu(x[:, :C]) * x[:, C:]."""


class TorchOps:
    """Plain torch, any device."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return lambda x: F.linear(x, weight, bias)

    def norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else residual + x
        return F.rms_norm(total, (total.shape[-1],), weight, eps), total

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return reference.silu_mul(x)
