"""Keeper of an engine's process: starts it, watches it, replaces it, and owns its host memory.

A process that dies, or whose heartbeat stops, is replaced after a pause. Consecutive pauses grow
from 0.1 to 60 s and never end: an engine that has served once is never given up. The keeper knows
no request. It hands each engine that serves to its `EngineHolder`, and tells it the ids of the
requests that were in the step at a death, from the `StepRecord`. Where the engine has levels, the
memory files of its host memory belong to the keeper, so that the next engine finds the copies of
the one before.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from engine.client.client import SocketEngine
from engine.client.host_memory import HostMemoryFiles
from engine.client.step_record import StepRecord
from engine.config import EngineConfig, LevelsConfig
from engine.errors import EngineError, EngineUnavailable, ModelError
from engine.processes import CLOUD, COMPUTING
from engine.protocol import PROTOCOL_VERSION, Hello
from gateway.processes.child_process import ChildProcess, Report, RestartPolicy, StartLimit

COMMAND = (sys.executable, "-m", "engine.server.server")
RESTARTS = RestartPolicy((0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.0, 25.0, 60.0), first_starts_max=5)
LOAD_S = 2.0
"""Seconds that a client should wait for an engine that is being started."""
WATCH_EVERY_S = 0.25
CLOSE_S = 2.0


class ListeningSocket(Struct, frozen=True):
    """A socket that gateways connect to, the name of the engine behind it, and the folder of its
    certificate."""

    fd: int
    name: str
    tls: Path


class EngineHolder(Protocol):
    """Who gets the engines of a keeper."""

    def hold(self, engine: SocketEngine) -> None:
        """Take an engine that serves now."""

    def release(self, engine: SocketEngine, reason: str) -> None:
        """Let it go: its connection is closed."""

    def record_death(self, engine: SocketEngine, in_step: frozenset[str]) -> None:
        """Judge the requests in its last step, whose ids these are."""


class EngineKeeper:
    """Owns the engine process. `start` returns at once; `wait_ready` returns once the engine
    answers."""

    def __init__(
        self,
        model_dir: Path,
        config: EngineConfig,
        report: Report,
        holder: EngineHolder,
        *,
        command: tuple[str, ...] = COMMAND,
        restarts: RestartPolicy = RESTARTS,
        keeps_host_memory: bool = True,
        listen: ListeningSocket | None = None,
    ) -> None:
        """`keeps_host_memory`: the host memory of an engine with levels outlives it. `listen`:
        where gateways elsewhere reach its engines, each in turn."""
        self._model_dir = model_dir
        self._config = config
        self._report = report
        self._holder = holder
        self._listen = listen
        self._fallen = frozenset[str]()
        """Ids of the requests in the last step of the engine before."""
        self._child = ChildProcess(
            *("engine", command, restarts, report, self._run_process),
            variables=_variables(config.levels),
        )
        keeps = keeps_host_memory and config.levels.is_on
        self._host = HostMemoryFiles() if keeps else None

    @property
    def restarts(self) -> int:
        """Number of restarts, including one that is about to happen."""
        return self._child.restarts

    def failure(self) -> str:
        """Return why no engine ever will serve; "" while one may."""
        error = self._child.failure
        return "" if error is None else str(error)

    def retry_after_s(self) -> float:
        """Return the seconds until the next engine may serve."""
        return LOAD_S + self._child.pause_left_s

    def start(self) -> None:
        """Keep an engine running from now on."""
        self._child.start()

    async def wait_ready(self) -> None:
        """Wait until the engine answers. Raises EngineError if it never will."""
        try:
            await self._child.wait_ready()
        except StartLimit as error:
            raise EngineUnavailable("engine_died", str(error), self.retry_after_s()) from error

    def begin_drain(self) -> None:
        """Start no further engine: the running one is about to end."""
        self._child.may_restart = False

    async def resume(self) -> None:
        """Keep an engine running again, after a drain."""
        await self.stop()
        self._child.may_restart = True
        self._child.start()

    async def stop(self) -> None:
        """End the process, with its requests, and start none until `resume`."""
        await self._child.stop()
        await self._child.end(CLOSE_S)

    async def close(self) -> None:
        """End the process; the holder closes its connection."""
        await self.stop()
        if self._host is not None:
            self._host.close()

    # -- one process --------------------------------------------------------------------------

    async def _run_process(self) -> str:
        """Run one engine until its connection is lost or it is stuck; see `ChildProcess`."""
        record = StepRecord.create()
        try:
            return await self._run_recorded(record)
        finally:
            record.close()

    async def _run_recorded(self, record: StepRecord) -> str:
        settings = msgspec.to_builtins(self._config)
        try:
            host_fds = None if self._host is None else self._host.begin_life()
            hello = Hello(PROTOCOL_VERSION, str(self._model_dir), settings, record.fd, host_fds)
            fds = (record.fd, *(host_fds or ()))
            if (listen := self._listen) is not None:
                hello = replace(
                    hello,
                    role="keeper",
                    name=listen.name,
                    listen_fd=listen.fd,
                    tls=str(listen.tls),
                    fallen=tuple(self._fallen),
                )
                fds = (*fds, listen.fd)
            engine = await SocketEngine.connect(await self._child.spawn(fds), hello)
        except (EngineUnavailable, OSError) as error:
            return str(error)
        except EngineError as error:
            if error.code == "engine_died":
                return error.message
            raise ModelError(error.code, error.message) from error
        self._holder.hold(engine)
        self._child.set_ready()
        ready_s = asyncio.get_running_loop().time()
        lost = asyncio.create_task(engine.wait_lost())
        try:
            return await self._watch(engine, lost)
        finally:
            lost.cancel()
            if self._host is not None:
                self._host.end_life(asyncio.get_running_loop().time() - ready_s)
            await engine.close()
            self._fallen = record.read()
            self._holder.release(engine, "The engine was lost.")
            self._holder.record_death(engine, self._fallen)

    async def _watch(self, engine: SocketEngine, lost: asyncio.Task[None]) -> str:
        """Return why the engine is lost: its connection ended, its heartbeat stopped, or it has
        work and makes no step. Requests that wait for a grammar are no work for a step.

        Only time during which this process ran counts: after a pause of its own, the gateway waits
        for a new heartbeat before it judges.
        """
        loop = asyncio.get_running_loop()
        checked_at_s = progressed_at_s = loop.time()
        step = -1
        while not lost.done():
            await asyncio.wait([lost], timeout=WATCH_EVERY_S)
            now_s, stats = loop.time(), engine.stats
            if now_s - checked_at_s > 4 * WATCH_EVERY_S:
                engine.last_frame_s = progressed_at_s = now_s
            checked_at_s = now_s
            if stats.step != step or stats.running + stats.waiting == stats.compiling:
                step, progressed_at_s = stats.step, now_s
            idle_s = now_s - min(engine.last_frame_s, progressed_at_s)
            if idle_s > self._config.step_timeout_s:
                self._report("engine_stuck", {"idle_s": round(idle_s, 1), "step": stats.step})
                return "stuck"
        return "connection lost"


def _variables(levels: LevelsConfig) -> tuple[str, ...]:
    """Return which variables an engine gets beside those of any process. Its storage process needs
    the master key and the credentials of a remote store, if they are configured."""
    sealing = (levels.key_env,) if levels.is_on and levels.key_env else ()
    remote = CLOUD if levels.is_on and levels.remote.url else ()
    return (*COMPUTING, *sealing, *remote)
