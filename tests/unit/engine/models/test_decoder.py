"""The decoder: which operations a layer launches, and experts chosen the same in any batch."""

from __future__ import annotations

import msgspec
import pytest
import torch

from engine.model_store import Architecture, Layer
from engine.model_store.architecture import Moe
from engine.models.decoder import DecoderModel
from engine.models.layers import Activation, Linear, TensorSource, TorchOps
from engine.models.moe import Experts
from engine.weights import random_weights
from kernels import reference_experts
from kernels.reference_experts import Routing
from kernels.reference_weights import Weight
from tests.models import tiny_config

CPU = torch.device("cpu")


class RecordedOps(TorchOps):
    """Torch operations that note their names."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        compute = super().linear(weight, bias)

        def noted(x: torch.Tensor) -> torch.Tensor:
            self.seen.append("linear")
            return compute(x)

        return noted

    def norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float,
        into: Linear | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        self.seen.append("norm" if residual is None else "add and norm")
        return super().norm(x, residual, weight, eps)

    def norm_heads(
        self, qkv: torch.Tensor, heads: int, queries: torch.Tensor, keys: torch.Tensor, eps: float
    ) -> None:
        self.seen.append("norm heads")
        super().norm_heads(qkv, heads, queries, keys, eps)

    def gated(
        self, x: torch.Tensor, activation: Activation, into: Linear | None = None
    ) -> torch.Tensor:
        self.seen.append("gated")
        return super().gated(x, activation)


class NoAttention:
    """Attention that returns the queries."""

    def __init__(self, ops: RecordedOps, width: int) -> None:
        self.ops, self.width = ops, width

    def attend(
        self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.ops.seen.append("attend")
        return qkv[:, : self.width]


def operations_of(config: Architecture) -> list[str]:
    ops = RecordedOps()
    model = DecoderModel(config, random_weights(config, torch.float32, 0, CPU), ops)
    attention = NoAttention(ops, config.heads * config.head_dim)
    model.logits(model.forward(torch.tensor([1, 2, 3]), attention))
    return ops.seen


def test_llama_launches_its_fused_operations_alone() -> None:
    """On a GPU each is one kernel or one product; another would cost a launch a layer."""
    block = ["linear", "attend", "linear", "add and norm", "linear", "gated", "linear"]

    seen = operations_of(tiny_config(layers=2))

    assert seen == ["norm", *block, "add and norm", *block, "add and norm", "linear"]


@pytest.mark.parametrize(
    ("change", "norms"),
    [({"place": "sandwich"}, 9), ({"qk_norm": "head"}, 7), ({"qk_norm": "whole"}, 9), ({}, 5)],
)
def test_norms_are_where_the_architecture_places_them(change: dict[str, str], norms: int) -> None:
    """Two layers: two norms each and the last one, and what the family adds."""
    seen = operations_of(msgspec.structs.replace(tiny_config(layers=2), **change))

    assert sum("norm" in operation for operation in seen) == norms


def experts_of(moe: Moe) -> tuple[Experts, Architecture]:
    config = msgspec.structs.replace(tiny_config(layers=1), layers=(Layer(ffn="moe"),), moe=moe)
    weights = random_weights(config, torch.float32, 0, CPU)
    return Experts(config, TensorSource(weights, "model.layers.0."), TorchOps()), config


def test_first_of_equal_experts_is_chosen() -> None:
    """A token's experts must not depend on its batch, or cached and uncached answers differ."""
    chosen, weights = reference_experts.route(torch.zeros(5, 8), Routing(3))

    assert chosen.tolist() == [[0, 1, 2]] * 5
    torch.testing.assert_close(weights, torch.full((5, 3), 1 / 3))


def test_experts_of_a_token_do_not_depend_on_its_batch() -> None:
    """Each token's sum runs over its experts in ascending order."""
    experts, config = experts_of(
        Moe(experts=8, top_k=2, intermediate=32, shared="add", shared_intermediate=32)
    )
    x = torch.randn(40, config.hidden, generator=torch.Generator().manual_seed(2))

    together = experts(x)

    for at in range(0, 40, 7):
        torch.testing.assert_close(experts(x[at : at + 1]), together[at : at + 1])
