"""Core over the token oracle: request checks, events, endings, forks, failures, at both depths.

`World` checks every step: blocks recounted, outputs equal to those sampled alone, one final event;
each test adds one behaviour.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from engine.api import (
    CacheGrant,
    Erase,
    Finished,
    LeaseRequest,
    Peek,
    Quota,
    Retention,
    Sampling,
    Tokens,
)
from engine.config import EngineConfig
from engine.errors import EngineUnavailable, InvariantViolation
from engine.plan import StepPlan, StepResult
from engine.scheduler.scheduler import Slice
from tests.checkers import World
from tests.unit.engine.tiny_engines import CONFIG, PROMPT, ask, make_world, run


@pytest.fixture(params=[1, 2])
def world(request: pytest.FixtureRequest) -> World:
    """Return an engine of 16 blocks of 4, with one step at a time and with one step in flight."""
    return make_world(request.param)


@pytest.mark.parametrize(
    ("wanted", "code", "says"),
    [
        ({"tokens": ()}, "prompt_empty", "no tokens"),
        ({"tokens": (0, 3)}, "token_out_of_range", "Token id 3"),
        ({"tokens": (0, -1)}, "token_out_of_range", "Token id -1"),
        ({"stop_token_ids": (7,)}, "token_out_of_range", "Token id 7"),
        ({"sampling": Sampling(logit_bias={9: 1.0})}, "token_out_of_range", "Token id 9"),
        ({"max_tokens": 40}, "context_exceeded", "49 tokens (9 of prompt, 40 of"),
        ({"samples": 9}, "kv_exceeded", "9 samples requested; at most 8"),
        (
            {"grant": CacheGrant(b"n", Quota(ceiling_blocks=3))},
            "kv_exceeded",
            "cache memory for 13 tokens; this tenant may use 12",
        ),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_limit(
    world: World, wanted: dict[str, Any], code: str, says: str
) -> None:
    """The client gets one final event with the value it sent and the limit."""
    world.core.submit(ask(**wanted))
    (event,) = world.core.step()

    assert isinstance(event, Finished)
    assert (event.ending, event.code) == ("refused", code)
    assert says in event.message
    assert not world.core.has_work()


def test_the_whole_context_may_be_used(world: World) -> None:
    """The limit itself is allowed; one token more is not."""
    (fits,) = run(world, ask(max_tokens=39))

    assert (fits.ending, fits.usage.output_tokens) == ("done", 39)


@pytest.mark.parametrize(
    ("bound", "waiting"), [({"queue_requests_max": 2}, 2), ({"queue_tokens_max": 5}, 1)], ids=str
)
def test_the_queue_is_bounded_by_requests_and_by_tokens(
    bound: dict[str, Any], waiting: int
) -> None:
    """An unbounded queue would answer every request too late, and ten long prompts wait as long as
    a thousand short ones. A single prompt is always accepted.
    """
    world = make_world(1, config=EngineConfig(**bound))

    endings = run(world, *(ask(f"r{number}") for number in range(waiting + 1)))

    assert [e.code for e in endings] == [*[""] * waiting, "queue_full"]


def test_a_live_id_is_refused(world: World) -> None:
    """Two streams of events under one id could not be told apart."""
    world.submit(ask("a"))
    world.core.submit(ask("a"))
    refusals = [e for e in world.core.step() if isinstance(e, Finished)]

    assert [(e.ending, e.code) for e in refusals] == [("refused", "duplicate_request")]


def test_a_finished_id_may_be_reused(world: World) -> None:
    run(world, ask("a"))
    del world.streams["a"]

    (again,) = run(world, ask("a"))

    assert again.ending == "done"


# -- what is counted --------------------------------------------------------------------------


def test_the_second_turn_finds_the_first_to_the_token(world: World) -> None:
    """Rule *Exact hit*: the tail is kept and copied, so hits do not stop at block boundaries."""
    run(world, ask("a"))
    said = (*PROMPT, *world.streams["a"].outputs[0])

    (second,) = run(world, ask("b", tokens=(*said, 0, 1, 0)))

    # The last output token was sampled and never computed.
    assert second.usage.cached_tokens == len(said) - 1
    assert second.usage.computed_tokens == 4


def test_a_repeated_prompt_computes_one_token(world: World) -> None:
    """Rule *Exact hit*: there must be logits to sample from."""
    first, again = run(world, ask("a"))[0], run(world, ask("b"))[0]

    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, len(PROMPT) - 1)
    assert again.usage.computed_tokens == 1
    assert world.streams["a"].outputs == world.streams["b"].outputs


def test_no_namespace_finds_anothers_tokens(world: World) -> None:
    run(world, ask("a"))

    (other,) = run(world, ask("b", grant=CacheGrant(b"other")))

    assert other.usage.cached_tokens == 0


@pytest.mark.parametrize(("read", "write"), [(False, True), (True, False)])
def test_the_cache_is_used_only_as_far_as_granted(world: World, read: bool, write: bool) -> None:
    """`read` off finds nothing; `write` off leaves nothing to find."""
    grant = CacheGrant(b"n", read=read, write=write)

    endings = run(world, ask("a", grant=grant)) + run(world, ask("b", grant=grant))

    assert [e.usage.cached_tokens for e in endings] == [0, 0]


def test_a_prewarm_fills_the_cache(world: World) -> None:
    """Prefill only: done, no token, and the next request finds the prompt."""
    (warm,) = run(world, ask("a", max_tokens=0))

    (next_one,) = run(world, ask("b"))

    assert (warm.ending, warm.usage.output_tokens, warm.usage.first_token_s) == ("done", 0, None)
    assert world.streams["a"].ended[0].reason == "length"
    assert next_one.usage.cached_tokens == len(PROMPT) - 1


def test_a_lease_is_answered_when_the_request_starts(world: World) -> None:
    """Promises are granted, clipped or refused, never dropped silently (rule *Grant*)."""
    lease = LeaseRequest(8, Retention("5m", promise_s=300), "l")
    run(world, ask(grant=CacheGrant(b"n", Quota(floor_blocks=4), leases=(lease,))))

    started = world.streams["r"].started
    assert started is not None
    assert [(g.lease_id, g.outcome, g.tokens) for g in started.leases] == [("l", "granted", 8)]


def test_prompt_logprobs_are_sent_slice_by_slice() -> None:
    """All of a long prompt's would not fit into a frame. They precede any token, and the request
    reads nothing from the cache."""
    world = make_world(2, config=EngineConfig(prefill_chunk_tokens_max=2))
    run(world, ask("a"))

    (told,) = run(world, ask("b", prompt_logprobs=0))

    assert world.streams["b"].prompt_pieces == [3, 2, 2, 2]
    assert told.usage.cached_tokens == 0


def test_times_are_counted_from_receipt(world: World) -> None:
    """Times are durations, since two processes share no clock."""
    world.submit(ask(max_tokens=3))
    while world.core.has_work():
        world.clock.advance(1.0)
        world.step()

    usage = world.final("r").usage
    assert usage.queue_s == 1.0
    assert usage.first_token_s is not None
    assert 1.0 <= usage.first_token_s < usage.total_s


# -- samples ----------------------------------------------------------------------------------


def test_samples_share_the_prompt_and_sample_independently(world: World) -> None:
    """The prompt is computed once; each sample's tokens are those it would sample alone."""
    sampling = Sampling(temperature=1.0, seed=3)
    (done,) = run(world, ask(samples=3, max_tokens=6, sampling=sampling))

    assert done.usage.computed_tokens == len(PROMPT)
    assert done.usage.output_tokens == 18
    assert len({tuple(output) for output in world.streams["r"].outputs}) > 1


