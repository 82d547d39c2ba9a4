"""Changes of a tenant's quota reach the engine without a request of that tenant."""

from __future__ import annotations

import asyncio

import pytest

from tenancy.accounts.tenants import change_tenant
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import BLOCKS, PATIENCE_S, GatewayFixture

pytestmark = pytest.mark.usefixtures("room_for_all")

LONG_PROMPT = BLOCKS // 2 * 16
"""Tokens that do not fit, with one of the answer, beside floors that are as wide as can be."""


async def floor_beyond_the_pool(gateway: GatewayFixture) -> None:
    """Set a floor beyond the pool, as the file or the command line may."""
    change_tenant(gateway.store, "ada", {"floor_blocks": 10**12})
    gateway.gateway.context.authenticator.refresh_now()
    await gateway.ask(body=gateway.chat())


async def ask_long(gateway: GatewayFixture) -> tuple[int, str]:
    """Return (status, code) of bob's long request."""
    asked = {"model": gateway.model, "prompt": [5] * LONG_PROMPT, "max_tokens": 1}
    status, answer, _ = await gateway.ask("/v1/completions", asked, who="bob")
    return status, "" if status == 200 else answer["error"]["code"]


@pytest.mark.parametrize("change", [{"floor_blocks": 0}, {"status": "suspended"}])
async def test_lowered_floor_frees_room_without_a_request(
    gateway: GatewayFixture, change: dict[str, object]
) -> None:
    """A suspended tenant sends no request that could update the engine."""
    admin = AdminClient(gateway)
    await floor_beyond_the_pool(gateway)
    assert await ask_long(gateway) == (400, "context_length_exceeded")

    await admin.ask("PATCH", "/admin/v1/tenants/ada", change)

    async with asyncio.timeout(PATIENCE_S):
        while (await ask_long(gateway))[0] != 200:
            pass
    await gateway.check_quiet()


async def test_admitted_request_fits_beside_the_largest_floors(
    gateway: GatewayFixture,
) -> None:
    await floor_beyond_the_pool(gateway)

    status, _, _ = await gateway.ask(body=gateway.chat("x" * 100), who="bob")

    assert status == 200
    await gateway.check_quiet()


async def test_reduced_promise_names_its_limit(gateway: GatewayFixture) -> None:
    """The response says so, so that no miss reveals it; only the granted part is billed as
    written."""
    admin = AdminClient(gateway)
    await admin.ask("PATCH", "/admin/v1/tenants/ada", {"promised_blocks_max": 2})

    async def ask(words: str) -> tuple[int, str | None, str | None]:
        text = {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}
        messages = [{"role": "user", "content": [text]}]
        asked = {"model": gateway.model, "max_tokens": 2, "messages": messages}
        _, answer, response = await gateway.ask("/v1/messages", asked)
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
    await gateway.check_quiet()
