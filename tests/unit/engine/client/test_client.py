"""Conformance of both engines, over a socket and in a thread."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from engine.api import (
    CacheGrant,
    Cancel,
    Command,
    Finished,
    GetStats,
    PromptLogprobs,
    Request,
    SampleEnded,
    Sampling,
    Started,
    Submit,
    Tokens,
    Usage,
)
from engine.client import client
from engine.client.client import EngineConnection, SocketEngine
from engine.client.frame_wire import FrameWire
from engine.client.request_stream import RequestStream
from engine.client.tls_files import tls_context
from engine.client.tls_wire import TlsWire
from engine.config import EngineConfig
from engine.errors import EngineError, EngineUnavailable, InvariantViolation, RequestRefused
from engine.protocol import (
    PROTOCOL_VERSION,
    Frame,
    Hello,
    Welcome,
    encode,
    encode_step,
    read_upward,
)
from engine.server.embedded import LocalEngine
from engine.server.links import gateway_link
from engine.server.links.gateway_link import GatewayLink
from engine.server.links.keeper_link import ListenSettings, ServerSettings, read_settings
from engine.server.links.listener import EngineListener
from engine.server.service import EngineService
from engine.statistics import Stats
from engine.wire import Decoder
from tests.fakes import ENGINE_INFO, solo_output
from tests.unit.engine.server.fake_engine_process import VOCAB, fake_core
from tests.unit.engine.server.fleet_certificates import certificate

CONFIG = EngineConfig(heartbeat_s=0.05, step_tokens_max=64, prefill_chunk_tokens_max=16)
GREEDY = Sampling(temperature=0)
DEADLINE_S = 60.0
LONG = 8_000
"""Output tokens enough to be still at it when a test acts."""


def request(
    name: str = "a", prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 4, **more: Any
) -> Request:
    return Request(name, prompt, max_tokens, CacheGrant(b"n"), GREEDY, **more)


class SilentEngine(EngineConnection):
    """An engine that reads all and answers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.info = ENGINE_INFO
        self.commands: list[Command] = []

    def post(self, command: Command) -> None:
        """Keep it."""
        self.commands.append(command)

    async def close(self) -> None:
        """Do nothing."""


async def test_a_hurried_gateway_waits_once_for_an_engine_that_does_not_answer(
    forward: Callable[[float], None],
) -> None:
    """Also what was asked before is given up, and what is answered in time is not."""
    engine = SilentEngine()
    before = asyncio.create_task(engine.get_held())
    await asyncio.sleep(0)
    engine.hurry()
    answered = asyncio.create_task(engine.get_stats())
    await asyncio.sleep(0)
    (call,) = (one for one in engine.commands if isinstance(one, GetStats))
    engine.receive([Stats(call_id=call.call_id, step=7)])
    assert (await answered).step == 7
    forward(client.LAST_CALL_S)
    with pytest.raises(EngineUnavailable, match="did not answer within 3 s"):
        await before
    later = asyncio.create_task(engine.get_held())
    for _ in range(5):  # turns, in which no time passes
        await asyncio.sleep(0)

    assert later.done()
    assert isinstance(later.exception(), EngineUnavailable)


class EngineUnderTest:
    """An engine and the service behind it."""

    def __init__(self, engine: SocketEngine | LocalEngine, service: EngineService) -> None:
        self.engine = engine
        self.service = service

    def break_core(self) -> None:
        """Plant an invariant violation, which the next step finds."""

        def broken() -> None:
            raise InvariantViolation("planted")

        self.service.join(EngineThreadCall(broken))


class EngineThreadCall:
    """A response sink that runs a function in the engine's thread."""

    def __init__(self, act: Any) -> None:
        self._act = act

    def send(self, step: int, messages: tuple[Any, ...]) -> None:
        self._act()


