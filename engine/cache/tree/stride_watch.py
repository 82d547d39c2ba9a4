"""Which prefixes a request could resume behind, as digests of strides, for those who route.

A stride is *present* on the device where a request resumes at its end, and *below* where a load
alone brings one there (rule *Facts*). While nobody asks, trees tell nothing and this computes
nothing. Else each change of a node's places is noted, and what follows from it is computed in
`take`, a part at a time. It knows trees alone, and no pool. `BlockManager` has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice

from engine.cache.tree.prefix_tree import Node, PrefixTree, Run, upward
from engine.cache.tree.window_groups import WindowGroups
from engine.errors import InvariantViolation
from engine.strides import STRIDE_TOKENS, PrefixChanges, chain_strides, stride_key

ON_DEVICE, BELOW = 1, 2
EVALUATED = 8
"""An evaluated stride counts as much as so many nodes that are walked over."""


class _Stride:
    """A stride that ends with `node`, or whose node has left (None). `now`, `told`: the places
    where it is present, and where that was told last."""

    __slots__ = ("digest", "key", "node", "now", "told")

    def __init__(self, digest: bytes, key: bytes, node: Node) -> None:
        self.digest, self.key = digest, key
        self.node: Node | None = node
        self.now = self.told = 0


class StrideWatch:
    """Tells the strides that are present, as they change."""

    def __init__(self, windows: WindowGroups, trees: Callable[[], Iterable[PrefixTree]]) -> None:
        """Watch nothing yet. `trees`: returns those that exist."""
        self.has_states = False
        """Whether the model resumes only where a state is kept."""
        self._windows, self._trees = windows, trees
        self._reach = max(windows.windows, default=0)
        self._stride_tokens = STRIDE_TOKENS
        self._is_on = self._is_first = False
        self._forget()

    def start(self, stride_tokens: int = STRIDE_TOKENS) -> None:
        """Tell everything anew, and then what changes. O(namespaces). ValueError unless a stride is
        a number of whole blocks.
        """
        if stride_tokens % self._windows.block_size:
            raise ValueError(
                f"strides of {stride_tokens} tokens; expected a multiple of"
                f" {self._windows.block_size}, the tokens of a block"
            )
        self._stride_tokens = stride_tokens
        self._forget()
        self._is_on = self._is_first = True
        for tree in self._trees():
            self.follow(tree)
            self._walk.append((tree.root, math.inf))

    def stop(self) -> None:
        """Watch nothing any more. O(namespaces)."""
        self._forget()
        self._is_on = self._is_first = False
        for tree in self._trees():
            self.follow(tree)

    def follow(self, tree: PrefixTree) -> None:
        """Have a tree note its changes here, or none while nobody asks. O(1)."""
        tree.touched = self._touch if self._is_on else None

    @property
    def has_more(self) -> bool:
        """Return whether `take` has something to look at. O(1)."""
        return self._is_first or bool(self._walk or self._touched or self._due)

    def take(self, nodes_max: int) -> PrefixChanges:
        """Return what has changed since the last call, by at most about `nodes_max` nodes that are
        looked at; see `has_more`. What came and went, or went and came, is not told.

        O(nodes_max); with window groups, a stride costs up to the blocks of its windows.
        """
        changed: dict[_Stride, None] = {}
        left = nodes_max
        while left > 0 and (cost := self._step(changed)):
            left -= cost
        sets: tuple[list[bytes], ...] = ([], [], [], [])
        for stride in changed:
            now, told = stride.now, stride.told
            for place, (added, removed) in ((ON_DEVICE, sets[:2]), (BELOW, sets[2:])):
                if now & place and not told & place:
                    added.append(stride.digest)
                elif told & place and not now & place:
                    removed.append(stride.digest)
            stride.told = now
            if stride.node is None:
                del self._strides[stride.digest]
        is_first, self._is_first = self._is_first, False
        return PrefixChanges(is_first, *map(b"".join, sets))

    def check(self) -> None:
        """Recount what is present, if all changes have been looked at. Raises InvariantViolation.
        O(nodes).
        """
        if not self._is_on or self.has_more:
            return
        nodes = [
            node
            for tree in self._trees()
            for node in tree.root.subtree()
            if node.depth and node.depth % self._stride_tokens == 0
        ]
        found = {id(node): levels for node in nodes if (levels := self._levels(node))}
        told = {id(one.node): one.told for one in self._strides.values() if one.told}
        if found != told:
            raise InvariantViolation(f"strides present: {len(found)}, told otherwise: {len(told)}")
        if len(self._of_node) != len(self._strides):
            raise InvariantViolation(f"{len(self._of_node)} nodes of {len(self._strides)} strides")

    # -- internals ----------------------------------------------------------------------------

    def _forget(self) -> None:
        self._strides: dict[bytes, _Stride] = {}
        self._of_node: dict[Node, _Stride] = {}
        self._touched: dict[Node, None] = {}
        self._walk: list[tuple[Node, float]] = []
        """Nodes to look at, with those below them up to a depth in tokens."""
        self._due: dict[Node, None] = {}
        """Ends of strides to evaluate."""

    def _touch(self, node: Node) -> None:
        """Note a node that gets or loses a place: it leaves the tree with the last one. O(1); with
        states O(stride).
        """
        if self._reach or node.depth % self._stride_tokens == 0:
            self._touched[node] = None
        if self.has_states:  # they hang on nodes behind a stride's end, and count there
            above = node if node.depth % self._stride_tokens else node.parent
            while above is not None and above.depth % self._stride_tokens:
                above = above.parent
            if above is not None:
                self._touched[above] = None

    def _step(self, changed: dict[_Stride, None]) -> int:
        """Look at one node. Return what that counts; 0 where there is none."""
        if self._due:
            node = next(iter(self._due))
            del self._due[node]
            self._evaluate(node, changed)
            return EVALUATED
        if self._walk:
            node, depth = self._walk.pop()
            if node.parent is None and node.run:
                return 1  # it has left since, and what was below it
            self._walk += [(one, depth) for one in node.children.values() if one.depth <= depth]
        elif self._touched:
            node = next(iter(self._touched))
            del self._touched[node]
            if self._reach and node.parent is not None:
                depth = node.depth + self._reach
                self._walk += [(one, depth) for one in node.children.values()]
        else:
            return 0
        if node.depth and node.depth % self._stride_tokens == 0:
            self._due[node] = None
        return 1

    def _evaluate(self, node: Node, changed: dict[_Stride, None]) -> None:
        if node.parent is not None:
            stride = self._stride_of(node)
            stride.now = self._levels(node)
        else:
            left = self._of_node.pop(node, None)
            if left is None or left.node is not node:
                return  # never told, or the stride ends with a newer node
            stride = left
            stride.node, stride.now = None, 0
        changed[stride] = None

    def _stride_of(self, node: Node) -> _Stride:
        """Return the stride that a node ends; those above it are made too. O(1) if these exist."""
        missing: list[Node] = []
        above: Node | None = node
        blocks = self._stride_tokens // self._windows.block_size
        while above is not None and above.run and above not in self._of_node:
            missing.append(above)
            above = above.ancestor(blocks)
        before = None if above is None else self._of_node.get(above)
        digest = b"" if before is None else before.digest
        key = stride_key(node.namespace) if before is None else before.key
        for end in reversed(missing):
            runs = [one.run for one in islice(upward(end), blocks)]
            tokens = [token for run in reversed(runs) for token in run]
            [digest] = chain_strides(key, digest, tokens, self._stride_tokens)
            stride = self._strides.get(digest)
            if stride is None:
                stride = self._strides[digest] = _Stride(digest, key, end)
            stride.node = end
            self._of_node[end] = stride
        return self._of_node[node]

    def _levels(self, node: Node) -> int:
        """Return the places where the stride that a node ends is present."""
        if self.has_states:
            return ON_DEVICE if self._has_state(node) else 0
        levels = ON_DEVICE if node.block >= 0 and self._stands(node) else 0
        return levels | (BELOW if node.is_copied and self._is_kept(node) else 0)

    def _stands(self, node: Node) -> bool:
        """Return whether the windows before a node's end are on the device. O(blocks of these)."""
        firsts = self._first_reads(node)
        index = node.depth // self._windows.block_size - 1
        for one in upward(node) if firsts else ():
            beside = one.beside
            for group, first in enumerate(firsts):
                if index >= first and (beside is None or beside[group] is None):
                    return False
            if index <= min(firsts):
                break
            index -= 1
        return True

    def _is_kept(self, node: Node) -> bool:
        """Return whether the copies of the windows before a node's end have the blocks of all
        groups. O(these)."""
        firsts = self._first_reads(node)
        if not firsts:
            return True
        runs = node.depth // self._windows.block_size - min(firsts)
        return all(
            one.is_copied and one.places[0].has_windows for one in islice(upward(node), runs)
        )

    def _first_reads(self, node: Node) -> list[int]:
        """Return the first run that a query behind a node reads, by window group."""
        groups = range(len(self._windows.windows))
        return [self._windows.first_read(group, node.depth) for group in groups]

    def _has_state(self, end: Node) -> bool:
        """Return whether a state that a match reaches stands at a node's end, or before the next
        stride does. O(nodes there).
        """
        stack, depth = [end], end.depth + self._stride_tokens
        while stack:
            node = stack.pop()
            if any(state.is_whole and _is_reached(node, state.run) for state in node.states or ()):
                return True
            stack += [one for one in node.children.values() if one.depth < depth]
        return False


def _is_reached(node: Node, run: Run) -> bool:
    """Return whether the tokens behind a node are on the device."""
    here = (one.run for one in node.children.values() if one.block >= 0)
    return not run or any(one[: len(run)] == run for one in here)
