"""`GET /admin/v1/me`: who asks, with which scopes, and what the server is."""

from __future__ import annotations

import pytest

from tenancy.accounts.keys import create_admin_key
from tenancy.types import wall_ms
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture


@pytest.mark.parametrize("scopes", [("money",), ("read", "tenants"), None])
async def test_any_administrator_sees_its_own_scopes(
    gateway: GatewayFixture, scopes: tuple[str, ...] | None
) -> None:
    """A key without the scope `read`, too: the dashboard asks what it may offer."""
    admin = AdminClient(gateway)
    key = create_admin_key(gateway.store, wall_ms, label="pager", scopes=scopes)
    gateway.gateway.context.authenticator.refresh_now()

    status, told = await admin.ask("GET", "/admin/v1/me", key=key)

    assert status == 200
    assert (told["actor"], told["label"]) == ("admin_key", "pager")
    assert told["scopes"] == sorted(scopes or ("erase", "money", "read", "tenants"))
    assert told["server"]["model"] == gateway.model
    assert "1h" in told["server"]["classes"]
    assert 0 < told["server"]["began_ms"] <= told["server"]["at_ms"]
    assert key not in str(told)
