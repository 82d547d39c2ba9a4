"""A page of another origin in a real browser: what it may call and read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from tests.e2e.browser import IN_BROWSER
from tests.unit.gateway.gateway_fixture import GatewayFixture

pytestmark = [*IN_BROWSER, pytest.mark.slow]
CALLS = """
const [url, key, model, done] = arguments;
const send = async (key) => {
  const answer = await fetch(`${url}/v1/chat/completions`, {
    method: "POST",
    headers: {authorization: `Bearer ${key}`, "content-type": "application/json"},
    body: JSON.stringify({model, messages: [{role: "user", content: "hi"}], max_tokens: 4,
      stream: true}),
  });
  const text = await answer.text();
  return [answer.status, text.includes("[DONE]"), answer.headers.has("x-request-id"),
    answer.headers.has("x-trunkline-cache")];
};
(async () => [await send(key), await send("wrong")])().then(done, (error) => done(String(error)));
"""


@pytest.fixture
async def page_origin() -> AsyncIterator[str]:
    """Yield the origin of an empty page."""

    async def show(request: web.BaseRequest) -> web.Response:
        return web.Response(text="<!doctype html><title>app</title>", content_type="text/html")

    runner = web.ServerRunner(web.Server(show))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize("is_allowed", [True, False])
async def test_a_page_reads_answers_only_where_its_origin_is_listed(
    unopened_gateway: GatewayFixture, browser: Any, page_origin: str, *, is_allowed: bool
) -> None:
    """A stream, its headers and an error; on a server that lists other origins, nothing."""
    gateway = unopened_gateway
    gateway.set_server(cors_origins=(page_origin if is_allowed else "https://app.example.com",))
    await gateway.open()
    asked = gateway.url, gateway.keys["ada"], gateway.model
    await asyncio.to_thread(browser.get, page_origin)
    found = await asyncio.to_thread(browser.execute_async_script, CALLS, *asked)
    await gateway.close()

    expected = [[200, True, True, True], [401, False, True, False]]
    assert found == (expected if is_allowed else "TypeError: Failed to fetch"), json.dumps(found)
