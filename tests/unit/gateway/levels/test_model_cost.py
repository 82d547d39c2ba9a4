"""What a model costs, by its shape alone."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from msgspec.structs import replace

from engine.model_store import Architecture, Layer, Rope
from engine.model_store.architecture import Delta, Mamba
from engine.states.layout import StateLayout
from gateway.levels.model_cost import (
    find_card,
    flops_per_token,
    has_windows,
    kv_bytes_per_token,
    state_bytes,
    weights_of,
)
from tests.models import prepared

LLAMA_8B = Architecture(
    family="llama",
    layers=(Layer(),) * 32,
    hidden=4_096,
    intermediate=14_336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128_256,
    context=131_072,
    ropes={"default": Rope(theta=500_000.0, dim=128)},
)


def test_weights_are_those_of_the_published_model() -> None:
    """Llama 3.1 8B has 8,030,261,248."""
    assert weights_of(LLAMA_8B) == 8_030_261_248


def test_cost_of_a_token_is_that_of_the_published_shape() -> None:
    """131,072 bytes, and 14 GFLOP for 7 billion weights beside the embedding."""
    flops = flops_per_token(LLAMA_8B)

    assert kv_bytes_per_token(LLAMA_8B, "auto") == 131_072
    assert kv_bytes_per_token(LLAMA_8B, "fp32") == 262_144
    assert kv_bytes_per_token(LLAMA_8B, "int8") == 1_064_960 / 16
    assert flops is not None
    assert flops == pytest.approx(2 * 6.98e9, rel=0.01)
    assert not has_windows(LLAMA_8B)
    assert has_windows(replace(LLAMA_8B, layers=(Layer(), Layer(window=512))))


def test_recurrent_layers_keep_no_kv() -> None:
    """A token's KV lies in the layers with attention alone."""
    half = replace(LLAMA_8B, layers=(Layer("conv"), Layer()) * 16, conv_width=3)

    assert kv_bytes_per_token(half, "auto") * 2 == kv_bytes_per_token(LLAMA_8B, "auto")


@pytest.mark.parametrize("rule", [Delta(16, 32, 128, 128), Mamba(5, 8, 3, 1), None])
def test_states_cost_what_the_engine_lays_out(rule: Delta | Mamba | None) -> None:
    """With odd sizes, whose parts are filled up."""
    name: Literal["delta", "mamba", "conv"] = (
        "delta" if isinstance(rule, Delta) else "mamba" if rule else "conv"
    )
    changes = {} if rule is None else {name: rule}
    layers = (Layer(name), Layer(name), Layer())
    shape = replace(LLAMA_8B, layers=layers, conv_width=4, **changes)

    assert state_bytes(shape) == StateLayout(shape, torch.bfloat16).bytes


def test_a_prepared_model_has_a_card(tmp_path: Path) -> None:
    card = prepared(tmp_path)

    assert find_card(card.source, Path(card.folder).parents[1]) == card
    assert find_card(str(tmp_path / "other"), Path(card.folder).parents[1]) is None
