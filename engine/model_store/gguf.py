"""Reads config, tokenizer and chat template from a GGUF file's metadata.

It translates the metadata into the fields of a config.json, which `families` reads. It reads the
header and, if present, the rotary divisors, but no weights. `prepare` calls it.
"""

from __future__ import annotations

import struct
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ModelError
from engine.model_store.architecture import SIZE_NAMES, Architecture
from engine.model_store.families import FAMILIES, architecture_of, unsupported_family
from engine.model_store.gguf_header import GgufHeader, TensorInfo, Value, gguf_shards, read_header
from engine.model_store.gguf_tokenizer import special_ids, tokenizer_json, tokenizer_warnings
from engine.model_store.parts import END_TOKENS, ModelParts, choose_template

_FLOAT32 = 0
_SIGMOID = 2
"""`expert_gating_func` of routers with a sigmoid."""

_LATENT = ("deepseek_v2", "deepseek_v3")
"""Families with latent attention."""

_CONVOLUTIONS = ("lfm2", "lfm2_moe")
_DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families with the gated delta rule."""
_HYBRIDS = (*_CONVOLUTIONS, *_DELTA, "granitemoehybrid", "nemotron_h")
"""Families in which sizes of attention and of MLPs are 0 in layers that have none."""

_FIELDS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "num_experts_per_tok": "expert_used_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "v_head_dim": "attention.value_length_mla",
}
"""Metadata keys, behind the architecture's name, by the field of config.json."""

_REQUIRED = (
    *("block_count", "embedding_length", "attention.head_count", "context_length"),
    ("feed_forward_length", "expert_feed_forward_length"),
)
"""Keys without which a file is damaged, or several of which one is needed."""

_REFUSED_NAMES = {
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "falcon-h1": "falcon_h1",
    "rwkv7": "rwkv",
}
"""Model types by names of GGUF architectures that differ from them."""


def read_gguf(path: Path) -> ModelParts:
    """Read everything but the weights. About 0.2 s for 49,152 tokens. Raises ModelError."""
    header = read_header(path)
    tokens = header.strings("tokenizer.ggml.tokens")
    specials = special_ids(header)
    # Among the special tokens alone: Gemma has an ordinary token </s>, which strikes text through.
    index = {tokens[i]: i for i in specials if i < len(tokens)}
    eos = header.integer("tokenizer.ggml.eos_token_id")
    stops = [
        eos,
        header.integer("tokenizer.ggml.eot_token_id"),
        *(index.get(token) for token in END_TOKENS),
    ]
    bos = header.integer("tokenizer.ggml.bos_token_id")
    stop_ids = tuple(sorted({stop for stop in stops if stop is not None}))
    template, warnings = choose_template(_templates(header))
    return ModelParts(
        config=_architecture(path, header, len(tokens)),
        tokenizer=tokenizer_json(header),
        template=template,
        warnings=(*tokenizer_warnings(header), *warnings),
        stop_token_ids=stop_ids,
        size_names=_size_names(header.string("general.architecture") or ""),
        special_token_ids=specials,
        bos_token_id=bos,
        eos_token_id=eos if eos is not None else next(iter(stop_ids), None),
        add_bos=header.metadata.get("tokenizer.ggml.add_bos_token") is True and bos is not None,
    )


def _templates(header: GgufHeader) -> dict[object, object]:
    """Return the chat templates by name."""
    prefix = "tokenizer.chat_template"
    named: dict[object, object] = {
        key.removeprefix(f"{prefix}."): value
        for key, value in header.metadata.items()
        if key.startswith(f"{prefix}.")
    }
    return {**named, "default": header.string(prefix)}


def _architecture(path: Path, header: GgufHeader, tokens: int) -> Architecture:
    name = header.string("general.architecture") or ""
    family = _family(name, header)
    names = {tensor.name for tensor in header.tensors}
    in_layers = {one.split(".", 2)[-1] for one in names if one.startswith("blk.")}
    config = {
        field: _number(path, f"{name}.{key}", _values(family, header, f"{name}.{key}"))
        for field, key in _FIELDS.items()
        if f"{name}.{key}" in header.metadata
    }
    for required in _REQUIRED:
        keys = (required,) if isinstance(required, str) else required
        if not any(f"{name}.{key}" in header.metadata for key in keys):
            raise ModelError("corrupt", f"{path} has no metadata key {name}.{keys[0]}")
    drafting = header.integer(f"{name}.nextn_predict_layers") or 0
    experts = header.integer(f"{name}.expert_count")
    config.update(
        model_type=family,
        num_hidden_layers=int(config["num_hidden_layers"]) - drafting,
        vocab_size=header.integer(f"{name}.vocab_size") or tokens,
        tie_word_embeddings="output.weight" not in names,
        attention_bias=bool({"attn_q.bias", "attn_qkv.bias"} & in_layers),
        qkv_bias="attn_q.bias" in in_layers,
        mlp_bias="ffn_up.bias" in in_layers,
        use_qk_norm="attn_q_norm.weight" in in_layers,
        conv_bias="ssm_conv1d.bias" in in_layers,
        n_routed_experts=experts,
        num_experts=experts,
        num_local_experts=experts,
        rope_scaling=_scaling(path, header, name),
    )
    _add_features(config, header, name)
    try:
        architecture = architecture_of(config)
    except ModelError as error:
        message = error.message.replace("config.json", str(path))
        raise ModelError(error.code, message) from error
    # In these files norm weights hold the factor itself.
    return msgspec.structs.replace(
        architecture,
        interleaved=FAMILIES[family].gguf_interleaved,
        values_in_turns=FAMILIES[family].gguf_values_in_turns,
        norms_less_one=False,
    )