@asynccontextmanager
async def socket_engine() -> AsyncIterator[EngineUnderTest]:
    loop = asyncio.get_running_loop()
    loaded = asyncio.Event()

    def changed() -> None:
        loop.call_soon_threadsafe(loaded.set)
        if service.failure is not None:
            asyncio.run_coroutine_threadsafe(gateway.close(), loop)

    service = EngineService(lambda: fake_core(CONFIG), CONFIG, on_change=changed)
    ours, theirs = socket.socketpair()
    gateway = GatewayLink(partial(FrameWire, theirs))
    hello = Hello(PROTOCOL_VERSION, "fake", msgspec.to_builtins(CONFIG))
    connecting = asyncio.create_task(SocketEngine.connect(ours, hello))
    assert await read_settings(gateway) == ServerSettings("fake", CONFIG)
    service.start()
    await loaded.wait()
    assert service.info is not None
    gateway.welcome(service, service.info)
    engine = await connecting
    try:
        yield EngineUnderTest(engine, service)
    finally:
        await engine.close()
        await gateway.ended.wait()
        await gateway.close()
        await asyncio.to_thread(service.stop)


@asynccontextmanager
async def tls_engine() -> AsyncIterator[EngineUnderTest]:
    """Yield an engine behind a listener, as gateways elsewhere reach it."""
    loaded, loop = asyncio.Event(), asyncio.get_running_loop()

    def changed() -> None:
        loop.call_soon_threadsafe(loaded.set)
        if service.failure is not None:
            asyncio.run_coroutine_threadsafe(listener.close(), loop)

    service = EngineService(lambda: fake_core(CONFIG), CONFIG, on_change=changed)
    service.start()
    await loaded.wait()
    assert service.info is not None
    end = socket.create_server(("127.0.0.1", 0))
    port = end.getsockname()[1]
    settings = ListenSettings(end.detach(), "e0", certificate("engine/e0"))
    listener = EngineListener(settings, service, service.info, ())
    listener.open()
    wire = TlsWire()
    await wire.dial("127.0.0.1", port, tls_context(certificate("gateway/g0"), is_server=False))
    engine = await SocketEngine.connect(wire, Hello(PROTOCOL_VERSION, role="gateway", name="g0"))
    try:
        yield EngineUnderTest(engine, service)
    finally:
        await engine.close()
        await listener.close()
        await asyncio.to_thread(service.stop)


@asynccontextmanager
async def local_engine() -> AsyncIterator[EngineUnderTest]:
    engine = await LocalEngine.start(lambda: fake_core(CONFIG), CONFIG)
    try:
        yield EngineUnderTest(engine, engine.service)
    finally:
        await engine.close()


@asynccontextmanager
async def welcomed_engine() -> AsyncIterator[tuple[SocketEngine, socket.socket]]:
    """Yield the gateway's end without an engine behind it, and the other end of its socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        engine = SocketEngine(ours)
        engine.take_frame(encode(Welcome(fake_core(CONFIG)[1]))[4:])
        yield engine, theirs
        await engine.close()


@pytest.fixture(params=[socket_engine, tls_engine, local_engine], ids=["socket", "tls", "local"])
async def under_test(request: pytest.FixtureRequest) -> AsyncIterator[EngineUnderTest]:
    async with request.param() as under_test:
        yield under_test


@pytest.fixture(params=[socket_engine, local_engine], ids=["socket", "local"])
async def own_engine(request: pytest.FixtureRequest) -> AsyncIterator[EngineUnderTest]:
    """Yield an engine that the gateway itself may drain."""
    async with request.param() as under_test:
        yield under_test


async def read(stream: RequestStream) -> list[Any]:
    async with asyncio.timeout(DEADLINE_S):
        return [event async for event in stream]


async def first(stream: RequestStream, kind: type) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        async for event in stream:
            if isinstance(event, kind):
                return event
    raise AssertionError(f"no {kind.__name__}")


def tokens_of(events: list[Any], index: int = 0) -> list[int]:
    return [
        token.token_id
        for event in events
        if isinstance(event, Tokens) and event.index == index
        for token in event.tokens
    ]


async def test_events_of_a_request_are_in_order(under_test: EngineUnderTest) -> None:
    """Started, tokens, the sample's end, and one final event with the usage."""
    events = await read(under_test.engine.submit(request()))

    assert isinstance(events[0], Started)
    assert isinstance(events[-2], SampleEnded)
    assert isinstance(events[-1], Finished)
    assert events[-1].ending == "done"
    assert events[-1].usage.output_tokens == 4
    assert tokens_of(events) == solo_output((1, 2, 3), GREEDY, 0, 4, VOCAB)


