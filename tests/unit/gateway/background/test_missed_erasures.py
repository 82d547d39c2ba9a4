"""Erasures that an engine elsewhere has missed: no request reads what was erased meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from engine.client.client import EngineConnection
from gateway.background import missed_erasures
from gateway.background.erasure import CacheErasure, ErasureTarget
from gateway.background.missed_erasures import MissedErasures
from gateway.engines.replica import Replica
from gateway.engines.replicas import Replicas
from tenancy.accounts.erasure_receipts import ErasureReceipt, list_receipts, write_receipt
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture
from tests.unit.gateway.levels.reported_levels import STATS, ReportedEngine

LONG = "Once upon a time there was a cache that forgot nothing, until it was told to. " * 2
MINE = ErasureTarget(1, 7)


class World:
    """A gateway whose only engine is elsewhere, and comes and goes with what it has."""

    def __init__(self, gateway: GatewayFixture) -> None:
        self.gateway, self.engine = gateway, gateway.engine
        self.replicas = Replicas()
        self.replica = self.replicas.add("e1", gateway.engine)
        gateway.gateway.context.models.default.replicas = self.replicas

    async def ask(self, who: str = "ada") -> int:
        """Ask for a long prompt; return its cached tokens."""
        status, answer, _ = await self.gateway.ask(body=self.gateway.chat(LONG), who=who)
        assert status == 200, answer
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    def leave(self) -> None:
        """Lose the engine, which keeps what it has."""
        self.replica.release(self.engine, "silent for 2.2 s")

    async def come_back(self) -> None:
        """Connect to the engine again, and wait until it takes requests."""
        self.replica.hold(self.engine)
        await self.is_ready()

    async def is_ready(self) -> None:
        await self.gateway.until(self.replica.ready)

    async def erase(self, target: ErasureTarget = MINE) -> ErasureReceipt:
        return await self.gateway.gateway.erasure.erase(target)

    def receipt(self) -> ErasureReceipt:
        """Return the newest receipt."""
        return list_receipts(self.gateway.store, 1)[0]


@pytest.fixture
async def world(gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch) -> World:
    """The only engine has ada's and bob's prefix, and is there."""
    monkeypatch.setattr(missed_erasures, "RETRY_S", 0.0)
    found = World(gateway)
    await gateway.gateway.missed.open()
    for who in ("ada", "bob"):
        await found.ask(who)
        assert await found.ask(who) > 0
    return found


async def test_an_erasure_names_the_engine_that_is_away(world: World) -> None:
    """It succeeds; the receipt, and the list of them, say what is pending until it is done."""
    world.leave()
    receipt = await world.erase()
    admin = AdminClient(world.gateway)
    _, before = await admin.ask("GET", "/admin/v1/erasures?tenant=ada")
    metric = world.gateway.gateway.context.metrics.levels.pending_receipts
    await world.come_back()
    _, after = await admin.ask("GET", "/admin/v1/erasures?tenant=ada")

    assert (receipt.pending_at, receipt.completed_ms, receipt.blocks) == (("e1",), None, 0)
    assert (before["erasures"][0]["pending_at"], metric) == (["e1"], 1)
    assert before["erasures"][0]["completed_at"] is None
    done = after["erasures"][0]
    assert done["pending_at"] == []
    assert done["completed_at"] >= done["at"]
    assert done["blocks"] == done["levels"]["device"]["blocks"] > 0
    assert world.gateway.gateway.context.metrics.levels.pending_receipts == 0


async def test_an_engine_that_never_comes_back_is_forgotten(world: World) -> None:
    """No receipt waits for it; one that is there is not forgotten, and it comes back with
    nothing that was erased."""
    admin, path = AdminClient(world.gateway), "/admin/v1/fleet/engines/e1"
    refused = await admin.ask("DELETE", path)
    world.leave()
    await world.erase()
    told = await admin.ask("DELETE", path)
    receipt, metrics = world.receipt(), world.gateway.gateway.context.metrics
    await world.come_back()

    assert (refused[0], refused[1]["error"]["code"]) == (409, "engine_connected")
    assert told == (200, {"engine": "e1", "receipts": 1})
    assert (receipt.pending_at, receipt.forgotten_at) == ((), ("e1",))
    assert receipt.completed_ms is not None
    assert metrics.levels.pending_receipts == 0
    assert await world.ask() == 0


async def test_an_engine_that_comes_back_serves_nothing_that_was_erased(world: World) -> None:
    """It takes no request before; a neighbour's prefix is there still."""
    world.leave()
    await world.erase()
    world.replica.hold(world.engine)
    held_back = world.replica.ready(), world.replica.state, world.replica.reason
    await world.is_ready()

    assert held_back == (False, "connecting", missed_erasures.REASON)
    assert (world.replica.state, world.replica.reason) == ("ready", "")
    assert await world.ask() == 0
    assert await world.ask("bob") > 0


