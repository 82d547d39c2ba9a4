"""The planner: rows in tree order, groups over shared blocks, forking samples."""

from __future__ import annotations

import random

import pytest

from engine.api import CacheGrant, Request, Sampling
from engine.config import EngineConfig
from engine.core.tree_order import find_groups, order_key, shared_blocks
from engine.plan import StepPlan
from tests.checkers import World
from tests.unit.engine.recorded_engine import RecordedWorld


def watched(chunk: int = 64) -> RecordedWorld:
    """Return an engine with blocks of 4, whose prompts are computed in slices of `chunk` tokens."""
    return RecordedWorld(step_tokens_max=64, prefill_chunk_tokens_max=chunk)


def shape(plan: StepPlan) -> list[tuple[int, int]]:
    """Return (rows, blocks) of each group."""
    return [(g.end_row - g.first_row, g.end_block - g.first_block) for g in plan.groups]


SHARED = (0, 1, 0, 0, 1, 1, 0, 1) * 3


def test_rows_with_one_prefix_form_one_group_over_all_its_blocks() -> None:
    """The prompt was computed in slices; the group covers all of them."""
    world = watched(chunk=8)
    world.ask("a", SHARED, max_tokens=12)
    for _ in range(4):
        world.step()
    world.ask("other", (1, 1, 1, 1, 1), max_tokens=12, namespace=b"m")
    world.ask("bb", (*SHARED, 1, 1), max_tokens=12)
    for _ in range(3):
        world.step()

    assert shape(world.plans[-1]) == [(2, 6)]
    (group,) = world.plans[-1].groups
    together = world.plans[-1].rows[group.first_row : group.end_row]
    assert len({tuple(row.block_ids[:6]) for row in together}) == 1


def test_samples_of_one_prompt_share_its_full_blocks() -> None:
    """The partly filled last block is copied before it is written, so it is not shared."""
    world = watched()
    world.ask("r", (*SHARED[:8], 1), max_tokens=12, samples=3)
    for _ in range(2):
        world.step()

    assert world.plans[0].rows[0].samples == (0, 1, 2)
    assert [b.sample_index for b in world.plans[0].begun] == [0, 1, 2]
    assert shape(world.plans[1]) == [(3, 2)]
    assert {copy.tokens for copy in world.plans[1].copies} == {1}
    assert len({row.block_ids[2] for row in world.plans[1].rows}) == 3


def test_groups_are_kept_while_batch_and_tables_stay() -> None:
    """Finding them again would cost a fifth of a step."""
    world = watched()
    world.ask("r", SHARED, max_tokens=12, samples=2)
    for _ in range(4):
        world.step()

    assert world.plans[-1].groups is world.plans[-2].groups


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
            whole = SHARED[: chance.randrange(8)] + prompt
            world.submit(Request(f"r{step}", whole, 12, CacheGrant(b"n"), Sampling(seed=step)))
        if world.live and chance.random() < 0.1:
            world.cancel(chance.choice(sorted(world.live)))
        world.step()
    world.settle()

    assert grouped > 60


def test_a_preempted_sequence_is_begun_again_with_its_outputs() -> None:
    """The runner was told that it ended."""
    world = watched()
    world.ask("a", SHARED, max_tokens=12)
    for _ in range(3):
        world.step()
    (sequence,) = world.core.scheduler.running
    known = list(sequence.tokens)
    world.core.scheduler.preempt(sequence, world.clock())
    world.step()

    assert world.plans[-1].ended == (0,)
    (begun,) = world.plans[-1].begun
    assert (begun.sequence_id, begun.prompt_tokens) == (0, len(SHARED))
    assert list(begun.token_ids)[: len(known)] == known


def test_a_prompt_without_output_that_is_preempted_in_flight_is_computed_again() -> None:
    """It must not end with nothing kept: its caller asked for its prefix to be there."""
    world = RecordedWorld(depth=2, step_tokens_max=64, prefill_chunk_tokens_max=64)
    world.ask("warm", SHARED, max_tokens=0)
    world.step()
    (sequence,) = world.core.scheduler.running
    world.core.scheduler.preempt(sequence, world.clock())
    world.settle()
    world.ask("read", SHARED, max_tokens=1)
    world.settle()

    assert world.cached("read") == len(SHARED) - 1
