"""Tiny random models of every family, made by transformers, as Hugging Face folders and GGUF files.

The folder is what transformers saves. The GGUF file is written from the same weights by the tables
of the `gguf` package, not by ours. Equal for equal seeds.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.models import CHAT_TEMPLATE
from tests.tiny_tokenizer import MERGES, SPECIALS, TOKENS, tokenizer_document

VOCAB = len(TOKENS) + -len(TOKENS) % 32
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
WINDOWED = {
    "sliding_window": 8, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]
}  # fmt: skip
CONVOLUTIONS = {
    "layer_types": ["conv", "full_attention", "conv", "conv"], "tie_word_embeddings": True
}  # fmt: skip
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "head_dim": 32,
}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}  # fmt: skip
MAMBA = {
    "layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_d_state": 12, "mamba_n_groups": 2, "mamba_expand": 2,
    "mamba_d_conv": 4, "shared_intermediate_size": 80, "tie_word_embeddings": True, **GRANITE,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
    "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
}  # fmt: skip

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": LLAMA3}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "ministral3": ("ministral3", {
        "head_dim": 16, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                                            "mscale_all_dim": 1.0}}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "phi3": ("phi3", {"rope_parameters": PARTIAL, "head_dim": None}),
    "phi3 long": ("phi3", {
        "rope_parameters": LONG, "head_dim": None, "original_max_position_embeddings": 64}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", GRANITE),
    "gemma": ("gemma", {"head_dim": 24}),
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": True}),
    "gemma2": ("gemma2", {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 8}),
    "gemma3": ("gemma3_text", {"head_dim": 24, "query_pre_attn_scalar": 24, **WINDOWED}),
    "olmo3": ("olmo3", WINDOWED),
    "cohere2": ("cohere2", {"logit_scale": 0.25, **WINDOWED}),
    "gpt-oss": ("gpt_oss", {
        "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8}),
    "mixtral": ("mixtral", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2 moe": ("qwen2_moe", {
        **EXPERTS, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1}),
    "qwen3 moe": ("qwen3_moe", {**EXPERTS, "head_dim": 24, "norm_topk_prob": True}),
    "glm4 moe": ("glm4_moe", {
        **ROUTED, "head_dim": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "use_qk_norm": True}),
    "lfm2": ("lfm2", {**CONVOLUTIONS, "block_auto_adjust_ff_dim": False}),
    "lfm2 moe": ("lfm2_moe", {**CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1}),
    "qwen3 next": ("qwen3_next", {
        **DELTA, **EXPERTS, "shared_expert_intermediate_size": 48, "norm_topk_prob": True}),
    "qwen3.5": ("qwen3_5_text", DELTA),
    "qwen3.5 moe": ("qwen3_5_moe_text", {
        **DELTA, **EXPERTS, "shared_expert_intermediate_size": 48,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"]}),
    "granite moe": ("granitemoe", {**GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "granite moe shared": ("granitemoeshared", {
        **GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2,
        "shared_intermediate_size": 80}),
    "granite hybrid": ("granitemoehybrid", {
        **MAMBA, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "granite hybrid dense": ("granitemoehybrid", {
        **MAMBA, "num_local_experts": 0, "mamba_d_conv": 3}),
    "nemotron h": ("nemotron_h", {
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention",
                              "mlp", "linear_attention"],
        "num_hidden_layers": 6, "mamba_num_heads": 8, "mamba_head_dim": 12, "ssm_state_size": 16,
        "n_groups": 2, "conv_kernel": 4, "head_dim": 32, "time_step_min": 1e-6}),
    "granite 4 dense": ("granitemoehybrid", {
        **MAMBA, "num_local_experts": 0, "layer_types": ["attention"] * 4,
        "position_embedding_type": "rope"}),
    "deepseek v2": ("deepseek_v2", {
        **LATENT, **ROUTED, "q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy",
        "n_group": 1, "topk_group": 1}),
    "deepseek v3": ("deepseek_v3", {
        **LATENT, **ROUTED, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "glm4 moe lite": ("glm4_moe_lite", {
        **LATENT, **ROUTED, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}),
}  # fmt: skip
"""By name: transformers' model type, and what its config has beyond `BASE`."""
RECURRENT = (
    "lfm2", "lfm2 moe", "qwen3 next", "qwen3.5", "qwen3.5 moe", "granite hybrid",
    "granite hybrid dense", "nemotron h",
)  # fmt: skip
"""Models with layers that keep a state."""


