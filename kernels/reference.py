"""The reference: kernels in plain torch, slow and simple, which specify the fast ones.

Tests compare every kernel with its reference. Shapes: T rows, H query heads, K KV heads, G = H / K,
D head_dim, S slots of a block, B blocks; KV is [B, layers, 2, K, S, D].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def paged_attention(
    q: torch.Tensor, kv: torch.Tensor, layer: int, block_ids: Sequence[int], start: int
) -> torch.Tensor:
    """Return causal attention of one sequence's consecutive tokens over its paged keys.

    q [n, H, D]: tokens at positions start .. start + n - 1, whose keys are already written. Returns
    [n, H, D] in fp64.
    """
    n, heads, head_dim = q.shape
    _, _, _, kv_heads, slots, _ = kv.shape
    length = start + n
    blocks = list(block_ids)[: -(-length // slots)]
    keys, values = kv[blocks, layer].double().permute(1, 2, 0, 3, 4).flatten(2, 3)
    group = heads // kv_heads
    keys = keys[:, :length].repeat_interleave(group, 0)
    values = values[:, :length].repeat_interleave(group, 0)
    scores = torch.einsum("nhd,hld->hnl", q.double(), keys) / math.sqrt(head_dim)
    at = torch.arange(length, device=q.device)
    scores = scores.masked_fill(at[None, :] > at[start:, None], -math.inf)
    return torch.einsum("hnl,hld->nhd", scores.softmax(-1), values)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [T, heads, D] rotated by halves; cos and sin are [T, D / 2]."""
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) * weight, computed in fp32, in x's dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype).float() * weight.float()).to(x.dtype)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(x[:, :C]) * x[:, C:] for x [T, 2C]."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
