"""Blocks of GGUF files that stay packed: those of 4 bits, by rows of `Packed`.

A block has the scales of its values and then their codes. Of 32 codes the first half are the low
halves of 16 bytes, the second half the high ones. It knows no file; `engine.weights.weights` reads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.reference_weights import GROUP, Packed


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    """Return bytes [..., G, 16], whose halves are 16 codes each, as rows of pairs of columns."""
    whole = torch.cat([codes & 15, codes >> 4], -1)
    return (whole[..., 0::2] | whole[..., 1::2] << 4).flatten(-2)


def _halves(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Return the fp16 at a byte of each block, in fp32."""
    return blocks[..., first : first + 2].contiguous().view(torch.float16)[..., 0].float()


def _mxfp4(blocks: torch.Tensor) -> Packed:
    return Packed("mxfp4", _pairs(blocks[..., 1:]), blocks[..., 0].contiguous(), GROUP)


def _q4_0(blocks: torch.Tensor) -> Packed:
    """Read scale * (code - 8)."""
    scales = _halves(blocks, 0)
    return Packed("int4", _pairs(blocks[..., 2:]), scales, GROUP, scales * -8)


def _q4_1(blocks: torch.Tensor) -> Packed:
    return Packed("int4", _pairs(blocks[..., 4:]), _halves(blocks, 0), GROUP, _halves(blocks, 2))


def _q4_k(blocks: torch.Tensor) -> Packed:
    """Read 256 values: eight scales and minima of 6 bits, in units of the block's own."""
    few = blocks[..., 4:16].reshape(*blocks.shape[:-1], 3, 4)
    first, second, third = few[..., 0, :], few[..., 1, :], few[..., 2, :]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6) << 4], -1).float()
    minima = torch.cat([second & 63, (third >> 4) | (second >> 6) << 4], -1).float()
    scales = scales * _halves(blocks, 0)[..., None]
    minima = minima * -_halves(blocks, 2)[..., None]
    halves = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)  # 32 bytes have two groups of 32
    whole = torch.stack([halves & 15, halves >> 4], -2).flatten(-3, -2)
    pairs = (whole[..., 0::2] | whole[..., 1::2] << 4).flatten(-3)
    return Packed("int4", pairs, scales.flatten(-2), GROUP, minima.flatten(-2))


PACKED_BLOCKS: dict[str, Callable[[torch.Tensor], Packed]] = {
    "MXFP4": _mxfp4,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
}
"""Readers of blocks [..., bytes] by the name of their type."""
