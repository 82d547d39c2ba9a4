"""Model weights as a dict of tensors under Hugging Face names, from GGUF or safetensors files.

Quantised GGUF tensors are dequantised once and cached beside the prepared model as one safetensors
file per dtype, which the next start maps instead; those of 4 bits stay packed, as packed weights of
folders do. No code from a model's files is ever run. Runner builders call `load_packed`; a model's
constructor takes the tensors out of the dict.
"""

from __future__ import annotations

import logging
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
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
from engine.model_store.gguf_header import TensorInfo, gguf_shards, read_header
from engine.model_store.tensors import FOLDER_NAMES, GGUF_NAMES, expected_shapes
from engine.weights.freed_memory import give_back_freed
from engine.weights.gguf_blocks import PACKED_BLOCKS
from engine.weights.quantised_folders import PackedReader
from engine.weights.renaming import Pieces, TensorReader
from kernels.reference_weights import GROUP, Kind, Packed, Weight, as_dense, each

log = logging.getLogger("trunkline.engine")

_LAYER = re.compile(r"model\.layers\.(\d+)\.")

Tensors = dict[str, torch.Tensor]
"""Tensors by Hugging Face name, such as `model.layers.0.mlp.up_proj.weight`."""

Weights = dict[str, Weight] | Tensors
"""The same where linear maps may be packed."""

Form = Callable[[str, Weight], Weight]
"""Brings a weight, by its name, into the form in which a device's operations take it."""

Share = Callable[[str, Weight, int], Weight]
"""Returns what one of several devices gets of a weight, by its name and the device's number."""

_GGUF_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_IGNORED = ("rope_freqs", "rope_factors_long", "rope_factors_short")
"""Tensors that `engine.model_store` reads into the model card."""

_FOLDER_IGNORED = ("rotary_emb.inv_freq",)
"""Tensors of old folders that are computed from the config."""

_LANGUAGE_PREFIXES = ("model.language_model.", "language_model.model.", "backbone.")
"""What comes for `model.` before the names of the text part in folders of models that see, and of
Nemotron-H."""

_SET_ASIDE = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|embed_vision)\."
    r"|mtp\."
)
"""Tensors of folders that serve images, sound and drafts."""


_PART = "|"
"""What is in a cached file between the name of a packed weight, its kind, and the number of its
part."""


class _Index(msgspec.Struct):
    """`model.safetensors.index.json`: the shard file of each tensor."""

    weight_map: dict[str, str]


LAYOUT_VERSION = 4
"""Version of names and order of the cached tensors; a file of another version is not read."""

RANDOM = "random:"
"""Prefix of a card's source that is a seed, not a path: random weights for benchmarks."""