async def test_concurrent_streams_get_their_own_tokens(under_test: EngineUnderTest) -> None:
    """One frame per step carries the tokens of all streams."""
    prompts = [(1, 2, n) for n in range(20)]
    streams = [under_test.engine.submit(request(str(p), p, 30)) for p in prompts]

    answers = await asyncio.gather(*(read(stream) for stream in streams))

    for prompt, events in zip(prompts, answers, strict=True):
        assert tokens_of(events) == solo_output(prompt, GREEDY, 0, 30, VOCAB)


async def test_refusal_is_a_final_event_with_its_code(under_test: EngineUnderTest) -> None:
    """Every request ends once, with a reason."""
    (end,) = await read(under_test.engine.submit(request(prompt=(VOCAB,))))

    assert (end.ending, end.code) == ("refused", "token_out_of_range")


async def test_refuses_request_id_in_use(under_test: EngineUnderTest) -> None:
    """Two streams of one id would receive each other's events."""
    stream = under_test.engine.submit(request(max_tokens=LONG))

    with pytest.raises(RequestRefused):
        under_test.engine.submit(request())

    await stream.aclose()


async def test_closed_stream_releases_its_blocks(under_test: EngineUnderTest) -> None:
    """A disconnect must not go on computing."""
    stream = under_test.engine.submit(request(max_tokens=LONG))
    await first(stream, Tokens)

    await stream.aclose()
    await stream.aclose()

    stats = await under_test.engine.get_stats()
    assert (stats.running, stats.waiting, stats.pinned_blocks) == (0, 0, 0)


async def test_cancelled_request_ends_with_its_usage(under_test: EngineUnderTest) -> None:
    """The ledger settles what was computed, however the request ended."""
    stream = under_test.engine.submit(request(max_tokens=LONG))
    await first(stream, Tokens)

    async with asyncio.timeout(DEADLINE_S):
        end = await stream.cancel()

    assert end is not None
    assert end.ending == "cancelled"
    assert end.usage.prompt_tokens == 3
    assert end.usage.output_tokens >= 1