def test_samples_hold_the_prompts_full_blocks_once(world: World) -> None:
    """Copy on write: three tables of four blocks are two shared blocks and two more each."""
    world.submit(ask(samples=3, tokens=PROMPT[:8], max_tokens=8, sampling=Sampling(seed=3)))
    for _ in range(6):
        world.step()

    assert world.core.stats().pinned_blocks == 2 + 3 * 2


def test_one_sample_may_end_before_the_others(world: World) -> None:
    """A stop string ends one sample, which is charged the tokens its text needed."""
    world.submit(ask(samples=2, max_tokens=8, sampling=Sampling(seed=3)))
    while len(world.streams["r"].outputs[1]) < 4:
        world.step()
    world.end_sample("r", 1, 2)
    world.settle()

    stream = world.streams["r"]
    assert (stream.ended[1].reason, stream.ended[1].output_tokens) == ("stop", 2)
    assert (stream.ended[0].reason, len(stream.outputs[0])) == ("length", 8)
    assert world.final("r").usage.output_tokens == 10


# -- endings ----------------------------------------------------------------------------------


def test_a_stop_token_ends_a_sample_after_min_tokens(world: World) -> None:
    """The stop token itself is reported; before `min_tokens` it is a token like any other."""
    alone = world.streams
    run(world, ask("whole", max_tokens=12))
    stop = alone["whole"].outputs[0][0]
    run(world, ask("soon", max_tokens=12, stop_token_ids=(stop,)))
    run(world, ask("late", max_tokens=12, stop_token_ids=(stop,), min_tokens=2))

    assert alone["soon"].outputs[0] == [stop]
    assert len(alone["late"].outputs[0]) > 1
    assert alone["late"].ended[0].reason in {"stop", "length"}


