"""The planner: rows in tree order, groups over shared blocks, forking samples."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import CacheGrant, Request, Sampling
from engine.config import EngineConfig
from engine.core.planner import find_groups, order_key, shared_blocks
from engine.plan import Group, StepPlan
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
    world.step_on(4)
    world.ask("other", (1, 1, 1, 1, 1), max_tokens=12, namespace=b"m")
    world.ask("bb", (*SHARED, 1, 1), max_tokens=12)
    world.step_on(3)

    assert shape(world.plans[-1]) == [(2, 6)]
    (group,) = world.plans[-1].groups
    together = world.plans[-1].rows[group.first_row : group.end_row]
    assert len({tuple(row.block_ids[:6]) for row in together}) == 1


def test_samples_of_one_prompt_share_its_full_blocks() -> None:
    """The partly filled last block is copied before it is written, so it is not shared."""
    world = watched()
    world.ask("r", (*SHARED[:8], 1), max_tokens=12, samples=3)
    world.step_on(2)

    assert world.plans[0].rows[0].samples == (0, 1, 2)
    assert [b.sample_index for b in world.plans[0].begun] == [0, 1, 2]
    assert shape(world.plans[1]) == [(3, 2)]
    assert {copy.tokens for copy in world.plans[1].copies} == {1}
    assert len({row.block_ids[2] for row in world.plans[1].rows}) == 3


def test_groups_are_kept_while_batch_and_tables_stay() -> None:
    """Finding them again would cost a fifth of a step."""
    world = watched()
    world.ask("r", SHARED, max_tokens=12, samples=2)
    world.step_on(4)

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
    world.step_on(3)
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


# -- tree order, against a plain implementation of its specification ----------------------------

Tables = list[list[int]]


def paths(draw: st.DrawFn) -> Tables:
    """Draw tables that share runs like a tree's paths: a block id belongs to one path."""
    ids: dict[tuple[int, ...], int] = {}
    tables: Tables = []
    for _ in range(draw(st.integers(0, 7))):
        words = draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))
        heads = [tuple(words[:end]) for end in range(1, len(words) + 1)]
        table = [ids.setdefault(head, 500 - 7 * len(ids)) for head in heads]
        private = draw(st.integers(0, 2))
        table += [1000 + len(tables) * 10 + extra for extra in range(private)]
        tables.append(table)
    return tables


trees = st.composite(paths)()


def in_order(tables: Tables) -> Tables:
    return sorted(tables, key=order_key)


def groups_of(tables: Tables, full: list[int] | None = None) -> tuple[Group, ...]:
    full = [len(table) for table in tables] if full is None else full
    keys = [order_key(table) for table in tables]
    limits = map(min, pairwise(full))
    return find_groups(
        [shared_blocks(*two, n) for two, n in zip(pairwise(keys), limits, strict=True)]
    )


@given(trees)
def test_keys_sort_like_lists_of_block_ids(tables: Tables) -> None:
    """Big-endian bytes make the comparison of keys equal that of lists."""
    assert in_order(tables) == sorted(tables)


@given(trees)
def test_rows_of_every_node_are_contiguous(tables: Tables) -> None:
    """Attention reads a shared run once for a contiguous range of rows."""
    ordered = in_order(tables)

    for depth in range(1, 6):
        heads = [tuple(table[:depth]) for table in ordered if len(table) >= depth]
        changes = [head for i, head in enumerate(heads) if i == 0 or heads[i - 1] != head]
        assert len(changes) == len(set(changes))


@given(trees, st.data())
def test_groups_cover_each_shared_block_of_a_row_once(tables: Tables, data: st.DataObject) -> None:
    """A group that is too long reads foreign KV; one that is too short reads twice."""
    ordered = in_order(tables)
    full = [data.draw(st.integers(0, len(table))) for table in ordered]

    groups = groups_of(ordered, full)

    for row, table in enumerate(ordered):
        mine = [g for g in groups if g.first_row <= row < g.end_row]
        assert sorted(b for g in mine for b in range(g.first_block, g.end_block)) == list(
            range(max((g.end_block for g in mine), default=0))
        )
        best = 0
        for other in {row - 1, row + 1} & set(range(len(ordered))):
            limit = min(full[row], full[other])
            best = max(best, shared_blocks(order_key(table), order_key(ordered[other]), limit))
        assert max((g.end_block for g in mine), default=0) == best


@given(trees)
def test_a_group_contains_every_row_with_its_blocks(tables: Tables) -> None:
    ordered = in_order(tables)

    for group in groups_of(ordered):
        inside = ordered[group.first_row][: group.end_block]
        for row in {group.first_row - 1, group.end_row} & set(range(len(ordered))):
            assert ordered[row][: group.end_block] != inside


def test_groups_of_shared_blocks_nest() -> None:
    """Three rows share two blocks; two of them share two more."""
    tables = [[1, 2, 3, 4, 7], [1, 2, 3, 4, 8], [1, 2, 5]]

    groups = groups_of(tables)

    assert groups == (Group(0, 3, 0, 2), Group(0, 2, 2, 4))


def test_a_block_that_is_not_full_before_a_rows_start_is_in_no_group() -> None:
    """This step writes that block."""
    tables = [[1, 2, 3], [1, 2, 3]]

    groups = groups_of(tables, [3, 1])

    assert groups == (Group(0, 2, 0, 1),)


def test_rows_that_share_nothing_have_no_groups() -> None:
    """An empty batch has none either."""
    assert groups_of([[1, 2], [3, 4]]) == ()
    assert groups_of([]) == ()
