"""Floors that exceed the pool are refused where the pool is known, and reported elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.caching.floors import guaranteed_blocks
from tenancy.accounts.tenants import change_tenant, list_tenant_records, read_floor_blocks_max
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import BLOCKS, PATIENCE_S, GatewayFixture

pytestmark = pytest.mark.usefixtures("room_for_all")

HALF = BLOCKS // 2
ADA, BOB = "/admin/v1/tenants/ada", "/admin/v1/tenants/bob"


async def cut_at(gateway: GatewayFixture, asked_blocks: int) -> dict[str, Any]:
    """Return the log line that reports floors above the limit."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for line in gateway.lines:
                if (line["event"], line.get("asked_blocks")) == ("floors_cut", asked_blocks):
                    return line
            await gateway.ask(body=gateway.chat(), who="bob")


async def test_refuses_floor_that_does_not_fit(
    gateway: GatewayFixture,
) -> None:
    """With the largest floor that fits; a refusal changes nothing."""
    admin = AdminClient(gateway)

    first = await admin.ask("PATCH", ADA, {"floor_blocks": 100})
    status, answer = await admin.ask("PATCH", BOB, {"floor_blocks": 10**9})
    new = await admin.ask("POST", "/admin/v1/tenants", {"name": "eve", "floor_blocks": HALF - 99})
    fits = await admin.ask("PATCH", BOB, {"floor_blocks": HALF - 100})

    assert (first[0], first[1]["floor_blocks_kept"]) == (200, 100)
    assert (status, answer["error"]["code"]) == (400, "floor_too_large")
    assert answer["error"]["param"] == "floor_blocks"
    assert f"1000000000; expected at most {HALF - 100}." in answer["error"]["message"]
    assert f"{BLOCKS} blocks" in answer["error"]["message"]
    assert (new[0], new[1]["error"]["code"]) == (400, "floor_too_large")
    assert (fits[0], fits[1]["floor_blocks_kept"]) == (200, HALF - 100)


async def test_one_of_two_concurrent_floors_is_refused(gateway: GatewayFixture) -> None:
    """Each would fit alone: the check runs at the write."""
    admin = AdminClient(gateway)
    asked = [admin.ask("PATCH", one, {"floor_blocks": HALF - 9}) for one in (ADA, BOB)]
    answers = await asyncio.gather(*asked)
    floors = [one.policy.floor_blocks for one in list_tenant_records(gateway.store)]

    assert sorted(status for status, _ in answers) == [200, 400]
    assert sorted(floors) == [0, HALF - 9]


async def test_reports_floors_written_elsewhere(gateway: GatewayFixture) -> None:
    """A file or the command line knows no pool: the log, the listing and the dashboard report it. A
    floor that is lowered is never refused."""
    admin = AdminClient(gateway)
    change_tenant(gateway.store, "ada", {"floor_blocks": 3 * BLOCKS})
    change_tenant(gateway.store, "bob", {"floor_blocks": BLOCKS})
    gateway.gateway.context.authenticator.refresh_now()

    first = await cut_at(gateway, 4 * BLOCKS)
    _, listed = await admin.ask("GET", "/admin/v1/tenants")
    _, overview = await admin.ask("GET", "/admin/v1/analytics")
    lowered = await admin.ask("PATCH", ADA, {"floor_blocks": 2 * BLOCKS})
    gone = await admin.ask("PATCH", ADA, {"floor_blocks": 0, "status": "suspended"})
    second = await cut_at(gateway, BLOCKS)
    async with asyncio.timeout(PATIENCE_S):
        while read_floor_blocks_max(gateway.store) is None:
            await gateway.ask(body=gateway.chat(), who="bob")

    assert first["floor_blocks_max"] == second["floor_blocks_max"] == HALF
    assert read_floor_blocks_max(gateway.store) == HALF
    kept = {one["name"]: one["floor_blocks_kept"] for one in listed["tenants"]}
    assert kept == {"ada": 3 * BLOCKS // 8, "bob": BLOCKS // 8}
    assert overview["engine"]["floor_blocks_asked"] == 4 * BLOCKS
    assert overview["engine"]["floor_blocks_max"] == HALF
    assert (lowered[0], gone[0], gone[1]["floor_blocks_kept"]) == (200, 200, 0)


async def test_floors_leave_room_for_one_longest_sequence(unopened_gateway: GatewayFixture) -> None:
    """If the pool holds two of the longest sequences."""
    unopened_gateway.context_tokens = BLOCKS * 16 // 2
    await unopened_gateway.open()
    try:
        change_tenant(unopened_gateway.store, "ada", {"floor_blocks": 10**9})
        unopened_gateway.gateway.context.authenticator.refresh_now()
        await unopened_gateway.ask(body=unopened_gateway.chat())

        longest = {
            "model": unopened_gateway.model,
            "prompt": [5] * (unopened_gateway.context_tokens - 1),
            "max_tokens": 1,
        }
        status, _, _ = await unopened_gateway.ask("/v1/completions", longest, who="bob")

        assert status == 200
        await unopened_gateway.check_quiet()
    finally:
        await unopened_gateway.close()


def test_scales_floors_down_proportionally() -> None:
    """Never more in total than the limit."""
    assert guaranteed_blocks(10, asked=20, floors_max=20) == 10
    assert [guaranteed_blocks(each, 40, 20) for each in (30, 10)] == [15, 5]
