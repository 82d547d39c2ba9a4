"""Facts: what happened in the cache, for analytics and routing.

They are frozen counts, never tokens. Nobody below the gateway keeps or logs them; the cache hands
them to the callable it was given and forgets them.
"""

from __future__ import annotations

from msgspec import Struct

from engine.api import Namespace


class Matched(Struct, frozen=True, gc=False):
    """A request began: of its `prompt_tokens`, `cached_tokens` were found."""

    namespace: Namespace
    prompt_tokens: int
    cached_tokens: int


class Committed(Struct, frozen=True, gc=False):
    """`blocks` became findable, holding `tokens` tokens; `new_blocks`: by how many there are more,
    without those that were there, or took the place of a tail."""

    namespace: Namespace
    blocks: int
    tokens: int
    new_blocks: int


class Copied(Struct, frozen=True, gc=False):
    """The first `tokens` slots of a block are copied before a write or for a partial hit."""

    namespace: Namespace
    tokens: int


class Evicted(Struct, frozen=True, gc=False):
    """`blocks` of `namespace` were taken under pressure, for `taker` (may be itself). `lived_s`:
    how long they had been findable, together."""

    namespace: Namespace
    taker: Namespace
    blocks: int
    lived_s: float


class Expired(Struct, frozen=True, gc=False):
    """`blocks` left the tree because their time ran out."""

    namespace: Namespace
    blocks: int


class BlocksErased(Struct, frozen=True, gc=False):
    """`blocks` left the tree because their owner said so."""

    namespace: Namespace
    blocks: int


Fact = Matched | Committed | Copied | Evicted | Expired | BlocksErased


class CachePeek(Struct, frozen=True):
    """What a prompt would find. `expires_at_s`: when the hit ends by itself; None: never."""

    cached_tokens: int
    promised_tokens: int
    expires_at_s: float | None


class CacheStats(Struct, frozen=True):
    """blocks = free + cached (only the tree refers to them) + pinned. Totals never fall."""

    blocks: int
    free: int
    cached: int
    pinned: int
    evicted_blocks_total: int
    expired_blocks_total: int
    copied_blocks_total: int


class NamespaceUse(Struct, frozen=True):
    """Blocks allocated to a namespace; of them, that a table holds; and under a live promise, by
    its class."""

    namespace: Namespace
    blocks: int
    pinned: int
    promised: dict[str, int]
