"""Drafts change no token, no hit and no count: engines whose drafts come from an oracle.

`World` checks each stream against its request alone, and recounts blocks after every step.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine.api import (
    AttentionWindow,
    CacheGrant,
    DraftCount,
    Erase,
    Finished,
    Grammar,
    Request,
    Sampling,
    Started,
)
from engine.core.core import Core
from engine.drafts.drafter import Drafter
from engine.plan import StepPlan, StepResult
from tests.checkers import FREE_DRAFTS, World
from tests.examples import examples
from tests.grammars import END
from tests.strategies import grammars, samplings, tokens
from tests.unit.engine.tiny_engines import CONFIG, PROMPT, ask, make_world, run

RIGHT = [0.0, 0.5, 0.9, 1.0]
rights = st.sampled_from(RIGHT)
depths = pytest.mark.parametrize("depth", [1, 2])

asked = st.builds(
    ask,
    tokens=tokens,
    max_tokens=st.integers(0, 14),
    samples=st.sampled_from([1, 1, 3]),
    sampling=samplings,
    stop_token_ids=st.sampled_from([(), (END,)]),
    min_tokens=st.integers(0, 3),
    grant=st.sampled_from([CacheGrant(b"n"), CacheGrant(b"n"), CacheGrant(b"m")]),
)
asked |= st.builds(structs.replace, asked, grammar=grammars)


def numbered(wanted: list[Request]) -> list[Request]:
    """Give requests their ids."""
    return [structs.replace(one, request_id=f"r{n}") for n, one in enumerate(wanted)]


def told(world: World, request: Request) -> tuple[Finished, Started | None]:
    """Return what a request was told, but for times and drafts."""
    stream = world.streams[request.request_id]
    final = world.final(request.request_id)
    usage = structs.replace(
        final.usage, queue_s=0.0, first_token_s=None, total_s=0.0, drafts=(), preemptions=0
    )
    return structs.replace(final, usage=usage), stream.started


@settings(max_examples=examples(100))
@given(
    st.lists(asked, min_size=1, max_size=4),
    rights,
    st.sampled_from([(), (5,)]),
    st.integers(1, 2),
)
def test_answers_hits_and_usage_are_those_without_drafts(
    wanted: list[Request], right: float, windows: tuple[int, ...], depth: int
) -> None:
    """One after the other, each finds what those before it have left in the cache."""
    config = structs.replace(CONFIG, sequences_max=12)
    drafted, plain = (
        make_world(depth, blocks=192, config=config, draft_right=probability, windows=windows)
        for probability in (right, None)
    )
    for request in numbered(wanted):
        for world in (drafted, plain):
            run(world, request)

        assert told(drafted, request) == told(plain, request)
        assert drafted.runner.steps <= plain.runner.steps
    for request in numbered(wanted):
        for output in drafted.streams[request.request_id].outputs:
            said = (*request.tokens, *output, 0)
            found = {world.peek(request.grant.namespace, said) for world in (drafted, plain)}
            assert len(found) == 1


@settings(max_examples=examples(60))
@given(st.lists(asked, min_size=2, max_size=6), rights, st.integers(5, 14), st.data())
def test_tokens_are_right_where_room_is_short_and_requests_leave(
    wanted: list[Request], right: float, blocks: int, data: st.DataObject
) -> None:
    """Preemptions, cancellations and erasures come between any two steps with drafts."""
    world = make_world(data.draw(st.integers(1, 2)), blocks=blocks, draft_right=right)
    requests = numbered(wanted)
    for request in requests:
        world.submit(request)
    for _ in range(data.draw(st.integers(0, 12))):
        world.step()
        act = data.draw(st.sampled_from(["", "", "cancel", "erase"]))
        if act == "cancel":
            world.core.cancel(data.draw(st.sampled_from(requests)).request_id)
        elif act == "erase":
            world.core.erase(Erase(1, b"n"))
    world.settle()
    world.core.check()


@depths
def test_a_right_oracle_saves_steps_and_a_wrong_one_costs_none(depth: int) -> None:
    """Sixteen tokens a step; a rejected draft costs time and no step."""
    steps = {}
    for right in (None, 0.0, 1.0):
        world = make_world(depth, draft_right=right)
        (final,) = run(world, ask(max_tokens=33, sampling=Sampling(seed=5)))
        steps[right] = world.runner.steps
        if right == 1.0:
            (count,) = final.usage.drafts
            assert count == DraftCount("oracle", count.drafted, 30)

    assert steps[1.0] == 3 == steps[None] - 30
    assert steps[0.0] <= steps[None]


@pytest.mark.parametrize("right", [0.9, None])
def test_what_a_device_waits_before_drafts_is_learnt_from_the_device(right: float | None) -> None:
    """Not from the host's clock, which tells nothing of when a step ended. A step without drafts
    waits for nothing of theirs."""
    world = make_world(2, draft_right=right)
    drafter = Drafter(FREE_DRAFTS, [], exposed_s=0.001) if right is None else _drafter(world)
    world.core.drafts.drafter, drafter.times.exposed_s = drafter, 0.001
    collect = world.runner.collect
    world.runner.collect = lambda: structs.replace(  # type: ignore[method-assign]
        collect(), elapsed_s=1.0, waited_s=0.003
    )
    run(world, ask(max_tokens=30))

    if right is None:
        assert drafter.times.exposed_s == 0.001
    else:
        assert drafter.times.exposed_s == pytest.approx(0.003, rel=0.35)


def _drafter(world: World) -> Drafter:
    drafter = world.core.drafts.drafter
    assert drafter is not None
    return drafter


def test_a_request_may_refuse_drafts() -> None:
    """Its steps are those of an engine without speculation."""
    world = make_world(1, draft_right=1.0)
    (final,) = run(world, ask(max_tokens=20, drafts=False))

    assert final.usage.drafts == ()
    assert world.runner.steps == 20


@depths
def test_an_engine_does_not_draft_where_that_is_off(depth: int) -> None:
    """Its steps are those of before."""
    config = structs.replace(CONFIG, speculation="off")
    world = make_world(depth, config=config)
    core = Core(
        *(world.cache, world.runner, config, world.clock),
        vocab_size=3,
        context_tokens=48,
        pipeline_depth=depth,
        draft_step_s=(1.0,) * 8,
    )

    assert core.drafts.drafter is None


def test_a_window_reads_what_it_would_read_without_drafts() -> None:
    """The oracle runner compares each token's keys with what the request asked for."""
    config = structs.replace(CONFIG, attention_policies=("window",))
    world = make_world(1, blocks=32, config=config, draft_right=0.9)
    wanted = ask(max_tokens=30, attention=AttentionWindow(8, 4), sampling=Sampling(seed=2))

    (final,) = run(world, wanted)

    assert final.ending == "done"
    assert final.usage.drafts[0].accepted > 5


