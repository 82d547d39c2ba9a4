"""Cached contents created with an `Idempotency-Key` are created once, also after a disconnect."""

from __future__ import annotations

import json
from typing import Any

from tests.unit.gateway.gateway_fixture import GatewayFixture
from tests.unit.gateway.idempotent_requests import (
    endings,
    send,
)


def cached_content(gateway: GatewayFixture, **fields: str) -> dict[str, Any]:
    text = {"parts": [{"text": "Of this there is enough to be kept. " * 8}], "role": "user"}
    return {"model": f"models/{gateway.model}", "contents": [text], "ttl": "300s", **fields}


async def test_cached_content_is_created_once(gateway: GatewayFixture) -> None:
    """Two would be billed twice for storage. Another content under the key is another request."""
    body, path = cached_content(gateway), "/v1beta/cachedContents"
    first, one, _ = await send(gateway, "a", body, path)
    again, two, after = await send(gateway, "a", body, path)
    other, refused, _ = await send(gateway, "a", cached_content(gateway, ttl="301s"), path)
    _, unnamed, _ = await send(gateway, None, body, path)

    assert (first, again, other) == (200, 200, 409)
    assert one == two != unnamed
    assert after.headers["Idempotency-Replayed"] == "true"
    assert json.loads(refused)["error"]["status"] == "ABORTED"
    assert gateway.store.query("select count(*) from cached_contents") == [(2,)]
    assert endings(gateway) == ["done", "done"]
    await gateway.check_quiet()


async def test_cached_content_survives_disconnect_with_key(gateway: GatewayFixture) -> None:
    """Without a key, nothing is left behind."""
    body, path = json.dumps(cached_content(gateway)).encode(), "/v1beta/cachedContents"
    for name in ("Idempotency-Key: n", "X-Other: n"):
        gateway.runner.hold_after(0)
        async with gateway.connection() as (_, writer):
            writer.write(gateway.post(path, body, name))
            await gateway.until(lambda: gateway.runner.is_held)
            writer.transport.abort()
        await gateway.ask("/healthz", method="GET", who=None)  # the server knows it by then
        gateway.runner.release()
        await gateway.check_quiet()
    status, answer, response = await send(gateway, "n", body, path)
    name = json.loads(answer)["name"].removeprefix("cachedContents/")
    left = "select resource_id from cached_contents where ended_ms is null"
    await gateway.until(lambda: gateway.store.query(left) == [(name,)])

    assert (status, response.headers["Idempotency-Replayed"]) == (200, "true")
    assert sorted(endings(gateway)) == ["cancelled", "done"]
    await gateway.check_quiet()
