"""The tensors of a model: their names and shapes, and how published files hold them.

Loaded weights have one set of names, Llama's (`model.layers.0.mlp.up_proj.weight`), extended by the
parts that Llama lacks. `expected_shapes` says which of them an architecture implies: loaders check
against it, random weights are made from it, and memory is planned by it. A family's table says
which of them a tensor of a Hugging Face folder or a GGUF file holds, and in which form;
`engine.weights` reads by these tables. A third says how the lanes of an engine, a GPU each, share a
tensor.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from engine.model_store.architecture import Architecture

Form = Literal[
    "rows", "experts", "in_turns", "in_turns_transposed", "transposed", "by_head",
    "rows_by_head", "rows_by_key_head", "decay",
]  # fmt: skip


class Source(Struct, frozen=True):
    """The parts that a tensor of a file holds.

    `rows`: parts below each other, in order; one part is the tensor itself. `experts`: parts below
    each other in each expert. `in_turns`: [experts, outputs, ...], whose outputs alternate between
    the parts; `in_turns_transposed`: the same of [experts, inputs, outputs]. `transposed`: [experts
    or heads, inputs, outputs] of one part. `by_head`: the parts of each head below each other, in
    a tensor by heads; `rows_by_head`, `rows_by_key_head`: in parts that are rows, by heads of
    queries or of the delta rule's keys. `decay`: minus the exponential of the part.
    """

    parts: tuple[str, ...]
    form: Form = "rows"


Names = dict[str, Source]
"""Tables by a name's end behind the layer's number, without `.weight` or `.bias` where it has one.
`*` is an expert's number: such a tensor is one expert of a stack. `_blocks` means a matrix in
MXFP4, with its scales in a tensor beside."""


def one(part: str, form: Form = "rows") -> Source:
    """Return the source of a tensor that holds one part."""
    return Source((part,), form)


QKV = Source(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
GATE_UP = Source(("mlp.gate_proj", "mlp.up_proj"))
EXPERTS_GATE_UP = ("mlp.experts.gate_proj", "mlp.experts.up_proj")
KV_B = ("self_attn.k_b_proj", "self_attn.v_b_proj")

FOLDER_NAMES: Names = {
    "self_attn.qkv_proj": QKV,
    "mlp.gate_up_proj": GATE_UP,
    "self_attn.kv_b_proj": Source(KV_B, "by_head"),
    **{f"mlp.experts.*.{n}_proj": one(f"mlp.experts.{n}_proj") for n in ("gate", "up", "down")},
    "mlp.experts.gate_up_proj": Source(EXPERTS_GATE_UP, "experts"),
    **{f"mlp.shared_experts.{n}_proj": one(f"mlp.shared_expert.{n}_proj")
       for n in ("gate", "up", "down")},
}  # fmt: skip
"""Names of Hugging Face folders that differ from the loaded ones, in every family."""

MIXTRAL_NAMES: Names = {
    "block_sparse_moe.gate": one("mlp.gate"),
    "block_sparse_moe.experts.*.w1": one("mlp.experts.gate_proj"),
    "block_sparse_moe.experts.*.w3": one("mlp.experts.up_proj"),
    "block_sparse_moe.experts.*.w2": one("mlp.experts.down_proj"),
}
GPT_OSS_NAMES: Names = {
    "mlp.router": one("mlp.gate"),
    "mlp.experts.gate_up_proj": Source(EXPERTS_GATE_UP, "in_turns_transposed"),
    "mlp.experts.gate_up_proj_bias": Source(
        ("mlp.experts.gate_proj.bias", "mlp.experts.up_proj.bias"), "in_turns"
    ),
    "mlp.experts.gate_up_proj_blocks": Source(EXPERTS_GATE_UP, "in_turns"),
    "mlp.experts.down_proj": one("mlp.experts.down_proj", "transposed"),
    "mlp.experts.down_proj_bias": one("mlp.experts.down_proj.bias"),
    "mlp.experts.down_proj_blocks": one("mlp.experts.down_proj"),
}
LFM2_NAMES: Names = {
    "model.embedding_norm": one("model.norm"),
    "operator_norm": one("input_layernorm"),
    "ffn_norm": one("post_attention_layernorm"),
    "self_attn.out_proj": one("self_attn.o_proj"),
    "self_attn.q_layernorm": one("self_attn.q_norm"),
    "self_attn.k_layernorm": one("self_attn.k_norm"),
    **{
        f"feed_forward.{place}{name}": one(f"mlp.{expert}{part}_proj")
        for place, expert in (("", ""), ("experts.*.", "experts."))
        for name, part in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    },
    "feed_forward.experts.gate_up_proj": Source(EXPERTS_GATE_UP, "experts"),
    "feed_forward.experts.down_proj": one("mlp.experts.down_proj"),
    "feed_forward.gate": one("mlp.gate"),
    "feed_forward.expert_bias": one("mlp.gate.e_score_correction_bias"),
}
_DELTA = tuple(f"linear_attn.{name}_proj" for name in ("q", "k", "v", "z"))
DELTA_NAMES: Names = {
    "linear_attn.in_proj_qkv": Source(_DELTA[:3]),
    "linear_attn.in_proj_qkvz": Source(_DELTA, "rows_by_key_head"),
    "linear_attn.in_proj_ba": Source(
        ("linear_attn.b_proj", "linear_attn.a_proj"), "rows_by_key_head"
    ),
    **{f"linear_attn.in_proj_{n}": one(f"linear_attn.{n}_proj") for n in ("z", "b", "a")},
    "linear_attn.conv1d": one("linear_attn.conv"),
    "self_attn.q_proj": Source(("self_attn.q_proj", "self_attn.gate_proj"), "rows_by_head"),
}
"""Qwen3-Next and Qwen3.5: the gated delta rule, and attention with a gate beside its queries."""
GRANITE_HYBRID_NAMES: Names = {
    "mamba.conv1d": one("mamba.conv"),
    "block_sparse_moe.router.layer": one("mlp.gate"),
    "block_sparse_moe.input_linear": Source(EXPERTS_GATE_UP, "experts"),
    "block_sparse_moe.output_linear": one("mlp.experts.down_proj"),
    "shared_mlp.input_linear": Source(("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")),
    "shared_mlp.output_linear": one("mlp.shared_expert.down_proj"),
}
"""Granite 4 with experts or without."""
NEMOTRON_H_NAMES: Names = {
    "model.embeddings": one("model.embed_tokens"),
    "model.norm_f": one("model.norm"),
    "norm": one("input_layernorm"),
    "mixer.conv1d": one("mamba.conv"),
    **{f"mixer.{n}": one(f"mamba.{n}")
       for n in ("in_proj", "out_proj", "norm", "A_log", "D", "dt_bias")},
    **{f"mixer.{n}_proj": one(f"self_attn.{n}_proj") for n in "qkvo"},
    **{f"mixer.{n}_proj": one(f"mlp.{n}_proj") for n in ("up", "down")},
}  # fmt: skip
"""Nemotron-H: each layer is one block: Mamba-2, attention or an MLP."""
SANDWICH_NAMES: Names = {
    "post_attention_layernorm": one("attention_output_layernorm"),
    "pre_feedforward_layernorm": one("post_attention_layernorm"),
    "post_feedforward_layernorm": one("mlp_output_layernorm"),
}
"""Norms of Gemma 2 and 3, and of OLMo 2 and 3, which have no norm before the MLP."""
GLM4_NAMES: Names = {
    "post_self_attn_layernorm": one("attention_output_layernorm"),
    "post_mlp_layernorm": one("mlp_output_layernorm"),
}

GGUF_NAMES: Names = {
    "attn_norm": one("input_layernorm"),
    "ffn_norm": one("post_attention_layernorm"),
    "post_attention_norm": one("attention_output_layernorm"),
    "post_ffw_norm": one("mlp_output_layernorm"),
    "attn_q": one("self_attn.q_proj"),
    "attn_k": one("self_attn.k_proj"),
    "attn_v": one("self_attn.v_proj"),
    "attn_qkv": QKV,
    "attn_output": one("self_attn.o_proj"),
    "attn_q_norm": one("self_attn.q_norm"),
    "attn_k_norm": one("self_attn.k_norm"),
    "attn_sinks": one("self_attn.sinks"),
    "attn_q_a": one("self_attn.q_a_proj"),
    "attn_q_a_norm": one("self_attn.q_a_layernorm"),
    "attn_q_b": one("self_attn.q_b_proj"),
    "attn_kv_a_mqa": one("self_attn.kv_a_proj_with_mqa"),
    "attn_kv_a_norm": one("self_attn.kv_a_layernorm"),
    "attn_kv_b": Source(KV_B, "by_head"),
    "attn_k_b": one("self_attn.k_b_proj", "transposed"),
    "attn_v_b": one("self_attn.v_b_proj"),
    "ffn_gate": one("mlp.gate_proj"),
    "ffn_up": one("mlp.up_proj"),
    "ffn_down": one("mlp.down_proj"),
    "ffn_gate_inp": one("mlp.gate"),
    "exp_probs_b": one("mlp.gate.e_score_correction_bias"),
    "ffn_gate_exps": one("mlp.experts.gate_proj"),
    "ffn_up_exps": one("mlp.experts.up_proj"),
    "ffn_down_exps": one("mlp.experts.down_proj"),
    "ffn_gate_up_exps": Source(EXPERTS_GATE_UP, "experts"),
    "ffn_gate_shexp": one("mlp.shared_expert.gate_proj"),
    "ffn_up_shexp": one("mlp.shared_expert.up_proj"),
    "ffn_down_shexp": one("mlp.shared_expert.down_proj"),
    "ffn_gate_inp_shexp": one("mlp.shared_expert_gate"),
}
"""Names of GGUF files, behind `blk.N.`."""

GGUF_LFM2_NAMES: Names = {
    "token_embd_norm": one("model.norm"),
    "shortconv.in_proj": one("conv.in_proj"),
    "shortconv.conv": one("conv.conv"),
    "shortconv.out_proj": one("conv.out_proj"),
}
GGUF_MAMBA_NAMES: Names = {
    "ssm_in": one("mamba.in_proj"),
    "ssm_conv1d": one("mamba.conv"),
    "ssm_a": one("mamba.A_log", "decay"),
    "ssm_dt": one("mamba.dt_bias"),
    "ssm_d": one("mamba.D"),
    "ssm_norm": one("mamba.norm"),
    "ssm_out": one("mamba.out_proj"),
}
GGUF_DELTA_NAMES: Names = {
    "post_attention_norm": one("post_attention_layernorm"),
    "attn_q": Source(("self_attn.q_proj", "self_attn.gate_proj"), "rows_by_head"),
    "attn_qkv": Source(_DELTA[:3]),
    "attn_gate": one("linear_attn.z_proj"),
    "ssm_in": Source(_DELTA, "rows_by_key_head"),
    "ssm_ba": Source(("linear_attn.b_proj", "linear_attn.a_proj"), "rows_by_key_head"),
    "ssm_beta": one("linear_attn.b_proj"),
    "ssm_alpha": one("linear_attn.a_proj"),
    "ssm_conv1d": one("linear_attn.conv"),
    "ssm_a": one("linear_attn.A_log", "decay"),
    "ssm_dt": one("linear_attn.dt_bias"),
    "ssm_norm": one("linear_attn.norm"),
    "ssm_out": one("linear_attn.out_proj"),
}
"""Qwen3-Next, of which early files have `ssm_in` for queries to gates, and Qwen3.5."""
GGUF_FUSED_NAMES: Names = {"ffn_up": GATE_UP}
"""Phi-3 and GLM-4: gate and up in one tensor."""
GGUF_NORM_NAMES: Names = {"post_attention_norm": one("post_attention_layernorm")}
"""gpt-oss and GLM-4.5: this norm comes before the MLP."""


Shapes = dict[str, tuple[int, ...]]


def expected_shapes(config: Architecture) -> Shapes:
    """Return the names and shapes of a model's tensors."""
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab, config.hidden)}
    for index, layer in enumerate(config.layers):
        mixer = _MIXERS[layer.mixer](config) if layer.mixer != "none" else {}
        mlp = _experts(config) if layer.ffn == "moe" else {}
        if layer.ffn == "dense":
            mlp = _mlp(config, "mlp", config.intermediate)
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
    if c.output_gate:
        shapes["self_attn.gate_proj.weight"] = (queries, c.hidden)
        if c.qkv_bias:
            shapes["self_attn.gate_proj.bias"] = (queries,)
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


