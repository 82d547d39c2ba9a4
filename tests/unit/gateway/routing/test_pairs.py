"""A long prompt is computed apart from its answer only where a pair is predicted to win by far."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.api import EngineRole
from gateway.routing.load import ReplicaLoad
from gateway.routing.pairs import (
    APART_FACTOR,
    APART_TOKENS_MIN,
    PROMPTS_MAX,
    AnswerSide,
    PromptSide,
    best_pair,
)
from gateway.routing.prefix_directory import Found
from gateway.routing.router import ReplicaState, RouteChoice, RouteRequest, choose, rank_homes
from tests.unit.gateway.routing.test_router import REPORT, replica

LONG = RouteRequest("r", 16_384, 16, [b"first stride 16b"], may_part=True)
FAST = msgspec.structs.replace(REPORT, peer_bytes_per_s=1e9, rows=0)


def fleet(*roles: EngineRole, rows: int = 0, **report: float) -> list[ReplicaState]:
    """Return replicas of these roles; those that answer have `rows`."""
    states = [replica(number) for number in range(len(roles))]
    for state, role in zip(states, roles, strict=True):
        own = msgspec.structs.replace(FAST, rows=0 if role == "prefill" else rows, **report)
        state.role, state.load = role, ReplicaLoad(own)
    return states


def went(choice: RouteChoice) -> tuple[str, str | None]:
    """Return where the prompt is computed, and where the answer."""
    return (choice.pair.prompt_at if choice.pair else "", choice.replica)


def test_a_long_prompt_is_computed_where_no_answer_waits_for_it() -> None:
    """Eight answers wait for the prompt on the decoding replica, and none on the other."""
    states = fleet("prefill", "decode", rows=8)

    assert went(choose(LONG, states, {})) == ("e0", "e1")


def test_an_idle_fleet_computes_where_it_answers() -> None:
    """Nothing is spared, and fetching takes a while: first tokens would come later."""
    assert went(choose(LONG, fleet("prefill", "decode"), {})) == ("", "e1")
    assert went(choose(LONG, fleet("any", "any"), {}))[0] == ""


def test_equal_replicas_part_nothing() -> None:
    """Where the prompt would be computed, the answer may be, too."""
    assert went(choose(LONG, fleet("any", "any", rows=8), {}))[0] == ""


def test_what_is_short_known_or_not_to_be_parted_goes_to_one_replica() -> None:
    """Only what nobody has is worth two replicas."""
    states = fleet("prefill", "decode", rows=8)
    short = msgspec.structs.replace(LONG, prompt_tokens=APART_TOKENS_MIN - 1)
    whole = msgspec.structs.replace(LONG, may_part=False)
    known = {0: Found(below=16_384 - APART_TOKENS_MIN + 1)}

    assert went(choose(short, states, {}))[0] == ""
    assert went(choose(whole, states, {}))[0] == ""
    assert went(choose(LONG, states, known))[0] == ""


def test_a_prefill_replica_gets_no_other_requests_while_another_is_ready() -> None:
    """Also promises stay off it. Alone, it serves: a role is no reason to refuse clients."""
    states = fleet("prefill", "decode", rows=200)
    short = msgspec.structs.replace(LONG, prompt_tokens=100)
    choice = choose(short, states, {0: Found(device=99)})

    assert choice.replica == "e1"
    assert choice.refused == {"e0": "computes prompts"}
    assert rank_homes(short, states, {}) == ["e1"]
    states[1].is_ready = False
    assert choose(short, states, {}).replica == "e0"


def test_a_slow_link_parts_nothing() -> None:
    """At 1 MB/s the prompt's 16 MB take longer than to compute it."""
    states = fleet("prefill", "decode", rows=8, peer_bytes_per_s=1e6)

    assert went(choose(LONG, states, {}))[0] == ""


def test_a_pair_on_one_host_is_predicted_by_the_pace_of_its_pools() -> None:
    """From another host the same link would be too slow."""
    states = fleet("prefill", "decode", rows=8, peer_bytes_per_s=1e6, near_bytes_per_s=1e11)
    for state in states:
        state.pool_domain = "host"

    assert went(choose(LONG, states, {})) == ("e0", "e1")
    states[0].pool_domain = "another host"
    assert went(choose(LONG, states, {}))[0] == ""


def test_replicas_that_do_not_fetch_part_nothing() -> None:
    """As with models that have window groups."""
    states = fleet("prefill", "decode", rows=8, peer_bytes_per_s=0.0)

    assert went(choose(LONG, states, {}))[0] == ""


seconds = st.floats(0, 100, allow_nan=False)
prompt_sides = st.lists(st.tuples(st.integers(0, 5), seconds, seconds), max_size=6)
answer_sides = st.lists(st.tuples(st.integers(0, 5), *[seconds] * 4), max_size=6)


@given(prompt_sides, answer_sides)
def test_the_best_pair_is_the_best_of_all_pairs(
    prompts: list[tuple[int, float, float]],
    answers: list[tuple[int, float, float, float, float]],
) -> None:
    """As long as there are no more of them than are looked at; else it is one of them."""
    one = [PromptSide(f"e{p[0]}", p[1], p[2]) for p in {p[0]: p for p in prompts}.values()]
    other = [
        AnswerSide(f"e{a[0]}", a[1], a[2], a[3], a[4]) for a in {a[0]: a for a in answers}.values()
    ]
    each = [
        pair
        for p in one
        for a in other
        if p.replica != a.replica and (pair := best_pair([p], [a])) is not None
    ]
    best = best_pair(one, other)

    assert (best is None) == (not each)
    if best is not None:
        assert best.prompt_at != best.replica
        least = min(pair.total_s for pair in each)
        assert best in each
        assert len(one) > PROMPTS_MAX or best.total_s == least


roles = st.sampled_from(["any", "prefill", "decode"])


@given(
    st.lists(st.tuples(roles, st.integers(0, 50), st.integers(0, 100_000)), max_size=5),
    st.integers(1, 40_000),
    st.floats(0, 1e10),
)
def test_a_pair_is_of_able_replicas_of_the_right_roles_and_wins_by_the_margin(
    given_fleet: list[tuple[EngineRole, int, int]], prompt: int, rate: float
) -> None:
    """Whatever the loads are. The answer is where one replica may take it alone."""
    states = []
    for number, (role, rows, waiting) in enumerate(given_fleet):
        state = replica(number, rows=rows, waiting_tokens=waiting, peer_bytes_per_s=rate)
        state.role, state.is_ready = role, number != 3
        states.append(state)
    request = msgspec.structs.replace(LONG, prompt_tokens=prompt)
    choice = choose(request, states, {})
    by_name = {state.name: state for state in states}

    if choice.pair is not None:
        first, second = by_name[choice.pair.prompt_at], by_name[choice.pair.replica]
        assert first is not second
        assert first.is_ready
        assert second.is_ready
        assert first.role != "decode"
        assert second.role != "prefill"
        assert choice.replica == second.name
        assert prompt >= APART_TOKENS_MIN
        held = [
            cost.total_s + by_name[cost.replica].load.rows * cost.fill_s for cost in choice.costs
        ]
        assert APART_FACTOR * choice.pair.total_s < min(held)
    alone = choose(msgspec.structs.replace(request, may_part=False), states, {})
    assert (choice.replica is None) == (alone.replica is None)
