"""A layer's experts in GPU kernels against torch, in the interpreter or on a GPU."""

from __future__ import annotations

import msgspec
import pytest
import torch

from engine.model_store import Architecture, Layer
from engine.model_store.architecture import Moe
from engine.models.gpu_layers import GpuOps
from engine.models.layers import Mlp, Ops, TensorSource, TorchOps
from engine.models.moe import Experts
from engine.weights import Tensors, Weights, random_weights
from kernels.reference_weights import Weight, to_fp8, to_mxfp4
from tests.models import tiny_config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
ERROR_MAX = 1e-2 if DEVICE.type == "cuda" else 1e-5
"""Largest distance from torch's result, over its length."""

KINDS = {
    "Mixtral": Moe(experts=8, top_k=2, intermediate=64),
    "Qwen2-MoE": Moe(
        experts=6, top_k=2, intermediate=32, renormalise=False, shared="gated",
        shared_intermediate=32,
    ),
    "DeepSeek-V3": Moe(
        experts=8, top_k=2, intermediate=32, score="sigmoid", choose_by_bias=True, scale=2.5,
        groups=4, groups_kept=2, shared="add", shared_intermediate=32,
    ),
    "gpt-oss": Moe(
        experts=4, top_k=2, intermediate=64, score="chosen_softmax", expert="clamped"
    ),
}  # fmt: skip


def config_of(moe: Moe) -> Architecture:
    return msgspec.structs.replace(tiny_config(layers=1), layers=(Layer(ffn="moe"),), moe=moe)


def experts_of(config: Architecture, weights: Weights, ops: Ops) -> Experts:
    return Experts(config, TensorSource({**weights}, "model.layers.0."), ops)


def weights_of(config: Architecture) -> Tensors:
    """Return random weights; biases that are not zero."""
    weights = random_weights(config, DTYPE, 0, DEVICE)
    for name, tensor in weights.items():
        if name.endswith("bias"):
            tensor.copy_(torch.linspace(-1, 1, tensor.numel()).view_as(tensor))
    return weights


def rows(config: Architecture, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, config.hidden, generator=generator).to(DEVICE, DTYPE)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("packing", ["", "mxfp4", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_compute_what_torch_does(kind: str, packing: str) -> None:
    """Router, experts, and the MLP that all tokens take; the experts packed or not."""
    config = config_of(KINDS[kind])
    weights: dict[str, Weight] = {**weights_of(config)}
    for name, tensor in weights_of(config).items():
        if packing and ".experts." in name and name.endswith("weight"):
            fits = packing == "fp8" or tensor.shape[-1] % 64 == 0
            pack = to_fp8 if packing == "fp8" else to_mxfp4
            weights[name] = pack(tensor) if fits else tensor
    x = rows(config, 7, 1)

    found = experts_of(config, weights, GpuOps())(x)

    expected = experts_of(config, weights, TorchOps())(x)
    assert distance(found, expected) <= (6e-2 if packing == "fp8" else ERROR_MAX)


@pytest.mark.parametrize("packed", ["gate_proj", "up_proj"])
def test_stacks_of_unlike_kinds_are_computed(packed: str) -> None:
    """MXFP4 whose scales are beyond what the kernels hold is unpacked, a stack at a time."""
    config = config_of(KINDS["gpt-oss"])
    weights: dict[str, Weight] = {**weights_of(config)}
    name = f"model.layers.0.mlp.experts.{packed}.weight"
    one = weights[name]
    assert isinstance(one, torch.Tensor)
    weights[name] = to_mxfp4(one)
    x = rows(config, 7, 1)

    found = experts_of(config, weights, GpuOps())(x)

    assert distance(found, experts_of(config, weights, TorchOps())(x)) <= ERROR_MAX


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs need a CUDA device")
def test_one_graph_computes_every_choice_of_experts() -> None:
    """A graph holds grids and addresses, not the experts of the rows it was captured with."""
    config = config_of(KINDS["Mixtral"])
    weights = weights_of(config)
    experts = experts_of(config, weights, GpuOps())
    x = rows(config, 33, 1)
    with torch.inference_mode():
        experts(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = experts(x)
        for seed in range(2, 6):
            x.copy_(rows(config, 33, seed))

            graph.replay()

            expected = experts_of(config, weights, TorchOps())(x)
            assert distance(out, expected) <= ERROR_MAX


@pytest.mark.parametrize("kind", ["Qwen2-MoE", "DeepSeek-V3"])
@pytest.mark.parametrize("ops", [TorchOps(), GpuOps()], ids=["torch", "kernels"])
def test_a_shared_mlp_of_an_experts_size_is_added_as_any_other(kind: str, ops: Ops) -> None:
    """It is computed as one more expert; alone and added it gives the same."""
    moe = KINDS[kind]
    config, routed = config_of(moe), config_of(msgspec.structs.replace(moe, shared=""))
    weights = weights_of(config)
    x = rows(config, 7, 3)
    shared = Mlp(
        TensorSource({**weights}, "model.layers.0."), TorchOps(), "silu", "mlp.shared_expert"
    )(x)
    if moe.shared == "gated":
        gate = weights["model.layers.0.mlp.shared_expert_gate.weight"]
        shared = shared * torch.sigmoid(x @ gate.T)

    found = experts_of(config, weights, ops)(x)

    expected = experts_of(routed, weights, TorchOps())(x) + shared
    assert distance(found, expected) <= ERROR_MAX
    assert distance(found, expected - shared) > 0.1
