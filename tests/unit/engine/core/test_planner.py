"""The planner: rows in tree order, groups over shared blocks, forking samples."""

from __future__ import annotations

import random

import pytest

from engine.api import CacheGrant, Request, Sampling
from engine.config import EngineConfig
from engine.core.tree_order import find_groups, order_key, shared_blocks
from engine.plan import StepPlan
from tests.checkers import World


def watched(chunk: int = 64) -> tuple[World, list[StepPlan]]:
    """Return an engine with blocks of 4 that records its plans and each row's block ids."""
    config = EngineConfig(step_tokens_max=64, prefill_chunk_tokens_max=chunk, sequences_max=8)
    world = World(config, blocks=64, block_size=4, context_tokens=100)
    plans: list[StepPlan] = []
    launch = world.runner.launch

    def watch(plan: StepPlan) -> None:
        plans.append(plan)
        launch(plan)

    world.runner.launch = watch  # type: ignore[method-assign]
    return world, plans


def ask(
    name: str, tokens: tuple[int, ...], *, samples: int = 1, namespace: bytes = b"n"
) -> Request:
    """Submit a long stream."""
    return Request(
        name, tokens, 12, CacheGrant(namespace), Sampling(seed=len(name)), samples=samples
    )


def shape(plan: StepPlan) -> list[tuple[int, int]]:
    """Return (rows, blocks) of each group."""
    return [(g.end_row - g.first_row, g.end_block - g.first_block) for g in plan.groups]


SHARED = (0, 1, 0, 0, 1, 1, 0, 1) * 3


def test_rows_with_one_prefix_form_one_group_over_all_its_blocks() -> None:
    """The prompt was computed in slices; the group covers all of them."""
    world, plans = watched(chunk=8)
    world.submit(ask("a", SHARED))
    for _ in range(4):
        world.step()
    world.submit(ask("other", (1, 1, 1, 1, 1), namespace=b"m"))
    world.submit(ask("bb", (*SHARED, 1, 1)))
    for _ in range(3):
        world.step()

    assert shape(plans[-1]) == [(2, 6)]
    (group,) = plans[-1].groups
    together = plans[-1].rows[group.first_row : group.end_row]
    assert len({tuple(row.block_ids[:6]) for row in together}) == 1


def test_samples_of_one_prompt_share_its_full_blocks() -> None:
    """The partly filled last block is copied before it is written, so it is not shared."""
    world, plans = watched()
    world.submit(ask("r", (*SHARED[:8], 1), samples=3))
    for _ in range(2):
        world.step()

    assert plans[0].rows[0].samples == (0, 1, 2)
    assert [b.sample_index for b in plans[0].begun] == [0, 1, 2]
    assert shape(plans[1]) == [(3, 2)]
    assert {copy.tokens for copy in plans[1].copies} == {1}
    assert len({row.block_ids[2] for row in plans[1].rows}) == 3


def test_groups_are_kept_while_batch_and_tables_stay() -> None:
    """Finding them again would cost a fifth of a step."""
    world, plans = watched()
    world.submit(ask("r", SHARED, samples=2))
    for _ in range(4):
        world.step()

    assert plans[-1].groups is plans[-2].groups


@pytest.mark.parametrize("seed", range(6))
def test_groups_are_those_of_the_batch_as_it_changes(seed: int) -> None:
    """What neighbours share is kept from batch to batch; nothing of another batch may be left."""
    chance = random.Random(seed)
    config = EngineConfig(step_tokens_max=24, sequences_max=6, preemptions_max=2)
    world = World(config, blocks=26, block_size=2, depth=1 + seed % 2, context_tokens=40)
    launch, grouped = world.runner.launch, 0

    def watch(plan: StepPlan) -> None:
        nonlocal grouped
        keys = [order_key(row.block_ids) for row in plan.rows]
        full = [row.start // 2 for row in plan.rows]
        runs = map(shared_blocks, keys, keys[1:], map(min, full, full[1:]))
        assert keys == sorted(keys)
        assert plan.groups == find_groups(list(runs))
        grouped += len(plan.groups)
        launch(plan)

    world.runner.launch = watch  # type: ignore[method-assign]
    for step in range(120):
        if len(world.live) < 7 and chance.random() < 0.5:
            length = chance.randrange(1, 9)
            prompt = tuple(chance.randrange(2) for _ in range(length))
            world.submit(ask(f"r{step}", SHARED[: chance.randrange(8)] + prompt))
        if world.live and chance.random() < 0.1:
            world.cancel(chance.choice(sorted(world.live)))
        world.step()
    world.settle()

    assert grouped > 60


def test_a_preempted_sequence_is_begun_again_with_its_outputs() -> None:
    """The runner was told that it ended."""
    world, plans = watched()
    world.submit(ask("a", SHARED))
    for _ in range(3):
        world.step()
    (sequence,) = world.core.scheduler.running
    drawn = list(sequence.tokens)
    world.core.scheduler.preempt(sequence, world.clock())
    world.step()

    assert plans[-1].ended == (0,)
    (begun,) = plans[-1].begun
    assert (begun.sequence_id, begun.prompt_tokens) == (0, len(SHARED))
    assert list(begun.token_ids)[: len(drawn)] == drawn


def test_a_prompt_without_output_that_is_preempted_in_flight_is_computed_again() -> None:
    """It must not end with nothing kept: its caller asked for its prefix to be there."""
    config = EngineConfig(step_tokens_max=64, sequences_max=8)
    world = World(config, blocks=64, block_size=4, depth=2, context_tokens=100)
    world.submit(Request("warm", SHARED, 0, CacheGrant(b"n"), Sampling()))
    world.step()
    (sequence,) = world.core.scheduler.running
    world.core.scheduler.preempt(sequence, world.clock())
    world.settle()
    world.submit(Request("read", SHARED, 1, CacheGrant(b"n"), Sampling()))
    world.settle()

    started = world.streams["read"].started
    assert started is not None
    assert started.cached_tokens == len(SHARED) - 1
