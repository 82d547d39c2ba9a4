"""A mixture of experts: a router sends each token to a few gated MLPs, whose outputs are summed.

The router computes in fp32 and takes the first of equal scores, so that a token's experts do not
depend on its batch or device. `engine.models.decoder` builds it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from engine.model_store import Architecture
from engine.models.layers import Mlp, Ops, TensorSource, gated

CLAMP, SHARPNESS = 7.0, 1.702
"""gpt-oss's gate: inputs within ±CLAMP, times the sigmoid of SHARPNESS times the gate."""


class Experts:
    """The experts of a layer, and the MLP that all tokens take, if there is one.

    `gate_up` [E, 2I, C], `down` [E, C, I]; E experts of I channels.
    """

    def __init__(self, config: Architecture, source: TensorSource, ops: Ops) -> None:
        assert config.moe is not None
        self._moe = config.moe
        self._activation = config.activation
        self._router, self._router_bias = source.joined("mlp.gate")
        self._choice_bias = None
        if config.moe.choose_by_bias:
            self._choice_bias = source.tensor("mlp.gate.e_score_correction_bias").float()
        self._gate_up, self._gate_up_bias = source.joined(
            "mlp.experts.gate_proj", "mlp.experts.up_proj", dim=1
        )
        self._down, self._down_bias = source.joined("mlp.experts.down_proj")
        self._shared = self._shared_gate = None
        if config.moe.shared:
            self._shared = Mlp(source, ops, config.activation, "mlp.shared_expert")
        if config.moe.shared == "gated":
            self._shared_gate = ops.linear(*source.joined("mlp.shared_expert_gate"))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output [T, C] of x [T, C]. Waits for the device once."""
        experts, weights = self.route(x)
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)  # by expert, then by token: a token's sum has one order
        tokens = order // self._moe.top_k
        weights = weights.flatten()[order, None]
        out = torch.zeros_like(x, dtype=torch.float32)
        end = 0
        for expert, count in enumerate(chosen.bincount().tolist()):
            if not count:
                continue
            start, end = end, end + count
            found = self._expert(expert, x[tokens[start:end]])
            out.index_add_(0, tokens[start:end], found.float() * weights[start:end])
        out = out.to(x.dtype)
        if self._shared is None:
            return out
        shared = self._shared(x)
        if self._shared_gate is not None:
            shared = shared * torch.sigmoid(self._shared_gate(x))
        return out + shared

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts of each token and their weights, both [T, top_k], for x [T, C]."""
        moe = self._moe
        bias = None if self._router_bias is None else self._router_bias.float()
        logits = F.linear(x.float(), self._router.float(), bias)
        if moe.score == "chosen_softmax":
            top, experts = _top(logits, moe.top_k)
            return experts, top.softmax(-1)
        scores = logits.sigmoid() if moe.score == "sigmoid" else logits.softmax(-1)
        choice = scores if self._choice_bias is None else scores + self._choice_bias
        if moe.groups > 1:
            choice = self._in_best_groups(choice)
        _, experts = _top(choice, moe.top_k)
        weights = scores.gather(1, experts)
        if moe.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * moe.scale

    def _in_best_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """Return the scores [T, E], minus infinity outside the best groups."""
        moe, tokens = self._moe, len(choice)
        groups = choice.view(tokens, moe.groups, -1)
        best = groups.topk(2)[0].sum(-1) if moe.choose_by_bias else groups.amax(-1)
        _, kept = _top(best, moe.groups_kept)
        is_kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, value=True)
        return groups.masked_fill(~is_kept[..., None], -math.inf).view(tokens, -1)

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        up_bias, down_bias = self._gate_up_bias, self._down_bias
        hidden = F.linear(x, self._gate_up[expert], None if up_bias is None else up_bias[expert])
        if self._moe.expert == "clamped":
            gate, up = hidden.chunk(2, -1)
            gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
            hidden = (up + 1) * gate * torch.sigmoid(SHARPNESS * gate)
        else:
            hidden = gated(hidden, self._activation)
        return F.linear(
            hidden, self._down[expert], None if down_bias is None else down_bias[expert]
        )


def _top(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` best scores of each row and their indices, the first of equals first."""
    best, indices = scores.sort(dim=-1, descending=True, stable=True)
    return best[:, :count], indices[:, :count]
