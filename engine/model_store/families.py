"""The families of models that run: each is a function from its config to an `Architecture`.

A config is the content of a Hugging Face `config.json`; `engine.model_store.gguf` translates the
metadata of GGUF files into one. Strict where a wrong guess would compute another model, lenient
elsewhere: published configs have many fields that change nothing. It knows no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from engine.errors import ModelError
from engine.model_store.architecture import (
    FULL,
    REFUSED,
    SIZE_NAMES,
    Architecture,
    Delta,
    Latent,
    Layer,
    Mamba,
    Moe,
    Rope,
)
from engine.model_store.rope_parameters import (
    Config,
    known,
    local_rope,
    read_rope,
    rope_parameters,
    yarn_scale,
)
from engine.model_store.tensors import (
    DELTA_NAMES,
    GGUF_FUSED_NAMES,
    GGUF_LFM2_NAMES,
    GGUF_MAMBA_NAMES,
    GGUF_NORM_NAMES,
    GLM4_NAMES,
    GPT_OSS_NAMES,
    GRANITE_HYBRID_NAMES,
    LFM2_NAMES,
    MIXTRAL_NAMES,
    NEMOTRON_H_NAMES,
    SANDWICH_NAMES,
    Names,
)

Mixer = Literal["gqa", "conv", "delta", "mamba", "none"]
LOCAL = "local"
"""Name of the rotary table of window layers, if they have one of their own."""

LAYERS_MAX = 1024
"""Most layers of a model: a damaged number would fill memory before any tensor is missed."""


class Family(Struct, frozen=True):
    """A family of models.

    `folder_names`, `gguf_names`: tensors that the family names its own way.
    """

    models: str
    """For the documents."""
    read: Callable[[Config], Architecture]
    """Config → architecture."""
    gguf: str = ""
    """The architecture's name in GGUF files, empty if these are not read."""
    gguf_interleaved: bool = False
    """GGUF files of the family hold rotating channels as neighbours."""
    folder_names: Names = {}
    gguf_names: Names = {}
    defaults: Config = {}
    """Fields that published configs leave out or hold as null."""


def architecture_of(config: Config) -> Architecture:
    """Return the architecture of a config.json. Raises ModelError: unsupported or corrupt."""
    kind = str(config.get("model_type", ""))
    inner = config.get("text_config")
    if kind not in FAMILIES and isinstance(inner, dict):
        tied = config.get("tie_word_embeddings")
        return architecture_of({"tie_word_embeddings": tied, **inner})
    family = FAMILIES.get(kind)
    if family is None:
        raise unsupported_family(kind)
    given = {**family.defaults, **known(config)}
    try:
        if kinds := given.get("layers_block_type"):
            given.setdefault("num_hidden_layers", len(kinds))
        for name in ("num_hidden_layers", *SIZE_NAMES.values()):
            size = given.get(name)
            if size is not None and (not isinstance(size, int | float) or size != int(size)):
                raise ValueError(f"{name}: {size!r}; expected a whole number")
        if not 0 < (layers := int(given["num_hidden_layers"])) <= LAYERS_MAX:
            raise ValueError(f"num_hidden_layers: {layers}; expected 1 to {LAYERS_MAX}")
        return family.read(given)
    except KeyError as missing:
        raise ModelError("corrupt", f"config.json has no {missing.args[0]}") from missing
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelError("corrupt", f"config.json: {error}.") from error


def unsupported_family(kind: str) -> ModelError:
    """Return the error for a family that does not run, with the reason where it is known."""
    if kind in FAMILIES:
        return ModelError(
            "unsupported",
            f"GGUF files of {kind} are not supported; expected its folder of safetensors",
        )
    if kind in REFUSED:
        return ModelError("unsupported", f"unsupported model type: {kind!r}: {REFUSED[kind]}")
    names = ", ".join(sorted(FAMILIES))
    return ModelError("unsupported", f"unsupported model type: {kind!r}; expected one of {names}")


# -- parts that families share -----------------------------------------------------------------


