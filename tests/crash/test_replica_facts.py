"""Two engines elsewhere tell what they have: real processes, sockets and TLS, and real trees."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from engine.api import CacheGrant, Request, Sampling
from engine.strides import STRIDE_TOKENS
from gateway.config.fleet import ReplicaSettings
from gateway.engines.elsewhere.dialer import FleetIdentity
from gateway.engines.elsewhere.fleet import FleetReplicas
from gateway.engines.replicas import Replicas
from tests.crash.fleet import PATIENCE_S, Fleet, fleet_of
from tests.unit.engine.server.fake_engine_process import VOCAB
from tests.unit.engine.server.fleet_certificates import certificate

pytestmark = pytest.mark.slow

PREFIX = 8 * STRIDE_TOKENS
TENANTS = 4


def request(tenant: int, turn: int) -> Request:
    """Return a turn of a tenant with a long system prompt."""
    prefix = [(tenant * 7 + number) % VOCAB for number in range(PREFIX)]
    grant = CacheGrant(b"n%d" % tenant)
    tokens = (*prefix, *([turn % VOCAB] * 20))
    return Request(f"{tenant}-{turn}", tokens, 2, grant, Sampling(temperature=0))


async def run(replicas: Replicas, wanted: Request) -> None:
    """Run a request to its end."""
    async with asyncio.timeout(PATIENCE_S):
        _ = [event async for event in replicas.submit(wanted)]


def tokens_of(replicas: Replicas) -> dict[str, int]:
    """Return the sums over replicas of what was routed."""
    sums = {"prompt": 0, "cached": 0, "predicted": 0, "missing": 0}
    for one in replicas:
        routed: Any = replicas.chooser.describe(one)["routed_tokens"]
        sums = {name: count + routed[name] for name, count in sums.items()}
    return sums


async def known(replicas: Replicas, name: str, tokens: int) -> None:
    """Wait until so many tokens of prefixes are known of a replica."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for one in replicas:
                facts = replicas.chooser.describe(one)
                if one.name == name and facts.get("device_prefix_tokens") == tokens:
                    return
            await asyncio.sleep(0)


async def test_each_request_finds_what_was_predicted() -> None:
    """Exact facts: no token is predicted that is not there, and none of a prefix is missed."""
    async with fleet_of("e0", "e1") as fleet:
        for turn in range(4):
            await asyncio.gather(
                *(run(fleet.replicas, request(tenant, turn)) for tenant in range(TENANTS))
            )
        sums = tokens_of(fleet.replicas)

    assert sums["missing"] == 0
    assert sums["prompt"] == 4 * TENANTS * (PREFIX + 20)
    assert sums["predicted"] == 3 * TENANTS * PREFIX
    assert sums["cached"] >= sums["predicted"]


async def test_a_restarted_gateway_knows_what_was_cached() -> None:
    """And an engine that was killed is credited with nothing."""
    async with fleet_of("e0", "e1") as fleet:
        await run(fleet.replicas, request(1, 0))
        (home,) = homes(fleet)
        await fleet.replicas.close()
        places = [f"{name}=127.0.0.1:{kept.port}" for name, kept in fleet.kept.items()]
        identity = FleetIdentity("g0", certificate("gateway/g0"))
        later = FleetReplicas(
            "fake", ReplicaSettings(replicas=tuple(places)), identity, fleet.report
        )
        later.start()
        try:
            for name in fleet.kept:
                await fleet.has_told("replica_ready", name, 2)
            await known(later, home, PREFIX)
            await run(later, request(1, 1))
            assert tokens_of(later)["predicted"] == PREFIX

            await fleet.kept[home].kill()
            await fleet.has_told("replica_ready", home, 3)
            await known(later, home, 0)
            await run(later, request(1, 2))
            assert tokens_of(later)["missing"] == 0
        finally:
            await later.close()


async def test_a_hot_prefix_spreads_when_one_engine_has_too_much_to_do() -> None:
    """While one engine keeps up, all stay where the prefix is. When its queue costs more than to
    compute the prefix again, the other one begins to take some, and those find its copy there."""
    async with fleet_of("e0", "e1") as fleet:
        for turn in range(4):
            await run(fleet.replicas, hot(turn, tail=20))
        (home,) = homes(fleet)
        (other,) = set(fleet.kept) - {home}
        await asyncio.gather(
            *(run(fleet.replicas, hot(turn, tail=PREFIX // 4)) for turn in range(4, 44))
        )
        recent = fleet.replicas.chooser.recent.newest(40)
        there = routed_at(fleet, other)
        told: Any = fleet.replicas.chooser.describe(fleet.replica(other))
        await run(fleet.replicas, hot(44, tail=20))
        sums = tokens_of(fleet.replicas)

    went = Counter(one.replica for one in recent)
    assert min(went[home], went[other]) >= 8, went
    assert recent[-1].replica == home, "the first of the burst finds no queue"
    assert told["device_prefix_tokens"] >= PREFIX
    assert there["cached"] >= (went[other] - 2) * PREFIX, "all but those that wrote it found it"
    assert sums["missing"] <= 2 * PREFIX


def hot(turn: int, tail: int) -> Request:
    """Return a request with the prefix that all want, and an end of its own."""
    prefix = [number % VOCAB for number in range(PREFIX)]
    own = [(turn * 31 + number * (turn + 1)) % VOCAB for number in range(tail)]
    grant = CacheGrant(b"hot")
    return Request(f"hot-{turn}", (*prefix, *own), 2, grant, Sampling(temperature=0))


def routed_at(fleet: Fleet, name: str) -> dict[str, int]:
    """Return the tokens of the requests that started at a replica."""
    routed: Any = fleet.replicas.chooser.describe(fleet.replica(name))["routed_tokens"]
    return dict(routed)


def homes(fleet: Fleet) -> list[str]:
    """Return the replicas that have some prefix."""
    told = {one.name: fleet.replicas.chooser.describe(one) for one in fleet.replicas}
    return [name for name, facts in told.items() if facts["device_prefix_tokens"]]
