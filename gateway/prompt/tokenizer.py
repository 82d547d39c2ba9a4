"""Tokenize text piece by piece, with a cache of pieces.

Each piece is tokenized on its own, so appending to a conversation never changes the tokens of the
earlier messages. This keeps prefixes stable and makes turn 50 of a long chat cost only its new
words. The module knows no templates and no messages; `gateway.prompt.renderer` calls it.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

CACHE_BYTES_MAX = 64 * 2**20
"""Maximum size of the cache of pieces, in bytes (estimated)."""
_ENTRY_BYTES = 200
"""Overhead of a cache entry beside its text and tokens, in bytes."""

_PRINTABLE_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's byte-level alphabet: the byte that each character stands for."""
    alphabet = {chr(b): b for b in _PRINTABLE_BYTES}
    rest = [b for b in range(256) if b not in _PRINTABLE_BYTES]
    alphabet.update({chr(256 + i): b for i, b in enumerate(rest)})
    return alphabet


class PieceTokenizer:
    """The model's tokenizer with a cache of pieces. Thread-safe."""

    def __init__(self, path: Path, special_ids: Iterable[int]) -> None:
        text = path.read_text()
        self._tokenizer = Tokenizer.from_str(text)
        settings = json.loads(text)
        self._special = frozenset(special_ids)
        self._bytes = _token_bytes(self._tokenizer, settings, self._special)
        # `plain` has the same vocabulary without special tokens: client text is text, whatever it
        # spells. `_has_prefix`: some tokenizers put a space before a text; a piece in the middle
        # of a prompt must not get one, so both variants exist with and without it.
        inner = _without_prefix(settings)
        self._has_prefix = inner != settings
        plain = _tokenizer(_without_tokens(settings, self._special))
        self._by_use = {(True, True): self._tokenizer, (False, True): plain}
        if self._has_prefix:
            self._by_use[True, False] = _tokenizer(inner)
            self._by_use[False, False] = _tokenizer(_without_tokens(inner, self._special))
        else:
            self._by_use[True, False] = self._tokenizer
            self._by_use[False, False] = plain
        words = sorted(filter(None, self.special_texts().values()), key=len, reverse=True)
        self._special_words = re.compile("|".join(map(re.escape, words))) if words else None
        self._cache: OrderedDict[tuple[str, bool, bool], tuple[int, ...]] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()

    def encode(self, text: str, *, specials: bool, is_first: bool = True) -> tuple[int, ...]:
        """Return the token ids of one piece. About 5 us per token; a cached piece is free.

        `specials`: the text of a special token becomes that token. `is_first`: the piece begins the
        prompt.
        """
        if not text:
            return ()
        key = (text, specials, is_first or not self._has_prefix)
        with self._lock:
            ids = self._cache.get(key)
            if ids is not None:
                self._cache.move_to_end(key)
                return ids
        ids = tuple(self._encode(*key))
        size = _ENTRY_BYTES + 2 * len(text) + 8 * len(ids)
        if size < CACHE_BYTES_MAX // 8:
            self._keep(key, ids, size)
        return ids

    def is_cached(self, text: str, *, specials: bool) -> bool:
        """Whether the piece is cached as a piece that does not begin the prompt."""
        return (text, specials, not self._has_prefix) in self._cache

    def _encode(self, text: str, specials: bool, is_first: bool) -> list[int]:
        tokenizer = self._by_use[specials, is_first]
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        if specials or self._special.isdisjoint(ids):
            return ids
        # Some vocabularies also hold the text of special tokens as ordinary tokens. Splitting each
        # such word after its first character prevents a match.
        assert self._special_words is not None, "a special token without a text"
        ids, start = [], 0
        for match in self._special_words.finditer(text):
            for end in (match.start() + 1, match.end()):
                piece, is_first = text[start:end], is_first and start == 0
                ids += self._by_use[False, is_first].encode(piece, add_special_tokens=False).ids
                start = end
        ids += self._by_use[False, False].encode(text[start:], add_special_tokens=False).ids
        return [token_id for token_id in ids if token_id not in self._special]

    def _keep(self, key: tuple[str, bool, bool], ids: tuple[int, ...], size: int) -> None:
        with self._lock:
            if key in self._cache:
                return  # another thread inserted it first
            self._cache[key] = ids
            self._cached_bytes += size
            while self._cached_bytes > CACHE_BYTES_MAX:
                (old, *_), old_ids = self._cache.popitem(last=False)
                self._cached_bytes -= _ENTRY_BYTES + 2 * len(old) + 8 * len(old_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; b"" for special tokens and ids without a token."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def special_texts(self) -> dict[int, str]:
        """Return the text of each special token by id, as templates write it."""
        found = {i: self._tokenizer.id_to_token(i) for i in self._special}
        return {i: text for i, text in found.items() if text}

    @property
    def cached_bytes(self) -> int:
        """Approximate size of the cache of pieces, in bytes."""
        return self._cached_bytes

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special tokens included."""
        return len(self._bytes)


def _tokenizer(settings: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(settings))


def _without_tokens(settings: dict[str, Any], special: frozenset[int]) -> dict[str, Any]:
    kept = [token for token in settings["added_tokens"] if token["id"] not in special]
    return {**settings, "added_tokens": kept}


def _without_prefix(part: Any) -> Any:
    """Return the tokenizer settings without the rule that puts a space before a text."""
    if isinstance(part, list):
        kept = (_without_prefix(item) for item in part)
        return [item for item in kept if item is not None]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return None
    found = {name: _without_prefix(value) for name, value in part.items() if name != "model"}
    if "model" in part:
        found["model"] = part["model"]
    if "prepend_scheme" in found:
        found["prepend_scheme"] = "never"
    if found.get("add_prefix_space") is True:
        found["add_prefix_space"] = False
    return found


def _token_bytes(
    tokenizer: Tokenizer, settings: dict[str, Any], special: frozenset[int]
) -> list[bytes]:
    decoder = json.dumps(settings.get("decoder"))
    is_byte_level = '"ByteLevel"' in decoder
    alphabet = _byte_alphabet()
    added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    found = [b""] * (max(vocab.values(), default=-1) + 1)
    for text, token_id in vocab.items():
        if token_id in special:
            continue
        if token_id in added:
            found[token_id] = text.encode()
        elif is_byte_level:
            found[token_id] = bytes(alphabet[char] for char in text if char in alphabet)
        elif len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            found[token_id] = bytes([int(text[3:5], 16)])
        else:
            found[token_id] = text.replace("\u2581", " ").encode()
    return found
