"""Engines elsewhere for tests: keepers with real engine processes, TLS, and proxies between."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from engine.client.client import SocketEngine
from engine.config import EngineConfig
from gateway.config.fleet import ReplicaSettings
from gateway.engines.elsewhere.dialer import FleetIdentity
from gateway.engines.elsewhere.fleet import FleetReplicas
from gateway.engines.keeper import EngineKeeper, ListeningSocket
from gateway.engines.replica import Replica
from gateway.processes.child_process import RestartPolicy
from tests.unit.engine.server.fleet_certificates import certificate

COMMAND = (sys.executable, "-m", "tests.unit.engine.server.fake_engine_process")
CONFIG = EngineConfig(
    heartbeat_s=0.05, step_timeout_s=30.0, step_tokens_max=16, prefill_chunk_tokens_max=16
)
PATIENCE_S = 60.0


def gateway_settings(ports: Mapping[str, int], name: str = "", **fleet: str) -> str:
    """Return the settings of a gateway whose engines listen at these ports of this host. `name`:
    its own, instead of that of its certificate, g0; `fleet`: further settings of [fleet]."""
    replicas = [f"{one}=127.0.0.1:{port}" for one, port in ports.items()]
    fleet |= {"tls": str(certificate(f"gateway/{name or 'g0'}"))} | ({"name": name} if name else {})
    lines = [f"{key} = {json.dumps(value)}" for key, value in fleet.items()]
    return "\n".join((f"[model]\nreplicas = {json.dumps(replicas)}\n[fleet]", *lines, ""))


class KeptReplica:
    """A keeper of an engine behind a listening socket."""

    def __init__(
        self,
        name: str,
        fault: str,
        tls: Path | None = None,
        config: EngineConfig = CONFIG,
        port: int = 0,
        model: Path | None = None,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        """`model`: a folder for `command`, instead of the fake one with a fault."""
        self.name = name
        self._end = socket.create_server(("127.0.0.1", port))
        self.port: int = self._end.getsockname()[1]
        listening = ListeningSocket(self._end.fileno(), name, tls or certificate(f"engine/{name}"))
        self.engine: SocketEngine | None = None
        self._ready = asyncio.Event()
        self.keeper = EngineKeeper(
            *(model or Path("fake") / fault, config, lambda event, facts: None, self),
            command=command,
            restarts=RestartPolicy((0.1,)),
            listen=listening,
        )

    def hold(self, engine: SocketEngine) -> None:
        self.engine = engine
        self._ready.set()

    def release(self, engine: SocketEngine, reason: str) -> None:
        self.engine = None
        self._ready.clear()

    def record_death(self, engine: SocketEngine, in_step: frozenset[str]) -> None: ...

    async def pid(self) -> int:
        """Return the process id of the engine, once one serves."""
        async with asyncio.timeout(PATIENCE_S):
            await self._ready.wait()
        assert self.engine is not None
        assert self.engine.info is not None
        return self.engine.info.pid

    async def kill(self) -> None:
        """Kill the engine as the out-of-memory killer does."""
        os.kill(await self.pid(), signal.SIGKILL)

    async def is_idle(self) -> None:
        """Wait until the engine has nothing to do, as its keeper hears."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                stats = await self.running().get_stats()
                if not stats.running + stats.waiting:
                    return

    def running(self) -> SocketEngine:
        """Return the engine that serves."""
        assert self.engine is not None
        return self.engine

    async def close(self) -> None:
        await self.keeper.close()
        self._end.close()


Mode = Literal["pass", "drop", "halve", "bytes", "delay", "moods"]
PARTS_MAX = 5
PAUSE_S_MAX = 0.02
CUT_SHARE = 0.02


