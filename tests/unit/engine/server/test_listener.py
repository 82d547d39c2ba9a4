"""The listener of an engine elsewhere: who is let in, and that nobody else disturbs them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.api import CacheGrant, Cancel, Drain, Finished, Request, Sampling
from engine.client.client import SocketEngine
from engine.client.tls_files import TlsError, tls_context
from engine.client.tls_wire import TlsWire
from engine.config import EngineConfig
from engine.errors import EngineError, EngineUnavailable
from engine.protocol import PROTOCOL_VERSION, Hello, Upward, encode
from engine.server.links import listener
from engine.server.links.keeper_link import ListenSettings
from engine.server.links.listener import EngineListener
from engine.server.service import EngineService
from engine.wire import FRAME_BYTES_MAX
from tests.unit.engine.server.fake_engine_process import fake_core
from tests.unit.engine.server.fleet_certificates import certificate, expired

CONFIG = EngineConfig(heartbeat_s=0.05, prefill_chunk_tokens_max=16)
DEADLINE_S = 30.0
LONG = 8_000


class Door:
    """A listener with an engine behind it."""

    def __init__(self, port: int, listener: EngineListener, service: EngineService) -> None:
        self.port, self.listener, self.service = port, listener, service

    async def wire(self, folder: Path) -> TlsWire:
        """Return a connection with the certificate of a folder."""
        wire = TlsWire()
        await wire.dial("127.0.0.1", self.port, tls_context(folder, is_server=False))
        return wire

    async def join(
        self, name: str = "g0", folder: Path | None = None, hello: Hello | None = None
    ) -> SocketEngine:
        """Connect as a gateway. Raises what the engine says."""
        wire = await self.wire(folder or certificate(f"gateway/{name}"))
        greeting = hello or Hello(PROTOCOL_VERSION, role="gateway", name=name)
        async with asyncio.timeout(DEADLINE_S):
            return await SocketEngine.connect(wire, greeting)

    async def end_of(self, wire: TlsWire, *frames: bytes) -> list[bytes]:
        """Send bytes; return the frames that come until the connection ends."""
        got: list[bytes] = []
        ended = asyncio.Event()
        wire.follow(got.append, ended.set)
        for frame in frames:
            wire.send(frame)
        async with asyncio.timeout(DEADLINE_S):
            await ended.wait()
        return got


@asynccontextmanager
async def opened_door() -> AsyncIterator[Door]:
    loaded, loop = asyncio.Event(), asyncio.get_running_loop()

    def changed() -> None:
        loop.call_soon_threadsafe(loaded.set)

    service = EngineService(lambda: fake_core(CONFIG), CONFIG, on_change=changed)
    service.start()
    await loaded.wait()
    assert service.info is not None
    end = socket.create_server(("127.0.0.1", 0))
    port = end.getsockname()[1]
    settings = ListenSettings(end.detach(), "e0", certificate("engine/e0"))
    listener = EngineListener(settings, service, service.info, ("a",))
    listener.open()
    try:
        yield Door(port, listener, service)
    finally:
        await listener.close()
        await asyncio.to_thread(service.stop)


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with opened_door() as door:
        yield door


def request(name: str, max_tokens: int = 4) -> Request:
    return Request(name, (1, 2, 3), max_tokens, CacheGrant(b"n"), Sampling(temperature=0))


async def answer(engine: SocketEngine, name: str = "a") -> str:
    """Return how a request ends."""
    async with asyncio.timeout(DEADLINE_S):
        events = [event async for event in engine.submit(request(name))]
    assert isinstance(events[-1], Finished)
    return events[-1].ending


@pytest.mark.parametrize(
    "folder",
    [
        lambda: certificate("gateway/g0", "another"),
        lambda: expired("gateway/g0"),
    ],
    ids=["foreign", "expired"],
)
async def test_a_foreign_or_expired_certificate_is_let_in_nowhere(
    door: Door, folder: object
) -> None:
    """The other gateway notices nothing."""
    assert callable(folder)
    served = await door.join()
    with pytest.raises((TlsError, EngineError)):
        await door.join(folder=folder())

    assert await answer(served) == "done"
    await served.close()


async def test_an_engine_of_another_authority_is_not_believed(door: Door) -> None:
    """The gateway checks the engine as the engine checks the gateway."""
    with pytest.raises(TlsError, match="certificate is not accepted"):
        await door.wire(certificate("gateway/g0", "another"))


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (Hello(PROTOCOL_VERSION, role="gateway", name="g1"), "unauthorized"),
        (Hello(PROTOCOL_VERSION, role="keeper", name="g0"), "unsupported"),
        (Hello(PROTOCOL_VERSION, role="both", name="g0"), "unsupported"),
        (Hello(14, role="gateway", name="g0"), "unsupported"),
        (Cancel("a"), "unsupported"),
    ],
    ids=["name", "keeper", "both", "version", "command"],
)
async def test_who_begins_wrongly_is_told_why(door: Door, hello: Upward, code: str) -> None:
    """One answer, then the end of that connection alone."""
    served = await door.join()
    wire = await door.wire(certificate("gateway/g0"))
    got = await door.end_of(wire, encode(hello))

    assert [code.encode() in one for one in got] == [True]
    assert await answer(served) == "done"
    await served.close()


async def test_an_engine_s_certificate_is_no_gateway_s(door: Door) -> None:
    with pytest.raises(EngineError) as refused:
        await door.join(folder=certificate("engine/e0"))

    assert refused.value.code == "unauthorized"
    assert "'engine/e0'; expected 'gateway/g0'" in refused.value.message


@pytest.mark.parametrize(
    "frames",
    [
        struct.pack("<I", FRAME_BYTES_MAX + 1),
        encode(Hello(PROTOCOL_VERSION, role="gateway", name="g0")) + struct.pack("<I", 3) + b"abc",
        encode(Hello(PROTOCOL_VERSION, role="gateway", name="g0")) * 2,
        encode(Hello(PROTOCOL_VERSION, role="gateway", name="g0")) + encode(Drain(1.0)),
    ],
    ids=["64 MiB", "no message", "Hello twice", "Drain"],
)
async def test_a_violation_ends_its_own_connection(door: Door, frames: bytes) -> None:
    """A frame that is too long ends it before its bytes arrive; the engine goes on."""
    wire = await door.wire(certificate("gateway/g0"))
    await door.end_of(wire, frames)
    served = await door.join()

    assert await answer(served) == "done"
    await served.close()


async def test_a_hello_may_come_a_byte_at_a_time(door: Door) -> None:
    wire = await door.wire(certificate("gateway/g0"))
    welcomed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def take(frame: bytes) -> None:
        if not welcomed.done():
            welcomed.set_result(frame)

    wire.follow(take, lambda: None)
    for byte in encode(Hello(PROTOCOL_VERSION, role="gateway", name="g0")):
        wire.send(bytes([byte]))
        await asyncio.sleep(0)
    async with asyncio.timeout(DEADLINE_S):
        assert b"welcome" in await welcomed
    wire.close()


async def test_plain_tcp_is_refused_on_loopback_too(door: Door) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    writer.write(encode(Hello(PROTOCOL_VERSION, role="gateway", name="g0")))
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionError):
            assert b"welcome" not in await reader.read()
    writer.close()
    served = await door.join()

    assert await answer(served) == "done"
    await served.close()


async def test_tls_before_1_3_is_refused(door: Door) -> None:
    context = tls_context(certificate("gateway/g0"), is_server=False)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((TlsError, ConnectionError)):
        await TlsWire().dial("127.0.0.1", door.port, context)


async def test_several_gateways_have_one_engine(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets its own answers; one that leaves cancels its own requests only. There is a bound,
    under which the place of one that has left is free again."""
    monkeypatch.setattr(listener, "GATEWAYS_MAX", 2)
    first, second = await door.join("g0"), await door.join("g1")
    with pytest.raises(EngineError) as busy:
        await door.join("g2")
    stream = first.submit(request("long", LONG))
    await stream.next_batch()
    answers = await asyncio.gather(answer(first, "a"), answer(second, "b"))
    await first.close()
    third = None
    async with asyncio.timeout(DEADLINE_S):
        while third is None:
            with contextlib.suppress(EngineError):  # until the engine has seen its end
                third = await door.join("g2")
    stats = await third.get_stats()

    assert busy.value.code == "gateway_busy"
    assert set(answers) == {"done"}
    assert stats.running == 0
    assert await answer(second, "c") == "done"
    for engine in (second, third):
        await engine.close()


async def test_the_same_name_takes_the_place_of_its_old_connection(door: Door) -> None:
    """A gateway comes back before the engine knows that its connection is lost; the old requests
    are cancelled."""
    old = await door.join()
    stream = old.submit(request("long", LONG))
    await stream.next_batch()
    new = await door.join()
    async with asyncio.timeout(DEADLINE_S):
        events = [event async for event in stream]
    stats = await new.get_stats()

    assert isinstance(events[-1], Finished)
    assert events[-1].code == "engine_died"
    assert (stats.running, stats.waiting) == (0, 0)
    assert await answer(new) == "done"
    await new.close()


async def test_a_draining_engine_says_so(door: Door) -> None:
    """The gateway sends its requests elsewhere; those that run finish."""
    engine = await door.join()
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    engine.on_drain = told.set_result
    door.listener.begin_drain()
    async with asyncio.timeout(DEADLINE_S):
        message = await told
    with pytest.raises(EngineUnavailable) as refused:
        engine.submit(request("late"))

    assert message == "The engine e0 drains."
    assert refused.value.code == "draining"
    await engine.close()
