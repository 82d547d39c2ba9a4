"""Replicas elsewhere: who belongs to a model, by its directory, and who may serve it.

A replica that its directory no longer names gets no new requests; its connection ends with the last
of those that run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from engine.client.client import SocketEngine
from gateway.config.fleet import ReplicaAddress, ReplicaSettings
from gateway.engines.elsewhere.dialer import EngineDialer, FleetIdentity
from gateway.engines.elsewhere.directory import follow
from gateway.engines.replica import Replica
from gateway.engines.replicas import Replicas
from gateway.processes.child_process import Report

IDLE_POLL_S = 0.25


class FleetReplicas(Replicas):
    """The replicas of a model whose engines are elsewhere."""

    def __init__(
        self,
        digest: str,
        settings: ReplicaSettings,
        identity: FleetIdentity,
        report: Report,
        *,
        prompts_apart: bool = False,
    ) -> None:
        """`digest`: of the model's files here; what an engine serves begins with it.
        `prompts_apart`: see `Replicas`."""
        super().__init__(report, policy=settings.routing, prompts_apart=prompts_apart)
        self._digest, self._settings, self._identity = digest, settings, identity
        self._dialers: dict[ReplicaAddress, tuple[Replica, EngineDialer]] = {}
        self._names: dict[str, Replica] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._serves = asyncio.Event()

    def start(self) -> None:
        """See `Replicas`."""
        self._begin(follow(self._settings, self._on_change, self._report))

    async def wait_ready(self) -> None:
        """See `Replicas`."""
        await self._serves.wait()

    async def drain(self, timeout_s: float) -> None:
        """Accept no new requests; the engines go on without this gateway."""
        for one in self:
            one.is_draining = True

    async def close(self) -> None:
        """See `Replicas`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_change(self, addresses: Sequence[ReplicaAddress]) -> None:
        for address in set(self._dialers).difference(addresses):
            replica, dialer = self._dialers.pop(address)
            self._report("replica_removed", {"replica": replica.name, "address": str(address)})
            replica.is_draining = True
            replica.state, replica.reason = "draining", "Its directory names it no longer."
            self._begin(self._leave(replica, dialer))
        for address in addresses:
            if address in self._dialers:
                continue
            replica = self.add(address.name, is_elsewhere=True)
            replica.address = address.host, address.port
            dialer = EngineDialer(
                *(address, self._identity, replica, self._report),
                names=self._names,
                admit=self._admit,
                peer_key=self.peer_key,
            )
            replica.link = dialer
            self._dialers[address] = replica, dialer
            dialer.start()

    async def _leave(self, replica: Replica, dialer: EngineDialer) -> None:
        """Close a replica's connection once none of its requests runs."""
        while isinstance(replica.engine, SocketEngine) and replica.engine.in_flight:
            lost = asyncio.ensure_future(replica.engine.wait_lost())
            await asyncio.wait([lost], timeout=IDLE_POLL_S)
            lost.cancel()
        await dialer.close()
        self.remove(replica)

    def _admit(self, replica: Replica, engine: SocketEngine) -> str:
        """Return why an engine that answers may not serve; "" if it may."""
        info = engine.info
        assert info is not None
        if not info.model_digest.startswith(self._digest):
            return (
                f"It serves the model {info.model} of digest {info.model_digest[:12]}; expected"
                f" {self._digest[:12]}, that of the files here."
            )
        for other in self:
            there = other.info
            if other is replica or there is None:
                continue
            if there.epoch == info.epoch:
                return f"It is the engine of {other.name} at another address; expected another one."
            if other.ready() and there.model_digest != info.model_digest:
                return (
                    f"Its KV is of {info.model_digest[-24:]}; expected {there.model_digest[-24:]},"
                    f" as that of {other.name}."
                )
        self._serves.set()
        return ""
