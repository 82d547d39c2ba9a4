"""The router chooses by predicted seconds, after the hard rules."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.statistics import LoadReport
from gateway.routing.load import ReplicaLoad
from gateway.routing.prefix_directory import Found
from gateway.routing.router import (
    EXPLAINED,
    TIE_S,
    RecentChoices,
    ReplicaState,
    RouteRequest,
    choose,
    rank_homes,
)

REPORT = LoadReport(
    accepted=0,
    waiting_tokens=0,
    rows=0,
    free_blocks=10_000,
    promisable_blocks=1_000,
    prefill_tokens_per_s=10_000.0,
    row_s=0.0001,
    below_bytes_per_s=1e9,
)
REQUEST = RouteRequest(id="r", prompt_tokens=4096, output_tokens=16, digests=[b"first stride 16b"])


def replica(
    number: int,
    *,
    is_ready: bool = True,
    is_resting: bool = False,
    may_send: bool = False,
    **report: Any,
) -> ReplicaState:
    return ReplicaState(
        name=f"e{number}",
        number=number,
        is_ready=is_ready,
        is_resting=is_resting,
        max_sequence_tokens=100_000,
        block_tokens=16,
        bytes_per_token=1000,
        load=ReplicaLoad(msgspec.structs.replace(REPORT, **report)),
        may_send=may_send,
    )


def test_a_cached_prefix_wins_until_its_queue_costs_more() -> None:
    """Neither hits nor queues alone decide: their seconds do."""
    found = {0: Found(device=3968)}
    short = [replica(0, waiting_tokens=3_000), replica(1)]
    assert choose(REQUEST, short, found).replica == "e0"
    assert choose(REQUEST, [replica(0, waiting_tokens=5_000), replica(1)], found).replica == "e1"


def test_what_was_sent_after_a_report_counts_as_waiting() -> None:
    """Between two reports a burst would go to one replica."""
    states = [replica(0), replica(1)]
    sent = {"e0": 0, "e1": 0}
    for _ in range(8):
        chosen = choose(REQUEST, states, {}).replica or ""
        state = next(state for state in states if state.name == chosen)
        sent[chosen] += 1
        state.load.add_sent(sent[chosen], REQUEST.prompt_tokens)
    assert [state.load.rows for state in states] == [4, 4]
    load = states[0].load
    load.take(msgspec.structs.replace(REPORT, accepted=3))
    assert load.wait_s * REPORT.prefill_tokens_per_s == REQUEST.prompt_tokens
    load.add_sent(3, REQUEST.prompt_tokens)
    assert load.rows == 1, "a report that came first counts it already"


def test_blocks_below_are_loaded_where_that_is_faster() -> None:
    """A slow disk must not draw a request that computing serves sooner."""
    found = {0: Found(below=3968)}
    fast = [replica(0), replica(1)]
    assert choose(REQUEST, fast, found).replica == "e0"
    slow = [replica(0, below_bytes_per_s=1.0, waiting_tokens=100), replica(1)]
    assert choose(REQUEST, slow, found).replica == "e1"


def test_hard_rules_come_before_seconds() -> None:
    """A replica that cannot take the request is not chosen because it is idle."""
    busy = replica(9, waiting_tokens=100_000)
    small = replica(2)
    small.max_sequence_tokens = 4_000
    states = [replica(0, is_ready=False), replica(1, is_resting=True), small, busy]
    choice = choose(REQUEST, states, {})
    assert choice.replica == "e9"
    assert choice.refused == {
        "e0": "not ready",
        "e1": "failed a request",
        "e2": "no room",
    }
    leased = msgspec.structs.replace(REQUEST, lease_blocks=500)
    assert choose(leased, [replica(0, promisable_blocks=499), busy], {}).replica == "e9"
    assert choose(leased, [replica(0, promisable_blocks=499)], {}).replica == "e0"
    strict = msgspec.structs.replace(REQUEST, homes=frozenset({"e9"}))
    assert choose(strict, [replica(0), busy], {}).replica == "e9"


def test_a_stuck_replica_gets_a_request_only_if_there_is_no_other() -> None:
    """Its keeper kills it after a minute at the earliest."""
    stuck = msgspec.structs.replace(replica(0), is_stuck=True)
    found = {0: Found(device=3968)}
    choice = choose(REQUEST, [stuck, replica(1, waiting_tokens=20_000)], found)
    assert (choice.replica, choice.refused) == ("e1", {"e0": "stuck in a step"})
    assert choose(REQUEST, [stuck, replica(1, is_ready=False)], found).replica == "e0"


def test_a_resting_replica_serves_when_it_is_the_only_one() -> None:
    """Two failures in a row must not close a model that has one replica left."""
    choice = choose(REQUEST, [replica(0, is_ready=False), replica(1, is_resting=True)], {})
    assert choice.replica == "e1"
    none = choose(REQUEST, [replica(0, is_ready=False, waiting_tokens=20_000)], {})
    assert none.replica is None
    assert none.retry_after_s == 2.0


@given(
    st.permutations(range(5)),
    st.lists(st.integers(0, 40_000), min_size=5, max_size=5),
    st.lists(st.integers(0, 32), min_size=5, max_size=5),
    st.binary(min_size=16, max_size=16),
)
def test_the_choice_has_the_least_seconds_in_any_order(
    order: list[int], waiting: list[int], strides: list[int], first: bytes
) -> None:
    """Gateways list replicas in other orders and must agree."""
    request = msgspec.structs.replace(REQUEST, digests=[first])
    states = [replica(n, waiting_tokens=waiting[n]) for n in range(5)]
    found = {n: Found(device=128 * strides[n]) for n in range(5) if strides[n]}
    choice = choose(request, states, found)
    assert choose(request, [states[n] for n in order], found).replica == choice.replica
    costs = {cost.replica: cost.total_s for cost in choice.costs}
    assert costs[choice.replica or ""] <= min(costs.values()) + TIE_S


def test_round_robin_takes_turns_over_the_able() -> None:
    """The policy that others are compared with skips what the hard rules exclude."""
    states = [replica(0), replica(1, is_ready=False), replica(2)]
    turns = [choose(REQUEST, states, {}, "round_robin", turn).replica for turn in range(4)]
    assert turns == ["e0", "e2", "e0", "e2"]


def test_the_last_thousand_choices_are_kept() -> None:
    """An explanation is looked up by id, and the memory of it is bounded."""
    recent = RecentChoices()
    for number in range(EXPLAINED + 1):
        recent.add(choose(msgspec.structs.replace(REQUEST, id=str(number)), [replica(0)], {}))
    assert recent.get("0") is None
    kept = recent.get("1")
    assert kept is not None
    assert kept.costs[0].fill_s == 0.4096
    assert [choice.request_id for choice in recent.newest(2)] == ["1000", "999"]


def test_a_prefix_is_fetched_where_that_is_faster_by_a_fifth() -> None:
    """A queue at the replica that has it costs more than the bytes over the network."""
    found = {0: Found(device=2048, below=1920)}
    busy: dict[str, Any] = {"waiting_tokens": 50_000, "peer_bytes_per_s": 1e8}
    fast = [replica(0, **busy), replica(1, peer_bytes_per_s=1e8)]
    choice = choose(REQUEST, fast, found)
    assert choice.replica == "e1"
    assert choice.cost is not None
    assert (choice.cost.peer, choice.cost.peer_tokens) == ("e0", 3968)
    assert choice.cost.fill_s < 4096 / 10_000

    slow = [replica(0, **busy), replica(1, peer_bytes_per_s=1e7)]
    assert choose(REQUEST, slow, found).costs[1].peer == ""
    lacks = [replica(0, waiting_tokens=50_000), replica(1, peer_bytes_per_s=1e8)]
    assert choose(REQUEST, lacks, found).costs[1].peer == "", "it sends nothing"
    away = [replica(0, is_ready=False, **busy), replica(1, peer_bytes_per_s=1e8)]
    assert choose(REQUEST, away, found).costs[0].peer == "", "it is not there"
    drains = [replica(0, is_ready=False, may_send=True, **busy), away[1]]
    assert choose(REQUEST, drains, found).costs[0].peer == "e0", "it takes no requests, and sends"


def test_a_prefix_is_fetched_from_the_same_host_although_another_one_has_more() -> None:
    """Reading a pool takes a thousandth of the time; where all are far, more is better."""
    found = {1: Found(device=4000), 2: Found(device=3840)}
    rates: dict[str, Any] = {"peer_bytes_per_s": 1e8, "near_bytes_per_s": 1e11}
    states = [replica(n, waiting_tokens=50_000 if n else 0, **rates) for n in range(3)]
    for state, domain in zip(states, ("host", "other", "host"), strict=True):
        state.pool_domain = domain
    near = choose(REQUEST, states, found).cost
    states[2].pool_domain = "third"
    far = choose(REQUEST, states, found).cost

    states[2].pool_domain = "host"
    found[2] = Found(device=3072, below=768)
    below = choose(REQUEST, states, found).cost

    assert near is not None
    assert far is not None
    assert below is not None
    assert below.peer == "e1", "what it has below its device comes as copies"
    assert (near.replica, near.peer, near.peer_tokens) == ("e0", "e2", 3840)
    assert (far.replica, far.peer, far.peer_tokens) == ("e0", "e1", 4000)


def test_a_promise_goes_where_there_is_room_and_most_of_it() -> None:
    """All gateways find the same home, whoever asks."""
    many = [replica(n, promisable_blocks=64 if n else 0) for n in range(4)]
    wanted = msgspec.structs.replace(REQUEST, lease_blocks=10)
    names = rank_homes(wanted, many, {})

    assert names[-1] == "e0", "it has no room"
    assert rank_homes(wanted, many[::-1], {}) == names
    assert rank_homes(wanted, many, {2: Found(128, 0), 0: Found(256, 0)})[0] == "e2"
    assert rank_homes(wanted, [replica(1, is_ready=False)], {}) == []


def test_no_peer_has_less_than_the_replica_itself() -> None:
    """What is here already is not fetched."""
    found = {0: Found(device=1024), 1: Found(device=512, below=1536)}
    states = [replica(0, peer_bytes_per_s=1e9), replica(1, peer_bytes_per_s=1e9)]
    costs = {cost.replica: cost for cost in choose(REQUEST, states, found).costs}
    assert costs["e1"].peer == ""
    assert (costs["e0"].peer, costs["e0"].peer_tokens) == ("e1", 2048)


def test_gateways_find_one_home_for_a_prefix_shorter_than_a_stride() -> None:
    """Their requests have ids of their own, and the lease has one."""
    states = [replica(number) for number in range(8)]
    homes = {
        tuple(
            rank_homes(RouteRequest(f"r{number}", 40, 0, [], lease_id="of the prefix"), states, {})
        )
        for number in range(20)
    }

    assert len(homes) == 1
