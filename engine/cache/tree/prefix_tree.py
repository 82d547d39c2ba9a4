"""A radix tree of token prefixes: one tree per namespace, one node per block.

A node's run is the tokens of its block: a whole block, or fewer tokens for the tail that a sequence
left behind. Tails have no children. No run among siblings is a prefix of another (a longer run
replaces a shorter one), so in token order the sibling with the longest common run stands directly
before or after any sequence of tokens, and bisection finds it.

Tokens prove equality. The dict of children hashes runs to find a bucket and then compares them. The
tree knows no pool, no clock and no quota. The other modules of the cache call it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import count, islice
from typing import ClassVar, TypeVar

from sortedcontainers import SortedList

from engine.cache.tree.lease_endpoints import NO_LEASES, LeasedNode
from engine.cache.tree.leases import BlockTerms

Run = tuple[int, ...]
N = TypeVar("N", bound=LeasedNode)


class _PromisedBlock:
    """Where the promise of a block in a tree is kept, if it has one."""

    __slots__ = ()
    promised_class: str | None
    terms: BlockTerms | None

    @property
    def promised(self) -> bool:
        """Return whether a live promise protects the block from eviction."""
        return self.promised_class is not None

    @property
    def promised_below(self) -> bool:
        """Return whether a level below the device keeps the promise of this block."""
        return self.terms is not None and self.terms.below_class is not None


class Node(_PromisedBlock):
    """One run of tokens in the tree, and its block.

    `block`: its block in KV group 0. `beside`: its blocks in the window groups, None where a block
    was freed (a tombstone); None as a whole for a model with one group. `terms` None: best effort
    without a limit. `hits`: how often the block was matched. `inserted_at_s`: when it entered the
    tree. `ending_leases`: leases whose last block this is (see `lease_endpoints`).
    `promised_class`: the class under which the device keeps the block promised now;
    `promised_children`: the children that are so. `eviction_score`: the score under which
    the block is in its payer's `EvictionOrder`, or None. `has_limit_deadline` and
    `has_promise_deadline`: a deadline is set. A node that left its tree has no parent.
    """

    __slots__ = (
        "beside",
        "block",
        "child_order",
        "children",
        "ending_leases",
        "eviction_score",
        "has_limit_deadline",
        "has_promise_deadline",
        "hits",
        "inserted_at_s",
        "last_use_s",
        "parent",
        "promised_children",
        "promised_class",
        "run",
        "serial",
        "terms",
    )

    # By hand: a dataclass, with a factory for `children`, made the commit of a block 3 % dearer.
    def __init__(self, run: Run, block: int, parent: Node | None, serial: int) -> None:
        self.run = run
        self.block = block
        self.beside: list[WindowBlock | None] | None = None
        self.parent = parent
        self.serial = serial
        self.children: dict[Run, Node] = {}
        self.child_order: SortedList | None = None
        self.hits = 0
        self.inserted_at_s = self.last_use_s = 0.0
        self.terms: BlockTerms | None = None
        self.ending_leases: Set[str] = NO_LEASES
        self.promised_class: str | None = None
        self.promised_children = 0
        self.eviction_score: float | None = None
        self.has_limit_deadline = False
        self.has_promise_deadline = False

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

    `parent`: the node; None once the block has left the tree. `resumed_at_s`: when there was last a
    reason to resume here, which is also its eviction score: blocks that no resume point needs go
    first, the oldest before the others. The other fields are as a node's. A window block has no
    limit of its own, since it leaves the tree with its node at the latest.
    """

    parent: Node | None
    group: int
    block: int
    serial: int
    inserted_at_s: float
    resumed_at_s: float = -math.inf
    terms: BlockTerms | None = None
    promised_class: str | None = None
    eviction_score: float | None = None
    has_promise_deadline: bool = False
    children: ClassVar[dict[Run, Node]] = {}
    has_limit_deadline: ClassVar[bool] = True


TreeBlock = Node | WindowBlock
"""A block that a tree refers to, in group 0 or in a window group."""


def tree_blocks(node: Node) -> list[TreeBlock]:
    """Return the node, for its block in group 0, and its window blocks. O(groups)."""
    return [node] if node.beside is None else [node, *filter(None, node.beside)]


