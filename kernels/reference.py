"""The reference: kernels in plain torch, slow and simple, which specify the fast ones.

Tests compare every kernel with its reference. Shapes: T rows, H query heads, K KV heads, G = H / K,
D head_dim, S slots of a block, B blocks; KV is [B, layers, 2, K, S, D].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F


def paged_attention(
    q: torch.Tensor, kv: torch.Tensor, layer: int, block_ids: Sequence[int], start: int, *,
    scale: float | None = None, window: int = 0, cap: float = 0.0,
    sinks: torch.Tensor | None = None, latent: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Return causal attention of one sequence's consecutive tokens over its paged keys.

    q [n, H, D]: tokens at positions start .. start + n - 1, whose keys are already written. `scale`
    of the scores, 1 / sqrt(D) without; `window`: a token sees that many keys, its own the last;
    `cap`: scores s become cap * tanh(s / cap); `sinks` [H]: logits without values. With
    `latent`, kv is [B, layers, 1, 1, S, D] and a key's last `latent` channels are its value.
    Returns [n, H, D], or [n, H, latent], in fp64.
    """
    n, heads, head_dim = q.shape
    _, _, _, kv_heads, slots, _ = kv.shape
    length = start + n
    blocks = list(block_ids)[: -(-length // slots)]
    runs = kv[blocks, layer].double().permute(1, 2, 0, 3, 4).flatten(2, 3)
    keys, values = runs[0], runs[0, ..., -latent:] if latent else runs[1]
    group = heads // kv_heads
    keys = keys[:, :length].repeat_interleave(group, 0)
    values = values[:, :length].repeat_interleave(group, 0)
    scores = torch.einsum("nhd,hld->hnl", q.double(), keys)
    scores = scores * (scale or 1 / math.sqrt(head_dim))
    if cap:
        scores = cap * torch.tanh(scores / cap)
    at = torch.arange(length, device=q.device)
    hidden = at[None, :] > at[start:, None]
    if window:
        hidden |= at[None, :] <= at[start:, None] - window
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(heads, n, 1)], -1)
    return torch.einsum("hnl,hld->nhd", scores.softmax(-1)[..., :length], values)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [T, heads, D], its first R channels rotated by halves; cos and sin are
    [T, R / 2] fp32. Computed in fp32 or wider, in x's dtype."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) * weight, computed in fp32, in x's dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype).float() * weight.float()).to(x.dtype)


def gated_mul(x: torch.Tensor, activation: Literal["silu", "gelu_tanh"]) -> torch.Tensor:
    """Return activation(x[:, :C]) * x[:, C:] for x [T, 2C]."""
    gate, up = x.chunk(2, -1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh") * up


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, gate_first: bool
) -> torch.Tensor:
    """Return x [T, G, D] normed over D and times SiLU of gate [T, G * D], [T, G * D] in gate's
    dtype, computed in fp32 at least.

    `gate_first`: the product is normed, and weight is [G * D]; else the gate follows the norm, and
    weight is [D].
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    gates = F.silu(gate.to(wide)).view(x.shape)
    weight = weight.to(wide)
    if gate_first:
        normed = F.rms_norm(x.to(wide) * gates, x.shape[2:], None, eps).flatten(1)
        return (normed * weight).to(gate.dtype)
    normed = F.rms_norm(x.to(wide), x.shape[2:], weight, eps)
    return (normed * gates).flatten(1).to(gate.dtype)
