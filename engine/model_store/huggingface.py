"""Reads config, tokenizer and chat template from a Hugging Face folder.

`families` reads the config. It reads no weights. `prepare` calls it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.model_store.architecture import Architecture
from engine.model_store.families import architecture_of
from engine.model_store.parts import END_TOKENS, ModelParts, choose_template

TEXT_BYTES_MAX = 512 * 2**20
"""Most bytes of a file that is read as text: a tokenizer of 262,144 tokens has 33 MB."""


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
        config=_architecture(config),
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


def _architecture(config: dict[str, Any]) -> Architecture:
    quantisation = config.get("quantization_config")
    if quantisation:
        named = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        if (config.get("model_type"), named) != ("gpt_oss", "mxfp4"):
            raise ModelError(
                "unsupported",
                f"config.json has a quantization_config: {named!r}; expected fp32, bf16 or fp16"
                " weights, or gpt-oss in mxfp4. Load quantised models as GGUF files",
            )
    return architecture_of(config)


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
