"""Requests with and without attention windows under hypothesis, in any order (rules 43 to 45).

The token oracle says which keys each token may read: the sinks of its request, the window before
its block, and its own block. What is computed under a window is another sequence's KV to the
oracle, so a block that reached the tree, a follower or a copy fails the run.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import invariant
from msgspec.structs import replace

from engine.api import AttentionWindow, Request
from engine.plan import block_window
from tests.property.test_engine_machine import EngineMachine

CHOICES = ((1, 0), (1, 1), (2, 1), (1, 2))
"""Blocks of the window, and of sinks, that requests ask for in turn."""


class AttentionMachine(EngineMachine):
    """The engine machine, in which two of three requests have an attention window."""

    def submit(self, request: Request) -> None:
        """Submit a request, under a window or not by its turn."""
        turn, size = self.count, self.world.block_size
        if turn % 3:
            window, sinks = CHOICES[turn // 3 % len(CHOICES)]
            request = replace(request, attention=AttentionWindow(window * size, sinks * size))
        super().submit(request)

    @invariant()
    def tables_keep_their_windows_alone(self) -> None:
        """A table has let go what its next query does not read, once that is behind its shared
        blocks, and has committed nothing else."""
        if not hasattr(self, "world"):
            return
        core, size = self.world.core, self.world.block_size
        for sequence in core.scheduler.running:
            asked, table = sequence.parent.request.attention, sequence.table
            if asked is None or table is None:
                continue
            window = block_window(asked, size)
            behind = table.kv_tokens // size - window.window
            if behind >= window.shared_blocks:
                assert table.holes == behind - window.sinks, "blocks behind an attention window"
                assert table.held_blocks == len(table.blocks) - table.holes, "what it holds"
            committed = min(table.committed * size, len(sequence.tokens))
            assert committed <= asked.shared_tokens(size), "committed beyond what it shares"


TestAttentionMachine = AttentionMachine.TestCase
TestAttentionMachine.settings = settings(stateful_step_count=40)
