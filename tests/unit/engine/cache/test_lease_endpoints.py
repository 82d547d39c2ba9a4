"""Lease endpoints: which blocks an erased lease takes, and the cost of shared prefixes."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import LeaseRequest, Quota, Retention
from engine.cache import PrefixCache
from engine.cache.tree.lease_endpoints import HANDED_UP_MAX, LeaseEndpoints
from engine.cache.tree.prefix_tree import Node, PrefixTree, whole_runs
from tests.lines_run import lines_run
from tests.unit.engine.cache.sequences import compute

SIZE = 4
US = b"us"
DAY = Retention("day", limit_s=86_400)
TRUNK = list(range(100, 108))


def run(cache: PrefixCache, tokens: list[int], lease_id: str, now_s: float = 0.0) -> None:
    """Run a request with a lease on all its tokens."""
    leases = (LeaseRequest(len(tokens), DAY, lease_id),)
    table = cache.begin(US, tokens, now_s, leases=leases)
    assert compute(cache, table, tokens, now_s), "there is room, or something to evict"
    cache.release(table, tokens, now_s)


def found(cache: PrefixCache, tokens: list[int]) -> int:
    return cache.peek(US, [*tokens, 999], 1.0).cached_tokens


def branch(number: int) -> list[int]:
    """Return a conversation that begins like all others."""
    return [*TRUNK, *[number] * SIZE]


def test_a_prefix_that_many_leases_share_costs_no_more_than_one() -> None:
    """Conversations of a day begin with the same tokens: a list of leases on each of these blocks
    would be walked and copied by each request.
    """
    cache = PrefixCache(blocks=1_000, block_size=SIZE)
    words = list(range(50_000, 50_000 + 64 * SIZE))
    asks = [partial(run, cache, [*words, *[n] * SIZE], f"{n:032x}") for n in range(300)]
    asks[0]()
    asks[1]()
    early = lines_run(asks[2])
    for ask in asks[3:-1]:
        ask()

    assert lines_run(asks[-1]) < 1.5 * early
    path = cache.find(US, [*words, 1], 0.0).path
    assert [len(node.ending_leases) for node in path] == [0] * 64


def test_erasing_a_lease_takes_its_prefix_though_its_end_was_evicted() -> None:
    """Blocks that a lease alone covers go with it, even if only a few are left."""
    cache = PrefixCache(blocks=4, block_size=SIZE)
    run(cache, branch(1), "a")
    table = cache.begin(b"them", [7] * 8, 2.0, quota=Quota())
    assert cache.grow(table, 8, 2.0)
    assert found(cache, TRUNK) == len(TRUNK)
    assert found(cache, branch(1)) == len(TRUNK)

    assert cache.erase(US, lease_id="a") == 2
    assert found(cache, TRUNK) == 0
    cache.check()


def test_a_shared_prefix_goes_with_its_last_lease() -> None:
    cache = PrefixCache(blocks=32, block_size=SIZE)
    for number in (1, 2, 3):
        run(cache, branch(number), str(number))

    assert cache.erase(US, lease_id="2") == 1
    assert cache.erase(US, lease_id="1") == 1
    assert found(cache, branch(3)) == len(branch(3))
    assert cache.erase(US, lease_id="3") == 3
    assert cache.stats().free == 32
    cache.check()


def test_a_lease_covers_every_continuation_of_its_last_block() -> None:
    """A prompt ends within a block, and each answer fills that block differently."""
    cache = PrefixCache(blocks=32, block_size=SIZE)
    prompt = [*TRUNK, 1]
    for answer in (5, 6):
        leases = (LeaseRequest(len(prompt), DAY, "a"),)
        table = cache.begin(US, prompt, 0.0, quota=Quota(), leases=leases)
        tokens = [*prompt, *[answer] * (SIZE - 1)]
        assert compute(cache, table, tokens)
        cache.release(table, tokens, 0.0)
    assert found(cache, [*prompt, 5, 5, 5]) == found(cache, [*prompt, 6, 6, 6]) == 12

    assert cache.erase(US, lease_id="a") == 4
    cache.check()


def test_evicted_leases_do_not_accumulate_at_a_shared_prefix() -> None:
    """A prefix stays while a hundred thousand conversations come and go."""
    cache = PrefixCache(blocks=8, block_size=SIZE)
    for number in range(20 * HANDED_UP_MAX):
        run(cache, branch(number), f"lease {number}", float(number))
    root = cache.tree_root(US)
    assert root is not None
    ends = sum(len(node.ending_leases) for node in root.subtree())

    assert HANDED_UP_MAX < ends <= HANDED_UP_MAX + 8
    cache.check()


@pytest.mark.parametrize(("erased", "is_kept"), [("a", False), ("b", True), ("unknown", True)])
def test_erasing_a_lease_stops_only_its_own_writers(erased: str, is_kept: bool) -> None:
    """A request under another lease was promised its blocks and pays for them."""
    cache = PrefixCache(blocks=32, block_size=SIZE)
    run(cache, [*TRUNK, 9, 9, 9, 9], "b")
    leases = (LeaseRequest(12, DAY, "a"),)
    table = cache.begin(US, branch(1), 0.0, quota=Quota(), leases=leases)
    cache.erase(US, lease_id=erased)
    assert compute(cache, table, branch(1))
    cache.release(table, branch(1), 0.0)

    assert (found(cache, branch(1)) == 12) == is_kept
    cache.check()


Step = tuple[str, int, tuple[int, ...]]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reach", "reach", "reach", "goes", "strike"]),
        st.integers(0, 3),
        st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple),
    ),
    max_size=30,
)


@given(STEPS)
def test_erasure_equals_a_list_of_leases_on_each_block(steps: list[Step]) -> None:
    """The plain list is the specification."""
    tree, ends = PrefixTree(b"n", 1), LeaseEndpoints[Node]()
    covering: dict[Node, set[str]] = {}
    for what, number, run_of in steps:
        lease_id, path = str(number), whole_runs(tree.root, run_of, 1)
        if what == "reach":
            for index in range(len(run_of)):
                if index == len(path):
                    above = path[-1] if path else tree.root
                    path.append(tree.add(above, (run_of[index],)))
                covering.setdefault(path[index], set()).add(lease_id)
            ends.extend(lease_id, path[-1])
        elif what == "goes" and path and not path[-1].children:
            ends.hand_up(path[-1], path[-1].parent)
            del covering[path[-1]]
            tree.remove(path[-1])
        elif what == "strike":
            alone = {node for node, ids in covering.items() if ids == {lease_id}}
            wanted = {node for node in alone if node.parent not in alone}
            tops = ends.revoke(lease_id)
            assert set(tops) == wanted
            assert len(tops) == len(wanted)
            for ids in covering.values():
                ids.discard(lease_id)
            for top in tops:
                for node in top.subtree():
                    ends.hand_up(node, top.parent)
                    del covering[node]
                    tree.remove(node)
        ends.check_total(sum(ends.check_node(node) for node in tree.root.subtree()))
