"""A block table: one sequence's ordered blocks, as the scheduler and the runner see them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from engine.api import BlockWindow, LeaseGrant, LeaseRequest, Namespace
from engine.cache.tree.accounts import NamespaceAccount
from engine.cache.tree.prefix_tree import Node, WindowBlock


@dataclass(slots=True, eq=False, repr=False)
class BlockTable:
    """One sequence's block table. Each entry is pinned. Only the cache's modules change it.

    Readers may use `blocks` (live: the list itself grows; under an attention window with a hole
    where a block was let go), `beside` (the same for each window group, with holes behind its
    window), `version` (grows when an existing entry changes to another block), `kv_tokens` (tokens
    whose KV is in place), `writable_tokens` (up to it the slots that the next step may write exist
    and are this table's alone; 0 where only `PrefixCache.grow` can tell), `namespace`, `leases` and
    `attention` (the window of its sequence).

    `resume_gap_tokens`: what the match lost because no window's blocks or state were kept there.
    `renews`: its reads and its end renew the leases of the blocks that it uses.

    The other fields belong to the cache. `node`: the tree node of block `committed` - 1, under
    which the next full block is committed. `requested_leases`: each lease, with the number of
    leading blocks that its promise covers; `prompt_tokens`: the most tokens that a lease covers.
    `reserved`: promised blocks that are not computed yet. `known_runs`: the entries that were
    matched, with those behind them whose promises a level below keeps. `binds`: the node that the
    reserved blocks bind to the device, with those above it. `is_suspended`: the sequence was
    preempted and has no blocks; the table keeps the room of its promises until it begins again.
    `holes`: under an attention window, entries of `blocks` that are holes, behind the sinks.

    For window groups: `first`: by group, the first entry that is no hole. `aside`: by group,
    entries that a load has made holes, from an index on, until it has ended. `advanced`: the whole
    blocks up to which blocks were let go. `marks`: positions still to be passed at which there is a
    reason to resume, ascending. `window_promises`: by group, the entries that the promises cover;
    `window_kept`: those of them, with their groups, whose promises a level below kept when the
    table began. `resumed`: window blocks whose promises the end of the sequence renews, and once it
    has ended, those that resuming there reads.

    For states, with `marks`: `kept`: by position, the blocks to which a launched step copies the
    state there. `restores`: the blocks of the state that its first row begins from, pinned until
    that is launched. `state_tokens`: where it last had a state that is kept. `state_promises`: the
    positions of states that its leases will promise, with the blocks reserved for each: none where
    it is kept already.
    """

    account: NamespaceAccount
    started_s: float
    write: bool
    attention: BlockWindow | None = None
    renews: bool = True
    beside: tuple[list[int], ...] = ()
    blocks: list[int] = field(default_factory=list)
    version: int = 0
    kv_tokens: int = 0
    writable_tokens: int = 0
    leases: tuple[LeaseGrant, ...] = ()
    resume_gap_tokens: int = 0
    node: Node = field(init=False)
    committed: int = 0
    requested_leases: tuple[tuple[LeaseRequest, int], ...] = ()
    prompt_tokens: int = 0
    reserved: int = 0
    known_runs: int = 0
    binds: Node | None = None
    first: list[int] = field(init=False)
    aside: tuple[tuple[int, list[int]], ...] = ()
    advanced: int = 0
    holes: int = 0
    marks: list[int] = field(default_factory=list)
    window_promises: tuple[set[int], ...] = field(init=False)
    window_kept: Collection[tuple[int, int]] = ()
    resumed: list[WindowBlock] = field(default_factory=list)
    kept: dict[int, list[int]] = field(default_factory=dict)
    restores: list[int] = field(default_factory=list)
    state_tokens: int = 0
    state_promises: dict[int, int] = field(default_factory=dict)
    is_suspended: bool = False
    write_epoch: int = field(init=False)

    def __post_init__(self) -> None:
        self.node = self.account.tree.root
        self.first = [0] * len(self.beside)
        self.window_promises = tuple(set() for _ in self.beside)
        self.write_epoch = self.account.write_epoch

    def forked(self) -> BlockTable:
        """Return a table over the same blocks, whose references the caller adds. It promises
        nothing. O(blocks)."""
        beside = tuple(map(list, self.beside))
        own = self.account, self.started_s, self.write, self.attention, self.renews
        fork = BlockTable(*own, beside)
        fork.blocks, fork.holes = list(self.blocks), self.holes
        fork.first, fork.marks = list(self.first), list(self.marks)
        fork.kv_tokens = self.kv_tokens
        fork.node, fork.committed = self.node, self.committed
        fork.write_epoch = self.write_epoch
        fork.requested_leases = tuple((lease, 0) for lease, _ in self.requested_leases)
        return fork

    def start_at(self, path: Sequence[Node]) -> None:
        """Take over the blocks of a match from the root, which the caller has pinned. O(blocks)."""
        self.node = path[-1] if path else self.account.tree.root
        self.blocks = [node.block for node in path]
        self.committed = len(path)
        self.kv_tokens = len(path) * self.account.tree.block_size

    @property
    def is_erased(self) -> bool:
        """Return whether the sequence may commit no more: what it reads was erased, or it may not
        write. O(1).
        """
        return not self.write or self.write_epoch != self.account.write_epoch

    @property
    def held_blocks(self) -> int:
        """Return how many blocks the table holds, in all groups and for states. O(groups)."""
        held = len(self.blocks) - self.holes
        for row, first in zip(self.beside, self.first, strict=True):
            held += len(row) - first
        aside = (*(blocks for _, blocks in self.aside), *self.kept.values())
        return held + sum(map(len, aside))

    @property
    def window_blocks(self) -> list[int]:
        """Return the blocks that the table holds in window groups, without those set aside.
        O(these).
        """
        held: list[int] = []
        for row, first in zip(self.beside, self.first, strict=True):
            held += row[first:]
        return held

    @property
    def pinned(self) -> list[int]:
        """Return the blocks of `blocks` that the table holds. O(1) without holes."""
        return [block for block in self.blocks if block >= 0] if self.holes else self.blocks

    @property
    def namespace(self) -> Namespace:
        """Return the namespace whose tree the sequence reads and writes."""
        return self.account.namespace
