"""Supervisor of the engine process, seen from the gateway's event loop.

`EngineSupervisor` implements `engine.client.client.Engine` over the process that runs now. A
process that dies, or whose heartbeat stops, ends every open stream with `engine_died`, and is
replaced after a pause. Consecutive pauses grow from 0.1 to 60 s and never end: an engine that has
served once is never given up.

A `StepRecord` tells which requests were in the step at a death; `gateway.crash_suspects` judges
them. Where the engine has levels, the memory files of its host memory belong to the supervisor, so
that the next engine finds the copies of the one before.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.api import EngineInfo, Erased, Namespace, Peeked, Quota, Request, Surveyed
from engine.client.cache_event_totals import CacheEventTotals
from engine.client.client import SocketEngine
from engine.client.host_memory import HostMemoryFiles
from engine.client.namespace_stats import NamespaceTable
from engine.client.request_stream import RequestStream
from engine.client.step_record import StepRecord
from engine.config import EngineConfig, LevelsConfig
from engine.errors import EngineError, EngineUnavailable, ModelError
from engine.processes import CLOUD, COMPUTING
from engine.protocol import PROTOCOL_VERSION, Hello
from engine.statistics import Stats
from gateway.caching.namespaces import owner_of
from gateway.child_process import ChildProcess, Report, RestartPolicy, StartLimit
from gateway.crash_suspects import CrashSuspects

COMMAND = (sys.executable, "-m", "engine.server.server")
RESTARTS = RestartPolicy((0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.0, 25.0, 60.0), first_starts_max=5)
LOAD_S = 2.0
"""Seconds that a client should wait for an engine that is being started."""
WATCH_EVERY_S = 0.25
CLOSE_S = 2.0


class EngineSupervisor:
    """Owns the engine process. `start` returns at once; `wait_ready` returns once the engine
    answers."""

    def __init__(
        self,
        model_dir: Path,
        config: EngineConfig,
        report: Report,
        *,
        command: tuple[str, ...] = COMMAND,
        restarts: RestartPolicy = RESTARTS,
        keeps_host_memory: bool = True,
    ) -> None:
        """`keeps_host_memory`: the host memory of an engine with levels outlives it."""
        self._model_dir = model_dir
        self._config = config
        self._report = report
        self._child = ChildProcess(
            *("engine", command, restarts, report, self._run_process),
            variables=_variables(config.levels),
        )
        self._engine: SocketEngine | None = None
        self._is_draining = False
        self._last_stats = Stats()
        self._suspects = CrashSuspects(asyncio.get_running_loop().time)
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

    def start(self) -> None:
        """Keep an engine running from now on."""
        self._child.start()

    async def wait_ready(self) -> None:
        """Wait until the engine answers. Raises EngineError if it never will."""
        try:
            await self._child.wait_ready()
        except StartLimit as error:
            raise EngineUnavailable("engine_died", str(error), self._retry_after_s()) from error

    # -- Engine -------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo | None:
        """See `engine.client.client.Engine`."""
        return self._engine.info if self._engine is not None else None

    def is_alive(self, epoch: str) -> bool:
        """See `engine.client.client.Engine`."""
        return self._engine is not None and self._engine.is_alive(epoch)

    @property
    def stats(self) -> Stats:
        """See `engine.client.client.Engine`. Without an engine: those of the last engine."""
        return self._engine.stats if self._engine is not None else self._last_stats

    @property
    def namespaces(self) -> NamespaceTable:
        """See `engine.client.client.Engine`. Without an engine: empty."""
        return self._engine.namespaces if self._engine is not None else NamespaceTable()

    @property
    def cache_events(self) -> CacheEventTotals:
        """See `engine.client.client.Engine`. Without an engine: empty."""
        return self._engine.cache_events if self._engine is not None else CacheEventTotals()

    def ready(self) -> bool:
        """See `engine.client.client.Engine`."""
        return self._engine is not None and self._engine.ready()

    def submit(self, request: Request) -> RequestStream:
        """See `engine.client.client.Engine`."""
        engine = self._running_engine("draining" if self._is_draining else "not_ready")
        self._suspects.clear(engine.done_in_isolation)
        engine.done_in_isolation.clear()
        return engine.submit(self._suspects.isolate(request))

    async def peek(
        self, namespace: Namespace, tokens: tuple[int, ...], quota: Quota | None = None
    ) -> Peeked:
        """See `engine.client.client.Engine`."""
        return await self._running_engine().peek(namespace, tokens, quota)

    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        """See `engine.client.client.Engine`."""
        if self._engine is not None:
            self._engine.set_quotas(quotas)

    async def erase(
        self,
        namespace: Namespace,
        *,
        lease_id: str | None = None,
        tokens: tuple[int, ...] | None = None,
    ) -> Erased:
        """See `engine.client.client.Engine`."""
        return await self._running_engine().erase(namespace, lease_id=lease_id, tokens=tokens)

    async def survey(self, namespace: Namespace, most: int) -> Surveyed:
        """See `engine.client.client.Engine`."""
        return await self._running_engine().survey(namespace, most)

    async def get_stats(self) -> Stats:
        """See `engine.client.client.Engine`."""
        return await self._running_engine().get_stats()

    async def drain(self, timeout_s: float) -> None:
        """See `engine.client.client.Engine`."""
        self._is_draining, self._child.may_restart = True, False
        if self._engine is not None:
            await self._engine.drain(timeout_s)

    async def close(self) -> None:
        """End all streams and the process."""
        await self._child.stop()
        await self._child.end(CLOSE_S)
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
            engine = await SocketEngine.connect(await self._child.spawn(fds), hello)
        except (EngineUnavailable, OSError) as error:
            return str(error)
        except EngineError as error:
            if error.code == "engine_died":
                return error.message
            raise ModelError(error.code, error.message) from error
        engine.cache_events.group_by(owner_of)
        self._engine = engine
        self._child.set_ready()
        ready_s = asyncio.get_running_loop().time()
        lost = asyncio.create_task(engine.wait_lost())
        try:
            return await self._watch(engine, lost)
        finally:
            lost.cancel()
            if self._host is not None:
                self._host.end_life(asyncio.get_running_loop().time() - ready_s)
            self._last_stats = engine.stats
            self._engine = None
            await engine.close()
            self._record_death(engine, record.read())

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

    def _record_death(self, engine: SocketEngine, in_step: frozenset[str]) -> None:
        """Judge the requests that were in the engine's last step."""
        self._suspects.clear(engine.done_in_isolation)
        lost = [one for one in engine.lost_requests if one.request.request_id in in_step]
        for request_id in self._suspects.record_death(lost):
            self._report("engine_poisoned", {"request_id": request_id})

    def _running_engine(self, code: str = "not_ready") -> SocketEngine:
        if self._engine is None:
            raise EngineUnavailable(code, "The engine is starting.", self._retry_after_s())
        return self._engine

    def _retry_after_s(self) -> float:
        return LOAD_S + self._child.pause_left_s


def _variables(levels: LevelsConfig) -> tuple[str, ...]:
    """Return which variables an engine gets beside those of any process. Its storage process needs
    the master key and the credentials of a remote store, if they are configured."""
    sealing = (levels.key_env,) if levels.is_on and levels.key_env else ()
    remote = CLOUD if levels.is_on and levels.remote.url else ()
    return (*COMPUTING, *sealing, *remote)
