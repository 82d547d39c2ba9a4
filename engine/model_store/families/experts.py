"""Families with experts or latent attention: config to architecture."""

from __future__ import annotations

from typing import Any

from engine.errors import ModelError
from engine.model_store.architecture import FULL, Architecture, Latent, Layer, Moe
from engine.model_store.families.decoder import biases, decoder, layer_mlps, layer_windows
from engine.model_store.families.dense import qwen2_windows
from engine.model_store.rope_parameters import Config, read_rope, rope_parameters, yarn_scale


def _shared_experts(c: Config) -> dict[str, Any]:
    """Return the features of the DeepSeek kind of shared experts."""
    shared = int(c.get("n_shared_experts") or 0)
    return {
        "shared": "add" if shared else "",
        "shared_intermediate": shared * int(c["moe_intermediate_size"]),
    }


def glm4_moe(c: Config) -> Architecture:
    sparse = layer_mlps(c, dense_first=int(c.get("first_k_dense_replace", 1)))
    return decoder(
        c,
        layers=tuple(Layer(ffn=ffn) for ffn in sparse),
        qk_norm="head" if c.get("use_qk_norm") else "",
        moe=_sigmoid_moe(c),
        **biases(c, output=False),
    )


def _sigmoid_moe(c: Config) -> Moe:
    return Moe(
        experts=int(c["n_routed_experts"]),
        top_k=int(c["num_experts_per_tok"]),
        intermediate=int(c["moe_intermediate_size"]),
        score="sigmoid",
        choose_by_bias=True,
        renormalise=bool(c.get("norm_topk_prob", True)),
        scale=float(c.get("routed_scaling_factor") or 1.0),
        groups=int(c.get("n_group") or 1),
        groups_kept=int(c.get("topk_group") or 1),
        **_shared_experts(c),
    )


def mixtral(c: Config) -> Architecture:
    windows = layer_windows(c, lambda _: True)
    moe = Moe(
        experts=int(c["num_local_experts"]),
        top_k=int(c["num_experts_per_tok"]),
        intermediate=int(c["intermediate_size"]),
    )
    return decoder(c, layers=tuple(Layer(window=w, ffn="moe") for w in windows), moe=moe)


def _qwen_moe(c: Config, **features: Any) -> Architecture:
    windows = qwen2_windows(c)
    layers = tuple(Layer(window=w, ffn=f) for w, f in zip(windows, layer_mlps(c), strict=True))
    return decoder(c, layers=layers, moe=qwen_experts(c), **features)


def qwen_experts(c: Config) -> Moe:
    shared = int(c.get("shared_expert_intermediate_size") or 0)
    return Moe(
        experts=int(c.get("num_experts") or c["num_local_experts"]),
        top_k=int(c["num_experts_per_tok"]),
        intermediate=int(c["moe_intermediate_size"]),
        renormalise=bool(c.get("norm_topk_prob", False)),
        shared="gated" if shared else "",
        shared_intermediate=shared,
    )


def qwen2_moe(c: Config) -> Architecture:
    return _qwen_moe(c, qkv_bias=bool(c.get("qkv_bias", True)))


def qwen3_moe(c: Config) -> Architecture:
    return _qwen_moe(c, qk_norm="head", **biases(c))


def gpt_oss(c: Config) -> Architecture:
    windows = layer_windows(c, lambda i: i % 2 == 0)
    moe = Moe(
        experts=int(c["num_local_experts"]),
        top_k=int(c.get("num_experts_per_tok") or c["experts_per_token"]),
        intermediate=int(c["intermediate_size"]),
        score="chosen_softmax",
        expert="clamped",
    )
    for name, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if float(c.get(name, value)) != value:
            raise ModelError("unsupported", f"unsupported {name}: {c[name]}; expected {value}")
    return decoder(
        c,
        layers=tuple(Layer(window=w, ffn="moe") for w in windows),
        sinks=True,
        moe=moe,
        **biases(c),
    )


def _latent(c: Config, *, interleaved: bool, moe: Moe) -> Architecture:
    if c.get("attention_bias"):
        raise ModelError(
            "unsupported", "latent attention with biases is not supported; expected none"
        )
    latent = Latent(
        rank=int(c["kv_lora_rank"]),
        nope=int(c["qk_nope_head_dim"]),
        rope=int(c["qk_rope_head_dim"]),
        value=int(c["v_head_dim"]),
        query_rank=int(c.get("q_lora_rank") or 0),
    )
    sparse = layer_mlps(c, dense_first=int(c.get("first_k_dense_replace", 1)))
    return decoder(
        c,
        layers=tuple(Layer("mla", ffn=ffn) for ffn in sparse),
        ropes={FULL: read_rope(rope_parameters(c), latent.rope)},
        kv_heads=1,
        head_dim=latent.rope + latent.rank,
        latent=latent,
        interleaved=interleaved,
        score_scale=_latent_scale(c),
        moe=moe,
    )


def _latent_scale(c: Config) -> float:
    """Return the factor of the scores: yarn's amplitude acts on it, squared."""
    scale = (int(c["qk_nope_head_dim"]) + int(c["qk_rope_head_dim"])) ** -0.5
    parameters = rope_parameters(c)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    all_dims = float(parameters.get("mscale_all_dim") or 0.0)
    if kind == "default" or not all_dims:
        return float(scale)
    return float(scale * yarn_scale(float(parameters["factor"]), all_dims) ** 2)


def deepseek_v2(c: Config) -> Architecture:
    grouped = c.get("topk_method", "greedy") == "group_limited_greedy"
    moe = Moe(
        experts=int(c["n_routed_experts"]),
        top_k=int(c["num_experts_per_tok"]),
        intermediate=int(c["moe_intermediate_size"]),
        renormalise=False,
        scale=float(c.get("routed_scaling_factor") or 1.0),
        groups=int(c.get("n_group") or 1) if grouped else 1,
        groups_kept=int(c.get("topk_group") or 1) if grouped else 1,
        **_shared_experts(c),
    )
    return _latent(c, interleaved=True, moe=moe)


def deepseek_v3(c: Config) -> Architecture:
    return _latent(c, interleaved=bool(c.get("rope_interleave", True)), moe=_sigmoid_moe(c))