@pytest.mark.parametrize("steps", range(8))
def test_a_cancel_releases_the_blocks_at_once(world: World, steps: int) -> None:
    """In any state: queued, in its prompt, sampling, between launch and collect, forked."""
    world.submit(ask(samples=2, max_tokens=8, tokens=PROMPT * 2))
    for _ in range(steps):
        world.step()
    world.cancel("r")
    pinned = world.core.stats().pinned_blocks
    world.settle()

    assert world.final("r").ending == "cancelled"
    assert pinned == 0


def test_cancelling_an_unknown_id_does_nothing(world: World) -> None:
    """The request may just have finished while the message was on its way."""
    run(world, ask())
    world.cancel("r")
    world.core.end_sample("r", 0, 1)

    assert world.core.step() == []


def test_a_request_that_misses_its_deadline_is_timed_out() -> None:
    """A request that has started is finished."""
    world = make_world(1, config=EngineConfig(sequences_max=1))
    world.submit(ask("runs", deadline_s=5.0))
    world.submit(ask("waits", deadline_s=5.0, tokens=(1, 1, 0)))
    world.step()
    world.clock.advance(5.0)
    world.settle()

    assert world.final("runs").ending == "done"
    assert (world.final("waits").ending, world.final("waits").code) == ("timeout",) * 2


def test_draining_finishes_live_requests_and_refuses_new_ones(world: World) -> None:
    """Requests that outlive the timeout end as `shutdown` and release their blocks."""
    world.submit(ask("short", max_tokens=1))
    world.submit(ask("long", max_tokens=30))
    world.step()
    world.core.drain(2.0)
    world.submit(ask("late"))
    for _ in range(3):
        world.step()
    world.clock.advance(2.0)
    world.settle()

    names = ("short", "long", "late")
    assert [world.final(n).ending for n in names] == ["done", "shutdown", "refused"]


# -- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_broken_step_fails_only_its_requests(world: World, where: str, step: int) -> None:
    """Nothing of it is committed, the blocks are released, and the engine continues."""
    broken = world.runner.fail_launch if where == "launch" else world.runner.fail_collect
    broken.add(step)
    told: list[tuple[int, str]] = []
    world.core.on_step_failed = lambda number, error: told.append((number, str(error)))
    (first,) = run(world, ask("a", max_tokens=8))

    (second,) = run(world, ask("b", max_tokens=8))

    assert (first.ending, first.code) == ("failed", "step_failed")
    assert "RuntimeError" in first.message
    assert told == [(step, f"planted: {where}")]
    assert second.ending == "done"


def fail_from(world: World, fault: str, first: int, last: int) -> None:
    """Let steps fail, or give no sequence a token."""
    steps = set(range(first, last + 1))
    if fault == "nan":
        world.runner.nan_steps |= steps
    else:
        world.runner.fail_launch |= steps


@pytest.mark.parametrize("fault", ["launch", "nan"])
def test_an_engine_whose_steps_all_fail_stops(world: World, fault: str) -> None:
    """After some errors of a GPU each later call of the process fails: only a new one helps."""
    world.runner.spares_smoke_test = False
    fail_from(world, fault, 1, 4)
    early = [run(world, ask(str(n), max_tokens=1))[0] for n in range(4)]
    (between,) = run(world, ask("between"))
    fail_from(world, fault, world.core.engine_stats.step + 1, 100)
    late = [run(world, ask(f"late {n}", max_tokens=1))[0] for n in range(4)]

    with pytest.raises(EngineUnavailable, match="5 steps failed in a row, and then the smoke test"):
        run(world, ask("last", max_tokens=1))
    assert {end.ending for end in early + late} == {"failed"}
    assert between.ending == "done"