class TreeMatch:
    """The longest cached prefix of a prompt; it pins nothing.

    `path`: the nodes of whole blocks. `partial_node`: a further block of which the first
    `partial_tokens` tokens match. `matched_tokens`: the tokens that group 0 holds; more than
    `cached_tokens` where a window group lacks blocks. `tree` None: the namespace has no tree.
    """

    __slots__ = (
        "cached_tokens",
        "changes",
        "matched_tokens",
        "partial_node",
        "partial_tokens",
        "path",
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


def upward(node: N) -> Iterator[N]:
    """Iterate over a node and those above it, without the root. O(1) each."""
    above: N | None = node
    while above is not None and above.run:
        yield above
        above = above.parent


def whole_runs(root: N, tokens: Iterable[int], run_tokens: int) -> list[N]:
    """Return the nodes of the longest leading part of `tokens` in whole runs.

    O(runs matched): a tuple and a dict lookup each.
    """
    path: list[N] = []
    children = root.children
    # One iterator, `run_tokens` times: zip makes each tuple, the next run, in C.
    for run in zip(*[iter(tokens)] * run_tokens, strict=False):
        child = children.get(run)
        if child is None:
            break
        path.append(child)
        children = child.children
    return path


def nodes_under(root: N, tokens: Sequence[int], run_tokens: int) -> list[N]:
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
    """Prefixes in whole blocks of `block_size` tokens, and tails. `changes` grows with each node
    or window block added or removed.
    """

    def __init__(self, block_size: int, serials: Iterator[int] | None = None) -> None:
        """Make an empty tree. `serials` numbers the nodes, across several trees if they
        share it.
        """
        self.block_size = block_size
        self.root = Node((), -1, None, 0)
        self.changes = 0
        self._serials = serials or count(1)

    def contains(self, node: TreeBlock) -> bool:
        """Return whether the node, or the window block, is still in this tree. O(1)."""
        return node is self.root or node.parent is not None

    def find(self, tokens: Sequence[int]) -> TreeMatch:
        """Return the longest cached prefix of `tokens`, token-exact, without the last token at
        least (rules 5 and 6). O(blocks matched).
        """
        limit = len(tokens) - 1
        path = self.match_blocks(tokens, limit)
        whole = len(path) * self.block_size
        rest = tokens[whole : min(whole + self.block_size, limit)]
        return TreeMatch(
            self, path, *self.longest_common_child(path[-1] if path else self.root, rest)
        )

    def match_blocks(self, tokens: Sequence[int], limit: int) -> list[Node]:
        """Return the nodes of the longest cached run of whole blocks within tokens[:limit]."""
        return whole_runs(self.root, islice(tokens, max(0, limit)), self.block_size)

    def longest_common_child(self, node: Node, tokens: Sequence[int]) -> tuple[Node | None, int]:
        """Return the child that shares the longest leading run with `tokens`, and the length of
        that run.

        O(log children).
        """
        best, length = None, 0
        for child in self._neighbours(node, tuple(tokens)):
            common = common_prefix_length(child.run, tokens)
            if common > length:
                best, length = child, common
        return best, length

    def insert(self, parent: Node, run: Run, block: int) -> tuple[Node, Node | None]:
        """Add a child whose run no sibling has or extends. Return it and the tail it replaces.

        The replaced tail, a strict prefix of `run`, is removed; its block belongs to the caller.
        """
        shorter = None
        if parent.children:
            near = self._neighbours(parent, run)
            shorter = next((node for node in near if node.run == run[: len(node.run)]), None)
        if shorter is not None:
            self.remove(shorter)
        node = Node(run, block, parent, next(self._serials))
        self.changes += 1
        parent.children[run] = node
        if parent.child_order is not None:
            parent.child_order.add(run)
        elif len(parent.children) > 1:
            parent.child_order = SortedList(parent.children)
        return node, shorter

    def remove(self, node: Node) -> None:
        """Remove a leaf."""
        parent = node.parent
        assert parent is not None, "the root is never removed"
        self.changes += 1
        del parent.children[node.run]
        if parent.child_order is not None:
            parent.child_order.remove(node.run)
        node.parent = None

    def _neighbours(self, node: Node, run: Run) -> Iterator[Node]:
        """Yield the children directly before and after `run` in token order."""
        if node.child_order is None:
            yield from node.children.values()
            return
        at = node.child_order.bisect_left(run)
        for index in (at - 1, at):
            if 0 <= index < len(node.child_order):
                yield node.children[node.child_order[index]]
