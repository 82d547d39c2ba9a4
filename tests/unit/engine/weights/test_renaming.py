"""Tensors of files become the engine's: split, stacked, unpacked, in one order of channels."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from engine.errors import ModelError
from engine.model_store import Architecture, Layer, Rope
from engine.model_store.architecture import Latent, Moe
from engine.model_store.tensor_names import FOLDER_NAMES, GPT_OSS_NAMES, MIXTRAL_NAMES, Names
from engine.weights import random_weights
from engine.weights.renaming import TensorReader, head_order, unpack_mxfp4
from kernels.reference import rotate
from tests.models import tiny_config

LAYER = "model.layers.0."
MOE = Moe(experts=3, top_k=1, intermediate=32)


def with_experts(**changes: Any) -> Architecture:
    moe = msgspec.structs.replace(MOE, **changes)
    return msgspec.structs.replace(tiny_config(layers=1), layers=(Layer(ffn="moe"),), moe=moe)


def read(
    config: Architecture, tensors: dict[str, torch.Tensor], names: Names | None = None
) -> dict[str, torch.Tensor]:
    reader = TensorReader(config, {**FOLDER_NAMES, **(names or {})}, torch.float32)
    return {n: t for rest, given in tensors.items() for n, t in reader.take(LAYER, rest, given)}


def weights_of(config: Architecture) -> dict[str, torch.Tensor]:
    whole = random_weights(config, torch.float32, 0, torch.device("cpu"))
    return {n.removeprefix(LAYER): t for n, t in whole.items() if n.startswith(LAYER)}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotating", [4, 8, 12, 16])
def test_reordered_heads_have_the_same_scores(rotating: int, interleaved: bool) -> None:
    """Rotation by halves of the whole head, over a table with ones and zeros, equals the file's
    rotation of its first channels."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 5, 1, 16, generator=generator)
    angles = torch.rand(5, rotating // 2, generator=generator)
    cos, sin = angles.cos(), angles.sin()

    def by_the_file(x: torch.Tensor) -> torch.Tensor:
        if not interleaved:
            return rotate(x, cos, sin)
        even, odd = x[..., 0:rotating:2], x[..., 1:rotating:2]
        c, s = cos[:, None], sin[:, None]
        turned = torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)
        return torch.cat([turned, x[..., rotating:]], -1)

    order = head_order(16, rotating, interleaved=interleaved)
    wide_cos, wide_sin = torch.ones(5, 8), torch.zeros(5, 8)
    wide_cos[:, : rotating // 2], wide_sin[:, : rotating // 2] = cos, sin
    ours = [rotate(x[..., order], wide_cos, wide_sin) for x in (q, k)]

    expected = by_the_file(q)[:, 0] @ by_the_file(k)[:, 0].T
    torch.testing.assert_close(ours[0][:, 0] @ ours[1][:, 0].T, expected)


def test_experts_one_by_one_become_a_stack() -> None:
    """Files hold them in any order."""
    config = with_experts()
    known = weights_of(config)["mlp.experts.up_proj.weight"]
    files = {f"block_sparse_moe.experts.{e}.w3.weight": known[e] for e in (2, 0, 1)}

    found = read(config, files, MIXTRAL_NAMES)

    assert list(found) == [f"{LAYER}mlp.experts.up_proj.weight"]
    assert torch.equal(found[f"{LAYER}mlp.experts.up_proj.weight"], known)


@pytest.mark.parametrize("number", [3, 99_999])
def test_expert_outside_the_stack_is_refused(number: int) -> None:
    """Its number comes from a file."""
    with pytest.raises(ModelError, match=f"expert {number} of"):
        read(with_experts(), {f"mlp.experts.{number}.up_proj.weight": torch.zeros(32, 64)})


def test_joined_matrices_are_split_by_their_sizes() -> None:
    """q has more rows than k and v."""
    config = tiny_config(layers=1)
    known = weights_of(config)
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    joined = torch.cat([known[f"{part}.weight"] for part in parts])

    found = read(config, {"self_attn.qkv_proj.weight": joined})

    assert {n.removeprefix(LAYER) for n in found} == {f"{part}.weight" for part in parts}
    assert all(torch.equal(t, known[n.removeprefix(LAYER)]) for n, t in found.items())


def test_joined_matrix_of_another_size_is_refused() -> None:
    """It cannot be cut."""
    with pytest.raises(ModelError, match="cannot hold"):
        read(tiny_config(layers=1), {"self_attn.qkv_proj.weight": torch.zeros(7, 64)})


def test_norms_that_leave_out_the_1_get_it() -> None:
    """Rounded once: the sum is made in fp32."""
    config = msgspec.structs.replace(tiny_config(layers=1), norms_less_one=True)
    stored = torch.full((64,), 2.0**-9)
    reader = TensorReader(config, FOLDER_NAMES, torch.bfloat16)

    ((_, found),) = reader.take(LAYER, "input_layernorm.weight", stored)

    assert torch.equal(found, (stored + 1).bfloat16())


def packed(values: list[list[float]], scale_bits: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack rows of 32 values, in units of their scale, by the format's description."""
    known = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = [[known.index(abs(v)) + (8 if v < 0 else 0) for v in row] for row in values]
    pairs = [[low | high << 4 for low, high in zip(row[::2], row[1::2], strict=True)]
             for row in codes]  # fmt: skip
    return torch.tensor(pairs, dtype=torch.uint8), torch.tensor(scale_bits, dtype=torch.uint8)


def test_mxfp4_blocks_are_unpacked() -> None:
    """Two values a byte, the low one first; a scale is a power of two."""
    rows = [[0.5, -6.0] + [1.0] * 30, [3.0, -1.5] + [0.0] * 30]
    blocks, scales = packed(rows, [127, 130])

    found = unpack_mxfp4(blocks.view(1, 1, 2, 16), scales.view(1, 1, 2), torch.float32)

    assert found.shape == (1, 1, 64)
    assert found[0, 0, :3].tolist() == [0.5, -6.0, 1.0]
    assert found[0, 0, 32:35].tolist() == [24.0, -12.0, 0.0]


@pytest.mark.parametrize("blocks_first", [True, False])
def test_mxfp4_experts_alternate_between_gate_and_up(blocks_first: bool) -> None:
    """gpt-oss's folders: rows in turns, scales in a tensor of their own, in either order."""
    config = with_experts(expert="clamped", score="chosen_softmax")
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (3, 64, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 130, (3, 64, 2), dtype=torch.uint8, generator=generator)
    halves = {"mlp.experts.gate_up_proj_blocks": blocks, "mlp.experts.gate_up_proj_scales": scales}
    files = dict(sorted(halves.items(), reverse=not blocks_first))

    found = read(config, files, GPT_OSS_NAMES)

    whole = unpack_mxfp4(blocks, scales, torch.float32)
    assert torch.equal(found[f"{LAYER}mlp.experts.gate_proj.weight"], whole[:, 0::2])
    assert torch.equal(found[f"{LAYER}mlp.experts.up_proj.weight"], whole[:, 1::2])


def test_heads_of_latents_are_split() -> None:
    """A head's keys and values stand below each other in one matrix."""
    latent = Latent(rank=8, nope=4, rope=4, value=6)
    config = msgspec.structs.replace(
        tiny_config(layers=1), layers=(Layer("mla"),), latent=latent, kv_heads=1, head_dim=12,
        ropes={"full": Rope(1e4, 4)},
    )  # fmt: skip
    matrix = torch.arange(4 * 10 * 8.0).view(40, 8)

    found = read(config, {"self_attn.kv_b_proj.weight": matrix})

    assert torch.equal(found[f"{LAYER}self_attn.k_b_proj.weight"][1], matrix[10:14])
    assert torch.equal(found[f"{LAYER}self_attn.v_b_proj.weight"][1], matrix[14:20])
