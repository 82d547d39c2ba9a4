"""Shares of the batch: its slots are a quota of each payer, by weight."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import CacheGrant, LeaseRequest, Quota, Retention
from engine.scheduler.sequence import Sequence
from tests.unit.engine.recorded_engine import RecordedWorld, tokens


def flood(world: RecordedWorld, count: int, **wanted: object) -> None:
    """Let one payer fill the batch with long answers, and step until it runs."""
    for index in range(count):
        wanted = {"max_tokens": 200, "namespace": b"flood"} | wanted
        world.ask(f"flood{index}", tokens(6, index), **wanted)
    world.step_on(4)


def held(world: RecordedWorld) -> Counter[bytes]:
    return world.core.scheduler.running.slots_of


def test_a_payer_alone_holds_the_whole_batch() -> None:
    """Shares bind only while another payer wants slots."""
    world = RecordedWorld(blocks=800, sequences_max=8)
    flood(world, 8)

    assert held(world) == {b"flood": 8}


@pytest.mark.parametrize("samples", [1, 4])
def test_a_quiet_payer_gets_a_slot_of_a_full_batch_at_once(samples: int) -> None:
    """Four requests of sixteen samples would hold a batch of 64 for as long as they decode; `n`
    samples count as n.
    """
    world = RecordedWorld(blocks=800, sequences_max=8)
    flood(world, 8 // samples, samples=samples)
    world.ask("quiet", tokens(6, 12), max_tokens=2, namespace=b"quiet")
    arrived = len(world.rows)
    world.step()

    assert world.first_step_of("quiet") == arrived
    assert held(world) == {b"flood": 7, b"quiet": 1}


def test_shares_follow_weights_and_only_the_excess_is_given_up() -> None:
    """A payer of weight 3 beside one of weight 1 gets six of eight slots; no payer goes below."""
    world = RecordedWorld(blocks=800, sequences_max=8)
    flood(world, 20, weight=1.0)
    for index in range(20):
        wanted = {"max_tokens": 100, "namespace": b"heavy", "weight": 3.0}
        world.ask(f"heavy{index}", tokens(6, index), **wanted)
    world.step_on(8)

    assert held(world) == {b"flood": 2, b"heavy": 6}


def test_a_payer_above_its_share_leaves_free_slots_to_the_others() -> None:
    """Admission in that order makes preemption rare."""
    world = RecordedWorld(blocks=800, sequences_max=8)
    flood(world, 30, max_tokens=8)
    for index in range(30):
        world.ask(f"other{index}", tokens(6, index), max_tokens=8, namespace=b"other")
    world.step_on(5)
    begun = world.core.stats().preemptions_total
    world.step_on(20)

    assert held(world)[b"flood"] in (3, 4, 5)
    assert world.core.stats().preemptions_total - begun <= 2


def test_slots_that_no_other_payer_can_use_are_lent() -> None:
    """The other payer waits for blocks under its ceiling; the batch does not stay empty for it."""
    world = RecordedWorld(blocks=800, sequences_max=8)
    low = Quota(ceiling_blocks=6)
    for index in range(6):
        wanted = {"namespace": b"low", "quota": low}
        world.ask(f"low{index}", tokens(6, index), max_tokens=12, **wanted)
    flood(world, 12)

    assert held(world)[b"low"] < 4
    assert sum(held(world).values()) == 8


def test_a_claim_takes_the_youngest_of_the_payer_furthest_above_its_share() -> None:
    """Neither the best-ranked sequence nor a payer within its share gives a slot."""
    world = RecordedWorld(blocks=800, sequences_max=8)
    for index in range(2):
        world.ask(f"small{index}", tokens(6, index), max_tokens=200, namespace=b"small")
    flood(world, 6)
    world.ask("quiet", tokens(6, 12), max_tokens=2, namespace=b"quiet")
    world.step()
    preempted = list(world.core.scheduler.queue)

    assert [s.parent.request.request_id for s in preempted] == ["flood5"]
    assert held(world) == {b"small": 2, b"flood": 5, b"quiet": 1}


def test_a_higher_priority_gives_no_slot() -> None:
    """Priorities are the operator's word and come before shares."""
    world = RecordedWorld(blocks=800, sequences_max=4)
    flood(world, 4, priority=1)
    world.ask("quiet", tokens(6, 12), max_tokens=2, namespace=b"quiet")
    world.step_on(5)

    assert held(world) == {b"flood": 4}


def test_a_payer_inside_its_floor_gets_blocks_that_others_pin() -> None:
    """A floor would be worth nothing while long answers of others hold the whole pool."""
    world = RecordedWorld(blocks=40, sequences_max=8)
    world.promises = True
    for index in range(6):
        world.ask(f"flood{index}", tokens(20, index), max_tokens=60, namespace=b"flood")
    while world.core.stats().pinned_blocks < 38:
        world.step()
    world.ask(
        "quiet", tokens(40, 12), max_tokens=2, namespace=b"quiet", quota=Quota(floor_blocks=12)
    )
    arrived = len(world.rows)
    world.step()
    world.step()

    assert world.first_step_of("quiet") <= arrived + 1


