"""Blocks of GGUF files that stay packed, by rows of `Packed`; codes of 5 and 6 bits as 8.

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


def _factors(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eight scales and minima of 6 bits, in units of the block's own."""
    few = blocks[..., 4:16].reshape(*blocks.shape[:-1], 3, 4)
    first, second, third = few[..., 0, :], few[..., 1, :], few[..., 2, :]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6) << 4], -1).float()
    minima = torch.cat([second & 63, (third >> 4) | (second >> 6) << 4], -1).float()
    scales = scales * _halves(blocks, 0)[..., None]
    minima = minima * -_halves(blocks, 2)[..., None]
    return scales.flatten(-2), minima.flatten(-2)


def _groups_of_halves(codes: torch.Tensor) -> torch.Tensor:
    """Return the codes of 128 bytes as groups [..., 8, 32]: 32 bytes have two of them."""
    halves = codes.reshape(*codes.shape[:-1], 4, 32)
    return torch.stack([halves & 15, halves >> 4], -2).flatten(-3, -2)


def _q4_k(blocks: torch.Tensor) -> Packed:
    """Read 256 values in eight groups."""
    scales, minima = _factors(blocks)
    whole = _groups_of_halves(blocks[..., 16:])
    pairs = (whole[..., 0::2] | whole[..., 1::2] << 4).flatten(-3)
    return Packed("int4", pairs, scales, GROUP, minima)


def _int8(
    codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None = None, group: int = 32
) -> Packed:
    """Return codes [..., blocks, values] of 8 bits."""
    minima = torch.zeros_like(scales) if minima is None else minima
    return Packed("int8", codes.flatten(-2).to(torch.int8).contiguous(), scales, group, minima)


def _q8_0(blocks: torch.Tensor) -> Packed:
    return _int8(blocks[..., 2:].contiguous().view(torch.int8), _halves(blocks, 0))


def _five_bits(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Return 32 codes, whose fifth bits are four bytes at `first`, followed by the rest."""
    low = torch.cat([blocks[..., first + 4 :] & 15, blocks[..., first + 4 :] >> 4], -1)
    bits = torch.arange(8, dtype=torch.uint8)
    high = (blocks[..., first : first + 4, None] >> bits & 1).flatten(-2)
    return low | high << 4


def _q5_0(blocks: torch.Tensor) -> Packed:
    """Read scale * (code - 16)."""
    return _int8(_five_bits(blocks, 2).to(torch.int8) - 16, _halves(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> Packed:
    return _int8(_five_bits(blocks, 4), _halves(blocks, 0), _halves(blocks, 2))


def _q5_k(blocks: torch.Tensor) -> Packed:
    """Read 256 values in eight groups, each with a bit of 32 bytes."""
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    high = blocks[..., None, 16:48] >> bits & 1
    codes = _groups_of_halves(blocks[..., 48:]) | high << 4
    return _int8(codes.flatten(-2), *_factors(blocks))


def _q6_k(blocks: torch.Tensor) -> Packed:
    """Read 256 values in sixteen groups of 16, whose scales have 8 bits: scale * (code - 32)."""
    low = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64)
    low = torch.cat([low & 15, low >> 4], -1)  # four times 32 values of each half
    pairs = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    codes = low | ((pairs >> shifts & 3) << 4).flatten(-2)
    scales = blocks[..., 192:208].contiguous().view(torch.int8) * _halves(blocks, 208)[..., None]
    return _int8(codes.flatten(-2).to(torch.int8) - 32, scales.flatten(-2), group=16)


PACKED_BLOCKS: dict[str, Callable[[torch.Tensor], Packed]] = {
    "MXFP4": _mxfp4,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
}
"""Readers of blocks [..., bytes] by the name of their type."""