@pytest.mark.parametrize("fault", ["launch", "nan"])
def test_a_tenant_whose_steps_all_fail_stops_nothing(world: World, fault: str) -> None:
    """The smoke test tells its prompts from a broken device, and leaves no trace: counters are
    reconciled with the ledger, and streams of others go on."""
    launch, bad = world.runner.launch, 0

    def fail_alone(plan: StepPlan) -> None:
        nonlocal bad
        ids = {world.core.requests.sequence(row.sequence_id) for row in plan.rows}
        names = {one.parent.request.request_id for one in ids if one is not None}
        if any(name.startswith("bad") for name in names):
            fail_from(world, fault, plan.step, plan.step)
            bad += 1
        launch(plan)

    world.runner.launch = fail_alone  # type: ignore[method-assign]
    for number in range(12):
        (end,) = run(world, ask(f"bad {number}", max_tokens=1))
        assert end.ending == "failed"
    (good,) = run(world, ask("good", max_tokens=2))

    assert (good.ending, bad) == ("done", 12)
    stats, usages = world.core.stats(), [one.finished for one in world.streams.values()]
    assert stats.output_tokens_total == sum(end.usage.output_tokens for end in usages if end)
    assert stats.computed_tokens_total == sum(end.usage.computed_tokens for end in usages if end)
    assert world.cache.stats().pinned == 0


def test_a_smoke_test_takes_its_turn_with_other_requests(world: World) -> None:
    """Requests that have come meanwhile are neither failed by it nor held for it."""
    fail_from(world, "launch", 1, 5)
    for number in range(4):
        run(world, ask(f"bad {number}"))
    world.submit(ask("bad 4"))
    world.step()

    assert world.core.has_work(), "the smoke test"
    endings = run(world, ask("a", max_tokens=12), ask("b", tokens=(1, 1, 0), max_tokens=12))
    assert {end.ending for end in endings} == {"done"}
    assert world.runner.steps >= 5 + 12 + 1


def test_a_broken_step_fails_the_targets_of_its_copies() -> None:
    """A sequence without a row may have a copy in the broken step."""
    world = make_world(1)
    run(world, ask("seen", tokens=(1, 1, 1, 1, 1, 1), max_tokens=1))
    schedule, launch = world.core.scheduler.schedule, world.runner.launch
    broken = world.core.engine_stats.step + 1
    world.runner.fail_launch.add(broken)

    def without_copies(plan: StepPlan) -> None:
        launch(structs.replace(plan, copies=()) if plan.step == broken else plan)

    def without_its_row(now_s: float) -> list[Slice]:
        found = schedule(now_s)
        if world.core.engine_stats.step + 1 > broken:
            return found
        return [piece for piece in found if piece.sequence.parent.request.request_id != "copies"]

    world.runner.launch = without_copies  # type: ignore[method-assign]
    world.core.scheduler.schedule = without_its_row  # type: ignore[method-assign]

    endings = run(world, ask("other", tokens=(0,) * 8), ask("copies", tokens=(1,) * 5 + (0,) * 3))

    assert [e.code for e in endings] == ["step_failed", "step_failed"]


def test_nan_logits_fail_only_their_sequence(world: World) -> None:
    """The other requests of the step continue."""
    world.runner.nan_steps.add(2)
    endings = run(world, ask("a"), ask("b", tokens=(1, 1, 0)), ask("c", tokens=(0, 0, 1)))

    assert sorted(e.ending for e in endings) == ["done", "done", "failed"]
    assert {e.code for e in endings if e.ending == "failed"} == {"nan_logits"}


def test_nan_logits_erase_the_cached_prefix() -> None:
    """The fault lies in a block the sequence reads, and each retry would find it again."""
    config = structs.replace(CONFIG, prefill_chunk_tokens_max=4)
    world = make_world(1, config=config)
    run(world, ask("before"), ask("other", tokens=(1, 0, 0, 0, 1, 1)))
    world.runner.nan_steps.add(world.core.engine_stats.step + 2)

    [failed] = run(world, ask("failed", tokens=(*PROMPT, 0, 1, 1, 0, 1), max_tokens=1))

    assert (failed.code, failed.usage.cached_tokens) == ("nan_logits", 9)
    assert world.peek(b"n", (*PROMPT, 0)) == 0
    assert world.peek(b"n", (1, 0, 0, 0, 1, 1, 0)) == 6
    assert run(world, ask("again"))[0].ending == "done"


def test_only_logits_of_the_model_erase_a_prefix() -> None:
    """With any other ending a client could erase promises: its own for a credit, or those of a
    shared scope."""
    config = structs.replace(CONFIG, prefill_chunk_tokens_max=4)
    world = make_world(1, config=config)
    run(world, ask("before"))
    cached = world.peek(b"n", (*PROMPT, 0))
    collect = world.runner.collect

    def without_token() -> StepResult:
        result = collect()
        ended = dict.fromkeys(result.sampled, "kv_promised")
        return structs.replace(result, sampled={}, failed=ended)

    world.runner.collect = without_token  # type: ignore[method-assign]

    endings = [run(world, ask(f"own {i}", tokens=(*PROMPT, 0, 1, 1)))[0] for i in range(8)]

    assert {(one.ending, one.code) for one in endings} == {("failed", "kv_promised")}
    assert world.peek(b"n", (*PROMPT, 0)) >= cached > 0


