"""The state manager: where the recurrent states of sequences are kept, and what resumes there.

A model with recurrent layers can resume a prefix only where a state of it was kept (rule *State*).
A kept state takes blocks of the pool, like window blocks: they are cached, pinned, evicted and
counted as any others. It reads no clock, and allocates through what it is given. Only
`prefix_cache` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from engine.cache.block_promises import BlockPromises
from engine.cache.blocks.block_manager import BlockManager
from engine.cache.blocks.block_table import BlockTable
from engine.cache.events import PromiseLost
from engine.cache.tree.accounts import NamespaceAccount
from engine.cache.tree.prefix_tree import Node, State, TreeMatch

STATES_MAX: Final = 4
"""Most states that a prompt keeps."""
SPACING_SHARE: Final = 48
SPACING_LEAST: Final = 32
SPACING_MOST: Final = 256
"""Tokens between two states of a sequence: that part of those whose KV has the room of a state. A
nearer one would save little, and take its room from what others find.
"""

Tell = Callable[[PromiseLost], None]
Allocate = Callable[[NamespaceAccount, int, float], list[int] | None]


class StateManager:
    """The states of a model that takes `blocks` blocks for one; 0: it has none."""

    def __init__(
        self, manager: BlockManager, promises: BlockPromises, allocate: Allocate, tell: Tell,
        blocks: int, spacing: int | None,
    ) -> None:  # fmt: skip
        """`tell` is called with the promises that are lost. `spacing`: tokens within which a
        sequence keeps no second state; None: by the room that one takes."""
        self._manager, self._promises, self._allocate = manager, promises, allocate
        self._tell = tell
        self.blocks = blocks
        share = blocks * manager.block_size // SPACING_SHARE
        by_room = min(SPACING_MOST, max(SPACING_LEAST, share))
        self._spacing = by_room if spacing is None else spacing
        manager.state_blocks = blocks
        manager.strides.has_states = bool(blocks)

    def cut(self, found: TreeMatch) -> TreeMatch:
        """Return the deepest hit of a match at which a state stands. O(path)."""
        nodes = found.path if found.partial_node is None else [*found.path, found.partial_node]
        common = found.partial_tokens
        for depth in range(len(found.path), 0, -1):
            behind = nodes[depth] if depth < len(nodes) else None
            tokens = () if behind is None else behind.run[:common]
            if state := self._deepest(found.path[depth - 1], tokens):
                partial = behind if state.run else None
                hit = TreeMatch(found.tree, found.path[:depth], partial, len(state.run))
                hit.state = state
                break
            common = self._manager.block_size
        else:
            hit = TreeMatch(found.tree, [], None, 0)
        hit.matched_tokens, hit.changes = found.matched_tokens, found.changes
        return hit

    def pin(self, table: BlockTable, found: TreeMatch, now_s: float) -> None:
        """Pin the state of a hit until its sequence's first row is launched. O(blocks of it)."""
        if found.state is None:
            return
        table.state_tokens = found.cached_tokens
        table.resumed = [*found.state.blocks]
        for block in table.resumed:
            self._manager.pin(block)
            block.resumed_at_s = now_s
            table.restores.append(block.block)
        self._promises.renew_on_read(table, table.resumed, now_s)

    def take_restores(self, table: BlockTable) -> tuple[int, ...]:
        """Return the blocks of the state that a sequence begins from, and unpin them. O(these)."""
        blocks, table.restores = tuple(table.restores), []
        for block in blocks:
            self._manager.unpin(block)
        return blocks

    def add_marks(self, table: BlockTable, positions: Sequence[int]) -> None:
        """Note the positions behind what is computed at which to keep a state: those that are
        promised, then the others, the ones of most worth first. O(these).
        """
        ahead = {at for at in table.state_promises if at > table.kv_tokens}
        table.marks = sorted(ahead.union(table.marks))
        for position in positions:
            near = any(abs(position - mark) < self._spacing for mark in table.marks)
            is_far = position - table.kv_tokens >= self._spacing and not near
            if is_far and position >= self._manager.block_size and len(table.marks) < STATES_MAX:
                table.marks = sorted([*table.marks, position])

    def next_mark(self, table: BlockTable, start: int) -> int | None:
        """Return the first position behind `start` at which a state is to be kept. O(1)."""
        if not self.blocks:
            return None
        return next((mark for mark in table.marks if mark > start), None)

    def keep(self, table: BlockTable, position: int, now_s: float) -> tuple[int, ...]:
        """Return blocks for the state at `position`, where a step that is about to be launched
        ends; none if no state is wanted there, or there is no room: a promise of it is lost then.
        O(blocks).
        """
        if not self.blocks or position not in table.marks or table.is_erased:
            return ()
        table.marks.remove(position)
        blocks = self._allocate(table.account, self.blocks, now_s)
        if blocks is None:
            if lost := table.state_promises.pop(position, 0):
                table.reserved -= lost
                table.account.add_reserved(-lost)
                self._tell(PromiseLost(table.namespace, lost))
            return ()
        table.kept[position] = blocks
        table.state_tokens = position
        return tuple(blocks)

    def keep_last(self, table: BlockTable, position: int, now_s: float) -> tuple[int, ...]:
        """Return blocks for the state at `position` near the end of a table whose use ends, where
        the next step begins by copying it; none if no state is wanted there, or there is no room.
        O(blocks).
        """
        is_far = table.kv_tokens - self._spacing >= table.state_tokens
        if not self.blocks or not is_far or position <= table.state_tokens:
            return ()
        table.marks = [position]
        return self.keep(table, position, now_s)

    def commit(
        self, table: BlockTable, tokens: Sequence[int], now_s: float
    ) -> list[tuple[int, State]]:
        """Put the states of a table that are written into the tree, if it may commit; else free
        their blocks. Return those that stand there now, by position. O(1) without any.
        """
        size, standing = self._manager.block_size, list[tuple[int, State]]()
        for position in [at for at in table.kept if at <= table.kv_tokens]:
            blocks = table.kept.pop(position)
            steps = table.committed - position // size
            node = table.node.ancestor(steps) if steps >= 0 else None
            run = tuple(tokens[position // size * size : position])
            if not table.is_erased and node is not None and node.parent and node.block >= 0:
                state = next((s for s in node.states or () if s.run == run and s.is_whole), None)
                if state is None:
                    state = self._manager.add_state(table.account, node, run, blocks, now_s)
                standing.append((position, state))
            self._manager.unpin_all(table.account, blocks)
        return standing

    def drop(self, table: BlockTable) -> None:
        """Let go what a table holds of states. O(blocks)."""
        self.take_restores(table)
        for blocks in table.kept.values():
            self._manager.unpin_all(table.account, blocks)
        table.kept, table.marks = {}, []

    def _deepest(self, node: Node, tokens: tuple[int, ...]) -> State | None:
        """Return the state behind a node whose tokens are the most of those that follow."""
        best: State | None = None
        for state in node.states or ():
            is_here = state.is_whole and state.run == tokens[: len(state.run)]
            if is_here and (best is None or len(state.run) > len(best.run)):
                best = state
        return best
