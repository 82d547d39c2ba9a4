"""The engine's keeper: starts it as a child process, watches it, starts it again, and says so.

It is an `engine.client.client.Engine` itself: requests go to the child that lives now. A child that
dies, or whose heartbeat stops, ends every open stream with `engine_died` and is replaced after a
pause that grows from 0.1 to 10 s; after 5 failures in a minute it stays down until somebody looks.

A request that was in flight at two deaths in a row is taken to be the cause and refused for ten
minutes: one poisonous prompt must not keep everybody's engine dying, and a popular one that was
innocent must come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import xxhash

from engine.api import EngineInfo, Erased, Namespace, Peeked, Quota, Request, Stats, Surveyed
from engine.client.cache_event_totals import CacheEventTotals
from engine.client.client import RequestStream, SocketEngine
from engine.client.namespace_stats import NamespaceTable
from engine.client.temp_folder import own_folder
from engine.config import EngineConfig
from engine.errors import EngineError, EngineUnavailable, ModelError, RequestRefused

PAUSE_FIRST_S, PAUSE_LAST_S = 0.1, 10.0
FAILURES_MAX, FAILURES_WINDOW_S = 5, 60.0
CONNECT_EVERY_S = 0.02
WATCH_EVERY_S = 0.25
POISON_REMEMBERED, POISON_S = 64, 600.0

Report = Callable[[str, dict[str, object]], None]
"""Told of what happens to the engine, for the log: an event's name and its facts."""


