"""Erasure: from the engine's namespaces to tenants, and removal of their blocks."""

from __future__ import annotations

import asyncio
import string
from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import Erased, LevelErased, Namespace, Retention
from engine.client.namespace_stats import NamespaceTable
from engine.errors import EngineUnavailable
from engine.statistics import NamespaceStats
from gateway.background.erasure import (
    ErasureTarget,
    list_holdings,
    receipt_body,
    target_of,
)
from gateway.caching.namespaces import namespace_of, parts_of
from gateway.engines.replicas import Replicas
from gateway.errors import Refusal
from tenancy.accounts.erasure_receipts import ErasedLevel, digest_namespaces, list_receipts
from tenancy.types import CachePolicy, Identity, Tenant
from tests.examples import examples
from tests.tables import each_row
from tests.unit.gateway.gateway_fixture import GatewayFixture
from tests.unit.gateway.levels.reported_levels import STATS, ReportedEngine

LONG = "Once upon a time there was a cache that forgot nothing, until it was told to. " * 2
WORDS = st.text(string.ascii_lowercase + string.digits + "._-", min_size=1, max_size=12)


def identity_of(tenant_id: int, workspace: str) -> Identity:
    return Identity(Tenant(tenant_id, "any", "active", 0), workspace, 1, 1, CachePolicy())


@given(tenant_id=st.integers(1, 2**40), workspace=WORDS, partition=st.text(max_size=20))
@settings(max_examples=examples(100), deadline=None)
def test_namespace_encodes_tenant_and_workspace(
    tenant_id: int, workspace: str, partition: str
) -> None:
    """For any partition that a client sends: none decodes as another tenant."""
    namespace = namespace_of(identity_of(tenant_id, workspace), "model", "template", partition)

    assert parts_of(namespace)[:2] == (str(tenant_id), workspace)
    assert ErasureTarget(tenant_id, 1, workspace).covers(namespace)
    assert ErasureTarget(tenant_id, 1).covers(namespace)
    assert not ErasureTarget(tenant_id + 1, 1).covers(namespace)
    assert not ErasureTarget(tenant_id, 1, workspace + "x").covers(namespace)


@each_row("namespace", [b"", b"x", b"\0\0\0\x05ada", b"\0\0\0\x011", bytes(20)])
def test_unknown_namespaces_have_no_owner(namespace: bytes) -> None:
    """An engine may serve other gateways too."""
    assert list_holdings([NamespaceStats(namespace, 1, 0, 0, 0)]) == []
    assert not ErasureTarget(1, 1).covers(namespace)


async def test_erased_prefix_is_computed_again(gateway: GatewayFixture) -> None:
    """A neighbour with the same text still finds its own."""
    for who in ("ada", "bob", "ada"):
        await gateway.ask(body=gateway.chat(LONG), who=who)
    receipt = await gateway.gateway.erasure.erase(ErasureTarget(1, 7))
    for who in ("ada", "bob"):
        await gateway.ask(body=gateway.chat(LONG), who=who)
    cached = [row[2] for row in gateway.entries()]

    assert receipt.blocks > 0
    assert cached[2] > 0
    assert cached[3] == 0
    assert cached[4] == cached[2]
    await gateway.check_quiet()


async def test_erasure_leaves_a_receipt(gateway: GatewayFixture) -> None:
    """It has the key, the time, the counts and a digest of the namespaces, and no names."""
    await gateway.ask(body=gateway.chat(LONG))
    stats = await gateway.quiet()
    names = [one.namespace for one in gateway.engine.namespaces]
    receipt = await gateway.gateway.erasure.erase(ErasureTarget(1, 7, "default"))

    assert (receipt.tenant_id, receipt.key_id, receipt.what) == (1, 7, "workspace default")
    assert (receipt.namespaces, receipt.namespace_digest) == (1, digest_namespaces(names))
    assert receipt.blocks == stats.cached_blocks
    assert list_receipts(gateway.store, 1) == [receipt]
    assert [line["receipt"] for line in gateway.lines if line["event"] == "cache_erased"] == [
        receipt.receipt_id
    ]


