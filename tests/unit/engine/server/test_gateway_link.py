"""A connection of several: its end of reading stops no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.api import CacheGrant, Finished, GetStats, Request, Sampling, Submit
from engine.config import EngineConfig
from engine.protocol import PROTOCOL_VERSION, Frame, Hello, Upward, encode, read_downward
from engine.server.links.gateway_link import OUTBOX_BYTES_MAX, GatewayLink
from engine.server.service import EngineService
from engine.statistics import Stats
from engine.wire import FrameError
from tests.fakes import FakeClock
from tests.unit.engine.server.fake_engine_process import fake_core

CONFIG = EngineConfig(heartbeat_s=0.05)
DEADLINE_S = 60.0
LONG = 8_000


class ScriptedWire:
    """A wire whose other end is the test; `unsent` bytes wait for it."""

    def __init__(self) -> None:
        self.unsent = 0
        self.error: FrameError | None = None
        self.messages: list[object] = []
        self._came = asyncio.Event()

    def make(
        self,
        on_frame: Callable[[bytes], None],
        on_end: Callable[[], None],
        on_sent: Callable[[], None],
    ) -> ScriptedWire:
        self.on_frame, self.on_end, self.on_sent = on_frame, on_end, on_sent
        return self

    def send(self, frame: bytes) -> None:
        message = read_downward(frame[4:])
        if isinstance(message, Frame):
            self.messages += message.messages
        self._came.set()

    def close(self) -> None:
        """Nothing is behind it."""

    def say(self, message: Upward) -> None:
        self.on_frame(encode(message)[4:])

    async def until(self, holds: Callable[[object], bool]) -> object:
        """Return the first message for which it holds."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for number, message in enumerate(self.messages):
                    if holds(message):
                        del self.messages[: number + 1]
                        return message
                self._came.clear()
                await self._came.wait()


def ask(name: str, tokens: int = 4) -> Submit:
    return Submit(Request(name, (1, 2, 3), tokens, CacheGrant(b"n"), Sampling(temperature=0)))


async def test_a_gateway_that_does_not_read_stops_no_other() -> None:
    """After a second it is closed, and what it has asked for is cancelled; the other one's requests
    are answered all the time."""
    service, clock = EngineService(lambda: fake_core(CONFIG), CONFIG), FakeClock()
    service.start()
    await asyncio.to_thread(service.ready.wait)
    assert service.info is not None
    wires, links = (ScriptedWire(), ScriptedWire()), []
    for wire in wires:
        links.append(GatewayLink(wire.make, None, patience_s=1.0, clock=clock))
        wire.say(Hello(PROTOCOL_VERSION, role="gateway", name="g"))
        links[-1].welcome(service, service.info)
    deaf, reading = wires
    deaf.unsent = 2 * OUTBOX_BYTES_MAX
    deaf.say(ask("unread", LONG))
    for number in range(3):
        reading.say(ask(f"{number}"))
        await reading.until(lambda one: isinstance(one, Finished))
    was_open = not links[0].ended.is_set()
    clock.advance(1.0)
    async with asyncio.timeout(DEADLINE_S):
        await links[0].ended.wait()
    reading.say(GetStats(7))
    stats = await reading.until(lambda one: isinstance(one, Stats) and one.call_id == 7)
    await asyncio.to_thread(service.stop)

    assert was_open
    assert links[0].was_given_up
    assert isinstance(stats, Stats)
    assert stats.running == stats.waiting == 0
