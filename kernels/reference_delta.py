"""The gated delta rule in plain torch: the specification of every kernel for it.

`gated_delta` follows the rule token by token (Gated DeltaNet, arXiv:2412.06464);
`gated_delta_token` is one token of many sequences at once. `gated_delta_chunk` is the same in
chunks, each a few matrix products: within a chunk the corrections that tokens make to each other
are a triangular system (the WY form, arXiv:2406.06484).
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

CHUNK: Final = 64
"""Tokens of a chunk."""
NORM_EPS: Final = 1e-6


def unit(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., D] with a length of about 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def delta_inputs(
    mixed: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor,
    dt_bias: torch.Tensor, keys: int, key_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return q, k, v, decay and beta as the rule takes them, in fp32 at least.

    mixed [n, 2 * keys + H * V]: queries, keys and values of a layer; each of the keys / key_dim key
    heads serves as many consecutive value heads. beta, decay [n, H]: the logits of both. rate,
    dt_bias [H].
    """
    heads, wide = beta.shape[1], torch.promote_types(mixed.dtype, torch.float32)
    q, k, v = torch.split(mixed.to(wide), [keys, keys, mixed.shape[1] - 2 * keys], dim=1)
    q, k = (
        unit(part.reshape(len(part), -1, key_dim)).repeat_interleave(heads * key_dim // keys, dim=1)
        for part in (q, k)
    )
    step = F.softplus(decay.to(wide) + dt_bias.to(wide))
    return (
        q * key_dim**-0.5, k, v.reshape(len(v), heads, -1), -rate.to(wide) * step,
        torch.sigmoid(beta.to(wide)),
    )  # fmt: skip


def gated_delta_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return what a token of each of R sequences reads, [R, H, V], and the states after them.

    q, k [R, H, K], unit vectors of each value head, q divided by the root of K. v [R, H, V]. decay
    [R, H], the logarithms of factors up to 1; beta [R, H], from 0 to 1; state [R, H, K, V]. fp32 or
    fp64. A token decays the state, replaces beta of what it has at k by v, and reads it at q.
    """
    state = state * decay.exp()[..., None, None]
    found = (k[:, :, None] @ state).squeeze(2)
    change = (v - found) * beta[..., None]
    state = state + k[..., None] * change[:, :, None]
    return (q[:, :, None] @ state).squeeze(2), state


def gated_delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return what each token of one sequence reads, [n, H, V], and the state after them.

    Shapes as in `gated_delta_token`, n tokens for R; state [H, K, V].
    """
    out, states = torch.empty_like(v), state[None]
    for token in range(len(v)):
        one = slice(token, token + 1)
        out[one], states = gated_delta_token(q[one], k[one], v[one], decay[one], beta[one], states)
    return out, states[0]


def gated_delta_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the same as `gated_delta`, in chunks of `CHUNK` tokens, up to rounding.

    With D the decays from the beginning of a chunk, the changes U of its tokens solve
    (1 + tril(beta D_i / D_j k_i k_j, -1)) U = beta (V - D k state).
    """
    outputs = []
    for start in range(0, len(v), CHUNK):
        part = slice(start, start + CHUNK)
        qs, ks, vs = (x[part].transpose(0, 1) for x in (q, k, v))  # [H, c, ...]
        by, gain = decay[part].T.cumsum(1), beta[part].T[..., None]
        ratio = (by[:, :, None] - by[:, None, :]).exp()
        system = (ks @ ks.transpose(1, 2) * ratio * gain).tril(-1)
        wanted = gain * (vs - by.exp()[..., None] * (ks @ state))
        changes = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        own = (qs @ ks.transpose(1, 2) * ratio).tril()
        outputs.append(by.exp()[..., None] * (qs @ state) + own @ changes)
        rest = (by[:, -1:] - by).exp()[..., None]
        state = by[:, -1].exp()[:, None, None] * state + (ks * rest).transpose(1, 2) @ changes
    return torch.cat(outputs, 1).transpose(0, 1), state
