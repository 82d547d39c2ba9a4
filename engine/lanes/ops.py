"""The layer operations of one lane: maps whose results are parts of a sum, and norms that add them.

A lane's model is `engine.models.decoder.DecoderModel` of the lane's shape, over these operations.
It knows no architecture. Runner builders pass `LaneOps` to a model's constructor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.lanes.exchange import Exchange
from engine.models.gpu_layers import Fp8Linear, GpuOps
from engine.models.layers import Activation, ExpertWeights, Linear, MixedExperts, PartLinear, Rows
from kernels.gpu import products
from kernels.reference_experts import ExpertActivation, Routing
from kernels.reference_weights import Packed, Weight


@dataclass(frozen=True, slots=True)
class SumPart:
    """A lane's part of rows [T, C], which are the sum over all lanes."""

    rows: torch.Tensor

    def __add__(self, other: SumPart) -> SumPart:
        """Return a part of both sums together."""
        return SumPart(self.rows + other.rows)

    def __mul__(self, factor: float | torch.Tensor) -> SumPart:
        """Return a part of the sum times a factor that all lanes have."""
        return SumPart(self.rows * factor)


class LanePartLinear:
    """The map of a weight whose inputs lanes share: x of this lane's inputs to a part."""

    def __init__(
        self, exchange: Exchange, weight: Weight, bias: torch.Tensor | None, inner: Linear
    ) -> None:
        self._exchange, self._bias, self.inner = exchange, bias, inner
        self._weight = None if isinstance(weight, Packed) else weight.T

    def __call__(self, x: Rows) -> SumPart:
        """Return a part [T, C]; of a matrix it lies where its peers read it."""
        if self._weight is None:
            return SumPart(self.inner(x))
        out = self._exchange.part(len(x))
        if self._bias is None:
            return SumPart(torch.mm(x, self._weight, out=out))
        return SumPart(torch.addmm(self._bias, x, self._weight, out=out))


class LaneOps(GpuOps):
    """`engine.models.layers.Ops` of a lane."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def embed(self, token_ids: torch.Tensor, weight: torch.Tensor) -> Rows:
        """Return a part: rows of the vocabulary that this lane lacks are zeros. Begins a step."""
        self._exchange.begin()
        own = len(weight)
        local = token_ids - self._exchange.lane * own
        is_elsewhere = (local < 0) | (local >= own)
        rows = F.embedding(local.clamp(0, own - 1), weight)
        return SumPart(rows.masked_fill_(is_elsewhere[:, None], 0.0))

    def part_linear(self, weight: Weight, bias: torch.Tensor | None) -> PartLinear:
        return LanePartLinear(self._exchange, weight, bias, self.linear(weight, bias))

    def head(self, weight: Weight) -> Linear:
        exchange, inner = self._exchange, self.linear(weight, None)
        if isinstance(weight, Packed):
            return lambda x: exchange.gather(inner(x))
        columns = weight.T
        return lambda x: exchange.gather(torch.mm(x, columns, out=exchange.logits_part(len(x))))

    def total(self, x: Rows) -> torch.Tensor:
        if not isinstance(x, SumPart):
            whole: torch.Tensor = x
            return whole
        total = torch.empty_like(x.rows)
        self._exchange.sum(x.rows, total, add=False)
        return total

    def norm(
        self, x: Rows, residual: torch.Tensor | None, weight: torch.Tensor, eps: float,
        into: PartLinear | None = None,
    ) -> tuple[Rows, torch.Tensor]:  # fmt: skip
        if not isinstance(x, SumPart):
            return super().norm(x, residual, weight, eps, into)
        rows = x.rows
        total = torch.empty_like(rows) if residual is None else residual
        add = residual is not None
        if isinstance(into, Fp8Linear):
            packed = products.empty_rows(rows, rows.shape[1], into.groups)
            self._exchange.sum(
                rows, total, add=add, weight=weight, out=packed.codes, eps=eps, scales=packed.scales
            )
            return packed, total
        out = torch.empty_like(rows)
        self._exchange.sum(rows, total, add=add, weight=weight, out=out, eps=eps)
        return out, total

    def gated(
        self, x: torch.Tensor, activation: Activation, into: PartLinear | None = None
    ) -> Rows:
        inner = into.inner if isinstance(into, LanePartLinear) else into
        return super().gated(x, activation, inner)

    def experts(
        self, weights: ExpertWeights, routing: Routing, activation: ExpertActivation
    ) -> MixedExperts:
        inner = super().experts(weights, routing, activation)

        def mixed(x: torch.Tensor, shared: Rows | None) -> Rows:
            return SumPart(inner(x, shared.rows if isinstance(shared, SumPart) else None))

        return mixed
