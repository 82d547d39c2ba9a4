"""Reads config, tokenizer and chat template from a GGUF file's metadata.

It reads the header and, where present, the rotary divisors, but no weights. `prepare` calls it.
"""

from __future__ import annotations

import struct
from pathlib import Path

from engine.errors import ModelError
from engine.model_store.card import ModelConfig, RopeScaling
from engine.model_store.gguf_header import GgufHeader, TensorInfo, read_header
from engine.model_store.gguf_tokenizer import special_ids, tokenizer_json
from engine.model_store.parts import END_TOKENS, PLAIN_TEMPLATE, ModelParts, unsupported_scaling

_FLOAT32 = 0


def read_gguf(path: Path) -> ModelParts:
    """Read everything but the weights. About 0.2 s for 49,152 tokens. Raises ModelError."""
    header = read_header(path)
    tokens = header.strings("tokenizer.ggml.tokens")
    index = {token: i for i, token in enumerate(tokens)}
    stops = [
        header.integer("tokenizer.ggml.eos_token_id"),
        header.integer("tokenizer.ggml.eot_token_id"),
        *(index.get(token) for token in END_TOKENS),
    ]
    bos = header.integer("tokenizer.ggml.bos_token_id")
    return ModelParts(
        config=_config(path, header, len(tokens)),
        tokenizer=tokenizer_json(header),
        template=header.string("tokenizer.chat_template") or PLAIN_TEMPLATE,
        stop_token_ids=tuple(sorted({stop for stop in stops if stop is not None})),
        special_token_ids=special_ids(header),
        bos_token_id=bos,
        add_bos=header.metadata.get("tokenizer.ggml.add_bos_token") is True and bos is not None,
    )


def _config(path: Path, header: GgufHeader, tokens: int) -> ModelConfig:
    architecture = header.string("general.architecture") or ""

    def size(key: str, default: int | None = None) -> int:
        value = header.integer(f"{architecture}.{key}")
        if value is None:
            value = default
        if value is None:
            raise ModelError("corrupt", f"{path} has no metadata key {architecture}.{key}")
        return value

    if size("expert_count", 0) > 0:
        raise ModelError("unsupported", f"{path}: mixture-of-experts models are not supported")
    hidden, heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", hidden // max(1, heads))
    rotated = size("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelError(
            "unsupported", f"{path} rotates {rotated} of {head_dim} channels; expected all"
        )
    names = {tensor.name for tensor in header.tensors}
    return ModelConfig(
        architecture=architecture,
        layers=size("block_count"),
        hidden=hidden,
        intermediate=size("feed_forward_length"),
        heads=heads,
        kv_heads=size("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=size("vocab_size", tokens),
        context=size("context_length"),
        rope_theta=header.number(f"{architecture}.rope.freq_base") or 10_000.0,
        rope_scaling=_scaling(path, header, architecture, head_dim),
        norm_eps=header.number(f"{architecture}.attention.layer_norm_rms_epsilon") or 1e-5,
        tie_embeddings="output.weight" not in names,
        attention_bias="blk.0.attn_q.bias" in names,
        mlp_bias="blk.0.ffn_up.bias" in names,
    )


def _scaling(
    path: Path, header: GgufHeader, architecture: str, head_dim: int
) -> RopeScaling | None:
    """Return the rope scaling. GGUF files of Llama 3.1 and later have one divisor per frequency, as
    a tensor of 32-bit floats."""
    for tensor in header.tensors:
        if tensor.name == "rope_freqs.weight":
            return RopeScaling(kind="divisors", divisors=_divisors(path, tensor, head_dim // 2))
    kind = header.string(f"{architecture}.rope.scaling.type")
    factor = header.number(f"{architecture}.rope.scaling.factor")
    if kind in (None, "none") or factor is None:
        return None
    if kind != "linear":
        raise unsupported_scaling(kind)
    return RopeScaling(kind="linear", factor=factor)


def _divisors(path: Path, tensor: TensorInfo, count: int) -> tuple[float, ...]:
    if tensor.type_id != _FLOAT32 or tensor.shape != (count,):
        raise ModelError(
            "corrupt",
            f"{path}: {tensor.name} has shape {tensor.shape} and type {tensor.type_id}; expected"
            f" {count} 32-bit floats",
        )
    with path.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(4 * count)
    if len(data) != 4 * count:
        raise ModelError("corrupt", f"{path}: {tensor.name} is outside the file")
    return struct.unpack(f"<{count}f", data)