def _convolution(c: Architecture) -> Shapes:
    shapes: Shapes = {
        "conv.in_proj.weight": (3 * c.convolved, c.hidden),
        "conv.conv.weight": (c.convolved, c.conv_width),
        "conv.out_proj.weight": (c.hidden, c.convolved),
    }
    if c.conv_bias:
        shapes.update({name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()})
    return shapes


def _delta(c: Architecture) -> Shapes:
    delta = c.delta
    assert delta is not None
    rows = {
        "q": delta.keys, "k": delta.keys, "v": delta.values, "z": delta.values,
        "b": delta.value_heads, "a": delta.value_heads,
    }  # fmt: skip
    return {
        **{f"linear_attn.{name}_proj.weight": (count, c.hidden) for name, count in rows.items()},
        "linear_attn.conv.weight": (2 * delta.keys + delta.values, c.conv_width),
        "linear_attn.A_log": (delta.value_heads,),
        "linear_attn.dt_bias": (delta.value_heads,),
        "linear_attn.norm.weight": (delta.value_dim,),
        "linear_attn.out_proj.weight": (c.hidden, delta.values),
    }


def _mamba(c: Architecture) -> Shapes:
    mamba = c.mamba
    assert mamba is not None
    rows = mamba.inner + mamba.channels + mamba.heads
    shapes: Shapes = {
        "mamba.in_proj.weight": (rows, c.hidden),
        "mamba.conv.weight": (mamba.channels, c.conv_width),
        "mamba.A_log": (mamba.heads,),
        "mamba.dt_bias": (mamba.heads,),
        "mamba.D": (mamba.heads,),
        "mamba.norm.weight": (mamba.inner,),
        "mamba.out_proj.weight": (c.hidden, mamba.inner),
    }
    if c.conv_bias:
        shapes["mamba.conv.bias"] = (mamba.channels,)
    return shapes


