"""A keeper that follows its drain mark, over engine processes that compute nothing."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from engine.api import CacheGrant, Finished, Request, Sampling, Started
from engine.client.client import SocketEngine
from engine.client.tls_files import tls_context
from engine.client.tls_wire import TlsWire
from engine.protocol import PROTOCOL_VERSION, Hello
from gateway.config import Config
from gateway.engines.keeper import EngineKeeper, ListeningSocket
from gateway.fleet import keeping
from gateway.fleet.keeping import KeptEngine, drain_mark, keep_engine
from tests.crash.fleet import COMMAND
from tests.server_process import children
from tests.unit.engine.server.fleet_certificates import certificate

PATIENCE_S = 60.0
LONG = 2_000

pytestmark = pytest.mark.slow


class Kept:
    """A keeper of the engine e0. `mark` drains it."""

    def __init__(self, data: Path, port: int) -> None:
        self.mark = drain_mark(Config(data_dir=str(data)), "e0")
        self.mark.parent.mkdir(parents=True)
        self.events: list[str] = []
        self._port = port

    def report(self, event: str, facts: dict[str, object]) -> None:
        self.events.append(event)

    async def join(self) -> SocketEngine:
        """Connect as a gateway."""
        wire = TlsWire()
        context = tls_context(certificate("gateway/g0"), is_server=False)
        await wire.dial("127.0.0.1", self._port, context)
        return await SocketEngine.connect(wire, Hello(PROTOCOL_VERSION, role="gateway", name="g0"))


@asynccontextmanager
async def kept_engine(
    data: Path, monkeypatch: pytest.MonkeyPatch, fault: str = ""
) -> AsyncIterator[Kept]:
    monkeypatch.setattr(keeping, "EngineKeeper", partial(EngineKeeper, command=COMMAND))
    monkeypatch.setattr(keeping, "LOOK_EVERY_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as end:
        kept = Kept(data, end.getsockname()[1])
        listening = ListeningSocket(end.fileno(), "e0", certificate("engine/e0"))
        config, engine = Config(data_dir=str(data)), KeptEngine(asyncio.get_running_loop().time)
        what = config, Path("fake") / fault, listening, engine
        keeper = asyncio.create_task(keep_engine(*what, asyncio.Event(), kept.report))
        try:
            yield kept
        finally:
            keeper.cancel()
            with suppress(asyncio.CancelledError):
                await keeper


async def until(holds: Callable[[], object]) -> None:
    """Wait until the keeper or a process has made a condition true."""
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(holds):  # noqa: ASYNC110 (other processes' doing)
            await asyncio.sleep(0.01)


def engines() -> int:
    """Return how many engine processes this one has."""
    return sum("fake_engine_process" in name for name in children(os.getpid()))


async def test_an_engine_that_is_wanted_again_while_it_drains_finishes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its running requests need not all be such as can move. The next engine comes after it."""
    async with kept_engine(tmp_path, monkeypatch) as kept:
        engine = await kept.join()
        drains = asyncio.Event()
        engine.on_drain = lambda message: drains.set()
        grant, greedy = CacheGrant(b"n"), Sampling(temperature=0)
        stream = engine.submit(Request("a", (1, 2, 3), LONG, grant, greedy))
        async for event in stream:
            if isinstance(event, Started):
                break
        kept.mark.touch()
        await drains.wait()
        engine.let_go()
        kept.mark.unlink()
        async with asyncio.timeout(PATIENCE_S):
            end = [event async for event in stream][-1]
        await until(lambda: kept.events.count("engine_started") == 2)
        await engine.close()

    assert isinstance(end, Finished)
    assert (end.ending, end.usage.output_tokens) == ("done", LONG)
    assert kept.events == ["engine_started", "engine_drained", "engine_undrained", "engine_started"]


async def test_an_engine_that_drains_before_it_serves_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take requests once its model is loaded."""
    async with kept_engine(tmp_path, monkeypatch, "loading") as kept:
        await until(lambda: engines() == 1)
        kept.mark.touch()
        await until(lambda: engines() == 0)
        kept.mark.unlink()
        await until(lambda: engines() == 1)

    assert kept.events == ["engine_drained", "engine_undrained"]
