"""The prefix tree: whole blocks by lookup, the nearest partial block by bisection."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.cache.tree.prefix_tree import Node, PrefixTree, common_prefix_length, nodes_under

Run = tuple[int, ...]
runs = st.lists(st.integers(0, 2), min_size=4, max_size=4).map(tuple)


def grow(tree: PrefixTree, tokens: Run, block: int) -> Node:
    """Add the missing nodes of a path of whole blocks; return its last node."""
    node = tree.root
    for at in range(0, len(tokens), tree.block_size):
        run = tokens[at : at + tree.block_size]
        node = node.children.get(run) or tree.insert(node, run, block)[0]
    return node


def test_match_blocks_ends_where_the_prompt_leaves_the_tree() -> None:
    """It matches whole blocks only; `longest_common_child` matches the rest."""
    tree = PrefixTree(2)
    grow(tree, (0, 1, 2, 3, 4, 5), 7)

    assert len(tree.match_blocks((0, 1, 2, 3, 9, 9), 6)) == 2
    assert len(tree.match_blocks((0, 1, 2, 3, 4, 5), 5)) == 2
    assert tree.match_blocks((1, 1), 2) == []


@given(children=st.lists(runs, min_size=1, max_size=12, unique=True), wanted=runs)
def test_bisection_finds_the_longest_common_child(children: list[Run], wanted: Run) -> None:
    tree = PrefixTree(4)
    for block, run in enumerate(children):
        tree.insert(tree.root, run, block)

    found, common = tree.longest_common_child(tree.root, wanted)

    assert common == max(common_prefix_length(run, wanted) for run in children)
    assert (found is None) == (common == 0)
    assert found is None or common_prefix_length(found.run, wanted) == common


def test_a_longer_run_replaces_the_tail_it_extends() -> None:
    """No sibling is a prefix of another, which makes the bisection correct."""
    tree = PrefixTree(4)
    tail, _ = tree.insert(tree.root, (1, 2), 0)
    tree.insert(tree.root, (1, 3), 1)

    node, replaced = tree.insert(tree.root, (1, 2, 5), 2)

    assert replaced is tail
    assert not tree.contains(tail)
    assert set(tree.root.children) == {(1, 2, 5), (1, 3)}
    assert tree.contains(node)


def test_nodes_under_a_prefix_start_with_it() -> None:
    """Erasure by tokens may start in the middle of a block."""
    tree = PrefixTree(2)
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
    tree = PrefixTree(1)
    node = grow(tree, tuple(range(5000)), 0)

    order = list(tree.root.subtree())

    assert order[0] is node
    assert order[-1] is tree.root
    assert len(order) == 5001


def test_equal_hashes_do_not_join_prefixes() -> None:
    """-1 and -2 have the same hash in Python, and are two tokens (T6)."""
    tree = PrefixTree(1)
    first, _ = tree.insert(tree.root, (-1,), 0)
    second, _ = tree.insert(tree.root, (-2,), 1)

    assert hash((-1,)) == hash((-2,))
    assert tree.match_blocks((-1,), 1) == [first]
    assert tree.match_blocks((-2,), 1) == [second]
