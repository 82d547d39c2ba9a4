"""Two CPU engines behind a gateway's replicas, against one with both pools:
python -m tests.bench.two_replicas

Eight tenants with system prompts of 1,024 tokens send turns; no pool of one engine holds all their
prefixes, both together do. It prints which part of the prompt tokens of later turns was cached, and
the tokens that were predicted and missing. The model is tiny and its engines are real processes
behind TLS.
"""

from __future__ import annotations

import asyncio
import random
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from engine.api import CacheGrant, Request, Sampling, Started
from engine.client.client import SocketEngine
from engine.config import EngineConfig
from gateway.config.fleet import ReplicaSettings, RoutingPolicy
from gateway.engines.elsewhere.dialer import FleetIdentity
from gateway.engines.elsewhere.fleet import FleetReplicas
from gateway.engines.keeper import EngineKeeper, ListeningSocket
from tests.models import prepared, tiny_config
from tests.unit.engine.server.fleet_certificates import certificate

TENANTS, TURNS, PREFIX, OWN, OUTPUT = 8, 8, 1_024, 64, 8
POOL = 400
"""Blocks of each of two engines: eight prefixes take 512, and as many turns 40."""
VOCAB = 256


class Kept:
    """A keeper of an engine of the tiny model behind a listening socket."""

    def __init__(self, name: str, model: Path, blocks: int) -> None:
        end = self._end = socket.create_server(("127.0.0.1", 0))
        self.place = f"{name}=127.0.0.1:{end.getsockname()[1]}"
        listen = ListeningSocket(end.fileno(), name, certificate(f"engine/{name}"))
        config = EngineConfig(kv_blocks=blocks, threads=1)
        self.keeper = EngineKeeper(model, config, lambda event, facts: None, self, listen=listen)
        self.keeper.start()

    def hold(self, engine: SocketEngine) -> None: ...

    def release(self, engine: SocketEngine, reason: str) -> None: ...

    def record_death(self, engine: SocketEngine, in_step: frozenset[str]) -> None: ...

    async def close(self) -> None:
        """End the engine."""
        await self.keeper.close()
        self._end.close()


def request(tenant: int, turn: int, chance: random.Random) -> Request:
    """Return a turn of a tenant."""
    prefix = [(tenant * 31 + number) % VOCAB for number in range(PREFIX)]
    own = [chance.randrange(VOCAB) for _ in range(OWN)]
    grant = CacheGrant(b"n%d" % tenant)
    return Request(f"{tenant}-{turn}", (*prefix, *own), OUTPUT, grant, Sampling(temperature=0))


async def ask(replicas: FleetReplicas, wanted: Request) -> tuple[int, float]:
    """Run a request; return its cached tokens and the seconds until it ended."""
    began_s, cached = perf_counter(), 0
    async for event in replicas.submit(wanted):
        if isinstance(event, Started):
            cached = event.cached_tokens
    return cached, perf_counter() - began_s


async def measure(model: Path, pools: Sequence[int], policy: RoutingPolicy, seed: int) -> str:
    """Return one line of figures."""
    kept = [Kept(f"e{number}", model, blocks) for number, blocks in enumerate(pools)]
    settings = ReplicaSettings(replicas=tuple(one.place for one in kept), routing=policy)
    identity = FleetIdentity("g0", certificate("gateway/g0"))
    ready = asyncio.Event()
    told: list[str] = []

    def report(event: str, facts: dict[str, Any]) -> None:
        told.append(event)
        if told.count("replica_ready") == len(pools):
            ready.set()

    replicas = FleetReplicas("", settings, identity, report)
    replicas.start()
    try:
        async with asyncio.timeout(180):
            await ready.wait()
        chance, cached, prompt, took_s = random.Random(seed), 0, 0, list[float]()
        for turn in range(TURNS):
            tenants = list(range(TENANTS))
            chance.shuffle(tenants)
            found = await asyncio.gather(
                *(ask(replicas, request(one, turn, chance)) for one in tenants)
            )
            if turn:
                cached += sum(tokens for tokens, _ in found)
                prompt += TENANTS * (PREFIX + OWN)
                took_s += [seconds for _, seconds in found]
        facts: list[Any] = [replicas.chooser.describe(one) for one in replicas]
        routed = [one["routed_tokens"] for one in facts]
        missing = sum(one["missing"] for one in routed)
        predicted = sum(one["predicted"] for one in routed)
        by_engine = [one["prompt"] for one in routed]
        mean_s = sum(took_s) / len(took_s)
        return (
            f"{policy:12} pools {list(pools)!s:12} hits {cached / prompt:.4f}"
            f"  missing {missing} of {predicted} predicted  prompts {by_engine}"
            f"  a request {mean_s:.2f} s"
        )
    finally:
        await replicas.close()
        for one in kept:
            await one.close()


async def main() -> None:
    """Print a line for each seed and way."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(prepared(Path(folder), tiny_config(context=2_048)).folder)
        for seed in range(2):
            print(await measure(model, [2 * POOL], "time", seed), flush=True)
            print(await measure(model, [POOL, POOL], "time", seed), flush=True)
            print(await measure(model, [POOL, POOL], "round_robin", seed), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
