"""Reads config, tokenizer and chat template from a Hugging Face folder.

`families` reads the config; how the weights are quantised is read here, strictly: a field that
changes what the bytes are worth and is not known is refused by name. It reads no weights. `prepare`
calls it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.model_store.architecture import Packing, Quantisation
from engine.model_store.families import architecture_of
from engine.model_store.parts import END_TOKENS, ModelParts, choose_template

TEXT_BYTES_MAX = 512 * 2**20
"""Most bytes of a file that is read as text: a tokenizer of 262,144 tokens has 33 MB."""

_BLOCK = [128, 128]
"""Rows and columns of a weight that share a scale, where blocks do."""

GROUPS = (16, 32, 64, 128)
"""Columns of a row that may share a scale of 4 bits."""

_NEAREST = (
    "expected fp8, mxfp4, awq, gptq or compressed-tensors of 4 or 8 bits, or weights in bf16; the"
    ' nearest that runs is the model\'s folder in bf16, with engine.weights = "fp8" on a GPU, or a'
    " GGUF file"
)


def read_folder(folder: Path) -> ModelParts:
    """Read everything but the weights. Raises ModelError: not_found, corrupt or unsupported."""
    config = _read_json(folder / "config.json")
    if not (folder / "tokenizer.json").exists():
        raise ModelError(
            "unsupported",
            f"{folder} has no tokenizer.json; save the model's fast tokenizer there",
        )
    tokenizer = _read_text(folder / "tokenizer.json")
    settings, specials_map, generation = (
        _read_json(folder / name, optional=True)
        for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
    )
    specials = _specials(_read_json(folder / "tokenizer.json"), folder)
    ends = [
        one
        for holder in (config, generation)
        for one in _token_ids(holder.get("eos_token_id"), folder)
    ]
    own_ends = sorted(i for i, word in specials.items() if word in END_TOKENS)
    named = {**specials_map, **settings}
    eos = _named_token("eos_token", named, specials, [*ends, *own_ends])
    bos = _named_token("bos_token", named, specials, _token_ids(config.get("bos_token_id"), folder))
    template, warnings = choose_template(_templates(folder, settings))
    return ModelParts(
        config=architecture_of(config),
        quantisation=read_quantisation(config),
        tokenizer=tokenizer,
        template=template,
        warnings=warnings,
        stop_token_ids=tuple(sorted({*ends, *own_ends, *([] if eos is None else [eos])})),
        special_token_ids=tuple(sorted(specials)),
        bos_token_id=bos,
        eos_token_id=eos,
        add_bos=settings.get("add_bos_token") is True and bos is not None,
    )


def _specials(tokenizer: dict[str, Any], folder: Path) -> dict[int, str]:
    added = tokenizer.get("added_tokens") or []
    try:
        return {int(t["id"]): str(t["content"]) for t in added if t.get("special")}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ModelError("corrupt", f"{folder}/tokenizer.json: added_tokens: {error}.") from error


def _named_token(
    name: str, named: dict[str, Any], specials: dict[int, str], others: list[int]
) -> int | None:
    """Return the token that the tokenizer's settings give a name; where they give none that is a
    special token, the first of others. None if the settings say that there is none."""
    if name in named and named[name] is None:
        return None
    word = named.get(name)
    text = word.get("content") if isinstance(word, dict) else word
    found = [i for i, special in specials.items() if special == text]
    return next(iter([*found, *others]), None)


def _token_ids(value: object, folder: Path) -> list[int]:
    """Return the token ids of a config field: None, one id or a list of ids."""
    ids: list[object] = value if isinstance(value, list) else [] if value is None else [value]
    integers = [token for token in ids if isinstance(token, int) and not isinstance(token, bool)]
    if len(integers) < len(ids):
        raise ModelError("corrupt", f"{folder}: {value!r} is not a token id")
    return integers


def _templates(folder: Path, settings: dict[str, Any]) -> dict[object, object]:
    """Return the chat templates by name, from the first place that has any: a file of its own, the
    tokenizer's settings, the processor's file, the folder of further ones."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return {"default": _read_text(path)}
    for holder in (settings, _read_json(folder / "chat_template.json", optional=True)):
        found = holder.get("chat_template")
        if isinstance(found, list):
            found = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        if found:
            return found if isinstance(found, dict) else {"default": found}
    others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return {path.stem: _read_text(path) for path in others}


