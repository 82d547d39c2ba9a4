"""Policies as pure functions, on states made by hand."""

from __future__ import annotations

from msgspec.structs import replace

from engine.statistics import LoadReport
from gateway.bench.simulation.policies import POLICIES, ReplicaView, RouteView, named
from gateway.routing.load import ReplicaLoad
from gateway.routing.prefix_directory import Found
from gateway.routing.router import ReplicaState, RouteChoice, RouteRequest

RATE = 1000.0
REQUEST = RouteRequest("a", 1000, 100, ())


def view_of(number: int, waiting: int = 0, free_blocks: int = 1000, **known: int) -> ReplicaView:
    """A replica with so many waiting tokens; `known` as in `ReplicaView`."""
    report = LoadReport(waiting_tokens=waiting, free_blocks=free_blocks, prefill_tokens_per_s=RATE)
    state = ReplicaState(f"r{number}", number, True, False, 9999, 16, 1, ReplicaLoad(report))
    return ReplicaView(state, 10_000, waiting_tokens=waiting, **known)


def number_of(policy: str, view: RouteView) -> int:
    """The number of the replica that a policy takes."""
    ruled = POLICIES[policy].rule(view)
    if isinstance(ruled, RouteChoice):
        ruled = named(view.replicas, ruled.replica)
    return ruled.state.number


def chosen(policy: str, *replicas: ReplicaView, turn: int = 0, **known: dict[int, Found]) -> int:
    """The number of the replica that a policy takes, twice."""
    view = RouteView(REQUEST, replicas, turn=turn, **known)
    first, again = (number_of(policy, view) for _ in range(2))
    assert first == again
    return first


def test_round_robin_takes_turns() -> None:
    replicas = [view_of(n) for n in range(3)]

    assert [chosen("round-robin", *replicas, turn=turn) for turn in range(4)] == [0, 1, 2, 0]


def test_least_requests_looks_at_requests_alone() -> None:
    busy, free = view_of(0, sequences=3), view_of(1, waiting=9000, sequences=2)

    assert chosen("least-requests", busy, free, found={0: Found(999)}) == 1


def test_ours_trades_a_prefix_for_a_shorter_wait() -> None:
    """800 tokens of prefix are worth a wait of 0.5 s at 1,000 tokens a second, not one of 2 s."""
    found = {0: Found(800)}

    assert chosen("seconds", view_of(0, 500), view_of(1), found=found) == 0
    assert chosen("seconds", view_of(0, 2000), view_of(1), found=found) == 1


def test_conductors_rule_ignores_what_is_displaced() -> None:
    """Ours keeps a full pool's prefixes; the least first token alone does not."""
    full, empty = view_of(0, free_blocks=0), view_of(1, waiting=500)

    assert chosen("conductor", full, empty) == 0
    assert chosen("seconds", full, empty) == 1


def test_llm_d_weighs_prefix_queue_and_room() -> None:
    """A whole prefix counts 3, the queue and the pool 2 each."""
    found = {0: Found(1000)}
    holder, idle = view_of(0, queued=4), view_of(1)

    assert chosen("llm-d", holder, idle, found=found) == 0
    assert chosen("llm-d", replace(holder, pinned_tokens=6000), idle, found=found) == 1
    assert chosen("llm-d", holder, idle, found={0: Found(600)}) == 1


def test_dynamo_adds_blocks_to_compute_and_blocks_in_use() -> None:
    found = {0: Found(800)}
    holder = view_of(0, pinned_tokens=700)

    assert chosen("dynamo", holder, view_of(1), found=found) == 0
    assert chosen("dynamo", replace(holder, pinned_tokens=900), view_of(1), found=found) == 1


def test_sglang_follows_what_was_sent_until_one_is_far_busier() -> None:
    """More than half of the prompt must match, else the smallest tree is taken."""
    holder, small = view_of(0, sent_strides=9, sequences=40), view_of(1, sent_strides=2)

    assert chosen("sglang", replace(holder, sequences=30), small, sent={0: Found(600)}) == 0
    assert chosen("sglang", replace(holder, sequences=30), small, sent={0: Found(500)}) == 1
    assert chosen("sglang", holder, small, sent={0: Found(600)}) == 1


def test_equal_replicas_share_by_a_hash() -> None:
    """A tie that always fell to the first one would fill it alone."""
    for policy in set(POLICIES) - {"seconds", "apart", "conductor"}:
        taken = set()
        for number in range(40):
            view = RouteView(
                replace(REQUEST, id=str(number)), [view_of(0), view_of(1)], turn=number
            )
            taken.add(number_of(policy, view))
        assert taken == {0, 1}, policy
