"""Floors that no pool can keep: refused where that is known, and told where it was not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.caching.floors import kept_of
from tenancy.accounts.tenants import change_tenant, floors_max, list_registered
from tests.unit.gateway.admin_client import Admin
from tests.unit.gateway.gateway_fixture import BLOCKS, PATIENCE_S, House

HALF = BLOCKS // 2
ADA, BOB = "/admin/v1/tenants/ada", "/admin/v1/tenants/bob"


@pytest.fixture
async def house(made: House) -> AsyncIterator[House]:
    """A model whose context is the whole pool: floors may take half of it."""
    made.context_tokens = BLOCKS * 16
    await made.open()
    yield made
    await made.close()


async def cut_at(house: House, asked_blocks: int) -> dict[str, Any]:
    """The line of the log which says that floors that ask for so much are cut."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for line in house.lines:
                if (line["event"], line.get("asked_blocks")) == ("floors_cut", asked_blocks):
                    return line
            await house.ask(body=house.chat(), who="bob")


async def test_a_floor_that_cannot_be_kept_is_refused_with_the_one_that_can(house: House) -> None:
    """An operator who is told what fits need not guess; nothing is changed by a refusal."""
    admin = Admin(house)

    first = await admin.ask("PATCH", ADA, {"floor_blocks": 100})
    status, answer = await admin.ask("PATCH", BOB, {"floor_blocks": 10**9})
    new = await admin.ask("POST", "/admin/v1/tenants", {"name": "eve", "floor_blocks": HALF - 99})
    fits = await admin.ask("PATCH", BOB, {"floor_blocks": HALF - 100})

    assert (first[0], first[1]["floor_blocks_kept"]) == (200, 100)
    assert (status, answer["error"]["code"]) == (400, "floor_too_large")
    assert answer["error"]["param"] == "floor_blocks"
    assert f"at most {HALF - 100} (it is 1000000000)" in answer["error"]["message"]
    assert f"{BLOCKS} blocks" in answer["error"]["message"]
    assert (new[0], new[1]["error"]["code"]) == (400, "floor_too_large")
    assert (fits[0], fits[1]["floor_blocks_kept"]) == (200, HALF - 100)


async def test_of_two_floors_in_the_same_instant_one_is_refused(house: House) -> None:
    """Each would fit alone. They are looked at where they are written."""
    admin = Admin(house)
    asked = [admin.ask("PATCH", one, {"floor_blocks": HALF - 9}) for one in (ADA, BOB)]
    answers = await asyncio.gather(*asked)
    floors = [one.policy.floor_blocks for one in list_registered(house.store)]

    assert sorted(status for status, _ in answers) == [200, 400]
    assert sorted(floors) == [0, HALF - 9]


async def test_floors_that_were_written_elsewhere_are_told_as_cut(house: House) -> None:
    """A file or the command line knows no pool: the log, the listing and the dashboard say it, and
    lowering one towards what fits is never refused."""
    admin = Admin(house)
    change_tenant(house.store, "ada", {"floor_blocks": 3 * BLOCKS})
    change_tenant(house.store, "bob", {"floor_blocks": BLOCKS})
    house.gateway.context.registry.look_again()

    first = await cut_at(house, 4 * BLOCKS)
    _, listed = await admin.ask("GET", "/admin/v1/tenants")
    _, overview = await admin.ask("GET", "/admin/v1/analytics")
    lowered = await admin.ask("PATCH", ADA, {"floor_blocks": 2 * BLOCKS})
    gone = await admin.ask("PATCH", ADA, {"floor_blocks": 0, "status": "suspended"})
    second = await cut_at(house, BLOCKS)
    async with asyncio.timeout(PATIENCE_S):
        while floors_max(house.store) is None:
            await house.ask(body=house.chat(), who="bob")

    assert first["floor_blocks_max"] == second["floor_blocks_max"] == HALF
    assert floors_max(house.store) == HALF
    kept = {one["name"]: one["floor_blocks_kept"] for one in listed["tenants"]}
    assert kept == {"ada": 3 * BLOCKS // 8, "bob": BLOCKS // 8}
    assert overview["engine"]["floor_blocks_asked"] == 4 * BLOCKS
    assert overview["engine"]["floor_blocks_max"] == HALF
    assert (lowered[0], gone[0], gone[1]["floor_blocks_kept"]) == (200, 200, 0)


async def test_no_floor_makes_anothers_request_impossible(made: House) -> None:
    """Where the pool holds two of the longest sequences there is always room for one."""
    made.context_tokens = BLOCKS * 16 // 2
    await made.open()
    try:
        change_tenant(made.store, "ada", {"floor_blocks": 10**9})
        made.gateway.context.registry.look_again()
        await made.ask(body=made.chat())

        longest = {"model": made.model, "prompt": [5] * (made.context_tokens - 1), "max_tokens": 1}
        status, _, _ = await made.ask("/v1/completions", longest, who="bob")

        assert status == 200
        await made.check_quiet()
    finally:
        await made.close()


def test_what_is_kept_is_cut_in_one_proportion() -> None:
    """Never more than there is, however many ask."""
    assert kept_of(10, asked=20, floors_max=20) == 10
    assert [kept_of(each, 40, 20) for each in (30, 10)] == [15, 5]