_MIXERS = {
    "gqa": _attention, "mla": _latent_attention, "conv": _convolution, "delta": _delta,
    "mamba": _mamba,
}  # fmt: skip


def _mlp(c: Architecture, name: str, intermediate: int) -> Shapes:
    shapes: Shapes = {}
    for part, rows, columns in (
        ("gate", intermediate, c.hidden),
        ("up", intermediate, c.hidden),
        ("down", c.hidden, intermediate),
    ):
        if part == "gate" and c.activation == "relu2":
            continue
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


# --- lanes ------------------------------------------------------------------------------------

Cut = Literal["outputs", "sections", "inputs", "first", "whole"]
"""How lanes share a tensor. `outputs`: each has as many rows of a matrix, and of its bias;
`sections`: as many of each of the parts in `sections_of`; `inputs`: as many columns, so that the
map's result is a part of a sum; `first`: the first lane has it and the others have zeros, since it
is added to such a sum; `whole`: each has all of it."""

_SECTIONS = frozenset({"conv.in_proj", "linear_attn.conv", "mamba.in_proj", "mamba.conv"})
_OUTPUTS = frozenset(
    {
        "model.embed_tokens", "lm_head", "self_attn.sinks", "conv.conv",
        *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "gate")),
        *(f"linear_attn.{name}_proj" for name in ("q", "k", "v", "z", "b", "a")),
        "linear_attn.A_log", "linear_attn.dt",
        *(f"mamba.{name}" for name in ("A_log", "dt", "D", "norm")),
        *(f"mlp.{place}{name}_proj" for place in ("", "experts.", "shared_expert.")
          for name in ("gate", "up")),
    }
)  # fmt: skip
_INPUTS = frozenset(
    {
        "self_attn.o_proj", *(f"{mixer}.out_proj" for mixer in ("conv", "linear_attn", "mamba")),
        *(f"mlp.{place}down_proj" for place in ("", "experts.", "shared_expert.")),
    }
)  # fmt: skip
_WHOLE = frozenset(
    {
        "model.norm", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate", "mlp.shared_expert_gate",
        "mlp.gate.e_score_correction", "linear_attn.norm", "input_layernorm",
        "post_attention_layernorm", "attention_output_layernorm", "mlp_output_layernorm",
    }
)  # fmt: skip


