"""Tokens of texts to embed: WordPiece, cut to the model's limit, between [CLS] and [SEP].

A text that is much too long is tokenized only as far as its first tokens need. Thread-safe. It
knows no tenant and no cache.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from msgspec import Struct
from tokenizers import Tokenizer

from engine.encoder.card import EncoderCard
from engine.encoder.protocol import pack_ids

PARTS_CHARS = (8_192, 32_768, 131_072, 524_288)
"""A longer text is tokenized in growing parts from its beginning, until the limit is passed. The
library takes 60 to 120 bytes for each character of a part."""


class SparseTextError(ValueError):
    """A text is longer than the last of `PARTS_CHARS`, and the model's limit is not reached there:
    it is all spaces, or one word."""


class TokenizedText(Struct, frozen=True):
    """A text as the encoder takes it."""

    data: bytes
    """Its packed ids with the two around them."""
    tokens: int
    is_whole: bool
    """Nothing was cut off."""


class TextTokenizer:
    """The tokenizer of one encoder."""

    def __init__(self, card: EncoderCard) -> None:
        # A batch of one text gains nothing from the library's own threads, and waits for them.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._tokenizer = Tokenizer.from_file(str(card.tokenizer_path))
        self._first, self._last = card.first_token_id, card.last_token_id
        self._room = card.tokens_max - 2
        self._word_tokens_max: int = self._tokenizer.model.max_input_chars_per_word
        self.vocab_size = card.shape.vocab_size

    def tokenize(self, text: str) -> TokenizedText:
        """Return the tokens of a text. About 2 us each; other threads run meanwhile.

        Raises SparseTextError.
        """
        found: list[int] = []
        for end in PARTS_CHARS:
            if len(text) <= end:
                return self._around(self._ids(text))
            # Words are tokenized apart, so the cut changes the tokens of the last word alone.
            found = self._ids(text[:end])
            if len(found) > self._room + self._word_tokens_max:
                return self._around(found)
        raise SparseTextError(f"{len(found)} tokens in {PARTS_CHARS[-1]} characters")

    def wrap(self, token_ids: Sequence[int]) -> TokenizedText:
        """Return a client's token ids as a text; the two around it may be there already.

        Raises ValueError with the first id outside the vocabulary.
        """
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(token_id)
        ends = token_ids[:1], token_ids[-1:]
        has_ends = len(token_ids) > 1 and [*ends[0], *ends[1]] == [self._first, self._last]
        return self._around(token_ids[1:-1] if has_ends else token_ids)

    def _ids(self, text: str) -> list[int]:
        found = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = found[0].ids
        return ids

    def _around(self, token_ids: Sequence[int]) -> TokenizedText:
        ids = [self._first, *token_ids[: self._room], self._last]
        return TokenizedText(pack_ids(ids), len(ids), len(token_ids) <= self._room)