def _decoder(
    c: Config,
    *,
    layers: tuple[Layer, ...] | None = None,
    ropes: dict[str, Rope] | None = None,
    **features: Any,
) -> Architecture:
    """Return the architecture of a config, Llama's unless the arguments say otherwise."""
    count, heads = int(c["num_hidden_layers"]), int(c["num_attention_heads"])
    context = int(c["max_position_embeddings"])
    layers = layers if layers is not None else (Layer(),) * count
    if len(layers) != count:
        raise ValueError(f"{len(layers)} layer types; expected {count}, one for each layer")
    if all(layer.window for layer in layers):
        # Within its window, sliding attention equals full attention, so the window is the context.
        context = min(context, *(layer.window for layer in layers))
        layers = tuple(replace(layer, window=0) for layer in layers)
    sizes = {
        "kv_heads": int(c.get("num_key_value_heads") or heads),
        "head_dim": _head_dim(c),
        "norm_eps": float(c.get("rms_norm_eps", 1e-6)),
        "activation": features.get("activation") or _activation(c),
    }
    return Architecture(
        family=str(c["model_type"]),
        layers=layers,
        hidden=int(c["hidden_size"]),
        intermediate=int(c["intermediate_size"]),
        heads=heads,
        vocab=int(c["vocab_size"]),
        context=context,
        ropes=ropes or {FULL: read_rope(rope_parameters(c), _head_dim(c))},
        tie_embeddings=bool(c.get("tie_word_embeddings", False)),
        **{**sizes, **features},
    )


def _head_dim(c: Config) -> int:
    return int(c.get("head_dim") or int(c["hidden_size"]) // int(c["num_attention_heads"]))


def _full_and_local(c: Config, local_theta: float) -> dict[str, Rope]:
    """Return the rotary tables of layers without and with a window."""
    head_dim = _head_dim(c)
    full = read_rope(rope_parameters(c), head_dim)
    return {FULL: full, LOCAL: local_rope(c, head_dim, local_theta)}


def _activation(c: Config) -> Literal["silu", "gelu_tanh"]:
    named = c.get("hidden_activation") or c.get("hidden_act") or "silu"
    if named in ("silu", "swish"):
        return "silu"
    if named in ("gelu_pytorch_tanh", "gelu_tanh", "gelu_new"):
        return "gelu_tanh"
    raise ModelError(
        "unsupported", f"unsupported activation: {named!r}; expected silu or gelu_pytorch_tanh"
    )


def _windows(c: Config, default: Callable[[int], bool]) -> list[int]:
    """Return each layer's window, 0 for full attention; `default(i)` says which layers have one
    where the config does not."""
    count, window = int(c["num_hidden_layers"]), int(c.get("sliding_window") or 0)
    kinds = c.get("layer_types")
    if kinds is None:
        return [window if default(i) else 0 for i in range(count)]
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ModelError(
            "unsupported",
            f"unsupported layer type: {unknown[0]!r}; expected full_attention or sliding_attention",
        )
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def _biases(c: Config, *, output: bool = True) -> dict[str, Any]:
    """Return the features of `attention_bias`; `output`: the output projection has one too."""
    has_bias = bool(c.get("attention_bias", False))
    return {"qkv_bias": has_bias, "output_bias": has_bias and output}


def _sparse(c: Config, *, dense_first: int = 0) -> tuple[Literal["dense", "moe"], ...]:
    """Return which layers have experts."""
    count = int(c["num_hidden_layers"])
    kinds = c.get("mlp_layer_types")
    if kinds is not None:
        return tuple("moe" if kind == "sparse" else "dense" for kind in kinds)
    dense = set(c.get("mlp_only_layers") or ())
    step = int(c.get("decoder_sparse_step") or 1)
    return tuple(
        "moe" if i >= dense_first and i not in dense and (i + 1) % step == 0 else "dense"
        for i in range(count)
    )


# -- families ----------------------------------------------------------------------------------


def _llama(c: Config) -> Architecture:
    return _decoder(c, mlp_bias=bool(c.get("mlp_bias", False)), **_biases(c))


def _mistral(c: Config) -> Architecture:
    layers = tuple(Layer(window=w) for w in _windows(c, lambda _: True))
    return _decoder(c, layers=layers, **_biases(c))


def _ministral3(c: Config) -> Architecture:
    parameters = rope_parameters(c)
    beta = float(parameters.get("llama_4_scaling_beta") or 0.0)
    growth = (beta, int(parameters["original_max_position_embeddings"])) if beta else None
    layers = tuple(Layer(window=w) for w in _windows(c, lambda _: True))
    return _decoder(c, layers=layers, query_growth=growth)


def _qwen2_windows(c: Config) -> list[int]:
    if not c.get("use_sliding_window", False):
        return [0] * int(c["num_hidden_layers"])
    return _windows(c, lambda i: i >= int(c.get("max_window_layers", 28)))


def _qwen2(c: Config) -> Architecture:
    layers = tuple(Layer(window=w) for w in _qwen2_windows(c))
    return _decoder(c, layers=layers, qkv_bias=True)


def _qwen3(c: Config) -> Architecture:
    layers = tuple(Layer(window=w) for w in _qwen2_windows(c))
    return _decoder(c, layers=layers, qk_norm="head", **_biases(c))


def _phi3(c: Config) -> Architecture:
    return _decoder(c, layers=tuple(Layer(window=w) for w in _windows(c, lambda _: True)))


def _smollm3(c: Config) -> Architecture:
    interval = int(c.get("no_rope_layer_interval") or 4)
    count = int(c["num_hidden_layers"])
    rotates = c.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(count)]
    windows = [0] * count
    if c.get("use_sliding_window", False):
        windows = _windows(c, lambda i: not rotates[i])
    layers = tuple(
        Layer(window=w, rope=FULL if r else "") for w, r in zip(windows, rotates, strict=True)
    )
    return _decoder(c, layers=layers, mlp_bias=bool(c.get("mlp_bias", False)), **_biases(c))


