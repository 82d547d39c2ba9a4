"""Two gateways over one database and one Valkey: limits hold over both."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.model_store import ModelCard
from gateway.config.fleet import FleetConfig
from gateway.shared import valkey
from tenancy.accounts.tenants import change_tenant
from tenancy.storage.postgres import PostgresStore
from tests.actors import TESTER
from tests.unit.gateway.gateway_fixture import PATIENCE_S, GatewayFixture
from tests.unit.gateway.shared.valkey_server import ValkeyServer
from tests.unit.tenancy.storage.postgres_server import Server

LIMIT = 10


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ValkeyServer]:
    """A server of the test's own; a busy machine is no server that is away."""
    monkeypatch.setattr(valkey, "ANSWER_S", PATIENCE_S)
    monkeypatch.setattr(valkey, "BEAT_S", 0.0)
    server = ValkeyServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
async def gateways(
    card: ModelCard, tmp_path: Path, postgres_server: Server, server: ValkeyServer
) -> AsyncIterator[list[GatewayFixture]]:
    """Two gateways, each with an engine of its own; ada has a limit."""
    database = await asyncio.to_thread(postgres_server.database)
    store = await asyncio.to_thread(PostgresStore, postgres_server.address(database))
    found: list[GatewayFixture] = []
    for one in (store, await asyncio.to_thread(store.open_another)):
        gateway = await asyncio.to_thread(GatewayFixture, card, tmp_path, one)
        gateway.keys = found[0].keys if found else gateway.keys
        limits = {"requests_per_minute": LIMIT}
        await asyncio.to_thread(change_tenant, one, "ada", limits, by=TESTER)
        gateway.config = replace(gateway.config, fleet=FleetConfig(shared=server.url))
        await gateway.open()
        found.append(gateway)
    yield found
    for gateway in found:
        await gateway.close()
        await asyncio.to_thread(gateway.discard)


async def ask_all(gateways: list[GatewayFixture], count: int) -> Counter[int]:
    """Ask so many times at once, of the gateways in turn; return how often each status came."""
    asked = [gateways[n % 2].ask(body=gateways[0].chat(max_tokens=2)) for n in range(count)]
    return Counter(status for status, _, _ in await asyncio.gather(*asked))


async def test_a_limit_holds_over_both_gateways(gateways: list[GatewayFixture]) -> None:
    """As over one: a minute's requests are counted wherever they came, and both tell what is
    left."""
    statuses = await ask_all(gateways, 6 * LIMIT)
    _, refused, response = await gateways[1].ask(body=gateways[0].chat())

    assert LIMIT <= statuses[200] <= LIMIT + 2, "and what drains meanwhile"
    assert statuses[200] + statuses[429] == 6 * LIMIT
    assert refused["error"]["code"] == "rate_limit_exceeded"
    assert response.headers["x-ratelimit-limit-requests"] == str(LIMIT)
    assert float(response.headers["retry-after"]) > 0


async def test_calls_are_answered_while_the_shared_state_is_away(
    gateways: list[GatewayFixture], server: ValkeyServer
) -> None:
    """Each gateway has a half then; the gauge says so. Back again, the limit is one."""
    await poll(gateways)
    counted = [one.gateway.shared_limits.gateways for one in gateways if one.gateway.shared_limits]
    await asyncio.to_thread(server.kill)
    away = await ask_all(gateways, 4 * LIMIT)
    gauge = gateways[0].gateway.context.metrics.exposition()
    await asyncio.to_thread(server.start)
    await poll(gateways)
    back = await ask_all(gateways, 4 * LIMIT)

    assert counted == [2, 2]
    assert LIMIT - 2 <= away[200] <= LIMIT + 2
    assert b"trunkline_shared_degraded 1.0" in gauge
    assert b"trunkline_shared_degraded 0.0" in gateways[0].gateway.context.metrics.exposition()
    assert LIMIT // 2 <= back[200] <= LIMIT // 2 + 3, "state that was lost begins half used"
    assert away[200] + away[429] == back[200] + back[429] == 4 * LIMIT


async def poll(gateways: list[GatewayFixture]) -> None:
    """Let each gateway look whether the shared state is there."""
    for gateway in gateways:
        assert gateway.gateway.shared_limits is not None
        await gateway.gateway.shared_limits.poll()
