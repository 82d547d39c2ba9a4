"""Window groups: the KV groups whose layers read only the last tokens, beside group 0.

Group 0 keeps every token. A window group keeps those that a query still reads, so its blocks may
leave a node of the tree before the node does. This module says which blocks a window needs, where a
hit stands (rule *Window*), and how many blocks a sequence holds. It knows no pool and no clock.
The other modules of the cache call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.api import BlockWindow, most_runs
from engine.cache.tree.prefix_tree import Node, TreeMatch

HOLE: Final = -1
"""The entry of a block table whose block the sequence has let go. It is never read."""


class WindowGroups:
    """The geometry of the window groups: a query at position p reads the keys in (p - window, p].

    `windows`: the tokens of each group's window, for the groups beside group 0; empty for a model
    with one group. `groups`: how many blocks a run of `block_size` tokens takes.
    """

    def __init__(self, windows: Sequence[int], block_size: int) -> None:
        """Raise ValueError for a window below two tokens."""
        if any(window < 2 for window in windows):
            raise ValueError(f"windows of {tuple(windows)} tokens; expected at least 2 each")
        self.windows = tuple(windows)
        self.block_size = block_size
        self.groups = 1 + len(self.windows)

    def first_kept(self, group: int, tokens: int) -> int:
        """Return the index of the first block that a sequence of `tokens` tokens keeps.

        It keeps what its next query reads, and what the first query of its last block read, so that
        a hit anywhere in that block stands. O(1).
        """
        start = tokens // self.block_size * self.block_size
        return max(0, start - self.windows[group] + 1) // self.block_size

    def first_read(self, group: int, tokens: int) -> int:
        """Return the index of the first block that a query at position `tokens` reads. O(1)."""
        return max(0, tokens - self.windows[group] + 1) // self.block_size

    def standing(self, path: Sequence[Node], tokens: int) -> int:
        """Return how many of `tokens` matched tokens stand: all, or a number of whole blocks.

        `path`: the nodes that hold them. O(blocks of the windows) where all stand, and at most
        O(path).
        """
        group = 0
        while group < len(self.windows) and tokens > 0:
            last = (tokens - 1) // self.block_size
            for index in range(last, self.first_read(group, tokens) - 1, -1):
                beside = path[index].beside
                if beside is None or beside[group] is None:
                    tokens, group = index * self.block_size, -1
                    break
            group += 1
        return tokens

    def cut(self, found: TreeMatch) -> TreeMatch:
        """Return the deepest hit of a match that stands in every window group (rule *Window*)."""
        partial = found.partial_node
        path = found.path if partial is None else [*found.path, partial]
        tokens = self.standing(path, found.cached_tokens)
        if tokens == found.cached_tokens:
            return found
        hit = TreeMatch(found.tree, found.path[: tokens // self.block_size], None, 0)
        hit.matched_tokens, hit.changes = found.matched_tokens, found.changes
        return hit

    def blocks_of(
        self, tokens: int, step_tokens: int = 1, attention: BlockWindow | None = None
    ) -> int:
        """Return the most blocks that a sequence of `tokens` holds while its tokens are computed
        `step_tokens` at a time, under its `attention` window if it has one. O(groups).
        """
        runs, size = -(-tokens // self.block_size), self.block_size
        whole = runs
        if attention is not None:
            whole = attention.blocks_of(runs, -(-step_tokens // size))
        return whole + sum(min(runs, most_runs(w, size, step_tokens)) for w in self.windows)