def test_a_draft_under_a_grammar_has_a_mask_behind_it() -> None:
    """Wrong drafts that the grammar forbids are cut off before they are computed."""
    pairs = Grammar("regex", "(ab){8}")
    steps = []
    for right in (1.0, 0.0):
        world = make_world(1, draft_right=right)
        (final,) = run(world, ask(grammar=pairs, max_tokens=20))
        assert final.ending == "done"
        steps.append(world.runner.steps)

    assert steps[0] < steps[1] <= 16


def test_no_block_is_evicted_for_a_draft() -> None:
    """What another prompt has left in the cache stays while drafts would need its block."""
    world = make_world(1, blocks=6, draft_right=1.0)
    run(world, ask("kept", tokens=(1, 1, 1, 1, 0), max_tokens=1))
    before = world.peek(b"n", (1, 1, 1, 1, 0, 0))
    run(world, ask("r", tokens=PROMPT, max_tokens=7))

    assert world.peek(b"n", (1, 1, 1, 1, 0, 0)) == before >= 4


def test_a_pool_that_is_full_of_cached_blocks_still_has_drafts() -> None:
    """A warm cache leaves no block free; those that answers are written to take drafts."""
    world = make_world(1, blocks=16, draft_right=1.0)
    for number in range(8):
        kept = tuple(number >> bit & 1 for bit in range(3)) * 3
        run(world, ask(f"kept {number}", tokens=kept, max_tokens=1))
    assert world.core.stats().free_blocks < 3

    run(world, ask("r", tokens=PROMPT, max_tokens=12))

    (count,) = world.final("r").usage.drafts
    assert count.accepted >= 5


def _core_with_sources(*arguments: Any, **settings: Any) -> Core:
    return Core(*arguments, **settings, draft_step_s=FREE_DRAFTS)


@pytest.mark.parametrize(
    "erased",
    [Erase(1, b"n"), Erase(1, b"n", lease_id="kept"), Erase(1, b"n", tokens=(3, 1))],
    ids=["namespace", "lease", "prefix"],
)
def test_an_erasure_reaches_recent_answers(erased: Erase) -> None:
    """What was erased must not come back as a draft, whichever part of the namespace it was."""
    world = World(
        CONFIG,
        blocks=64,
        block_size=4,
        vocab_size=50,
        context_tokens=64,
        make_core=_core_with_sources,
    )
    wanted = ask(tokens=(3, 1, 4, 1, 5, 9), max_tokens=24, sampling=Sampling(seed=6))
    steps = []
    for number in range(3):
        before = world.runner.steps
        run(world, structs.replace(wanted, request_id=f"r{number}"))
        steps.append(world.runner.steps - before)
        if number == 1:
            world.core.erase(erased)

    assert steps[1] < steps[0] / 2
    assert steps[2] >= steps[0] - 2


@depths
def test_a_step_with_prompts_has_drafts_too(depth: int) -> None:
    """A long prompt is computed in slices beside a stream, whose drafts cost these little."""
    config = structs.replace(CONFIG, prefill_chunk_tokens_max=4)
    steps = {}
    for right in (None, 1.0):
        world = make_world(depth, blocks=40, config=config, draft_right=right)
        world.submit(ask("stream", max_tokens=30))
        for _ in range(3):
            world.step()
        world.submit(ask("prompt", tokens=(1, 0) * 20, max_tokens=1))
        while "stream" in world.live:
            world.step()
        steps[right] = world.runner.steps
        world.settle()

    assert steps[1.0] < steps[None] / 3


@pytest.mark.parametrize(("right", "overlapping"), [(None, 29), (1.0, 0)])
def test_steps_overlap_where_no_drafts_are_expected(right: float | None, overlapping: int) -> None:
    """A drafter whose sources know nothing of an answer makes no step wait for the one before."""
    world = make_world(2, draft_right=right)
    if right is None:
        world.core.drafts.drafter = Drafter(FREE_DRAFTS, [])
    found = []
    launch = world.runner.launch

    def counted(plan: StepPlan) -> None:
        found.append(bool(in_flight))
        in_flight.append(plan)
        launch(plan)

    def collected() -> StepResult:
        in_flight.pop(0)
        return collect()

    in_flight: list[StepPlan] = []
    collect = world.runner.collect
    runner: Any = world.runner
    runner.launch, runner.collect = counted, collected
    run(world, ask(max_tokens=30))

    assert sum(found) == overlapping
