"""Prefix sharing: waiting for a leader that computes the same prefix, for a bounded time
(rule *Single computation*).
"""

from __future__ import annotations

import pytest

import engine.scheduler.prefix_sharing
from engine.scheduler.sequence import Sequence, common_tokens
from tests.unit.engine.recorded_engine import RecordedWorld, tokens


def test_a_prefix_in_the_making_is_computed_once() -> None:
    """Rule *Single computation*. The second request's hit counts as cached."""
    world = RecordedWorld()
    shared = tokens(24)
    world.ask("first", (*shared, 0, 1), max_tokens=1)
    world.ask("second", (*shared, 1, 0), max_tokens=1)
    world.settle()

    assert world.cached("first") == 0
    assert world.cached("second") == 24
    assert world.runner.computed_tokens == 26 + 2


def test_prompts_that_differ_early_are_not_compared_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """256 prompts with one prefix were 32,640 full comparisons, most of a second."""
    compared: list[int] = []

    def common(a: Sequence, b: Sequence, size: int) -> int:
        compared.append(a.sequence_id)
        return common_tokens(a, b, size)

    monkeypatch.setattr(engine.scheduler.prefix_sharing, "common_tokens", common)
    world = RecordedWorld(sequences_max=16, prefill_chunk_tokens_max=4)
    shared = tokens(24)
    world.ask("first", shared, max_tokens=1)
    world.settle()
    for index in range(12):
        world.ask(f"r{index}", shared + tokens(12, index), max_tokens=1)
    world.settle()

    assert min(world.cached(f"r{index}") for index in range(12)) == 24
    assert len(compared) < 12 * 11 / 2, "each was compared with each"


def test_a_request_never_waits_for_another_namespace() -> None:
    """The waiting time would reveal another tenant's prompt."""
    world = RecordedWorld()
    world.ask("first", tokens(24), max_tokens=1)
    world.ask("second", tokens(24), max_tokens=1, namespace=b"m")
    world.settle()

    assert world.first_step_of("second") == 0
    assert world.cached("second") == 0


def test_a_request_waits_only_for_a_whole_further_block() -> None:
    """Three common tokens of four are not worth a wait."""
    world = RecordedWorld()
    world.ask("first", (0, 0, 0, 1, 1), max_tokens=1)
    world.ask("second", (0, 0, 0, 0, 1), max_tokens=1)
    world.settle()

    assert world.first_step_of("second") == 0


def test_followers_continue_when_their_leader_is_cancelled() -> None:
    """They find the blocks that the leader had computed."""
    world = RecordedWorld()
    world.ask("first", tokens(40), max_tokens=1)
    world.ask("second", tokens(40), max_tokens=1)
    world.step()
    world.step()
    world.cancel("first")
    world.settle()

    assert world.cached("second") == 16


def test_followers_continue_when_their_leader_stalls() -> None:
    world = RecordedWorld(step_tokens_max=8, sequences_max=16)
    world.ask("twin", tokens(40), max_tokens=1)
    world.step()
    world.ask("waits", tokens(40), max_tokens=1, priority=1)
    world.step()
    held = [
        s.parent.request.request_id for s in world.core.scheduler.prefix_sharing.waiting.values()
    ]
    for index in range(1, 9):
        world.ask(f"busy{index}", tokens(40, index), max_tokens=1, priority=2)
    world.step_on(10)

    assert held == ["waits"]
    assert "twin" not in {name for row in world.rows[-10:] for name in row}
    assert not world.core.scheduler.prefix_sharing.waiting
    world.settle()


def test_cancelling_a_follower_keeps_its_leader_running() -> None:
    world = RecordedWorld()
    world.ask("first", tokens(24), max_tokens=1)
    world.ask("second", tokens(24), max_tokens=1)
    world.step()
    world.cancel("second")
    world.settle()

    assert "second" not in {name for row in world.rows for name in row}
    assert not world.core.scheduler.prefix_sharing.waiting
