"""A block table: one sequence's ordered blocks, as the scheduler and the runner see them."""

from __future__ import annotations

from engine.api import LeaseGrant, LeaseRequest, Namespace
from engine.cache.accounts import NamespaceAccount
from engine.cache.prefix_tree import Node


class BlockTable:
    """One sequence's block table. Each entry is pinned. Only `PrefixCache` changes it.

    Readers may use `blocks` (live: the list itself grows), `version` (grows when an existing entry
    changes), `kv_tokens` (tokens whose KV is in place), `namespace` and `leases`.

    The other fields belong to the cache. `node`: the tree node of block `committed` - 1, under
    which the next full block is committed. `requested_leases`: each lease, with the number of
    leading blocks that its promise covers. `reserved`: promised blocks that are not computed yet.
    """

    __slots__ = (
        "account",
        "blocks",
        "committed",
        "kv_tokens",
        "leases",
        "node",
        "requested_leases",
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
        self.requested_leases: tuple[tuple[LeaseRequest, int], ...] = ()
        self.node: Node = account.tree.root
        self.committed = 0
        self.reserved = 0
        self.started_s = started_s
        self.write = write
        self.write_epoch = account.write_epoch

    @property
    def namespace(self) -> Namespace:
        """Return the namespace whose tree the sequence reads and writes."""
        return self.account.namespace
