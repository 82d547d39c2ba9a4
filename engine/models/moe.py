"""A mixture of experts: a router sends each token to a few gated MLPs, and their outputs are
summed.

The router computes in fp32 and takes the first of equal scores, so that a token's experts do not
depend on its batch or device. An MLP that all tokens take is one more expert if it has the size of
one: it needs no launches of its own then. `engine.models.decoder` builds it; `Ops.experts`
computes.
"""

from __future__ import annotations

import torch

from engine.model_store import Architecture, Moe
from engine.models.layers import ExpertWeights, Mlp, Ops, Rows, TensorSource, join
from kernels.reference_experts import Routing
from kernels.reference_weights import Packed, Weight, each

SHARED = "mlp.shared_expert"


class Experts:
    """The experts of a layer, and the MLP that all tokens take, if there is one. Several maps read
    their input, so that it has no `reader`."""

    def __init__(self, config: Architecture, source: TensorSource, ops: Ops) -> None:
        moe = config.moe
        assert moe is not None
        assert config.activation != "relu2", "experts have gates"
        choice_bias = None
        if moe.choose_by_bias:
            choice_bias = source.tensor("mlp.gate.e_score_correction_bias").float()
        self.reader = None
        router, router_bias = source.whole("mlp.gate")
        gate, gate_bias = source.joined("mlp.experts.gate_proj")
        up, up_bias = source.joined("mlp.experts.up_proj")
        down, down_bias = source.joined("mlp.experts.down_proj")
        weights = ExpertWeights(
            router, router_bias, choice_bias, gate, gate_bias, up, up_bias, down, down_bias
        )
        is_expert = _is_like_an_expert(moe, weights, source)
        if is_expert:
            weights = _with_shared(weights, source, is_gated=moe.shared == "gated")
        self._mixed = ops.experts(
            weights,
            Routing(moe.top_k, moe.score, moe.renormalise, moe.scale, moe.groups, moe.groups_kept,
                    moe.shared if is_expert else ""),
            "clamped" if moe.expert == "clamped" else config.activation,
        )  # fmt: skip
        self._shared = self._shared_gate = None
        if moe.shared and not is_expert:
            self._shared = Mlp(source, ops, config.activation, SHARED)
            if moe.shared == "gated":
                self._shared_gate = ops.linear(*source.joined(f"{SHARED}_gate"))

    def __call__(self, x: torch.Tensor) -> Rows:
        """Return the layer's output [T, C] of x [T, C]."""
        if self._shared is None:
            return self._mixed(x, None)
        shared = self._shared(x)
        if self._shared_gate is not None:
            shared = shared * torch.sigmoid(self._shared_gate(x))
        return self._mixed(x, shared)


def _is_like_an_expert(moe: Moe, weights: ExpertWeights, source: TensorSource) -> bool:
    """Return whether a layer's shared MLP may be one more of its experts: it has their size and
    activation, is packed as they are, and none has biases."""
    if not moe.shared or moe.shared_intermediate != moe.intermediate or moe.expert == "clamped":
        return False
    biases = (weights.gate_bias, source.peek(f"{SHARED}.gate_proj.bias"))
    of_experts = (weights.gate, weights.up, weights.down)
    of_shared = (source.peek(f"{SHARED}.{name}_proj.weight") for name in ("gate", "up", "down"))
    pairs = zip(of_experts, of_shared, strict=True)
    return biases == (None, None) and all(_form(one) == _form(other) for one, other in pairs)


def _form(weight: Weight | None) -> object:
    return (weight.kind, weight.group) if isinstance(weight, Packed) else weight is None


def _with_shared(w: ExpertWeights, source: TensorSource, *, is_gated: bool) -> ExpertWeights:
    """Return the experts with the shared one as the last, and its gate as the router's last row."""

    def more(weight: Weight, name: str) -> Weight:
        own, _ = source.joined(f"{SHARED}.{name}_proj")
        return join([weight, each(own, lambda part: part[None])], 0)

    router = w.router
    if is_gated:
        gate, _ = source.whole(f"{SHARED}_gate")
        router = torch.cat([router, gate])
    gate_up = more(w.gate, "gate"), None, more(w.up, "up"), None
    return ExpertWeights(
        router, w.router_bias, w.choice_bias, *gate_up, more(w.down, "down"), w.down_bias
    )
