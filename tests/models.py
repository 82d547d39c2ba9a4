"""Tiny models for tests: seeded random Llamas of a few hundred kilobytes, as files.

`write_folder` and `write_gguf` write the same weights as a Hugging Face folder and as a GGUF file,
with a byte-level tokenizer that encodes any text and a ChatML chat template. The output is
nonsense, and equal for equal seeds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from engine.model_store import Architecture, Layer, ModelCard, Rope, prepare
from engine.weights import Tensors, random_weights
from tests.tiny_tokenizer import MERGES, SPECIALS, TOKENS, tokenizer_document

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3_SCALING = Rope(
    theta=10_000.0,
    dim=16,
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_context=64,
)


def tiny_config(
    *,
    heads: int = 4,
    kv_heads: int = 2,
    layers: int = 2,
    head_dim: int = 16,
    context: int = 512,
    tie_embeddings: bool = True,
    rope_scaling: Rope | None = None,
) -> Architecture:
    """Return the shape of a tiny Llama: MHA, GQA or MQA by `kv_heads`.

    Hidden and intermediate sizes are multiples of 32, so that every row can be quantised.
    """
    return Architecture(
        family="llama",
        layers=(Layer(),) * layers,
        hidden=heads * head_dim,
        intermediate=96,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=len(TOKENS),
        context=context,
        ropes={"full": msgspec.structs.replace(rope_scaling or Rope(10_000.0, 16), dim=head_dim)},
        norm_eps=1e-5,
        tie_embeddings=tie_embeddings,
    )


SHAPES = {
    "MHA": tiny_config(heads=4, kv_heads=4),
    "GQA": tiny_config(heads=4, kv_heads=2),
    "MQA": tiny_config(heads=4, kv_heads=1),
    "untied": tiny_config(tie_embeddings=False),
    "wide heads": tiny_config(head_dim=32),
    "stretched": tiny_config(rope_scaling=LLAMA3_SCALING),
}
"""Shapes that files are written and read in."""


def tiny_weights(config: Architecture, seed: int = 0) -> Tensors:
    """Return the weights that `write_folder` and `write_gguf` write, in fp32."""
    weights = random_weights(config, torch.float32, seed, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed + 1)
    for name, tensor in weights.items():
        if name.endswith("norm.weight"):  # not all ones: tests must detect a missing norm weight
            tensor.uniform_(0.5, 1.5, generator=generator)
    return weights


def write_folder(
    folder: Path,
    config: Architecture | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
) -> Path:
    """Write a Hugging Face folder: config, tokenizer, chat template and safetensors. Returns it."""
    config = config or tiny_config()
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Any] = {
        "config.json": _hugging_face_config(config),
        "tokenizer.json": tokenizer_document(),
        "tokenizer_config.json": {"add_bos_token": False, "chat_template": CHAT_TEMPLATE},
        "generation_config.json": {"eos_token_id": TOKENS.index("<|im_end|>")},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    weights = {n: t.to(dtype) for n, t in tiny_weights(config, seed).items()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names, weight_map = list(weights), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        weight_map.update(dict.fromkeys(names[shard::shards], file))
        save_file({n: weights[n] for n in names[shard::shards]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_gguf(
    path: Path,
    config: Architecture | None = None,
    *,
    seed: int = 0,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    weights: Tensors | None = None,
    shard_tensors: int = 0,
) -> Path:
    """Write a GGUF file of the same model, its matrices in `kind`, or shards of so many tensors,
    the first of none. Returns its path, or the first shard's."""
    config = config or tiny_config()
    writer = gguf.GGUFWriter(
        path, "llama", split_max_tensors=shard_tensors, small_first_shard=bool(shard_tensors)
    )
    _add_metadata(writer, config)
    for name, tensor in (weights or tiny_weights(config, seed)).items():
        array = tensor.to(torch.float32).numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.heads if "q_proj" in name else config.kv_heads
            halves = array.reshape(heads, 2, len(array) // heads // 2, -1)
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        plain = array.ndim == 1 or kind == gguf.GGMLQuantizationType.F32
        if plain:
            writer.add_tensor(_gguf_name(name), array)
        else:
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
    if config.ropes["full"].kind != "plain":
        writer.add_tensor("rope_freqs.weight", _divisors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"), default=path)


def prepared(tmp: Path, config: Architecture | None = None, *, seed: int = 0) -> ModelCard:
    """Write and prepare a tiny model under `tmp`; return its card."""
    return prepare("tiny", write_folder(tmp / "tiny", config, seed=seed), tmp)


def prepared_with_windows(folder: Path, window: int, *, context: int) -> ModelCard:
    """Prepare a tiny model whose layers have a sliding window, except for each fourth layer."""
    shape = tiny_config(layers=4, context=context, head_dim=32)
    layers = tuple(msgspec.structs.replace(layer, window=window) for layer in shape.layers[:3])
    config = msgspec.structs.replace(shape, layers=(*layers, shape.layers[3]))
    card = msgspec.structs.replace(prepared(folder, shape), config=config)
    (Path(card.folder) / "model_card.json").write_bytes(msgspec.json.encode(card))
    return card


def _hugging_face_config(config: Architecture) -> dict[str, Any]:
    rope = config.ropes["full"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": config.family,
        "num_hidden_layers": len(config.layers),
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "plain" else _hugging_face_scaling(rope),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
        "bos_token_id": TOKENS.index("<|endoftext|>"),
        "eos_token_id": TOKENS.index("<|im_end|>"),
    }


def _hugging_face_scaling(scaling: Rope) -> dict[str, Any]:
    fields = msgspec.to_builtins(scaling)
    return {
        "rope_type": fields["kind"],
        "factor": fields["factor"],
        "low_freq_factor": fields["low_freq_factor"],
        "high_freq_factor": fields["high_freq_factor"],
        "original_max_position_embeddings": fields["original_context"],
    }


def _add_metadata(writer: gguf.GGUFWriter, config: Architecture) -> None:
    writer.add_block_count(len(config.layers))
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.ropes["full"].theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(TOKENS.index("<|endoftext|>"))
    writer.add_eos_token_id(TOKENS.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    renamed = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }.get(stem)
    if renamed is None:
        _, _, layer, part = stem.split(".", 3)
        renamed = f"blk.{layer}.{_GGUF_PARTS[part]}"
    return f"{renamed}.{kind}"


def _divisors(config: Architecture) -> np.ndarray:
    """Return Llama 3's rope scaling in GGUF's form: the divisor of each frequency."""
    s = config.ropes["full"]
    half = config.head_dim // 2
    frequencies = config.ropes["full"].theta ** -(np.arange(half, dtype=np.float64) / half)
    wavelengths = 2 * np.pi / frequencies
    low, high = s.original_context / s.low_freq_factor, s.original_context / s.high_freq_factor
    blend = (s.original_context / wavelengths - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    divisors = np.where(
        wavelengths < high,
        1.0,
        np.where(wavelengths > low, s.factor, 1 / ((1 - blend) / s.factor + blend)),
    )
    return divisors.astype(np.float32)
