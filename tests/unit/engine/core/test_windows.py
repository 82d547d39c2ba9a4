"""An engine with window groups, over the token oracle, which reads the window in each group."""

from __future__ import annotations

import pytest

from engine.api import Peek, Started
from tests.unit.engine.recorded_engine import RecordedWorld, tokens

WINDOWS = (8, 12)


def conversation(world: RecordedWorld, turns: int) -> int:
    """Run a conversation of `turns` requests; return the cached tokens of all."""
    prompt = tokens(30)
    for turn in range(turns):
        name = f"turn{turn}"
        world.ask(name, prompt, max_tokens=10)
        world.settle()
        prompt = (*prompt, *world.streams[name].outputs[0], 0, 1, 1, 0, 1)
    return sum(world.cached(f"turn{turn}") for turn in range(turns))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_conversation_hits_as_much_with_windows_as_without(depth: int) -> None:
    """Each turn resumes at the end of the answer before it, though windows keep a few blocks."""
    plain = RecordedWorld(blocks=64, depth=depth)
    windowed = RecordedWorld(blocks=192, depth=depth, windows=WINDOWS)

    assert conversation(windowed, 8) == conversation(plain, 8)
    assert windowed.core.stats().resume_gap_tokens_total == 0


def test_window_blocks_are_evicted_before_a_conversation_is_lost() -> None:
    """A pool that holds group 0 and the windows, and no more, gives the same hits."""
    plain = RecordedWorld(blocks=64)
    tight = RecordedWorld(blocks=64, windows=WINDOWS)

    assert conversation(tight, 8) == conversation(plain, 8)
    assert tight.core.stats().evicted_blocks_total > 0


def test_a_follower_resumes_where_its_leader_passed_by() -> None:
    """The leader keeps the window where the two prompts part, although its own went on."""
    world = RecordedWorld(blocks=192, windows=WINDOWS)
    shared = tokens(24)
    world.ask("first", (*shared, *tokens(60, 1)), max_tokens=1)
    world.ask("second", (*shared, *tokens(20, 2)), max_tokens=1)
    world.settle()

    assert world.cached("second") == 24
    assert world.runner.computed_tokens == 84 + 20


def test_tokens_whose_window_is_gone_are_told() -> None:
    """A prompt that parts in the middle of an old one finds group 0 alone, and says so."""
    world = RecordedWorld(blocks=60, windows=WINDOWS)
    world.ask("old", tokens(64), max_tokens=1)
    world.settle()
    for number in (1, 2):
        world.ask(f"new{number}", tokens(40, number), max_tokens=1)
        world.settle()
    prompt = (*tokens(32), 1, 1, 1)
    peeked = world.core.peek(Peek(1, b"n", prompt))
    assert (peeked.cached_tokens, peeked.resume_gap_tokens) == (0, 32)

    before = world.core.stats().resume_gap_tokens_total
    world.ask("part", prompt, max_tokens=1)
    started = world.streams["part"]
    world.settle()

    assert isinstance(started.started, Started)
    assert started.started.resume_gap_tokens == 32
    assert world.core.stats().resume_gap_tokens_total - before == 32
    assert world.core.peek(Peek(1, b"n", (*tokens(32), 0))).cached_tokens == 32


def test_a_pool_for_one_sequence_preempts_and_recomputes() -> None:
    """Two long answers that do not fit together both end right, with all blocks counted."""
    world = RecordedWorld(blocks=40, windows=(8,))
    world.ask("first", tokens(40), max_tokens=40)
    world.ask("second", tokens(40, 3), max_tokens=40)
    world.settle()

    assert world.endings == {"done": 2}


def test_a_request_beyond_the_room_for_windows_is_refused() -> None:
    """The room counts the blocks that window groups keep beside group 0's."""
    world = RecordedWorld(blocks=16, windows=(8, 8))
    room = 4 * 8  # eight runs of group 0, and four blocks of each window
    world.ask("fits", tokens(room - 4), max_tokens=4)
    world.ask("more", tokens(room - 4), max_tokens=5)
    world.settle()

    assert world.endings == {"done": 1, "refused kv_exceeded": 1}
