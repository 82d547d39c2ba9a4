"""Mixtures of experts in plain torch: which experts a token takes, and what they compute.

The specification of `kernels.gpu.experts`; `engine.models.layers` runs it on any device. T tokens,
E experts of I channels, C hidden channels, k experts a token.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from kernels.reference import gated_mul

Score = Literal["softmax", "sigmoid", "chosen_softmax"]
ExpertActivation = Literal["silu", "gelu_tanh", "clamped"]

CLAMP, SHARPNESS = 7.0, 1.702
"""gpt-oss's gate: inputs within ±CLAMP, times the sigmoid of SHARPNESS times the gate."""


class Routing(NamedTuple):
    """How a router's logits become experts and weights; see `engine.model_store.Moe`.

    `shared`: each token takes a further expert, the last one: with a weight of 1 (`add`), or with
    the sigmoid of a further logit (`gated`).
    """

    top_k: int
    score: Score = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    shared: Literal["", "add", "gated"] = ""

    @property
    def choices(self) -> int:
        """Experts of a token."""
        return self.top_k + bool(self.shared)


class Block(NamedTuple):
    """Consecutive pairs of one expert, in the order of `sort_pairs`: [first, end)."""

    expert: int
    first: int
    end: int


def route(
    logits: torch.Tensor, routing: Routing, choice_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts in ascending order and their weights, both [T, choices].

    logits [T, E] fp32, or one more; choice_bias [E] fp32 is added for the choice and not for the
    weight. Of equal scores the first is taken.
    """
    gate = logits[:, -1:]
    if routing.shared == "gated":
        logits = logits[:, :-1]
    if routing.score == "chosen_softmax":
        best, experts = _top(logits, routing.top_k)
        weights = best.softmax(-1)
    else:
        scores = logits.sigmoid() if routing.score == "sigmoid" else logits.softmax(-1)
        choice = scores if choice_bias is None else scores + choice_bias
        if routing.groups > 1:
            choice = _in_best_groups(choice, routing, sums_two=choice_bias is not None)
        _, experts = _top(choice, routing.top_k)
        weights = scores.gather(1, experts)
        if routing.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * routing.scale
    experts, order = experts.sort(dim=-1)
    weights = weights.gather(1, order)
    if routing.shared:
        last = torch.full_like(experts[:, :1], logits.shape[1])
        own = gate.sigmoid() if routing.shared == "gated" else torch.ones_like(gate)
        experts, weights = torch.cat([experts, last], 1), torch.cat([weights, own], 1)
    return experts, weights


def sort_pairs(experts: torch.Tensor, block_size: int) -> tuple[torch.Tensor, list[Block]]:
    """Return the pairs (token, choice) by expert, then by token, and their blocks.

    experts [T, k]; pair p is choice p % k of token p // k. A block has at most `block_size` pairs.
    """
    chosen = experts.flatten()
    blocks: list[Block] = []
    end = 0
    for expert, count in enumerate(chosen.bincount().tolist()):
        start, end = end, end + count
        blocks += [
            Block(expert, first, min(first + block_size, end))
            for first in range(start, end, block_size)
        ]
    return chosen.argsort(stable=True), blocks


def experts(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor,
    gate_up: torch.Tensor, gate_up_bias: torch.Tensor | None,
    down: torch.Tensor, down_bias: torch.Tensor | None, activation: ExpertActivation,
) -> torch.Tensor:  # fmt: skip
    """Return the weighted sum of each token's experts, [T, C] in x's dtype. Waits for the device.

    x [T, C]; chosen, weights [T, k]; gate_up [E, 2I, C], the gate's rows before those of up, with
    biases [E, 2I]; down [E, C, I] with biases [E, C]. A token's experts are added in ascending
    order, in fp32.
    """
    out = torch.zeros_like(x, dtype=torch.float32)
    order, blocks = sort_pairs(chosen, chosen.numel() or 1)
    tokens = order // chosen.shape[1]
    factors = weights.flatten()[order, None]
    for expert, first, end in blocks:
        mine = tokens[first:end]
        up_bias = None if gate_up_bias is None else gate_up_bias[expert]
        hidden = activated(F.linear(x[mine], gate_up[expert], up_bias), activation)
        found = F.linear(hidden, down[expert], None if down_bias is None else down_bias[expert])
        out.index_add_(0, mine, found.float() * factors[first:end])
    return out.to(x.dtype)


def activated(hidden: torch.Tensor, activation: ExpertActivation) -> torch.Tensor:
    """Return the gated activation [T, I] of hidden [T, 2I], gate before up."""
    if activation != "clamped":
        return gated_mul(hidden, activation)
    gate, up = hidden.chunk(2, -1)
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return (up + 1) * gate * torch.sigmoid(SHARPNESS * gate)


def _in_best_groups(choice: torch.Tensor, routing: Routing, *, sums_two: bool) -> torch.Tensor:
    """Return the scores [T, E], minus infinity outside the best groups.

    A group's score is that of its best expert, or with `sums_two` the sum of its best two.
    """
    tokens = len(choice)
    groups = choice.view(tokens, routing.groups, -1)
    best = groups.topk(2)[0].sum(-1) if sums_two else groups.amax(-1)
    _, kept = _top(best, routing.groups_kept)
    is_kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, value=True)
    return groups.masked_fill(~is_kept[..., None], -math.inf).view(tokens, -1)


def _top(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` best scores of each row and their indices, the first of equals first."""
    best, indices = scores.sort(dim=-1, descending=True, stable=True)
    return best[:, :count], indices[:, :count]