def cut_of(name: str) -> Cut:
    """Return how lanes share a tensor. Raises KeyError for one that no model of several lanes has:
    see `lacks_lanes`."""
    stem = name.split(".", 3)[3] if name.startswith("model.layers.") else name
    stem = stem.removesuffix(".weight").removesuffix(".bias").removesuffix("_bias")
    if stem in _OUTPUTS:
        return "outputs"
    if stem in _SECTIONS:
        return "sections"
    if stem in _INPUTS:
        return "first" if name.endswith(".bias") else "inputs"
    if stem in _WHOLE:
        return "whole"
    raise KeyError(name)


def sections_of(config: Architecture, name: str) -> tuple[int, ...]:
    """Return the rows of each section of a tensor whose cut is `sections`: gates, inputs, and what
    heads read or write beside them."""
    if (mamba := config.mamba) is not None:
        written = mamba.groups * mamba.state_dim
        convolved = (mamba.inner, written, written)
        return (mamba.inner, *convolved, mamba.heads) if ".in_proj." in name else convolved
    if (delta := config.delta) is not None:
        return delta.keys, delta.keys, delta.values
    return (config.convolved,) * 3


def lane_architecture(config: Architecture, lanes: int) -> Architecture:
    """Return the shape of one lane's share of a model. `expected_shapes` of it are those of the
    lane's tensors."""
    if lanes == 1:
        return config
    moe = config.moe
    if moe is not None:
        middle, shared = moe.intermediate // lanes, moe.shared_intermediate // lanes
        moe = replace(moe, intermediate=middle, shared_intermediate=shared)
    delta, mamba = config.delta, config.mamba
    if delta is not None:
        keys, values = delta.key_heads // lanes, delta.value_heads // lanes
        delta = replace(delta, key_heads=keys, value_heads=values)
    if mamba is not None:
        mamba = replace(mamba, heads=mamba.heads // lanes, groups=mamba.groups // lanes)
    return replace(
        config, heads=config.heads // lanes, kv_heads=config.kv_heads // lanes,
        intermediate=config.intermediate // lanes, vocab=config.vocab // lanes, moe=moe,
        delta=delta, mamba=mamba, conv_channels=config.convolved // lanes,
    )  # fmt: skip


def lacks_lanes(config: Architecture, lanes: int) -> str:
    """Return why a model cannot be shared by so many lanes, or "" if it can."""
    if lanes == 1:
        return ""
    if config.latent is not None:
        return f"{config.family} keeps latents, which all heads read"
    if config.qk_norm == "whole":
        return f"{config.family} norms over all queries at once"
    if (mamba := config.mamba) is not None and mamba.groups == 1:
        return f"{config.family} norms over all heads of a recurrent layer at once"
    sizes = {"num_key_value_heads": config.kv_heads, "num_attention_heads": config.heads}
    if config.mamba is not None:
        sizes["mamba_n_groups"] = config.mamba.groups
    if config.delta is not None:
        sizes["linear_num_key_heads"] = config.delta.key_heads
    if any(layer.mixer == "conv" for layer in config.layers):
        sizes["hidden_size"] = config.hidden
    if any(layer.ffn == "dense" for layer in config.layers):
        sizes["intermediate_size"] = config.intermediate
    if config.moe is not None:
        sizes["moe_intermediate_size"] = config.moe.intermediate
        sizes["shared_expert_intermediate_size"] = config.moe.shared_intermediate
    sizes["vocab_size"] = config.vocab
    for name, size in sizes.items():
        if size % lanes:
            return f"{name} is {size}, which {lanes} GPUs cannot share evenly"
    return ""