def _size_names(name: str) -> dict[str, str]:
    """Return the metadata's keys of sizes, by field of the architecture."""
    return {field: f"{name}.{_FIELDS.get(told, told)}" for field, told in SIZE_NAMES.items()}


def _family(name: str, header: GgufHeader) -> str:
    """Return the family of a GGUF architecture, which may be that of several."""
    experts = header.integer(f"{name}.expert_count") or 0
    if name == "llama":
        return "mixtral" if experts else "llama"
    if name == "olmo2" and f"{name}.attention.sliding_window" in header.metadata:
        return "olmo3"
    if name == "deepseek2":
        gating = header.integer(f"{name}.expert_gating_func")
        return "deepseek_v3" if gating == _SIGMOID else "deepseek_v2"
    for family, entry in FAMILIES.items():
        if entry.gguf == name:
            return family
    raise unsupported_family(_REFUSED_NAMES.get(name, name))


def _values(family: str, header: GgufHeader, key: str) -> Value:
    """Return a number of the metadata, or those of the layers that have one."""
    value = header.metadata[key]
    is_by_layer = key.endswith((".head_count_kv", ".feed_forward_length"))
    if family in _HYBRIDS and is_by_layer and isinstance(value, list):
        return [size for size in value if size] or value
    return value


def _number(path: Path, key: str, value: Value) -> Any:
    """Return a number of the metadata, which a file may give layer by layer. Raises ModelError:
    corrupt, or unsupported if layers differ."""
    given = value if isinstance(value, list) else [value]
    if not given or not all(isinstance(one, int | float) and isfinite(one) for one in given):
        raise ModelError("corrupt", f"{path}: {key} is {str(value)[:40]}; expected a number")
    if any(one != given[0] for one in given):
        raise ModelError("unsupported", f"{path}: layers differ in {key}; expected one size")
    return given[0]


def _add_features(config: dict[str, Any], header: GgufHeader, name: str) -> None:
    """Add the fields that mean something else than in the metadata."""
    family, layers = config["model_type"], int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // max(1, heads))
    rotated = header.integer(f"{name}.rope.dimension_count")
    pattern = header.metadata.get(f"{name}.attention.sliding_window_pattern")
    if rotated is not None and family not in _LATENT:
        config["partial_rotary_factor"] = rotated / max(1, head_dim)
    if isinstance(pattern, list):
        kinds = {True: "sliding_attention", False: "full_attention"}
        config["layer_types"] = [kinds[bool(item)] for item in pattern[:layers]]
    if (logit_scale := header.number(f"{name}.logit_scale")) is not None:
        config["logit_scale" if family == "cohere2" else "logits_scaling"] = logit_scale
    if family in _LATENT:
        rope = int(rotated or 0)
        key = header.integer(f"{name}.attention.key_length_mla") or head_dim
        config["qk_nope_head_dim"] = key - rope
        config.setdefault("v_head_dim", header.integer(f"{name}.attention.value_length"))
    if family in ("gemma2", "gemma3_text"):
        config["query_pre_attn_scalar"] = _gemma_scalar(family, config, layers, heads, head_dim)
    if family in _HYBRIDS:
        _add_recurrence(config, header, name)
    if family in _CONVOLUTIONS:
        config["conv_L_cache"] = header.integer(f"{name}.shortconv.l_cache") or 0
        config["norm_eps"] = config.get("rms_norm_eps")
        config["block_auto_adjust_ff_dim"] = False
        config["num_dense_layers"] = config.get("first_k_dense_replace", 0)
        config.setdefault("norm_topk_prob", True)
    if family == "qwen3_moe":
        config.setdefault("norm_topk_prob", True)
    if family == "gpt_oss":
        config["intermediate_size"] = config.get("moe_intermediate_size")
    if family == "ministral3" and config["rope_scaling"] is not None:
        beta = header.number(f"{name}.attention.temperature_scale")
        config["rope_scaling"]["llama_4_scaling_beta"] = beta or 0.0


