"""What a tenant may know and do about itself, and what it may not about others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.ledger.metering import wall_ms
from tenancy.accounts.erasure_receipts import list_receipts
from tenancy.accounts.keys import create_key
from tenancy.accounts.tenants import change_tenant, find_tenant
from tests.unit.gateway.gateway_fixture import GatewayFixture

pytestmark = pytest.mark.usefixtures("noon")

LONG = "Once upon a time there was a cache that forgot nothing, until it was told to. " * 2


async def get(
    gateway: GatewayFixture, path: str, who: str = "ada", method: str = "GET"
) -> tuple[int, Any]:
    """(status, JSON)."""
    status, body, _ = await gateway.ask(path, method=method, who=who)
    return status, body


async def key_with(gateway: GatewayFixture, *scopes: str, workspace: str = "default") -> str:
    """A further key of ada's, by the name it is filed under."""
    tenant, _ = find_tenant(gateway.store, "ada")
    key = create_key(gateway.store, wall_ms, tenant.tenant_id, scopes=scopes, workspace=workspace)
    gateway.keys["further"] = key
    gateway.gateway.context.registry.refresh_now()
    return "further"


# --- usage ---------------------------------------------------------------------------------------


async def test_a_tenant_sees_its_own_usage_and_nothing_else(gateway: GatewayFixture) -> None:
    """Equal to the ledger's sums; the neighbour's requests change none of it."""
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


async def test_usage_is_told_by_day_model_and_key(gateway: GatewayFixture) -> None:
    """The rows' sums are the totals."""
    await key_with(gateway, "inference")
    for who in ("ada", "further", "ada"):
        await gateway.ask(body=gateway.chat(), who=who)
    _, body = await get(gateway, "/v1/usage?group_by=key,day,model")

    assert {row["key_id"]: row["requests"] for row in body["rows"]} == {1: 2, 3: 1}
    assert {row["model"] for row in body["rows"]} == {gateway.model}
    assert all(row["from"].endswith("T00:00:00.000Z") for row in body["rows"])
    assert sum(row["prompt_tokens"] for row in body["rows"]) == body["totals"]["prompt_tokens"]


async def test_another_tenants_usage_does_not_exist(gateway: GatewayFixture) -> None:
    """C10: whether there is a tenant of that name is not told either; one's own name is fine."""
    answers = [await get(gateway, f"/v1/usage?tenant={name}") for name in ("bob", "nobody", "ada")]
    foreign = await get(gateway, "/v1/usage?key_id=2")

    assert [status for status, _ in answers] == [404, 404, 200]
    assert answers[0][1] == answers[1][1]
    assert foreign[1]["totals"]["requests"] == 0


@pytest.mark.parametrize(
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
async def test_a_question_that_cannot_be_is_refused(gateway: GatewayFixture, query: str) -> None:
    """F10: named by the parameter, in the plain shape."""
    status, body = await get(gateway, f"/v1/usage?{query}")

    assert status == 400
    assert body["error"]["param"] == query.partition("=")[0]
    assert set(body["error"]) == {"code", "message", "param"}


# --- cache ---------------------------------------------------------------------------------------


async def test_a_tenant_sees_what_it_holds(gateway: GatewayFixture) -> None:
    """Blocks as the engine has them, what it may, and what that saved."""
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


async def test_a_workspace_sees_its_own_cache_alone(gateway: GatewayFixture) -> None:
    """Two workspaces of one tenant share no cache, and no view of it."""
    who = await key_with(gateway, "inference", "cache", workspace="lab")
    await gateway.ask(body=gateway.chat(LONG))
    _, empty = await get(gateway, "/v1/cache", who)
    await gateway.ask(body=gateway.chat(LONG), who=who)
    _, full = await get(gateway, "/v1/cache", who)

    assert (empty["workspace"], empty["blocks"]) == ("lab", 0)
    assert full["blocks"] > 0


async def test_a_tenant_erases_its_own_cache_and_has_a_receipt(gateway: GatewayFixture) -> None:
    """Nobody else's; the next request computes everything again."""
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


async def test_what_to_erase_is_not_read_from_a_body(gateway: GatewayFixture) -> None:
    """Whoever names one lease in the wrong place must not lose them all."""
    await gateway.ask(body=gateway.chat(LONG))
    status, body, _ = await gateway.ask("/v1/cache", {"lease_id": "00" * 16}, method="DELETE")
    empty, _, _ = await gateway.ask("/v1/cache", b"", method="DELETE")

    assert (status, body["error"]["code"]) == (400, "unexpected_body")
    assert empty == 200
    assert gateway.store.query("select count(*) from erasures") == [(1,)]


@pytest.mark.parametrize("lease_id", ["x", "00" * 16, "y" * 5_000])
async def test_a_lease_that_is_not_ones_own_is_not_there(
    gateway: GatewayFixture, lease_id: str
) -> None:
    """C11: a guess finds nothing and erases nothing."""
    await gateway.ask(body=gateway.chat(LONG))
    status, body = await get(gateway, f"/v1/cache?lease_id={lease_id}", method="DELETE")

    assert (status, body["error"]["code"]) == (404, "lease_unknown")
    assert list_receipts(gateway.store, 1) == []


async def test_without_an_engine_there_is_no_view_and_no_receipt(gateway: GatewayFixture) -> None:
    """503 and when to come back."""
    await gateway.engine.close()
    answers = [await get(gateway, "/v1/cache", method=method) for method in ("GET", "DELETE")]

    assert [status for status, _ in answers] == [503, 503]
    assert list_receipts(gateway.store, 1) == []


# --- scopes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "statuses"),
    [("inference", [403, 403, 403]), ("usage", [200, 403, 403]), ("cache", [403, 200, 200])],
)
async def test_each_needs_its_scope(
    gateway: GatewayFixture, scope: str, statuses: list[int]
) -> None:
    """C8: a key for prompts cannot erase, and a dashboard's cannot spend."""
    who = await key_with(gateway, scope)
    asked = (("/v1/usage", "GET"), ("/v1/cache", "GET"), ("/v1/cache", "DELETE"))

    assert [(await get(gateway, path, who, method))[0] for path, method in asked] == statuses