async def test_sends_cancels_to_an_engine_that_is_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refusing them would leave the request running, and its hold in the ledger."""
    async with socket_engine() as under_test:
        stream = under_test.engine.submit(request(max_tokens=LONG))
        await first(stream, Tokens)
        monkeypatch.setattr(client, "UNSENT_BYTES_MAX", -1)

        with pytest.raises(EngineUnavailable) as refused:
            under_test.engine.submit(request("b"))
        with pytest.raises(EngineUnavailable):
            await under_test.engine.get_stats()
        async with asyncio.timeout(DEADLINE_S):
            end = await stream.cancel()

    assert refused.value.code == "queue_full"
    assert end is not None
    assert end.ending == "cancelled"


async def test_stop_string_ends_a_sample_and_sets_its_usage(under_test: EngineUnderTest) -> None:
    """The gateway finds it in text while the engine has run ahead."""
    stream = under_test.engine.submit(request(max_tokens=LONG))
    await first(stream, Tokens)

    stream.end_sample(0, 1)
    events = await read(stream)

    assert [e.reason for e in events if isinstance(e, SampleEnded)] == ["stop"]
    assert (events[-1].ending, events[-1].usage.output_tokens) == ("done", 1)


async def test_slow_reader_delays_no_stream_and_holds_little_memory(
    under_test: EngineUnderTest,
) -> None:
    """Its waiting tokens are joined; another stream runs to its end meanwhile."""
    slow = under_test.engine.submit(request("slow", (9,), 200, samples=2))
    await read(under_test.engine.submit(request("fast", (1, 2), 300)))

    batch = await slow.next_batch()

    assert len(batch) <= 6
    assert len(tokens_of(batch, 0)) == len(tokens_of(batch, 1)) == 200


async def test_peeks_and_erases_cached_tokens(under_test: EngineUnderTest) -> None:
    """Peek changes nothing; erase empties a namespace."""
    prompt = tuple(range(40))
    await read(under_test.engine.submit(request(prompt=prompt)))

    before = await under_test.engine.peek(b"n", (*prompt, 1))
    other = await under_test.engine.peek(b"m", (*prompt, 1))
    erased = await under_test.engine.erase(b"n")
    after = await under_test.engine.peek(b"n", (*prompt, 1))

    assert before.cached_tokens == 40
    assert other.cached_tokens == after.cached_tokens == 0
    assert erased.blocks >= 2
    with pytest.raises(ValueError, match="not both"):
        await under_test.engine.erase(b"n", lease_id="l", tokens=(1,))


async def test_heartbeat_comes_unasked(under_test: EngineUnderTest) -> None:
    """It tells an idle engine from a dead one, from the first moment on."""
    heard: asyncio.Queue[int] = asyncio.Queue()
    receive = under_test.engine.receive

    def listening(messages: Any) -> None:
        receive(messages)
        heard.put_nowait(len(messages))

    under_test.engine.receive = listening  # type: ignore[method-assign]
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(3):
            await heard.get()

    assert under_test.engine.stats.blocks > 0


async def test_single_command_is_written_at_once_and_many_together() -> None:
    """The engine works while the rest of the turn runs; but a write costs more than a command, and
    a command sent alone is answered alone."""

    def sent() -> list[str]:
        try:
            commands = list(Decoder(read_upward).feed(theirs.recv(65_536)))
        except BlockingIOError:
            return []
        return [command.request.request_id for command in commands if isinstance(command, Submit)]

    left: list[tuple[list[list[str]], list[str]]] = []
    async with welcomed_engine() as (engine, theirs):
        theirs.setblocking(False)
        for number, names in enumerate(("a", "bcd", "e", "f")):
            at_once = []
            for name in names:
                engine.submit(request(name))
                at_once.append(sent())
            await asyncio.sleep(0)
            left.append((at_once, sent()))
            ends = tuple(Finished(name, "done", Usage()) for name in names)
            engine.take_frame(encode(Frame(number, number, ends))[4:])
        for name in "gh":
            engine.submit(request(name))
        await engine.close()
        last = sent()

    assert left == [
        ([["a"]], []),
        ([["b"], [], []], ["c", "d"]),
        ([["e"]], []),
        ([["f"]], []),
    ]
    assert last == ["g", "h"]  # commands posted before the end are still sent


async def test_cancellation_with_the_last_event_is_not_swallowed(
    under_test: EngineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch that swallows its cancellation goes on for ever, and its canceller waits as long."""
    hear = under_test.engine.receive

    def hear_and_leave(messages: Any) -> None:
        heard = list(messages)
        hear(heard)
        if any(isinstance(message, Stats) and message.call_id for message in heard):
            asking.cancel()

    monkeypatch.setattr(under_test.engine, "receive", hear_and_leave)
    asking = asyncio.create_task(under_test.engine.get_stats())
    await asyncio.wait([asking])

    assert asking.cancelled()


async def test_drain_finishes_running_requests_and_refuses_others(
    own_engine: EngineUnderTest,
) -> None:
    """A deployment loses no running response."""
    stream = own_engine.engine.submit(request(max_tokens=200))
    await first(stream, Started)

    await own_engine.engine.drain(DEADLINE_S)
    with pytest.raises(EngineUnavailable) as refused:
        own_engine.engine.submit(request("late"))
    events = await read(stream)

    assert refused.value.code == "draining"
    assert events[-1].ending == "done"
    assert await asyncio.to_thread(own_engine.service.stopped.wait, DEADLINE_S)


async def test_drain_ends_remaining_requests_after_its_timeout(own_engine: EngineUnderTest) -> None:
    """As `shutdown`, with their usage."""
    stream = own_engine.engine.submit(request(max_tokens=LONG))
    await first(stream, Tokens)

    await own_engine.engine.drain(0.05)
    events = await read(stream)

    assert events[-1].ending == "shutdown"
    assert events[-1].usage.prompt_tokens == 3


