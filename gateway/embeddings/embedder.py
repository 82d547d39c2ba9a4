"""Vectors of texts, from the cache of the tenant's workspace or from the encoder.

    token ids ── look up ── found ─────────────▶ vectors ── charged ── stored
                         └─ missing ── encoder ─┘

A text is found again by its tokens, which are compared and not only hashed, and only in the
workspace of the tenant that had it encoded. A full cache takes room from the tenant that holds the
most. An erasure empties it; what was looked up before is not stored afterwards. It knows no HTTP
and no price. `generation.embedding` embeds, `background.erasure` erases. It belongs to one event
loop.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from engine.encoder.card import EncoderCard
from gateway.config import EmbeddingsConfig
from gateway.embeddings.encoder_client import TextEncoder
from gateway.embeddings.text_tokenizer import TextTokenizer, TokenizedText
from gateway.owner_cache import OwnerCache

ENTRY_BYTES = 250
"""Overhead of a cache entry beside its tokens and its vector, in bytes."""

CacheKey = tuple[str, bytes]
"""A workspace, and the packed tokens of a text."""


@dataclass(slots=True)
class TextLookup:
    """The texts of one request and what the cache has of them."""

    tenant_id: int
    workspace: str
    vectors: list[bytes | None]
    """By text, None for a missing one."""
    missing: dict[bytes, list[int]]
    """The places of each text to encode, once for texts that occur several times."""
    tokens: int
    cached_tokens: int
    """Tokens of found texts, and of repeated ones."""
    erasures: int


class Embedder:
    """One embedding model of a gateway, with its tokenizer, cache and encoder."""

    def __init__(self, card: EncoderCard, settings: EmbeddingsConfig, encoder: TextEncoder) -> None:
        """Reads the tokenizer: blocks. `encoder`: closed with this object."""
        self.card = card
        self.settings = settings
        self.encoder = encoder
        self.tokenizer = TextTokenizer(card)
        self._cache: OwnerCache[CacheKey, bytes] = OwnerCache(settings.cache_mib * 2**20)
        self._erasures = 0

    @property
    def name(self) -> str:
        """Name of the model, which ledger entries and rate cards have."""
        return self.card.name

    @property
    def names(self) -> tuple[str, ...]:
        """Names under which clients may address the model."""
        return tuple(dict.fromkeys((self.card.name, *self.settings.aliases)))

    @property
    def cached_bytes(self) -> int:
        """Approximate size of the cache, in bytes."""
        return self._cache.size

    def look_up(self, tenant_id: int, workspace: str, texts: Sequence[TokenizedText]) -> TextLookup:
        """Find the vectors of texts. O(texts)."""
        vectors: list[bytes | None] = []
        missing: dict[bytes, list[int]] = {}
        tokens = cached = 0
        for place, text in enumerate(texts):
            tokens += text.tokens
            found = self._cache.get(tenant_id, (workspace, text.data))
            vectors.append(found)
            if found is not None or text.data in missing:
                cached += text.tokens
            if found is None:
                missing.setdefault(text.data, []).append(place)
        erasures = self._erasures
        return TextLookup(tenant_id, workspace, vectors, missing, tokens, cached, erasures)

    async def complete(self, lookup: TextLookup) -> list[bytes]:
        """Encode the missing texts, and return all vectors in order.

        Raises Refusal as `TextEncoder.encode` does.
        """
        if lookup.missing:
            found = await self.encoder.encode(lookup.tenant_id, list(lookup.missing))
            for places, vector in zip(lookup.missing.values(), found, strict=True):
                for place in places:
                    lookup.vectors[place] = vector
        return [vector for vector in lookup.vectors if vector is not None]

    def store(self, lookup: TextLookup) -> None:
        """Store the encoded texts of a complete request, unless an erasure came between.

        A request that is not charged stores nothing: its texts would cost the price of cache reads
        when they come again. O(texts).
        """
        if lookup.erasures != self._erasures:
            return
        for text, places in lookup.missing.items():
            vector = lookup.vectors[places[0]]
            assert vector is not None, "the request is complete"
            size = ENTRY_BYTES + len(text) + len(vector)
            self._cache.put(lookup.tenant_id, (lookup.workspace, text), vector, size)

    def erase(self, tenant_id: int, workspace: str | None = None) -> int:
        """Remove a tenant's vectors, of one workspace or of all; return their number.

        Texts that are being encoded meanwhile are not stored. O(the tenant's entries).
        """
        self._erasures += 1
        return self._cache.erase(tenant_id, lambda key: workspace in (None, key[0]))

    @property
    def owners(self) -> frozenset[int]:
        """Ids of the tenants with vectors in the cache."""
        return self._cache.owners

    async def close(self) -> None:
        """End the encoder."""
        await self.encoder.close()


def cut_vector(vector: bytes, dimensions: int) -> bytes:
    """Return the first coordinates of a vector, stretched to length 1. O(dimensions)."""
    found = array("f")
    found.frombytes(vector[: 4 * dimensions])
    length = math.sqrt(sum(one * one for one in found)) or 1.0
    return array("f", [one / length for one in found]).tobytes()