class LevelledEngine(ReportedEngine):
    """An engine that erases copies on two levels too; the disk's answer has a code."""

    code = ""
    shredded: Collection[Namespace] = ()

    async def erase(
        self,
        namespace: Namespace,
        *,
        lease_id: str | None = None,
        tokens: tuple[int, ...] | None = None,
    ) -> Erased:
        """Erase on the device, and tell of two blocks in host memory and three on disk."""
        erased: Erased = await self.engine.erase(namespace, lease_id=lease_id, tokens=tokens)
        lost = (0, 0) if self.code else (3, 12)
        is_shredded = namespace in self.shredded
        disk = LevelErased("disk", *lost, self.code, is_shredded=is_shredded)
        return Erased(erased.call_id, erased.blocks, (LevelErased("host", 2, 8), disk))


def with_levels(gateway: GatewayFixture) -> LevelledEngine:
    context = gateway.gateway.context
    engine = LevelledEngine(gateway.engine, STATS)
    context.models.default.replicas = Replicas.of(engine)
    return engine


async def test_receipt_tells_what_each_level_lost(gateway: GatewayFixture) -> None:
    """Copies of several namespaces are summed; nothing of it can be found by a later start."""
    with_levels(gateway)
    for salt in ("a", "b"):
        await gateway.ask(body=gateway.chat(LONG, cache_salt=salt))
    receipt = await gateway.gateway.erasure.erase(ErasureTarget(1, 7))

    assert receipt.namespaces == 2
    assert receipt.levels == {
        "device": ErasedLevel(receipt.blocks, receipt.blocks),
        "host": ErasedLevel(4, 16),
        "disk": ErasedLevel(6, 24),
    }
    assert list_receipts(gateway.store, 1) == [receipt]
    assert receipt_body(receipt)["levels"] == receipt.levels


async def test_receipt_says_shredded_where_every_key_is_destroyed(gateway: GatewayFixture) -> None:
    """One namespace that was only wiped makes it `gone`: a backup may have it."""
    engine, context = with_levels(gateway), gateway.gateway.context
    for salt in ("a", "b"):
        await gateway.ask(body=gateway.chat(LONG, cache_salt=salt))
    await context.models.refresh_all()
    names = {one.namespace for one in context.models.namespaces()}
    engine.shredded = names
    all_of_it = await gateway.gateway.erasure.erase(ErasureTarget(1, 7))
    for salt in ("a", "b"):
        await gateway.ask(body=gateway.chat(LONG, cache_salt=salt))
    engine.shredded = {min(names)}
    some_of_it = await gateway.gateway.erasure.erase(ErasureTarget(1, 7))

    assert (all_of_it.levels or {})["disk"] == ErasedLevel(6, 24, "shredded")
    assert (some_of_it.levels or {})["disk"] == ErasedLevel(6, 24, "gone")


async def test_what_a_level_cannot_confirm_is_tried_again(gateway: GatewayFixture) -> None:
    """The receipt says `pending` until the disk is back and has answered."""
    engine = with_levels(gateway)
    engine.code = "closed"
    await gateway.ask(body=gateway.chat(LONG))
    await gateway.gateway.erasure.erase(ErasureTarget(1, 7, "default"))
    await gateway.ask(body=gateway.chat(LONG))
    await gateway.gateway.erasure.retry_pending()
    (pending,) = list_receipts(gateway.store, 1)
    engine.code = ""
    await gateway.ask(body=gateway.chat(LONG))
    await gateway.gateway.erasure.retry_pending()
    await gateway.gateway.erasure.retry_pending()
    (gone,) = list_receipts(gateway.store, 1)

    assert (pending.levels or {})["disk"].state == "pending"
    assert (gone.levels or {})["disk"] == ErasedLevel(3, 12)
    logged = gateway.lines
    assert [line["pending"] for line in logged if "pending" in line] == [["disk"]]
    assert sum(line["event"] == "erasure_confirmed" for line in logged) == 1


