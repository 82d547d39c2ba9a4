"""The shape of a tree as counts: chains folded, the largest branches kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.cache import PrefixCache
from engine.server.tree_snapshot import survey

SIZE = 4


def filled(*prompts: tuple[int, ...]) -> PrefixCache:
    cache = PrefixCache(blocks=64, block_size=SIZE)
    for prompt in prompts:
        table = cache.begin(b"ns", prompt, 0.0)
        assert cache.grow(table, len(prompt), 0.0)
        cache.take_copies()
        cache.commit(table, prompt, len(prompt), 0.0)
        cache.release(table, prompt, 0.0)
    return cache


def test_a_shared_prefix_is_one_branch_with_its_own_two_above_it() -> None:
    """A chain without a fork is one thing to look at."""
    trunk = (1,) * 8
    cache = filled(trunk + (2,) * 4, trunk + (3,) * 8)

    found = survey(cache, b"ns", 100, 5.0)

    assert [(b.parent, b.tokens, b.total_tokens) for b in found] == [
        (-1, 8, 20),
        (0, 8, 8),
        (0, 4, 4),
    ]
    assert found[0].hits == 1
    assert found[0].idle_s == 5.0


def test_only_the_largest_are_told_and_every_one_has_its_parent() -> None:
    """However many small ones there are."""
    trunk = (1,) * 8
    cache = filled(*(trunk + (n,) * 4 for n in range(2, 12)))

    found = survey(cache, b"ns", 4, 0.0)

    assert len(found) == 4
    assert found[0].total_tokens == 8 + 10 * 4
    assert all(branch.parent == 0 for branch in found[1:])


def test_a_namespace_that_holds_nothing_has_no_shape() -> None:
    """Nor one that nobody knows."""
    assert survey(filled(), b"ns", 10, 0.0) == ()


@given(st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=16), max_size=6))
def test_tokens_add_up(prompts: list[list[int]]) -> None:
    """What a branch holds in all is its own and its children's."""
    cache = filled(*map(tuple, prompts))

    found = survey(cache, b"ns", 1_000, 0.0)

    for place, branch in enumerate(found):
        below = sum(b.total_tokens for b in found if b.parent == place)
        assert branch.total_tokens == branch.tokens + below
        assert branch.parent < place
    assert len(prompts) == 0 or sum(b.total_tokens for b in found if b.parent == -1) > 0
