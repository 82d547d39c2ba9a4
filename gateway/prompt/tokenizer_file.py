"""A model's tokenizer.json, read once: its rules, its vocabulary and its added tokens.

The tokenizers made of it share the vocabulary, which takes a second and 100 MB for 262,144 tokens.
The library reads one in twice the time that decoding it here takes, so that BPE, which nearly all
models have, is decoded here, and all else is left to the library. `tokenizer` makes what it needs.
"""

from __future__ import annotations

import json
from secrets import token_hex
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

Rules = dict[str, Any]
"""The fields of a tokenizer.json beside its vocabulary and its added tokens."""

_NO_WORDS = {"type": "BPE", "vocab": {}, "merges": []}
"""A model that rules are read with."""


class _AddedToken(msgspec.Struct):
    """One of the added tokens; its id follows from its place."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True


class _RulesFile(msgspec.Struct):
    """The rules of a tokenizer.json."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


class _BpeModel(msgspec.Struct, tag_field="type", tag="BPE", forbid_unknown_fields=True):
    """The model of a tokenizer.json, in the library's present format."""

    vocab: dict[str, int]
    merges: list[tuple[str, str]]
    dropout: None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False


class _BpeFile(msgspec.Struct):
    """A tokenizer.json of a BPE model."""

    model: _BpeModel
    added_tokens: list[_AddedToken] = []


class TokenizerFile:
    """A tokenizer.json without its truncation and padding, which a training leaves there: they
    would cut clients' texts short, or lengthen them, and say nothing.

    `rules`: of the file. `whole`: its tokenizer. `added`: its added tokens by id. `vocab`: the id
    of each token, added ones included.
    """

    def __init__(self, data: bytes) -> None:
        """Raises what the library raises for a file that it cannot read."""
        self.rules: Rules = msgspec.structs.asdict(msgspec.json.decode(data, type=_RulesFile))
        try:
            file = msgspec.json.decode(data, type=_BpeFile)
        except msgspec.ValidationError:  # another model, or an older format
            self.whole = Tokenizer.from_buffer(data)
            self.whole.no_truncation()
            self.whole.no_padding()
            self._words: dict[str, int] = self.whole.get_vocab(with_added_tokens=False)
        else:
            self._words = file.model.vocab
            tokens = [AddedToken(**msgspec.structs.asdict(one)) for one in file.added_tokens]
            self.whole = _tokenizer(_bpe(file.model), self.rules, tokens)
        self.added: dict[int, AddedToken] = self.whole.get_added_tokens_decoder()
        self.vocab = {**self._words, **{one.content: i for i, one in self.added.items()}}

    def tokenizer(self, rules: Rules, left_out: frozenset[int] = frozenset()) -> Tokenizer:
        """Return a tokenizer with other rules, of whose added tokens some are left out."""
        tokens = []
        for token_id, token in sorted(self.added.items()):
            if token_id not in left_out:
                tokens.append(token)
            elif token.content not in self._words:
                # The library numbers tokens outside of the vocabulary in their order: a text that
                # no client can guess keeps its place, or the next one would get its id.
                tokens.append(AddedToken(f"\0{token_hex(16)}", normalized=False))
        return _tokenizer(self.whole.model, rules, tokens)


def _bpe(model: _BpeModel) -> BPE:
    fields = {name: value for name, value in msgspec.structs.asdict(model).items() if value}
    return BPE(**{"vocab": {}, "merges": [], **fields})


def _tokenizer(model: Any, rules: Rules, tokens: list[AddedToken]) -> Tokenizer:
    """Return a tokenizer of a shared model."""
    read = Tokenizer.from_str(json.dumps({**rules, "model": _NO_WORDS, "added_tokens": []}))
    made = Tokenizer(model)
    made.normalizer, made.pre_tokenizer = read.normalizer, read.pre_tokenizer
    made.post_processor, made.decoder = read.post_processor, read.decoder
    made.add_tokens(tokens)
    return made
