"""Two real engines of a tiny model, each with host memory, and a gateway's connections to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from engine.api import CacheGrant, Finished, Peer, Request, Sampling, Started, Tokens
from engine.client.client import SocketEngine
from engine.client.peer_tickets import sign_ticket
from engine.client.tls_files import tls_context
from engine.client.tls_wire import TlsWire
from engine.config import EngineConfig, LevelsConfig
from engine.model_store import ModelCard
from engine.protocol import PROTOCOL_VERSION, Hello, pack_tokens
from engine.statistics import LevelStats
from gateway.config.fleet import ReplicaSettings
from gateway.engines.elsewhere.dialer import FleetIdentity
from gateway.engines.elsewhere.fleet import FleetReplicas
from tests.crash.fleet import PATIENCE_S, KeptReplica, Proxy
from tests.crash.patient_peer import COMMAND
from tests.unit.engine.server.fleet_certificates import certificate

CONFIG = EngineConfig(
    device="cpu", dtype="fp32", kv_memory_mib=8, heartbeat_s=0.05, threads=1,
    levels=LevelsConfig(host_mib=8),
)  # fmt: skip
KEY = bytes(range(32))
GREEDY = Sampling(temperature=0)


class Answer:
    """What came of a request: its tokens, and its beginning and end."""

    def __init__(self, events: Sequence[Any]) -> None:
        self.tokens = [t.token_id for e in events if isinstance(e, Tokens) for t in e.tokens]
        self.end: Finished = events[-1]
        (self.started,) = [event for event in events if isinstance(event, Started)]

    @property
    def fetched(self) -> int:
        """Return the cached tokens that a peer has sent."""
        return dict(self.started.loaded_tokens).get("peer", 0)


class Pair:
    """Engines e0 and e1, each with the connection of a gateway; before e0 stands a proxy."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.kept: dict[str, KeptReplica] = {}
        self.engines: dict[str, SocketEngine] = {}
        self.proxy = Proxy(0)
        self.is_near = False

    async def ask(self, name: str, request: Request) -> Answer:
        """Return an engine's answer."""
        async with asyncio.timeout(PATIENCE_S):
            return Answer([event async for event in self.engines[name].submit(request)])

    def peer(self, request: Request, tokens: int, *, key: bytes = KEY, reader: str = "e1") -> Peer:
        """Return e0 as the peer of a request, with a ticket for its first tokens."""
        ids = pack_tokens(request.tokens[:tokens])
        ticket = sign_ticket(key, request.grant.namespace, ids, reader, time.time_ns() / 1e9)
        return Peer("e0", "127.0.0.1", self.proxy.port, tokens, ticket, self.is_near)

    async def level(self, name: str) -> LevelStats:
        """Return what an engine says of its peers."""
        stats = await self.engines[name].get_stats()
        return next(level for level in stats.levels if level.name == "peer")

    async def join(self, name: str) -> None:
        """Connect to an engine as a gateway."""
        kept, wire = self.kept[name], TlsWire()
        await kept.pid()
        context = tls_context(certificate("gateway/g0"), is_server=False)
        await wire.dial("127.0.0.1", kept.port, context)
        hello = Hello(PROTOCOL_VERSION, role="gateway", name="g0", peer_key=KEY)
        self.engines[name] = await SocketEngine.connect(wire, hello)


@asynccontextmanager
async def pair_of(
    model: ModelCard,
    config: EngineConfig = CONFIG,
    command: tuple[str, ...] = COMMAND,
    **more: Any,
) -> AsyncIterator[Pair]:
    """Start two engines of a prepared model. `more`: other settings of e1."""
    pair = Pair(model.digest)
    try:
        for name in ("e0", "e1"):
            own = replace(config, **more) if name == "e1" else config
            kept = KeptReplica(name, "", config=own, model=Path(model.folder), command=command)
            pair.kept[name] = kept
            kept.keeper.start()
        for name in pair.kept:
            await pair.join(name)
        pair.proxy.lead_to(pair.kept["e0"].port)
        await pair.proxy.open()
        yield pair
    finally:
        for engine in pair.engines.values():
            await engine.close()
        await pair.proxy.close()
        for kept in pair.kept.values():
            await kept.close()


def request(name: str, tokens: Sequence[int], namespace: bytes = b"n", **more: Any) -> Request:
    """Return a greedy request of 8 tokens."""
    wanted = {"sampling": GREEDY} | more
    return Request(name, tuple(tokens), 8, CacheGrant(namespace), **wanted)


@asynccontextmanager
async def gateway_of(pair: Pair, name: str = "g1") -> AsyncIterator[FleetReplicas]:
    """Connect a gateway to both engines, which takes turns between them: a prompt that one has
    computed goes to the other next. e0 is reached through the proxy."""
    ports = pair.proxy.port, pair.kept["e1"].port
    places = tuple(f"e{number}=127.0.0.1:{port}" for number, port in enumerate(ports))
    settings = ReplicaSettings(replicas=places, routing="round_robin")
    identity = FleetIdentity(name, certificate(f"gateway/{name}"))
    changed = asyncio.Event()
    replicas = FleetReplicas(pair.digest, settings, identity, lambda event, facts: changed.set())
    replicas.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not all(one.ready() for one in replicas) or not len(replicas):
                await changed.wait()
                changed.clear()
        yield replicas
    finally:
        await replicas.close()
