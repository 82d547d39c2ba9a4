"""What an engine tells a connection that watches its prefixes, through the service."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from engine.api import (
    CacheGrant,
    Erase,
    Finished,
    Request,
    Sampling,
    Started,
    Submit,
    WatchPrefixes,
)
from engine.config import EngineConfig
from engine.server.prefix_reporter import LOAD_EVERY_S, NODES_A_STEP
from engine.server.service import EngineService
from engine.statistics import LoadReport
from engine.strides import DIGEST_BYTES, STRIDE_TOKENS, PrefixChanges, stride_digests
from tests.unit.engine.server.fake_engine_process import fake_core

DEADLINE_S = 60.0
HOURLY = EngineConfig(heartbeat_s=3_600.0)
LONG = tuple(number % 50 for number in range(40 * STRIDE_TOKENS))


class Gateway:
    """A `ResponseSink` that keeps its messages in order, and the prefixes that it was told."""

    def __init__(self) -> None:
        self.received: queue.Queue[Any] = queue.Queue()
        self.device: set[bytes] = set()
        self.parts: list[PrefixChanges] = []
        self.load = LoadReport()

    def send(self, step: int, messages: tuple[Any, ...]) -> None:
        """Keep the messages of a step."""
        for message in messages:
            self.received.put(message)

    def read(self, kind: type) -> Any:
        """Return the next message of a kind; follow the facts that come before it."""
        while True:
            message = self.received.get(timeout=DEADLINE_S)
            if isinstance(message, PrefixChanges):
                self.parts.append(message)
                self.device = set() if message.is_first else self.device
                self.device -= _digests(message.device_removed)
                self.device |= _digests(message.device_added)
            elif isinstance(message, LoadReport):
                self.load = message
            if isinstance(message, kind):
                return message

    def read_until(self, count: int) -> None:
        """Read facts until so many prefixes are known."""
        while len(self.device) != count:
            self.read(PrefixChanges)


def _digests(packed: bytes) -> set[bytes]:
    return {packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES)}


@contextmanager
def running(clock: Any = time.monotonic) -> Iterator[EngineService]:
    """Run a service whose heartbeat is an hour away."""
    service = EngineService(lambda: fake_core(HOURLY), HOURLY, clock)
    service.start()
    assert service.ready.wait(DEADLINE_S)
    try:
        yield service
    finally:
        service.stop()


def request(name: str, tokens: tuple[int, ...] = LONG, max_tokens: int = 1) -> Request:
    return Request(name, tokens, max_tokens, CacheGrant(b"n"), Sampling(temperature=0))


def test_a_whole_tree_arrives_in_parts_without_a_heartbeat() -> None:
    """One frame of a large tree would hold up every stream."""
    gateway, longest = Gateway(), (*LONG, *LONG[: 20 * STRIDE_TOKENS])
    with running() as service:
        service.post(gateway, Submit(request("a", longest)))
        gateway.read(Finished)
        service.post(gateway, WatchPrefixes())
        gateway.read_until(60)

    assert [part.is_first for part in gateway.parts] == [True, *[False] * (len(gateway.parts) - 1)]
    most = max(len(part.device_added) for part in gateway.parts) // DIGEST_BYTES
    assert len(gateway.parts) > 1
    assert most <= NODES_A_STEP // 8


def test_a_prefix_is_told_before_the_events_of_its_step() -> None:
    """A gateway that sees an answer routes the next turn of its conversation at once."""
    gateway = Gateway()
    with running() as service:
        service.post(gateway, WatchPrefixes())
        service.post(gateway, Submit(request("a")))
        gateway.read(Finished)

    assert gateway.device == set(stride_digests(b"n", LONG))


def test_an_erasure_is_told_before_later_events() -> None:
    """No request may be sent after a prefix that is known to be gone."""
    gateway = Gateway()
    with running() as service:
        service.post(gateway, WatchPrefixes())
        service.post(gateway, Submit(request("a")))
        gateway.read(Finished)
        service.post(gateway, Erase(1, b"n"))
        service.post(gateway, Submit(request("b", (7,))))
        gateway.read(Started)

    assert not gateway.device


def test_asked_again_all_is_told_anew() -> None:
    """A gateway that doubts what it knows begins from nothing."""
    gateway = Gateway()
    with running() as service:
        service.post(gateway, WatchPrefixes())
        service.post(gateway, Submit(request("a")))
        gateway.read(Finished)
        gateway.device = {b"of no engine"}
        service.post(gateway, WatchPrefixes())
        gateway.read_until(40)

    assert gateway.device == set(stride_digests(b"n", LONG))


def test_two_gateways_know_the_same() -> None:
    """Each is told everything, and what the other one's requests change."""
    first, second = Gateway(), Gateway()
    with running() as service:
        service.post(first, WatchPrefixes())
        service.post(first, Submit(request("a")))
        first.read(Finished)
        service.post(second, WatchPrefixes())
        second.read_until(40)
        service.leave(second)
        service.post(first, Erase(1, b"n"))
        service.post(first, Submit(request("c", (7,))))
        first.read(Started)

    assert len(second.device) == 40
    assert not first.device


def test_load_counts_the_submits_of_its_connection() -> None:
    """What was sent afterwards waits too, and the gateway adds that itself."""
    gateway, other = Gateway(), Gateway()
    with running() as service:
        service.post(other, Submit(request("theirs", (1, 2, 3))))
        other.read(Finished)
        service.post(gateway, Submit(request("a", (1, 2, 3))))
        service.post(gateway, WatchPrefixes())
        while gateway.load.accepted < 1:
            gateway.read(LoadReport)
        service.post(gateway, Submit(request("b", (1, 2, 3))))
        service.post(gateway, Submit(request("c", (1, 2, 3))))
        while gateway.load.accepted < 3:
            gateway.read(LoadReport)

    assert 0 < gateway.load.free_blocks < 512
    assert gateway.load.promisable_blocks == 448
    assert gateway.load.prefill_tokens_per_s > 0
    assert gateway.load.below_bytes_per_s == 0


def test_load_is_told_twenty_times_a_second_at_most() -> None:
    """A step takes a millisecond, and a report as long as an event."""
    now_s, step_s = 0.0, LOAD_EVERY_S / 10

    class Slow(Gateway):
        def send(self, step: int, messages: tuple[Any, ...]) -> None:
            """Each step takes a while."""
            nonlocal now_s
            now_s += step_s
            for message in messages:
                if isinstance(message, LoadReport):
                    self.received.put(now_s)
                elif isinstance(message, Finished):
                    self.received.put(message)

    gateway = Slow()
    with running(lambda: now_s) as service:
        service.post(gateway, WatchPrefixes())
        service.post(gateway, Submit(request("a", (1, 2, 3), 100)))
        told = [gateway.received.get(timeout=DEADLINE_S) for _ in range(6)]

    assert min(late - early for early, late in pairwise(told)) >= LOAD_EVERY_S


def test_a_connection_that_leaves_is_told_nothing_more() -> None:
    """And an engine that nobody watches computes no digests."""
    gateway, other = Gateway(), Gateway()
    with running() as service:
        service.post(gateway, WatchPrefixes())
        service.post(gateway, Submit(request("a")))
        gateway.read(Finished)
        service.leave(gateway)
        service.post(other, Submit(request("b", (7, *LONG))))
        other.read(Started)  # what the first one was told before it left has come
        while not gateway.received.empty():
            gateway.received.get()
        other.read(Finished)

    assert not other.parts
    assert gateway.received.empty()
