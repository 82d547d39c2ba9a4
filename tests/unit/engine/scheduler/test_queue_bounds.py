"""The queue's bounds: who is refused when it is full."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.api import CacheGrant, Finished, Grammar, Quota, Request
from engine.core.constraints import Constraints
from engine.scheduler.queue_bounds import QueueBounds
from engine.scheduler.request_table import RequestTable
from tests.unit.engine.recorded_engine import RecordedWorld, tokens


def request(name: str, payer: str, count: int = 1, weight: float = 1.0) -> Request:
    grant = CacheGrant(name.encode(), Quota(payer=payer.encode()))
    return Request(name, (1,) * count, 1, grant, weight=weight)


def refused(
    waiting: list[Request], newcomer: Request, requests_max: int = 4, tokens_max: int = 1_000
) -> list[str] | None:
    table = RequestTable()
    for one in waiting:
        table.add(one, 0.0)
    found = QueueBounds(requests_max, tokens_max).choose_refused(table, newcomer)
    return None if found is None else [active.request.request_id for active in found]


def test_the_payer_with_most_waiting_gives_its_newest_request() -> None:
    """A tenant that sends ninety times 8 prompts does not fill the queue for others."""
    waiting = [request("a0", "a"), request("b0", "b"), request("a1", "a"), request("a2", "a")]

    assert refused(waiting, request("b1", "b")) == ["a2"]
    assert refused(waiting, request("c0", "c")) == ["a2"]


def test_the_payer_with_most_waiting_is_refused_itself() -> None:
    """Also where it would have as many as another: who came first keeps its place."""
    waiting = [request("a0", "a"), request("a1", "a"), request("b0", "b"), request("b1", "b")]

    assert refused(waiting, request("a2", "a")) is None
    assert refused([*waiting[:3], request("c0", "c")], request("b1", "b")) is None


def test_a_tenants_weight_multiplies_its_share_of_the_queue() -> None:
    """A tenant of weight 3 may have three times as many waiting."""
    waiting = [request("a0", "a", weight=3.0), request("a1", "a", weight=3.0)]
    waiting += [request("b0", "b"), request("b1", "b")]

    assert refused(waiting, request("a2", "a", weight=3.0)) == ["b1"]


def test_as_many_leave_as_the_prompt_needs_tokens() -> None:
    """The token bound follows the same rule, by tokens."""
    waiting = [request(f"a{i}", "a", 10) for i in range(10)]

    assert refused(waiting, request("b0", "b", 25), 99, 100) == ["a9", "a8", "a7"]
    assert refused(waiting, request("b0", "b", 80), 99, 100) is None
    assert refused([], request("b0", "b", 500), 99, 100) == []


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), max_size=60),
    st.tuples(*[st.sampled_from([0.5, 1.0, 3.0])] * 5),
)
def test_a_payer_within_its_part_is_never_refused_and_the_bounds_hold(
    arrivals: list[tuple[int, int]], weights: tuple[float, ...]
) -> None:
    """Its part: the bound divided by weight among all payers."""
    table, bounds = RequestTable(), QueueBounds(8, 100)
    for index, (payer, count) in enumerate(arrivals):
        one = request(f"r{index}", str(payer), count, weights[payer])
        gone = bounds.choose_refused(table, one)
        lost = Counter(active.turn for active in gone or ())
        for other, number in lost.items():
            share = weights[int(other)] / sum(weights)
            waiting = table.waiting[other]
            by_requests = len(waiting.requests) / (8 * share)
            by_tokens = waiting.tokens / (100 * share)
            assert max(by_requests, by_tokens) > 1
            assert number <= len(waiting.requests)
        for active in gone or ():
            table.remove(active)
        if gone is not None:
            table.add(one, 0.0)
        table.check()

        assert table.waiting_requests <= 8
        assert table.waiting_tokens <= max(100, count)


@pytest.mark.parametrize("flooded", [7, 40])
def test_a_quiet_payer_is_served_beside_a_full_queue(flooded: int) -> None:
    """And the words of a refusal count the flood's own requests alone."""
    world = RecordedWorld(blocks=400, sequences_max=2, queue_requests_max=6)
    for index in range(flooded):
        world.ask(f"flood{index}", tokens(8, index), max_tokens=30, namespace=b"flood")
    world.step()
    for turn in range(10):
        world.ask(f"quiet{turn}", tokens(8, turn), max_tokens=2, namespace=b"quiet")
        while f"quiet{turn}" in world.live:
            world.step()
    world.settle()
    ends = [world.final(name) for name in world.streams]
    told = [end for end in ends if end.ending == "refused"]

    assert all(end.request_id.startswith("flood") for end in told)
    assert {end.code for end in told} == {"queue_full"}
    assert all("of this tenant" in end.message for end in told)
    assert all(end.retry_after_s is not None for end in told)


def test_a_request_whose_grammar_is_refused_takes_no_place() -> None:
    """It would empty the queue of another payer for nothing."""
    world = RecordedWorld(sequences_max=1, queue_requests_max=2)
    world.core.constraints = Constraints()  # compiles none
    for index in range(3):
        world.ask(f"r{index}", tokens(8, index), max_tokens=8)
        world.step()
    world.core.submit(replace(request("bad", "other"), grammar=Grammar("regex", "a")))
    ended = [event for event in world.core.step() if isinstance(event, Finished)]

    assert [(one.request_id, one.code) for one in ended] == [("bad", "grammar_unsupported")]