async def test_broken_engine_ends_every_stream_and_call(under_test: EngineUnderTest) -> None:
    """No caller waits for an engine that has ended, and the usage seen is not lost."""
    stream = under_test.engine.submit(request(max_tokens=LONG))
    await first(stream, Tokens)

    under_test.break_core()
    events = await read(stream)

    assert (events[-1].ending, events[-1].code) == ("failed", "engine_died")
    assert events[-1].usage.prompt_tokens == 3
    assert events[-1].usage.output_tokens >= 1
    with pytest.raises(EngineUnavailable):
        await under_test.engine.get_stats()
    assert isinstance(under_test.service.failure, InvariantViolation)


async def test_closed_engine_ends_streams_and_refuses_requests(under_test: EngineUnderTest) -> None:
    stream = under_test.engine.submit(request(max_tokens=LONG))
    await first(stream, Started)

    await under_test.engine.close()

    assert (await read(stream))[-1].ending == "failed"
    with pytest.raises(EngineUnavailable):
        under_test.engine.submit(request("b"))


async def test_failed_loading_raises_its_reason() -> None:
    """A missing model is the operator's to fix, so the reason must arrive."""
    with pytest.raises(EngineError) as caught:
        await LocalEngine.start(lambda: fake_core(CONFIG, "missing"), CONFIG)

    assert caught.value.code == "not_found"


def test_engine_survives_the_end_of_its_loop() -> None:
    """An embedding program may exit in a hurry; the engine's thread must not end with an unhandled
    error."""
    silent = msgspec.structs.replace(CONFIG, heartbeat_s=3_600.0)

    async def leave() -> LocalEngine:
        engine = await LocalEngine.start(lambda: fake_core(silent), silent)
        await engine.get_stats()
        return engine

    engine = asyncio.run(leave())
    engine.service.post(engine, GetStats(99))
    engine.service.stop()

    assert engine.service.stopped.is_set()
    assert engine.service.failure is None


async def test_gap_in_the_frames_ends_every_stream_as_failed() -> None:
    """Tokens are lost; no stream may end as if it were whole."""
    async with welcomed_engine() as (engine, _):
        streams = [engine.submit(request(name)) for name in "ab"]
        engine.take_frame(encode(Frame(0, 1, (Started("a", 3, 0),)))[4:])

        engine.take_frame(encode(Frame(2, 3, (Finished("a", "done", Usage()),)))[4:])

        ends = [(await read(stream))[-1] for stream in streams]
        assert [(end.ending, end.code) for end in ends] == [("failed", "engine_died")] * 2
        assert not engine.ready()


async def test_part_that_cannot_be_sent_fails_and_cancels_its_request() -> None:
    """The engine does not know that a part of the answer was left out, and would go on."""
    lost = Finished("a", "failed", Usage(), "answer_lost", "too large")
    end = Finished("b", "done", Usage())
    async with welcomed_engine() as (engine, theirs):
        streams = [engine.submit(request(name)) for name in "ab"]

        engine.take_frame(encode(Frame(0, 1, (Started("a", 3, 1), lost, end, lost)))[4:])

        (_, failed), (whole,) = [await read(stream) for stream in streams]
        assert (failed.ending, failed.code) == ("failed", "answer_lost")
        assert failed.usage.cached_tokens == 1
        assert whole == end
        await engine.close()
        theirs.setblocking(False)
        assert list(Decoder(read_upward).feed(theirs.recv(65_536)))[-1] == Cancel("a")


@pytest.mark.parametrize("frame_bytes", [200, 10_000])
async def test_prompt_logprobs_larger_than_a_frame_arrive_whole(
    monkeypatch: pytest.MonkeyPatch, frame_bytes: int
) -> None:
    """Beside another stream, which loses nothing."""
    monkeypatch.setattr(gateway_link, "encode_step", partial(encode_step, frame_bytes=frame_bytes))
    prompt = tuple(number % VOCAB for number in range(1_000))
    async with socket_engine() as under_test:
        other = under_test.engine.submit(request("other", (1, 2), 300))
        asked = request("echo", prompt, 1, prompt_logprobs=0)
        events = await read(under_test.engine.submit(asked))
        beside = await read(other)

    (entries,) = [event for event in events if isinstance(event, PromptLogprobs)]
    assert [entry.token_id for entry in entries.tokens] == list(prompt)
    assert events[-1].ending == "done"
    assert tokens_of(beside) == solo_output((1, 2), GREEDY, 0, 300, VOCAB)
