"""Model weights as a dict of tensors under Hugging Face names, from GGUF or safetensors files.

Quantised GGUF tensors are dequantised once and cached beside the prepared model as one safetensors
file per dtype, which the next start maps instead. No code from a model's files is ever run. Runner
builders call `load_weights`; a model's constructor takes the tensors out of the dict.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.errors import ModelError
from engine.model_store import ModelCard, ModelConfig
from engine.model_store.gguf_header import TensorInfo, read_header

Weights = dict[str, torch.Tensor]
"""Tensors by Hugging Face name, such as `model.layers.0.mlp.up_proj.weight`."""

_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_IGNORED = ("rope_freqs",)
"""Tensors that `engine.model_store` reads into the model card."""

_FOLDER_IGNORED = ("rotary_emb.inv_freq",)
"""Tensors of old folders that are computed from the config."""


class _Index(msgspec.Struct):
    """`model.safetensors.index.json`: the shard file of each tensor."""

    weight_map: dict[str, str]


RANDOM = "random:"
"""Prefix of a card's source that is a seed, not a path: random weights for benchmarks."""


def load_weights(
    card: ModelCard, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Weights:
    """Load every tensor of a model in `dtype`, checked against the shapes that the config implies.

    The first load of a GGUF file dequantises it (about 2 s for 135M parameters) and writes the
    result beside the prepared model; later loads map that file. Raises ModelError with the names of
    missing, unexpected or misshaped tensors.
    """
    if card.source.startswith(RANDOM):
        seed = int(card.source.removeprefix(RANDOM))
        return random_weights(card.config, dtype, seed, torch.device(device))
    source = Path(card.source)
    if source.is_dir():
        weights = {name: tensor.to(dtype) for name, tensor in _read_folder(source)}
        if card.config.tie_embeddings:
            weights.pop("lm_head.weight", None)
    else:
        cached = Path(card.folder) / f"weights-{str(dtype).removeprefix('torch.')}.safetensors"
        if not _is_readable(cached):
            tensors = {n: t.to(dtype) for n, t in _read_gguf(source, card.config)}
            _check(tensors, card.config)  # refuse a wrong model before the cache file is written
            _save(cached, tensors)
            del tensors
        weights = dict(_read_safetensors(cached))
    _check(weights, card.config)
    return {name: tensor.to(device) for name, tensor in weights.items()}


def random_weights(
    config: ModelConfig, dtype: torch.dtype, seed: int, device: torch.device
) -> Weights:
    """Return seeded random weights of a model's shape, made on the device, for benchmarks and
    tests.

    Scaled by 1 / sqrt(fan-in), so that activations stay finite at any depth.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape, dtype=dtype, device=device)
            continue
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith("bias"):
            tensor.zero_()
        else:
            tensor.normal_(0.0, shape[-1] ** -0.5, generator=generator)
        weights[name] = tensor
    return weights


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a Llama model's tensors."""
    c = config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab, c.hidden)}
    for layer in range(c.layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (c.hidden,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, c.hidden)
            if c.attention_bias:
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        shapes[prefix + "self_attn.o_proj.weight"] = (c.hidden, q)
        if c.attention_bias:
            shapes[prefix + "self_attn.o_proj.bias"] = (c.hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (c.hidden,)
        for name, rows, columns in (
            ("gate", c.intermediate, c.hidden),
            ("up", c.intermediate, c.hidden),
            ("down", c.hidden, c.intermediate),
        ):
            shapes[f"{prefix}mlp.{name}_proj.weight"] = (rows, columns)
            if c.mlp_bias:
                shapes[f"{prefix}mlp.{name}_proj.bias"] = (rows,)
    shapes["model.norm.weight"] = (c.hidden,)
    if not c.tie_embeddings:
        shapes["lm_head.weight"] = (c.vocab, c.hidden)
    return shapes


def _check(weights: Weights, config: ModelConfig) -> None:
    """Raise ModelError `corrupt` unless names and shapes are those of the config."""
    expected = expected_shapes(config)
    missing = sorted(expected.keys() - weights.keys())
    extra = sorted(weights.keys() - expected.keys())
    wrong = [
        f"{name} {tuple(weights[name].shape)}, expected {shape}"
        for name, shape in expected.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    for what, names in (("missing", missing), ("unexpected", extra), ("misshaped", wrong)):
        if names:
            rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError("corrupt", f"{what} tensors: {', '.join(names[:3])}{rest}")


# --- files -------------------------------------------------------------------------------------


def _read_folder(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of a Hugging Face folder, sharded or not."""
    for file in _folder_files(folder):
        for name, tensor in _read_safetensors(file):
            if not name.endswith(_FOLDER_IGNORED):
                yield name, tensor


def _folder_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists() or not index.exists():
        names = {"model.safetensors"}
    else:
        try:
            weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except msgspec.MsgspecError as error:
            raise ModelError("corrupt", f"{index}: {error}.") from error
        names = set(weight_map.values())
    for name in names:
        if Path(name).name != name:
            raise ModelError("corrupt", f"{index} names {name!r}; expected a file beside it")
        if not (folder / name).exists():
            raise ModelError("not_found", f"{folder} has no {name}.")
    return sorted(folder / name for name in names)


def _read_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a safetensors file, mapped. Raises ModelError `corrupt`."""
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            for name in names:
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelError("corrupt", f"{path} cannot be read: {error}.") from error


def _is_readable(path: Path) -> bool:
    """Return whether a cache file exists and is complete; its header states its length."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (SafetensorError, OSError):
        return False


def _save(path: Path, weights: Weights) -> None:
    """Write a safetensors file atomically. Raises ModelError `storage`."""
    partial: str | None = None
    try:
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".weights-")
        os.close(handle)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, partial)
        with Path(partial).open("rb") as file:
            os.fsync(file.fileno())
        Path(partial).replace(path)
    except (SafetensorError, OSError) as error:
        raise ModelError("storage", f"{path} cannot be written: {error}.") from error
    finally:
        if partial is not None:
            Path(partial).unlink(missing_ok=True)


def _read_gguf(path: Path, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a GGUF file in fp32, with q and k in the order of training."""
    header = read_header(path)
    data = np.memmap(path, mode="r", dtype=np.uint8)
    for info in header.tensors:
        stem, _, kind = info.name.rpartition(".")
        if stem in _GGUF_IGNORED:
            continue
        array = _dequantise(path, data, info)
        if config.architecture == "llama" and stem.endswith(("attn_q", "attn_k")):
            heads = config.heads if stem[-1] == "q" else config.kv_heads
            if len(array) % (2 * heads):
                raise ModelError(
                    "corrupt",
                    f"{path}: {info.name} has {len(array)} rows; expected {heads} heads of an"
                    " even size",
                )
            array = _unpermute_rope_rows(array, heads)
        yield f"{_hf_name(stem)}.{kind}", torch.from_numpy(array)


def _hf_name(stem: str) -> str:
    if stem in _GGUF_NAMES:
        return _GGUF_NAMES[stem]
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or part not in _GGUF_LAYER_NAMES:
        return stem
    return f"model.layers.{layer}.{_GGUF_LAYER_NAMES[part]}"


def _dequantise(path: Path, data: np.memmap, info: TensorInfo) -> np.ndarray:
    try:
        kind = GGMLQuantizationType(info.type_id)
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise ModelError(
            "unsupported", f"{path}: unsupported tensor type {info.type_id} of {info.name}"
        ) from error
    shape = info.shape[::-1]
    count = math.prod(shape)
    size = count // per_block * block_bytes
    if not shape or shape[-1] % per_block or info.offset + size > len(data):
        raise ModelError("corrupt", f"{path}: {info.name} of shape {shape} is outside the file")
    raw = data[info.offset : info.offset + size]
    if kind == GGMLQuantizationType.F32:
        return np.array(raw.view(np.float32).reshape(shape))
    if kind == GGMLQuantizationType.F16:
        return raw.view(np.float16).reshape(shape).astype(np.float32)
    try:
        rows = raw.reshape(*shape[:-1], shape[-1] // per_block * block_bytes)
        return np.ascontiguousarray(dequantize(rows, kind), dtype=np.float32).reshape(shape)
    except NotImplementedError as error:
        raise ModelError(
            "unsupported", f"{path}: unsupported tensor type {kind.name} of {info.name}"
        ) from error


def _unpermute_rope_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows from GGUF's rotation of neighbouring channels to rotation by halves.

    GGUF files of Llama store q and k permuted; models are trained with rotation by halves.
    """
    shape = array.shape
    paired = array.reshape(heads, shape[0] // heads // 2, 2, *shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(shape)
