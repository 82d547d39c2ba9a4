"""The engine's thread, without an event loop or a socket."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from engine.api import (
    CacheGrant,
    Cancel,
    Clock,
    Departed,
    Disown,
    Drain,
    EndSample,
    Finished,
    GetDeparted,
    GetHeld,
    GetStats,
    Held,
    HeldTokens,
    LetGo,
    Peek,
    Peeked,
    Quota,
    Request,
    Sampling,
    Started,
    Submit,
    Tokens,
)
from engine.config import EngineConfig
from engine.core.core import Core
from engine.errors import EngineError
from engine.plan import StepResult
from engine.server.service import (
    COMMANDS_S,
    COMMANDS_SHARE,
    HEARTBEAT_ITEMS_MAX,
    EngineService,
    smoke_test,
)
from engine.statistics import Stats
from tests.fakes import FakeClock
from tests.unit.engine.server.fake_engine_process import fake_core

CONFIG = EngineConfig(heartbeat_s=0.05, prefill_chunk_tokens_max=16)
DEADLINE_S = 60.0
LONG = 8_000


def request(name: str, max_tokens: int = 4) -> Request:
    return Request(name, (1, 2, 3), max_tokens, CacheGrant(b"n"), Sampling(temperature=0))


class RecordingSink:
    """A `ResponseSink` that keeps its messages."""

    def __init__(self) -> None:
        self.received: queue.Queue[Any] = queue.Queue()

    def send(self, step: int, messages: tuple[Any, ...]) -> None:
        for message in messages:
            self.received.put(message)

    def until(self, kind: type, **fields: Any) -> Any:
        """Return the next message of that kind with these fields."""
        while True:
            message = self.received.get(timeout=DEADLINE_S)
            if isinstance(message, kind) and all(
                getattr(message, name) == value for name, value in fields.items()
            ):
                return message


@contextmanager
def running(
    config: EngineConfig = CONFIG, clock: Clock = time.monotonic
) -> Iterator[EngineService]:
    """Run a service over the fake core."""
    service = EngineService(lambda: fake_core(config), config, clock)
    service.start()
    assert service.ready.wait(DEADLINE_S)
    try:
        yield service
    finally:
        service.stop()


@pytest.fixture
def service() -> Iterator[EngineService]:
    with running() as service:
        yield service


def test_connections_receive_only_their_own_events(service: EngineService) -> None:
    """Two gateways on one engine must not read each other's responses, nor cancel each other's
    requests."""
    ours, theirs = RecordingSink(), RecordingSink()
    service.post(theirs, Submit(request("theirs", LONG)))
    theirs.until(Tokens)

    service.post(ours, Cancel("theirs"))
    service.post(ours, Submit(request("theirs")))
    service.post(ours, Submit(request("ours")))

    assert ours.until(Finished).code == "duplicate_request"
    assert ours.until(Started).request_id == "ours"
    assert ours.until(Finished).ending == "done"
    service.post(theirs, GetStats(1))
    assert theirs.until(Stats, call_id=1).running == 1


def test_connections_are_told_one_sum_of_what_payers_hold() -> None:
    """Whoever asks, and however often: two gateways bill the same token-seconds once."""
    clock = FakeClock()
    service = EngineService(lambda: fake_core(CONFIG, clock=clock), CONFIG)
    service.start()
    assert service.ready.wait(DEADLINE_S)
    ours, theirs = RecordingSink(), RecordingSink()
    grant = CacheGrant(b"n", Quota(payer=b"7"))
    prompt = tuple(range(32))
    service.post(ours, Submit(Request("a", prompt, 1, grant, Sampling(temperature=0))))
    ours.until(Finished)
    service.post(ours, GetHeld(1))
    ours.until(Held)
    clock.advance(10.0)
    for sink in (ours, theirs, ours):
        service.post(sink, GetHeld(2))
    told = [sink.until(Held, call_id=2) for sink in (ours, theirs, ours)]
    service.stop()

    assert told[0].readings == (HeldTokens(b"7", "", 10 * 32),)
    assert told[1:] == [told[0]] * 2


def test_the_counts_of_a_gateway_that_left_are_told_until_they_are_settled(
    service: EngineService,
) -> None:
    """What it finished, one by one; what it abandoned is counted apart."""
    gone, stays = RecordingSink(), RecordingSink()
    service.join(gone, "g/1")
    service.join(stays, "h/1")
    for name in ("a", "b"):
        service.post(gone, Submit(request(name)))
        gone.until(Finished, request_id=name)
    service.post(gone, Submit(request("c", LONG)))
    gone.until(Tokens, request_id="c")
    service.post(stays, GetDeparted(1))
    service.leave(gone)
    service.post(stays, GetDeparted(2))
    service.post(stays, GetStats(3))
    service.post(stays, GetDeparted(4, ("g/1", "h/1")))
    here, told = stays.until(Departed, call_id=1), stays.until(Departed, call_id=2)
    stats = stays.until(Stats, call_id=3)
    again = stays.until(Departed, call_id=4)

    (left,) = told.gateways
    assert (here.gateways, again.gateways) == ((), ())
    assert [one.request_id for one in left.ended] == ["a", "b"]
    assert left.start == "g/1"
    assert (left.prompt_tokens, left.cached_tokens) == (
        stats.prompt_tokens_total - stats.abandoned_prompt_tokens_total,
        stats.cached_tokens_total - stats.abandoned_cached_tokens_total,
    )
    assert left.output_tokens == sum(one.output_tokens for one in left.ended) > 0
    assert stats.abandoned_output_tokens_total > 0


def test_a_resumed_request_that_a_stop_ends_within_what_it_had_counts_less_than_nothing(
    service: EngineService,
) -> None:
    """As in the engine's totals, which count what it sampled beyond the stop as unneeded: the
    entry has the resumed tokens from the engine before."""
    gone, stays = RecordingSink(), RecordingSink()
    service.join(gone, "g/1")
    resumed = replace(request("a", LONG), tokens=(*range(3, 30),), resumed_tokens=9)
    service.post(gone, Submit(resumed))
    service.post(gone, EndSample("a", 0, 4))
    gone.until(Finished)
    service.leave(gone)
    service.post(stays, GetDeparted(1))
    service.post(stays, GetStats(2))
    (left,) = stays.until(Departed, call_id=1).gateways
    stats = stays.until(Stats, call_id=2)

    assert left.output_tokens == stats.output_tokens_total - stats.unneeded_tokens_total


def test_a_request_whose_end_was_lost_on_the_way_is_counted_as_abandoned(
    service: EngineService,
) -> None:
    """Its gateway has sent it elsewhere: it says so when it is back. Another's id changes
    nothing."""
    first, again, other = RecordingSink(), RecordingSink(), RecordingSink()
    service.join(first, "g/1")
    service.join(other, "h/1")
    service.post(first, Submit(request("a")))
    first.until(Finished)
    service.leave(first)
    service.join(again, "g/1")
    service.post(other, Disown(("a",)))
    service.post(again, Disown(("a", "unknown")))
    service.post(again, Disown(("a",)))
    service.post(again, GetStats(1))
    stats = again.until(Stats, call_id=1)

    assert stats.abandoned_output_tokens_total == stats.output_tokens_total > 0
    assert stats.abandoned_prompt_tokens_total == stats.prompt_tokens_total


def test_a_connection_receives_the_tokens_of_a_step_together(service: EngineService) -> None:
    """Also where rows of two connections take turns in the batch."""
    steps: dict[int, list[int]] = {}

    class StepSink(RecordingSink):
        def send(self, step: int, messages: tuple[Any, ...]) -> None:
            if any(isinstance(message, Tokens) for message in messages):
                steps.setdefault(id(self), []).append(step)
            super().send(step, messages)

    sinks = (StepSink(), StepSink())
    for number in range(6):
        service.post(sinks[number % 2], Submit(request(f"r{number}", 40)))

    for number, sink in enumerate(sinks):
        names = {sink.until(Finished).request_id for _ in range(3)}
        assert names == {f"r{index}" for index in range(number, 6, 2)}
    assert all(len(of) == len(set(of)) for of in steps.values())


def test_leaving_connection_cancels_only_its_requests(service: EngineService) -> None:
    gone, stays = RecordingSink(), RecordingSink()
    service.post(gone, Submit(request("gone", LONG)))
    service.post(stays, Submit(request("stays", LONG)))
    gone.until(Tokens)

    service.leave(gone)
    service.post(stays, GetStats(1))

    there = stays.until(Stats, call_id=1)
    # it may have waited for the cancelled request of the same prompt
    assert there.running + there.waiting == 1


def test_heartbeats_take_a_twentieth_of_the_time_at_most() -> None:
    """With ten thousand namespaces to report, an engine that reported twice a second would do
    little else."""
    now_s, heartbeat_s, command_s = 0.0, 0.01, 0.001

    class SlowSink(RecordingSink):
        def send(self, step: int, messages: tuple[Any, ...]) -> None:
            """A heartbeat takes as long as if it told of much; the engine is never idle."""
            nonlocal now_s
            if isinstance(messages[0], Stats):
                self.received.put(now_s)
                now_s += heartbeat_s
            now_s += command_s
            busy.post(self, Peek(1, b"n", (1, 2, 3)))

    sink = SlowSink()
    with running(EngineConfig(heartbeat_s=heartbeat_s), lambda: now_s) as busy:
        busy.join(sink)
        beats = [sink.received.get(timeout=DEADLINE_S) for _ in range(4)]

    apart_s = [late - early for early, late in pairwise(beats[1:])]
    assert min(apart_s) >= 20 * heartbeat_s
    assert max(apart_s) < 25 * heartbeat_s


@pytest.mark.parametrize("step_s", [0.0, 0.1])
def test_a_flood_of_commands_delays_no_step_and_no_heartbeat_for_long(step_s: float) -> None:
    """Streams would stop until all are handled, and an engine without heartbeats is ended."""
    now_s, command_s, flood = 0.0, 0.001, 300
    core, info = fake_core(CONFIG)
    collect = core.runner.collect

    def slow_collect() -> StepResult:
        nonlocal now_s
        now_s += step_s
        return collect()

    core.runner.collect = slow_collect  # type: ignore[method-assign]

    class SlowSink(RecordingSink):
        def send(self, step: int, messages: tuple[Any, ...]) -> None:
            """Each command takes a while."""
            nonlocal now_s
            now_s += command_s if isinstance(messages[0], Peeked) else 0
            super().send(step, messages)

    sink, beats = SlowSink(), EngineConfig(heartbeat_s=10 * command_s)
    service = EngineService(lambda: (core, info), beats, lambda: now_s)
    service.join(sink)
    service.post(sink, Submit(request("stream", flood)))
    for number in range(flood):
        service.post(sink, Peek(number, b"n", (1, 2, 3)))
    service.start()
    received: list[Any] = []
    while not (received and isinstance(received[-1], Finished)):
        received.append(sink.received.get(timeout=DEADLINE_S))
    service.stop()

    kinds = [type(message) for message in received]
    most = max(COMMANDS_S, COMMANDS_SHARE * step_s) / command_s + 1
    between = "".join(kind.__name__[0] for kind in kinds if kind in (Peeked, Tokens)).split("T")
    assert most - 2 <= max(map(len, between)) <= most
    beats_at = [kinds[:at].count(Peeked) for at, kind in enumerate(kinds) if kind is Stats]
    assert max(late - early for early, late in pairwise(beats_at)) <= 10 + most
    answers = [one.call_id for one in received if isinstance(one, Peeked)]
    assert answers == list(range(flood)), "all in their order"


def test_large_heartbeat_is_split_between_steps() -> None:
    """Otherwise all decoding requests wait for it, twice a second. The next heartbeat is an hour
    away."""
    passed_s, hourly = 0.0, EngineConfig(heartbeat_s=3_600.0, prefill_chunk_tokens_max=16)
    sink = RecordingSink()
    names = {b"%d" % number for number in range(HEARTBEAT_ITEMS_MAX + HEARTBEAT_ITEMS_MAX // 2)}
    with running(hourly, lambda: time.monotonic() + passed_s) as service:
        service.join(sink)
        assert sink.until(Stats).changed == ()
        for name in names:
            service.post(sink, Submit(Request(name.decode(), (1,), 1, CacheGrant(name))))
        for _ in names:
            sink.until(Finished)

        passed_s = 3_600.0
        service.post(sink, Cancel("to wake it"))
        told = [{one.namespace for one in sink.until(Stats).changed} for _ in range(2)]

    assert sorted(map(len, told)) == [len(names) - HEARTBEAT_ITEMS_MAX, HEARTBEAT_ITEMS_MAX]
    assert told[0] | told[1] == names


def test_heartbeat_lists_changed_namespaces_per_connection() -> None:
    """Twenty thousand namespaces would be megabytes, twice a second; a new connection gets all."""
    early, late = RecordingSink(), RecordingSink()
    with running(EngineConfig(heartbeat_s=3_600.0)) as service:
        service.join(early)
        assert early.until(Stats).changed == ()
        service.post(early, Submit(request("a")))
        early.until(Finished)

        service.post(early, GetStats(1))
        service.post(early, GetStats(2))
        service.join(late)
        whole = late.until(Stats).changed
        service.post(late, Submit(request("b", LONG)))
        late.until(Started)
        service.post(early, GetStats(3))
        service.post(late, GetStats(3))
        told = [early.until(Stats, call_id=number).changed for number in (1, 2, 3)]
        then = late.until(Stats, call_id=3).changed

    assert [(one.namespace, one.running) for one in told[0]] == [(b"n", 0)]
    assert told[1] == ()
    assert whole == told[0]
    assert [(one.namespace, one.running) for one in told[2]] == [(b"n", 1)]
    assert [one.namespace for one in then] == [b"n"]


def test_request_after_the_end_is_refused(service: EngineService) -> None:
    """The last steps of a drain and a late request meet in the inbox."""
    sink = RecordingSink()

    service.post(sink, Drain(0.0))
    service.post(sink, Submit(request("late")))

    assert sink.until(Finished).code == "draining"
    assert service.stopped.wait(DEADLINE_S)
    assert service.failure is None


def test_an_engine_that_cannot_close_its_levels_still_stops() -> None:
    """Its process would wait for ever, alive and deaf."""
    core, info = fake_core(CONFIG)

    def fail() -> None:
        raise OSError("no such folder")

    core.close = fail  # type: ignore[method-assign]
    service = EngineService(lambda: (core, info), CONFIG)
    service.start()

    service.post(RecordingSink(), Drain(0.0))

    assert service.stopped.wait(DEADLINE_S)
    assert isinstance(service.failure, OSError)


def test_engine_without_a_first_token_is_not_ready() -> None:
    """The reason is told: it may be a pool that holds no token."""
    core, _ = fake_core(CONFIG)
    core.drain(100.0)

    with pytest.raises(EngineError, match="smoke test failed: The engine is shutting down"):
        smoke_test(core)


def test_smoke_test_leaves_no_block_and_is_not_counted(service: EngineService) -> None:
    """An epoch begins with every block free, and counters that are reconciled with a ledger count
    clients' tokens only."""
    sink = RecordingSink()
    service.join(sink)

    stats = sink.until(Stats)

    assert stats.free_blocks == stats.blocks
    assert (stats.prompt_tokens_total, stats.computed_tokens_total) == (0, 0)
    assert (stats.cached_tokens_total, stats.output_tokens_total) == (0, 0)
    assert stats.steps_per_s == 0, "a first step is slower than any other"


