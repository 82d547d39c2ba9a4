"""Layer operations between attentions: linear maps, norms, gated activations, experts.

`Ops` is the set of operations of one device; a model's constructor receives one and builds its
layers from it. `TorchOps` here is plain torch; `engine.models.gpu_layers` launches fused kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from engine.weights import Weights
from kernels import reference, reference_experts
from kernels.reference_experts import ExpertActivation, Routing
from kernels.reference_weights import Packed, Weight, as_dense

Rows = Any
"""Rows [T, C] of activations: a tensor, what the only linear map that reads them takes, or one
GPU's part of a sum over several (`engine.lanes.ops.SumPart`), which norms and `Ops.total` add."""

Linear = Callable[[Rows], torch.Tensor]
PartLinear = Callable[[Rows], Rows]
"""A linear map whose inputs several GPUs may share: to rows, or to a part of a sum."""
Activation = Literal["silu", "gelu_tanh"]
MixedExperts = Callable[[torch.Tensor, Rows | None], Rows]
"""Maps x [T, C], and the output [T, C] of an MLP that all tokens take, to their sum."""


class ExpertWeights(NamedTuple):
    """A layer's experts, E of I channels, and their router. Biases are None if there are none.

    Takes no part in a step: operations copy what they need in their own layout.
    """

    router: torch.Tensor  # [E, C]; with a shared expert, the last one, a row less if it is added
    router_bias: torch.Tensor | None  # [E]
    choice_bias: torch.Tensor | None  # [E] fp32, added to the scores for the choice alone
    gate: Weight  # [E, I, C]
    gate_bias: torch.Tensor | None  # [E, I]
    up: Weight  # [E, I, C]
    up_bias: torch.Tensor | None  # [E, I]
    down: Weight  # [E, C, I]
    down_bias: torch.Tensor | None  # [E, C]


class Ops(Protocol):
    """The layer operations of one device.

    `into`: the only map that reads a result; it gets its rows as it takes them.
    """

    def embed(self, token_ids: torch.Tensor, weight: torch.Tensor) -> Rows:
        """Return the rows of weight [V, C] of tokens [T]."""

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        """Return the map x [T, C] → x @ weight.T + bias, weight [N, C]."""

    def part_linear(self, weight: Weight, bias: torch.Tensor | None) -> PartLinear:
        """Return the same of a map whose inputs several GPUs share, where they do. Parts of sums
        may be added to each other, and multiplied."""

    def head(self, weight: Weight) -> Linear:
        """Return the map x [T, C] → logits [T, V] of a weight whose outputs several GPUs share,
        where they do."""

    def total(self, x: Rows) -> torch.Tensor:
        """Return rows, added up where they are a part of a sum."""

    def norm(
        self, x: Rows, residual: torch.Tensor | None, weight: torch.Tensor, eps: float,
        into: PartLinear | None = None,
    ) -> tuple[Rows, torch.Tensor]:  # fmt: skip
        """Return (rms_norm(x + residual) * weight, x + residual). May write to `residual`."""

    def norm_heads(
        self, qkv: torch.Tensor, heads: int, queries: torch.Tensor, keys: torch.Tensor, eps: float
    ) -> None:
        """Norm each query head and each key head over its channels, in place.

        qkv [T, H + 2K, D]: queries, keys, values. `queries`, `keys`: the weights, [D] each; `heads`
        is H.
        """

    def gated(
        self, x: torch.Tensor, activation: Activation, into: PartLinear | None = None
    ) -> Rows:
        """Return activation(x[:, :C]) * x[:, C:], x [T, 2C]."""

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *,
        gate_first: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Return x [T, G, D] normed over D and gated, as `kernels.reference.gated_norm` says."""

    def experts(
        self, weights: ExpertWeights, routing: Routing, activation: ExpertActivation
    ) -> MixedExperts:
        """Return the mixture of experts that `kernels.reference_experts` specifies."""


class WholeOps:
    """What a device does that has the whole model: nothing is a part of a sum."""

    def embed(self, token_ids: torch.Tensor, weight: torch.Tensor) -> Rows:
        return F.embedding(token_ids, weight)

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        raise NotImplementedError

    def part_linear(self, weight: Weight, bias: torch.Tensor | None) -> PartLinear:
        return self.linear(weight, bias)

    def head(self, weight: Weight) -> Linear:
        return self.linear(weight, None)

    def total(self, x: Rows) -> torch.Tensor:
        whole: torch.Tensor = x
        return whole


class TorchOps(WholeOps):
    """`Ops` in plain torch, on any device. Packed weights are unpacked at each use."""

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        return lambda x: F.linear(x, as_dense(weight, x.dtype), bias)

    def norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float,
        into: PartLinear | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        total = x if residual is None else residual + x
        return F.rms_norm(total, (total.shape[-1],), weight, eps), total

    def norm_heads(
        self, qkv: torch.Tensor, heads: int, queries: torch.Tensor, keys: torch.Tensor, eps: float
    ) -> None:
        end = heads + (qkv.shape[1] - heads) // 2
        for part, weight in ((qkv[:, :heads], queries), (qkv[:, heads:end], keys)):
            part.copy_(F.rms_norm(part, weight.shape, weight, eps))

    def gated(
        self, x: torch.Tensor, activation: Activation, into: PartLinear | None = None
    ) -> torch.Tensor:
        return reference.gated_mul(x, activation)

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *,
        gate_first: bool,
    ) -> torch.Tensor:  # fmt: skip
        return reference.gated_norm(x, gate, weight, eps, gate_first=gate_first)

    def experts(
        self, weights: ExpertWeights, routing: Routing, activation: ExpertActivation
    ) -> MixedExperts:
        w = weights
        gate_up_bias = None
        if w.gate_bias is not None and w.up_bias is not None:
            gate_up_bias = torch.cat([w.gate_bias, w.up_bias], 1)
        router, down_bias, choice_bias = w.router, w.down_bias, w.choice_bias
        router_bias = None if w.router_bias is None else w.router_bias.float()

        def mixed(x: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
            logits = F.linear(x.float(), router.float(), router_bias)
            chosen, factors = reference_experts.route(logits, routing, choice_bias)
            gate_up = torch.cat([as_dense(w.gate, x.dtype), as_dense(w.up, x.dtype)], 1)
            out = reference_experts.experts(
                x, chosen, factors, gate_up, gate_up_bias, as_dense(w.down, x.dtype), down_bias,
                activation,
            )  # fmt: skip
            return out if shared is None else out + shared

        return mixed


def mean_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float,
    into: PartLinear | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (layer_norm(x + residual) * weight, x + residual), without a bias, in torch."""
    total = x if residual is None else residual + x
    wide = total.float()
    normed = F.layer_norm(wide, (wide.shape[-1],), weight.float(), None, eps)
    return normed.to(x.dtype), total