async def test_a_disk_that_is_away_is_pending_until_it_is_back(gateway: GatewayFixture) -> None:
    """What it has is not known while it is away, so no receipt may say that it is gone."""
    engine, context = with_levels(gateway), gateway.gateway.context
    engine.set_level("disk", state="off", reason="it does not answer")
    first = await gateway.gateway.erasure.erase(ErasureTarget(1, 7))
    counted = [context.metrics.levels.pending_receipts]
    await gateway.gateway.erasure.retry_pending()
    counted.append(context.metrics.levels.pending_receipts)
    (before,) = list_receipts(gateway.store, 1)
    engine.set_level("disk", state="open", reason="")
    await gateway.gateway.erasure.retry_pending()
    counted.append(context.metrics.levels.pending_receipts)
    (after,) = list_receipts(gateway.store, 1)

    assert counted == [1, 1, 0]

    assert (
        first.levels
        == before.levels
        == {
            "device": ErasedLevel(0, 0),
            "disk": ErasedLevel(0, 0, "pending"),
        }
    )
    assert (after.levels or {})["disk"].state == "gone"


async def test_what_only_a_disk_has_is_erased_too(gateway: GatewayFixture) -> None:
    """After a restart the device is empty, and the disk's namespaces are known by the heartbeat."""
    engine = with_levels(gateway)
    space = namespace_of(identity_of(1, "default"), "m", "t", "")
    engine.namespaces = NamespaceTable()
    engine.namespaces.add([NamespaceStats(space, 0, 0, 0, 0, is_stored=True)])
    receipt = await gateway.gateway.erasure.erase(ErasureTarget(1, 7))

    assert receipt.namespaces == 1
    assert (receipt.levels or {})["disk"] == ErasedLevel(3, 12)


@pytest.mark.parametrize(
    "target",
    [
        ErasureTarget(1, 7),
        ErasureTarget(1, 7, "lab"),
        ErasureTarget(1, 7, None, "a lease all workspace x"),
        ErasureTarget(1, 7, "scope:3"),
    ],
)
async def test_receipt_names_its_target(gateway: GatewayFixture, target: ErasureTarget) -> None:
    """A retry must never erase more than what was named."""
    engine = with_levels(gateway)
    engine.code = "closed"
    await gateway.ask(body=gateway.chat(LONG))
    receipt = await gateway.gateway.erasure.erase(target)

    assert target_of(receipt.what, receipt.tenant_id, receipt.key_id) == target


async def test_erasure_of_an_empty_cache_succeeds(gateway: GatewayFixture) -> None:
    receipt = await gateway.gateway.erasure.erase(ErasureTarget(2, 7))

    assert (receipt.blocks, receipt.namespaces) == (0, 0)


async def test_erasure_frees_a_running_requests_blocks_at_its_end(
    gateway: GatewayFixture,
) -> None:
    """Meanwhile no other request finds them."""
    await gateway.ask(body=gateway.chat(LONG))
    gateway.runner.hold_after(2)
    running = asyncio.create_task(gateway.ask(body=gateway.chat(LONG)))
    await gateway.until(lambda: bool(gateway.gateway.context.running))
    erasing = asyncio.create_task(gateway.gateway.erasure.erase(ErasureTarget(1, 7)))
    gateway.runner.release()
    status, _, _ = await running
    await erasing
    await gateway.gateway.erasure.erase(ErasureTarget(1, 7))

    stats = await gateway.quiet()
    assert status == 200
    assert stats.free_blocks == stats.blocks


async def test_erasure_completes_after_a_disconnect(gateway: GatewayFixture) -> None:
    """A broken connection must not leave a half-erased cache without a receipt."""
    await gateway.ask(body=gateway.chat(LONG))
    asking = asyncio.create_task(gateway.gateway.erasure.erase(ErasureTarget(1, 7)))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await gateway.gateway.context.work.finish()

    assert len(list_receipts(gateway.store, 1)) == 1
    assert (await gateway.quiet()).cached_blocks == 0


