"""A radix tree of token prefixes: one per namespace, one node per block.

A node's run is the tokens of its block: a whole block's worth, or fewer for the tail a sequence
left behind. Tails have no children. No run among siblings is a prefix of another (a longer run
takes a shorter one's place), so in token order the sibling with the longest common run stands
directly before or after any sequence of tokens, and bisection finds it.

Tokens prove equality. The dict of children hashes runs to find a bucket and then compares them.
It knows no pool, no clock and no quota. Only `prefix_cache` calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import count, islice

from sortedcontainers import SortedList

from engine.cache.leases import BlockTerms

Run = tuple[int, ...]
NOWHERE: Set[str] = frozenset()


class Node:
    """One block of the tree. `terms` None: best effort, no limit of its own. `hits`: how often it
    was matched. `since_s`: when it came.

    `ends`: leases of which it is the last block (see `lease_ends`). `promised_as` (the class it is
    promised in now) and `in_order` mirror the account's books (see `eviction`), `timed_limit` and
    `timed_promise` whether a deadline is set. A node that left its tree has no parent.
    """

    __slots__ = (
        "block",
        "children",
        "ends",
        "hits",
        "in_order",
        "last_use_s",
        "order",
        "parent",
        "promised_as",
        "run",
        "serial",
        "since_s",
        "terms",
        "timed_limit",
        "timed_promise",
    )

    def __init__(self, run: Run, block: int, parent: Node | None, serial: int) -> None:
        self.run = run
        self.block = block
        self.parent = parent
        self.serial = serial
        self.children: dict[Run, Node] = {}
        self.order: SortedList | None = None
        self.hits = 0
        self.since_s = self.last_use_s = 0.0
        self.terms: BlockTerms | None = None
        self.ends: Set[str] = NOWHERE
        self.promised_as: str | None = None
        self.in_order = False
        self.timed_limit = False
        self.timed_promise = False

    @property
    def promised(self) -> bool:
        """Not evicted now."""
        return self.promised_as is not None

    def below(self) -> Iterator[Node]:
        """Itself and everything under it, children before parents. Does not recurse."""
        found, stack = [], [self]
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return reversed(found)


class TreeMatch:
    """What a prompt finds in a tree: the nodes of whole blocks, `path`, and after these `common`
    tokens of the block `near`. `tree` None: there is no such tree. Pins nothing."""

    __slots__ = ("cached_tokens", "changes", "common", "near", "path", "tree")

    def __init__(self, tree: PrefixTree | None, path: list[Node], near: Node | None, common: int):
        self.tree = tree
        self.changes = 0 if tree is None else tree.changes
        self.path = path
        self.near = near
        self.common = common
        self.cached_tokens = common
        if tree is not None:
            self.cached_tokens += len(path) * tree.block_size

    def holds_of(self, tree: PrefixTree) -> bool:
        """Would `tree.find` say the same? Not for certain once the tree has changed. O(1)."""
        return self.tree is tree and self.changes == tree.changes


def common_run(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


class PrefixTree:
    """Prefixes in whole blocks of `block_size` tokens, and tails. `changes` grows with each node
    that comes or goes."""

    def __init__(self, block_size: int, serials: Iterator[int] | None = None) -> None:
        """`serials`: one for each node that is made, where several trees number theirs together."""
        self.block_size = block_size
        self.root = Node((), -1, None, 0)
        self.changes = 0
        self._serials = serials or count(1)

    def holds(self, node: Node) -> bool:
        """Is the node still in this tree? O(1)."""
        return node is self.root or node.parent is not None

    def find(self, tokens: Sequence[int]) -> TreeMatch:
        """The longest cached prefix of `tokens`, to the token, and all but the last of them at most
        (rules 5 and 6). O(blocks matched)."""
        limit = len(tokens) - 1
        path = self.walk(tokens, limit)
        whole = len(path) * self.block_size
        rest = tokens[whole : min(whole + self.block_size, limit)]
        return TreeMatch(self, path, *self.nearest(path[-1] if path else self.root, rest))

    def walk(self, tokens: Sequence[int], limit: int) -> list[Node]:
        """The nodes of the longest cached run of whole blocks within tokens[:limit].

        O(blocks matched): a tuple and a dict lookup each.
        """
        children, path = self.root.children, []
        # One iterator, `block_size` times: each tuple is the next run, and C code makes it.
        for run in zip(*[islice(tokens, max(0, limit))] * self.block_size, strict=False):
            child = children.get(run)
            if child is None:
                break
            path.append(child)
            children = child.children
        return path

    def nearest(self, node: Node, tokens: Sequence[int]) -> tuple[Node | None, int]:
        """The child that shares the longest leading run with `tokens`, and how long it is.

        O(log children).
        """
        best, length = None, 0
        for child in self._neighbours(node, tuple(tokens)):
            common = common_run(child.run, tokens)
            if common > length:
                best, length = child, common
        return best, length

    def under(self, tokens: Sequence[int]) -> list[Node]:
        """The topmost nodes whose path starts with all of `tokens`."""
        path = self.walk(tokens, len(tokens))
        whole = len(path) * self.block_size
        rest = tuple(tokens[whole:])
        if not rest:
            return path[-1:]
        if len(rest) > self.block_size:
            return []
        node = path[-1] if path else self.root
        return [child for run, child in node.children.items() if run[: len(rest)] == rest]

    def insert(self, parent: Node, run: Run, block: int) -> tuple[Node, Node | None]:
        """Add a child whose run no sibling has or extends. Returns it and the tail it replaces.

        The replaced tail, a strict prefix of `run`, is taken out; its block is the caller's.
        """
        shorter = next(
            (n for n in self._neighbours(parent, run) if n.run == run[: len(n.run)]), None
        )
        if shorter is not None:
            self.remove(shorter)
        node = Node(run, block, parent, next(self._serials))
        self.changes += 1
        parent.children[run] = node
        if parent.order is not None:
            parent.order.add(run)
        elif len(parent.children) > 1:
            parent.order = SortedList(parent.children)
        return node, shorter

    def remove(self, node: Node) -> None:
        """Take a leaf out."""
        parent = node.parent
        assert parent is not None, "the root stays"
        self.changes += 1
        del parent.children[node.run]
        if parent.order is not None:
            parent.order.remove(node.run)
        node.parent = None

    def _neighbours(self, node: Node, run: Run) -> Iterator[Node]:
        """The children directly before and after `run` in token order."""
        if node.order is None:
            yield from node.children.values()
            return
        at = node.order.bisect_left(run)
        for index in (at - 1, at):
            if 0 <= index < len(node.order):
                yield node.children[node.order[index]]
