"""Whole lives of an engine, each from one seed. `--sim-seed N` runs one of them again."""

from __future__ import annotations

import pytest

from tests.sim.life import LeveledLife, Life


@pytest.mark.sim
def test_an_engine_survives_any_sequence_of_events(sim_seed: int) -> None:
    """Arrivals, cancels, clock jumps, a full pool, expiring leases, broken steps and restarts: no
    block is lost, no output depends on other requests, and every request ends.
    """
    life = Life(sim_seed)

    try:
        world = life.live(1000)
    except Exception as error:
        error.add_note(f"replay it with: --sim-seed {sim_seed}")
        raise

    assert world.endings["done"] > 20
    assert world.cached_tokens > 0


@pytest.mark.sim
def test_an_engine_with_levels_survives_any_sequence_of_events(sim_seed: int) -> None:
    """Host memory and disk that are fast, slow, failing or away: every answer is the one from
    nothing, nothing waits for ever, and at rest no block is held by a move.
    """
    life = LeveledLife(sim_seed)

    try:
        world = life.live(600)
    except Exception as error:
        error.add_note(f"replay it with: --sim-seed {sim_seed}")
        raise

    assert world.endings["done"] > 10


def test_a_promise_larger_than_host_memory_does_not_keep_an_engine_busy() -> None:
    """Its next copies took the place of the one they hang on, and began again for ever."""
    LeveledLife(8000).live(600)