def load_weights(
    card: ModelCard, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensors:
    """Load every tensor of a model in `dtype`; see `load_packed`."""
    loaded = load_packed(card, dtype, device, lambda _, weight: as_dense(weight, dtype))
    return {name: as_dense(weight, dtype) for name, weight in loaded.items()}


def load_packed(
    card: ModelCard, dtype: torch.dtype, device: torch.device | str, form: Form
) -> dict[str, Weight]:
    """Load every tensor of a model, checked against the shapes that the config implies.

    Each is brought to the device in `dtype`, or packed as its file has it, and into `form` there,
    before the next is read: beside the weights there is one tensor. The first load of a GGUF file
    dequantises it (about 2 s for 135M parameters) and writes the result beside the prepared model;
    later loads map that file. Raises ModelError with the names of missing, unexpected or misshaped
    tensors.
    """
    return load_shares(card, dtype, [device], form, lambda _name, weight, _lane: weight)[0]


def load_shares(
    card: ModelCard, dtype: torch.dtype, devices: Sequence[torch.device | str], form: Form,
    share: Share,
) -> list[dict[str, Weight]]:  # fmt: skip
    """Load a model's tensors once and deal them out: each device gets its `share` of each tensor,
    and brings it into `form`. See `load_packed`."""
    shares: list[dict[str, Weight]] = [{} for _ in devices]
    shapes: dict[str, tuple[int, ...]] = {}
    expected, is_tied = expected_shapes(card.config), card.config.tie_embeddings
    for name, weight in _pieces(card, dtype, torch.device(devices[0])):
        if is_tied and name == "lm_head.weight":
            continue
        shapes[name] = tuple(weight.shape)
        for lane, device in enumerate(devices):
            is_expected = expected.get(name) == shapes[name]
            own = share(name, weight, lane) if is_expected else weight
            shares[lane][name] = form(name, each(own, partial(torch.Tensor.to, device=device)))
    _check(shapes, card.config)
    return shares


def _pieces(card: ModelCard, dtype: torch.dtype, device: torch.device) -> Pieces:
    """Yield a model's tensors from its files, or random ones made on the device."""
    if card.source.startswith(RANDOM):
        yield from random_pieces(card.config, dtype, int(card.source[len(RANDOM) :]), device)
        return
    source = Path(card.source)
    if source.is_dir():
        yield from _read_folder(source, card, dtype)
        return
    kind = str(dtype).removeprefix("torch.")
    cached = Path(card.folder) / f"weights-{LAYOUT_VERSION}-{kind}.safetensors"
    if not _is_readable(cached):
        tensors = dict(_read_gguf(source, card.config, dtype))
        if card.config.tie_embeddings:
            tensors.pop("lm_head.weight", None)
        # Refuse a wrong model before the cache file is written.
        _check({name: tuple(one.shape) for name, one in tensors.items()}, card.config)
        _save(cached, tensors)
        del tensors
        give_back_freed()
    yield from _joined(_read_safetensors(cached))


def random_weights(
    config: Architecture, dtype: torch.dtype, seed: int, device: torch.device
) -> Tensors:
    """Return seeded random weights of a model's shape, made on the device, for benchmarks and
    tests; see `random_pieces`."""
    pieces = random_pieces(config, dtype, seed, device)
    return {name: as_dense(weight, dtype) for name, weight in pieces}


def random_pieces(
    config: Architecture, dtype: torch.dtype, seed: int, device: torch.device
) -> Pieces:
    """Yield seeded random weights of a model's shape.

    Scaled by 1 / sqrt(fan-in), so that activations stay finite at any depth. Experts whose files
    are in MXFP4 are packed as those are.
    """
    is_mxfp4 = config.moe is not None and config.moe.expert == "clamped"
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, shape in expected_shapes(config).items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape, dtype=dtype, device=device)
            continue
        if is_mxfp4 and ".experts." in name and name.endswith("weight") and not shape[-1] % GROUP:
            yield name, _random_mxfp4(shape, generator)
            continue
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith("bias"):
            tensor.zero_()
        else:
            tensor.normal_(0.0, shape[-1] ** -0.5, generator=generator)
        yield name, tensor