class EngineSupervisor:
    """Owns the engine process. `start` returns at once; `wait_ready` when it answers."""

    def __init__(
        self,
        model_dir: Path,
        config: EngineConfig,
        report: Report,
        *,
        command: tuple[str, ...] = (sys.executable, "-m", "engine.server.server"),
    ) -> None:
        self._model_dir = model_dir
        self._config = config
        self._report = report
        self._command = command
        self._engine: SocketEngine | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._is_closing = False
        self._is_draining = False
        self._failures: deque[float] = deque(maxlen=FAILURES_MAX)
        self._last_stats = Stats()
        self._suspects: set[str] = set()
        self._poison: deque[tuple[str, float]] = deque(maxlen=POISON_REMEMBERED)
        self.restarts = 0
        self.failure: EngineError | None = None

    # -- Engine -------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo | None:
        """See `engine.client.client.Engine`."""
        return self._engine.info if self._engine is not None else None

    @property
    def stats(self) -> Stats:
        """See `engine.client.client.Engine`."""
        return self._engine.stats if self._engine is not None else self._last_stats

    @property
    def namespaces(self) -> NamespaceTable:
        """See `engine.client.client.Engine`: nobody holds anything while there is no engine."""
        return self._engine.namespaces if self._engine is not None else NamespaceTable()

    @property
    def losses(self) -> CacheEventTotals:
        """See `engine.client.client.Engine`: of the engine that runs now."""
        return self._engine.losses if self._engine is not None else CacheEventTotals()

    def ready(self) -> bool:
        """See `engine.client.client.Engine`."""
        return self._engine is not None and self._engine.ready()

    def submit(self, request: Request) -> RequestStream:
        """See `engine.client.client.Engine`."""
        if self._engine is None:
            code = "draining" if self._is_draining else "not_ready"
            raise EngineUnavailable(code, "The engine is starting.", self._retry_after_s())
        if self._poison and self._is_poison(_digest(request)):
            raise RequestRefused(
                "poison_request", "This request was being computed when the engine died, twice."
            )
        return self._engine.submit(request)

    async def peek(self, namespace: Namespace, tokens: tuple[int, ...]) -> Peeked:
        """See `engine.client.client.Engine`."""
        return await self._living().peek(namespace, tokens)

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
        return await self._living().erase(namespace, lease_id=lease_id, tokens=tokens)

    async def survey(self, namespace: Namespace, most: int) -> Surveyed:
        """See `engine.client.client.Engine`."""
        return await self._living().survey(namespace, most)

    async def get_stats(self) -> Stats:
        """See `engine.client.client.Engine`."""
        return await self._living().get_stats()

    async def drain(self, timeout_s: float) -> None:
        """See `engine.client.client.Engine`."""
        self._is_draining = True
        if self._engine is not None:
            await self._engine.drain(timeout_s)

    async def close(self) -> None:
        """End the child: politely, then not."""
        self._is_closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._end_child()

    # -- keeping it alive ---------------------------------------------------------------------

    def start(self) -> None:
        """Begin to keep an engine alive."""
        self._task = asyncio.create_task(self._keep())

    async def wait_ready(self) -> None:
        """Until the engine answers. Raises the EngineError because of which it never will."""
        await self._ready.wait()
        if self.failure is not None:
            raise self.failure

    async def _keep(self) -> None:
        pause_s = PAUSE_FIRST_S
        loop = asyncio.get_running_loop()
        while True:
            started_s = loop.time()
            try:
                await self._live()
                reason = "connection lost"
            except ModelError as error:
                await self._end_child()
                self._give_up(error)
                return
            except (EngineError, OSError) as error:
                reason = str(error)
            await self._end_child()
            if self._is_closing or self._is_draining:
                return
            now_s = loop.time()
            self._failures.append(now_s)
            self.restarts += 1
            self._report("engine_died", {"reason": reason, "restarts": self.restarts})
            if len(self._failures) == FAILURES_MAX and (
                now_s - self._failures[0] < FAILURES_WINDOW_S
            ):
                message = f"The engine died {FAILURES_MAX} times in {FAILURES_WINDOW_S:.0f} s."
                self._give_up(EngineUnavailable("engine_died", message, FAILURES_WINDOW_S))
                return
            pause_s = PAUSE_FIRST_S if now_s - started_s > 10 * pause_s else pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_LAST_S)

    async def _live(self) -> None:
        """One child's life, from its start until its connection is lost or it is stuck."""
        with own_folder("trunkline-engine-") as folder:
            path, token = folder / "engine.sock", secrets.token_hex(32)
            process = await self._spawn(path, token)
            engine = await self._connect(path, token, process)
        self._engine = engine
        self._ready.set()
        self._report("engine_ready", {"pid": process.pid})
        lost = asyncio.create_task(engine.wait_lost())
        try:
            await self._watch(engine, lost)
        finally:
            lost.cancel()
            self._last_stats = engine.stats
            self._engine = None
            await engine.close()
            self._accuse(engine.died_with)

    async def _watch(self, engine: SocketEngine, lost: asyncio.Task[None]) -> None:
        """Until the connection is lost, the engine falls silent, or it has work and no step.

        What counts is time during which this process ran too: after a pause of its own it listens
        again before it judges.
        """
        loop = asyncio.get_running_loop()
        looked_at_s = moved_at_s = loop.time()
        step = -1
        while not lost.done():
            await asyncio.wait([lost], timeout=WATCH_EVERY_S)
            now_s, stats = loop.time(), engine.stats
            if now_s - looked_at_s > 4 * WATCH_EVERY_S:
                engine.heard_at_s = moved_at_s = now_s
            looked_at_s = now_s
            if stats.step != step or stats.running + stats.waiting == 0:
                step, moved_at_s = stats.step, now_s
            idle_s = now_s - min(engine.heard_at_s, moved_at_s)
            if idle_s > self._config.step_timeout_s:
                self._report("engine_stuck", {"idle_s": round(idle_s, 1), "step": stats.step})
                return

    async def _spawn(self, path: Path, token: str) -> asyncio.subprocess.Process:
        settings = {
            "socket_path": str(path),
            "token": token,
            "model_dir": str(self._model_dir),
            "config": msgspec.to_builtins(self._config),
        }
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        self._process = process  # from here on it is ended, whatever comes
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        with contextlib.suppress(OSError):
            await process.stdin.drain()
        return process

    async def _connect(
        self, path: Path, token: str, process: asyncio.subprocess.Process
    ) -> SocketEngine:
        """As soon as the child listens; it welcomes when its model is loaded."""
        while True:
            if process.returncode is not None:
                raise EngineUnavailable(
                    "engine_died", f"The engine ended with status {process.returncode}."
                )
            try:
                return await SocketEngine.connect(path, token)
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(CONNECT_EVERY_S)
            except EngineUnavailable:
                raise
            except EngineError as error:
                if error.code == "engine_died":
                    raise
                raise ModelError(error.code, error.message) from error

    async def _end_child(self) -> None:
        """SIGTERM, a moment, SIGKILL. Always reaps it: where one who does so is cancelled, the
        next one does."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        patience_s = 0.5 if not self._is_draining else self._config.drain_timeout_s + 2.0
        try:
            async with asyncio.timeout(patience_s):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _accuse(self, died_with: Iterable[Request]) -> None:
        """Who was in flight at this death and at the one before?"""
        until_s = asyncio.get_running_loop().time() + POISON_S
        digests = set(map(_digest, died_with))
        self._poison.extend((digest, until_s) for digest in sorted(digests & self._suspects))
        self._suspects = digests

    def _is_poison(self, digest: str) -> bool:
        now_s = asyncio.get_running_loop().time()
        return any(digest == known and now_s < until_s for known, until_s in self._poison)

    def _give_up(self, error: EngineError) -> None:
        self.failure = error
        self._report("engine_stays_down", {"code": error.code, "message": error.message})
        self._ready.set()

    def _living(self) -> SocketEngine:
        if self._engine is None:
            raise EngineUnavailable("not_ready", "The engine is starting.", self._retry_after_s())
        return self._engine

    def _retry_after_s(self) -> float:
        return FAILURES_WINDOW_S if self.failure is not None else 2.0


def _digest(request: Request) -> str:
    """What makes two tries of one request the same: its namespace and its tokens."""
    words = msgspec.msgpack.encode((request.grant.namespace, request.tokens))
    return xxhash.xxh3_128_hexdigest(words)
