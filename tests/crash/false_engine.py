"""An end with an engine's certificate that says what a test wants, for replicas that may not serve.

It speaks our frames over TLS to one gateway after another, and computes nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine.api import EngineInfo
from engine.client.tls_files import tls_context
from engine.client.tls_wire import TlsWire
from engine.config import EngineConfig
from engine.protocol import Hello, Welcome, encode, encode_step, read_upward
from engine.statistics import Stats
from tests.unit.engine.server.fake_engine_process import fake_core
from tests.unit.engine.server.fleet_certificates import certificate


def fake_info() -> EngineInfo:
    """Return what an engine of the fake model says of itself."""
    return fake_core(EngineConfig())[1]


class FalseEngine:
    """Answers each connection's Hello with `answer`. If that is empty: with a Welcome, a frame of
    statistics, then `news`."""

    def __init__(self, name: str, answer: bytes, news: bytes) -> None:
        self._context = tls_context(certificate(f"engine/{name}"), is_server=True)
        self._answer, self._news = answer, news
        self._end = socket.create_server(("127.0.0.1", 0))
        self._end.setblocking(False)
        self.port: int = self._end.getsockname()[1]
        self._wires: list[TlsWire] = []
        self._task = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """End all connections."""
        self._task.cancel()
        await asyncio.wait([self._task])
        for wire in self._wires:
            wire.close()
        self._end.close()

    async def _accept(self) -> None:
        while True:
            end, _ = await asyncio.get_running_loop().sock_accept(self._end)
            wire = TlsWire()
            await wire.accept(end, self._context)
            self._wires.append(wire)
            self._follow(wire)

    def _follow(self, wire: TlsWire) -> None:
        def take(body: bytes) -> None:
            message = read_upward(body)
            if not isinstance(message, Hello):
                return
            wire.send(self._answer or encode(Welcome(fake_info())))
            if not self._answer:  # the first frame is right, what follows is not
                (frame,) = encode_step(0, 0, (Stats(),))
                wire.send(frame + self._news)

        wire.follow(take, lambda: None)


@asynccontextmanager
async def false_engine(
    name: str, answer: bytes = b"", news: bytes = b""
) -> AsyncIterator[FalseEngine]:
    """Yield one that listens."""
    engine = FalseEngine(name, answer, news)
    try:
        yield engine
    finally:
        await engine.close()