def make(name: str, **more: Any) -> Any:
    """Return a model of a family in fp32, with seeded random weights that no layer ignores. `more`:
    fields of its config in place of those of `TINY`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        kind, changes = TINY[name]
        given = {k: v for k, v in {**BASE, **changes, **more}.items()
                 if v is not None or k in ("q_lora_rank", "sliding_window")}  # fmt: skip
        config = transformers.AutoConfig.for_model(kind, **given)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.eval().float()
    generator = torch.Generator().manual_seed(1)
    ends = ("e_score_correction_bias", "expert_bias")
    buffers = [b for n, b in model.named_buffers() if n.endswith(ends)]
    with torch.no_grad():
        for tensor_name, tensor in [*model.named_parameters(), *(("bias", b) for b in buffers)]:
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in tensor_name:
                tensor.add_(noise * 0.2)
            elif tensor.dim() <= 1:
                tensor.add_(noise * 0.3)
            else:
                tensor.copy_(noise * 1.2 * tensor.shape[-1] ** -0.5)
    return model


def sizes_in_c(name: str) -> dict[str, int]:
    """Return sizes of a family's tiny model that the C kernels take."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    if TINY[name][1].get("head_dim"):
        heads["head_dim"] = 32
    if name.startswith("qwen3") and name in RECURRENT:
        heads["linear_value_head_dim"] = 48
    if "mamba_head_dim" in TINY[name][1]:
        heads["mamba_head_dim"] = 16
    if "mamba_d_state" in TINY[name][1]:
        heads["mamba_d_state"] = 32
    return heads


def save_folder(model: Any, folder: Path) -> Path:
    """Save a model with a byte-level tokenizer; return the folder."""
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_document()))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder


GGUF_NAMES = {
    "llama": "llama", "llama with biases": "llama", "mistral": "llama", "ministral3": "mistral3",
    "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "phi3 long": "phi3", "smollm3": "smollm3",
    "olmo2": "olmo2", "granite": "granite", "gemma": "gemma", "glm4": "glm4", "gemma2": "gemma2",
    "gemma3": "gemma3", "olmo3": "olmo2", "cohere2": "cohere2", "gpt-oss": "gpt-oss",
    "mixtral": "llama", "qwen2 moe": "qwen2moe", "qwen3 moe": "qwen3moe", "glm4 moe": "glm4moe",
    "lfm2": "lfm2", "lfm2 moe": "lfm2moe", "deepseek v2": "deepseek2", "deepseek v3": "deepseek2",
    "glm4 moe lite": "deepseek2", "granite hybrid": "granitehybrid",
    "granite hybrid dense": "granitehybrid", "granite moe": "granitemoe",
    "granite moe shared": "granitemoe", "qwen3 next": "qwen3next", "qwen3.5": "qwen35",
    "qwen3.5 moe": "qwen35moe", "nemotron h": "nemotron_h",
}  # fmt: skip
PERMUTED = (
    "llama",
    "llama with biases",
    "mistral",
    "ministral3",
    "smollm3",
    "granite",
    "mixtral",
    "granite hybrid",
    "granite hybrid dense",
    "granite moe",
    "granite moe shared",
)
"""Models whose GGUF files hold q and k by neighbours, which transformers' folders do not."""


