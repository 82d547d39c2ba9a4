"""Cache events, called facts, and the cache's read-only reports.

Facts are frozen counts, never tokens. The cache passes each one to the callable it was given and
keeps none. Analytics and routing read them; nothing below the gateway logs them.
"""

from __future__ import annotations

import math

from msgspec import Struct

from engine.api import Namespace
from engine.cache.tree.prefix_tree import TreeMatch


class Matched(Struct, frozen=True, gc=False):
    """A request began: the cache held `cached_tokens` of its `prompt_tokens`."""

    namespace: Namespace
    prompt_tokens: int
    cached_tokens: int


class Committed(Struct, frozen=True, gc=False):
    """`blocks` became findable, holding `tokens` tokens.

    `new_blocks`: by how many blocks the tree grew; blocks that existed already or replaced a tail
    do not count.
    """

    namespace: Namespace
    blocks: int
    tokens: int
    new_blocks: int


class Copied(Struct, frozen=True, gc=False):
    """The first `tokens` slots of a block are copied, before a write or for a partial hit."""

    namespace: Namespace
    tokens: int


class Evicted(Struct, frozen=True, gc=False):
    """`blocks` of `namespace` were evicted for `taker`, which may be the same namespace.

    `lived_s`: seconds the blocks had been in the tree, summed.
    """

    namespace: Namespace
    taker: Namespace
    blocks: int
    lived_s: float


class Expired(Struct, frozen=True, gc=False):
    """`blocks` left the tree because their retention ended."""

    namespace: Namespace
    blocks: int


class BlocksErased(Struct, frozen=True, gc=False):
    """`blocks` left the tree because an erasure was requested."""

    namespace: Namespace
    blocks: int


class PromiseLost(Struct, frozen=True, gc=False):
    """`blocks` are no longer promised before their time. They had left the tree, and the level that
    kept them has lost them; or their promise ran out while their sequence was preempted, and there
    is no room to promise them again.
    """

    namespace: Namespace
    blocks: int


Fact = Matched | Committed | Copied | Evicted | Expired | BlocksErased | PromiseLost


class CachePeek(Struct, frozen=True):
    """The match that a prompt would get. `expires_at_s`: when it ends by itself; None: never.
    `resume_gap_tokens`: further tokens that group 0 holds, behind the last point to resume at.
    """

    cached_tokens: int
    promised_tokens: int
    expires_at_s: float | None
    resume_gap_tokens: int = 0


def peek_of(found: TreeMatch, block_size: int) -> CachePeek:
    """Return a match as a report. O(blocks matched)."""
    path = found.path if found.partial_node is None else [*found.path, found.partial_node]
    promised = block_size * sum([node.promised_class is not None for node in path])
    ends_s = min([node.terms.limit_at_s for node in path if node.terms], default=math.inf)
    return CachePeek(
        cached_tokens=found.cached_tokens,
        promised_tokens=min(found.cached_tokens, promised),
        expires_at_s=None if ends_s == math.inf else ends_s,
        resume_gap_tokens=found.matched_tokens - found.cached_tokens,
    )


class CacheStats(Struct, frozen=True):
    """Gauges and totals: blocks = free + cached (only the tree refers to them) + pinned. Totals
    never fall. `window_blocks`: the blocks of window groups that trees hold.
    `resume_gap_tokens_total`: prompt tokens that group 0 held, behind the last point to resume at.
    `promisable`: blocks that may still be promised, on the level that keeps promises.
    """

    blocks: int
    free: int
    cached: int
    pinned: int
    evicted_blocks_total: int
    expired_blocks_total: int
    copied_blocks_total: int
    window_blocks: int = 0
    resume_gap_tokens_total: int = 0
    promisable: int = 0


class NamespaceUse(Struct, frozen=True, repr_omit_defaults=True):
    """Blocks allocated to a namespace, the part that block tables hold, and promised blocks by
    class, on any level. `below`: those whose promise a level below the device keeps; `away`: those
    of them that the device has evicted.
    """

    namespace: Namespace
    blocks: int
    pinned: int
    promised: dict[str, int]
    below: int = 0
    away: int = 0