def _olmo2(c: Config) -> Architecture:
    return _decoder(c, place="post", qk_norm="whole", **_biases(c))


def _olmo3(c: Config) -> Architecture:
    windows = _windows(c, lambda i: (i + 1) % 4 != 0)
    ropes = _full_and_local(c, float(c["rope_theta"]))
    layers = tuple(Layer(window=w, rope=LOCAL if w else FULL) for w in windows)
    return _decoder(c, layers=layers, ropes=ropes, place="post", qk_norm="whole", **_biases(c))


def _granite(c: Config) -> Architecture:
    return _decoder(c, mlp_bias=bool(c.get("mlp_bias", False)), **_granite_features(c))


def _granite_features(c: Config) -> dict[str, Any]:
    return {
        "embed_scale": float(c.get("embedding_multiplier") or 1.0),
        "residual_scale": float(c.get("residual_multiplier") or 1.0),
        "logit_scale": 1.0 / float(c.get("logits_scaling") or 1.0),
        "score_scale": float(c.get("attention_multiplier") or 0.0),
        **_biases(c),
    }


def _granite_hybrid(c: Config) -> Architecture:
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
    return _decoder(
        c if experts else {**c, "intermediate_size": shared},
        layers=tuple(replace(layer, mixer=mixer) for mixer in mixers),
        moe=moe,
        **_granite_features(c),
        **(_mamba_features(c) if "mamba" in mixers else {}),
    )


def _mamba_features(c: Config) -> dict[str, Any]:
    """Return the features of layers of Mamba-2 with Bamba's names of fields."""
    if _activation(c) != "silu":
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


def _nemotron_h(c: Config) -> Architecture:
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
    return _decoder(
        c,
        layers=tuple(_NEMOTRON_LAYERS[kind] for kind in kinds),
        place="single",
        activation="relu2",
        norm_eps=float(c.get("layer_norm_epsilon", 1e-5)),
        mlp_bias=bool(c.get("mlp_bias", False)),
        conv_bias=bool(c.get("use_conv_bias", True)),
        **(rules if "mamba" in kinds else {}),
        **_biases(c),
    )


