"""Tensors of files become the engine's: split, stacked, unpacked, in one order of channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import torch

from engine.errors import ModelError
from engine.model_store import Architecture, Layer, Rope
from engine.model_store.architecture import Delta, Latent, Moe
from engine.model_store.tensors import (
    FOLDER_NAMES,
    GGUF_DELTA_NAMES,
    GPT_OSS_NAMES,
    MIXTRAL_NAMES,
    Names,
)
from engine.weights import random_weights
from engine.weights.renaming import TensorReader, head_order
from kernels.reference import rotate
from kernels.reference_weights import GROUP, Packed, Weight, as_dense
from tests.models import tiny_config
from tests.tables import each_row

LAYER = "model.layers.0."
MOE = Moe(experts=3, top_k=1, intermediate=32)


def with_experts(**changes: Any) -> Architecture:
    moe = msgspec.structs.replace(MOE, **changes)
    return msgspec.structs.replace(tiny_config(layers=1), layers=(Layer(ffn="moe"),), moe=moe)


def read(
    config: Architecture, tensors: Mapping[str, Weight], names: Names | None = None
) -> dict[str, torch.Tensor]:
    reader = TensorReader(config, {**FOLDER_NAMES, **(names or {})}, torch.float32)
    return {
        name: as_dense(weight, torch.float32)
        for rest, given in tensors.items()
        for name, weight in reader.take(LAYER, rest, given)
    }


def weights_of(config: Architecture) -> dict[str, torch.Tensor]:
    whole = random_weights(config, torch.float32, 0, torch.device("cpu"))
    return {n.removeprefix(LAYER): t for n, t in whole.items() if n.startswith(LAYER)}


@each_row("interleaved", [False, True])
@each_row("rotating", [4, 8, 12, 16])
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

    assert torch.equal(as_dense(found, torch.bfloat16), (stored + 1).bfloat16())


def test_packed_experts_alternate_between_gate_and_up() -> None:
    """gpt-oss's folders: rows in turns; the rows stay packed."""
    config = with_experts(expert="clamped", score="chosen_softmax")
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(256, (3, 64, 32), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 130, (3, 64, 2), dtype=torch.uint8, generator=generator)
    packed = Packed("mxfp4", codes, scales, GROUP)

    found = read(config, {"mlp.experts.gate_up_proj_blocks": packed}, GPT_OSS_NAMES)

    whole = packed.dense(torch.float32)
    assert torch.equal(found[f"{LAYER}mlp.experts.gate_proj.weight"], whole[:, 0::2])
    assert torch.equal(found[f"{LAYER}mlp.experts.up_proj.weight"], whole[:, 1::2])


def test_experts_of_unlike_kinds_are_refused() -> None:
    """One product computes all of them."""
    packed = Packed("fp8", torch.zeros(32, 64, dtype=torch.float8_e4m3fn), torch.ones(32, 1), 64)
    files: dict[str, Weight] = {
        "mlp.experts.0.up_proj.weight": packed,
        "mlp.experts.1.up_proj.weight": torch.zeros(32, 64),
    }

    with pytest.raises(ModelError, match="unlike kinds"):
        read(with_experts(), files)


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


@each_row("group", [8, 32])
def test_packed_columns_of_values_lie_by_their_keys(group: int) -> None:
    """Qwen3.5's GGUF files: heads of values in turns over two heads of keys. A group that two heads
    share is unpacked."""
    delta = Delta(key_heads=2, value_heads=6, key_dim=16, value_dim=16)
    config = msgspec.structs.replace(
        tiny_config(layers=1), layers=(Layer("delta"),), delta=delta, conv_width=4,
        values_in_turns=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(256, (64, 48), dtype=torch.uint8, generator=generator)
    scales, minima = torch.randn(2, 64, 96 // group, generator=generator)
    packed = Packed("int4", codes, scales, group, minima)

    found = read(config, {"ssm_out.weight": packed}, GGUF_DELTA_NAMES)

    heads = packed.dense(torch.float32).view(64, 6, 16)[:, [0, 2, 4, 1, 3, 5]]
    assert torch.equal(found[f"{LAYER}linear_attn.out_proj.weight"], heads.reshape(64, 96))
