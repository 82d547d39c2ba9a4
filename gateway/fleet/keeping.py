"""Keeps one engine for gateways elsewhere until it is told to stop, and follows its drain mark.

`trunkline engine serve` runs it in its own process, and `seat_keeper` in one of Ray. It knows no
request. A mark in the data directory, which `trunkline engine drain` makes, drains the engine and
keeps it down until the mark is gone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from engine.client.client import SocketEngine
from engine.errors import ModelError
from gateway.config import Config
from gateway.engines.composition import engine_settings
from gateway.engines.keeper import EngineKeeper, ListeningSocket
from gateway.processes.child_process import Report

MARKS: Final = "engines"
"""Folder of the data directory with the marks of drained engines, and of those that serve."""
SERVES: Final = ".serves"
LOOK_EVERY_S: Final = 0.25
BACKLOG: Final = 16


def drain_mark(config: Config, name: str) -> Path:
    """Return the file that keeps an engine down while it exists."""
    return config.data / MARKS / f"{name}.drained"


def serves_mark(config: Config, name: str) -> Path:
    """Return the file that exists while an engine serves."""
    return drain_mark(config, name).with_suffix(SERVES)


def open_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


class KeptEngine:
    """The engine that runs now; a `gateway.engines.keeper.EngineHolder`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self.engine: SocketEngine | None = None
        self.is_draining = False
        self.since_s = 0.0
        """Instant at which the engine began to serve."""
        self.mark: Path | None = None
        """A file that exists while an engine serves, for probes."""

    def hold(self, engine: SocketEngine) -> None:
        """See `EngineHolder`."""
        self.engine = engine
        self.since_s = self._clock()
        if self.mark is not None:
            with suppress(OSError):  # a full disk: the engine serves all the same
                self.mark.parent.mkdir(parents=True, exist_ok=True)
                self.mark.touch()

    def release(self, engine: SocketEngine, reason: str) -> None:
        """See `EngineHolder`."""
        self.engine = None
        if self.mark is not None:
            self.mark.unlink(missing_ok=True)

    def record_death(self, engine: SocketEngine, in_step: frozenset[str]) -> None:
        """See `EngineHolder`: gateways judge their requests."""


async def keep_engine(
    config: Config,
    model: Path,
    listening: ListeningSocket,
    kept: KeptEngine,
    stop: asyncio.Event,
    log: Report,
) -> None:
    """Keep an engine until `stop` is set; then let it finish its requests, within
    `engine.drain_timeout_s`, and end it. Raises ModelError if no engine ever will serve."""
    mark = drain_mark(config, listening.name)
    kept.mark = serves_mark(config, listening.name)
    kept.mark.unlink(missing_ok=True)  # of a keeper that was killed
    engine = engine_settings(config, log)
    keeper = EngineKeeper(model, engine, log, kept, listen=listening)
    timeout_s = config.engine.drain_timeout_s
    try:
        kept.is_draining = await asyncio.to_thread(mark.exists)
        if kept.is_draining:
            log("engine_drained", {"name": listening.name})
        else:
            keeper.start()
        while not stop.is_set():
            await _wait(stop, LOOK_EVERY_S)
            if failure := keeper.failure():
                raise ModelError("engine_died", failure)
            is_wanted = not await asyncio.to_thread(mark.exists)
            if is_wanted != kept.is_draining or (is_wanted and kept.engine is not None):
                continue  # an engine that drains finishes its requests, whatever is wanted next
            kept.is_draining = not kept.is_draining
            event = "engine_drained" if kept.is_draining else "engine_undrained"
            log(event, {"name": listening.name})
            if kept.is_draining:
                await _drain(keeper, kept, timeout_s)
            else:
                await keeper.resume()
        log("stopping", {})
        kept.is_draining = True
        await _drain(keeper, kept, timeout_s)
        if kept.engine is not None:
            async with asyncio.timeout(timeout_s + 1.0):
                await kept.engine.wait_lost()
    except TimeoutError:
        log("stop_forced", {})
    finally:
        await keeper.close()


async def _drain(keeper: EngineKeeper, kept: KeptEngine, timeout_s: float) -> None:
    keeper.begin_drain()
    if kept.engine is None:
        await keeper.stop()  # it would serve once its model is loaded
    else:
        await kept.engine.drain(timeout_s)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event for so long at most."""
    wait = asyncio.ensure_future(event.wait())
    await asyncio.wait([wait], timeout=timeout_s)
    wait.cancel()
