"""Waiting requests by tenant: the wait at a tenant's own place, and who is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engines.waiting_requests import WaitingBounds, WaitingRequests


def waiting(requests_max: int = 100, tokens_max: int = 1_000) -> WaitingRequests:
    return WaitingRequests(WaitingBounds(requests_max, tokens_max))


def test_a_tenants_wait_is_that_of_its_share() -> None:
    """Two tenants of weights 1 and 3: each waits for its own tokens at its part of the rate, and
    never longer than for all tokens.
    """
    queue = waiting()
    queue.enter(1, 1.0, [100])
    queue.enter(2, 3.0, [900])

    assert queue.wait_s(1, 1.0, 10.0) == pytest.approx(40.0)
    assert queue.wait_s(2, 3.0, 10.0) == pytest.approx(100.0)
    assert queue.wait_s(3, 4.0, 10.0, more=10) == pytest.approx(2.0)
    assert queue.wait_s(1, 1.0, 0.0) == 0.0


def test_others_tokens_do_not_change_a_tenants_wait() -> None:
    """A quote would tell how much others have waiting."""
    few, many = waiting(), waiting()
    few.enter(2, 1.0, [500])
    many.enter(2, 1.0, [500_000])

    assert few.wait_s(1, 1.0, 10.0, more=50) == many.wait_s(1, 1.0, 10.0, more=50)


def test_a_started_prompt_waits_no_longer() -> None:
    """Prompts of one call start one by one; those that never start leave with the call."""
    queue = waiting()
    place = queue.enter(1, 1.0, [10, 20, 30])
    counts = [queue.requests_of(1)]
    place.start(1)
    place.start(1)
    counts.append(queue.requests_of(1))
    place.leave()
    place.leave()
    counts.append(queue.requests_of(1))

    assert counts == [3, 2, 0]
    assert queue.wait_s(1, 1.0, 10.0) == 0.0


def test_a_full_queue_is_full_for_the_tenant_with_most_waiting() -> None:
    """By requests, and by tokens."""
    queue = waiting(10, 1_000)
    queue.enter(1, 1.0, [1] * 8)
    queue.enter(2, 1.0, [450])

    assert queue.is_full_for(1, 1.0, 2, 2)
    assert not queue.is_full_for(2, 1.0, 2, 2)
    assert queue.is_full_for(2, 1.0, 1, 600)
    assert not queue.is_full_for(3, 1.0, 1, 1)
    assert not waiting(10, 1_000).is_full_for(1, 1.0, 1, 5_000)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=80),
    st.tuples(*[st.sampled_from([0.5, 1.0, 4.0])] * 4),
)
def test_a_tenant_within_its_part_is_never_refused(
    calls: list[tuple[int, int]], weights: tuple[float, ...]
) -> None:
    """Its part: the bound divided by weight among all tenants."""
    queue, held = waiting(20, 10**9), [0] * 4
    for tenant, prompts in calls:
        part = 20 * weights[tenant] / sum(weights)
        if queue.is_full_for(tenant, weights[tenant], prompts, prompts):
            assert held[tenant] + prompts > part
        else:
            queue.enter(tenant, weights[tenant], [1] * prompts)
            held[tenant] += prompts
