"""The rule of Mamba-2 in plain torch: the specification of every kernel for it.

`mamba2` follows the rule token by token (arXiv:2405.21060). `mamba2_chunk` is the same in chunks,
each a few matrix products, and `mamba2_token` one token of many sequences at once.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

CHUNK: Final = 64
"""Tokens of a chunk."""


def mamba2_inputs(
    mixed: torch.Tensor, step: torch.Tensor, rate: torch.Tensor, dt_bias: torch.Tensor, inner: int,
    groups: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return x, decay, b and c as the rule takes them, and x without its step, in fp32 at least.

    mixed [n, inner + 2 * G * N]: inputs of all heads, what is written and what is read. step [n,
    H]: the logits of the steps. rate, dt_bias [H].
    """
    wide = torch.promote_types(mixed.dtype, torch.float32)
    written = (mixed.shape[1] - inner) // 2
    x, b, c = torch.split(mixed.to(wide), [inner, written, written], dim=1)
    b, c = (part.reshape(len(part), groups, -1) for part in (b, c))
    heads = x.reshape(len(x), step.shape[1], -1)
    step = F.softplus(step.to(wide) + dt_bias.to(wide))
    return heads * step[..., None], -rate.to(wide) * step, b, c, heads


def mamba2_token(
    x: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a token of each of R sequences reads, [R, H, P], and the states after them.

    x [R, H, P], times the token's step. decay [R, H], the logarithms of factors up to 1. b, c
    [R, G, N]: what is written and read, each for H / G consecutive heads. state [R, H, P, N]. fp32
    or fp64. A token decays the state, adds x times b, and reads it at c.
    """
    heads = x.shape[1] // b.shape[1]
    b, c = (part.repeat_interleave(heads, dim=1) for part in (b, c))
    state = state * decay.exp()[..., None, None] + x[..., None] * b[:, :, None]
    return (state @ c[..., None]).squeeze(-1), state


def mamba2(
    x: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what each token of one sequence reads, [n, H, P], and the state after them.

    Shapes as in `mamba2_token`, n tokens for R; state [H, P, N].
    """
    out, states = torch.empty_like(x), state[None]
    for token in range(len(x)):
        one = slice(token, token + 1)
        out[one], states = mamba2_token(x[one], decay[one], b[one], c[one], states)
    return out, states[0]


def mamba2_chunk(
    x: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same as `mamba2`, in chunks of `CHUNK` tokens, up to rounding.

    With D the decays from the beginning of a chunk, a token reads D c state from before it, and
    tril(D_i / D_j c_i b_j) x from the chunk.
    """
    shape, by_group = state.shape, (b.shape[1], x.shape[1] // b.shape[1])  # (G, H / G)
    state = state.view(*by_group, *shape[1:])  # [G, H / G, P, N]
    outputs = []
    for start in range(0, len(x), CHUNK):
        part = slice(start, start + CHUNK)
        xs = x[part].view(-1, *by_group, x.shape[2]).permute(1, 2, 0, 3)  # [G, H / G, tokens, P]
        bs, cs = (one[part].transpose(0, 1)[:, None] for one in (b, c))  # [G, 1, tokens, N]
        by = decay[part].view(-1, *by_group).cumsum(0).permute(1, 2, 0)  # [G, H / G, tokens]
        ratio = (by[..., :, None] - by[..., None, :]).exp()
        own = (cs @ bs.mT * ratio).tril() @ xs
        outputs.append((own + by.exp()[..., None] * (cs @ state.mT)).flatten(0, 1))
        rest = (by[..., -1:] - by).exp()[..., None]
        state = by[..., -1].exp()[..., None, None] * state + (xs * rest).mT @ bs
    return torch.cat(outputs, 1).transpose(0, 1), state.reshape(shape)
