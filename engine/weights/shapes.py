"""The names and shapes of a model's tensors, as its architecture implies them.

Names are Llama's (`model.layers.0.mlp.up_proj.weight`), extended by parts that Llama lacks. Loaders
check against these shapes; random weights are made from them.
"""

from __future__ import annotations

from engine.model_store import Architecture

Shapes = dict[str, tuple[int, ...]]


def expected_shapes(config: Architecture) -> Shapes:
    """Return the names and shapes of a model's tensors."""
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab, config.hidden)}
    for index, layer in enumerate(config.layers):
        mixer = _latent_attention(config) if layer.mixer == "mla" else _attention(config)
        dense = layer.ffn == "dense"
        mlp = _mlp(config, "mlp", config.intermediate) if dense else _experts(config)
        norms = {f"{name}.weight": (config.hidden,) for name in config.layer_norms}
        for name, shape in {**norms, **mixer, **mlp}.items():
            shapes[f"model.layers.{index}.{name}"] = shape
    shapes["model.norm.weight"] = (config.hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab, config.hidden)
    return shapes


def _attention(c: Architecture) -> Shapes:
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes: Shapes = {}
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        shapes[f"self_attn.{name}_proj.weight"] = (rows, c.hidden)
        if c.qkv_bias:
            shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    shapes["self_attn.o_proj.weight"] = (c.hidden, queries)
    if c.output_bias:
        shapes["self_attn.o_proj.bias"] = (c.hidden,)
    if c.qk_norm:
        is_whole = c.qk_norm == "whole"
        shapes["self_attn.q_norm.weight"] = (queries if is_whole else c.head_dim,)
        shapes["self_attn.k_norm.weight"] = (keys if is_whole else c.head_dim,)
    if c.sinks:
        shapes["self_attn.sinks"] = (c.heads,)
    return shapes


def _latent_attention(c: Architecture) -> Shapes:
    latent = c.latent
    assert latent is not None
    queries = c.heads * (latent.nope + latent.rope)
    shapes: Shapes = {}
    if latent.query_rank:
        shapes["self_attn.q_a_proj.weight"] = (latent.query_rank, c.hidden)
        shapes["self_attn.q_a_layernorm.weight"] = (latent.query_rank,)
        shapes["self_attn.q_b_proj.weight"] = (queries, latent.query_rank)
    else:
        shapes["self_attn.q_proj.weight"] = (queries, c.hidden)
    shapes["self_attn.kv_a_proj_with_mqa.weight"] = (latent.rank + latent.rope, c.hidden)
    shapes["self_attn.kv_a_layernorm.weight"] = (latent.rank,)
    shapes["self_attn.k_b_proj.weight"] = (c.heads, latent.nope, latent.rank)
    shapes["self_attn.v_b_proj.weight"] = (c.heads, latent.value, latent.rank)
    shapes["self_attn.o_proj.weight"] = (c.hidden, c.heads * latent.value)
    return shapes


def _mlp(c: Architecture, name: str, intermediate: int) -> Shapes:
    shapes: Shapes = {}
    for part, rows, columns in (
        ("gate", intermediate, c.hidden),
        ("up", intermediate, c.hidden),
        ("down", c.hidden, intermediate),
    ):
        shapes[f"{name}.{part}_proj.weight"] = (rows, columns)
        if c.mlp_bias:
            shapes[f"{name}.{part}_proj.bias"] = (rows,)
    return shapes


def _experts(c: Architecture) -> Shapes:
    moe = c.moe
    assert moe is not None
    has_bias = moe.expert == "clamped"
    shapes: Shapes = {"mlp.gate.weight": (moe.experts, c.hidden)}
    if has_bias:
        shapes["mlp.gate.bias"] = (moe.experts,)
    if moe.choose_by_bias:
        shapes["mlp.gate.e_score_correction_bias"] = (moe.experts,)
    for part, rows, columns in (
        ("gate", moe.intermediate, c.hidden),
        ("up", moe.intermediate, c.hidden),
        ("down", c.hidden, moe.intermediate),
    ):
        shapes[f"mlp.experts.{part}_proj.weight"] = (moe.experts, rows, columns)
        if has_bias:
            shapes[f"mlp.experts.{part}_proj.bias"] = (moe.experts, rows)
    if moe.shared:
        shapes.update(_mlp(c, "mlp.shared_expert", moe.shared_intermediate))
    if moe.shared == "gated":
        shapes["mlp.shared_expert_gate.weight"] = (1, c.hidden)
    return shapes