def _gemma_features(c: Config) -> dict[str, Any]:
    return {
        "embed_scale": math.sqrt(int(c["hidden_size"])),
        "norms_less_one": True,
        **_biases(c),
    }


def _later_gemma_features(c: Config) -> dict[str, Any]:
    return {
        "place": "sandwich",
        # The root of a negative number is complex, which is no float: the config is corrupt.
        "score_scale": float(float(c.get("query_pre_attn_scalar") or 256) ** -0.5),
        "score_cap": float(c.get("attn_logit_softcapping") or 0.0),
        "logit_cap": float(c.get("final_logit_softcapping") or 0.0),
        **_gemma_features(c),
    }


def _gemma(c: Config) -> Architecture:
    return _decoder(c, **_gemma_features(c))


def _gemma2(c: Config) -> Architecture:
    layers = tuple(Layer(window=w) for w in _windows(c, lambda i: i % 2 == 0))
    return _decoder(c, layers=layers, **_later_gemma_features(c))


def _gemma3(c: Config) -> Architecture:
    if c.get("use_bidirectional_attention"):
        raise ModelError(
            "unsupported", "bidirectional attention is not supported; expected a causal model"
        )
    pattern = int(c.get("sliding_window_pattern") or 6)
    windows = _windows(c, lambda i: (i + 1) % pattern != 0)
    return _decoder(
        c,
        layers=tuple(Layer(window=w, rope=LOCAL if w else FULL) for w in windows),
        ropes=_full_and_local(c, float(c.get("rope_local_base_freq") or 10_000.0)),
        qk_norm="head",
        **_later_gemma_features(c),
    )


def _cohere2(c: Config) -> Architecture:
    pattern = int(c.get("sliding_window_pattern") or 4)
    windows = _windows(c, lambda i: (i + 1) % pattern != 0)
    return _decoder(
        c,
        layers=tuple(Layer(window=w, rope=FULL if w else "") for w in windows),
        place="parallel",
        norm="mean",
        norm_eps=float(c.get("layer_norm_eps", 1e-5)),
        interleaved=True,
        logit_scale=float(c.get("logit_scale") or 1.0),
        **_biases(c),
    )


def _glm4(c: Config) -> Architecture:
    return _decoder(c, place="sandwich", interleaved=True, **_biases(c, output=False))


def _shared_experts(c: Config) -> dict[str, Any]:
    """Return the features of the DeepSeek kind of shared experts."""
    shared = int(c.get("n_shared_experts") or 0)
    return {
        "shared": "add" if shared else "",
        "shared_intermediate": shared * int(c["moe_intermediate_size"]),
    }