class TensorSource:
    """The tensors of one layer, removed from the weights as a model takes them.

    Raises KeyError for a missing one.
    """

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor by its whole name within the layer; it is never packed."""
        found = self._weights.pop(f"{self._prefix}{name}")
        assert isinstance(found, torch.Tensor), f"{name} is packed"
        return found

    def weight(self, part: str) -> torch.Tensor:
        """Return the weight of a part."""
        return self.tensor(f"{part}.weight")

    def joined(self, *parts: str, dim: int = 0) -> tuple[Weight, torch.Tensor | None]:
        """Return the weights of parts as one matrix, and their biases if they have any."""
        matrices = [self._weights.pop(f"{self._prefix}{part}.weight") for part in parts]
        biases = [
            self.tensor(f"{part}.bias")
            for part in parts
            if f"{self._prefix}{part}.bias" in self._weights
        ]
        weight = join(matrices, dim) if len(matrices) > 1 else matrices[0]
        return weight, torch.cat(biases, dim) if biases else None

    def peek(self, name: str) -> Weight | None:
        """Return a tensor that stays, or None without one."""
        return self._weights.get(f"{self._prefix}{name}")

    def whole(self, part: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight of a part that is never packed, and its bias if it has one."""
        weight, bias = self.joined(part)
        assert isinstance(weight, torch.Tensor), f"{part} is packed"
        return weight, bias


def join(weights: list[Weight], dim: int) -> Weight:
    """Return weights below each other along `dim`; of unlike kinds as int8, or else unpacked."""
    packed = [w for w in weights if isinstance(w, Packed) and w.kind in ("int4", "int8")]
    if len(packed) == len(weights) and len({(w.kind, w.group) for w in packed}) > 1:
        group = math.gcd(*(w.group for w in packed))
        weights = [w.as_int8(group) for w in packed]
    first, *rest = weights
    if isinstance(first, Packed):
        alike = [w for w in rest if isinstance(w, Packed)]
        if len(alike) == len(rest) and all(
            (w.kind, w.group) == (first.kind, first.group) for w in alike
        ):
            parts = zip(first.parts, *(w.parts for w in alike), strict=True)
            return first.with_parts(*(torch.cat(part, dim) for part in parts))
    dtype = next((w.dtype for w in weights if isinstance(w, torch.Tensor)), torch.bfloat16)
    return torch.cat([as_dense(w, dtype) for w in weights], dim)


class PlainMlp:
    """An MLP without a gate: down(relu(up(x)) squared)."""

    def __init__(self, source: TensorSource, ops: Ops, name: str) -> None:
        self.reader = ops.linear(*source.joined(f"{name}.up_proj"))
        self._down = ops.part_linear(*source.joined(f"{name}.down_proj"))

    def __call__(self, x: Rows) -> Rows:
        """Return the MLP's output [T, C] of x [T, C], which only `reader` reads."""
        return self._down(F.relu(self.reader(x)).square())


class Mlp:
    """A gated MLP: down(activation(gate(x)) * up(x))."""

    def __init__(self, source: TensorSource, ops: Ops, activation: Activation, name: str) -> None:
        self._ops = ops
        self._activation = activation
        self.reader = ops.linear(*source.joined(f"{name}.gate_proj", f"{name}.up_proj"))
        self._down = ops.part_linear(*source.joined(f"{name}.down_proj"))

    def __call__(self, x: Rows) -> Rows:
        """Return the MLP's output [T, C] of x [T, C], which only `reader` reads."""
        return self._down(self._ops.gated(self.reader(x), self._activation, self._down))
