"""Conversations that come back through a small pool are loaded, not computed again."""

from __future__ import annotations

from engine.levels.offloading import UNPROVEN_MAX
from engine.statistics import LevelStats
from tests.bench.returning import Returning, conversations
from tests.paced_engine import Speeds

NUMBER, TOKENS, AT_ONCE, ROUNDS = 24, 1024, 8, 3
POOL = NUMBER * TOKENS // 16 * 3 // 8


def rounds(offloads_max: int = 512) -> tuple[list[int], LevelStats]:
    """Return the prompt tokens that each round computes, and the statistics of host memory."""
    engine = Returning(Speeds(), has_levels=True, blocks=POOL, offloads_max=offloads_max)
    prompts, computed = conversations(NUMBER, TOKENS), []
    assert engine.levels is not None
    for _ in range(ROUNDS):
        before = engine.runner.prompt_tokens
        for start in range(0, NUMBER, AT_ONCE):
            engine.ask(prompts[start : start + AT_ONCE])
        engine.settle()
        computed.append(engine.runner.prompt_tokens - before)
    return computed, engine.levels.stats()[0]


def test_conversations_that_come_back_are_loaded() -> None:
    """A step with prompts takes longer than a load, and much longer than a turn."""
    computed, host = rounds()

    assert computed[0] == NUMBER * TOKENS
    assert max(computed[2:]) < NUMBER * TOKENS / 8
    assert "paused" not in host.not_loaded
    assert host.uncopied_total < POOL / 4


def test_few_copies_a_turn_leave_most_blocks_without_one() -> None:
    """A planted fault: what was evicted without a copy is computed again, and is counted."""
    computed, host = rounds(offloads_max=4)

    assert computed[1] > NUMBER * TOKENS / 2
    assert host.uncopied_total > POOL


def test_few_blocks_are_copied_at_once_until_copies_come_back() -> None:
    """Where nothing comes back, copies take time from the prompts that fill the blocks."""
    engine = Returning(Speeds(), has_levels=True, blocks=4 * POOL)
    prompts, longest = conversations(4 * NUMBER, TOKENS), []

    for _ in range(2):
        for start in range(0, len(prompts), AT_ONCE):
            engine.ask(prompts[start : start + AT_ONCE])
        engine.settle()
        longest.append(engine.transfer.longest["offload"])

    assert longest[0] == UNPROVEN_MAX
    assert longest[1] > UNPROVEN_MAX
