"""The admin API of usage, cache contents and erasures."""

from __future__ import annotations

import csv
import io

import pytest

from tenancy.accounts.erasure_receipts import list_receipts
from tests.tables import each_row
from tests.unit.gateway.admin_client import AdminClient

LONG = "Once upon a time there was a cache that forgot nothing, until it was told to. " * 2
LAST = "since=9999-12-01&until=9999-12-31T23:30:00Z"
"""The calendar ends before the hour does."""


async def test_usage_of_tenants_adds_up_to_usage_of_all(admin: AdminClient) -> None:
    for who in ("ada", "bob", "bob"):
        await admin.gateway.ask(body=admin.gateway.chat(LONG), who=who)
    _, everybody = await admin.ask("GET", "/admin/v1/usage?group_by=tenant")
    _, bob = await admin.ask("GET", "/admin/v1/usage?tenant=bob")

    assert {row["tenant"]: row["requests"] for row in everybody["rows"]} == {"ada": 1, "bob": 2}
    assert everybody["totals"]["requests"] == 3
    assert bob["totals"] == {
        key: value
        for key, value in next(r for r in everybody["rows"] if r["tenant"] == "bob").items()
        if key != "tenant"
    }


@pytest.mark.parametrize("by", ["day", "hour", "model", "day,model"])
async def test_usage_without_tenant_group_sums_tenants(admin: AdminClient, by: str) -> None:
    """One row per day, not one per tenant."""
    gateway = admin.gateway
    for who in ("ada", "bob", "bob"):
        await gateway.ask(body=gateway.chat(), who=who)
    _, body = await admin.ask("GET", f"/admin/v1/usage?group_by={by}")
    _, of_keys = await admin.ask("GET", f"/admin/v1/usage?group_by={by},key")

    (row,) = body["rows"]
    sums = {name: value for name, value in row.items() if name not in ("from", "model")}
    assert sums == body["totals"]
    assert body["totals"]["requests"] == 3
    assert [one["key_id"] for one in of_keys["rows"]] == [1, 2]


async def test_lists_cache_contents_by_namespace(admin: AdminClient) -> None:
    """By tenant and size; a digest names the namespace."""
    for who in ("ada", "bob"):
        await admin.gateway.ask(body=admin.gateway.chat(LONG), who=who)
    _, everything = await admin.ask("GET", "/admin/v1/cache")
    _, bob = await admin.ask("GET", "/admin/v1/cache?tenant=bob")
    pool = everything["pool"]

    assert sorted(row["tenant"] for row in everything["namespaces"]) == ["ada", "bob"]
    assert sum(row["blocks"] for row in everything["namespaces"]) == pool["cached_blocks"]
    assert pool["free_blocks"] + pool["cached_blocks"] + pool["pinned_blocks"] == pool["blocks"]
    assert [row["tenant"] for row in bob["namespaces"]] == ["bob"]
    assert not everything["has_more"]


async def test_erases_a_tenants_cache(admin: AdminClient) -> None:
    """The receipt equals the tenant's own, with the administrator's key."""
    gateway = admin.gateway
    for who in ("ada", "bob"):
        await gateway.ask(body=gateway.chat(LONG), who=who)
    status, receipt = await admin.ask("POST", "/admin/v1/erase", {"tenant": "bob"})
    _, listed = await admin.ask("GET", "/admin/v1/erasures?tenant=bob")
    _, left = await admin.ask("GET", "/admin/v1/cache")

    assert (status, receipt["tenant"], receipt["what"], receipt["key_id"]) == (200, "bob", "all", 3)
    assert [row["tenant"] for row in left["namespaces"]] == ["ada"]
    assert listed["erasures"] == [{k: v for k, v in receipt.items() if k != "tenant"}]
    await gateway.check_quiet()


async def test_erasing_a_workspace_keeps_the_others(admin: AdminClient) -> None:
    await admin.gateway.ask(body=admin.gateway.chat(LONG))
    _, receipt = await admin.ask("POST", "/admin/v1/erase", {"tenant": "ada", "workspace": "lab"})

    assert (receipt["blocks"], receipt["what"]) == (0, "workspace lab")
    assert (await admin.gateway.quiet()).cached_blocks > 0


@each_row(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/admin/v1/erase", {}, 400, "missing_required_parameter"),
        ("POST", "/admin/v1/erase", {"tenant": "nobody"}, 404, "tenant_unknown"),
        ("POST", "/admin/v1/erase", {"tenant": "ada", "all": True}, 400, "invalid_value"),
        ("POST", "/admin/v1/erase", {"tenant": "ada", "workspace": "scope:1"}, 400, "bad_name"),
        ("POST", "/admin/v1/erase", {"tenant": "ada", "workspace": "a\0b"}, 400, "bad_name"),
        ("POST", "/admin/v1/erase", {"tenant": "ada", "lease_id": "x"}, 404, "lease_unknown"),
        ("POST", "/admin/v1/erase", {"tenant": "ada", "lease_id": "x" * 999}, 404, "lease_unknown"),
        ("GET", "/admin/v1/erasures", None, 400, "missing_required_parameter"),
        ("GET", "/admin/v1/erasures?tenant=ada&limit=5000", None, 400, "invalid_value"),
        ("GET", "/admin/v1/usage?tenant=nobody", None, 404, "tenant_unknown"),
        ("GET", "/admin/v1/analytics/nobody", None, 404, "tenant_unknown"),
        ("GET", "/admin/v1/analytics/bob", None, 404, "not_seen"),
        ("GET", "/admin/v1/usage?since=1900-01-01", None, 400, "invalid_value"),
        ("GET", f"/admin/v1/usage?{LAST}", None, 400, "invalid_value"),
        ("GET", "/admin/v1/cache?tenant=..%2f", None, 404, "tenant_unknown"),
    ],
)
async def test_refuses_invalid_erasures(
    admin: AdminClient, method: str, path: str, body: object, status: int, code: str
) -> None:
    """No receipt is written."""
    await admin.gateway.ask(body=admin.gateway.chat(LONG))
    got, answer = await admin.ask(method, path, body)

    assert (got, answer["error"]["code"]) == (status, code)
    assert list_receipts(admin.gateway.store, 1) == []
    assert (await admin.gateway.quiet()).cached_blocks > 0


async def test_usage_is_to_be_had_as_csv(admin: AdminClient) -> None:
    await admin.gateway.ask(body=admin.gateway.chat(LONG))
    status, text = await admin.ask("GET", "/admin/v1/usage?group_by=tenant&format=csv")
    (row,) = csv.DictReader(io.StringIO(text))

    assert (status, row["tenant"], row["requests"]) == (200, "ada", "1")
