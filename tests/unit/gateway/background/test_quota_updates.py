"""What operators change of a tenant's blocks reaches the engine, whether it sends more or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tenancy.accounts.tenants import change_tenant
from tests.unit.gateway.admin_client import Admin
from tests.unit.gateway.gateway_fixture import BLOCKS, PATIENCE_S, House

LONG_PROMPT = BLOCKS // 2 * 16
"""Tokens that do not fit, with one of the answer, beside floors that are as wide as can be."""


async def floor_beyond_the_pool(house: House) -> None:
    """As a file or the command line may set it, which know no pool."""
    change_tenant(house.store, "ada", {"floor_blocks": 10**12})
    house.gateway.context.registry.look_again()
    await house.ask(body=house.chat())


@pytest.fixture
async def house(made: House) -> AsyncIterator[House]:
    """A model whose context is the whole pool."""
    made.context_tokens = BLOCKS * 16
    await made.open()
    yield made
    await made.close()


async def ask_at_length(house: House) -> tuple[int, str]:
    """(status, code) of bob's long request."""
    asked = {"model": house.model, "prompt": [5] * LONG_PROMPT, "max_tokens": 1}
    status, answer, _ = await house.ask("/v1/completions", asked, who="bob")
    return status, "" if status == 200 else answer["error"]["code"]


@pytest.mark.parametrize("change", [{"floor_blocks": 0}, {"status": "suspended"}])
async def test_a_floor_that_is_taken_back_is_room_for_others(
    house: House, change: dict[str, object]
) -> None:
    """A suspended tenant sends nothing that could tell the engine; nor may one whose floor was a
    slip of the pen be needed to mend it."""
    admin = Admin(house)
    await floor_beyond_the_pool(house)
    assert await ask_at_length(house) == (400, "context_length_exceeded")

    await admin.ask("PATCH", "/admin/v1/tenants/ada", change)

    async with asyncio.timeout(PATIENCE_S):
        while (await ask_at_length(house))[0] != 200:
            pass
    await house.check_quiet()


async def test_whoever_is_admitted_has_room_beside_the_widest_floors(house: House) -> None:
    """The rest of the pool is nobody's, whatever operators write."""
    await floor_beyond_the_pool(house)

    status, _, _ = await house.ask(body=house.chat("x" * 100), who="bob")

    assert status == 200
    await house.check_quiet()


async def test_a_promise_that_is_cut_is_told_with_what_bounds_it(house: House) -> None:
    """Whoever asked for it must not find out by a miss; what is written is what was granted."""
    admin = Admin(house)
    await admin.ask("PATCH", "/admin/v1/tenants/ada", {"promised_blocks_max": 2})

    async def ask(words: str) -> tuple[int, str | None, str | None]:
        text = {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}
        messages = [{"role": "user", "content": [text]}]
        asked = {"model": house.model, "max_tokens": 2, "messages": messages}
        _, answer, response = await house.ask("/v1/messages", asked)
        header = response.headers["X-Trunkline-Cache"]
        parts = dict(part.split("=") for part in header.split("; "))
        written = answer["usage"]["cache_creation_input_tokens"]
        return written, parts.get("lease"), parts.get("bound")

    told = [await ask("one " * 40), await ask("two " * 40), await ask("two " * 40)]
    await admin.ask("PATCH", "/admin/v1/tenants/ada", {"promised_blocks_max": None})
    granted = await ask("six " * 40)

    assert told[0] == (32, "clipped", "quota")
    assert told[1:] == [(0, "refused", "quota")] * 2
    assert granted[0] > 100
    assert granted[1:] == (None, None)
    await house.check_quiet()
