"""Fair share: the order of payers and its sums follow every change, at a bounded cost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import Quota
from engine.cache import LeastRecentlyUsed, PrefixCache
from engine.cache.tree.accounts import NamespaceAccount, PayerAccount
from engine.cache.tree.fair_share import FairShare
from engine.cache.tree.lease_endpoints import LeaseEndpoints
from engine.cache.tree.prefix_tree import Node, PrefixTree
from engine.errors import InvariantViolation
from tests.lines_run import lines_run
from tests.unit.engine.cache.sequences import computed

SIZE = 4
quotas = st.builds(
    Quota,
    floor_blocks=st.sampled_from([0, 0, 3, 40]),
    weight=st.sampled_from([0.5, 1.0, 2.0]),
)
moves = st.tuples(st.integers(0, 4), st.sampled_from(["hold", "rest", "promise", "go"]), quotas)


def account_of(
    shares: FairShare, number: int, quota: Quota, serials: Iterator[int]
) -> NamespaceAccount:
    """Return the namespace's account; create it if needed."""
    name = bytes([number])
    share = shares.account_for(name, quota)
    if name not in share.accounts:
        tree = PrefixTree(name, SIZE, serials)
        share.add_account(NamespaceAccount(name, share, tree, set(), LeaseEndpoints()))
    return share.accounts[name]


@given(st.lists(moves, max_size=40))
def test_sums_equal_a_recount_after_any_changes(
    history: list[tuple[int, str, Quota]],
) -> None:
    """The giver and the spare blocks must not depend on when they were last queried."""
    shares, serials = FairShare(60, 60, LeastRecentlyUsed()), count()
    for number, what, quota in history:
        account = account_of(shares, number, quota, serials)
        if what == "hold":
            account.add_held(2)
        elif what == "rest" and account.cached < account.held:
            account.add_cached(1, 1)
        elif what == "promise":
            promised = Node((1,), None, 1, account.tree)
            promised.promised_class, promised.is_bound = "1h", True
            account.add_promise(promised, 1)
        elif what == "go":
            share = account.payer_account
            share.remove_account(account)
            shares.forget_if_idle(share)
        list(shares.check())
        every = list(shares)

        assert sum(share.floor_blocks for share in every) <= 60
        for taker in every:
            others = [share for share in every if share is not taker]
            assert shares.spare_of_others(taker) == sum(share.spare_blocks() for share in others)
            assert shares.claimed_by_others(taker) == sum(
                share.claimed_blocks() for share in others
            )
            if any(share.spare_blocks() for share in others):
                giving = shares.choose_victim(taker, 1, own=False)
                assert giving.overage() == max(
                    share.overage() for share in others if share.spare_blocks()
                )


def test_the_check_finds_an_unreported_change() -> None:
    """A stale sum would hand out blocks that are not free."""
    shares = FairShare(60, 60, LeastRecentlyUsed())
    account = account_of(shares, 1, Quota(), count())
    account.add_held(4)
    account.add_cached(4, 4)
    assert shares.spare_of_others(None) == 4
    account.payer_account.evictable -= 1

    with pytest.raises(InvariantViolation):
        list(shares.check())


def test_of_equal_payers_the_earliest_gives() -> None:
    """The choice does not depend on the taker or on how the sums were updated."""
    shares, serials = FairShare(60, 60, LeastRecentlyUsed()), count()
    made: list[PayerAccount] = []
    for number in (3, 1, 2):
        account = account_of(shares, number, Quota(), serials)
        account.add_held(4)
        account.add_cached(4, 4)
        made.append(account.payer_account)

    assert shares.choose_victim(made[0], 1, own=False) is made[1]
    assert shares.choose_victim(made[2], 1, own=False) is made[0]
    assert shares.choose_victim(made[2], 1, own=True) is made[2]


def evicting_lines(namespaces: int, *, is_joint: bool) -> int:
    """Return the lines that run for 20 prompts of four blocks in a full pool."""
    cache = PrefixCache(blocks=4 * namespaces, block_size=SIZE)

    def ask(number: int) -> None:
        quota = Quota(payer=b"one" if is_joint else b"")
        tokens = [number, *range(1, 4 * SIZE)]
        table = computed(cache, tokens, number, number.to_bytes(4, "big"), quota=quota)
        cache.release(table, tokens, number)

    for number in range(namespaces):
        ask(number)
    assert cache.stats().free == 0
    return sum(lines_run(partial(ask, namespaces + number)) for number in range(20))


@pytest.mark.parametrize("is_joint", [False, True])
def test_the_cost_of_an_eviction_does_not_grow_with_payers(is_joint: bool) -> None:
    """A scan of all tenants per block took a prompt half a second with 20,000 of them, and a scan
    of all namespaces of one tenant took longer.
    """
    few, many = (evicting_lines(namespaces, is_joint=is_joint) for namespaces in (50, 3_000))

    assert many < 1.5 * few
