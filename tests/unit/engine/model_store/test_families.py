"""Families: a config becomes an architecture, or is refused with a reason."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.errors import ModelError
from engine.model_store.architecture import (
    REFUSED,
    Architecture,
    Latent,
    Layer,
    Moe,
    check_architecture,
)
from engine.model_store.families import FAMILIES, architecture_of
from tests.models import tiny_config
from tests.tables import each_row

BASE: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
    "max_position_embeddings": 256,
}  # fmt: skip
SHARED = Moe(experts=4, top_k=2, intermediate=8, shared="add", shared_intermediate=8)


def of(kind: str, **changes: Any) -> Architecture:
    return architecture_of({**BASE, "model_type": kind, **changes})


def test_windows_alternate_as_the_family_does() -> None:
    """Published configs of Gemma name neither the layers nor the local rotation."""
    gemma2 = of("gemma2", sliding_window=8, head_dim=16)
    gemma3 = of("gemma3_text", sliding_window=8, head_dim=16)

    assert [layer.window for layer in gemma2.layers] == [8, 0] * 3
    assert [layer.window for layer in gemma3.layers] == [8, 8, 8, 8, 8, 0]
    assert gemma3.ropes["local"].theta == 10_000.0
    assert gemma3.ropes["full"].theta == 1e6


def test_queries_are_divided_by_the_root_of_their_own_number() -> None:
    """The 27B models divide by the root of hidden / heads, the others by that of head_dim."""
    assert of("gemma2", query_pre_attn_scalar=144, head_dim=16).score_scale == 1 / 12


def test_text_part_of_a_model_that_sees_is_read() -> None:
    """Its config stands inside, without the fields that have the family's defaults."""
    text = {"model_type": "gemma3_text", "num_hidden_layers": 2, "hidden_size": 64,
            "intermediate_size": 96, "sliding_window": 8}  # fmt: skip

    found = architecture_of({"model_type": "gemma3", "text_config": text, "vision_config": {}})

    assert (found.family, found.heads, found.vocab) == ("gemma3_text", 8, 262_208)
    assert found.tie_embeddings


def test_fields_that_published_configs_leave_out_have_the_defaults_of_their_family() -> None:
    """Gemma 1 says gelu and means its approximation; a null field is one left out."""
    assert of("gemma", hidden_act="gelu", hidden_activation=None).activation == "gelu_tanh"
    assert of("glm4", head_dim=None).head_dim == 128
    assert of("glm4").ropes["full"].dim == 64
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    assert of("gpt_oss", **experts, rope_theta=None).ropes["full"].theta == 150_000.0
    assert of("gpt_oss", **experts).head_dim == 64


def test_window_of_all_layers_is_the_context() -> None:
    """Within it sliding attention equals full attention, so the fast kernels run."""
    found = of("mistral", sliding_window=128)

    assert found.context == 128
    assert all(layer.window == 0 for layer in found.layers)


@each_row("kind", [*REFUSED, "gpt2", ""])
def test_other_families_are_refused_by_name(kind: str) -> None:
    """Granite's tensors have Llama's names, but its multipliers make it another model."""
    with pytest.raises(ModelError, match=f"unsupported model type: '{kind}'") as caught:
        of(kind)

    assert caught.value.code == "unsupported"
    assert any(family in caught.value.message for family in FAMILIES)


@each_row(
    ("kind", "changes", "code"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "unsupported"),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 5.0},
         "unsupported"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["linear_attention"] * 6},
         "unsupported"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "corrupt"),
        ("mixtral", {}, "corrupt"),
        ("llama", {"hidden_act": "relu"}, "unsupported"),
        ("gemma2", {"sliding_window": 8, "query_pre_attn_scalar": -1}, "corrupt"),
    ],
)  # fmt: skip
def test_config_that_would_compute_another_model_is_refused(
    kind: str, changes: dict[str, Any], code: str
) -> None:
    """A wrong guess loads and answers nonsense."""
    with pytest.raises(ModelError) as caught:
        of(kind, **changes)

    assert caught.value.code == code


@each_row(
    "change",
    [
        {"layers": ()},
        {"layers": (Layer(rope="absent"),)},
        {"layers": (Layer(window=-1),)},
        {"layers": (Layer("none"),)},
        {"place": "single"},
        {"ropes": {"full": {"theta": 0.0, "dim": 16}}},
        {"ropes": {"full": {"theta": 1e4, "dim": 18}}},
        {"ropes": {"full": {"theta": 1e4, "dim": 16, "kind": "divisors", "divisors": [1.0]}}},
        {"moe": Moe(experts=4, top_k=5, intermediate=8)},
        {"moe": Moe(experts=4, top_k=2, intermediate=8, groups=3)},
        {"moe": Moe(experts=4, top_k=2, intermediate=8, groups=4, groups_kept=1)},
    ],
)
def test_impossible_architecture_is_refused(change: dict[str, Any]) -> None:
    """A damaged card or config must not end in an index outside a tensor."""
    fields = {**msgspec.to_builtins(tiny_config()), **msgspec.to_builtins(change)}
    fields["layers"] = fields["layers"] or [{}]
    broken = msgspec.convert(fields, Architecture)
    if change.get("layers") == ():
        broken = msgspec.structs.replace(broken, layers=())

    with pytest.raises(ModelError) as caught:
        check_architecture(broken)

    assert caught.value.code == "corrupt"


@each_row(
    ("change", "fits_c"),
    [
        ({"residual_scale": 2.0}, True),
        ({"place": "post"}, True),
        ({"place": "post", "residual_scale": 2.0}, False),
        ({"latent": Latent(32, 16, 8, 16)}, False),
        ({"mlp_bias": True, "moe": SHARED}, False),
        ({"mlp_bias": True, "moe": msgspec.structs.replace(SHARED, shared="")}, True),
        ({"moe": SHARED}, True),
        ({"output_gate": True}, True),
        ({"layers": (Layer("conv"), Layer()), "conv_width": 3}, True),
    ],
)
def test_architecture_knows_which_kernels_fit(change: dict[str, Any], fits_c: bool) -> None:
    """A kernel that lacks a feature computes another model without a word. The comparison of C and
    torch in `models/test_logits.py` has the other features that fit."""
    found = msgspec.structs.replace(tiny_config(), **change)

    assert found.fits_c_kernels == fits_c
