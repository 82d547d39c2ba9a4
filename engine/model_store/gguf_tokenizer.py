"""Builds a tokenizer.json from a GGUF file's metadata.

Byte-level BPE, with the pre-tokenizers of the supported families. Pure: metadata in, JSON text out,
in the form that the `tokenizers` library reads.
"""

from __future__ import annotations

import json
from typing import Any

from engine.errors import ModelError
from engine.model_store.gguf_header import GgufHeader, Value

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return [split, _byte_level(use_regex=False)]


PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_byte_level(use_regex=True)],
    "default": [_byte_level(use_regex=True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    "llama-bpe": _split(_LLAMA3_SPLIT),
    "qwen2": _split(_QWEN2_SPLIT),
}
"""Pre-tokenizers by `tokenizer.ggml.pre`."""


def special_ids(header: GgufHeader) -> tuple[int, ...]:
    """Return the tokens that are never text: control and unknown tokens."""
    return tuple(i for i, kind in enumerate(_kinds(header)) if kind in (_UNKNOWN, _CONTROL))


def _kinds(header: GgufHeader) -> list[Value]:
    kinds = header.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(kinds, list):
        raise ModelError("corrupt", "tokenizer.ggml.token_type is not a list")
    return kinds


def tokenizer_json(header: GgufHeader) -> str:
    """Return the tokenizer as JSON text. Raises ModelError for an unsupported or damaged one."""
    model = header.string("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelError(
            "unsupported",
            f"unsupported tokenizer: {model!r}; expected byte-level BPE ('gpt2'). Use the model's"
            " Hugging Face folder, which has a tokenizer.json",
        )
    family = header.string("tokenizer.ggml.pre") or "default"
    if family not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(
            "unsupported", f"unsupported pre-tokenizer: {family!r}; expected one of {known}"
        )
    tokens = header.strings("tokenizer.ggml.tokens")
    merges = [merge.split(" ") for merge in header.strings("tokenizer.ggml.merges")]
    if not tokens or not all(len(merge) == 2 for merge in merges):
        raise ModelError("corrupt", "the tokenizer has no tokens, or a merge that is not a pair")
    added = [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for i, kind in enumerate(_kinds(header)[: len(tokens)])
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": {"type": "NFC"} if family == "qwen2" else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[family]},
            "post_processor": None,
            "decoder": _byte_level(use_regex=True),
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": family == "llama-bpe",
                "vocab": {token: i for i, token in enumerate(tokens)},
                "merges": merges,
            },
        }
    )
