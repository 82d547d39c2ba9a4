"""A radix tree of token prefixes: one tree per namespace, one node per run, on all levels.

A node's run is the tokens of a whole block, or fewer for the tail that a sequence left behind. Its
bytes are in its *places*: a block of the device, a slot of host memory, a record of a store. The
places of a path are closed upward twice: a run on the device has all runs before it there, and one
with a place below has all runs before it in some place below. Tails have no children, and are on
the device alone. Of the siblings on the device no run is a prefix of another (a longer run replaces
a shorter one), so in token order the one with the longest common run stands directly before or
after any sequence of tokens, and bisection finds it.

Tokens prove equality. The dict of children hashes runs to find a bucket and then compares them. The
tree knows no pool, no clock and no quota. The other modules of the cache call it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import count, islice
from typing import ClassVar, Final

from sortedcontainers import SortedList

from engine.api import Namespace
from engine.cache.tree.lease_endpoints import NO_LEASES
from engine.cache.tree.leases import BlockTerms
from engine.cache.tree.places import HostPlace, Place, RecordPlace

Run = tuple[int, ...]
NO_BLOCK: Final = -1
"""In place of a block of the device: there is none."""


class _PromisedBlock:
    """A block in a tree that may be promised.

    It is *bound* to the device while its promise, or that of a block under it, has no place below
    that keeps it; then it is not evicted. So what is bound is closed upward, too.
    """

    __slots__ = ()
    promised_class: str | None
    is_bound: bool

    @property
    def promised(self) -> bool:
        """Return whether it is promised now, wherever it is."""
        return self.promised_class is not None

    @property
    def promised_below(self) -> bool:
        """Return whether it is promised, and a place below keeps that."""
        return self.promised_class is not None and not self.is_bound


class Node(_PromisedBlock):
    """One run of tokens in the tree, and its places. A node that left its tree has no parent."""

    __slots__ = (
        "away",
        "beside",
        "block",
        "bound_below",
        "child_order",
        "children",
        "copied_children",
        "depth",
        "device_children",
        "ending_leases",
        "eviction_score",
        "has_limit_deadline",
        "has_promise_deadline",
        "hits",
        "host",
        "inserted_at_s",
        "is_bound",
        "last_use_s",
        "parent",
        "promised_class",
        "record",
        "run",
        "serial",
        "states",
        "terms",
        "tree",
    )

    # By hand: a dataclass, with a factory for `children`, made the commit of a block 3 % dearer.
    def __init__(self, run: Run, parent: Node | None, serial: int, tree: PrefixTree | None) -> None:
        self.run = run
        self.depth: int = len(run) if parent is None else parent.depth + len(run)
        """The tokens from the root to its end."""
        self.parent = parent
        self.serial = serial
        self.tree = tree
        self.children: dict[Run, Node] = {}
        self.child_order: SortedList | None = None
        """The runs of the children on the device, once there are two children."""
        self.device_children = 0
        self.copied_children = 0
        """How many children have a place below the device."""
        # Its places.
        self.block = NO_BLOCK
        """Its block in KV group 0."""
        self.beside: list[WindowBlock | None] | None = None
        """Its blocks in the window groups, None where it has none there (a tombstone); None as a
        whole for a model with one group."""
        self.away: list[WindowBlock | None] | None = None
        """By window group the promised blocks that the device has evicted; None without any."""
        self.states: list[State] | None = None
        """The kept states that stand behind it; None for most."""
        self.host: HostPlace | None = None
        self.record: RecordPlace | None = None
        # Its uses.
        self.hits = 0
        """How often it was matched."""
        self.inserted_at_s = self.last_use_s = 0.0
        """When it came to the device, and was last used."""
        self.eviction_score: float | None = None
        """The score under which the block is in its payer's `EvictionOrder`, or None."""
        # Its terms.
        self.terms: BlockTerms | None = None
        """None: best effort without a limit."""
        self.ending_leases: Set[str] = NO_LEASES
        """The leases whose last block this is; see `lease_endpoints`."""
        self.promised_class: str | None = None
        self.is_bound = False
        self.bound_below = 0
        """What binds it from below: bound children and window blocks, and tables with promised
        blocks yet to compute."""
        self.has_limit_deadline = False
        self.has_promise_deadline = False

    @property
    def places(self) -> list[Place]:
        """Return its places below the device, the nearest first. O(1)."""
        return [place for place in (self.host, self.record) if place is not None]

    @property
    def is_copied(self) -> bool:
        """Return whether it has a place below the device. O(1)."""
        return self.host is not None or self.record is not None

    @property
    def keeps_promise(self) -> bool:
        """Return whether its places below keep its promise, or a window block's. O(groups)."""
        if self.beside is None and self.away is None:
            return self.promised_below
        return any(block.promised_below for block in all_blocks(self))

    @property
    def slot(self) -> int:
        """Return its slot of host memory, or -1."""
        return -1 if self.host is None else self.host.slot

    @property
    def record_id(self) -> int:
        """Return its record in a store, or 0."""
        return 0 if self.record is None else self.record.record_id

    @property
    def limit_at_s(self) -> float:
        """Return the time from which it is not matched."""
        return math.inf if self.terms is None else self.terms.limit_at_s

    @property
    def namespace(self) -> Namespace:
        """Return the namespace of its tree."""
        assert self.tree is not None, "it is, or was, in a tree"
        return self.tree.namespace

    def window_block(self, group: int) -> WindowBlock | None:
        """Return its block in a window group: on the device, or promised and away from it. O(1)."""
        here = None if self.beside is None else self.beside[group]
        return here if here is not None or self.away is None else self.away[group]

    def path(self) -> list[Node]:
        """Return the nodes from the first run to this one. O(depth)."""
        found = list(upward(self))
        found.reverse()
        return found

    def ancestor(self, steps: int) -> Node | None:
        """Return the node `steps` above this one; None where the tree ends before. O(steps)."""
        found: Node | None = self
        for _ in range(steps):
            found = None if found is None else found.parent
        return found

    def subtree(self) -> Iterator[Node]:
        """Iterate over this node and all nodes below it, children before parents. Does not
        recurse.
        """
        found, stack = [], [self]
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return reversed(found)


