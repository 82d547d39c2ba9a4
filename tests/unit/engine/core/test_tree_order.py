"""Depth-first order and groups, against a plain implementation of their specification."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.core.tree_order import find_groups, order_key, shared_blocks
from engine.plan import Group

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
