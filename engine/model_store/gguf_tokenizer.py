"""Builds a tokenizer.json from a GGUF file's metadata.

Byte-level BPE, with the pre-tokenizers of the supported families, and SentencePiece, which joins
the neighbours whose joined piece has the highest score: BPE with its merges in the order of the
joined pieces' scores. Pure: metadata in, JSON text out, in the form that the `tokenizers` library
reads.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from engine.errors import ModelError
from engine.model_store.gguf_header import GgufHeader

_TYPES = "tokenizer.ggml.token_type"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"
"""SentencePiece's character for a space."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35_SPLIT = _QWEN2_SPLIT.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}|\p{{N}}{{1,3}}{_REST}"
)
_TEKKEN_SPLIT = _GPT4O_SPLIT.replace(_SUFFIX, "").replace(r"\p{N}{1,3}", r"\p{N}")
_DEEPSEEK_SPLIT = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(*patterns: str) -> list[dict[str, Any]]:
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return [*splits, _byte_level(use_regex=False)]


_WORDS = [_byte_level(use_regex=True)]
_DIGITS = [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)]


_GPT2_NAMES = (
    *("gpt-2", "default", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat"),
    *("mellum", "a.x-4.0", "granite-docling", "roberta-bpe", "modern-bert", "jina-v1-en"),
    *("jina-v2-code", "jina-v2-es", "jina-v2-de", "jina-es", "jina-de"),
)
_DIGIT_NAMES = (
    *("smollm", "refact", "command-r", "starcoder", "codeshell", "exaone", "minerva-7b"),
    "mellum2",
)
_LLAMA3_NAMES = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "jina-v5-nano",
)
_QWEN2_NAMES = (
    *("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2", "stablelm2", "hunyuan"),
    *("solar-open", "grok-2"),
)
PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    **dict.fromkeys(_GPT2_NAMES, _WORDS),
    **dict.fromkeys(_DIGIT_NAMES, _DIGITS),
    **dict.fromkeys(_LLAMA3_NAMES, _split(_LLAMA3_SPLIT)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _split(_LLAMA3_SPLIT)),
    **dict.fromkeys(_QWEN2_NAMES, _split(_QWEN2_SPLIT)),
    "qwen35": _split(_QWEN35_SPLIT),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _split(_GPT4O_SPLIT)),
    "tekken": _split(_TEKKEN_SPLIT),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
        _split(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK_SPLIT),
    ),
}
"""Pre-tokenizers by `tokenizer.ggml.pre`: the names that llama.cpp gives to these patterns."""
_COMPOSED = ("qwen2", "qwen35", "deepseek-r1-qwen")
"""Those that compose texts (NFC) first."""
_WHOLE_WORDS = (*_LLAMA3_NAMES, "tekken")
"""Those where a word that is a token needs no merges."""


def special_ids(header: GgufHeader) -> tuple[int, ...]:
    """Return the tokens that are never text: control and unknown tokens."""
    return tuple(i for i, kind in enumerate(header.numbers(_TYPES)) if kind in (_UNKNOWN, _CONTROL))


