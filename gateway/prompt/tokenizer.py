"""Tokens of text, piece by piece, with a cache of pieces.

Each piece is tokenized by itself, so that appending to a conversation never changes the tokens of
what came before: that is what makes prefixes stable, and it lets turn 50 of a long chat cost only
its new words.
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
_ENTRY_BYTES = 200
"""What an entry costs beside its text and tokens."""

_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]


def _byte_signs() -> dict[str, int]:
    """GPT-2's alphabet: the sign that stands for each byte in byte-level vocabularies."""
    signs = {chr(b): b for b in _BYTES}
    rest = [b for b in range(256) if b not in _BYTES]
    signs.update({chr(256 + i): b for i, b in enumerate(rest)})
    return signs


class PieceTokenizer:
    """The model's tokenizer. Thread-safe."""

    def __init__(self, path: Path, special_ids: Iterable[int]) -> None:
        text = path.read_text()
        self._whole = Tokenizer.from_str(text)
        settings = json.loads(text)
        self._special = frozenset(special_ids)
        self._bytes = _token_bytes(self._whole, settings, self._special)
        # The same vocabulary without any special token: what a user writes is text, whatever it
        # looks like. And each of the two without the space that some put before a text: a piece
        # in the middle has none.
        inner = _without_prefix(settings)
        self._has_prefix = inner != settings
        plain = _tokenizer(_without_tokens(settings, self._special))
        self._by_use = {(True, True): self._whole, (False, True): plain}
        if self._has_prefix:
            self._by_use[True, False] = _tokenizer(inner)
            self._by_use[False, False] = _tokenizer(_without_tokens(inner, self._special))
        else:
            self._by_use[True, False] = self._whole
            self._by_use[False, False] = plain
        words = sorted(filter(None, self.special_texts().values()), key=len, reverse=True)
        self._special_words = re.compile("|".join(map(re.escape, words))) if words else None
        self._cache: OrderedDict[tuple[str, bool, bool], tuple[int, ...]] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()

    def encode(self, text: str, *, specials: bool, is_first: bool = True) -> tuple[int, ...]:
        """Token ids of one piece. About 5 us a token; what was encoded lately, nothing.

        `specials`: special tokens' text means these tokens. `is_first`: nothing stands before it.
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

    def knows(self, text: str, *, specials: bool) -> bool:
        """Has it been encoded lately, with something before it where that matters?"""
        return (text, specials, not self._has_prefix) in self._cache

    def _encode(self, text: str, specials: bool, is_first: bool) -> list[int]:
        tokenizer = self._by_use[specials, is_first]
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        if specials or self._special.isdisjoint(ids):
            return ids
        # Some vocabularies hold the words of special tokens as ordinary ones, too. Cut in two, no
        # such word is left.
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
                return  # another thread was faster
            self._cache[key] = ids
            self._cached_bytes += size
            while self._cached_bytes > CACHE_BYTES_MAX:
                (old, *_), old_ids = self._cache.popitem(last=False)
                self._cached_bytes -= _ENTRY_BYTES + 2 * len(old) + 8 * len(old_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none for special tokens and ids without a token."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def special_texts(self) -> dict[int, str]:
        """Special tokens as templates write them."""
        found = {i: self._whole.id_to_token(i) for i in self._special}
        return {i: text for i, text in found.items() if text}

    @property
    def cached_bytes(self) -> int:
        """What the cache of pieces holds, about."""
        return self._cached_bytes

    @property
    def vocab_size(self) -> int:
        """Ids with a token."""
        return len(self._bytes)


def _tokenizer(settings: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(settings))


def _without_tokens(settings: dict[str, Any], special: frozenset[int]) -> dict[str, Any]:
    kept = [token for token in settings["added_tokens"] if token["id"] not in special]
    return {**settings, "added_tokens": kept}


def _without_prefix(part: Any) -> Any:
    """Tokenizer settings that put no space before a text."""
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
    signs = _byte_signs()
    added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    found = [b""] * (max(vocab.values(), default=-1) + 1)
    for text, token_id in vocab.items():
        if token_id in special:
            continue
        if token_id in added:
            found[token_id] = text.encode()
        elif is_byte_level:
            found[token_id] = bytes(signs[sign] for sign in text if sign in signs)
        elif len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            found[token_id] = bytes([int(text[3:5], 16)])
        else:
            found[token_id] = text.replace("\u2581", " ").encode()
    return found
