"""A block table: one sequence's ordered blocks, as the scheduler and the runner see them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from engine.api import BlockWindow, LeaseGrant, LeaseRequest, Namespace
from engine.cache.tree.accounts import NamespaceAccount
from engine.cache.tree.prefix_tree import Node, WindowBlock


@dataclass(slots=True, eq=False, repr=False)
class BlockTable:
    """One sequence's block table. Each entry is pinned. Only the cache's modules change it. Readers
    may use the fields from `attention` to `resume_gap_tokens`, and `namespace`.
    """

    account: NamespaceAccount
    started_s: float
    write: bool
    attention: BlockWindow | None = None  # the window of its sequence
    renews: bool = True  # its reads and its end renew the leases of the blocks that it uses
    # As `blocks` for each window group, with holes behind its window.
    beside: tuple[list[int], ...] = ()
    # The list itself grows. Under an attention window a block that was let go leaves a hole.
    blocks: list[int] = field(default_factory=list)
    version: int = 0  # grows when an entry changes to another block
    kv_tokens: int = 0  # with their KV in place
    # The slots up to it that the next step may write exist, and belong to this table only; 0 if
    # `PrefixCache.grow` has to say.
    writable_tokens: int = 0
    leases: tuple[LeaseGrant, ...] = ()
    resume_gap_tokens: int = 0  # that the match lost, since no window's blocks or state were there

    # -- of the cache -------------------------------------------------------------------------

    node: Node = field(init=False)  # of block `committed` - 1: the next full block goes under it
    committed: int = 0
    # Each lease, with the number of leading blocks that its promise covers.
    requested_leases: tuple[tuple[LeaseRequest, int], ...] = ()
    prompt_tokens: int = 0  # the most that a lease covers
    reserved: int = 0  # promised blocks that are not computed yet
    known_runs: int = 0  # matched, with those behind whose promises a level keeps
    binds: Node | None = None  # what the reserved blocks bind to the device, with those above it
    # The sequence was preempted and has no blocks. The table keeps the room of its promises until
    # it begins again.
    is_suspended: bool = False
    holes: int = 0  # of `blocks` behind the sinks, under an attention window
    write_epoch: int = field(init=False)

    # -- for window groups --------------------------------------------------------------------

    first: list[int] = field(init=False)  # by group, the first entry that is no hole
    # By group, entries that a load has made holes, from an index on, until it has ended.
    aside: tuple[tuple[int, list[int]], ...] = ()
    advanced: int = 0  # the whole blocks up to which blocks were let go
    # Positions still to be passed at which there is a reason to resume, ascending.
    marks: list[int] = field(default_factory=list)
    window_promises: tuple[set[int], ...] = field(init=False)  # by group, the entries covered
    # Those of them, with their groups, that a level had kept promised when the table began.
    window_kept: Collection[tuple[int, int]] = ()
    # The window blocks whose promises the end of the sequence renews, and once it has ended, those
    # that resuming there reads.
    resumed: list[WindowBlock] = field(default_factory=list)

    # -- for states, with `marks` -------------------------------------------------------------

    # By position, the blocks to which a launched step copies the state there.
    kept: dict[int, list[int]] = field(default_factory=dict)
    # The blocks of the state that its first row begins from, pinned until that is launched.
    restores: list[int] = field(default_factory=list)
    state_tokens: int = 0  # where it last had a state that is kept
    # The positions of states that its leases will promise, with the blocks reserved for each: none
    # if it is kept already.
    state_promises: dict[int, int] = field(default_factory=dict)

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
