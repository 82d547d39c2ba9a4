"""Tokens of text, piece by piece, with a cache of pieces.

Each piece is tokenized by itself, so that appending to a conversation never changes the tokens of
what came before: that is what makes prefixes stable, and it lets turn 50 of a long chat cost only
its new words.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

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
        self._with_specials = Tokenizer.from_str(text)
        settings = json.loads(text)
        special = set(special_ids)
        # The same vocabulary without any special token: what a user writes is text, whatever it
        # looks like.
        settings["added_tokens"] = [t for t in settings["added_tokens"] if t["id"] not in special]
        self._plain = Tokenizer.from_str(json.dumps(settings))
        self._special = frozenset(special)
        self._bytes = _token_bytes(self._with_specials, settings, self._special)
        self._cache: OrderedDict[tuple[str, bool], tuple[int, ...]] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()

    def encode(self, text: str, *, specials: bool) -> tuple[int, ...]:
        """Token ids of one piece. `specials`: special tokens' text means these tokens."""
        if not text:
            return ()
        key = (text, specials)
        with self._lock:
            ids = self._cache.get(key)
            if ids is not None:
                self._cache.move_to_end(key)
                return ids
        tokenizer = self._with_specials if specials else self._plain
        ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        size = _ENTRY_BYTES + 2 * len(text) + 8 * len(ids)
        if size < CACHE_BYTES_MAX // 8:
            with self._lock:
                self._cache[key] = ids
                self._cached_bytes += size
                while self._cached_bytes > CACHE_BYTES_MAX:
                    (old, _), old_ids = self._cache.popitem(last=False)
                    self._cached_bytes -= _ENTRY_BYTES + 2 * len(old) + 8 * len(old_ids)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none for special tokens and ids without a token."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def special_texts(self) -> dict[int, str]:
        """Special tokens as templates write them."""
        found = {i: self._with_specials.id_to_token(i) for i in self._special}
        return {i: text for i, text in found.items() if text}

    @property
    def vocab_size(self) -> int:
        """Ids with a token."""
        return len(self._bytes)


def _token_bytes(
    tokenizer: Tokenizer, settings: dict[str, object], special: frozenset[int]
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
