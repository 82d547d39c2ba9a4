"""Mixtures of experts on a GPU: weights in the kernels' layout, and the launches of a layer.

Nothing waits for the device. `engine.models.gpu_layers` builds it; `kernels.gpu.experts` computes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.models.layers import ExpertWeights
from kernels.gpu import experts
from kernels.gpu.experts import ExpertMatrix
from kernels.gpu.products import Fp8, Fp8Rows, fp8_of, round_rows
from kernels.reference_experts import ExpertActivation, Routing
from kernels.reference_weights import Packed, Weight, as_dense, panels

ROUTER_ROWS = 8
"""A router's matrix is padded to a multiple of so many rows."""


class GpuExperts:
    """The experts of a layer.

    Rows of gate and up alternate, so that a tile of the product has both. Packed weights stay so.
    """

    def __init__(
        self, weights: ExpertWeights, routing: Routing, activation: ExpertActivation
    ) -> None:
        self.routing = routing
        self.activation = activation
        self.count = weights.gate.shape[0]
        self._router_rows = len(weights.router)
        # Whole multiples of 16 bytes: products of other widths take several times as long.
        self.router = F.pad(weights.router, (0, 0, 0, -self._router_rows % ROUTER_ROWS))
        self.router_bias = weights.router_bias
        self.choice_bias = weights.choice_bias
        gate_up_bias = None
        if weights.gate_bias is not None and weights.up_bias is not None:
            gate_up_bias = torch.stack([weights.gate_bias, weights.up_bias], 2).flatten(1)
        self.gate_up = _matrix(_in_turns(weights.gate, weights.up), gate_up_bias)
        self.down = _matrix(weights.down, weights.down_bias)

    def __call__(self, x: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
        """Return the sum of the tokens' experts, and of `shared`, [T, C] of x [T, C]."""
        routing = self.routing
        x = x.contiguous()
        logits = router_logits(x, self.router)[:, : self._router_rows]
        tile = experts.tile_of(len(x), self.gate_up.kind)
        weights, order, blocks = experts.choose(
            logits, routing, self.router_bias, self.choice_bias, self.count, tile.pairs
        )
        hidden = experts.expert_product(
            rows_for(x, self.gate_up), self.gate_up, order, blocks, routing.choices, tile,
            dtype=x.dtype, activation=self.activation,
        )  # fmt: skip
        found = experts.expert_product(
            rows_for(hidden, self.down), self.down, order, blocks, routing.choices, tile,
            dtype=x.dtype,
        )  # fmt: skip
        return experts.add_experts(found, weights, shared)


def rows_for(x: torch.Tensor, matrix: ExpertMatrix) -> torch.Tensor | Fp8Rows:
    """Return rows x as the matrix multiplies them."""
    values = matrix.values
    return round_rows(x, values.scales.shape[1]) if isinstance(values, Fp8) else x


def router_logits(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """Return x @ router.T [T, E], with sums and result in fp32."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, router.T, out_dtype=torch.float32)
    return F.linear(x.float(), router.float())


def _in_turns(gate: Weight, up: Weight) -> Weight:
    """Return stacks [E, I, K] as one [E, 2I, K] with alternating rows; those of unlike kinds, such
    as one of MXFP4 beside one whose scales the kernels do not hold, unpacked."""

    def turns(*parts: torch.Tensor) -> torch.Tensor:
        return torch.stack(parts, 2).flatten(1, 2)

    packed = [w for w in (gate, up) if isinstance(w, Packed)]
    if len(packed) == 2 and len({(w.kind, w.group) for w in packed}) == 1:
        return packed[0].with_parts(*map(turns, packed[0].parts, packed[1].parts))
    dtype = next((w.dtype for w in (gate, up) if isinstance(w, torch.Tensor)), torch.bfloat16)
    return turns(as_dense(gate, dtype), as_dense(up, dtype))


def _matrix(weights: Weight, bias: torch.Tensor | None) -> ExpertMatrix:
    """Return matrices [E, N, K] in the kernels' layout."""
    _, rows, columns = weights.shape
    if isinstance(weights, torch.Tensor):
        return ExpertMatrix(weights, rows, columns, bias)
    values = panels(weights) if weights.kind == "mxfp4" else fp8_of(weights)
    return ExpertMatrix(values, rows, columns, bias)
