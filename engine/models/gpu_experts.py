"""Mixtures of experts on a GPU: weights in the kernels' layout, and the launches of a layer.

Nothing waits for the device. `engine.models.gpu_layers` builds it; `kernels.gpu.experts` computes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.models.layers import ExpertWeights
from kernels.gpu import experts
from kernels.gpu.experts import ExpertMatrix
from kernels.reference_experts import ExpertActivation, Routing
from kernels.reference_mxfp4 import Mxfp4, pack


class GpuExperts:
    """The experts of a layer.

    Rows of gate and up alternate, so that a tile of the product has both. Weights that MXFP4 holds
    exactly are kept packed: a quarter of the memory, and of the time to read it.
    """

    def __init__(
        self, weights: ExpertWeights, routing: Routing, activation: ExpertActivation
    ) -> None:
        self.routing = routing
        self.activation = activation
        self.router, self.router_bias = weights.router, weights.router_bias
        self.choice_bias = weights.choice_bias
        gate_up_bias = None
        if weights.gate_bias is not None and weights.up_bias is not None:
            gate_up_bias = torch.stack([weights.gate_bias, weights.up_bias], 2).flatten(1)
        gate_up = torch.stack([weights.gate, weights.up], 2).flatten(1, 2)
        self.gate_up = _matrix(gate_up, gate_up_bias)
        self.down = _matrix(weights.down, weights.down_bias)
        self._is_packed = isinstance(self.gate_up.values, Mxfp4)

    def __call__(self, x: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
        """Return the sum of the tokens' experts, and of `shared`, [T, C] of x [T, C]."""
        routing = self.routing
        x = x.contiguous()
        ids, weights = experts.route(
            router_logits(x, self.router), routing, self.router_bias, self.choice_bias
        )
        tile = experts.tile_of(len(x), is_packed=self._is_packed)
        order, blocks = experts.sort_pairs(ids, len(self.router), tile.pairs)
        hidden = experts.expert_product(
            x, self.gate_up, order, blocks, routing.top_k, tile, activation=self.activation
        )
        found = experts.expert_product(hidden, self.down, order, blocks, routing.top_k, tile)
        return experts.add_experts(found, weights, shared)


def router_logits(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """Return x @ router.T [T, E], with sums and result in fp32."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, router.T, out_dtype=torch.float32)
    return F.linear(x.float(), router.float())


def _matrix(weights: torch.Tensor, bias: torch.Tensor | None) -> ExpertMatrix:
    """Return matrices [E, N, K], packed if MXFP4 holds each of their values."""
    _, rows, columns = weights.shape
    packed: list[Mxfp4] = []
    for weight in weights:
        one = pack(weight)
        if one is None:
            return ExpertMatrix(weights, rows, columns, bias)
        packed.append(one)
    values, scales = (torch.stack(parts) for parts in zip(*packed, strict=True))
    return ExpertMatrix(Mxfp4(values, scales), rows, columns, bias)
