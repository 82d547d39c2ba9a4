"""A tenant's view of itself, and its isolation from other tenants."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tenancy.accounts.erasure_receipts import list_receipts
from tenancy.accounts.keys import create_key
from tenancy.accounts.tenants import change_tenant, find_tenant
from tenancy.types import wall_ms
from tests.tables import each_row
from tests.unit.gateway.gateway_fixture import GatewayFixture

LONG = "Once upon a time there was a cache that forgot nothing, until it was told to. " * 2


async def get(
    gateway: GatewayFixture, path: str, who: str = "ada", method: str = "GET"
) -> tuple[int, Any]:
    """Return (status, JSON)."""
    status, body, _ = await gateway.ask(path, method=method, who=who)
    return status, body


async def create_key_for(gateway: GatewayFixture, *scopes: str, workspace: str = "default") -> str:
    """Create a further key of ada's, and store it under a name."""
    tenant = find_tenant(gateway.store, "ada")
    key = create_key(gateway.store, wall_ms, tenant.tenant_id, scopes=scopes, workspace=workspace)
    gateway.keys["further"] = key
    gateway.gateway.context.authenticator.refresh_now()
    return "further"


# --- usage ---------------------------------------------------------------------------------------


async def test_usage_is_the_tenants_own(gateway: GatewayFixture) -> None:
    """It equals the ledger's sums; a neighbour's requests do not change it."""
    for who in ("ada", "bob", "ada", "bob", "bob"):
        await gateway.ask(body=gateway.chat(LONG), who=who)
    status, body = await get(gateway, "/v1/usage")
    rows = gateway.store.query(
        "select sum(prompt_tokens), sum(output_tokens) from ledger where tenant_id = 1"
    )

    assert (status, body["tenant"], body["rows"]) == (200, "ada", [])
    assert (body["totals"]["prompt_tokens"], body["totals"]["output_tokens"]) == rows[0]
    assert body["totals"]["requests"] == 2
    assert body["totals"]["physical_cached_tokens"] > 0
    assert "bob" not in json.dumps(body)


async def test_groups_usage_by_day_model_and_key(gateway: GatewayFixture) -> None:
    """Rows add up to the totals."""
    await create_key_for(gateway, "inference")
    for who in ("ada", "further", "ada"):
        await gateway.ask(body=gateway.chat(), who=who)
    _, body = await get(gateway, "/v1/usage?group_by=key,day,model")

    assert {row["key_id"]: row["requests"] for row in body["rows"]} == {1: 2, 3: 1}
    assert {row["model"] for row in body["rows"]} == {gateway.model}
    assert all(row["from"].endswith("T00:00:00.000Z") for row in body["rows"])
    assert sum(row["prompt_tokens"] for row in body["rows"]) == body["totals"]["prompt_tokens"]


async def test_another_tenants_usage_is_not_found(gateway: GatewayFixture) -> None:
    """C10: whether a tenant of that name exists is not revealed; one's own name is accepted."""
    answers = [await get(gateway, f"/v1/usage?tenant={name}") for name in ("bob", "nobody", "ada")]
    foreign = await get(gateway, "/v1/usage?key_id=2")

    assert [status for status, _ in answers] == [404, 404, 200]
    assert answers[0][1] == answers[1][1]
    assert foreign[1]["totals"]["requests"] == 0


@each_row(
    "query",
    [
        "since=2016-01-01",
        "since=x",
        "group_by=tenant",
        "group_by=a",
        "key_id=-1",
        "page=1",
        "since=",
    ],
)
async def test_refuses_invalid_parameters(gateway: GatewayFixture, query: str) -> None:
    """F10: the error names the parameter."""
    status, body = await get(gateway, f"/v1/usage?{query}")

    assert status == 400
    assert body["error"]["param"] == query.partition("=")[0]
    assert set(body["error"]) == {"code", "message", "param"}


# --- cache ---------------------------------------------------------------------------------------


async def test_shows_own_blocks_limits_and_savings(gateway: GatewayFixture) -> None:
    change_tenant(gateway.store, "ada", {"floor_blocks": 5, "classes": ["5m"]})
    for who in ("ada", "ada", "bob"):
        await gateway.ask(body=gateway.chat(LONG), who=who)
    await gateway.quiet()
    status, body = await get(gateway, "/v1/cache")
    blocks = {len(one.namespace): one.blocks for one in gateway.engine.namespaces}

    assert (status, body["tenant"], body["workspace"]) == (200, "ada", "default")
    assert body["blocks"] in blocks.values()
    assert body["tokens"] == 16 * body["blocks"] > 0
    assert body["pinned_blocks"] == 0
    assert body["usage"]["requests"] == 2
    assert body["erasures"] == []


