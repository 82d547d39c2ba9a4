"""An administrator makes itself a key of a tenant, and looks for what the tenant has stored."""

from __future__ import annotations

import json

from tenancy.accounts.keys import create_admin_key, create_key
from tenancy.types import wall_ms
from tests.unit.gateway.gateway_fixture import GatewayFixture

SECRET = "the password is swordfish"


async def test_no_record_of_a_request_leads_to_the_text_that_it_stored(
    gateway: GatewayFixture,
) -> None:
    """Records, headers and log lines have the request's id, and a stored response another one."""
    body = {"model": gateway.model, "input": SECRET, "max_output_tokens": 1}
    status, stored, response = await gateway.ask("/v1/responses", body)
    assert status == 200, stored
    request_id = response.headers["X-Request-Id"].rpartition("_")[2]
    tenant_id = gateway.gateway.context.authenticator.authenticate(gateway.keys["ada"])
    gateway.keys["operator"] = create_key(gateway.store, wall_ms, tenant_id.tenant.tenant_id)
    gateway.gateway.context.authenticator.refresh_now()
    admin = create_admin_key(gateway.store, wall_ms, scopes=["read", "tenants"])
    for path in ("/admin/v1/requests", f"/admin/v1/requests/{request_id}"):
        async with gateway.session.get(
            gateway.admin_url + path, headers={"Authorization": f"Bearer {admin}"}
        ) as answer:
            assert stored["id"] not in await answer.text()

    for path in (f"resp_{request_id}", f"resp_{request_id}/input_items", request_id):
        status, found, _ = await gateway.ask(f"/v1/responses/{path}", method="GET", who="operator")
        assert (status, SECRET in str(found)) == (404, False), found
    for line in gateway.lines:
        assert stored["id"].removeprefix("resp_") not in json.dumps(line, default=str)
    status, found, _ = await gateway.ask(f"/v1/responses/{stored['id']}", method="GET")
    assert status == 200, found


async def test_a_key_that_an_administrator_made_uses_cached_contents_and_is_in_the_audit_log(
    gateway: GatewayFixture,
) -> None:
    """It lists the tenant's cached contents by name and asks with them, as every key of the tenant
    does; no answer has their text, no key of another tenant finds them, and the log names who made
    the key."""
    text = f"{SECRET}. Of this there is enough to be kept. " * 8
    contents = [{"role": "user", "parts": [{"text": text}]}]
    model = f"models/{gateway.model}"
    body = {"model": model, "contents": contents, "ttl": "300s"}
    status, made, _ = await gateway.ask("/v1beta/cachedContents", body)
    assert status == 200, made
    admin = create_admin_key(gateway.store, wall_ms, scopes=["read", "tenants"])
    headers = {"Authorization": f"Bearer {admin}"}
    async with gateway.session.post(
        f"{gateway.admin_url}/admin/v1/tenants/ada/keys", json={}, headers=headers
    ) as answer:
        gateway.keys["operator"] = (await answer.json())["key"]

    status, listed, _ = await gateway.ask("/v1beta/cachedContents", method="GET", who="operator")
    assert [one["name"] for one in listed["cachedContents"]] == [made["name"]]
    _, shown, _ = await gateway.ask(f"/v1beta/{made['name']}", method="GET", who="operator")
    assert SECRET not in f"{listed}{shown}"
    ask = {
        "cachedContent": made["name"],
        "contents": [{"role": "user", "parts": [{"text": "go on"}]}],
        "generationConfig": {"maxOutputTokens": 1},
    }
    path = f"/v1beta/{model}:generateContent"
    status, told, _ = await gateway.ask(path, ask, who="operator")
    assert (status, SECRET in str(told)) == (200, False), told
    assert told["usageMetadata"]["cachedContentTokenCount"] > 0
    status, _, _ = await gateway.ask(path, ask, who="bob")
    assert status == 403

    async with gateway.session.get(
        f"{gateway.admin_url}/admin/v1/audit?action=key.create", headers=headers
    ) as answer:
        found = await answer.json()
    assert [one["tenant"] for one in found["changes"] if one["actor"] == "admin_key"] == ["ada"], (
        found
    )


async def test_a_strangers_document_tells_nothing_of_this_server(gateway: GatewayFixture) -> None:
    """The OpenAPI document needs no key: it has paths and the version, which every server has, and
    no tenant, model or setting; all else is refused."""
    status, document, _ = await gateway.ask("/openapi.json", method="GET", who=None)

    assert status == 200
    text = json.dumps(document)
    assert not [name for name in ("ada", "bob", gateway.model, gateway.url) if f'"{name}"' in text]
    for path in ("/v1/models", "/v1/usage", "/v1/state", "/v1/responses/resp_x"):
        status, found, _ = await gateway.ask(path, method="GET", who=None)
        assert status == 401, found
