"""The request table: live requests, who leaves a full queue, and totals over requests."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.api import CacheGrant, Finished, Grammar, Request
from engine.core.constraints import Constraints
from engine.errors import InvariantViolation
from engine.scheduler.request_table import RequestTable, RequestTotals
from tests.tables import each_row
from tests.unit.engine.recorded_engine import RecordedWorld, tokens


def request(name: str, payer: str = "n", count: int = 1, weight: float = 1.0) -> Request:
    """Return a request of `count` tokens in the namespace that is named as its payer."""
    return Request(name, (1,) * count, 1, CacheGrant(payer.encode()), weight=weight)


def test_tokens_count_as_waiting_from_arrival_to_start() -> None:
    """A request that ends before it starts frees its room in the queue as well."""
    table = RequestTable()
    first, second = table.add(request("a", count=3), 0.0), table.add(request("b", count=5), 0.0)
    counts = [table.waiting_tokens]

    table.mark_started(first, 1.0)
    counts.append(table.waiting_tokens)
    table.remove(second)
    counts.append(table.waiting_tokens)
    table.remove(first)
    counts.append(table.waiting_tokens)

    assert counts == [8, 5, 0, 0]
    table.check()


def test_an_id_names_a_live_request_only() -> None:
    """After the end the id is free again, and its sequences have no id."""
    table = RequestTable()
    work = table.add(request("a"), 0.0)
    sequence = table.add_sequence(work)
    found = (table.get("a"), table.sequence(sequence.sequence_id), "a" in table, list(table))

    table.remove(work)

    assert found == (work, sequence, True, [work])
    assert table.get("a") is None
    assert table.sequence(sequence.sequence_id) is None
    assert "a" not in table
    assert len(table) == 0


def test_sequence_ids_are_not_reused() -> None:
    """The runner may still have to be told about a sequence of a finished request."""
    table = RequestTable()
    first = table.add(request("a"), 0.0)
    number = table.add_sequence(first).sequence_id
    table.remove(first)

    second = table.add(request("a"), 0.0)

    assert table.add_sequence(second).sequence_id > number
    assert second.arrival > first.arrival


def test_the_check_finds_a_wrong_count() -> None:
    table = RequestTable()
    work = table.add(request("a", count=4), 0.0)

    work.started_at_s = 1.0

    with pytest.raises(InvariantViolation, match=r"waiting requests .* recounted"):
        table.check()


# -- a full queue ----------------------------------------------------------------------------


def refused(
    waiting: list[Request], newcomer: Request, requests_max: int = 4, tokens_max: int = 1_000
) -> list[str] | None:
    table = RequestTable()
    for one in waiting:
        table.add(one, 0.0)
    found = table.choose_refused(newcomer, requests_max, tokens_max)
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
    table = RequestTable()
    for index, (payer, count) in enumerate(arrivals):
        one = request(f"r{index}", str(payer), count, weights[payer])
        gone = table.choose_refused(one, 8, 100)
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


# -- totals ----------------------------------------------------------------------------------


@each_row("seed", range(10))
def test_totals_equal_a_walk_over_the_requests(seed: int) -> None:
    """A reader of the changed namespaces alone misses nothing."""
    chance, tally = random.Random(seed), RequestTotals()
    here: list[Request] = []
    known: dict[bytes, int] = {}
    for _ in range(200):
        if here and chance.random() < 0.5:
            tally.remove(here.pop(chance.randrange(len(here))))
        else:
            here.append(request("r", str(chance.randrange(4)), chance.randrange(1, 9)))
            tally.add(here[-1])
        tally.check(here)
        if chance.random() < 0.3:
            known |= {name: tally.requests_of(name) for name in tally.take_changed()}
            counts = [one.grant.namespace for one in here]
            assert all(counts.count(name) == known[name] for name in known)
            assert set(counts) == set(tally) <= set(known)

    assert tally.requests == len(here)
    assert tally.tokens == sum(len(one.tokens) for one in here)


def test_the_check_finds_an_uncounted_request() -> None:
    """The check recounts each namespace too."""
    tally = RequestTotals()
    tally.add(request("r", "a"))

    with pytest.raises(InvariantViolation, match="recounted"):
        tally.check([request("r", "b")])
