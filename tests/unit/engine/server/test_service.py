"""The engine's thread, without an event loop or a socket."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

from engine.api import (
    CacheGrant,
    Cancel,
    Clock,
    Drain,
    Finished,
    GetStats,
    Peek,
    Peeked,
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
