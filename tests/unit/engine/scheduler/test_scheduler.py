"""The scheduler: budget, order, fairness, preemption, progress.

`World` checks every step; these tests read the plans that the runner gets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.api import CacheGrant, LeaseRequest, Quota, Retention, Sampling
from engine.cache import Fact, PrefixCache, TreeMatch
from engine.cache.events import PromiseLost
from engine.cache.tree.prefix_tree import PrefixTree
from tests.tables import each_row
from tests.unit.engine.recorded_engine import RecordedWorld, tokens

# -- budget -----------------------------------------------------------------------------------


def test_a_step_never_exceeds_its_budget_and_a_prompt_its_chunk() -> None:
    """The budget bounds the time of a step, the chunk bounds how long decoding waits for one
    prompt.
    """
    world = RecordedWorld()
    for index in range(5):
        world.ask(f"r{index}", tokens(30, index))
    world.settle()

    assert max(sum(row.values()) for row in world.rows) == 16
    assert max(max(row.values()) for row in world.rows) == 8


def test_decoding_goes_first() -> None:
    """A running stream gets its token in every step, however many prompts arrive."""
    world = RecordedWorld(step_tokens_max=4)
    world.ask("stream", tokens(4), max_tokens=12)
    world.step()
    for index in range(1, 4):
        world.ask(f"prompt{index}", tokens(20, index), max_tokens=1)
    world.step_on(8)

    assert all(row["stream"] == 1 and sum(row.values()) == 4 for row in world.rows[1:9])


@given(st.integers(1, 5), st.integers(1, 2), st.lists(st.integers(1, 9), min_size=2, max_size=8))
def test_every_stream_and_the_prompts_have_a_token_in_every_step(
    step_tokens: int, depth: int, prompts: list[int]
) -> None:
    """With a budget below the number of streams the lowest ranks would wait for all others."""
    world = RecordedWorld(blocks=500, depth=depth, step_tokens_max=step_tokens)
    left = {f"r{index}": 4 + prompt for index, prompt in enumerate(prompts)}
    for index, (name, length) in enumerate(left.items()):
        world.ask(name, tokens(length, index), max_tokens=200)
    world.step_on(sum(left.values()))

    for row in world.rows:
        assert all(row.get(name) == 1 for name, missing in left.items() if not missing)
        prompt_tokens = {name: row.get(name, 0) for name, missing in left.items() if missing}
        assert sum(prompt_tokens.values()) > 0 or not prompt_tokens
        for name, count in prompt_tokens.items():
            left[name] -= count
        assert sum(row.values()) <= max(step_tokens, 8)


def test_no_more_sequences_run_than_configured() -> None:
    """Future samples count: a prompt does not start if its forks would find no slot."""
    world = RecordedWorld(sequences_max=4)
    world.ask("one", tokens(6, 1), max_tokens=8)
    world.ask("two", tokens(6, 2), samples=3, max_tokens=8)
    world.ask("three", tokens(6, 3), samples=2, max_tokens=8)
    world.settle()

    assert max(len(plan.rows) for plan in world.plans) == 4
    assert world.first_step_of("three") > world.first_step_of("two")


def test_a_warm_prompt_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 prompts arrive at once, and the step that starts them waits for each lookup."""
    world = RecordedWorld(sequences_max=8)
    world.ask("first", tokens(30), max_tokens=1)
    world.settle()
    walk, walks = PrefixTree.find, Counter[str]()

    def counted(tree: PrefixTree, ids: Sequence[int]) -> TreeMatch:
        walks["warm"] += 1
        return walk(tree, ids)

    monkeypatch.setattr(PrefixTree, "find", counted)
    for index in range(4):
        world.ask(f"r{index}", (*tokens(28), index % 2, 1), max_tokens=1)
    world.settle()

    assert [world.cached(f"r{index}") >= 28 for index in range(4)] == [True] * 4
    assert walks["warm"] < 8, "each of four prompts was looked up twice"


