"""The cache with window groups under hypothesis: rules *Window*, *Resume point* against a model of
present slots.

The machine is the cache machine with three KV groups: group 0, and windows of three and five tokens
over blocks of two. The shadow KV checks every slot that a query reads, in every group. The model
knows no tree search: it collects the slots that are present along a prompt, and tries every length.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from engine.api import Quota
from engine.cache import EvictionPolicy, LeastRecentlyUsed
from engine.cache.tree.prefix_tree import Node
from tests.checkers import common_prefix
from tests.fakes import FirstInFirstOut
from tests.property.machine_runs import case
from tests.property.test_cache_machine import CacheMachine
from tests.strategies import NAMESPACES, quotas

WINDOWS = (3, 5)


def longest_paths(root: Node, prompt: tuple[int, ...]) -> list[list[tuple[Node, int]]]:
    """Return the paths that hold most of `prompt`: each node with how many of its tokens match.

    Where a prompt parts from several nodes after the same token, each of them ends a path.
    """
    paths: list[list[tuple[Node, int]]] = [[]]
    node, start = root, 0
    while True:
        rest = prompt[start:]
        common = {child: common_prefix(child.run, rest) for child in node.children.values()}
        most = max(common.values(), default=0)
        if most == 0:
            return paths
        paths = [[*paths[0], (child, most)] for child, equal in common.items() if equal == most]
        if len(paths) > 1 or most < len(paths[0][-1][0].run):
            return paths
        node, start = paths[0][-1][0], start + most


def present_slots(path: list[tuple[Node, int]]) -> list[set[int]]:
    """Return the positions whose slots a path holds, for each group."""
    present: list[set[int]] = [set() for _ in range(1 + len(WINDOWS))]
    start = 0
    for node, common in path:
        positions = range(start, start + common)
        present[0].update(positions)
        for group, block in enumerate(node.beside or (), start=1):
            if block is not None:
                present[group].update(positions)
        start += common
    return present


def deepest_hit(present: list[set[int]]) -> int:
    """Return the most tokens at which a hit stands (rule *Window*), by trying every length."""
    for tokens in range(len(present[0]), 0, -1):
        needed = [range(max(0, tokens - window + 1), tokens) for window in WINDOWS]
        if all(present[group].issuperset(slots) for group, slots in enumerate(needed, start=1)):
            return tokens
    return 0


class WindowMachine(CacheMachine):
    """The cache machine with three KV groups."""

    windows = WINDOWS

    @initialize(
        blocks=st.integers(18, 48),
        size=st.just(2),
        shares=st.tuples(quotas, quotas, quotas),
        is_joint=st.booleans(),
        may_change=st.booleans(),
        policy=st.sampled_from([LeastRecentlyUsed(), FirstInFirstOut()]),
    )
    def start(
        self,
        blocks: int,
        size: int,
        shares: tuple[Quota, Quota, Quota],
        is_joint: bool,
        may_change: bool,
        policy: EvictionPolicy,
    ) -> None:
        """Make a cache; ceilings hold a few runs of three blocks."""
        wide = [
            Quota(
                floor_blocks=share.floor_blocks * 2,
                ceiling_blocks=None if share.ceiling_blocks is None else share.ceiling_blocks * 3,
                weight=share.weight,
            )
            for share in shares
        ]
        super().start(blocks, size, (wide[0], wide[1], wide[2]), is_joint, may_change, policy)

    @invariant()
    def hits_stand(self) -> None:
        """A hit is the deepest one whose slots are present, and what it lost is told (rule
        *Window*).
        """
        for writer in [*getattr(self, "past", ())][-4:]:
            for namespace in NAMESPACES:
                for prompt in ((*writer.tokens, 0), (*writer.tokens[:-2], 1)):
                    found = self.cache.peek(namespace, prompt, self.now_s)
                    root = self.cache.tree_root(namespace)
                    paths = [] if root is None else longest_paths(root, prompt[:-1])
                    slots = [present_slots(path) for path in paths] or [[set()]]
                    hits = [deepest_hit(present) for present in slots]
                    assert found.cached_tokens in hits, "the deepest hit on a longest path"
                    lost = len(slots[0][0]) - found.cached_tokens
                    assert found.resume_gap_tokens == lost, "tokens whose windows are gone"

    @invariant()
    def tables_keep_their_windows_alone(self) -> None:
        """A table holds at most the blocks of its windows, and those it is about to write."""
        for writer in getattr(self, "live", ()):
            table, kv_tokens = writer.table, writer.table.kv_tokens
            for row, first, window in zip(table.beside, table.first, WINDOWS, strict=True):
                behind = -(-kv_tokens // self.size) - first
                assert behind <= window // self.size + 2, "blocks behind the window"
                assert len(row) == len(table.blocks), "as many entries as group 0 has"


TestWindowMachine = case(WindowMachine, 50)