def _random_mxfp4(shape: tuple[int, ...], generator: torch.Generator) -> Packed:
    """Return matrices [E, N, K] of random values of MXFP4 of about 1 / sqrt(K)."""
    device, (*stack, columns) = generator.device, shape
    codes = torch.randint(
        256, (*stack, columns // 2), generator=generator, device=device, dtype=torch.uint8
    )
    exponent = round(math.log2(columns**-0.5 / 3.0))  # codes deviate by about 3
    scales = torch.full(
        (*stack, columns // GROUP), 127 + exponent, dtype=torch.uint8, device=device
    )
    return Packed("mxfp4", codes, scales, GROUP)


def _check(shapes: Mapping[str, tuple[int, ...]], config: Architecture) -> None:
    """Raise ModelError `corrupt` unless names and shapes are those of the config."""
    expected = expected_shapes(config)
    missing = sorted(expected.keys() - shapes.keys())
    extra = sorted(shapes.keys() - expected.keys())
    wrong = [
        f"{name} {shapes[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    for what, names in (("missing", missing), ("unexpected", extra), ("misshaped", wrong)):
        if names:
            rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError("corrupt", f"{what} tensors: {', '.join(names[:3])}{rest}")


# --- files -------------------------------------------------------------------------------------


def _read_folder(folder: Path, card: ModelCard, dtype: torch.dtype) -> Pieces:
    """Yield the model's tensors from a Hugging Face folder, sharded or not."""
    config = card.config
    names = {**FOLDER_NAMES, **FAMILIES[config.family].folder_names}
    reader, packed = TensorReader(config, names, dtype), PackedReader(card.quantisation)
    set_aside = 0
    for file in _folder_files(folder):
        for name, tensor in _read_safetensors(file):
            if name.endswith(_FOLDER_IGNORED):
                continue
            layer, _ = _folder_name(name)
            if _SET_ASIDE.match(name) or _is_draft_layer(layer, config):
                set_aside += 1
                continue
            for whole, weight in packed.take(name, tensor):
                yield from reader.take(*_folder_name(whole), weight)
    packed.check()
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
    """Return whether a layer comes after the model's own: it drafts tokens."""
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


def _joined(tensors: Iterable[tuple[str, torch.Tensor]]) -> Pieces:
    """Yield the weights that `_save` wrote: the parts of a packed one follow each other."""
    parts: list[torch.Tensor] = []
    for name, tensor in sorted(tensors, key=lambda one: one[0]):
        whole, *which = name.split(_PART)
        if not which:
            yield name, tensor
            continue
        parts.append(tensor)
        if which[0] == "mxfp4" and len(parts) == 2:
            yield whole, Packed("mxfp4", parts[0], parts[1], GROUP)
            parts = []
        elif len(parts) == 3:
            kind: Kind = "int4" if which[0] == "int4" else "int8"
            group = parts[0].shape[-1] * (2 if kind == "int4" else 1) // parts[1].shape[-1]
            yield whole, Packed(kind, parts[0], parts[1], group, parts[2])
            parts = []


def _save(path: Path, weights: dict[str, Weight]) -> None:
    """Write a safetensors file atomically. Raises ModelError `storage`."""
    tensors: Tensors = {}
    for name, weight in weights.items():
        if isinstance(weight, Packed):
            stem = f"{name}{_PART}{weight.kind}{_PART}"
            tensors |= {f"{stem}{i}": part for i, part in enumerate(weight.parts)}
        else:
            tensors[name] = weight
    partial: str | None = None
    try:
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".weights-")
        os.close(handle)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
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
    shards = [(one, np.memmap(one, mode="r", dtype=np.uint8)) for one in gguf_shards(path)]
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
        yield from reader.take(layer, name, _from_gguf(*shards[info.shard], info))


def _from_gguf(path: Path, data: np.memmap, info: TensorInfo) -> Weight:
    """Return a tensor of a GGUF file: those of 4 bits packed, others dequantised to fp32."""
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
        return torch.from_numpy(np.array(raw.view(np.float32).reshape(shape)))
    if kind == GGMLQuantizationType.F16:
        return torch.from_numpy(raw.view(np.float16).reshape(shape).astype(np.float32))
    if kind.name in PACKED_BLOCKS:
        blocks = torch.from_numpy(np.array(raw)).view(*shape[:-1], -1, block_bytes)
        return PACKED_BLOCKS[kind.name](blocks)
    try:
        rows = raw.reshape(*shape[:-1], shape[-1] // per_block * block_bytes)
        values = np.ascontiguousarray(dequantize(rows, kind), dtype=np.float32)
        return torch.from_numpy(values.reshape(shape))
    except NotImplementedError as error:
        raise ModelError(
            "unsupported", f"{path}: unsupported tensor type {kind.name} of {info.name}"
        ) from error