def test_no_waiting_request_is_looked_up_while_the_batch_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step takes as long with five hundred waiting requests as with none. A request of higher
    priority still gets in.
    """
    world = RecordedWorld(sequences_max=2)
    for index in range(20):
        world.ask(f"r{index}", tokens(6, index), max_tokens=12)
    world.step()
    find, asked = PrefixCache.find, list[bytes]()

    def noted(cache: PrefixCache, namespace: bytes, ids: Sequence[int], now_s: float) -> TreeMatch:
        asked.append(namespace)
        return find(cache, namespace, ids, now_s)

    monkeypatch.setattr(PrefixCache, "find", noted)
    world.step_on(5)
    while_full = list(asked)
    world.ask("urgent", tokens(6, 21), max_tokens=1, priority=1, namespace=b"m")
    world.step()

    assert len(while_full) < 18, "each waiting request was looked up"
    assert b"m" in asked
    assert "urgent" in world.rows[-1]


# -- order ------------------------------------------------------------------------------------


def test_order_is_priority_then_deadline_then_arrival() -> None:
    """Inside one namespace."""
    world = RecordedWorld(sequences_max=1)
    world.ask("first", tokens(4, 1), max_tokens=1)
    world.ask("late", tokens(4, 2), max_tokens=1)
    world.ask("due later", tokens(4, 3), max_tokens=1, deadline_s=90.0)
    world.ask("due soon", tokens(4, 4), max_tokens=1, deadline_s=9.0)
    world.ask("urgent", tokens(4, 5), max_tokens=1, priority=1)
    world.settle()

    order = sorted(world.streams, key=world.first_step_of)
    assert order == ["urgent", "due soon", "due later", "first", "late"]


def test_a_higher_priority_takes_a_slot_in_a_full_batch() -> None:
    """The preempted request loses only time."""
    world = RecordedWorld(sequences_max=2)
    world.ask("batch 1", tokens(8, 1), max_tokens=20)
    world.ask("batch 2", tokens(8, 2), max_tokens=20)
    world.step()
    world.ask("urgent", tokens(8, 3), max_tokens=2, priority=1)
    world.settle()

    assert world.first_step_of("urgent") == 1
    assert (world.preemptions("batch 1"), world.preemptions("batch 2")) == (0, 1)


@each_row("depth", [1, 2])
@each_row("is_cancelled", [False, True])
def test_a_preempted_request_keeps_what_it_was_promised(depth: int, is_cancelled: bool) -> None:
    """Its client was told; the request that passes it is told that this room is taken."""
    world = RecordedWorld(blocks=16, sequences_max=1, depth=depth)
    hour = Retention("1h", promise_s=3600, limit_s=3600)

    def grant(count: int) -> CacheGrant:
        return CacheGrant(b"n", leases=(LeaseRequest(count, hour, "lease"),))

    world.ask("long", tokens(44, 1), grant=grant(44))
    world.step()
    world.ask("urgent", tokens(24, 2), grant=grant(24), priority=1)
    while "urgent" in world.live:
        world.step()
    if is_cancelled:
        world.cancel("long")
    world.settle()
    long, urgent = world.streams["long"].started, world.streams["urgent"].started

    assert long is not None
    assert urgent is not None
    assert world.preemptions("long") == 1
    assert (long.leases[0].outcome, urgent.leases[0].tokens) == ("granted", 12)
    promised = sum(world.cache.use(b"n").promised.values())
    assert promised < 3 + 11 if is_cancelled else promised == 3 + 11
    world.cache.check()


@pytest.mark.parametrize("is_erased", [False, True])
def test_a_request_that_ends_in_a_step_in_flight_tells_what_it_does_not_leave(
    is_erased: bool,
) -> None:
    """Preempted in its last step, it gets its token and never runs again: its blocks are gone. What
    was erased meanwhile is no loss."""
    world, facts = RecordedWorld(sequences_max=1, depth=2), list[Fact]()
    world.cache.facts = facts.append
    hour = Retention("1h", promise_s=3600, limit_s=3600)
    grant = CacheGrant(b"n", leases=(LeaseRequest(8, hour, "lease"),))
    world.ask("last", tokens(8, 1), grant=grant, max_tokens=1)
    world.step()
    world.ask("urgent", tokens(8, 2), priority=1, namespace=b"other")
    if is_erased:
        world.erase(b"n")
    world.settle()

    assert world.preemptions("last") == 1
    assert world.endings == {"done": 2}
    lost = [fact for fact in facts if isinstance(fact, PromiseLost)]
    assert lost == ([] if is_erased else [PromiseLost(b"n", 2)])
    world.cache.check()


def test_a_flood_from_one_namespace_does_not_keep_another_waiting() -> None:
    """Arrival order counts only inside a namespace."""
    world = RecordedWorld(sequences_max=2)
    for index in range(12):
        world.ask(f"flood{index}", tokens(8, index), max_tokens=2)
    world.step()
    world.ask("victim", tokens(8), max_tokens=2, namespace=b"victim")
    world.settle()

    before = [n for n in world.streams if world.first_step_of(n) < world.first_step_of("victim")]
    assert len(before) <= 3


@given(
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 12)), min_size=20, max_size=30),
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 12)), min_size=20, max_size=30),
    st.sampled_from([1.0, 2.0, 3.0]),
)
def test_two_backlogged_namespaces_get_their_shares(
    ours: list[tuple[int, int]], theirs: list[tuple[int, int]], weight: float
) -> None:
    """T13: while both wait, service per weight differs by at most twice the larger of one slice and
    one batch (Sheng et al., OSDI 2024).
    """
    world = RecordedWorld(sequences_max=4, blocks=200, queue_requests_max=100)
    for name, asked in (("a", ours), ("b", theirs)):
        for index, (prompt, output) in enumerate(asked):
            world.ask(
                f"{name}{index}",
                tuple((index >> k) & 1 for k in range(prompt)),
                max_tokens=output,
                namespace=name.encode(),
                weight=weight if name == "a" else 1.0,
            )
    served: Counter[str] = Counter()
    while world.core.has_work():
        world.step()
        for name, count in world.rows[-1].items():
            served[name[0]] += count
        waiting = {s.parent.request.request_id[0] for s in world.core.scheduler.queue}
        if waiting != {"a", "b"}:
            break
        outputs = 4 * 12  # the largest lag of one batch: each slot may sample its longest output
        apart = abs(served["a"] / weight - served["b"])

        assert apart <= 2 * max(24, outputs)


def test_all_namespaces_of_a_payer_share_one_turn() -> None:
    """Otherwise a client that makes up a key for each prompt would be served as often as all others
    together.
    """
    world = RecordedWorld(sequences_max=2, blocks=200, queue_requests_max=100)
    for index in range(12):
        own = (*tokens(4, index), *tokens(16))
        many = Quota(payer=b"many")
        world.ask(f"m{index}", own, max_tokens=4, namespace=b"m%d" % index, quota=many)
        world.ask(f"o{index}", own, max_tokens=4, namespace=b"one")
    served: Counter[str] = Counter()
    while {s.parent.request.request_id[0] for s in world.core.scheduler.queue} == {"m", "o"}:
        world.step()
        for name, count in world.rows[-1].items():
            served[name[0]] += count

    assert abs(served["m"] - served["o"]) <= 2 * 24


def test_an_idle_namespace_saves_up_no_service() -> None:
    """Its counter is lifted to the lowest active one; otherwise it would shut the others out."""
    world = RecordedWorld(sequences_max=2, blocks=200)
    world.ask("early", tokens(4, 1), max_tokens=1, namespace=b"back")
    for index in range(16):
        world.ask(f"busy{index}", (*tokens(4, index), *tokens(16)), max_tokens=4)
    world.step_on(20)
    for index in range(16):
        own = (*tokens(4, index), *tokens(16))
        world.ask(f"back{index}", own, max_tokens=4, namespace=b"back")
    seen = len(world.rows)
    world.settle()

    order = sorted(world.streams, key=world.first_step_of)
    after = [name[:4] for name in order if world.first_step_of(name) >= seen]
    assert 3 <= after[:8].count("back") <= 5


# -- room -------------------------------------------------------------------------------------


def test_a_shared_prefix_needs_room_once() -> None:
    """Eight tables over one prefix of ten blocks, with two private blocks each, fit 30 blocks."""
    world = RecordedWorld(blocks=30, sequences_max=8, step_tokens_max=64)
    shared = tokens(40)
    world.ask("warm", shared, max_tokens=1)
    world.settle()
    for index in range(8):
        own = tuple((index >> k) & 1 for k in range(3))
        world.ask(f"r{index}", (*shared, *own), max_tokens=5)
    world.step_on(4)

    assert len(world.plans[-1].rows) == 8
    assert world.core.stats().preemptions_total == 0


def test_the_oldest_is_never_preempted() -> None:
    """So one sequence always finishes and frees its blocks."""
    world = RecordedWorld(blocks=9)
    for index in range(4):
        world.ask(f"r{index}", tokens(6, index), max_tokens=24)
    world.settle()

    assert world.preemptions("r0") == 0
    assert sum(world.preemptions(f"r{index}") for index in range(4)) > 0


def test_the_oldest_is_not_preempted_though_its_namespace_borrows_most() -> None:
    """The share decides between the other sequences."""
    world = RecordedWorld(blocks=12)
    world.ask("old", tokens(28), max_tokens=12, namespace=b"large")
    world.step()
    for index in range(3):
        world.ask(f"r{index}", (index % 2, index // 2, 1), max_tokens=12, namespace=bytes([index]))
    world.settle()

    assert world.preemptions("old") == 0
    assert world.core.stats().preemptions_total > 0


def test_lower_priority_is_preempted_first_however_old() -> None:
    """Priority comes before age."""
    world = RecordedWorld(blocks=9)
    world.ask("old", tokens(6, 1), max_tokens=20)
    world.step()
    world.ask("urgent", tokens(6, 2), max_tokens=20, priority=1)
    world.settle()

    assert world.preemptions("urgent") == 0
    assert world.preemptions("old") > 0


def test_blocks_kept_for_other_payers_do_not_count_under_a_ceiling() -> None:
    """Each running sequence keeps a block to continue with. Under a payer's ceiling of eight, seven
    sequences of others would otherwise block every request in a nearly empty pool.
    """
    world = RecordedWorld(blocks=200, step_tokens_max=64)
    for index in range(7):
        world.ask(f"r{index}", tokens(6, index), max_tokens=60, namespace=bytes([index]))
    world.step()
    low = Quota(ceiling_blocks=8)
    world.ask("low", tokens(4, 9), max_tokens=2, namespace=b"low", quota=low)
    world.settle()

    assert world.first_step_of("low") == 1


def test_a_request_at_its_ceiling_preempts_only_its_own_payer() -> None:
    """Blocks of other payers do not help it, at any priority."""
    world, low = RecordedWorld(blocks=40), Quota(ceiling_blocks=6)
    for index in range(2):
        world.ask(f"r{index}", tokens(5, index), max_tokens=30, namespace=bytes([index]))
    world.ask("own", tokens(5, 3), max_tokens=14, namespace=b"low", quota=low)
    world.step()
    for index in range(2):
        name, urgent = f"u{index}", tokens(12, 4 + index)
        world.ask(name, urgent, max_tokens=9, namespace=b"low", quota=low, priority=1)
    world.settle()

    assert world.preemptions("own") > 0
    assert [world.preemptions(name) for name in ("r0", "r1", "u0", "u1")] == [0] * 4


def test_no_preemption_where_all_victims_together_would_not_be_enough() -> None:
    """The victim would have stopped for nothing, again and again."""
    world = RecordedWorld(blocks=20, step_tokens_max=64, prefill_chunk_tokens_max=64)
    world.ask("large", tokens(50, 1), max_tokens=10, priority=1)
    world.ask("small", tokens(5, 2), max_tokens=10, namespace=b"s")
    world.step()
    world.ask("urgent", tokens(50, 3), max_tokens=4, priority=1)
    world.settle()

    assert world.preemptions("small") == 0
    assert world.first_step_of("urgent") > world.first_step_of("small")


def test_a_payer_inside_its_floor_is_not_preempted_for_others() -> None:
    """Its freed blocks stay its own, except blocks that were not full yet, which its floor would
    lose. In this test a promise holds the blocks that the longest-running sequence needs.
    """
    world = RecordedWorld(blocks=16)
    kept = LeaseRequest(28, Retention("kept", promise_s=1e6))
    promised = CacheGrant(b"kept", leases=(kept,))
    world.ask("kept", tokens(28), max_tokens=1, grant=promised)
    world.settle()
    world.promises = True
    floor = Quota(floor_blocks=5)
    world.ask("before", tokens(4, 3), max_tokens=1, namespace=b"f", quota=floor)
    world.settle()
    world.ask("long", tokens(4, 1), max_tokens=40)
    world.step_on(3)
    world.ask("floor", tokens(5, 2), max_tokens=14, namespace=b"f", quota=floor)
    world.settle()

    assert world.preemptions("floor") == 0
    assert world.streams["floor"].ended


def test_preemption_costs_the_client_nothing() -> None:
    """Output and cached tokens stay the same; recomputation is counted apart."""
    world = RecordedWorld(blocks=9)
    for index in range(3):
        world.ask(f"r{index}", tokens(6, index), max_tokens=24, namespace=bytes([index]))
    world.settle()

    used = [world.final(f"r{index}").usage for index in range(3)]
    assert [(one.cached_tokens, one.computed_tokens) for one in used] == [(0, 6)] * 3
    assert [one.output_tokens for one in used] == [24] * 3
    assert sum(one.recomputed_tokens for one in used) > 0


def test_a_sample_alone_does_not_copy_its_own_tail() -> None:
    """A preempted sample must not leave the tail that its sibling writes to the tree: the sibling
    would have to copy it into a block that no admission has counted.
    """
    world = RecordedWorld(blocks=4)
    world.ask("r", tokens(13), samples=2, max_tokens=2)
    world.settle()

    assert world.final("r").ending == "done"


ONE_TOKEN = [(1, 0, 0, 1, 0)] * 4
adversary = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt tokens
        st.integers(0, 30),  # output tokens
        st.integers(0, 2),  # namespace
        st.integers(1, 3),  # samples
        st.integers(0, 6),  # steps before the next one
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("depth", [1, 2])
@example(10, [*ONE_TOKEN, (12, 10, 1, 2, 0), (10, 9, 0, 2, 0)], 1, False)
@example(8, [*ONE_TOKEN, (9, 9, 1, 3, 0), (9, 9, 0, 2, 0)], 1, False)
@example(
    7,
    [
        (14, 2, 2, 2, 4),
        (30, 26, 0, 3, 0),
        (26, 14, 0, 2, 1),
        (11, 11, 0, 1, 3),
        (2, 24, 0, 2, 4),
        (19, 4, 1, 3, 6),
        (24, 12, 0, 2, 1),
        (25, 11, 1, 3, 1),
    ],
    1,
    False,
)
@given(st.integers(2, 20), adversary, st.integers(1, 3), st.booleans())
def test_every_admissible_request_finishes(
    depth: int,
    blocks: int,
    asked: list[tuple[int, int, int, int, int]],
    preemptions_max: int,
    ceiling: bool,
) -> None:
    """No livelock (I16): a request that fits alone finishes, and none is preempted for ever."""
    world = RecordedWorld(
        blocks=blocks, depth=depth, preemptions_max=preemptions_max, step_tokens_max=6
    )
    quota = Quota(ceiling_blocks=max(2, blocks // 2)) if ceiling else Quota()
    for index, (prompt, output, namespace, samples, pause) in enumerate(asked):
        world.ask(
            f"r{index}",
            tuple((index >> k % 3) & 1 for k in range(prompt)),
            max_tokens=output,
            namespace=bytes([namespace]),
            quota=quota,
            samples=samples,
            sampling=Sampling(seed=index),
        )
        world.step_on(pause)
    world.settle()

    for name, stream in world.streams.items():
        if world.final(name).ending == "refused":
            assert world.final(name).code == "kv_exceeded"
            continue
        assert world.final(name).ending == "done"
        # so often for lack of room, and so often for another payer's share
        assert world.preemptions(name) <= 2 * preemptions_max * stream.request.samples
