"""KV blocks that are hard to pack: outliers, constants, zeros, denormals, offsets; seeded."""

from __future__ import annotations

import torch

from kernels import reference_int8

HARD_KINDS = 9


def hard_block(kind: int, shape: tuple[int, int, int], generator: torch.Generator) -> torch.Tensor:
    """Return a block [L, 2, K, 16, D] fp32 for shape (L, K, D); `kind` 0 is plain noise."""
    layers, kv_heads, head_dim = shape

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    x = noise(layers, 2, kv_heads, 16, head_dim)
    if kind == 1:  # a few outliers
        at = torch.randint(0, x.numel(), (5,), generator=generator)
        x.view(-1)[at] *= 1e4
    elif kind == 2:
        x[:] = float(noise(1))
    elif kind == 3:
        x.zero_()
    elif kind == 4:  # denormals of fp32 and of bf16
        x *= 1e-40
    elif kind == 5:  # one channel far from the rest, which the rotation turns into an offset
        x[..., 0] = 1e4 * float(noise(1))
    elif kind == 6:  # channels with an offset and a scale each, as keys have
        x = x * noise(head_dim).exp() * 3 + 20 * noise(head_dim)
    elif kind == 7:  # of any size
        x *= 10.0 ** int(torch.randint(-8, 3, (1,), generator=generator))
    elif kind == 8:  # slots of very different sizes, some zero
        x *= noise(16, 1).exp() ** 2 * (noise(16, 1) > -1)
    return x


def hard_blocks(
    count: int, shape: tuple[int, int, int], dtype: torch.dtype, seed: int
) -> torch.Tensor:
    """Return blocks [count, L, 2, K, 16, D] of all kinds in turn."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [hard_block(index % HARD_KINDS, shape, generator) for index in range(count)]
    return torch.stack(blocks).to(dtype)


def int8_units(kv: torch.Tensor) -> torch.Tensor:
    """Return KV [..., S, D] as an int8 pool in slots holds it, [..., S * (D + 2)] int8."""
    values, scales = reference_int8.quantise(kv)
    return torch.cat([values.flatten(-2), scales.view(torch.int8)], -1)
