"""Families with recurrent layers, and Granite with experts: config to architecture."""

from __future__ import annotations

import math
from typing import Any, Literal

from msgspec.structs import replace

from engine.errors import ModelError
from engine.model_store.architecture import FULL, Architecture, Delta, Layer, Mamba, Moe
from engine.model_store.families.decoder import activation, biases, decoder, layer_mlps
from engine.model_store.families.dense import granite_features
from engine.model_store.families.experts import qwen_experts
from engine.model_store.rope_parameters import Config

Mixer = Literal["gqa", "conv", "delta", "mamba", "none"]


def granite_hybrid(c: Config) -> Architecture:
    """Return the architecture of Granite 4: Mamba-2 and attention, or attention alone."""
    mixers = _mixers(c.get("layer_types") or ["mamba"] * int(c["num_hidden_layers"]), "mamba")
    rotation = c.get("position_embedding_type") or "nope"
    if rotation not in ("nope", "rope"):
        raise ModelError(
            "unsupported", f"position_embedding_type: {rotation!r}; expected rope or nope"
        )
    experts, shared = int(c.get("num_local_experts") or 0), int(c["shared_intermediate_size"])
    moe = Moe(
        experts=experts,
        top_k=int(c["num_experts_per_tok"]),
        intermediate=int(c["intermediate_size"]),
        score="chosen_softmax",
        shared="add" if shared else "",
        shared_intermediate=shared,
    ) if experts else None  # fmt: skip
    layer = Layer(rope=FULL if rotation == "rope" else "", ffn="moe" if experts else "dense")
    return decoder(
        c if experts else {**c, "intermediate_size": shared},
        layers=tuple(replace(layer, mixer=mixer) for mixer in mixers),
        moe=moe,
        **granite_features(c),
        **(_mamba_features(c) if "mamba" in mixers else {}),
    )


def granite_moe(c: Config) -> Architecture:
    """Return the architecture of Granite 3 with experts: Granite 4's without Mamba-2."""
    shared = c.get("shared_intermediate_size") or c.get("shared_expert_intermediate_size") or 0
    kinds = ["attention"] * int(c["num_hidden_layers"])
    return granite_hybrid(
        {
            **c, "layer_types": kinds, "position_embedding_type": "rope",
            "shared_intermediate_size": shared,
        }
    )  # fmt: skip


def _mamba_features(c: Config) -> dict[str, Any]:
    """Return the features of layers of Mamba-2 with Bamba's names of fields."""
    if activation(c) != "silu":
        raise ModelError("unsupported", f"hidden_act: {c['hidden_act']!r}; expected silu")
    if c.get("mamba_proj_bias"):
        raise ModelError("unsupported", "mamba_proj_bias: True; expected maps without biases")
    _check_steps(c)
    heads, inner = int(c["mamba_n_heads"]), int(c["mamba_expand"] * int(c["hidden_size"]))
    given = c.get("mamba_d_head") or "auto"
    head_dim = inner // heads if given == "auto" else int(given)
    if heads * head_dim != inner:
        raise ValueError(
            f"mamba_n_heads: {heads} of {head_dim} channels; expected {inner} channels together,"
            " mamba_expand times hidden_size"
        )
    mamba = Mamba(
        heads=heads,
        head_dim=head_dim,
        state_dim=int(c["mamba_d_state"]),
        groups=int(c.get("mamba_n_groups") or 1),
    )
    bias = bool(c.get("mamba_conv_bias", True))
    return {"mamba": mamba, "conv_width": int(c["mamba_d_conv"]), "conv_bias": bias}


def _check_steps(c: Config) -> None:
    least, most = c.get("time_step_limit") or (0.0, None)
    if least != 0.0 or (isinstance(most, float) and math.isfinite(most)):
        raise ModelError("unsupported", f"time_step_limit: {[least, most]}; expected no limit")


_NEMOTRON_LAYERS: dict[str, Layer] = {
    "mamba": Layer("mamba", rope="", ffn="none"),
    "attention": Layer("gqa", rope="", ffn="none"),
    "mlp": Layer("none", rope="", ffn="dense"),
}


_NEMOTRON_KINDS = {
    "M": "mamba", "*": "attention", "-": "mlp", "E": "moe", "linear_attention": "mamba",
    "full_attention": "attention",
}  # fmt: skip
"""Other names of kinds of layers: of published patterns, and of transformers."""


