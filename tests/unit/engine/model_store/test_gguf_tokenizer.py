"""The tokenizer built from a GGUF file: texts round-trip, and the ids equal the reference's."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.errors import ModelError
from engine.model_store.gguf_header import GgufHeader, read_header
from engine.model_store.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_json
from tests.models import MERGES, SPECIALS, TOKENS, tokenizer_document, write_gguf


def header_of(**changes: object) -> GgufHeader:
    """Return a tiny model's tokenizer metadata with changes; None removes a key."""
    metadata: dict[str, object] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "merges": MERGES,
        "token_type": [3 if token in SPECIALS else 1 for token in TOKENS],
        **changes,
    }
    named = {f"tokenizer.ggml.{k}": v for k, v in metadata.items() if v is not None}
    return GgufHeader(named, (), 0)  # type: ignore[arg-type]


def build(**changes: object) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json(header_of(**changes)))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf")
    return Tokenizer.from_str(tokenizer_json(read_header(path)))


@given(text=st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_text_round_trips(text: str, tiny: Tokenizer) -> None:
    """Byte-level BPE has no unknown characters and loses none."""
    ids = tiny.encode(text, add_special_tokens=False).ids

    assert tiny.decode(ids, skip_special_tokens=False) == text


@given(text=st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_tokenizer_equals_folder_tokenizer(text: str, tiny: Tokenizer) -> None:
    """The GGUF file and the tokenizer.json of one model give equal ids."""
    expected = Tokenizer.from_str(json.dumps(tokenizer_document()))

    assert tiny.encode(text).ids == expected.encode(text).ids


def test_special_token_in_text_is_one_token(tiny: Tokenizer) -> None:
    """Templates write special tokens into text; the text around is encoded on its own."""
    ids = tiny.encode("the<|im_end|>the", add_special_tokens=False).ids

    assert ids == [TOKENS.index("the"), TOKENS.index("<|im_end|>"), TOKENS.index("the")]


@pytest.mark.parametrize("family", sorted(PRE_TOKENIZERS))
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


@pytest.mark.parametrize(("family", "pieces"), NUMBERS.items())
def test_pre_tokenizers_split_numbers_differently(family: str, pieces: list[str]) -> None:
    """This difference changes arithmetic, and every id behind the number."""
    tokenizer = build(pre=family)

    cut = tokenizer.pre_tokenizer.pre_tokenize_str("12345")

    assert [piece for piece, _ in cut] == pieces


REFUSED: dict[str, tuple[dict[str, object], str, str]] = {
    "another kind": ({"model": "llama"}, "unsupported", "llama"),
    "no kind": ({"model": None}, "unsupported", "None"),
    "another family": ({"pre": "klingon"}, "unsupported", "klingon"),
    "no tokens": ({"tokens": []}, "corrupt", "no tokens"),
    "tokens that are numbers": ({"tokens": [1, 2]}, "corrupt", "tokens"),
    "a merge of one": ({"merges": ["a"]}, "corrupt", "pair"),
    "types that are no list": ({"token_type": 3}, "corrupt", "token_type"),
}


@pytest.mark.parametrize(("changes", "code", "word"), REFUSED.values(), ids=REFUSED.keys())
def test_unsupported_tokenizer_is_refused(changes: dict[str, object], code: str, word: str) -> None:
    """With a wrong tokenizer the model would output fluent nonsense."""
    with pytest.raises(ModelError, match=word) as caught:
        tokenizer_json(header_of(**changes))

    assert caught.value.code == code


def test_reference_reader_reads_fixture_file(tmp_path: Path) -> None:
    """The test fixture is a valid GGUF file."""
    path = write_gguf(tmp_path / "m.gguf")

    fields = gguf.GGUFReader(path).fields

    assert fields["tokenizer.ggml.model"].contents() == "gpt2"