def test_failed_loading_is_kept_and_ends_the_thread() -> None:
    """A caller that waits for readiness finds the reason."""

    def broken() -> tuple[Core, Any]:
        raise OSError("planted")

    service = EngineService(broken, CONFIG)
    service.start()

    assert service.stopped.wait(DEADLINE_S)
    assert isinstance(service.failure, OSError)
    assert service.info is None


@pytest.mark.parametrize("is_let_go", [True, False])
def test_a_drained_engine_waits_for_gateways_until_its_deadline(is_let_go: bool) -> None:
    """One that moves promises is waited for, until it lets go, or the drain's time is over: a
    gateway that hangs keeps no host from being upgraded."""
    clock = FakeClock()
    with running(clock=clock) as service:
        sink = RecordingSink()
        service.join(sink, moves=True)
        service.post(sink, Drain(30.0))
        for call_id, later_s in enumerate((29.0, 0.5, 0.0), 1):  # each answer is a turn of its own
            service.post(sink, Peek(call_id, b"n", (1, 2, 3)))
            sink.until(Peeked, call_id=call_id)
            clock.advance(later_s)
        stayed = not service.stopped.is_set()
        if is_let_go:
            service.post(sink, LetGo())
        else:
            clock.advance(1.5)

        assert stayed
        assert service.stopped.wait(DEADLINE_S)
