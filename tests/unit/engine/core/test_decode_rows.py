"""Rows that decode: how many there are, and what a step costs for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import CacheGrant, Request, Sampling
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.plan import StepPlan
from tests.checkers import World
from tests.examples import examples

BLOCK_SIZE = 4


def ask(name: str, max_tokens: int, prompt: tuple[int, ...]) -> Request:
    return Request(name, prompt, max_tokens, CacheGrant(name.encode()), Sampling(seed=1))


@settings(max_examples=examples(40))
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5),
    st.sampled_from([1, 2]),
)
def test_each_token_but_the_last_is_computed_once(sizes: list[tuple[int, int]], depth: int) -> None:
    """A row behind the last of `max_tokens` would cost a row of the device and no wrong token."""
    config = EngineConfig(step_tokens_max=16, sequences_max=8)
    world = World(config, blocks=64, block_size=BLOCK_SIZE, depth=depth)
    computed = 0
    launch = world.runner.launch

    def count(plan: StepPlan) -> None:
        nonlocal computed
        computed += sum(row.count for row in plan.rows)
        launch(plan)

    world.runner.launch = count  # type: ignore[method-assign]
    for number, (prompt, output) in enumerate(sizes):
        world.submit(ask(str(number), output, (1,) * prompt))
    world.settle()

    assert computed == sum(prompt + max(0, output - 1) for prompt, output in sizes)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_cache_is_asked_only_where_a_block_fills(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call for each row and step would be a third of a large batch's step."""
    calls = dict.fromkeys(("grow", "commit"), 0)

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(PrefixCache, name)

        def call(*args: Any, **more: Any) -> Any:
            calls[name] += 1
            return original(*args, **more)

        return call

    config = EngineConfig(step_tokens_max=64, sequences_max=8)
    world = World(config, blocks=64, block_size=BLOCK_SIZE, depth=depth, context_tokens=40)
    for number in range(4):
        world.submit(ask(str(number), 30, (number % 2, number // 2, 1, 1, 1)))
    for _ in range(6):
        world.step()
    for name in calls:
        monkeypatch.setattr(PrefixCache, name, counted(name))
    for _ in range(3 * BLOCK_SIZE):
        world.step()

    for name, count in calls.items():
        assert 0 < count < 4 * 3 * BLOCK_SIZE / 2, f"{name} is called for each row and step"
    monkeypatch.undo()
    world.settle()
