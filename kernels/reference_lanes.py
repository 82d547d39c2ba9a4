"""Sums over lanes in plain torch: what `kernels.gpu.peer_reduce` computes.

A *lane* is one GPU of an engine. A map whose inputs lanes share gives each a part of a sum. The sum
is in fp32, in the order of the lanes, so that all of them have the same bits. T rows, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.reference import rms_norm


def sum_parts(parts: Sequence[torch.Tensor], residual: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum of parts [T, C], and of `residual`, in fp32 and rounded once."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    if residual is not None:
        total += residual.float()
    return total.to(parts[0].dtype)


def sum_and_norm(
    parts: Sequence[torch.Tensor], residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(total) * weight, total) of `sum_parts`."""
    total = sum_parts(parts, residual)
    return rms_norm(total, weight, eps), total


def gather_parts(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return parts [T, N] side by side, in the order of the lanes."""
    return torch.cat(list(parts), 1)
