"""A draft model changes no token, hit or count, whoever leaves between two steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import CacheGrant, DraftCount, Erase, Request, Sampling
from engine.drafts.drafter import Drafter
from engine.errors import InvariantViolation
from engine.scheduler.request_table import RequestTable
from tests.checkers import FREE_DRAFTS, World
from tests.examples import examples
from tests.small_model import SmallModel, Text
from tests.unit.engine.core.test_drafts import asked, numbered, told
from tests.unit.engine.tiny_engines import ask, make_world, run

PLACES = 2


def with_model(world: World, right: float) -> SmallModel:
    """Let a world's engine draft with a model that knows its answers."""

    def answer(text: Text) -> int:
        for stream in world.streams.values():
            for output in stream.alone:
                whole = (*stream.request.tokens, *output)
                if len(text) < len(whole) and whole[: len(text)] == text:
                    return whole[len(text)]
        return 0

    vocab = world.vocab_size
    model = SmallModel(answer, right=right, vocab_size=vocab, places=PLACES, block_size=4)
    world.core.drafts.drafter = Drafter(FREE_DRAFTS, [], model=model.source)
    return model


def check_texts(world: World, model: SmallModel) -> None:
    """Check that what the model has read are prompts with the beginnings of their answers."""
    whole = [
        (*stream.request.tokens, *output)
        for stream in world.streams.values()
        for output in (*stream.outputs, *stream.alone)
    ]
    for text in model.texts:
        assert any(one[: len(text)] == text for one in whole), text


@settings(max_examples=examples(60))
@given(st.lists(asked, min_size=1, max_size=4), st.sampled_from([0.0, 0.6, 1.0]), st.integers(1, 2))
def test_answers_hits_and_usage_are_those_without_it(
    wanted: list[Request], right: float, depth: int
) -> None:
    """One after the other, each finds what those before it have left in the cache."""
    drafted, plain = make_world(depth, blocks=192), make_world(depth, blocks=192)
    model = with_model(drafted, right)
    for request in numbered(wanted):
        for world in (drafted, plain):
            run(world, request)

        assert told(drafted, request) == told(plain, request)
    check_texts(drafted, model)


@settings(max_examples=examples(60))
@given(
    st.lists(asked, min_size=2, max_size=6),
    st.sampled_from([0.0, 0.6, 1.0]),
    st.integers(5, 14),
    st.data(),
)
def test_room_is_short_and_requests_leave(
    wanted: list[Request],
    right: float,
    blocks: int,
    data: st.DataObject,
) -> None:
    """Preemptions, cancellations and erasures come between any two steps; `settle` and `step`
    recount blocks, and `check` the places."""
    world = make_world(data.draw(st.integers(1, 2)), blocks=blocks)
    model = with_model(world, right)
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
        world.core.check()
    world.settle()
    world.core.check()
    check_texts(world, model)


def test_every_draft_of_a_right_model_is_accepted() -> None:
    """Nine tokens a step: eight drafts and the one behind them. Two drafts in each of the first
    three steps, while nobody knows how often it is right for the client."""
    world = make_world(2)
    with_model(world, 1.0)
    (final,) = run(world, ask(max_tokens=37))

    assert final.usage.drafts == (DraftCount("model", 30, 30),)
    assert world.runner.steps == 1 + 3 + 3


def test_another_namespace_learns_nothing() -> None:
    """What a request costs the model and the engine is the same, whoever was answered before."""
    steps = []
    for before in (None, b"other"):
        world = make_world(1, blocks=64)
        model = with_model(world, 0.7)
        if before is not None:
            run(world, ask("before", max_tokens=30, grant=CacheGrant(before)))
        model.chance.seed(11)
        counted = world.runner.steps, model.steps, model.read_tokens
        run(world, ask(max_tokens=30, sampling=Sampling(seed=3), grant=CacheGrant(b"n")))
        now = world.runner.steps, model.steps, model.read_tokens
        steps.append(tuple(b - a for a, b in zip(counted, now, strict=True)))

    assert steps[0] == steps[1]


def test_a_request_without_drafts_costs_the_model_nothing() -> None:
    """The header turns it off, as it does the other sources."""
    world = make_world(1)
    model = with_model(world, 1.0)
    run(world, ask(max_tokens=20, drafts=False))

    assert (model.steps, world.runner.steps) == (0, 20)


def test_the_recount_includes_the_pool_of_places() -> None:
    """A sequence that the source has and the engine has not would keep its place for ever."""
    world = make_world(1)
    model = with_model(world, 1.0)
    run(world, ask(max_tokens=20))
    world.core.check()
    table = RequestTable()
    stray = table.add_sequence(table.add(ask("stray"), 0.0))
    model.source.begin(stray)

    with pytest.raises(InvariantViolation, match="ended sequences"):
        world.core.check()
