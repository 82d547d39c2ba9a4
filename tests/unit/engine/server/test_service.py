"""The engine's thread, without any loop or socket around it."""

from __future__ import annotations

import queue
import time
from itertools import pairwise
from typing import Any

import pytest

from engine.api import (
    CacheGrant,
    Cancel,
    Drain,
    Finished,
    GetStats,
    Request,
    Sampling,
    Started,
    Stats,
    Submit,
    Tokens,
)
from engine.config import EngineConfig
from engine.core.core import Core
from engine.errors import EngineError
from engine.server.service import TOLD_MAX, EngineService, smoke_test
from tests.unit.engine.server.fake_engine_process import fake_core

CONFIG = EngineConfig(heartbeat_s=0.05, prefill_chunk_tokens_max=16)
DEADLINE_S = 60.0
LONG = 8_000


def request(name: str, max_tokens: int = 4) -> Request:
    return Request(name, (1, 2, 3), max_tokens, CacheGrant(b"n"), Sampling(temperature=0))


class Ear:
    """An outlet that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: queue.Queue[Any] = queue.Queue()

    def send(self, step: int, messages: tuple[Any, ...]) -> None:
        for message in messages:
            self.heard.put(message)

    def until(self, kind: type, **fields: Any) -> Any:
        """The next message of that kind with these fields."""
        while True:
            message = self.heard.get(timeout=DEADLINE_S)
            if isinstance(message, kind) and all(
                getattr(message, name) == value for name, value in fields.items()
            ):
                return message


@pytest.fixture
def service() -> Any:
    service = EngineService(lambda: fake_core(CONFIG), CONFIG)
    service.start()
    assert service.ready.wait(DEADLINE_S)
    yield service
    service.stop()


def test_a_connection_hears_only_of_its_own(service: EngineService) -> None:
    """Two gateways on one engine must not read each other's answers, nor end each other's work."""
    mine, theirs = Ear(), Ear()
    service.post(theirs, Submit(request("theirs", LONG)))
    theirs.until(Tokens)

    service.post(mine, Cancel("theirs"))
    service.post(mine, Submit(request("theirs")))
    service.post(mine, Submit(request("mine")))

    assert mine.until(Finished).code == "duplicate_request"
    assert mine.until(Started).request_id == "mine"
    assert mine.until(Finished).ending == "done"
    service.post(theirs, GetStats(1))
    assert theirs.until(Stats, call_id=1).running == 1


def test_a_connection_that_leaves_cancels_its_own(service: EngineService) -> None:
    """And nobody else's."""
    gone, stays = Ear(), Ear()
    service.post(gone, Submit(request("gone", LONG)))
    service.post(stays, Submit(request("stays", LONG)))
    gone.until(Tokens)

    service.leave(gone)
    service.post(stays, GetStats(1))

    there = stays.until(Stats, call_id=1)
    assert there.running + there.waiting == 1  # it may have waited for the twin that is gone


def test_heartbeats_take_a_twentieth_of_the_time_at_most() -> None:
    """With ten thousand namespaces to tell of, an engine that told twice a second would do little
    else."""
    taken_s = 0.0

    def clock() -> float:
        return time.monotonic() + taken_s

    class SlowEar(Ear):
        def send(self, step: int, messages: tuple[Any, ...]) -> None:
            """Each takes as long as if it told of much."""
            nonlocal taken_s
            at_s = clock()
            taken_s += 0.01
            if any(isinstance(message, Stats) for message in messages):
                self.heard.put(at_s)

    ear, quick = SlowEar(), EngineConfig(heartbeat_s=0.01)
    service = EngineService(lambda: fake_core(quick), quick, clock)
    service.start()
    assert service.ready.wait(DEADLINE_S)
    service.join(ear)
    beats = [ear.heard.get(timeout=DEADLINE_S) for _ in range(4)]
    service.stop()

    assert min(late - early for early, late in pairwise(beats[1:])) > 0.15


def test_a_heartbeat_that_has_much_to_tell_tells_it_between_steps() -> None:
    """Otherwise whoever decodes waits for all of it, twice a second. One beat, then as much as is
    left of it: the next beat is an hour away."""
    passed_s, hourly = 0.0, EngineConfig(heartbeat_s=3_600.0, prefill_chunk_tokens_max=16)
    service = EngineService(lambda: fake_core(hourly), hourly, lambda: time.monotonic() + passed_s)
    service.start()
    assert service.ready.wait(DEADLINE_S)
    ear, names = Ear(), {b"%d" % number for number in range(TOLD_MAX + TOLD_MAX // 2)}
    service.join(ear)
    assert ear.until(Stats).changed == ()
    for name in names:
        service.post(ear, Submit(Request(name.decode(), (1,), 1, CacheGrant(name))))
    for _ in names:
        ear.until(Finished)

    passed_s = 3_600.0
    service.post(ear, Cancel("to wake it"))
    told = [{one.namespace for one in ear.until(Stats).changed} for _ in range(2)]
    service.stop()

    assert sorted(map(len, told)) == [len(names) - TOLD_MAX, TOLD_MAX]
    assert told[0] | told[1] == names


def test_each_connection_is_told_of_a_namespace_when_it_has_changed() -> None:
    """What twenty thousand hold would be megabytes, twice a second; who comes later is told all."""
    never = EngineConfig(heartbeat_s=3_600.0)
    service = EngineService(lambda: fake_core(never), never)
    service.start()
    assert service.ready.wait(DEADLINE_S)
    early, late = Ear(), Ear()
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
    service.stop()

    assert [(one.namespace, one.running) for one in told[0]] == [(b"n", 0)]
    assert told[1] == ()
    assert whole == told[0]
    assert [(one.namespace, one.running) for one in told[2]] == [(b"n", 1)]
    assert [one.namespace for one in then] == [b"n"]


def test_a_request_that_comes_after_the_end_is_answered(service: EngineService) -> None:
    """The last steps of a drain and a late request meet in the inbox."""
    ear = Ear()

    service.post(ear, Drain(0.0))
    service.post(ear, Submit(request("late")))

    assert ear.until(Finished).code == "draining"
    assert service.stopped.wait(DEADLINE_S)
    assert service.failure is None


def test_an_engine_without_a_first_token_is_not_ready() -> None:
    """Readiness is a token, not a process."""
    core, _ = fake_core(CONFIG)
    core.drain(100.0)

    with pytest.raises(EngineError):
        smoke_test(core)


def test_the_canary_leaves_no_trace_in_the_cache(service: EngineService) -> None:
    """An epoch begins with every block free."""
    ear = Ear()
    service.join(ear)

    stats = ear.until(Stats)

    assert stats.free_blocks == stats.blocks


def test_the_canary_is_in_no_count(service: EngineService) -> None:
    """What is compared with a ledger counts nobody's tokens but clients'."""
    ear = Ear()
    service.join(ear)

    stats = ear.until(Stats)

    assert (stats.prompt_tokens_total, stats.computed_tokens_total) == (0, 0)
    assert (stats.cached_tokens_total, stats.output_tokens_total) == (0, 0)


def test_loading_that_fails_is_kept_and_ends_the_thread() -> None:
    """Whoever waits for readiness finds the reason."""

    def broken() -> tuple[Core, Any]:
        raise OSError("planted")

    service = EngineService(broken, CONFIG)
    service.start()

    assert service.stopped.wait(DEADLINE_S)
    assert isinstance(service.failure, OSError)
    assert service.info is None
