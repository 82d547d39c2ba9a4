"""Waiting for a twin that computes the same prefix, and never for long (rule 11)."""

from __future__ import annotations

import pytest

import engine.scheduler.prefix_sharing
from engine.scheduler.sequence import Sequence, common_tokens
from tests.unit.engine.recorded_engine import Watched, tokens


def test_a_prefix_in_the_making_is_computed_once() -> None:
    """Rule 11. The second's hit counts as cached, and costs the engine its own tokens only."""
    world = Watched()
    shared = tokens(24)
    world.ask("first", (*shared, 0, 1), max_tokens=1)
    world.ask("second", (*shared, 1, 0), max_tokens=1)
    world.settle()

    assert world.cached("first") == 0
    assert world.cached("second") == 24
    assert world.runner.computed_tokens == 26 + 2


def test_prompts_that_part_at_once_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 that had one prefix were 32,640 comparisons of all of it, which took most of a second."""
    compared: list[int] = []

    def common(a: Sequence, b: Sequence, size: int) -> int:
        compared.append(a.sequence_id)
        return common_tokens(a, b, size)

    monkeypatch.setattr(engine.scheduler.prefix_sharing, "common_tokens", common)
    world = Watched(sequences_max=16, prefill_chunk_tokens_max=4)
    shared = tokens(24)
    world.ask("first", shared, max_tokens=1)
    world.settle()
    for index in range(12):
        world.ask(f"r{index}", shared + tokens(12, index), max_tokens=1)
    world.settle()

    assert min(world.cached(f"r{index}") for index in range(12)) == 24
    assert not compared


def test_nobody_waits_for_another_namespace() -> None:
    """What one tenant computes another may not even wait for: time tells too."""
    world = Watched()
    world.ask("first", tokens(24), max_tokens=1)
    world.ask("second", tokens(24), max_tokens=1, namespace=b"m")
    world.settle()

    assert world.first_step_of("second") == 0
    assert world.cached("second") == 0


def test_nobody_waits_for_less_than_a_block_more_than_it_has() -> None:
    """Three common tokens of four are not worth a wait."""
    world = Watched()
    world.ask("first", (0, 0, 0, 1, 1), max_tokens=1)
    world.ask("second", (0, 0, 0, 0, 1), max_tokens=1)
    world.settle()

    assert world.first_step_of("second") == 0


def test_who_waits_goes_on_when_the_other_leaves() -> None:
    """Cancelled in the middle of its prompt: what it had computed is found."""
    world = Watched()
    world.ask("first", tokens(40), max_tokens=1)
    world.ask("second", tokens(40), max_tokens=1)
    world.step()
    world.step()
    world.cancel("first")
    world.settle()

    assert world.cached("second") == 16


def test_who_waits_goes_on_when_the_other_gets_no_turn() -> None:
    """A twin that is kept from computing must not keep its follower waiting with it."""
    world = Watched(step_tokens_max=8, sequences_max=16)
    world.ask("twin", tokens(40), max_tokens=1)
    world.step()
    world.ask("waits", tokens(40), max_tokens=1, priority=1)
    world.step()
    held = [
        s.parent.request.request_id for s in world.core.scheduler.prefix_sharing.waiting.values()
    ]
    for index in range(1, 9):
        world.ask(f"busy{index}", tokens(40, index), max_tokens=1, priority=2)
    for _ in range(10):
        world.step()

    assert held == ["waits"]
    assert "twin" not in {name for row in world.rows[-10:] for name in row}
    assert not world.core.scheduler.prefix_sharing.waiting
    world.settle()


def test_cancelling_who_waits_leaves_the_other_alone() -> None:
    """And nothing of it stays behind."""
    world = Watched()
    world.ask("first", tokens(24), max_tokens=1)
    world.ask("second", tokens(24), max_tokens=1)
    world.step()
    world.cancel("second")
    world.settle()

    assert "second" not in {name for row in world.rows for name in row}
    assert not world.core.scheduler.prefix_sharing.waiting
