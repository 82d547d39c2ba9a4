"""The keys that each token takes, tile by tile, over random trees. No model, no kernel."""

from __future__ import annotations

import random

from engine.attention.batch import make_batch
from engine.attention.cpu_backend import TILE, CpuAttention, CpuWork
from engine.attention.interface import AttentionSpec
from engine.plan import Group, Row, StepPlan
from tests.tables import each_row

BLOCK = 16


def lay_out(plan: StepPlan, group_size: int = 3) -> CpuWork:
    attention = CpuAttention(AttentionSpec(group_size, 1, 32, scale=1.0))
    attention.begin(plan, make_batch(plan, BLOCK, lambda _: 0))
    assert attention.work is not None
    return attention.work


def tiles_of(work: CpuWork) -> dict[int, list[tuple[int, ...]]]:
    """Return, by token, the blocks of each tile that it takes, in order."""
    taken: dict[int, list[tuple[int, ...]]] = {token: [] for token in range(work.tokens)}
    for first, end, segment, segment_end in work.places[0].bundles.tolist():
        for at in range(segment, segment_end):
            low, high, tile_first, tile_end, table = work.places[0].segments[at].tolist()
            assert first <= low < high <= end
            keys = int(work.positions[high - 1]) + 1
            for token in range(low, high):
                for tile in range(tile_first, tile_end):
                    here = min(keys, int(work.positions[token]) + 1, (tile + 1) * TILE)
                    blocks = range(tile * TILE // BLOCK, -(-here // BLOCK))
                    assert blocks or high - low > 1, "a tile without keys"
                    if blocks:  # else keys of a later token, which the mask hides
                        taken[token].append(
                            tuple(int(work.places[0].tables[table + b]) for b in blocks)
                        )
    return taken


def random_tree(rng: random.Random) -> StepPlan:
    """Return rows under a tree of shared runs, with the groups of core's plan, and some prompts."""
    rows: list[Row] = []
    groups: list[tuple[int, Group]] = []
    fresh = iter(range(10_000))

    def grow(prefix: list[int], level: int) -> None:
        shared = [*prefix, *(next(fresh) for _ in range(rng.choice([0, 1, 3, 4, 5, 9])))]
        first = len(rows)
        for _ in range(rng.randint(1, 3)):
            if level < 2 and rng.random() < 0.5:
                grow(shared, level + 1)
                continue
            own = rng.randint(0, 90)
            count = rng.choice([1, 1, 1, 1, 40])
            start = len(shared) * BLOCK + own
            table = [*shared, *(next(fresh) for _ in range(-(-(own + count) // BLOCK)))]
            rows.append(Row(len(rows), start, count, table, 0, [0] * count))
        if len(rows) - first > 1 and len(shared) > len(prefix):
            groups.append((level, Group(first, len(rows), len(prefix), len(shared))))

    while len(rows) < rng.randint(1, 24):
        grow([], 0)
    groups.sort(key=lambda pair: pair[0])
    return StepPlan(step=0, rows=tuple(rows), groups=tuple(group for _, group in groups))


@each_row("seed", range(60))
def test_token_takes_its_tiles_once_in_ascending_order(seed: int) -> None:
    """A result has the same bits with and without sharing because the order is fixed."""
    rng = random.Random(seed)
    plan = random_tree(rng)

    taken = tiles_of(lay_out(plan, rng.choice([1, 3, 8, 200])))

    token = 0
    for row in plan.rows:
        for position in range(row.start, row.start + row.count):
            table = row.block_ids[: position // BLOCK + 1]
            expected = [tuple(table[at : at + 4]) for at in range(0, len(table), 4)]
            assert taken[token] == expected, (seed, token)
            token += 1


def test_shared_run_is_read_once_per_bundle() -> None:
    """Sixteen rows over 64 shared blocks are two bundles: the run is read twice, not 16 times."""
    shared = list(range(64))
    rows = tuple(Row(i, 1030, 1, [*shared, 100 + i], 0, [0]) for i in range(16))
    plan = StepPlan(step=0, rows=rows, groups=(Group(0, 16, 0, 64),))

    work = lay_out(plan)

    tiles = sum(end - first for _, _, first, end, _ in work.places[0].segments.tolist())
    assert len(work.places[0].bundles) == 2
    assert tiles == 2 * 16 + 16


def test_rows_are_right_without_groups() -> None:
    """A plan may omit groups."""
    rows = tuple(Row(i, 70, 1, [0, 1, 2, 3, 10 + i], 0, [0]) for i in range(3))

    taken = tiles_of(lay_out(StepPlan(step=0, rows=rows)))

    assert taken[2] == [(0, 1, 2, 3), (12,)]
