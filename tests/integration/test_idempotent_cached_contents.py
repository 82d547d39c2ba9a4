"""Cached contents made again under their `Idempotency-Key`: one, whoever leaves."""

from __future__ import annotations

import json
from typing import Any

from tests.unit.gateway.gateway_fixture import House
from tests.unit.gateway.idempotent_requests import (
    endings,
    send,
)


def cached_content(house: House, **fields: str) -> dict[str, Any]:
    text = {"parts": [{"text": "Of this there is enough to be kept. " * 8}], "role": "user"}
    return {"model": f"models/{house.model}", "contents": [text], "ttl": "300s", **fields}


async def test_a_cached_content_is_made_once(house: House) -> None:
    """Two would be two bills for storage. Another one under the name is another request."""
    body, path = cached_content(house), "/v1beta/cachedContents"
    first, one, _ = await send(house, "a", body, path)
    again, two, after = await send(house, "a", body, path)
    other, refused, _ = await send(house, "a", cached_content(house, ttl="301s"), path)
    _, unnamed, _ = await send(house, None, body, path)

    assert (first, again, other) == (200, 200, 409)
    assert one == two != unnamed
    assert after.headers["Idempotency-Replayed"] == "true"
    assert json.loads(refused)["error"]["status"] == "ABORTED"
    assert house.store.query("select count(*) from cached_contents") == [(2,)]
    assert endings(house) == ["done", "done"]
    await house.check_quiet()


async def test_a_cached_content_is_kept_for_a_client_that_left(house: House) -> None:
    """It comes back for it; one without a name leaves nothing behind."""
    body, path = json.dumps(cached_content(house)).encode(), "/v1beta/cachedContents"
    for name in ("Idempotency-Key: n", "X-Other: n"):
        house.runner.hold_after(0)
        async with house.connection() as (_, writer):
            writer.write(house.post(path, body, name))
            await house.until(lambda: house.runner.is_held)
            writer.transport.abort()
        await house.ask("/healthz", method="GET", who=None)  # the server knows it by then
        house.runner.release()
        await house.check_quiet()
    status, answer, response = await send(house, "n", body, path)
    name = json.loads(answer)["name"].removeprefix("cachedContents/")
    left = "select resource_id from cached_contents where ended_ms is null"
    await house.until(lambda: house.store.query(left) == [(name,)])

    assert (status, response.headers["Idempotency-Replayed"]) == (200, "true")
    assert sorted(endings(house)) == ["cancelled", "done"]
    await house.check_quiet()
