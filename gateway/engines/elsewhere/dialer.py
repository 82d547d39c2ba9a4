"""Keeps a connection to an engine elsewhere: connects, looks who answers, and notices its loss.

A connection is lost when it ends, or after `SILENCE_MAX_S` without a frame: an engine sends one
each half second. Only time during which this process ran counts. What answers and may not serve is
`wrong`, and is asked again: an operator may mend it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import Struct

from engine.api import Disown
from engine.client.client import SocketEngine
from engine.client.tls_files import TlsError, tls_context
from engine.client.tls_wire import TlsWire
from engine.errors import EngineError
from engine.protocol import PROTOCOL_VERSION, Hello
from gateway.config.fleet import ReplicaAddress
from gateway.engines.replica import Replica
from gateway.processes.child_process import Report

SILENCE_MAX_S: Final = 2.0
WATCH_EVERY_S: Final = 0.25
CONNECT_S: Final = 15.0
"""Longest wait for a connection and its Welcome, in seconds."""
PAUSES_S: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0)
"""Pauses before further attempts; the last one repeats."""
STEADY_S: Final = 10.0
"""Seconds after which a lost connection is no failure in a row."""
REFUSED: Final = (
    "It ended the connection without an answer; expected a Welcome. If its log says"
    " gateway_refused, it does not accept the certificate of gateway/{}."
)
WRONG: Final = ("unsupported", "unauthorized", "digest_mismatch")


class FleetIdentity(Struct, frozen=True):
    """Who this gateway is to engines elsewhere, and the folder of its certificate."""

    name: str
    tls: Path
    start: str = ""
    """Names this start of it in its database, for the books of one that died."""


class EngineDialer:
    """A `gateway.engines.replica.Link` to an engine at an address."""

    def __init__(
        self,
        address: ReplicaAddress,
        identity: FleetIdentity,
        replica: Replica,
        report: Report,
        names: dict[str, Replica],
        admit: Callable[[Replica, SocketEngine], str],
        peer_key: bytes = b"",
    ) -> None:
        """`names`: the connected replicas of the model by their certificates' names; this one adds
        itself. `admit`: returns why an engine that answers may not serve as this replica, or "".
        `peer_key`: signs what engines may fetch from each other.
        """
        self._peer_key = peer_key
        self.address = address
        self._identity = identity
        self._replica = replica
        self._report = report
        self._names = names
        self._admit = admit
        self._task: asyncio.Task[None] | None = None
        self._was_ready = asyncio.Event()
        self._lost: SocketEngine | None = None
        """The engine before, until it is known whether it has died."""
        self.restarts = 0

    def failure(self) -> str:
        """See `Link`: an engine elsewhere may come at any time."""
        return ""

    def retry_after_s(self) -> float:
        """See `Link`."""
        return PAUSES_S[-1]

    def start(self) -> None:
        """See `Link`."""
        self._task = asyncio.create_task(self._keep())

    async def wait_ready(self) -> None:
        """See `Link`."""
        await self._was_ready.wait()

    def begin_drain(self) -> None:
        """See `Link`: the engine goes on without this gateway."""

    async def close(self) -> None:
        """See `Link`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._leave_names()

    def _leave_names(self) -> None:
        for name in [name for name, one in self._names.items() if one is self._replica]:
            del self._names[name]

    # -- one connection after another ---------------------------------------------------------

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            try:
                engine = await self._connect()
            except (OSError, EngineError, TimeoutError) as error:
                self._note_failure(error)
            else:
                began_s = loop.time()
                await self._serve(engine)
                if loop.time() - began_s > STEADY_S:
                    failures = 0
            self._leave_names()
            await asyncio.sleep(PAUSES_S[min(failures, len(PAUSES_S) - 1)])
            failures += 1

    async def _connect(self) -> SocketEngine:
        """Return an engine that may serve. Raises OSError, EngineError and TimeoutError."""
        wire, address, identity = TlsWire(), self.address, self._identity
        async with asyncio.timeout(CONNECT_S):
            context = await asyncio.to_thread(tls_context, identity.tls, is_server=False)
            await wire.dial(address.host, address.port, context)
            kind, _, name = wire.peer.partition("/")
            expected = address.name or name
            if kind != "engine" or name != expected:
                wire.close()
                raise TlsError(
                    f"The certificate names {wire.peer!r}; expected 'engine/{expected or 'NAME'}'."
                )
            if self._names.setdefault(name, self._replica) is not self._replica:
                wire.close()  # a Hello would end the other connection
                raise EngineError(
                    "digest_mismatch",
                    f"Another replica has the name {name}; expected each name once.",
                )
            hello = Hello(
                PROTOCOL_VERSION,
                role="gateway",
                name=identity.name,
                start=identity.start,
                peer_key=self._peer_key,
            )
            try:
                engine = await SocketEngine.connect(wire, hello)
            except EngineError as error:
                if error.code == "engine_died":  # under TLS 1.3 a refused client sees no more
                    raise EngineError("engine_died", REFUSED.format(identity.name)) from error
                raise
        self._replica.name = self._replica.name or name
        assert engine.info is not None
        if reason := self._admit(self._replica, engine):
            await engine.close()
            raise EngineError("digest_mismatch", reason)
        return engine

    def _note_failure(self, error: Exception) -> None:
        """Note why there is no engine; log it where it has changed."""
        replica = self._replica
        reason = str(error) or "It does not answer in time."
        if isinstance(error, OSError) and not isinstance(error, TimeoutError):
            reason = error.strerror or str(error)
            if error.errno and error.errno > 0:  # asyncio's own text names the address alone
                reason = os.strerror(error.errno)
        is_wrong = isinstance(error, EngineError) and error.code in WRONG
        state = replica.state
        if is_wrong:
            state = "wrong"
        elif state == "wrong":
            state = "connecting"
        if (state, reason) != (replica.state, replica.reason):
            replica.state, replica.reason = state, reason
            address = str(self.address)
            facts: dict[str, object] = {"replica": replica.name, "address": address}
            self._report(
                "replica_wrong" if is_wrong else "replica_unreachable", {**facts, "reason": reason}
            )

    async def _serve(self, engine: SocketEngine) -> None:
        """Hand an engine to the replica until its connection is lost."""
        replica = self._replica
        if (before := self._lost) is not None and before.info != engine.info:
            replica.record_death(before, frozenset(engine.fallen))
        elif before is not None and before.lost_requests:  # their ends may have been on the way
            engine.post(Disown(tuple(one.request.request_id for one in before.lost_requests)))
        self._lost = None
        engine.on_drain = partial(self._on_drain, engine)
        replica.hold(engine)
        if engine.is_draining:
            self._on_drain(engine, "It drained before this gateway came.")
        assert engine.info is not None
        facts = {"replica": replica.name, "address": str(self.address)}
        self._report("replica_ready", {**facts, "epoch": engine.info.epoch})
        self._was_ready.set()
        reason = "closed"
        try:
            reason = await self._watch(engine)
        finally:
            await engine.close()
            replica.release(engine, reason)
            self._lost = engine
        self.restarts += 1
        self._report("replica_lost", {**facts, "reason": reason})

    def _on_drain(self, engine: SocketEngine, message: str) -> None:
        self._replica.state, self._replica.reason = "draining", message
        self._report("replica_draining", {"replica": self._replica.name, "reason": message})
        self._replica.begin_move(engine)

    async def _watch(self, engine: SocketEngine) -> str:
        """Return why the engine is lost."""
        loop = asyncio.get_running_loop()
        lost = asyncio.create_task(engine.wait_lost())
        checked_at_s = loop.time()
        try:
            while not lost.done():
                await asyncio.wait([lost], timeout=WATCH_EVERY_S)
                if lost.done():
                    break
                now_s = loop.time()
                if now_s - checked_at_s > 4 * WATCH_EVERY_S:
                    engine.last_frame_s = now_s
                checked_at_s = now_s
                if (silent_s := now_s - engine.last_frame_s) > SILENCE_MAX_S:
                    return f"silent for {silent_s:.1f} s"
        finally:
            lost.cancel()
        return f"connection lost: {engine.loss}" if engine.loss else "connection lost"