async def test_workspace_sees_only_its_own_cache(gateway: GatewayFixture) -> None:
    who = await create_key_for(gateway, "inference", "cache", workspace="lab")
    await gateway.ask(body=gateway.chat(LONG))
    _, empty = await get(gateway, "/v1/cache", who)
    await gateway.ask(body=gateway.chat(LONG), who=who)
    _, full = await get(gateway, "/v1/cache", who)

    assert (empty["workspace"], empty["blocks"]) == ("lab", 0)
    assert full["blocks"] > 0


async def test_erases_own_cache_with_a_receipt(gateway: GatewayFixture) -> None:
    """Other tenants keep theirs; the next request computes everything."""
    for who in ("ada", "bob"):
        await gateway.ask(body=gateway.chat(LONG), who=who)
    status, receipt = await get(gateway, "/v1/cache", method="DELETE")
    _, body = await get(gateway, "/v1/cache")
    for who in ("ada", "bob"):
        await gateway.ask(body=gateway.chat(LONG), who=who)

    assert (status, receipt["what"], receipt["key_id"]) == (200, "workspace default", 1)
    assert receipt["blocks"] > 0
    assert (body["blocks"], body["erasures"]) == (0, [receipt])
    assert [row[2] > 0 for row in gateway.entries()] == [False, False, False, True]
    await gateway.check_quiet()


async def test_erasures_of_a_tenant_run_one_at_a_time(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is several durable writes; sixteen at once made every other tenant wait."""
    running = most = 0
    erasure = gateway.gateway.erasure
    whole = erasure.erase

    async def erase(*arguments: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await whole(*arguments)
        finally:
            running -= 1

    monkeypatch.setattr(erasure, "erase", erase)
    got = await asyncio.gather(*(get(gateway, "/v1/cache", method="DELETE") for _ in range(6)))

    assert [status for status, _ in got] == [200] * 6
    assert most == 1


async def test_refuses_an_erasure_with_a_body(gateway: GatewayFixture) -> None:
    """A lease named in the wrong place must not erase everything."""
    await gateway.ask(body=gateway.chat(LONG))
    status, body, _ = await gateway.ask("/v1/cache", {"lease_id": "00" * 16}, method="DELETE")
    empty, _, _ = await gateway.ask("/v1/cache", b"", method="DELETE")

    assert (status, body["error"]["code"]) == (400, "unexpected_body")
    assert empty == 200
    assert gateway.store.query("select count(*) from erasures") == [(1,)]


@pytest.mark.parametrize("lease_id", ["x", "00" * 16, "y" * 5_000])
async def test_another_tenants_lease_is_not_found(gateway: GatewayFixture, lease_id: str) -> None:
    """C11: a guessed id erases nothing."""
    await gateway.ask(body=gateway.chat(LONG))
    status, body = await get(gateway, f"/v1/cache?lease_id={lease_id}", method="DELETE")

    assert (status, body["error"]["code"]) == (404, "lease_unknown")
    assert list_receipts(gateway.store, 1) == []


async def test_engine_outage_is_503_with_retry_after(gateway: GatewayFixture) -> None:
    await gateway.engine.close()
    answers = [await get(gateway, "/v1/cache", method=method) for method in ("GET", "DELETE")]

    assert [status for status, _ in answers] == [503, 503]
    assert list_receipts(gateway.store, 1) == []


# --- scopes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "statuses"),
    [("inference", [403, 403, 403]), ("usage", [200, 403, 403]), ("cache", [403, 200, 200])],
)
async def test_refuses_keys_without_the_scope(
    gateway: GatewayFixture, scope: str, statuses: list[int]
) -> None:
    """C8: a key for prompts cannot erase, and a dashboard's cannot generate."""
    who = await create_key_for(gateway, scope)
    asked = (("/v1/usage", "GET"), ("/v1/cache", "GET"), ("/v1/cache", "DELETE"))

    assert [(await get(gateway, path, who, method))[0] for path, method in asked] == statuses
