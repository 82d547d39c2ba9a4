"""A sequence's ordered blocks, as the scheduler and the runner see them."""

from __future__ import annotations

from engine.api import LeaseGrant, LeaseRequest, Namespace
from engine.cache.accounts import NamespaceAccount
from engine.cache.prefix_tree import Node


class BlockTable:
    """One sequence's block table. Each entry is pinned. Only `PrefixCache` changes it.

    Readers may use `blocks` (live: the list itself grows), `version` (bumped when an entry that
    stood before changes), `kv_tokens` (tokens whose KV is in place), `namespace` and `leases`.

    The rest is the cache's: `node` is the tree node of block `committed` - 1, under which the next
    full block is committed; `asked` the leases with the blocks each one's promise reaches;
    `reserved` the promised blocks not computed yet.
    """

    __slots__ = (
        "account",
        "asked",
        "blocks",
        "committed",
        "kv_tokens",
        "leases",
        "node",
        "reserved",
        "started_s",
        "version",
        "write",
        "write_epoch",
    )

    def __init__(self, account: NamespaceAccount, started_s: float, write: bool) -> None:
        self.account = account
        self.blocks: list[int] = []
        self.version = 0
        self.kv_tokens = 0
        self.leases: tuple[LeaseGrant, ...] = ()
        self.asked: tuple[tuple[LeaseRequest, int], ...] = ()
        self.node: Node = account.tree.root
        self.committed = 0
        self.reserved = 0
        self.started_s = started_s
        self.write = write
        self.write_epoch = account.write_epoch

    @property
    def namespace(self) -> Namespace:
        return self.account.namespace