@pytest.mark.parametrize(
    ("added", "reason"),
    [(98, "returned step 99; expected step 1"), (0, "sampled 0 tokens; expected 1")],
    ids=["another step", "no token"],
)
def test_a_result_that_cannot_be_stops_the_engine(world: World, added: int, reason: str) -> None:
    """Tokens would go to the wrong sequences, or a request without one would wait for ever."""
    collect = world.runner.collect
    world.runner.collect = lambda: StepResult(collect().step + added)  # type: ignore[method-assign]
    world.submit(ask())

    with pytest.raises(InvariantViolation, match=reason):
        world.settle()


def test_several_tokens_of_a_sequence_launched_ahead_stop_the_engine() -> None:
    """The row in flight reads the first of them, and stands in the place of the second."""
    world = make_world(2)
    collect = world.runner.collect

    def doubled() -> StepResult:
        result = collect()
        return structs.replace(result, sampled={s: t * 2 for s, t in result.sampled.items()})

    world.runner.collect = doubled  # type: ignore[method-assign]
    world.submit(ask())

    with pytest.raises(InvariantViolation, match="sampled 2 tokens; expected 1"):
        world.settle()


def test_a_stall_by_promises_fails_the_first_request(world: World) -> None:
    """After three steps without a slice the first request fails, and the rest continue. At
    admission there was room for it alone; a later promise took that room.
    """
    lease = LeaseRequest(36, Retention("kept", promise_s=1000.0))
    grant = CacheGrant(b"k", Quota(floor_blocks=9), (lease,))
    kept = ask("kept", tokens=PROMPT * 4, max_tokens=1, grant=grant, priority=1)
    big = ask("big", tokens=PROMPT * 4, max_tokens=8)

    endings = run(world, kept, big, ask("small", tokens=(1, 0)))

    assert [e.ending for e in endings] == ["done", "failed", "done"]
    assert endings[1].code == "kv_promised"
    assert endings[1].retry_after_s == pytest.approx(1000.0, abs=1.0), "the promise's end"


# -- what is asked beside requests ---------------------------------------------------------------


def test_peek_reports_the_match_of_a_request(world: World) -> None:
    """For quotes and routing, before any request runs."""
    run(world, ask())

    peeked = world.core.peek(Peek(7, b"n", (*PROMPT, 1)))

    assert (peeked.call_id, peeked.cached_tokens, peeked.expires_in_s) == (7, len(PROMPT), None)


@pytest.mark.parametrize("steps", [0, 4], ids=["queued", "running"])
def test_erased_tokens_are_not_found_again(world: World, steps: int) -> None:
    """Neither what a sequence has written that still runs, nor what a request that waits will
    write."""
    world.submit(ask(max_tokens=8))
    for _ in range(steps):
        world.step()
    world.core.erase(Erase(1, b"n"))
    world.settle()

    assert world.core.peek(Peek(1, b"n", PROMPT)).cached_tokens == 0


def test_stats_count_the_work_done(world: World) -> None:
    run(world, ask("a"), ask("b", grant=CacheGrant(b"m")))
    run(world, ask("c"))

    stats = world.core.stats(5)
    assert (stats.call_id, stats.running, stats.waiting, stats.pinned_blocks) == (5, 0, 0, 0)
    assert stats.prompt_tokens_total == 3 * len(PROMPT)
    assert stats.cached_tokens_total + stats.computed_tokens_total == stats.prompt_tokens_total
    assert stats.output_tokens_total == 12


def test_first_tokens_go_before_those_of_sequences_that_decode(world: World) -> None:
    """The gateway takes milliseconds for the events of a large batch, and a first token is what a
    client waits for."""

    def tokens_of_step() -> list[str]:
        events = world.core.step()
        return [event.request_id for event in events if isinstance(event, Tokens)]

    world.core.submit(ask("old", max_tokens=20))
    while not tokens_of_step():
        pass
    world.core.submit(ask("new", tokens=(1, 1, 0), max_tokens=4))
    orders = [tokens_of_step() for _ in range(8)]
    both = [order for order in orders if len(order) == 2]

    assert both[0] == ["new", "old"]
    assert both[-1] == ["old", "new"]
