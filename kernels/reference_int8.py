"""The reference of KV kept in 8 bits: the format `int8t` of a device's pool, in plain torch.

A *unit* is K or V of one head of one layer of a block: S = 16 slots of D values int8, then a scale
fp16 for each slot, S * (D + 2) bytes. In the order `slots` values lie [slot][channel], so that a
block has the bytes of `reference_kv.pack(..., "int8t")`; in the order `panels` of the C kernels
keys lie [D / 4][S][4 channels], values [S / 4][D][4 slots]. Attention over such blocks is
`kernels.reference.paged_attention` over what `widen` returns.

A token's values are rounded when they are written, from what the model computed: scale = largest /
127, rounded up to fp16 and at least 2^-14; value = x / scale, rounded to nearest even. What is no
number becomes 0, as in every pool, and what no fp16 scale reaches becomes the largest value.
Arithmetic is fp32, rounded after each operation. Kernels write the same bytes
(`kernels/cpu/cpu_kv_int8.c`, `kernels/gpu/fused_ops.py`).
"""

from __future__ import annotations

import torch

from kernels.reference_kv import FP16_MAX, SLOTS, cut_dimension, quantise_8

MOST = 127 * FP16_MAX
"""Largest value that a scale of fp16 reaches."""


def unit_bytes(head_dim: int) -> int:
    """Return the bytes of K or V of one head in one layer of a block."""
    return SLOTS * (head_dim + 2)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values int8 [..., D] and scales fp16 [...] of tokens x [..., D]."""
    finite = x.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(-MOST, MOST)
    scales, values = quantise_8(finite)
    return values, scales


def values_of(units: torch.Tensor) -> torch.Tensor:
    """Return a view [..., S, D] int8 of the values of units [..., S * (D + 2)] int8, in slots."""
    head_dim = units.shape[-1] // SLOTS - 2
    return units[..., : SLOTS * head_dim].view(*units.shape[:-1], SLOTS, head_dim)


def scales_of(units: torch.Tensor) -> torch.Tensor:
    """Return a view [..., S] fp16 of the scales of units [..., S * (D + 2)] int8."""
    return units[..., -2 * SLOTS :].view(torch.float16)


def write(units: torch.Tensor, block: torch.Tensor, slot: torch.Tensor, x: torch.Tensor) -> None:
    """Write tokens x [T, K, D] to slots `slot` [T] of blocks `block` [T]; units [B, K, S * (D + 2)]
    int8 in slots, keys or values of one layer."""
    values, scales = quantise(x)
    values_of(units)[block, :, slot] = values
    scales_of(units)[block, :, slot] = scales


def widen(units: torch.Tensor) -> torch.Tensor:
    """Return the KV [..., S, D] fp32 of units [..., S * (D + 2)] int8 in slots."""
    return values_of(units).float() * scales_of(units).float()[..., None]


def to_panels(blocks: torch.Tensor) -> torch.Tensor:
    """Return blocks [..., 2, K, S * (D + 2)] int8 in the order of the C kernels."""
    values = values_of(blocks)
    keys, values = values.unbind(-4)
    k = cut_dimension(keys.mT, -2, (-1, 4)).movedim(-2, -1)
    v = cut_dimension(values, -2, (-1, 4)).movedim(-2, -1)
    ordered = torch.stack([k.flatten(-3), v.flatten(-3)], -3)
    return torch.cat([ordered, blocks[..., -2 * SLOTS :]], -1)


def from_panels(blocks: torch.Tensor) -> torch.Tensor:
    """Return blocks [..., 2, K, S * (D + 2)] int8 in slots; undoes `to_panels`."""
    head_dim = blocks.shape[-1] // SLOTS - 2
    keys, values = blocks[..., : SLOTS * head_dim].unbind(-3)
    k = cut_dimension(keys, -1, (-1, SLOTS, 4)).movedim(-1, -2).flatten(-3, -2).mT
    v = cut_dimension(values, -1, (SLOTS // 4, -1, 4)).movedim(-1, -2).flatten(-3, -2)
    ordered = torch.stack([k.flatten(-2), v.flatten(-2)], -3)
    return torch.cat([ordered, blocks[..., -2 * SLOTS :]], -1)
