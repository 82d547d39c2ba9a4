"""Tiny models that think: one between tags, one in harmony, by their chat templates and markers."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from engine.model_store import ModelCard, prepare
from gateway.structured_output.thinking import HARMONY_MARKERS
from tests.models import tiny_config, write_folder
from tests.tiny_tokenizer import TOKENS
from tests.unit.gateway.prompt.chat_templates import HARMONY, THINKING

TAGS = ("<think>", "</think>")


def tags_model(tmp: Path) -> ModelCard:
    """Write and prepare a model that thinks between tags, which are special tokens."""
    return _prepared(tmp, THINKING, TAGS)


def harmony_model(tmp: Path) -> ModelCard:
    """Write and prepare a model that writes harmony, whose markers are special tokens."""
    ends = ("<|call|>", "<|return|>")
    return _prepared(tmp, HARMONY, HARMONY_MARKERS, ends)


def _prepared(
    tmp: Path, template: str, markers: tuple[str, ...], ends: tuple[str, ...] = ("<|im_end|>",)
) -> ModelCard:
    config = msgspec.structs.replace(tiny_config(), vocab=len(TOKENS) + len(markers))
    folder = write_folder(tmp / "source", config)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [
        {"id": len(TOKENS) + number, "content": text, "special": True, **flags}
        for number, text in enumerate(markers)
    ]
    ids = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = template
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
        "generation_config.json": {"eos_token_id": [ids[end] for end in ends]},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return prepare("thinker", folder, tmp)
