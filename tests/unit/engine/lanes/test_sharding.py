"""What lanes have of a model: their parts are the whole, in the shapes that a lane's model has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine.errors import ModelError
from engine.lanes.sharding import sharing
from engine.model_store import Architecture, expected_shapes
from engine.model_store.families import architecture_of
from engine.model_store.tensors import cut_of, lacks_lanes, lane_architecture, sections_of
from engine.weights import random_weights
from kernels.reference_weights import Packed, as_dense, to_fp8, to_int4, to_mxfp4
from tests.families import BASE, TINY
from tests.models import tiny_config

LATENT = ("deepseek v2", "deepseek v3", "glm4 moe lite")
WHOLE_NORMS = ("olmo2", "olmo3")
REFUSED = (*LATENT, *WHOLE_NORMS)
WIDE = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128, "rope_theta": 1e4,
    "linear_conv_kernel_dim": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "mamba_d_head": 32, "mamba_n_groups": 4, "n_groups": 4,
}  # fmt: skip


def architecture(name: str) -> Architecture:
    """Return a tiny model of a family whose heads four lanes can share."""
    kind, changes = TINY[name]
    given = {**BASE, "model_type": kind, **changes, **WIDE}
    return architecture_of({key: value for key, value in given.items() if value is not None})


@pytest.mark.parametrize("lanes", [2, 4])
@pytest.mark.parametrize("name", [name for name in TINY if name not in REFUSED])
def test_a_familys_shares_have_the_shapes_of_a_lanes_model(name: str, lanes: int) -> None:
    """The table of dimensions is checked against the shapes that loaders check files against."""
    config = architecture(name)
    weights = random_weights(config, torch.float32, 0, torch.device("cpu"))
    share = sharing(config, lanes)

    for lane in range(lanes):
        shapes = {name: tuple(share(name, one, lane).shape) for name, one in weights.items()}
        assert shapes == expected_shapes(lane_architecture(config, lanes))


@pytest.mark.parametrize("name", [name for name in TINY if name not in REFUSED])
def test_the_shares_of_a_tensor_are_its_values(name: str) -> None:
    """Side by side along one dimension, or added where only one lane has them."""
    lanes, config = 2, architecture(name)
    weights = random_weights(config, torch.float32, 0, torch.device("cpu"))
    share = sharing(config, lanes)

    for tensor_name, tensor in weights.items():
        tensor.copy_(torch.randn(tensor.shape))
        shares = [as_dense(share(tensor_name, tensor, i), torch.float32) for i in range(lanes)]
        cut = cut_of(tensor_name)
        if cut == "whole":
            assert all(torch.equal(one, tensor) for one in shares)
        elif cut == "first":
            assert torch.equal(shares[0] + shares[1], tensor)
        else:
            is_matrix = tensor_name.endswith("weight") and tensor.dim() > 1
            dim = -1 if cut == "inputs" or not is_matrix else -2
            sizes = [tensor.shape[dim] // lanes]
            if cut == "sections":
                sizes = [size // lanes for size in sections_of(config, tensor_name)]
            found = zip(*(torch.split(one, sizes, dim) for one in shares), strict=True)
            sides = [torch.cat(parts, dim) for parts in found]
            assert torch.equal(torch.cat(sides, dim), tensor), tensor_name
        if cut != "whole":
            assert all(one.is_contiguous() for one in shares)
            own = tensor.untyped_storage().data_ptr()
            assert cut == "first" or all(s.untyped_storage().data_ptr() != own for s in shares)


@pytest.mark.parametrize("name", TINY)
def test_one_lane_has_all_of_any_family(name: str) -> None:
    """Also of those that several lanes cannot share."""
    config = architecture(name)
    weights = random_weights(config, torch.float32, 0, torch.device("cpu"))
    share = sharing(config, 1)

    assert all(share(tensor_name, tensor, 0) is tensor for tensor_name, tensor in weights.items())


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_lanes_cannot_share_is_refused_by_name(name: str) -> None:
    config = architecture(name)

    with pytest.raises(ModelError, match=f"engine.gpus names 2 GPUs: .*{config.family}"):
        sharing(config, 2)
    assert lacks_lanes(config, 1) == ""


@pytest.mark.parametrize(
    ("lanes", "changes", "reason"),
    [
        (3, {"kv_heads": 2}, "num_key_value_heads is 2, which 3 GPUs"),
        (4, {"kv_heads": 2}, "num_key_value_heads is 2, which 4 GPUs"),
        (2, {"heads": 3, "kv_heads": 1}, "num_key_value_heads is 1"),
    ],
)
def test_heads_that_lanes_cannot_share_are_refused(
    lanes: int, changes: dict[str, Any], reason: str
) -> None:
    assert lacks_lanes(tiny_config(**changes), lanes).startswith(reason)


def test_recurrent_heads_that_lanes_cannot_share_are_refused() -> None:
    """A norm over all heads of a layer would be a sum over lanes, so groups are dealt out whole."""
    granite, qwen = architecture("granite hybrid"), architecture("qwen3 next")
    assert granite.mamba is not None
    one_group = replace(granite, mamba=replace(granite.mamba, groups=1))

    assert lacks_lanes(granite, 2) == ""
    assert "norms over all heads of a recurrent layer at once" in lacks_lanes(one_group, 2)
    assert lacks_lanes(replace(granite, kv_heads=8), 8).startswith("mamba_n_groups is 4, which 8")
    assert lacks_lanes(replace(qwen, kv_heads=8), 8).startswith("linear_num_key_heads is 4")


def test_a_vocabulary_that_lanes_cannot_share_is_refused() -> None:
    config = replace(tiny_config(), vocab=281)

    assert lacks_lanes(config, 2) == "vocab_size is 281, which 2 GPUs cannot share evenly"


PACKED = {
    "fp8 with a scale a row": to_fp8(torch.randn(32, 256)),
    "int4 in groups of 32": to_int4(torch.randn(32, 256), 32),
    "int4 in groups of 256": to_int4(torch.randn(32, 256), 256),
    "mxfp4 of two experts": to_mxfp4(torch.randn(2, 32, 256)),
    "int4 whose groups are cut": to_int4(torch.randn(32, 96 * 2), 96),
}


@pytest.mark.parametrize("lanes", [2, 4])
@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("part", ["down_proj", "up_proj"])
def test_shares_of_a_packed_weight_have_its_values(kind: str, lanes: int, part: str) -> None:
    """They stay packed, unless a cut would split a group."""
    weight = PACKED[kind]
    share = sharing(replace(tiny_config(heads=4, kv_heads=4), vocab=288), lanes)
    name = f"model.layers.0.mlp.{part}.weight"
    shares = [share(name, weight, lane) for lane in range(lanes)]

    whole = weight.dense(torch.bfloat16)
    found = [s.dense(torch.bfloat16) if isinstance(s, Packed) else s for s in shares]
    assert torch.equal(torch.cat(found, -1 if part == "down_proj" else -2), whole)
    is_cut = kind.endswith("cut") and part == "down_proj" and lanes == 4
    assert all(isinstance(one, Packed) != is_cut for one in shares)