def _glm4_moe(c: Config) -> Architecture:
    sparse = _sparse(c, dense_first=int(c.get("first_k_dense_replace", 1)))
    return _decoder(
        c,
        layers=tuple(Layer(ffn=ffn) for ffn in sparse),
        qk_norm="head" if c.get("use_qk_norm") else "",
        moe=_sigmoid_moe(c),
        **_biases(c, output=False),
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


def _mixtral(c: Config) -> Architecture:
    windows = _windows(c, lambda _: True)
    moe = Moe(
        experts=int(c["num_local_experts"]),
        top_k=int(c["num_experts_per_tok"]),
        intermediate=int(c["intermediate_size"]),
    )
    return _decoder(c, layers=tuple(Layer(window=w, ffn="moe") for w in windows), moe=moe)


def _qwen_moe(c: Config, **features: Any) -> Architecture:
    windows = _qwen2_windows(c)
    layers = tuple(Layer(window=w, ffn=f) for w, f in zip(windows, _sparse(c), strict=True))
    return _decoder(c, layers=layers, moe=_qwen_experts(c), **features)


def _qwen_experts(c: Config) -> Moe:
    shared = int(c.get("shared_expert_intermediate_size") or 0)
    return Moe(
        experts=int(c.get("num_experts") or c["num_local_experts"]),
        top_k=int(c["num_experts_per_tok"]),
        intermediate=int(c["moe_intermediate_size"]),
        renormalise=bool(c.get("norm_topk_prob", False)),
        shared="gated" if shared else "",
        shared_intermediate=shared,
    )


def _qwen2_moe(c: Config) -> Architecture:
    return _qwen_moe(c, qkv_bias=bool(c.get("qkv_bias", True)))


def _qwen3_moe(c: Config) -> Architecture:
    return _qwen_moe(c, qk_norm="head", **_biases(c))


def _gpt_oss(c: Config) -> Architecture:
    windows = _windows(c, lambda i: i % 2 == 0)
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
    return _decoder(
        c,
        layers=tuple(Layer(window=w, ffn="moe") for w in windows),
        sinks=True,
        moe=moe,
        **_biases(c),
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


def _qwen3_hybrid(c: Config) -> Architecture:
    every, count = int(c.get("full_attention_interval") or 4), int(c["num_hidden_layers"])
    mixers = _mixers(
        c.get("layer_types")
        or ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(count)],
        "delta",
    )
    has_experts = bool(c.get("num_experts"))
    sparse = _sparse(c if has_experts else {**c, "mlp_only_layers": range(len(mixers))})
    delta = Delta(
        key_heads=int(c["linear_num_key_heads"]),
        value_heads=int(c["linear_num_value_heads"]),
        key_dim=int(c["linear_key_head_dim"]),
        value_dim=int(c["linear_value_head_dim"]),
    )
    intermediate = c.get("intermediate_size") or c["moe_intermediate_size"]
    return _decoder(
        {**c, "intermediate_size": intermediate},
        layers=tuple(Layer(m, ffn=ffn) for m, ffn in zip(mixers, sparse, strict=True)),
        qk_norm="head",
        norms_less_one=True,
        output_gate=True,
        delta=delta if "delta" in mixers else None,
        conv_width=int(c["linear_conv_kernel_dim"]),
        moe=_qwen_experts(c) if has_experts else None,
        **_biases(c),
    )


def _lfm2(c: Config) -> Architecture:
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
    sparse = _sparse(c, dense_first=int(c.get("num_dense_layers", 2))) if moe else ()
    return _decoder(
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
    sparse = _sparse(c, dense_first=int(c.get("first_k_dense_replace", 1)))
    return _decoder(
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


def _deepseek_v2(c: Config) -> Architecture:
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


def _deepseek_v3(c: Config) -> Architecture:
    return _latent(c, interleaved=bool(c.get("rope_interleave", True)), moe=_sigmoid_moe(c))


_GEMMA_DEFAULTS: Config = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",  # Gemma 1 says gelu in `hidden_act`, and means this
}

_QWEN_HYBRID: Config = {"partial_rotary_factor": 0.25, "norm_topk_prob": True}

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama 2, 3 to 3.3, SmolLM 1 and 2", _llama, "llama", gguf_interleaved=True),
    "mistral": Family("Mistral 7B, Small, Nemo", _mistral, "llama", gguf_interleaved=True),
    "ministral3": Family("Ministral 3", _ministral3, "mistral3", gguf_interleaved=True),
    "qwen2": Family("Qwen 2, 2.5", _qwen2, "qwen2"),
    "qwen3": Family("Qwen 3 dense", _qwen3, "qwen3"),
    "phi3": Family("Phi-3, 3.5, 4", _phi3, "phi3", gguf_names=GGUF_FUSED_NAMES),
    "smollm3": Family("SmolLM 3", _smollm3, "smollm3", gguf_interleaved=True),
    "olmo2": Family("OLMo 2", _olmo2, "olmo2", folder_names=SANDWICH_NAMES),
    "olmo3": Family(
        "OLMo 3", _olmo3, "olmo2", folder_names=SANDWICH_NAMES, defaults={"rope_theta": 500_000.0}
    ),
    "granite": Family("Granite 3", _granite, "granite", gguf_interleaved=True),
    "granitemoehybrid": Family(
        "Granite 4", _granite_hybrid, "granitehybrid", gguf_interleaved=True,
        folder_names=GRANITE_HYBRID_NAMES, gguf_names=GGUF_MAMBA_NAMES,
        defaults={"rope_theta": 10_000.0},
    ),
    "gemma": Family("Gemma 1", _gemma, "gemma", defaults=_GEMMA_DEFAULTS),
    "gemma2": Family(
        "Gemma 2", _gemma2, "gemma2", folder_names=SANDWICH_NAMES, defaults=_GEMMA_DEFAULTS
    ),
    "gemma3_text": Family(
        "Gemma 3", _gemma3, "gemma3", folder_names=SANDWICH_NAMES,
        defaults={
            **_GEMMA_DEFAULTS, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
            "vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1e6,
        },
    ),
    "cohere2": Family(
        "Command R7B, Command A", _cohere2, "cohere2", gguf_interleaved=True,
        defaults={"tie_word_embeddings": True},
    ),
    "glm4": Family(
        "GLM-4 dense", _glm4, "glm4", gguf_interleaved=True,
        folder_names=GLM4_NAMES, gguf_names=GGUF_FUSED_NAMES,
        defaults={"head_dim": 128, "partial_rotary_factor": 0.5},
    ),
    "glm4_moe": Family(
        "GLM-4.5, 4.6", _glm4_moe, "glm4moe", gguf_names=GGUF_NORM_NAMES,
        defaults={"partial_rotary_factor": 0.5},
    ),
    "mixtral": Family(
        "Mixtral", _mixtral, "llama", gguf_interleaved=True, folder_names=MIXTRAL_NAMES
    ),
    "qwen2_moe": Family("Qwen 1.5 and 2 MoE", _qwen2_moe, "qwen2moe"),
    "qwen3_moe": Family("Qwen 3 MoE", _qwen3_moe, "qwen3moe"),
    "gpt_oss": Family(
        "gpt-oss", _gpt_oss, "gpt-oss", folder_names=GPT_OSS_NAMES, gguf_names=GGUF_NORM_NAMES,
        defaults={"head_dim": 64, "rope_theta": 150_000.0, "attention_bias": True},
    ),
    "lfm2": Family(
        "LFM2", _lfm2, "lfm2", folder_names=LFM2_NAMES, gguf_names=GGUF_LFM2_NAMES,
        defaults={"tie_word_embeddings": True, "rope_theta": 1e6},
    ),
    "lfm2_moe": Family(
        "LFM2 MoE", _lfm2, "lfm2moe", folder_names=LFM2_NAMES, gguf_names=GGUF_LFM2_NAMES,
        defaults={"tie_word_embeddings": True, "rope_theta": 1e6},
    ),
    "qwen3_next": Family(
        "Qwen3-Next", _qwen3_hybrid, folder_names=DELTA_NAMES, defaults=_QWEN_HYBRID
    ),
    "qwen3_5_text": Family(
        "Qwen 3.5, 3.6 dense", _qwen3_hybrid, folder_names=DELTA_NAMES, defaults=_QWEN_HYBRID
    ),
    "qwen3_5_moe_text": Family(
        "Qwen 3.5, 3.6 MoE", _qwen3_hybrid, folder_names=DELTA_NAMES, defaults=_QWEN_HYBRID
    ),
    "nemotron_h": Family(
        "Nemotron-H, Nemotron Nano 2", _nemotron_h, folder_names=NEMOTRON_H_NAMES,
        defaults={"rope_theta": 10_000.0},
    ),
    "deepseek_v2": Family(
        "DeepSeek-V2, V2-Lite", _deepseek_v2, "deepseek2", gguf_interleaved=True
    ),
    "deepseek_v3": Family(
        "DeepSeek-V3's shape: Moonlight", _deepseek_v3, "deepseek2", gguf_interleaved=True
    ),
    "glm4_moe_lite": Family("GLM-4.7-Flash", _deepseek_v3, "deepseek2", gguf_interleaved=True),
}  # fmt: skip
"""Families by the `model_type` of their config.json."""
