"""Faults planted in attention windows, which their machine must find."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from engine.api import BlockWindow
from engine.cache import PrefixCache
from engine.cache.attention_windows import AttentionWindows
from engine.core.planner import StepPlanner
from engine.scheduler.sequence import Sequence
from tests.property.planted import Plant, planted
from tests.property.test_attention_machine import AttentionMachine


def block_of_the_window_left_out(original: Any) -> Any:
    """Rows begin to read a block too late."""
    return lambda self, block: original(self, block + 1)


def window_ignored(original: Any) -> Any:
    """Rows read all tokens before them."""

    def plan(self: Any, *args: Any) -> Any:
        planned, in_flight = original(self, *args)
        rows = tuple(replace(row, attention=None) for row in planned.rows)
        return replace(planned, rows=rows), in_flight

    return plan


def finds_beyond_its_window(original: Any) -> Any:
    """A request is given KV that others computed with other keys."""
    return lambda self, block_size: self.tokens


def block_let_go_too_early(original: Any) -> Any:
    """A block goes that the next query reads."""

    def advance(self: Any, table: Any, window: Any, now_s: float) -> None:
        original(self, table, replace(window, window=max(0, window.window - 1)), now_s)

    return advance


def never_let_go(original: Any) -> Any:
    """A sequence keeps all that it computes."""
    return lambda self, table, window, now_s: None


def commits_beyond_its_window(original: Any) -> Any:
    """Blocks computed under a window enter the tree as if they were any other's."""

    def commit(self: Any, table: Any, tokens: Any, kv_tokens: int, now_s: float) -> None:
        table.attention, kept = None, table.attention
        original(self, table, tokens, kv_tokens, now_s)
        table.attention = kept

    return commit


@pytest.mark.slow
@planted(
    Plant(AttentionMachine, BlockWindow, "first_read", block_of_the_window_left_out),
    Plant(AttentionMachine, StepPlanner, "plan", window_ignored),
    Plant(AttentionMachine, Sequence, "findable_tokens", finds_beyond_its_window, seed=5),
    Plant(AttentionMachine, AttentionWindows, "advance", block_let_go_too_early),
    Plant(AttentionMachine, AttentionWindows, "advance", never_let_go),
    Plant(AttentionMachine, PrefixCache, "commit", commits_beyond_its_window),
)
def test_a_planted_attention_fault_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that misses this fault proves nothing when it passes."""
    plant.check(monkeypatch)
