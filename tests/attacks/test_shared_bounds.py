"""Bounds that were one for all tenants: the busiest tenant pushed out what others had."""

from __future__ import annotations

import pytest
from msgspec import structs

from tenancy.history import request_records
from tenancy.history.request_records import (
    RequestFilter,
    delete_old_records,
    list_requests,
    write_records,
)
from tenancy.types import wall_ms
from tests.unit.gateway.gateway_fixture import GatewayFixture
from tests.unit.tenancy.history.test_request_records import record

MESSAGES = "/v1/messages"
VERSION = {"anthropic-version": "2023-06-01"}


async def message(
    gateway: GatewayFixture, who: str, text: str, previous: str | None = None
) -> dict[str, object]:
    """Return the answer to a message that is compared with an earlier one."""
    body: dict[str, object] = {
        "model": gateway.model,
        "max_tokens": 1,
        "messages": [{"role": "user", "content": text}],
        "diagnostics": {"previous_message_id": previous},
    }
    status, found, _ = await gateway.ask(MESSAGES, body, who=who, headers=VERSION)
    assert status == 200, found
    return dict(found)


async def test_remembered_prompts_of_one_tenant_push_out_no_others(
    unopened_gateway: GatewayFixture,
) -> None:
    """The quiet tenant compares with the only prompt that it has sent."""
    gateway = unopened_gateway
    caching = structs.replace(gateway.config.caching, fingerprints_max=8)
    gateway.config = structs.replace(gateway.config, caching=caching)
    await gateway.open()
    try:
        first = await message(gateway, "bob", "hello there")
        for number in range(20):
            await message(gateway, "ada", f"{number}")

        again = await message(gateway, "bob", "hello there", str(first["id"]))
        mine = await message(gateway, "ada", "0", "msg_unknown")
    finally:
        await gateway.close()

    assert "not_found" not in str(again["diagnostics"]), again
    assert "not_found" in str(mine["diagnostics"]), mine


def test_request_records_of_one_tenant_push_out_no_others(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of refusals leaves the operator the reason of the quiet tenant's only one."""
    monkeypatch.setattr(request_records, "RECORDS_MAX", 10)
    monkeypatch.setattr(request_records, "DELETED_AT_ONCE", 4)
    now_ms = wall_ms()
    quiet = record(now_ms - 1_000, tenant_id=2)
    flood = [record(now_ms - 900 + number, tenant_id=1) for number in range(40)]
    write_records(gateway.store, [quiet, *flood])
    rounds = 0
    while delete_old_records(gateway.store, now_ms):
        rounds += 1
        assert rounds < 100, "each round deletes"

    always = RequestFilter(since_ms=0, until_ms=now_ms + 1)
    left = list_requests(gateway.store, always, 100)
    assert [one.request_id for one in left if one.record and one.record.tenant_id == 2] == [
        quiet.request_id
    ]
    assert len(left) == 10
