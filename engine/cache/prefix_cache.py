"""The door of the cache: everything the scheduler and core may do to blocks.

CONTRACT ONLY so far: signatures and rules are settled here, bodies come next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from engine.api import LeaseGrant, LeaseRequest, Namespace, Quota
from engine.plan import BlockCopy


class Peek(Struct, frozen=True):
    cached_tokens: int
    promised_tokens: int
    expires_at_s: float | None


class BlockTable(Protocol):
    """One sequence's ordered blocks. Each entry is pinned. Only `PrefixCache` changes it.

    `blocks` (list[int], live), `version` (bumped when an entry that stood before changes),
    `kv_tokens` (tokens whose KV is in place), `namespace`, `leases` (tuple[LeaseGrant, ...]).
    """

    blocks: list[int]
    version: int
    kv_tokens: int
    namespace: Namespace
    leases: tuple[LeaseGrant, ...]


class PrefixCache(Protocol):
    def __init__(
        self, *, blocks: int, block_size: int, facts: Callable[[object], None] | None = None
    ) -> None:
        """All blocks free. `facts` gets frozen values of engine.cache.events as things happen."""

    # -- looking: changes nothing
    def peek(self, namespace: Namespace, tokens: Sequence[int], now_s: float) -> Peek: ...
    def fits(self, namespace: Namespace, quota: Quota, tokens: int) -> bool:
        """Could one sequence of `tokens` tokens run alone in an otherwise idle pool?"""

    # -- one sequence's life
    def begin(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        now_s: float,
        *,
        quota: Quota = Quota(),
        leases: Sequence[LeaseRequest] = (),
        read: bool = True,
        write: bool = True,
    ) -> BlockTable:
        """Match and pin the longest live prefix of `tokens`, token-exact, at most len(tokens) - 1.

        A partial block is matched by taking a new block and a pending copy (see `take_copies`); when
        no block can be had the partial match is given up, never the request. Renews retention of the
        matched nodes. Remembers quota and leases (grants are in `table.leases`).
        """

    def grow(self, table: BlockTable, tokens: int, now_s: float) -> bool:
        """Make slots [table.kv_tokens, tokens) exist and be writable: allocates, evicts by rule 9, and
        copies on write when the first of them lies in a shared block. False: no room, nothing changed."""

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Copies that must run before the next step's writes, in order. Their sources stay pinned
        until this is called; the caller launches the step that has them before calling anything else."""

    def commit(
        self, table: BlockTable, tokens: Sequence[int], kv_tokens: int, now_s: float
    ) -> None:
        """A completed step has put the KV of tokens[:kv_tokens] in place. Full blocks become findable;
        where the tree already has an equal block the table takes that one and frees its own."""

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks (all pinned once more)."""

    def release(
        self, table: BlockTable, tokens: Sequence[int], now_s: float, *, keep: bool = True
    ) -> None:
        """The sequence ends or is preempted: drop its holds, once. With `keep`, the partly filled last
        block (tokens up to table.kv_tokens) is left to the tree as well. Grants not yet covered by
        computed blocks lapse."""

    # -- keeping house
    def expire(self, now_s: float) -> int:
        """Free every block whose limit has passed; how many. O(expired log n)."""

    def erase(
        self,
        namespace: Namespace,
        *,
        lease_id: str | None = None,
        tokens: Sequence[int] | None = None,
    ) -> int: ...

    def check(self) -> None:
        """Recount everything from scratch (I1, I2, I3, I5, I6, I9, I10, I11, I12). Raises
        InvariantViolation with a drawing of what is wrong. O(blocks)."""