async def test_a_pending_erasure_outlives_the_gateway(world: World) -> None:
    """A gateway that starts on the same database holds back an engine that is there already."""
    world.leave()
    await world.erase()
    context = world.gateway.gateway.context
    world.replicas.gate = None  # of the gateway that was killed
    world.replica.hold(world.engine)
    assert world.replica.ready()
    later = MissedErasures(
        *(context.models, context.store, CacheErasure(context), context.metrics.levels),
        *(context.clock, context.wall, context.log),
    )
    await later.open()

    assert world.replica.ready()
    assert await world.ask() == 0
    assert world.receipt().pending_at == ()
    await later.close()


async def test_an_engine_outside_of_the_directory_catches_up(world: World) -> None:
    """An engine that is replaced, or that a DNS name does not tell for a while, is in no receipt:
    it carries out what was erased since it was last there."""
    world.leave()
    world.replicas.remove(world.replica)
    receipt = await world.erase()
    world.replica = world.replicas.add("e1")
    await world.come_back()

    assert receipt.pending_at == ()
    assert receipt.completed_ms == receipt.at_ms
    assert await world.ask() == 0


async def test_what_an_engine_has_carried_out_is_not_done_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefixes that were written after the erasure stay, however often the connection is lost."""
    monkeypatch.setattr("tenancy.accounts.erasure_receipts.OVERLAP_MS", 0)
    await world.erase()
    await world.gateway.next_millisecond()
    await world.gateway.gateway.missed.look()
    await world.ask()
    world.leave()
    await world.come_back()

    assert await world.ask() > 0


async def test_an_engine_that_returns_during_an_erasure_misses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was away when it was asked, and no receipt is written yet that would name it."""
    seen: list[int] = []

    async def flush(*, is_last: bool = False) -> None:
        if not is_last:
            await world.come_back()
            seen.append(await world.ask())

    world.leave()
    monkeypatch.setattr(world.gateway.gateway.context.promise_store, "flush", flush)
    receipt = await world.erase()
    await world.is_ready()

    assert seen == [0]
    assert receipt.pending_at == ("e1",)
    assert world.receipt().completed_ms is not None


async def test_a_workspace_or_lease_goes_alone(world: World) -> None:
    """A missed erasure takes no more than it named."""
    world.leave()
    await world.erase(ErasureTarget(1, 7, "lab"))
    await world.erase(ErasureTarget(1, 7, None, "ab" * 16))
    await world.come_back()

    assert await world.ask() > 0
    assert [one.pending_at for one in list_receipts(world.gateway.store, 1)] == [(), ()]


async def test_many_missed_erasures_take_all_of_a_tenant(world: World) -> None:
    """Receipts beyond the newest are dropped, so what they named is not known any more."""
    for number in range(missed_erasures.SINGLE_MAX + 1):
        what = f"workspace w{number}"
        found = ErasureReceipt(f"r{number}", 1, 7, 5, what, 0, "", 0, completed_ms=5)
        write_receipt(world.gateway.store, found)
    world.leave()
    await world.come_back()
    assert await world.ask() > 0, "they are older than what it has carried out"

    world.replica.name = "e9"  # which is seen for the first time
    world.leave()
    await world.come_back()
    assert await world.ask() == 0
    assert await world.ask("bob") > 0


async def test_an_engine_waits_for_its_disk(world: World) -> None:
    """While it is away nobody knows what it has, and it may be back in the middle of a request."""
    world.leave()
    await world.erase()
    reported: Any = ReportedEngine(world.engine, STATS)
    reported.set_level("disk", state="off", reason="it does not answer")
    reported.get_stats = told(reported)
    returned(world.replica, reported)
    await world.gateway.until(lambda: world.replica.reason == missed_erasures.DISK_AWAY)
    waited = world.replica.ready()
    reported.set_level("disk", state="open", reason="")
    await world.is_ready()

    assert not waited
    assert world.receipt().completed_ms is not None


def told(reported: Any) -> Any:
    async def get_stats() -> Any:
        await reported.engine.get_stats()
        return reported.stats

    return get_stats


def returned(replica: Replica, engine: EngineConnection) -> None:
    """Have an engine return that is not the one that left."""
    replica.engine, replica.state = engine, "ready"
    assert replica.returned is not None
    replica.returned(replica)


async def test_another_gateways_pending_erasure_is_carried_out(world: World) -> None:
    """An engine that only the other gateway cannot reach never left this one."""
    receipt = ErasureReceipt("r", 1, 7, 5, "all", 1, "digest", 0, pending_at=("e1",))
    write_receipt(world.gateway.store, receipt)
    await world.gateway.gateway.missed.look()
    await world.is_ready()

    assert await world.ask() == 0
    assert world.receipt().pending_at == ()


async def test_an_engine_of_this_machine_that_is_away_refuses(gateway: GatewayFixture) -> None:
    """It has no name that a receipt could have, and is back in a moment."""
    replicas = Replicas()
    replicas.add("", None)
    gateway.gateway.context.models.default.replicas = replicas
    status, body, _ = await gateway.ask("/v1/cache", method="DELETE")

    assert status == 503, body
