"""The dashboard's page Fleet in a real browser: engines elsewhere, tenants over them, choices."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from engine.api import CacheGrant, Request, Started
from engine.statistics import LoadReport, NamespaceStats
from engine.strides import PrefixChanges, stride_digests
from gateway.caching.namespaces import namespace_of
from gateway.engines.replicas import Replicas
from tenancy.accounts.tenants import create_tenant
from tenancy.types import CachePolicy, Identity, Tenant, wall_ms
from tests.e2e.browser import IN_BROWSER, Page, signed_in
from tests.fakes import FakeClock
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.engines.test_replica_choice import INFO, RecordedEngine
from tests.unit.gateway.gateway_fixture import GatewayFixture

pytestmark = [*IN_BROWSER, pytest.mark.slow]

PROMPT = 2_080
REPLICAS, TENANTS = 64, 150


def space_of(tenant_id: int) -> bytes:
    """Return the namespace of a tenant's only workspace."""
    identity = Identity(Tenant(tenant_id, "any", "active", 0), "default", 1, 1, CachePolicy())
    return namespace_of(identity, INFO.model_digest, "template", "")


class ToldEngine(RecordedEngine):
    """An engine that tells what a test says that it has."""

    def keep(self, tenant_id: int, blocks: int, promised: int = 0) -> None:
        """Tell a tenant's blocks."""
        classes = {"1h": promised} if promised else {}
        stats = NamespaceStats(space_of(tenant_id), blocks, 0, 0, 0, promised_by_class=classes)
        self.namespaces.add([stats])

    def report(self, waiting_tokens: int) -> None:
        """Tell a queue."""
        load = LoadReport(
            accepted=len(self.sent),
            waiting_tokens=waiting_tokens,
            rows=waiting_tokens // 100,
            free_blocks=4_096,
            prefill_tokens_per_s=10_000.0,
            row_s=0.000_1,
        )
        self.receive([load])


def fleet_of(gateway: GatewayFixture, names: list[str]) -> tuple[Replicas, list[ToldEngine]]:
    """Give the model engines elsewhere that are idle and have nothing."""
    clock = FakeClock()
    replicas = Replicas(clock=clock)
    engines = [ToldEngine(name) for name in names]
    for name, engine in zip(names, engines, strict=True):
        replicas.add(name, engine)
        engine.receive([PrefixChanges(is_first=True)])
        engine.report(0)
    clock.advance(1.5)
    gateway.gateway.context.models.default.replicas = replicas
    return replicas, engines


def send(replicas: Replicas, engines: list[ToldEngine], tenant_id: int, turn: int) -> ToldEngine:
    """Send a tenant's prompt, have it start and be written; return the engine that got it."""
    sent = [len(engine.sent) for engine in engines]
    tokens = (*([tenant_id % 64] * (PROMPT - 32)), *([turn] * 32))
    name = f"{tenant_id}-{turn}"
    grant = CacheGrant(space_of(tenant_id))
    replicas.submit(Request(name, tokens, max_tokens=200, grant=grant))
    (engine,) = [one for one, n in zip(engines, sent, strict=True) if len(one.sent) > n]
    engine.receive([Started(name, PROMPT, PROMPT - 32 if turn else 0)])
    if not turn:
        written = b"".join(stride_digests(grant.namespace, tokens))
        engine.receive([PrefixChanges(device_added=written)])
    engine.report(0)
    return engine


@pytest.fixture
async def page(gateway: GatewayFixture, browser: Any) -> AsyncIterator[Page]:
    """An administrator that has signed in, at a screen of usual size after the test."""
    admin, model = AdminClient(gateway), gateway.gateway.context.models.default
    own = model.replicas
    yield await signed_in(browser, gateway.admin_url, admin.key, "Overview")
    model.replicas = own
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


async def test_one_engine_is_told_in_a_line(page: Page) -> None:
    """No empty tables: there is nothing to choose."""
    text = await asyncio.to_thread(page.open, "fleet", "every request goes to it")

    assert "Last choices" not in text
    assert await asyncio.to_thread(page.faults) == []


async def test_fleet_shows_replicas_tenants_and_why(page: Page, gateway: GatewayFixture) -> None:
    """Each number is that of what the engines told and of what the requests found."""
    replicas, engines = fleet_of(gateway, ["e0", "e1"])
    home = send(replicas, engines, 1, 0)
    (other,) = [one for one in engines if one is not home]
    assert [send(replicas, engines, 1, turn) for turn in (1, 2)] == [home, home]
    home.report(500)
    home.keep(1, blocks=130, promised=64)
    other.keep(2, blocks=4)
    lost = replicas.add("e2")
    lost.state, lost.reason = "lost", "silent for 2.2 s"
    text = await asyncio.to_thread(page.open, "fleet", "Last choices")

    name = "e0" if home is engines[0] else "e1"
    size = INFO.block_size
    seen = " ".join(text.split())
    assert "2 / 3 ready" in seen
    assert "The engine e2 is lost: silent for 2.2 s" in seen
    found = 2 * (PROMPT - 32) / (3 * PROMPT)
    told = f"{3 * PROMPT:,} {100 * found:.1f} %"
    promised = f"{64 * size:,}"
    assert f"{name} ready 50 ms 5 {told} 2,048 {promised} " in seen
    assert f"ada {130 * size:,} {promised} {told} 1 {name} 100 %" in seen
    assert f"bob {4 * size:,} 0 0 – 1 " in seen
    newest = seen[seen.index(" 1-2 ") :]
    assert re.match(
        rf" 1-2 {name} [\d.]+ ms 0.0 ms [\d.]+ ms [\d.]+ ms 2,048 e\d would take \d+ ms longer:"
        r" \d+ ms for computing the prompt",
        newest,
    )
    assert await asyncio.to_thread(page.faults) == []

    chosen = await asyncio.to_thread(page.open, "fleet?tenant=ada", "share")
    own = " ".join(chosen[chosen.index("Tenants by replica") :].split())
    assert f"{name} {130 * size:,} 100.0 % {promised} {told}" in own


@pytest.mark.parametrize("width", [1280, 390])
async def test_a_large_fleet_breaks_no_layout(
    page: Page, gateway: GatewayFixture, width: int
) -> None:
    """64 replicas and 150 tenants: rows are bounded, and nothing is wider than its place."""
    store = gateway.store
    for number in range(TENANTS - 2):
        name = f"agency-of-harbour-travel-{number}"
        await asyncio.to_thread(partial(create_tenant, store, wall_ms, name))
    gateway.gateway.context.authenticator.refresh_now()
    names = [f"engine-west-{number}" for number in range(REPLICAS)]
    replicas, engines = fleet_of(gateway, names)
    for number, engine in enumerate(engines):
        for tenant_id in range(1, TENANTS + 1):
            if tenant_id % 7 == number % 7 or tenant_id <= 3:
                engine.keep(tenant_id, 10 + (tenant_id * 37 + number * 11) % 900, number % 5)
        engine.report(number * 40)
    for turn in range(3):
        for tenant_id in range(1, TENANTS + 1):
            send(replicas, engines, tenant_id, turn)
    for number in range(6):
        away = replicas.add(f"engine-east-{number}")
        away.state, away.reason = "wrong", "The certificate names 'engine/e7'; expected another."
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    text = await asyncio.to_thread(page.open, "fleet", "Last choices")

    assert "Show all 70 rows" in text
    assert f"Show all {TENANTS} rows" in text
    assert "2 further engines take no request" in text
    if width >= 1280:
        assert await asyncio.to_thread(page.sideways) == []
    assert await asyncio.to_thread(page.faults) == []