class Proxy:
    """Stands between a gateway and an engine. `up` and `down`: what it does with bytes to the
    engine and from it: passes them, drops them, hands them on in halves or one by one, or holds
    them until `release`. `moods`: a seed's draw of pieces and pauses, and now and then a cut."""

    def __init__(self, port: int, seed: int = 1) -> None:
        self._to = port
        self._chance = random.Random(seed)
        self.cuts = 0
        """How many connections a mood has cut."""
        self.port = 0
        self.up: Mode = "pass"
        self.down: Mode = "pass"
        self._released = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._server = await asyncio.start_server(self._on_connection, host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    def lead_to(self, port: int) -> None:
        """Lead further connections somewhere else."""
        self._to = port

    def release(self) -> None:
        """Pass on what was held."""
        self._released.set()

    def cut(self) -> None:
        """End all connections, as a switch does that is turned off and on."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers |= {writer, ours}
        for source, sink, way in ((reader, ours, "up"), (theirs, writer, "down")):
            task = asyncio.create_task(self._pump(source, sink, way))
            self._tasks.add(task)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: str
    ) -> None:
        try:
            while data := await source.read(2**16):
                mode: Mode = getattr(self, way)
                if mode == "drop":
                    continue
                if mode == "delay":
                    await self._released.wait()
                for part, pause_s in self._parts(data, mode):
                    sink.write(part)
                    await sink.drain()
                    await asyncio.sleep(pause_s)
                if mode == "moods" and self._chance.random() < CUT_SHARE:
                    self.cuts += 1
                    return
        except OSError:
            pass
        finally:
            sink.transport.abort()

    def _parts(self, data: bytes, mode: Mode) -> list[tuple[bytes, float]]:
        """Return the pieces of what came, and the pause after each."""
        size = len(data)
        if mode == "moods":
            wanted = self._chance.randrange(PARTS_MAX)
            at = sorted({0, size, *self._chance.choices(range(size), k=wanted)})
            pauses = [self._chance.random() * PAUSE_S_MAX for _ in at]
        else:
            step = {"halve": max(1, size // 2), "bytes": 1}.get(mode, size)
            at, pauses = [*range(0, size, step), size], [0.0] * size
        return [
            (data[one:other], pause_s)
            for one, other, pause_s in zip(at, at[1:], pauses, strict=False)
        ]


class Fleet:
    """Replicas of a model with their keepers; `proxies` stand before those that were asked for."""

    def __init__(self) -> None:
        self.kept: dict[str, KeptReplica] = {}
        self.proxies: dict[str, Proxy] = {}
        self.reports: list[tuple[str, dict[str, Any]]] = []
        self.replicas: FleetReplicas
        self._changed = asyncio.Event()

    def report(self, event: str, facts: dict[str, Any]) -> None:
        self.reports.append((event, facts))
        self._changed.set()

    async def has_told(self, event: str, name: str, times: int = 1) -> dict[str, Any]:
        """Wait until an event of a replica was reported so often; return the last report."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = [facts for facts in self.told(event) if facts["replica"] == name]
                if len(found) >= times:
                    return found[-1]
                await self._changed.wait()
                self._changed.clear()

    async def changed(self) -> None:
        """Wait for the next report."""
        self._changed.clear()
        async with asyncio.timeout(PATIENCE_S):
            await self._changed.wait()

    def told(self, event: str) -> list[dict[str, Any]]:
        """Return the reports of an event."""
        return [facts for name, facts in self.reports if name == event]

    def replica(self, name: str) -> Replica:
        """Return a replica as the gateway sees it."""
        return next(one for one in self.replicas if one.name == name)

    async def serving(self, request_id: str) -> str:
        """Return the name of the replica that has a request."""
        found = [
            one.name
            for one in self.replicas
            if isinstance(one.engine, SocketEngine) and one.engine.has_request(request_id)
        ]
        (name,) = found
        return name


@asynccontextmanager
async def fleet_of(
    *names: str,
    faults: dict[str, str] | None = None,
    proxied: tuple[str, ...] = (),
    certificates: dict[str, Path] | None = None,
    model: str = "fake",
    waits: bool = True,
    others: dict[str, int] | None = None,
    config: EngineConfig = CONFIG,
    seed: int = 1,
    settings: ReplicaSettings | None = None,
    ports: dict[str, int] | None = None,
    tls: Path | None = None,
) -> AsyncIterator[Fleet]:
    """Start engines under keepers, and a gateway's replicas over them. `waits`: until all are
    ready. `others`: ports of this machine that are replicas, too. `settings`: instead of a list of
    the engines, how the gateway finds them. `ports`: where engines listen, instead of a free one.
    `tls`: the gateway's certificate."""
    fleet = Fleet()
    places: list[str] = []
    try:
        for name in names:
            shown = (certificates or {}).get(name)
            fault, port = (faults or {}).get(name, ""), (ports or {}).get(name, 0)
            kept = KeptReplica(name, fault, shown, config, port)
            fleet.kept[name] = kept
            kept.keeper.start()
            port = kept.port
            if name in proxied:
                proxy = fleet.proxies[name] = Proxy(port, seed * 1_000 + len(places))
                await proxy.open()
                port = proxy.port
            places.append(f"{name}=127.0.0.1:{port}")
        identity = FleetIdentity("g0", tls or certificate("gateway/g0"))
        places += [f"{name}=127.0.0.1:{port}" for name, port in (others or {}).items()]
        settings = settings or ReplicaSettings(replicas=tuple(places))
        fleet.replicas = FleetReplicas(model, settings, identity, fleet.report)
        fleet.replicas.start()
        if waits:
            for name in names:
                await fleet.has_told("replica_ready", name)
        yield fleet
    finally:
        if hasattr(fleet, "replicas"):
            await fleet.replicas.close()
        for proxy in fleet.proxies.values():
            await proxy.close()
        for kept in fleet.kept.values():
            await kept.close()
