"""A client of a test gateway's admin listener, with an administrator's key."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tenancy.accounts.keys import create_admin_key
from tenancy.types import wall_ms
from tests.unit.gateway.gateway_fixture import GatewayFixture


class AdminClient:
    """Sends requests to the admin listener of an open gateway."""

    def __init__(self, gateway: GatewayFixture) -> None:
        self.gateway = gateway
        self.key = create_admin_key(gateway.store, wall_ms)
        gateway.gateway.context.authenticator.refresh_now()

    async def ask(
        self, method: str, path: str, body: object = None, *, key: str | None = ""
    ) -> tuple[int, Any]:
        """Send a request; return (status, JSON). `key`: another key, or None for no key."""
        await self.gateway.next_millisecond()
        sent = {} if key is None else {"Authorization": f"Bearer {key or self.key}"}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        if body is not None:
            sent["Content-Type"] = "application/json"
        async with self.gateway.session.request(
            method,
            self.gateway.admin_url + path,
            data=data if body is not None else None,
            headers=sent,
        ) as response:
            text = await response.text()
            self.gateway.last_answer_ms = wall_ms()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if text and is_json else text or None


@pytest.fixture
async def admin(gateway: GatewayFixture) -> AdminClient:
    """A client of an open gateway's admin listener."""
    return AdminClient(gateway)