def nemotron_h(c: Config) -> Architecture:
    given = c.get("layers_block_type") or list(c["hybrid_override_pattern"])
    kinds = [_NEMOTRON_KINDS.get(kind, kind) for kind in given]
    if unknown := sorted(set(kinds) - _NEMOTRON_LAYERS.keys()):
        raise ModelError(
            "unsupported",
            f"unsupported layer type: {unknown[0]!r}; expected mamba, attention or mlp: experts"
            " without a gate are not computed",
        )
    for field, wanted in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if (found := c.get(field, wanted)) != wanted:
            raise ModelError("unsupported", f"{field}: {found!r}; expected {wanted}")
    for field in ("use_bias", "mamba_proj_bias"):
        if c.get(field):
            raise ModelError("unsupported", f"{field}: True; expected maps without biases")
    _check_steps(c)
    mamba = Mamba(
        heads=int(c["mamba_num_heads"]),
        head_dim=int(c["mamba_head_dim"]),
        state_dim=int(c["ssm_state_size"]),
        groups=int(c["n_groups"]),
    )
    rules: dict[str, Any] = {"mamba": mamba, "conv_width": int(c["conv_kernel"])}
    return decoder(
        c,
        layers=tuple(_NEMOTRON_LAYERS[kind] for kind in kinds),
        place="single",
        activation="relu2",
        norm_eps=float(c.get("layer_norm_epsilon", 1e-5)),
        mlp_bias=bool(c.get("mlp_bias", False)),
        conv_bias=bool(c.get("use_conv_bias", True)),
        **(rules if "mamba" in kinds else {}),
        **biases(c),
    )


def _mixers(kinds: list[str], recurrent: Mixer) -> list[Mixer]:
    """Return the mixers of layers of such kinds; `recurrent`: of those with linear attention."""
    named: dict[str, Mixer] = {
        "full_attention": "gqa", "attention": "gqa", "linear_attention": recurrent,
        recurrent: recurrent,
    }  # fmt: skip
    if unknown := sorted(set(kinds) - named.keys()):
        raise ModelError(
            "unsupported",
            f"unsupported layer type: {unknown[0]!r}; expected full_attention or linear_attention",
        )
    return [named[kind] for kind in kinds]


def qwen3_hybrid(c: Config) -> Architecture:
    every, count = int(c.get("full_attention_interval") or 4), int(c["num_hidden_layers"])
    mixers = _mixers(
        c.get("layer_types")
        or ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(count)],
        "delta",
    )
    has_experts = bool(c.get("num_experts"))
    sparse = layer_mlps(c if has_experts else {**c, "mlp_only_layers": range(len(mixers))})
    delta = Delta(
        key_heads=int(c["linear_num_key_heads"]),
        value_heads=int(c["linear_num_value_heads"]),
        key_dim=int(c["linear_key_head_dim"]),
        value_dim=int(c["linear_value_head_dim"]),
    )
    intermediate = c.get("intermediate_size") or c["moe_intermediate_size"]
    return decoder(
        {**c, "intermediate_size": intermediate},
        layers=tuple(Layer(m, ffn=ffn) for m, ffn in zip(mixers, sparse, strict=True)),
        qk_norm="head",
        norms_less_one=True,
        output_gate=True,
        delta=delta if "delta" in mixers else None,
        conv_width=int(c["linear_conv_kernel_dim"]),
        moe=qwen_experts(c) if has_experts else None,
        **biases(c),
    )


def lfm2(c: Config) -> Architecture:
    kinds = c.get("layer_types")
    if kinds is None:
        attends = c.get("full_attn_idxs") or ()
        kinds = [
            "full_attention" if i in attends else "conv" for i in range(int(c["num_hidden_layers"]))
        ]
    if unknown := sorted(set(kinds) - {"conv", "full_attention"}):
        raise ModelError(
            "unsupported",
            f"unsupported layer type: {unknown[0]!r}; expected full_attention or conv",
        )
    moe = _lfm2_experts(c) if c["model_type"] == "lfm2_moe" else None
    sparse = layer_mlps(c, dense_first=int(c.get("num_dense_layers", 2))) if moe else ()
    return decoder(
        {**c, "intermediate_size": _lfm2_intermediate(c)},
        layers=tuple(
            Layer("conv" if kind == "conv" else "gqa", ffn=sparse[i] if sparse else "dense")
            for i, kind in enumerate(kinds)
        ),
        qk_norm="head",
        norm_eps=float(c.get("norm_eps", 1e-5)),
        conv_width=int(c.get("conv_L_cache", 3)),
        conv_bias=bool(c.get("conv_bias", False)),
        moe=moe,
    )


def _lfm2_intermediate(c: Config) -> int:
    """Return the channels of an MLP, which the config gives as those of one without a gate."""
    size = int(c.get("block_ff_dim") or c["intermediate_size"])
    if c["model_type"] != "lfm2" or not c.get("block_auto_adjust_ff_dim", True):
        return size
    multiple = int(c.get("block_multiple_of") or 256)
    wanted = int(float(c.get("block_ffn_dim_multiplier") or 1.0) * int(2 * size / 3))
    return -(-wanted // multiple) * multiple


def _lfm2_experts(c: Config) -> Moe:
    return Moe(
        experts=int(c["num_experts"]),
        top_k=int(c["num_experts_per_tok"]),
        intermediate=int(c["moe_intermediate_size"]),
        score="sigmoid",
        choose_by_bias=bool(c.get("use_expert_bias", True)),
        renormalise=bool(c.get("norm_topk_prob", True)),
        scale=float(c.get("routed_scaling_factor") or 1.0),
    )
