"""What a request names: stored conversations, items and answers that are loaded for it.

A body of a few bytes may name all that its tenant has stored. So what is named counts as what is
sent: its bytes take the tenant's share of bodies, its values are bounded before they are decoded,
and a tenant reads and writes its contents one call at a time.
"""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tenancy.storage.interface import Store
from tests.attacks.attacked_server import AttackedServer, flood
from tests.attacks.probe import Probe, check_undisturbed
from tests.unit.gateway.gateway_fixture import GatewayFixture

RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
BODY_BYTES = 4_096
VALUES = 200
RESIDENT_MIB = 400
"""What the gateway may grow by while contents are loaded: less than three budgets of bodies."""


def parts_of(count: int) -> dict[str, object]:
    """Return an item of many small parts."""
    return {"role": "user", "content": [{"type": "input_text", "text": ""}] * count}


@pytest.fixture
async def small(unopened_gateway: GatewayFixture) -> Any:
    """Yield a gateway whose largest body has 4 KiB and 200 values; a tenant holds two at a time."""
    gateway = unopened_gateway
    gateway.set_server(
        body_bytes_max=BODY_BYTES, body_bytes_in_flight_max=8 * BODY_BYTES, body_values_max=VALUES
    )
    await gateway.open()
    yield gateway
    await gateway.close()


async def stored(gateway: GatewayFixture, *items: object) -> str:
    """Store a conversation of these items, each sent in a body of its own; return its id."""
    status, found, _ = await gateway.ask(CONVERSATIONS, {})
    assert status == 200, found
    path = f"{CONVERSATIONS}/{found['id']}/items"
    for item in items:
        status, answer, _ = await gateway.ask(path, {"items": [item]})
        assert status == 200, answer
    return str(found["id"])


async def item_ids(gateway: GatewayFixture, conversation: str) -> list[str]:
    """Return the ids of a conversation's items."""
    _, found, _ = await gateway.ask(f"{CONVERSATIONS}/{conversation}/items", method="GET")
    return [item["id"] for item in found["data"]]


async def check_quiet_chat(gateway: GatewayFixture) -> None:
    """Assert that the other tenant is answered, with a key for idempotency."""
    headers = {"Idempotency-Key": "quiet"}
    status, found, _ = await gateway.ask(body=gateway.chat(), who="bob", headers=headers)
    assert status == 200, found


@pytest.mark.parametrize("named", ["conversation", "references"])
async def test_values_of_named_items_count_as_those_of_a_body(
    small: GatewayFixture, named: str
) -> None:
    """Each item was small enough to be sent; all of them together are refused undecoded."""
    conversation = await stored(small, *[parts_of(40)] * 2)
    body: dict[str, object] = {"model": small.model, "input": "hi", "conversation": conversation}
    if named == "references":
        ids = await item_ids(small, conversation)
        body = {"model": small.model, "input": [{"type": "item_reference", "id": i} for i in ids]}

    status, found, _ = await small.ask(RESPONSES, body)

    assert (status, found["error"]["code"]) == (413, "request_too_large"), found
    assert f"{VALUES} JSON values together" in found["error"]["message"]
    await check_quiet_chat(small)


async def test_bytes_of_items_by_reference_are_bounded_together(small: GatewayFixture) -> None:
    """Items of conversations count as stored responses do: a quarter of all bodies at most."""
    text = {"role": "user", "content": "x" * 3_000}
    conversations = [await stored(small, text) for _ in range(2)]
    ids = [one for name in conversations for one in await item_ids(small, name)]
    asked = [{"type": "item_reference", "id": one} for one in ids]

    status, found, _ = await small.ask(RESPONSES, {"model": small.model, "input": asked})

    assert (status, found["error"]["param"]) == (400, "input"), found
    assert f"limit {BODY_BYTES}" in found["error"]["message"]
    await check_quiet_chat(small)


@pytest.mark.parametrize("path", ["response", "items", "item"])
async def test_named_bytes_take_the_tenants_share_of_bodies(
    small: GatewayFixture, path: str
) -> None:
    """Beside uploads that hold the share, what is named finds no more room than what is sent."""
    conversation = await stored(small, {"role": "user", "content": "x" * 3_000})
    item = (await item_ids(small, conversation))[0]
    base = f"{CONVERSATIONS}/{conversation}/items"
    body = {"model": small.model, "input": "hi", "conversation": conversation}
    head = small.post(RESPONSES, b"", f"Content-Length: {BODY_BYTES}", "Expect: 100-continue")

    async def ask() -> tuple[int, Any]:
        if path == "response":
            status, found, _ = await small.ask(RESPONSES, body)
        else:
            asked = base if path == "items" else f"{base}/{item}"
            status, found, _ = await small.ask(asked, method="GET")
        return status, found

    async with AsyncExitStack() as held:
        reader, writer = await held.enter_async_context(small.connection())
        writer.write(head)
        await reader.readuntil(b"100 Continue\r\n\r\n")  # its bytes are taken from here on
        reader, writer = await held.enter_async_context(small.connection())
        writer.write(head.replace(b"4096", b"3000"))
        await reader.readuntil(b"100 Continue\r\n\r\n")
        status, found = await ask()
        await check_quiet_chat(small)

    assert (status, found["error"]["code"]) == (429, "rate_limit_exceeded"), found
    await small.quiet()
    status, found = await ask()
    assert found.get("error", {}).get("code") != "rate_limit_exceeded", found


async def test_calls_of_one_tenant_delay_no_other_tenants_contents(
    gateway: GatewayFixture,
) -> None:
    """Idempotent requests look up their key first: it waits behind no other tenant's calls."""
    released = threading.Event()
    authenticator = gateway.gateway.context.authenticator
    ada = authenticator.authenticate(gateway.keys["ada"]).tenant.tenant_id

    def hold(_: Store) -> None:
        released.wait()

    contents = gateway.gateway.context.contents
    held = [asyncio.create_task(contents.ask(hold, ada)) for _ in range(20)]
    try:
        await check_quiet_chat(gateway)
    finally:
        released.set()
        await asyncio.gather(*held)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["parts", "text"])
def test_naming_stored_items_leaves_the_quiet_tenant_alone(
    server: AttackedServer, shape: str
) -> None:
    """A conversation of some megabytes, named by many requests at once, without generating."""
    quiet, key = Probe(server, server.tenant(f"quiet-{shape}")), server.tenant(f"names-{shape}")
    found = json.loads(server.ask(key, CONVERSATIONS, {}).body)
    item = parts_of(12_000) if shape == "parts" else {"role": "user", "content": "x" * 450_000}
    for _ in range(20):
        path = f"{CONVERSATIONS}/{found['id']}/items"
        assert server.ask(key, path, {"items": [item]}).status == 200
    body = {"model": server.model, "input": "hi", "conversation": found["id"], "store": False}
    alone = quiet.observe_alone()
    before_mib = server.resident_mib()
    with flood(lambda: server.ask(key, RESPONSES, body).status, 16) as statuses:
        beside = quiet.observe()
        grown_mib = server.resident_mib() - before_mib

    check_undisturbed(alone, beside)
    assert grown_mib < RESIDENT_MIB
    assert set(statuses) <= {400, 413, 429}, set(statuses)
