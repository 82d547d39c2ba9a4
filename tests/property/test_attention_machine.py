"""Requests with and without attention windows under hypothesis, in any order (rule *Attention
window*).

The token oracle says which keys each token may read: the sinks of its request, the window before
its block, and its own block. What is computed under a window is another sequence's KV to the
oracle, so a block that reached the tree, a follower or a copy fails the run.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from msgspec.structs import replace

from engine.api import AttentionWindow, Request
from tests.property.machine_runs import case
from tests.property.test_engine_machine import QUOTAS, EngineMachine
from tests.strategies import requests

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

    @rule(request=requests(QUOTAS), is_first=st.booleans(), steps=st.integers(0, 8))
    def submit_both(self, request: Request, is_first: bool, steps: int) -> None:
        """Submit one long prompt with a window and without, some steps apart."""
        tokens = (request.tokens * 14)[:14]
        whole = replace(request, tokens=tokens, prompt_logprobs=None, grammar=None, deadline_s=None)
        narrow = replace(whole, attention=AttentionWindow(self.world.block_size, 0))
        for one in (narrow, whole) if is_first else (whole, narrow):
            super().submit(one)
            for _ in range(steps):
                self.world.step()

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
            window = asked.in_blocks(size)
            behind = table.kv_tokens // size - window.window
            if behind >= window.shared_blocks:
                assert table.holes == behind - window.sinks, "blocks behind an attention window"
                assert table.blocks.count(-1) == table.holes, "entries that are holes"
            committed = min(table.committed * size, len(sequence.tokens))
            assert committed <= asked.shared_tokens(size), "committed beyond what it shares"


class AttentionWindowGroupMachine(AttentionMachine):
    """The same with a window group, whose window of three tokens is no wider than a request's."""

    windows = (3,)


TestAttentionMachine = case(AttentionMachine)
TestAttentionWindowGroupMachine = case(AttentionWindowGroupMachine)
