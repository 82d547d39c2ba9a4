"""A mixture of experts: a router sends each token to a few gated MLPs, and their outputs are
summed.

The router computes in fp32 and takes the first of equal scores, so that a token's experts do not
depend on its batch or device. `engine.models.decoder` builds it; `Ops.experts` computes.
"""

from __future__ import annotations

import torch

from engine.model_store import Architecture
from engine.models.layers import ExpertWeights, Mlp, Ops, Rows, TensorSource
from kernels.reference_experts import Routing


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
        self._mixed = ops.experts(
            ExpertWeights(
                router, router_bias, choice_bias, gate, gate_bias, up, up_bias, down, down_bias
            ),
            Routing(moe.top_k, moe.score, moe.renormalise, moe.scale, moe.groups, moe.groups_kept),
            "clamped" if moe.expert == "clamped" else config.activation,
        )
        self._shared = self._shared_gate = None
        if moe.shared:
            self._shared = Mlp(source, ops, config.activation, "mlp.shared_expert")
        if moe.shared == "gated":
            self._shared_gate = ops.linear(*source.joined("mlp.shared_expert_gate"))

    def __call__(self, x: torch.Tensor) -> Rows:
        """Return the layer's output [T, C] of x [T, C]."""
        if self._shared is None:
            return self._mixed(x, None)
        shared = self._shared(x)
        if self._shared_gate is not None:
            shared = shared * torch.sigmoid(self._shared_gate(x))
        return self._mixed(x, shared)