def test_promised_blocks_that_a_prompt_finds_need_no_room() -> None:
    """A payer whose promises fill its ceiling would wait until nothing else runs."""
    world = RecordedWorld(blocks=40)
    world.promises = True
    quota = Quota(floor_blocks=8, ceiling_blocks=8)
    lease = LeaseRequest(24, Retention("kept", promise_s=1e6))
    first = CacheGrant(b"quiet", quota, leases=(lease,))
    world.ask("first", tokens(24), max_tokens=1, grant=first)
    world.settle()
    world.ask("long", tokens(4, 1), max_tokens=60)
    world.step_on(3)
    arrived = len(world.rows)
    grant = CacheGrant(b"quiet", quota)
    world.ask("again", (*tokens(24), *tokens(3, 2)), max_tokens=2, grant=grant)
    world.step()
    world.step()

    assert world.first_step_of("again") <= arrived + 1


def test_all_namespaces_of_a_payer_have_one_share() -> None:
    """A client that makes up a key for each prompt gets no more slots."""
    world = RecordedWorld(blocks=800, sequences_max=8)
    many = Quota(payer=b"many")
    for index in range(12):
        name = b"m%d" % index
        world.ask(f"m{index}", tokens(6, index), max_tokens=99, namespace=name, quota=many)
        world.ask(f"o{index}", tokens(6, index), max_tokens=99, namespace=b"one")
    world.step_on(9)

    assert held(world) == {b"many": 4, b"one": 4}


def test_a_member_of_a_shared_scope_uses_its_own_share() -> None:
    """Blocks are the scope owner's, slots and time the member's."""
    world = RecordedWorld(blocks=800, sequences_max=8)
    scope = {"namespace": b"scope", "quota": Quota(payer=b"owner"), "max_tokens": 99}
    for index in range(12):
        world.ask(f"a{index}", tokens(6, index), turn=b"a", **scope)
        world.ask(f"b{index}", tokens(6, index + 1), turn=b"b", **scope)
    world.step_on(12)

    assert held(world) == {b"a": 4, b"b": 4}


asked = st.lists(
    st.tuples(
        st.integers(0, 3),  # payer
        st.integers(1, 12),  # prompt tokens
        st.integers(0, 20),  # output tokens
        st.integers(1, 3),  # samples
        st.integers(0, 4),  # steps before the next request
    ),
    min_size=4,
    max_size=30,
)


@pytest.mark.parametrize("depth", [1, 2])
@given(
    asked,
    st.integers(3, 6),
    st.tuples(*[st.sampled_from([0.5, 1.0, 3.0])] * 4),
    st.integers(1, 3),
    st.sampled_from([16, 60, 400]),
)
def test_claims_make_progress_and_never_go_back_and_forth(
    depth: int,
    requests: list[tuple[int, int, int, int, int]],
    slots: int,
    weights: tuple[float, ...],
    claims_max: int,
    blocks: int,
) -> None:
    """Every request finishes, each sequence gives its slots at most `preemptions_max` times, and a
    claim leaves the giver its share.
    """
    world = RecordedWorld(
        blocks=blocks,
        depth=depth,
        sequences_max=slots,
        preemptions_max=claims_max,
        queue_requests_max=100,
    )
    scheduler, claims = world.core.scheduler, Counter[int]()
    find = scheduler.shares.find_givers

    def watched(sequence: Sequence) -> list[Sequence]:
        givers, first = find(sequence), min(scheduler.running, key=lambda s: s.rank)
        left = scheduler.running.slots_of.copy()
        for giver in givers:
            claims[giver.sequence_id] += 1
            left[giver.parent.turn] -= giver.batch_slots
            assert left[giver.parent.turn] >= scheduler.shares.share(giver.parent.turn) - 1e-6
            assert giver is not first
        return givers

    scheduler.shares.find_givers = watched  # type: ignore[method-assign]
    for index, (payer, prompt, output, samples, pause) in enumerate(requests):
        world.ask(
            f"r{index}",
            tuple((index >> k % 3) & 1 for k in range(prompt)),
            max_tokens=output,
            namespace=bytes([payer]),
            weight=weights[payer],
            samples=samples,
        )
        world.step_on(pause)
    world.settle()

    assert all(count <= claims_max for count in claims.values())
    assert {world.final(name).ending for name in world.streams} <= {"done", "refused"}


def crowd(world: RecordedWorld, payers: int) -> None:
    """Let more payers than there are slots ask for two long answers each; step until some run."""
    for index in range(2 * payers):
        name = b"payer%d" % (index % payers)
        world.ask(f"long{index}", tokens(20, index), max_tokens=200, namespace=name)
    world.step_on(12)


def test_a_quick_request_gets_a_slot_at_once_among_more_payers_than_slots() -> None:
    """No share is a whole slot; by turns alone it would wait for an answer of every other payer."""
    world = RecordedWorld(blocks=800, sequences_max=4)
    crowd(world, 9)
    assert sum(held(world).values()) == 4
    world.ask("quiet", tokens(6, 99), max_tokens=2, namespace=b"quiet")
    arrived = len(world.rows)
    world.step()

    assert world.first_step_of("quiet") == arrived
    assert held(world)[b"quiet"] == 1


def test_among_more_payers_than_slots_long_requests_wait_for_their_turn() -> None:
    """Each claim computes a part of a prompt again: payers that are alike take nothing of each
    other, and a payer that holds a slot claims no second one."""
    world = RecordedWorld(blocks=800, sequences_max=4)
    crowd(world, 9)
    begun = world.core.stats().preemptions_total
    world.ask("late", tokens(6, 99), max_tokens=200, namespace=b"late")
    world.step_on(10)
    assert world.core.stats().preemptions_total == begun

    for index in range(3):
        world.ask(f"quick{index}", tokens(6, 90 + index), max_tokens=8, namespace=b"quick")
    world.step()

    assert held(world)[b"quick"] == 1
    assert world.core.stats().preemptions_total == begun + 1