def _added(header: GgufHeader) -> list[dict[str, Any]]:
    """Return the tokens that are found in a text before it is split, as tokenizer.json has them."""
    tokens = header.strings("tokenizer.ggml.tokens")
    return [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for i, kind in enumerate(header.numbers(_TYPES)[: len(tokens)])
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _document(
    header: GgufHeader,
    *,
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
    merges: Sequence[Sequence[str]],
    falls_back: bool,
    unknown: str | None = None,
    ignores_merges: bool = False,
) -> dict[str, Any]:
    """Return a tokenizer.json of BPE. `falls_back`: characters without a token become bytes."""
    tokens = header.strings("tokenizer.ggml.tokens")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(header),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": falls_back,
            "byte_fallback": falls_back,
            "ignore_merges": ignores_merges,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def tokenizer_json(header: GgufHeader) -> str:
    """Return the tokenizer as JSON text. Raises ModelError for an unsupported or damaged one."""
    model = header.string("tokenizer.ggml.model")
    if model == "llama":
        return _sentencepiece_json(header)
    if model != "gpt2":
        raise ModelError(
            "unsupported",
            f"unsupported tokenizer: {model!r}; expected byte-level BPE ('gpt2') or SentencePiece"
            " ('llama'). Use the model's Hugging Face folder, which has a tokenizer.json",
        )
    family = header.string("tokenizer.ggml.pre") or "default"
    if family not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(
            "unsupported", f"unsupported pre-tokenizer: {family!r}; expected one of {known}"
        )
    _check_vocabulary(header)
    merges = [merge.split(" ") for merge in header.strings("tokenizer.ggml.merges")]
    if not all(len(merge) == 2 for merge in merges):
        raise ModelError("corrupt", "the tokenizer has a merge that is not a pair")
    return json.dumps(
        _document(
            header,
            normalizer={"type": "NFC"} if family in _COMPOSED else None,
            pre_tokenizer={"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[family]},
            decoder=_byte_level(use_regex=True),
            merges=merges,
            falls_back=False,
            ignores_merges=family in _WHOLE_WORDS,
        )
    )


def tokenizer_warnings(header: GgufHeader) -> tuple[str, ...]:
    """Return what is doubtful in the metadata, each in a sentence for operators."""
    found = []
    is_bpe = header.string("tokenizer.ggml.model") == "gpt2"
    if is_bpe and not header.string("tokenizer.ggml.pre"):
        found.append(
            "the file names no pre-tokenizer (tokenizer.ggml.pre), so texts are split as GPT-2's:"
            " a model trained otherwise answers worse; convert it again"
        )
    if not header.numbers(_TYPES):
        found.append(
            "the file has no token types (tokenizer.ggml.token_type), so that no token is special:"
            " a chat template's own tokens are read as text; convert it again"
        )
    return tuple(found)


def _check_vocabulary(header: GgufHeader) -> None:
    """Refuse a vocabulary that is cut short: it would tokenize, and wrongly. Raises ModelError."""
    tokens, kinds = header.strings("tokenizer.ggml.tokens"), header.numbers(_TYPES)
    if not tokens:
        raise ModelError("corrupt", "the tokenizer has no tokens")
    if kinds and len(kinds) != len(tokens):
        counts = f"{len(tokens)} tokens and {len(kinds)} types (token_type)"
        raise ModelError("corrupt", f"the tokenizer has {counts}; expected equal counts")
    if len(set(tokens)) != len(tokens):
        twice = next(token for token, count in Counter(tokens).items() if count > 1)
        raise ModelError("corrupt", f"the tokenizer has the token {twice[:80]!r} twice")


def _sentencepiece_json(header: GgufHeader) -> str:
    """Return the tokenizer as JSON text. Spaces are U+2581, and characters without a token are
    bytes. 1.5 s for 262,144 tokens."""
    tokens = header.strings("tokenizer.ggml.tokens")
    scores, kinds = header.numbers("tokenizer.ggml.scores"), header.numbers(_TYPES)
    if not tokens or not len(tokens) == len(scores) == len(kinds):
        raise ModelError(
            "corrupt",
            f"{len(tokens)} tokens, {len(scores)} scores, {len(kinds)} types; expected equal"
            " counts",
        )
    _check_vocabulary(header)
    has_prefix = header.metadata.get("tokenizer.ggml.add_space_prefix") is not False
    unknown = header.integer("tokenizer.ggml.unknown_token_id")
    is_known = unknown is not None and 0 <= unknown < len(tokens)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    return json.dumps(
        _document(
            header,
            normalizer={"type": "Sequence", "normalizers": [*prefix, spaces]},
            pre_tokenizer=None,
            decoder={
                "type": "Sequence",
                "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
            },
            merges=_merges_by_score(tokens, scores, kinds),
            falls_back=True,
            unknown=tokens[unknown] if unknown is not None and is_known else None,
        ),
        ensure_ascii=False,
    )


def _merges_by_score(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[float]
) -> list[tuple[str, str]]:
    """Return the merges that build the pieces, the best score first; of equal scores, the first
    token. Every cut of a piece into two pieces is a merge."""
    pieces = {token: i for i, token in enumerate(tokens) if kinds[i] in (_NORMAL, _USER_DEFINED)}
    order = sorted(pieces.values(), key=lambda i: (-scores[i], i))
    return [
        (token[:at], token[at:])
        for token in (tokens[i] for i in order)
        for at in range(1, len(token))
        if token[:at] in pieces and token[at:] in pieces
    ]
