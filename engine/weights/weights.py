"""Model weights as a dict of tensors under Hugging Face names, from GGUF or safetensors files.

Quantised GGUF tensors are dequantised once and cached beside the prepared model as one safetensors
file per dtype, which the next start maps instead. No code from a model's files is ever run. Runner
builders call `load_weights`; a model's constructor takes the tensors out of the dict.
"""

from __future__ import annotations

import logging
import math
import os
import re
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
from engine.model_store import Architecture, ModelCard
from engine.model_store.families import FAMILIES
from engine.model_store.gguf_header import TensorInfo, read_header
from engine.model_store.tensor_names import FOLDER_NAMES, GGUF_NAMES
from engine.weights.renaming import MXFP4_VALUES, Pieces, TensorReader
from engine.weights.shapes import expected_shapes

log = logging.getLogger("trunkline.engine")

_LAYER = re.compile(r"model\.layers\.(\d+)\.")

Weights = dict[str, torch.Tensor]
"""Tensors by Hugging Face name, such as `model.layers.0.mlp.up_proj.weight`."""

_GGUF_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_IGNORED = ("rope_freqs", "rope_factors_long", "rope_factors_short")
"""Tensors that `engine.model_store` reads into the model card."""

_FOLDER_IGNORED = ("rotary_emb.inv_freq",)
"""Tensors of old folders that are computed from the config."""

_LANGUAGE_PREFIXES = ("model.language_model.", "language_model.model.")
"""What stands before the names of the text part in folders of models that see, for `model.`."""

_SET_ASIDE = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|embed_vision)\."
    r"|mtp\."
)
"""Tensors of folders that serve images, sound and drafts."""


class _Index(msgspec.Struct):
    """`model.safetensors.index.json`: the shard file of each tensor."""

    weight_map: dict[str, str]


LAYOUT_VERSION = 2
"""Version of names and order of the cached tensors; a file of another version is not read."""

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
        weights = dict(_read_folder(source, card.config, dtype))
        if card.config.tie_embeddings:
            weights.pop("lm_head.weight", None)
    else:
        kind = str(dtype).removeprefix("torch.")
        cached = Path(card.folder) / f"weights-{LAYOUT_VERSION}-{kind}.safetensors"
        if not _is_readable(cached):
            tensors = dict(_read_gguf(source, card.config, dtype))
            _check(tensors, card.config)  # refuse a wrong model before the cache file is written
            _save(cached, tensors)
            del tensors
        weights = dict(_read_safetensors(cached))
    _check(weights, card.config)
    return {name: tensor.to(device) for name, tensor in weights.items()}


def random_weights(
    config: Architecture, dtype: torch.dtype, seed: int, device: torch.device
) -> Weights:
    """Return seeded random weights of a model's shape, made on the device, for benchmarks and
    tests.

    Scaled by 1 / sqrt(fan-in), so that activations stay finite at any depth. Experts whose files
    are in MXFP4 have values of it, so that they are packed as those are.
    """
    is_mxfp4 = config.moe is not None and config.moe.expert == "clamped"
    generator = torch.Generator(device=device).manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape, dtype=dtype, device=device)
            continue
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith("bias"):
            tensor.zero_()
        elif is_mxfp4 and ".experts." in name:
            _draw_mxfp4(tensor, generator)
        else:
            tensor.normal_(0.0, shape[-1] ** -0.5, generator=generator)
        weights[name] = tensor
    return weights


def _draw_mxfp4(stack: torch.Tensor, generator: torch.Generator) -> None:
    """Fill matrices [E, N, K] with random values of MXFP4 of about 1 / sqrt(K)."""
    values = torch.tensor(MXFP4_VALUES, device=stack.device)
    scale = 2.0 ** round(math.log2(stack.shape[-1] ** -0.5 / float(values.std())))
    values = (values * scale).to(stack.dtype)
    for matrix in stack:
        codes = torch.randint(
            len(values), matrix.shape, generator=generator, device=stack.device, dtype=torch.int32
        )
        matrix.copy_(values[codes])


def _check(weights: Weights, config: Architecture) -> None:
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


def _read_folder(folder: Path, config: Architecture, dtype: torch.dtype) -> Pieces:
    """Yield the model's tensors from a Hugging Face folder, sharded or not."""
    names = {**FOLDER_NAMES, **FAMILIES[config.family].folder_names}
    reader = TensorReader(config, names, dtype)
    set_aside = 0
    for file in _folder_files(folder):
        for name, tensor in _read_safetensors(file):
            if name.endswith(_FOLDER_IGNORED):
                continue
            layer, rest = _folder_name(name)
            if _SET_ASIDE.match(name) or _is_draft_layer(layer, config):
                set_aside += 1
                continue
            yield from reader.take(layer, rest, tensor)
    if set_aside:
        log.info("tensors_set_aside: %d of images, sound or drafts in %s", set_aside, folder)


def _folder_name(name: str) -> tuple[str, str]:
    """Return the prefix of a tensor's layer in the model's names, and the rest of its name."""
    for prefix in _LANGUAGE_PREFIXES:
        if name.startswith(prefix):
            name = f"model.{name.removeprefix(prefix)}"
    name = name.removeprefix("language_model.") if name.endswith("lm_head.weight") else name
    found = _LAYER.match(name)
    return (found[0], name[found.end() :]) if found else ("", name)


def _is_draft_layer(layer: str, config: Architecture) -> bool:
    """Return whether a layer stands behind the model's own: it drafts tokens."""
    found = _LAYER.match(layer)
    return found is not None and config.moe is not None and int(found[1]) >= len(config.layers)


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
        if Path(name).name != name or name == "..":
            raise ModelError("corrupt", f"{index} names {name!r}; expected a file beside it")
        if not (folder / name).is_file():  # a pipe would block its reader
            raise ModelError("not_found", f"{folder} has no file {name}.")
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


def _read_gguf(path: Path, config: Architecture, dtype: torch.dtype) -> Pieces:
    """Yield the model's tensors from a GGUF file."""
    header = read_header(path)
    data = np.memmap(path, mode="r", dtype=np.uint8)
    names = {**GGUF_NAMES, **FAMILIES[config.family].gguf_names}
    reader = TensorReader(config, names, dtype)
    for info in header.tensors:
        stem, _, kind = info.name.rpartition(".")
        if stem in _GGUF_IGNORED:
            continue
        block, _, rest = info.name.removeprefix("blk.").partition(".")
        layer = f"model.layers.{block}." if info.name.startswith("blk.") else ""
        if _is_draft_layer(layer, config):
            continue
        name = rest if layer else f"{_GGUF_TOP.get(stem, stem)}.{kind}"
        yield from reader.take(layer, name, torch.from_numpy(_dequantise(path, data, info)))


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
