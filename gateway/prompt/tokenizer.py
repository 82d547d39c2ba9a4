"""Tokenize text piece by piece, with a cache of pieces.

Each piece is tokenized on its own, so appending to a conversation never changes the tokens of the
earlier messages. This keeps prefixes stable and makes turn 50 of a long chat cost only its new
words. The time of a piece tells nothing about other owners: each finds only its own pieces, and the
library's own cache of words is filled at the start. The module knows no templates and no messages;
`gateway.prompt.renderer` calls it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from gateway.owner_cache import OwnerCache
from gateway.prompt.token_budget import TokenBudget
from gateway.prompt.tokenizer_file import TokenizerFile

CACHE_BYTES_MAX = 64 * 2**20
"""Maximum size of the cache of pieces, in bytes (estimated)."""
CUT_CHARS = 16_384
"""A longer text is cut before it is tokenized where no token can lie across the cut, so that the
work can stop in between."""
LIBRARY_CACHE_WORDS = 10_000
"""Number of words that the library caches; a full cache never changes."""
_ENTRY_BYTES = 200
"""Overhead of a cache entry beside its text and tokens, in bytes."""

_CUT = re.compile("[A-Za-z] [A-Za-z]")
"""Where a text may be cut: before the space, if no token holds a letter and the space after it."""
_WORD = re.compile(b" [A-Za-z]{2,20}")
_CUT_PROBES = ("the cat", "a B", "Ab cD efg", "don't stop", "hello  big  world so on", "1a b2 c")

_LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_DIGITS, _SPACES = frozenset(b"0123456789"), frozenset(b" \t\r\n")
_BYTE_CLASSES = (
    *(_LETTERS, _DIGITS, _SPACES, frozenset(range(128)) - _LETTERS - _DIGITS - _SPACES),
    frozenset(range(128, 256)),
)
"""Classes of bytes whose longest runs in one token bound the tokens of a text."""

_PRINTABLE_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]


def _byte_alphabet() -> dict[int, int | None]:
    """Return GPT-2's byte-level alphabet: the byte of each character, None for other characters
    below 256."""
    rest = [b for b in range(256) if b not in _PRINTABLE_BYTES]
    others: dict[int, int | None] = dict.fromkeys(rest)
    return others | {b: b for b in _PRINTABLE_BYTES} | {256 + i: b for i, b in enumerate(rest)}


_BYTE_ALPHABET = _byte_alphabet()


class PieceTokenizer:
    """The model's tokenizer with a cache of pieces. Thread-safe."""

    def __init__(self, path: Path, special_ids: Iterable[int]) -> None:
        # A batch of one text gains nothing from the library's own threads, and waits for them.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        file = TokenizerFile(path.read_bytes())
        self._tokenizer, settings = file.whole, file.rules
        self._special = frozenset(special_ids)
        self._bytes = _token_bytes(file, self._special)
        # `plain` has the same vocabulary without special tokens: client text that spells one is
        # text. `_has_prefix`: some tokenizers put a space before a text; a piece in the middle
        # of a prompt must not get one, so both variants exist with and without it.
        inner = _without_prefix(settings)
        self._has_prefix = inner != settings
        plain = file.tokenizer(settings, self._special)
        self._by_use = {(True, True): self._tokenizer, (False, True): plain}
        if self._has_prefix:
            self._by_use[True, False] = file.tokenizer(inner)
            self._by_use[False, False] = file.tokenizer(inner, self._special)
        else:
            self._by_use[True, False] = self._tokenizer
            self._by_use[False, False] = plain
        words = sorted(filter(None, self.special_texts().values()), key=len, reverse=True)
        self.special_words = re.compile("|".join(map(re.escape, words)) or "(?!)")
        self._cache: OwnerCache[tuple[str, bool, bool], tuple[int, ...]] = OwnerCache(
            CACHE_BYTES_MAX
        )
        spelt = [*self._bytes, *(text.encode() for text in self.special_texts().values())]
        self._run_max = _longest_runs(spelt, settings)
        self._can_cut = self._tokens_end_at_cuts()
        for each in {id(one): one for one in self._by_use.values()}.values():
            _fill_word_cache(each, self._bytes)

    def encode(
        self,
        text: str,
        *,
        specials: bool,
        is_first: bool = True,
        owner: int = 0,
        budget: TokenBudget | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of one piece. About 5 us per token; a cached piece is free. Other
        threads run meanwhile.

        `specials`: the text of a special token becomes that token. `is_first`: the piece begins the
        prompt. `owner`: whose cached pieces may be found. `budget`: the tokens are taken from it;
        raises what it raises, before a long text is tokenized as a whole.
        """
        if not text:
            return ()
        key = (text, specials, is_first or not self._has_prefix)
        ids = self._cache.get(owner, key)
        if ids is None:
            if budget is not None and len(text) > CUT_CHARS:
                budget.require(self.least_tokens(text))
            ids = tuple(self._encode(*key, budget))
            self._cache.put(owner, key, ids, _ENTRY_BYTES + 2 * len(text) + 8 * len(ids))
        elif budget is not None:
            budget.spend(len(ids))
        return ids

    def is_cached(self, text: str, *, specials: bool, owner: int = 0) -> bool:
        """Whether the owner's piece is cached as a piece that does not begin the prompt."""
        return self._cache.get(owner, (text, specials, not self._has_prefix)) is not None

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of a text. O(bytes), about 5 ns each.

        No token holds more letters, say, than the token with the most letters.
        """
        data = text.encode(errors="surrogatepass")
        return max(
            (-(-len(data.translate(None, others)) // run_max) for others, run_max in self._run_max),
            default=0,
        )

    def _encode(
        self, text: str, specials: bool, is_first: bool, budget: TokenBudget | None
    ) -> list[int]:
        """Tokenize a text, cut into parts if it is long: the ids are those of the whole text."""
        if budget is None and len(text) <= CUT_CHARS:
            return self._encode_part(text, specials, is_first)
        ids: list[int] = []
        for part in self._parts(text):
            found = self._encode_part(part, specials, is_first)
            if budget is not None:
                budget.spend(len(found))
            ids += found
            is_first = not self._has_prefix
        return ids

    def _parts(self, text: str) -> Iterator[str]:
        start = at = 0
        while self._can_cut and at + CUT_CHARS < len(text):
            found = _CUT.search(text, at + CUT_CHARS - 1, at + 2 * CUT_CHARS)
            at += CUT_CHARS
            if found is not None:
                at = found.start() + 1
                yield text[start:at]
                start = at
        yield text[start:]

    def _tokens_end_at_cuts(self) -> bool:
        """Return whether every text can be cut at `_CUT` without a change of its tokens.

        It can if no token holds a letter and the space after it, no added token takes the space
        beside it, and the model's rules for spaces treat a part in the middle like one.
        """
        if re.search(b"[A-Za-z] ", b"\0".join(self._bytes)):
            return False
        added: dict[int, AddedToken] = self._tokenizer.get_added_tokens_decoder()
        for token in added.values():
            text = token.content
            if " " in text or (token.lstrip and text[:1].isalpha()):
                return False
            if token.rstrip and text[-1:].isalpha():
                return False
        return all(self._is_cut_rightly(probe) for probe in _CUT_PROBES)

    def _is_cut_rightly(self, probe: str) -> bool:
        found = _CUT.search(probe)
        assert found is not None, "each probe has a cut"
        at, later = found.start() + 1, not self._has_prefix
        return all(
            self._encode_part(probe, specials, is_first)
            == self._encode_part(probe[:at], specials, is_first)
            + self._encode_part(probe[at:], specials, later)
            for specials, is_first in self._by_use
        )

    def _encode_part(self, text: str, specials: bool, is_first: bool) -> list[int]:
        tokenizer = self._by_use[specials, is_first]
        ids = _ids(tokenizer, text)
        if specials or self._special.isdisjoint(ids):
            return ids
        # Some vocabularies also hold the text of special tokens as ordinary tokens. Splitting each
        # such word after its first character prevents a match.
        ids, start = [], 0
        for match in self.special_words.finditer(text):
            for end in (match.start() + 1, match.end()):
                piece, is_first = text[start:end], is_first and start == 0
                ids += _ids(self._by_use[False, is_first], piece)
                start = end
        ids += _ids(self._by_use[False, False], text[start:])
        return [token_id for token_id in ids if token_id not in self._special]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, with that of special tokens, as the tokenizer's file tells
        it; ids without a token have none. About 0.3 us per token; other threads run meanwhile."""
        texts: list[str] = self._tokenizer.decode_batch([token_ids], skip_special_tokens=False)
        return texts[0]

    def token_strings(self, token_ids: Iterable[int]) -> list[str]:
        """Return each token as the vocabulary spells it; "" for ids without a token."""
        return [self._tokenizer.id_to_token(one) or "" for one in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; b"" for special tokens and ids without a token."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def spell(self, vocab_size: int) -> list[bytes]:
        """Return the bytes of each token below `vocab_size`, as `token_bytes` does."""
        return (self._bytes + [b""] * (vocab_size - len(self._bytes)))[:vocab_size]

    def special_texts(self) -> dict[int, str]:
        """Return the text of each special token by id, as templates write it."""
        found = {i: self._tokenizer.id_to_token(i) for i in self._special}
        return {i: text for i, text in found.items() if text}

    @property
    def cached_bytes(self) -> int:
        """Approximate size of the cache of pieces, in bytes."""
        return self._cache.size

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special tokens included."""
        return len(self._bytes)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenize one text. A batch lets other threads run meanwhile, a single text does not."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _fill_word_cache(tokenizer: Tokenizer, spelt: Sequence[bytes]) -> None:
    """Fill the library's cache of words, which all callers share and a full cache keeps as it is:
    otherwise a word would take less time for the second client that sends it. About 20 ms.

    The vocabulary's first words are the most frequent ones; made-up words take the rest.
    """
    common = (text.decode() for text in spelt if _WORD.fullmatch(text))
    words = [*islice(common, LIBRARY_CACHE_WORDS // 2)]
    words += map("".join, islice(product(" ", *["etaoinshrdlu"] * 5), LIBRARY_CACHE_WORDS))
    splitter = tokenizer.pre_tokenizer
    is_split = splitter is not None and len(splitter.pre_tokenize_str("a b")) > 1
    for at in range(0, len(words), 100):
        texts = words[at : at + 100]
        tokenizer.encode_batch_fast(["".join(texts)] if is_split else texts)


def _longest_runs(spelt: list[bytes], settings: dict[str, Any]) -> list[tuple[bytes, int]]:
    """Return (all other bytes, the most bytes of the class in one token) for each class of bytes.

    Empty for tokenizers that may change a text before they split it.
    """
    if settings.get("normalizer") is not None or not _is_byte_level(settings):
        return []
    longest_first = sorted(spelt, key=len, reverse=True)
    found = []
    for members in _BYTE_CLASSES:
        others, run_max = bytes(set(range(256)) - members), 0
        for one in longest_first:
            if len(one) <= run_max:
                break
            run_max = max(run_max, len(one.translate(None, others)))
        if run_max:
            found.append((others, run_max))
    return found


def _is_byte_level(settings: dict[str, Any]) -> bool:
    return '"ByteLevel"' in json.dumps(settings.get("decoder"))


def _without_prefix(part: Any) -> Any:
    """Return the tokenizer settings without the rule that puts a space before a text."""
    if isinstance(part, list):
        kept = (_without_prefix(item) for item in part)
        return [item for item in kept if item is not None]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return None
    found = {name: _without_prefix(value) for name, value in part.items()}
    if "prepend_scheme" in found:
        found["prepend_scheme"] = "never"
    if found.get("add_prefix_space") is True:
        found["add_prefix_space"] = False
    return found


def _token_bytes(file: TokenizerFile, special: frozenset[int]) -> list[bytes]:
    found = [b""] * (max(file.vocab.values(), default=-1) + 1)
    is_byte_level = _is_byte_level(file.rules)
    for text, token_id in file.vocab.items():
        if token_id in special:
            continue
        if token_id in file.added:
            found[token_id] = text.encode()
        elif is_byte_level:
            found[token_id] = text.translate(_BYTE_ALPHABET).encode("latin-1", "ignore")
        elif len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            found[token_id] = bytes([int(text[3:5], 16)])
        else:
            found[token_id] = text.replace("\u2581", " ").encode()
    return found