async def test_erasure_ends_cached_contents(gateway: GatewayFixture) -> None:
    content = {"role": "user", "parts": [{"text": LONG * 3}]}
    body = {"model": f"models/{gateway.model}", "contents": [content], "ttl": "600s"}
    headers = {"x-goog-api-key": gateway.keys["ada"]}
    path = "/v1beta/cachedContents"
    made, created, _ = await gateway.ask(path, body, who=None, headers=headers)
    await gateway.gateway.erasure.erase(ErasureTarget(1, 7, "default"))
    _, listed, _ = await gateway.ask(path, method="GET", who=None, headers=headers)

    assert made == 200, created
    assert listed == {}
    assert gateway.store.query(
        "select count(*) from cached_contents where content is not null"
    ) == [(0,)]


async def test_engine_outage_leaves_no_receipt(gateway: GatewayFixture) -> None:
    await gateway.engine.close()

    with pytest.raises(EngineUnavailable):
        await gateway.gateway.erasure.erase(ErasureTarget(1, 7))
    assert list_receipts(gateway.store, 1) == []


@pytest.mark.parametrize("lease_id", ["", "x", "00" * 16, "' or 1=1", "é"])
async def test_refuses_an_unknown_lease(gateway: GatewayFixture, lease_id: str) -> None:
    """C11: a guessed id leaves no receipt."""
    await gateway.ask(body=gateway.chat(LONG))

    with pytest.raises(Refusal) as caught:
        await gateway.gateway.erasure.erase(ErasureTarget(1, 7, None, lease_id))
    assert caught.value.code == "lease_unknown"
    assert list_receipts(gateway.store, 1) == []
    assert (await gateway.quiet()).cached_blocks > 0


async def test_request_without_breakpoint_has_no_promise(gateway: GatewayFixture) -> None:
    """A plain request is best effort: it may be cached, but without a promise."""
    await gateway.ask(body=gateway.chat(LONG))

    assert all(not entry.is_promised(0.0) for entry in gateway.gateway.erasure.live_entries(1))


async def test_erasing_an_unknown_lease_keeps_running_writes(gateway: GatewayFixture) -> None:
    """A tenant that pays for a write keeps it, also if its cache is erased meanwhile."""
    await gateway.ask(body=gateway.chat())
    await gateway.engine.get_stats()
    (space,) = gateway.engine.namespaces
    gateway.runner.hold_after(3)
    running = asyncio.create_task(gateway.ask(body=gateway.chat("hold", max_tokens=64)))
    await gateway.until(lambda: gateway.runner.is_held)
    erasing = asyncio.create_task(gateway.engine.erase(space.namespace, lease_id="ab" * 16))
    await asyncio.wait([erasing], timeout=0)
    gateway.runner.release()
    await asyncio.wait([running, erasing])
    before = (await gateway.quiet()).cached_blocks
    await gateway.ask(body=gateway.chat("hold", max_tokens=64))

    assert erasing.result().blocks == 0
    assert (await gateway.quiet()).cached_blocks == before, "the answer had not been kept"


async def test_lists_the_latest_leases(gateway: GatewayFixture) -> None:
    """A tenant may have twenty thousand; the search stops at the limit."""
    context, terms = gateway.gateway.context, Retention("1h", 3_600, 3_600)
    for number in range(6):
        space = namespace_of(identity_of(1, "ab"[number % 2]), "m", "t", str(number))
        key = (space, number.to_bytes(16, "big"))
        context.contracts.entries.write(key, 8, 1, "1", {}, terms, 1e12, is_granted=True)

    def shown(workspace: str | None, most: int | None) -> list[int]:
        return [one.key[1][-1] for one in gateway.gateway.erasure.live_entries(1, workspace, most)]

    assert shown(None, None) == [0, 1, 2, 3, 4, 5]
    assert shown("a", 2) == [2, 4]
    assert shown("b", 9) == [1, 3, 5]