@dataclass(slots=True, eq=False, repr=False)
class WindowBlock(_PromisedBlock):
    """The block of a node in window group `group`.

    `parent`: the node; None once the block has left the tree. `block`: NO_BLOCK where it is
    promised and the device has evicted it. `resumed_at_s`: when there was last a reason to resume
    here, which is also its eviction score: blocks that no resume point needs go first, the oldest
    before the others. The other fields are as a node's. A window block has no limit of its own,
    since it leaves the tree with its node at the latest.
    """

    parent: Node | None
    group: int
    block: int
    serial: int
    inserted_at_s: float
    resumed_at_s: float = -math.inf
    terms: BlockTerms | None = None
    promised_class: str | None = None
    is_bound: bool = False
    eviction_score: float | None = None
    has_promise_deadline: bool = False
    device_children: ClassVar[int] = 0
    has_limit_deadline: ClassVar[bool] = True


@dataclass(slots=True, eq=False, repr=False)
class StateBlock(WindowBlock):
    """One of the blocks that hold a kept state. As a window block it goes before its node, by the
    time of the state's last resume; its group is -1."""

    state: State = field(kw_only=True)


@dataclass(slots=True, eq=False, repr=False)
class State:
    """The recurrent states of all layers behind a prefix, kept so that it may be resumed there.

    The prefix ends `run` tokens, fewer than a block, behind `node`. `blocks`: those of the device
    that hold it; where one of `size` has left, it is of no use and the others go next.
    """

    node: Node
    run: Run
    size: int
    blocks: list[StateBlock] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Return whether all its blocks are there. O(1)."""
        return len(self.blocks) == self.size


TreeBlock = Node | WindowBlock
"""A block that a tree refers to: in group 0, in a window group, or of a kept state."""


def tree_blocks(node: Node) -> list[TreeBlock]:
    """Return a node on the device, for its block in group 0, its window blocks there and those of
    its states. O(these).
    """
    found: list[TreeBlock] = [node]
    if node.beside is not None:
        found += filter(None, node.beside)
    for state in node.states or ():
        found += state.blocks
    return found


def all_blocks(node: Node) -> list[TreeBlock]:
    """Return a node, for its run, its window blocks on the device, or promised and away, and the
    blocks of its states. O(these).
    """
    return [*tree_blocks(node), *filter(None, node.away or ())]


class TreeMatch:
    """The longest cached prefix of a prompt; it pins nothing.

    `path`: the nodes of whole blocks. `partial_node`: a further block of which the first
    `partial_tokens` tokens match. `matched_tokens`: the tokens that group 0 holds; more than
    `cached_tokens` where a window group lacks blocks, or no state is kept. `state`: the one that
    stands there, of a model with states. `tree` None: the namespace has no tree.
    """

    __slots__ = (
        "cached_tokens",
        "changes",
        "matched_tokens",
        "partial_node",
        "partial_tokens",
        "path",
        "state",
        "tree",
    )

    def __init__(
        self, tree: PrefixTree | None, path: list[Node], partial_node: Node | None, common: int
    ):
        self.tree = tree
        self.changes = 0 if tree is None else tree.changes
        self.path = path
        self.partial_node = partial_node
        self.partial_tokens = common
        self.state: State | None = None
        self.cached_tokens = common
        if tree is not None:
            self.cached_tokens += len(path) * tree.block_size
        self.matched_tokens = self.cached_tokens

    def is_current(self, tree: PrefixTree) -> bool:
        """Return whether the match is still valid for `tree`; false once the tree has changed.
        O(1).
        """
        return self.tree is tree and self.changes == tree.changes

    def whole_blocks(self) -> TreeMatch:
        """Return the match without its partial block. O(1)."""
        match = TreeMatch(self.tree, self.path, None, 0)
        match.changes = self.changes
        return match


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens are equal."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def upward(node: Node) -> Iterator[Node]:
    """Iterate over a node and those above it, without the root. O(1) each."""
    above: Node | None = node
    while above is not None and above.run:
        yield above
        above = above.parent


def whole_runs(root: Node, tokens: Iterable[int], run_tokens: int) -> list[Node]:
    """Return the nodes of the longest leading part of `tokens` in whole runs.

    O(runs matched): a tuple and a dict lookup each.
    """
    path: list[Node] = []
    children = root.children
    # One iterator, `run_tokens` times: zip makes each tuple, the next run, in C.
    for run in zip(*[iter(tokens)] * run_tokens, strict=False):
        child = children.get(run)
        if child is None:
            break
        path.append(child)
        children = child.children
    return path


def nodes_under(root: Node, tokens: Sequence[int], run_tokens: int) -> list[Node]:
    """Return the topmost nodes whose path starts with all of `tokens`, which may end within a run.

    O(runs of `tokens`, children of the last).
    """
    path = whole_runs(root, tokens, run_tokens)
    rest = tuple(tokens[len(path) * run_tokens :])
    last = path[-1] if path else root
    if not rest:
        return [last] if path else list(root.children.values())
    return [child for run, child in last.children.items() if run[: len(rest)] == rest]


class PrefixTree:
    """Prefixes in whole blocks of `block_size` tokens, and tails. `changes` grows with each node,
    and each block of the device, added or removed.
    """

    def __init__(
        self, namespace: Namespace, block_size: int, serials: Iterator[int] | None = None
    ) -> None:
        """Make an empty tree. `serials` numbers the nodes, across several trees if they
        share it.
        """
        self.namespace = namespace
        self.block_size = block_size
        self.root = Node((), None, 0, None)  # a cycle would need the collector
        self.changes = 0
        self.touched: Callable[[Node], None] | None = None
        """Called with each node that gets or loses a place, a window block or a state; None while
        nobody asks."""
        self._serials = serials or count(1)

    def touch(self, node: Node) -> None:
        """Note that a node gets or loses a place, or a part of it. O(1)."""
        if self.touched is not None:
            self.touched(node)

    def contains(self, node: TreeBlock) -> bool:
        """Return whether the node, or the window block, is still in this tree. O(1)."""
        return node is self.root or node.parent is not None

    def find(self, tokens: Sequence[int]) -> TreeMatch:
        """Return the longest prefix of `tokens` on the device, token-exact, without the last token
        at least. O(blocks matched).
        """
        limit = len(tokens) - 1
        path = whole_runs(self.root, islice(tokens, max(0, limit)), self.block_size)
        while path and path[-1].block < 0:
            path.pop()
        whole = len(path) * self.block_size
        rest = tokens[whole : min(whole + self.block_size, limit)]
        return TreeMatch(
            self, path, *self.longest_common_child(path[-1] if path else self.root, rest)
        )

    def longest_common_child(self, node: Node, tokens: Sequence[int]) -> tuple[Node | None, int]:
        """Return the child on the device that shares the longest leading run with `tokens`, and the
        length of that run.

        O(log children).
        """
        best, length = None, 0
        for child in self._neighbours(node, tuple(tokens)):
            common = common_prefix_length(child.run, tokens)
            if common > length:
                best, length = child, common
        return best, length

    def add(self, parent: Node, run: Run) -> Node:
        """Add a child that has no place yet; no child has its run. O(log children)."""
        node = Node(run, parent, next(self._serials), self)
        self.changes += 1
        parent.children[run] = node
        if parent.child_order is None and len(parent.children) > 1:
            here = (one.run for one in parent.children.values() if one.block >= 0)
            parent.child_order = SortedList(here)
        return node

    def put_block(self, node: Node, block: int) -> Node | None:
        """Give a node its block of the device, which has its parent's. Return the tail that its run
        extends, if there is one, which is to leave the tree. O(log children).
        """
        parent, run, shorter = node.parent, node.run, None
        assert parent is not None, "the root has no block"
        if parent.device_children:
            near = self._neighbours(parent, run)
            shorter = next((one for one in near if one.run == run[: len(one.run)]), None)
        self.changes += 1
        if self.touched is not None:
            self.touched(node)
        node.block = block
        parent.device_children += 1
        if parent.child_order is not None:
            parent.child_order.add(run)
        return shorter

    def drop_block(self, node: Node) -> None:
        """Take its block of the device from a node without children there. O(log children)."""
        parent = node.parent
        assert parent is not None, "the root has no block"
        self.changes += 1
        if self.touched is not None:
            self.touched(node)
        node.block = NO_BLOCK
        parent.device_children -= 1
        if parent.child_order is not None:
            parent.child_order.remove(node.run)

    def remove(self, node: Node) -> None:
        """Remove a leaf without a block of the device."""
        parent = node.parent
        assert parent is not None, "the root is never removed"
        self.changes += 1
        del parent.children[node.run]
        node.parent = None

    def _neighbours(self, node: Node, run: Run) -> Iterator[Node]:
        """Yield the children on the device directly before and after `run` in token order."""
        if node.child_order is None:
            yield from (one for one in node.children.values() if one.block >= 0)
            return
        at = node.child_order.bisect_left(run)
        for index in (at - 1, at):
            if 0 <= index < len(node.child_order):
                yield node.children[node.child_order[index]]