def write_gguf(name: str, model: Any, folder: Path, path: Path) -> Path:
    """Write a model that `save_folder` has saved as a GGUF file; return its path."""
    arch = GGUF_NAMES[name]
    writer = gguf.GGUFWriter(path, arch)
    _add_metadata(writer, name, model.config.to_dict())
    known = next(enum for enum, text in gguf.MODEL_ARCH_NAMES.items() if text == arch)
    names = gguf.get_tensor_name_map(known, model.config.num_hidden_layers)
    for tensor_name, array in _published(name, folder, model.config):
        stem, _, kind = tensor_name.rpartition(".")
        found = names.get_name(stem)
        assert found is not None, tensor_name
        writer.add_tensor(f"{found}.{kind}".rstrip("."), np.ascontiguousarray(array))
    if name == "phi3 long":
        for length in ("long", "short"):
            factors = np.array(LONG[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    if name == "llama":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _published(name: str, folder: Path, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a folder's tensors as converters to GGUF put them."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for full, tensor in load_file(folder / "model.safetensors").items():
        array = tensor.numpy()
        if full.endswith("lm_head.weight") and config.tie_word_embeddings:
            continue
        if found := re.match(r"(.*\.experts)\.(\d+)\.(.*)", full):
            stacks.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = array
            continue
        yield from _converted(name, full, array, config)
    for full, experts in stacks.items():
        for own, usual in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            full = full.replace(f"feed_forward.experts.{own}", f"mlp.experts.{usual}")
        yield full, np.stack([experts[i] for i in range(len(experts))])


def _converted(name: str, full: str, a: np.ndarray, c: Any) -> Iterator[tuple[str, np.ndarray]]:
    if "linear_attn." in full:
        yield from _converted_delta(name, full, a, c)
        return
    if name.startswith(("gemma", "qwen3 next", "qwen3.5")) and full.endswith("norm.weight"):
        a = a + 1
    if full.endswith("e_score_correction_bias"):
        full = full.replace("correction_bias", "correction.bias")
    if full.endswith("expert_bias"):
        full = f"{full}.bias"
    if full.endswith("sinks"):
        full = f"{full}.weight"
    if name in PERMUTED and re.search(r"[qk]_proj\.(weight|bias)$", full):
        heads = c.num_attention_heads if "q_proj" in full else c.num_key_value_heads
        halves = a.reshape(heads, 2, len(a) // heads // 2, *a.shape[1:])
        a = halves.swapaxes(1, 2).reshape(a.shape)
    if ".mamba." in full or ".mixer." in full:
        yield _converted_mamba(full, a, c)
    elif "input_linear" in full or "output_linear" in full:
        yield from _converted_granite(full, a, c)
    elif "kv_b_proj" in full:
        heads = a.reshape(c.num_attention_heads, -1, c.kv_lora_rank)
        yield full.replace("kv_b", "k_b"), heads[:, : c.qk_nope_head_dim].swapaxes(1, 2)
        yield full.replace("kv_b", "v_b"), heads[:, c.qk_nope_head_dim :]
    elif full.endswith("experts.gate_up_proj"):
        for i, part in enumerate(("gate", "up")):
            yield full.replace("gate_up_proj", f"{part}_proj.weight"), a[..., i::2].swapaxes(1, 2)
    elif full.endswith("experts.gate_up_proj_bias"):
        for i, part in enumerate(("gate", "up")):
            yield full.replace("gate_up_proj_bias", f"{part}_proj.bias"), a[..., i::2]
    elif full.endswith("experts.down_proj"):
        yield f"{full}.weight", a.swapaxes(1, 2)
    else:
        yield full.replace("down_proj_bias", "down_proj.bias"), a


def _converted_mamba(full: str, a: np.ndarray, c: Any) -> tuple[str, np.ndarray]:
    """Return a tensor of Mamba-2; a name that ends in a period has no kind behind it."""
    if full.endswith("A_log"):
        return f"{full}.", -np.exp(a)[:, None]
    if full.endswith(".D"):
        return f"{full}.", a[:, None]
    if full.endswith("conv1d.weight"):
        a = a[:, 0]
    if full.endswith("norm.weight"):
        a = a.reshape(getattr(c, "mamba_n_groups", None) or c.n_groups, -1)
    return full.replace("dt_bias", "dt_proj.bias"), a


def _converted_delta(
    name: str, full: str, a: np.ndarray, c: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a tensor of the gated delta rule; in Qwen3.5's files heads of values lie in turns over
    those of keys."""
    keys, values = c.linear_num_key_heads, c.linear_num_value_heads
    key_rows, width = keys * c.linear_key_head_dim, c.linear_value_head_dim
    if full.endswith("A_log"):
        a = -np.exp(a)
    if full.endswith("conv1d.weight"):
        a = a[:, 0]
    if "in_proj_qkvz" in full:
        heads = a.reshape(keys, -1, a.shape[-1])
        ends = np.cumsum([c.linear_key_head_dim] * 2 + [values // keys * width])
        *qkv, z = (one.reshape(-1, a.shape[-1]) for one in np.split(heads, ends, axis=1))
        yield full.replace("in_proj_qkvz", "in_proj_qkv"), np.concatenate(qkv)
        yield full.replace("in_proj_qkvz", "in_proj_z"), z
        return
    if name != "qwen3 next" and not full.endswith("norm.weight"):
        if "out_proj" in full:
            a = _in_turns(a.T, keys, values).T
        else:
            own = 2 * key_rows if "qkv" in full or "conv1d" in full else 0
            a = np.concatenate([a[:own], _in_turns(a[own:], keys, values)])
    if full.endswith("A_log"):
        full = f"{full}."
    yield full.replace("dt_bias", "dt_proj.bias"), a


def _in_turns(rows: np.ndarray, keys: int, values: int) -> np.ndarray:
    """Return rows by heads of values with the first of each head of keys, then the second."""
    heads = rows.reshape(keys, values // keys, -1, *rows.shape[1:])
    return heads.swapaxes(0, 1).reshape(rows.shape)


def _converted_granite(full: str, a: np.ndarray, c: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the parts of an MLP of Granite 4, of all experts or shared."""
    own = "shared_mlp" if "shared_mlp" in full else "block_sparse_moe"
    usual = {"block_sparse_moe": "mlp.experts", "shared_mlp": "mlp.shared_expert"}[own]
    if not c.num_local_experts:
        usual = "mlp"
    stem = full.replace(own, usual).removesuffix(".weight")
    if stem.endswith("output_linear"):
        yield f"{stem.replace('output_linear', 'down_proj')}.weight", a
        return
    for part, half in zip(("gate", "up"), np.split(a, 2, axis=-2), strict=True):
        yield f"{stem.replace('input_linear', f'{part}_proj')}.weight", half


def _add_metadata(writer: gguf.GGUFWriter, name: str, c: dict[str, Any]) -> None:
    """Write what converters write; what a config lacks is left out."""
    writer.add_block_count(c.get("num_hidden_layers") or len(c["layers_block_type"]))
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    if name != "qwen3.5 moe":
        writer.add_feed_forward_length(_mlp_sizes(c))
    writer.add_head_count(c["num_attention_heads"])
    writer.add_vocab_size(c["vocab_size"])
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    eps = c.get("rms_norm_eps", c.get("norm_eps", c.get("layer_norm_epsilon")))
    if eps is not None:
        writer.add_layer_norm_rms_eps(eps)
    else:
        writer.add_layer_norm_eps(c["layer_norm_eps"])
    if "kv_lora_rank" in c:
        _add_latent(writer, c)
    else:
        writer.add_head_count_kv(_kv_heads(writer, name, c))
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        share = {"glm4": 0.5, "glm4 moe": 0.5, "phi3": 0.75}.get(name, 1.0)
        if name.startswith(("qwen3 next", "qwen3.5")):
            share = 0.25
        writer.add_rope_dimension_count(int(head_dim * share))
    if c.get("rope_parameters"):
        _add_rope(writer, name, c["rope_parameters"])
    _add_experts(writer, name, c)
    added: dict[str, Any] = {
        "sliding_window": writer.add_sliding_window,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "embedding_multiplier": writer.add_embedding_scale,
        "attention_multiplier": writer.add_attention_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "logit_scale": writer.add_logit_scale,
    }
    for field, add in added.items():
        if c.get(field) is not None:
            add(c[field])
    if name in ("gemma3", "olmo3", "cohere2"):
        writer.add_sliding_window_pattern([True, True, True, False])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)


def _kv_heads(writer: gguf.GGUFWriter, name: str, c: dict[str, Any]) -> int | list[int]:
    """Return the KV heads; of models with recurrent layers, whose sizes are added, layer by
    layer."""
    if "conv_L_cache" in c:
        writer.add_shortconv_l_cache(c["conv_L_cache"])
    fields = next((fields for fields in _RECURRENT_FIELDS if fields[0] in c), None)
    if fields is not None:
        heads, each, state, groups, width = (c[field] for field in fields)
        writer.add_ssm_conv_kernel(width)
        writer.add_ssm_state_size(state)
        writer.add_ssm_group_count(groups)
        writer.add_ssm_inner_size(heads * each)
        writer.add_ssm_time_step_rank(heads)
    if "position_embedding_type" in c:
        writer.add_rope_scaling_finetuned(c["position_embedding_type"] == "rope")
    if name == "qwen3.5 moe":
        writer.add_full_attention_interval(4)
    elif "linear_num_key_heads" in c:
        writer.add_key_value(
            f"{writer.arch}.attention.recurrent_layers",
            [kind == "linear_attention" for kind in c["layer_types"]],
            gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.BOOL,
        )  # fmt: skip
    if "linear_num_key_heads" in c or (fields is None and "conv_L_cache" not in c):
        return int(c["num_key_value_heads"])
    kinds = c.get("layers_block_type") or c["layer_types"]
    return [c["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds]


_RECURRENT_FIELDS = (
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
    ("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim",
     "linear_num_key_heads", "linear_conv_kernel_dim"),
)  # fmt: skip
"""Fields of configs for heads, their channels, a state's size, groups and inputs."""


def _mlp_sizes(c: dict[str, Any]) -> int | list[int]:
    """Return the MLPs' size; of models with layers of one block, layer by layer."""
    size = int(c["intermediate_size"])
    kinds = c.get("layers_block_type")
    return [size if kind == "mlp" else 0 for kind in kinds] if kinds else size


def _add_latent(writer: gguf.GGUFWriter, c: dict[str, Any]) -> None:
    writer.add_head_count_kv(1)
    writer.add_key_length(c["kv_lora_rank"] + c["qk_rope_head_dim"])
    writer.add_value_length(c["kv_lora_rank"])
    writer.add_key_length_mla(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    writer.add_value_length_mla(c["v_head_dim"])
    writer.add_rope_dimension_count(c["qk_rope_head_dim"])
    writer.add_kv_lora_rank(c["kv_lora_rank"])
    if c["q_lora_rank"]:
        writer.add_q_lora_rank(c["q_lora_rank"])


def _add_rope(writer: gguf.GGUFWriter, name: str, rope: dict[str, Any]) -> None:
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full["rope_theta"])
    if full.get("rope_type") != "yarn" and "factor" not in full and name != "phi3 long":
        return
    writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if full["rope_type"] != "yarn":
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(full["factor"])
    if full.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * full["mscale_all_dim"])
    if full.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(full["llama_4_scaling_beta"])


def _add_experts(writer: gguf.GGUFWriter, name: str, c: dict[str, Any]) -> None:
    shared = c.get("shared_expert_intermediate_size") or c.get("shared_intermediate_size")
    if shared:
        writer.add_expert_shared_feed_forward_length(shared)
    count = c.get("num_experts") or c.get("n_routed_experts") or c.get("num_local_experts")
    if not count or name == "nemotron h":
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(c["num_experts_per_tok"])
    size = c.get("moe_intermediate_size") or c["intermediate_size"]
    writer.add_expert_feed_forward_length(size)
    if "num_dense_layers" in c:
        writer.add_leading_dense_block_count(c["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(c["norm_topk_prob"])
    if "first_k_dense_replace" in c or "mlp_layer_types" in c:
        writer.add_leading_dense_block_count(1)
        writer.add_expert_shared_count(c["n_shared_experts"])
        writer.add_expert_weights_scale(c["routed_scaling_factor"])
        writer.add_expert_weights_norm(name != "deepseek v2" and c["norm_topk_prob"])
        writer.add_expert_group_count(c["n_group"])
        writer.add_expert_group_used_count(c["topk_group"])
        gating = gguf.ExpertGatingFuncType
        softmax = name == "deepseek v2"
        writer.add_expert_gating_func(gating.SOFTMAX if softmax else gating.SIGMOID)


def _llama3_divisors(head_dim: int) -> np.ndarray:
    """Return Llama 3's scaling as converters write it: the divisor of each frequency."""
    low, high, factor, context = 1.0, 4.0, 8.0, 64
    frequencies = 1e4 ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = context * frequencies / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / (smooth + (1 - smooth) / factor)).astype(np.float32)
