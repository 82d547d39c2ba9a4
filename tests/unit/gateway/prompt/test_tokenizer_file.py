"""A tokenizer.json read here is the one that the library reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.prompt.tokenizer_file import TokenizerFile
from tests.tables import each_row
from tests.tiny_tokenizer import tokenizer_document


def older_merges(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with merges as texts, which is the library's older format."""
    model = document["model"]
    return {**document, "model": {**model, "merges": [" ".join(one) for one in model["merges"]]}}


def bpe(**fields: Any) -> dict[str, Any]:
    """Return a small BPE with these fields, and with two added tokens outside of its vocabulary."""
    vocab = ["<unk>", "<0x65>", *"abcd", "ab", "cd", "bcd", "##ab", "abcd", "ab</w>"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    added = [
        {"id": len(vocab), "content": "<ab>", **flags, "lstrip": True, "special": True},
        {"id": len(vocab) + 1, "content": "<cd>", **flags, "normalized": True},
    ]
    model = {
        "type": "BPE",
        "vocab": {word: i for i, word in enumerate(vocab)},
        "merges": [["a", "b"], ["c", "d"], ["ab", "cd"]],
        **fields,
    }
    return {"version": "1.0", "added_tokens": added, "model": model}


DOCUMENTS = {
    "byte-level": tokenizer_document(),
    "older merges": older_merges(tokenizer_document()),
    "bare": bpe(),
    "unknown tokens": bpe(unk_token="<unk>"),
    "fused unknown tokens": bpe(unk_token="<unk>", fuse_unk=True),
    "byte fallback": bpe(unk_token="<unk>", byte_fallback=True),
    "whole words": bpe(ignore_merges=True),
    "end of word": bpe(end_of_word_suffix="</w>", merges=[["a", "b</w>"]][:0]),
    "dropout": bpe(dropout=0.0),
    "word pieces": {
        **bpe(),
        "model": {
            "type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": bpe()["model"]["vocab"],
        },
    },
}  # fmt: skip
READ = {
    name: (TokenizerFile(text.encode()), Tokenizer.from_str(text))
    for name, text in ((name, json.dumps(document)) for name, document in DOCUMENTS.items())
}
TEXT = st.lists(st.sampled_from([*"abcde ", "bcd", "<ab>", "<cd>"]), max_size=8).map("".join)


@pytest.mark.parametrize("name", DOCUMENTS)
@given(TEXT)
def test_texts_have_the_tokens_of_the_library(name: str, text: str) -> None:
    file, library = READ[name]
    ids = [one.encode(text, add_special_tokens=False).ids for one in (file.whole, library)]

    assert ids[0] == ids[1]


@each_row("name", DOCUMENTS)
def test_the_vocabulary_is_that_of_the_library(name: str) -> None:
    """Added tokens have the ids by which they are found in a text."""
    file, library = READ[name]

    assert file.vocab == library.get_vocab(with_added_tokens=True)
    assert [*file.added] == [*library.get_added_tokens_decoder()]


@pytest.mark.parametrize("name", ["byte-level", "word pieces"])
def test_what_a_training_left_in_the_file_changes_no_text(name: str) -> None:
    """Truncation to the length of its examples would drop the rest of a client's text."""
    length = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<unk>",
    }  # fmt: skip
    left = {**DOCUMENTS[name], "truncation": length, "padding": padding}
    file, text = TokenizerFile(json.dumps(left).encode()), "abababab"
    plain = file.tokenizer(file.rules, frozenset(file.added))
    found = [one.encode(text, add_special_tokens=False).ids for one in (file.whole, plain)]

    expected = READ[name][1].encode(text, add_special_tokens=False).ids
    assert len(expected) > 2
    assert found == [expected, expected]
