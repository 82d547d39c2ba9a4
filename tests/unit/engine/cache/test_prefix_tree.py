"""The prefix tree: whole blocks by lookup, the nearest partial block by bisection."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.cache.tree.prefix_tree import (
    Node,
    PrefixTree,
    common_prefix_length,
    nodes_under,
    whole_runs,
)

Run = tuple[int, ...]
runs = st.lists(st.integers(0, 2), min_size=4, max_size=4).map(tuple)


def grow(tree: PrefixTree, tokens: Run, block: int) -> Node:
    """Add the missing nodes of a path of whole blocks; return its last node."""
    node = tree.root
    for at in range(0, len(tokens), tree.block_size):
        run = tokens[at : at + tree.block_size]
        known = node.children.get(run)
        node = known or tree.add(node, run)
        if known is None:
            tree.put_block(node, block)
    return node


def put(tree: PrefixTree, run: Run, block: int) -> tuple[Node, Node | None]:
    """Add a child of the root on the device; return it and the tail that it extends."""
    node = tree.add(tree.root, run)
    return node, tree.put_block(node, block)


def test_match_blocks_ends_where_the_prompt_leaves_the_tree() -> None:
    """It matches whole blocks only; `longest_common_child` matches the rest."""
    tree = PrefixTree(b"n", 2)
    grow(tree, (0, 1, 2, 3, 4, 5), 7)

    assert len(tree.find((0, 1, 2, 3, 9, 9, 9)).path) == 2
    assert len(tree.find((0, 1, 2, 3, 4, 5)).path) == 2
    assert tree.find((1, 1, 1)).path == []


def test_what_is_below_the_device_alone_is_not_found_there() -> None:
    """A node keeps its place in the tree, and its siblings are compared without it."""
    tree = PrefixTree(b"n", 2)
    last = grow(tree, (0, 1, 2, 3), 0)
    grow(tree, (0, 1, 2, 4), 1)
    tree.drop_block(last)

    assert len(tree.find((0, 1, 2, 3, 9)).path) == 1
    assert tree.find((0, 1, 2, 3, 9)).partial_tokens == 1
    assert len(whole_runs(tree.root, (0, 1, 2, 3), 2)) == 2


@given(children=st.lists(runs, min_size=1, max_size=12, unique=True), wanted=runs)
def test_bisection_finds_the_longest_common_child(children: list[Run], wanted: Run) -> None:
    tree = PrefixTree(b"n", 4)
    for block, run in enumerate(children):
        put(tree, run, block)

    found, common = tree.longest_common_child(tree.root, wanted)

    assert common == max(common_prefix_length(run, wanted) for run in children)
    assert (found is None) == (common == 0)
    assert found is None or common_prefix_length(found.run, wanted) == common


def test_a_longer_run_replaces_the_tail_it_extends() -> None:
    """No sibling is a prefix of another, which makes the bisection correct."""
    tree = PrefixTree(b"n", 4)
    tail, _ = put(tree, (1, 2), 0)
    put(tree, (1, 3), 1)

    _, replaced = put(tree, (1, 2, 5), 2)

    assert replaced is tail


def test_nodes_under_a_prefix_start_with_it() -> None:
    """Erasure by tokens may start in the middle of a block."""
    tree = PrefixTree(b"n", 2)
    grow(tree, (0, 1, 2, 3), 0)
    grow(tree, (0, 1, 2, 4), 1)
    grow(tree, (0, 1, 5, 5), 2)

    def under(*tokens: int) -> set[Run]:
        return {node.run for node in nodes_under(tree.root, tokens, 2)}

    assert under(0, 1, 2) == {(2, 3), (2, 4)}
    assert under(0, 1) == under() == {(0, 1)}
    assert under(0, 1, 9) == under(0, 1, 2, 3, 4, 4, 4) == set()


def test_subtree_lists_children_before_parents_at_any_depth() -> None:
    """A path of thousands of blocks is removed without recursion."""
    tree = PrefixTree(b"n", 1)
    node = grow(tree, tuple(range(5000)), 0)

    order = list(tree.root.subtree())

    assert order[0] is node
    assert order[-1] is tree.root
    assert len(order) == 5001


def test_equal_hashes_do_not_join_prefixes() -> None:
    """-1 and -2 have the same hash in Python, and are two tokens (T6)."""
    tree = PrefixTree(b"n", 1)
    first, _ = put(tree, (-1,), 0)
    second, _ = put(tree, (-2,), 1)

    assert hash((-1,)) == hash((-2,))
    assert whole_runs(tree.root, (-1,), 1) == [first]
    assert whole_runs(tree.root, (-2,), 1) == [second]