def _add_recurrence(config: dict[str, Any], header: GgufHeader, name: str) -> None:
    """Add the kinds of layers, and the sizes of recurrent ones, whose heads are in the metadata as
    a rank."""
    family, layers = config["model_type"], int(config["num_hidden_layers"])
    told = header.metadata.get(f"{name}.attention.recurrent_layers")
    sizes = header.metadata.get(f"{name}.attention.head_count_kv")
    every = header.integer(f"{name}.full_attention_interval") or 4
    if isinstance(told, list):
        is_attention = [not one for one in told[:layers]]
    elif isinstance(sizes, list):
        is_attention = [bool(one) for one in sizes[:layers]]
    else:
        is_attention = [family not in _DELTA or (i + 1) % every == 0 for i in range(layers)]
    recurrent = "linear_attention" if family in _DELTA else "mamba"
    kinds = ["full_attention" if one else recurrent for one in is_attention]
    inner, state, groups, heads, width = (
        header.integer(f"{name}.ssm.{key}") or 0
        for key in ("inner_size", "state_size", "group_count", "time_step_rank", "conv_kernel")
    )
    each = inner // max(1, heads)
    if family in _CONVOLUTIONS:
        kinds = ["full_attention" if one else "conv" for one in is_attention]
    elif family in _DELTA:
        config.update(
            linear_num_key_heads=groups, linear_num_value_heads=heads, linear_key_head_dim=state,
            linear_value_head_dim=each, linear_conv_kernel_dim=width,
        )  # fmt: skip
    elif family == "nemotron_h":
        mlps = header.metadata.get(f"{name}.feed_forward_length")
        for i, size in enumerate(mlps[:layers] if isinstance(mlps, list) else ()):
            kinds[i] = "mlp" if size else kinds[i]
        config.update(
            layers_block_type=kinds, mamba_num_heads=heads, mamba_head_dim=each, n_groups=groups,
            ssm_state_size=state, conv_kernel=width, use_conv_bias=config["conv_bias"],
            layer_norm_epsilon=config.get("rms_norm_eps"),
        )  # fmt: skip
    else:
        is_rotating = header.metadata.get(f"{name}.rope.scaling.finetuned") is True
        config.update(
            mamba_n_heads=heads, mamba_d_head=each, mamba_d_state=state, mamba_n_groups=groups,
            mamba_d_conv=width, mamba_conv_bias=config["conv_bias"],
            mamba_expand=inner / max(1, int(config["hidden_size"])),
            position_embedding_type="rope" if is_rotating else "nope",
            shared_intermediate_size=config.get(
                "shared_expert_intermediate_size", config.get("intermediate_size")
            ),
        )  # fmt: skip
    config["layer_types"] = kinds


def _gemma_scalar(
    family: str, config: dict[str, Any], layers: int, heads: int, head_dim: int
) -> float:
    """Return what the queries are divided by the root of: the files leave it out, and only the
    27B models differ from head_dim."""
    largest = {"gemma2": 46, "gemma3_text": 62}[family]
    return int(config["hidden_size"]) / heads if layers == largest else head_dim


def _scaling(path: Path, header: GgufHeader, name: str) -> dict[str, Any] | None:
    """Return the rope scaling. GGUF files of Llama 3.1 and later have one divisor per frequency, as
    a tensor of 32-bit floats; Phi-3's have two sets."""
    tensors = {tensor.name: tensor for tensor in header.tensors}
    original = header.integer(f"{name}.rope.scaling.original_context_length")
    factor = header.number(f"{name}.rope.scaling.factor")
    amplitude = header.number(f"{name}.rope.scaling.attn_factor")
    if "rope_freqs.weight" in tensors:
        return {"rope_type": "divisors", "divisors": _divisors(path, tensors["rope_freqs.weight"])}
    if "rope_factors_long.weight" in tensors and "rope_factors_short.weight" in tensors:
        return {
            "rope_type": "longrope",
            "long_factor": _divisors(path, tensors["rope_factors_long.weight"]),
            "short_factor": _divisors(path, tensors["rope_factors_short.weight"]),
            "original_max_position_embeddings": original,
            "attention_factor": amplitude,
        }
    kind = header.string(f"{name}.rope.scaling.type")
    if kind in (None, "none") or factor is None:
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        weight = header.number(f"{name}.rope.scaling.yarn_log_multiplier")
        scaling.update(
            original_max_position_embeddings=original,
            beta_fast=header.number(f"{name}.rope.scaling.yarn_beta_fast"),
            beta_slow=header.number(f"{name}.rope.scaling.yarn_beta_slow"),
            truncate=name != "gpt-oss",
        )
        if weight:  # DeepSeek's: a tenth of the weight of all dimensions
            scaling.update(mscale=weight * 10, mscale_all_dim=weight * 10)
    return scaling


def _divisors(path: Path, tensor: TensorInfo) -> tuple[float, ...]:
    count = tensor.shape[0] if len(tensor.shape) == 1 else 0
    if tensor.type_id != _FLOAT32 or not 0 < count <= 4096:
        raise ModelError(
            "corrupt",
            f"{path}: {tensor.name} has shape {tensor.shape} and type {tensor.type_id}; expected"
            " a row of 32-bit floats",
        )
    with gguf_shards(path)[tensor.shard].open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(4 * count)
    if len(data) != 4 * count:
        raise ModelError("corrupt", f"{path}: {tensor.name} is outside the file")
    return struct.unpack(f"<{count}f", data)
