"""Sequences that decode plainly: their rows are planned and committed without the calls that other
rows need, and nothing may tell the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.api import AttentionWindow, CacheGrant, Event, Quota, Request, Sampling
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.core.core import Core
from engine.plan import Runner, StepPlan
from tests.checkers import World
from tests.examples import examples
from tests.strategies import NAMESPACES, requests

QUOTAS = {name: Quota(payer=name) for name in NAMESPACES}
BLOCK_SIZE = 4

asked = st.one_of(
    requests(QUOTAS),
    requests(QUOTAS).map(
        lambda request: replace(
            request,
            prompt_logprobs=None,
            attention=AttentionWindow(BLOCK_SIZE, BLOCK_SIZE),
        )
    ),
)
arrivals = st.lists(st.tuples(st.integers(0, 6), asked), min_size=1, max_size=6)
cancels = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 5)), max_size=2)

Prepare = Callable[[Core], None]


def contents(plan: StepPlan) -> tuple[Any, ...]:
    """Return what a plan says when it is launched; its lists change afterwards."""
    rows = [
        (
            replace(row, block_ids=(), token_ids=None, beside=()),
            list(row.block_ids),
            None if row.token_ids is None else list(row.token_ids),
            [list(table) for table in row.beside],
        )
        for row in plan.rows
    ]
    begun = [(one.sequence_id, list(one.token_ids)) for one in plan.begun]
    masks = {i: mask.tolist() for i, mask in plan.masks.items()}
    return plan.step, rows, plan.groups, begun, plan.ended, plan.copies, masks


def leave(core: Core) -> None:
    """Let sequences decode plainly where they do."""


def never_plain(core: Core) -> None:
    """Have all rows planned and committed as those of prompts, grammars and windows."""
    for active in core.requests:
        for sequence in active.sequences:
            sequence.plain_until = sequence.plain_from


def one_row_more(core: Core) -> None:
    """The planted fault: a row behind the last of `max_tokens`."""
    for active in core.requests:
        for sequence in active.sequences:
            sequence.plain_until = sequence.plain_from + active.request.max_tokens


def run(
    prepare: Prepare,
    given_at: list[tuple[int, Request]],
    cancelled_at: Iterable[tuple[int, int]] = (),
    *,
    depth: int = 1,
    windows: tuple[int, ...] = (),
    blocks: int = 12,
) -> tuple[list[tuple[Any, ...]], list[Event]]:
    """Run requests that arrive at the given steps; return the plans and the events.

    `prepare` is called before each step. There is so little room that some are preempted.
    """
    plans: list[tuple[Any, ...]] = []
    events: list[Event] = []

    class Recorder:
        def __init__(self, runner: Runner) -> None:
            self._runner = runner
            self.collect = runner.collect

        def launch(self, plan: StepPlan) -> None:
            plans.append(contents(plan))
            self._runner.launch(plan)

    class Recorded(Core):
        def __init__(self, cache: PrefixCache, runner: Runner, *given: Any, **more: Any) -> None:
            super().__init__(cache, Recorder(runner), *given, **more)

        def step(self) -> list[Event]:
            prepare(self)
            happened = super().step()
            events.extend(happened)
            return happened

    config = EngineConfig(
        step_tokens_max=16, sequences_max=6, preemptions_max=1, attention_policies=("window",)
    )
    world = World(
        config,
        blocks=blocks * (1 + len(windows)),
        block_size=BLOCK_SIZE,
        depth=depth,
        windows=windows,
        make_core=Recorded,
    )
    for step in range(24):
        for number, (at, request) in enumerate(given_at):
            if at == step:
                world.submit(replace(request, request_id=f"r{number}"))
        for at, number in cancelled_at:
            if at == step:
                world.cancel(f"r{number}")
        world.clock.advance(0.25)
        world.step()
    world.settle()
    return plans, events


@settings(max_examples=examples(120))
@given(arrivals, cancels, st.sampled_from([1, 2]), st.sampled_from([(), (5,)]))
def test_a_plain_row_is_planned_and_committed_as_any_other(
    given_at: list[tuple[int, Request]],
    cancelled_at: list[tuple[int, int]],
    depth: int,
    windows: tuple[int, ...],
) -> None:
    """Stops, limits, grammars, logprobs, samples, windows, preemption and cancellation: every plan
    and every event is the same where nothing counts as plain.
    """
    plain = run(leave, given_at, cancelled_at, depth=depth, windows=windows)
    others = run(never_plain, given_at, cancelled_at, depth=depth, windows=windows)

    assert plain == others


def ask(max_tokens: int, prompt: tuple[int, ...] = (0, 1, 1)) -> Request:
    return Request("r", prompt, max_tokens, CacheGrant(b"n"), Sampling(seed=1))


def test_the_comparison_finds_a_row_too_many() -> None:
    """The planted fault, which costs a row of the device and no wrong token."""
    given_at = [(0, ask(5))]

    assert run(leave, given_at, depth=2) == run(never_plain, given_at, depth=2)
    assert run(leave, given_at, depth=2) != run(one_row_more, given_at, depth=2)


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
        request = ask(30, (number % 2, number // 2, 1, 1, 1))
        world.submit(replace(request, request_id=f"r{number}"))
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
