"""A crowded pool with room enough below: what was preempted is loaded, and not computed again."""

from __future__ import annotations

import random

import pytest

from engine.api import CacheGrant, Request
from engine.config import EngineConfig
from engine.scheduler.scheduler import Scheduler
from tests.bench.crowding import GREEDY, host_of, words, world

BLOCKS, REQUESTS = 24, 24


def computed_again(seed: int) -> float:
    """Return the part of all computed tokens that was computed before; as the bench, with a host
    level in which nothing is dropped.
    """
    chance = random.Random(seed)
    config = EngineConfig(step_tokens_max=64, prefill_chunk_tokens_max=32, sequences_max=8)
    crowd = world(BLOCKS, config, make_levels=host_of(40 * BLOCKS))
    for index in range(REQUESTS):
        tokens = words(chance, chance.randrange(20, 60))
        outputs, grant = chance.randrange(4, 60), CacheGrant(bytes([index % 4]))
        crowd.submit(Request(f"r{index}", tokens, outputs, grant, GREEDY))
    crowd.settle()
    used = [one.finished.usage for one in crowd.streams.values() if one.finished is not None]
    return sum(usage.recomputed_tokens for usage in used) / crowd.runner.computed_tokens


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_load_waits_for_blocks_that_moves_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that runs alone is never held back; its load did not fit and was given up."""
    share = computed_again(2)
    monkeypatch.setattr(Scheduler, "_waits_for_moves", lambda *_: False)
    without = computed_again(2)

    assert share < 0.02
    assert without > 2 * share
