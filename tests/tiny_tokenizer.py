"""The tokenizer of the tiny models: byte-level BPE with three special tokens and a few merges. It
needs no torch, which takes a second to import."""

from __future__ import annotations

from typing import Any

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("the", " the", "and", " and", " of", " to", "in", " in", "er", " a", "on", " you", "ing")


def _byte_characters() -> list[str]:
    """Return GPT-2's printable character for each byte, by byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def _vocabulary() -> tuple[list[str], list[str]]:
    """Return tokens by id, specials first, and merges that build `WORDS` from left to right."""
    letters = _byte_characters()
    tokens, merges = [*SPECIALS, *letters], []
    for word in WORDS:
        characters = [letters[byte] for byte in word.encode()]
        left = characters[0]
        for right in characters[1:]:
            merge = f"{left} {right}"
            left += right
            if merge not in merges:
                merges.append(merge)
            if left not in tokens:
                tokens.append(left)
    return tokens, merges


TOKENS, MERGES = _vocabulary()


def tokenizer_document() -> dict[str, Any]:
    """Return the content of tokenizer.json: byte-level BPE over `TOKENS`."""
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
    }  # fmt: skip
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": word, "special": True, **flags} for i, word in enumerate(SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(TOKENS)},
            "merges": [merge.split(" ") for merge in MERGES],
        },
    }


def byte_tokens(text: str) -> list[int]:
    """Return one token per byte; the special tokens come first in the vocabulary."""
    return [len(SPECIALS) + byte for byte in text.encode()]