def _read_text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise ModelError("corrupt", f"{path} is not a regular file.")
        if path.stat().st_size > TEXT_BYTES_MAX:
            size = path.stat().st_size
            message = f"{path} has {size} bytes; expected at most {TEXT_BYTES_MAX}"
            raise ModelError("corrupt", message)
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ModelError("not_found", f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ModelError("corrupt", f"{path} is not UTF-8.") from error


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError("corrupt", f"{path} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError("corrupt", f"{path} is not a JSON object.")
    return value


# --- quantised weights ---------------------------------------------------------------------------


def read_quantisation(config: dict[str, Any]) -> Quantisation | None:
    """Return how the weights of a config.json are quantised, None if they are not.

    Raises ModelError: unsupported.
    """
    given = config.get("quantization_config") or config.get("compression_config")
    inner = config.get("text_config")
    if not given and isinstance(inner, dict):
        given = inner.get("quantization_config")
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else given
    read = _METHODS.get(str(method))
    if read is None or not isinstance(given, dict):
        raise _refused("quant_method", method)
    try:
        return read(given)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        told = f"config.json: quantization_config: {error!r}."
        raise ModelError("corrupt", told) from error


def _refused(field: str, value: object) -> ModelError:
    told = f"config.json has a quantization_config with {field}: {value!r}; {_NEAREST}"
    return ModelError("unsupported", told)


def _expect(given: dict[str, Any], field: str, *allowed: object) -> Any:
    """Return a field. Raises ModelError unless its value is one of those that are known."""
    value = given.get(field)
    if value not in allowed:
        raise _refused(field, value)
    return value


def _group(given: dict[str, Any], field: str = "group_size") -> int:
    return int(_expect(given, field, *GROUPS))


def _fp8(given: dict[str, Any]) -> Quantisation:
    _expect(given, "fmt", None, "e4m3")
    block = given.get("weight_block_size")
    if block is not None and list(block) != _BLOCK:
        raise _refused("weight_block_size", block)
    return Quantisation("fp8")


def _mxfp4(given: dict[str, Any]) -> Quantisation:
    return Quantisation("mxfp4")


def _awq(given: dict[str, Any]) -> Quantisation:
    _expect(given, "bits", 4)
    _expect(given, "version", None, "gemm", "GEMM")
    _expect(given, "zero_point", None, True)
    return Quantisation("awq", _group(given), has_zeros=True)


def _gptq(given: dict[str, Any]) -> Quantisation:
    _expect(given, "bits", 4)
    _expect(given, "desc_act", None, False)
    _expect(given, "dynamic", None, {})  # other bits for some of the layers
    form = _expect(given, "checkpoint_format", None, "gptq", "gptq_v2")
    layout: Packing = "gptq_v2" if form == "gptq_v2" else "gptq"
    return Quantisation(layout, _group(given), has_zeros=True)


def _compressed_tensors(given: dict[str, Any]) -> Quantisation:
    """Read the one scheme of a folder of compressed-tensors."""
    schemes = {str(scheme.get("weights")): scheme for scheme in given["config_groups"].values()}
    if len(schemes) != 1:
        raise _refused("config_groups of unlike weights", sorted(given["config_groups"]))
    _expect(given, "transform_config", None, {})  # rows that are rotated before they are multiplied
    _expect(given.get("sparsity_config") or {}, "format", None, "dense")
    (scheme,) = schemes.values()
    weights = scheme["weights"]
    form = scheme.get("format") or given.get("format")
    _expect(weights, "actorder", None, False, "weight", "static")
    if form == "mxfp4-pack-quantized":
        return Quantisation("mxfp4_rows")
    strategy = _expect(weights, "strategy", "tensor", "channel", "group", "block")
    if form == "float-quantized":
        _expect(weights, "num_bits", 8)
        if strategy == "block" and list(weights["block_structure"]) != _BLOCK:
            raise _refused("block_structure", weights["block_structure"])
        return Quantisation("fp8")
    if form == "int-quantized":
        _expect(weights, "symmetric", True)
        return Quantisation("int8")
    if form != "pack-quantized":
        raise _refused("format", form)
    _expect(weights, "num_bits", 4)
    _expect(weights, "type", "int")
    group = 0 if strategy == "channel" else _group(weights)
    return Quantisation("packed_rows", group, has_zeros=not weights.get("symmetric", True))


_METHODS = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
}
