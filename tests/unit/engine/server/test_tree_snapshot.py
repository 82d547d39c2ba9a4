"""`survey`: the tree as counts, chains folded, the largest branches kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.cache import PrefixCache
from engine.server.tree_snapshot import survey

SIZE = 4


def filled_cache(*prompts: tuple[int, ...]) -> PrefixCache:
    cache = PrefixCache(blocks=64, block_size=SIZE)
    for prompt in prompts:
        table = cache.begin(b"ns", prompt, 0.0)
        assert cache.grow(table, len(prompt), 0.0)
        cache.take_copies()
        cache.commit(table, prompt, len(prompt), 0.0)
        cache.release(table, prompt, 0.0)
    return cache


def test_shared_prefix_is_a_branch_with_two_children() -> None:
    """A chain without a fork is one branch."""
    trunk = (1,) * 8
    cache = filled_cache(trunk + (2,) * 4, trunk + (3,) * 8)

    found = survey(cache, b"ns", 100, 5.0)

    assert [(b.parent, b.tokens, b.total_tokens) for b in found] == [
        (-1, 8, 20),
        (0, 8, 8),
        (0, 4, 4),
    ]
    assert found[0].hits == 1
    assert found[0].idle_s == 5.0


def test_keeps_the_largest_branches_with_their_parents() -> None:
    """However many small ones exist."""
    trunk = (1,) * 8
    cache = filled_cache(*(trunk + (n,) * 4 for n in range(2, 12)))

    found = survey(cache, b"ns", 4, 0.0)

    assert len(found) == 4
    assert found[0].total_tokens == 8 + 10 * 4
    assert all(branch.parent == 0 for branch in found[1:])


def test_empty_or_unknown_namespace_has_no_branches() -> None:
    assert survey(filled_cache(), b"ns", 10, 0.0) == ()


@given(st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=16), max_size=6))
def test_total_tokens_are_own_plus_children(prompts: list[list[int]]) -> None:
    cache = filled_cache(*map(tuple, prompts))

    found = survey(cache, b"ns", 1_000, 0.0)

    for place, branch in enumerate(found):
        below = sum(b.total_tokens for b in found if b.parent == place)
        assert branch.total_tokens == branch.tokens + below
        assert branch.parent < place
    assert len(prompts) == 0 or sum(b.total_tokens for b in found if b.parent == -1) > 0
