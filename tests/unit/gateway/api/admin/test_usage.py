"""Who used and holds what, and forgetting it, for administrators."""

from __future__ import annotations

import pytest

from tenancy.accounts.erasure_receipts import list_receipts
from tests.unit.gateway.admin_client import Admin
from tests.unit.gateway.gateway_fixture import GatewayFixture

pytestmark = pytest.mark.usefixtures("noon")

LONG = "Once upon a time there was a cache that forgot nothing, until it was told to. " * 2
ROUTES = [
    ("GET", "/admin/v1/usage"),
    ("GET", "/admin/v1/cache"),
    ("POST", "/admin/v1/erase"),
    ("GET", "/admin/v1/erasures"),
]


@pytest.fixture
async def admin(gateway: GatewayFixture) -> Admin:
    return Admin(gateway)


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_a_tenants_key_is_not_enough(admin: Admin, method: str, path: str) -> None:
    """C8: every tenant's usage is nobody's but the operator's."""
    answers = [
        await admin.ask(method, path, {"tenant": "bob"}, key=key)
        for key in (None, admin.gateway.keys["ada"])
    ]

    assert [status for status, _ in answers] == [401, 403]


async def test_usage_is_told_of_all_and_of_one(admin: Admin) -> None:
    """The parts' sum is the whole."""
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
async def test_what_is_not_asked_for_by_tenant_is_the_sum_of_all(admin: Admin, by: str) -> None:
    """One row for a day, not one for each tenant that nobody can tell apart."""
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


async def test_the_cache_is_told_by_namespace(admin: Admin) -> None:
    """By whose it is and how large; a namespace itself is named by its digest."""
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


async def test_an_administrator_erases_a_tenants_cache(admin: Admin) -> None:
    """With the same receipt as the tenant's own, under the administrator's key."""
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


async def test_erasing_a_workspace_leaves_the_others(admin: Admin) -> None:
    """There is nothing in that one."""
    await admin.gateway.ask(body=admin.gateway.chat(LONG))
    _, receipt = await admin.ask("POST", "/admin/v1/erase", {"tenant": "ada", "workspace": "lab"})

    assert (receipt["blocks"], receipt["what"]) == (0, "workspace lab")
    assert (await admin.gateway.quiet()).cached_blocks > 0


@pytest.mark.parametrize(
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
        ("GET", "/admin/v1/usage?since=1900-01-01", None, 400, "invalid_value"),
        ("GET", "/admin/v1/cache?tenant=..%2f", None, 404, "tenant_unknown"),
    ],
)
async def test_what_cannot_be_is_refused_and_erases_nothing(
    admin: Admin, method: str, path: str, body: object, status: int, code: str
) -> None:
    """Clear refusals, no receipt."""
    await admin.gateway.ask(body=admin.gateway.chat(LONG))
    got, answer = await admin.ask(method, path, body)

    assert (got, answer["error"]["code"]) == (status, code)
    assert list_receipts(admin.gateway.store, 1) == []
    assert (await admin.gateway.quiet()).cached_blocks > 0
