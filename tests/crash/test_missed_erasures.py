"""An engine is away while a cache is erased, and the gateway is killed before it is back.

A real gateway, keepers, TLS and engine processes over the fake runner. The engine stays alive
behind a cut network, with what it has cached.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from engine.model_store import ModelCard
from tests.crash.fleet import Proxy, gateway_settings
from tests.crash.test_process_deaths import Place
from tests.crash.test_replicated_server import NAMES, PATIENCE_S, kept_engines
from tests.server_process import Server, run_server

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(600)]

TEXT = "A system prompt that every request of this tenant begins with. " * 8


class Operator:
    """Asks a server with its keys."""

    def __init__(self, server: Server, data: Path) -> None:
        self.server = server
        self._key = (data / "admin.key").read_text().strip()

    async def cached_tokens(self) -> int:
        """Ask with the long text; return how many of its tokens were cached."""
        messages = [{"role": "user", "content": TEXT}]
        async with self.server.request(max_tokens=2, messages=messages) as (status, content):
            text = (await content.read()).decode()
        assert status == 200, text
        return int(json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        """Return the answer of the admin API."""
        async with (
            ClientSession(headers={"Authorization": f"Bearer {self._key}"}) as session,
            session.request(method, f"{self.server.admin_url}{path}", json=body) as response,
        ):
            return await response.json()

    async def replicas(self) -> dict[str, dict[str, Any]]:
        """Return what the gateway knows of each engine."""
        (model,) = (await self.ask("GET", "/admin/v1/fleet"))["models"]
        return {one["name"]: one for one in model["replicas"]}

    async def until(self, holds: Callable[[dict[str, dict[str, Any]]], bool]) -> None:
        """Wait until it holds of the engines."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds(await self.replicas()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def all_ready(replicas: dict[str, dict[str, Any]]) -> bool:
    return all(one["state"] == "ready" for one in replicas.values())


async def test_an_erasure_reaches_an_engine_that_was_away_over_a_killed_gateway(
    model: Path, card: ModelCard, tmp_path: Path
) -> None:
    """The receipt names it until then, and no request finds what it still had."""
    place = Place(tmp_path, None)
    proxies: dict[str, Proxy] = {}
    async with kept_engines(card) as kept:
        for name in NAMES:
            proxies[name] = Proxy(kept[name].port)
            await proxies[name].open()
        ports = {name: one.port for name, one in proxies.items()}
        place.settings.write_text(gateway_settings(ports))
        starting = run_server(model, place.data, place.settings)
        server = await asyncio.to_thread(starting.__enter__)
        try:
            operator = Operator(server, place.data)
            await operator.until(all_ready)
            await operator.cached_tokens()
            warm = await operator.cached_tokens()
            seen = await operator.replicas()
            (home,) = [name for name, one in seen.items() if one["device_prefix_tokens"]]
            (tenant,) = (await operator.ask("GET", "/admin/v1/tenants"))["tenants"]
            proxies[home].up = proxies[home].down = "drop"
            await operator.until(lambda seen: seen[home]["state"] == "lost")
            receipt = await operator.ask("POST", "/admin/v1/erase", {"tenant": tenant["name"]})
        finally:
            server.process.kill()
            await asyncio.to_thread(starting.__exit__, None, None, None)

        proxies[home].up = proxies[home].down = "pass"
        proxies[home].cut()
        starting = run_server(model, place.data, place.settings)
        server = await asyncio.to_thread(starting.__enter__)
        try:
            operator = Operator(server, place.data)
            await operator.until(all_ready)
            kept_tokens = (await operator.replicas())[home]["device_prefix_tokens"]
            after = await operator.cached_tokens()
            path = f"/admin/v1/erasures?tenant={tenant['name']}"
            (done,) = (await operator.ask("GET", path))["erasures"]
        finally:
            server.process.kill()
            await asyncio.to_thread(starting.__exit__, None, None, None)
        for proxy in proxies.values():
            await proxy.close()

    assert warm > 0
    assert (receipt["pending_at"], receipt["completed_at"]) == ([home], None)
    assert (kept_tokens, after) == (0, 0)
    assert done["receipt_id"] == receipt["receipt_id"]
    assert (done["pending_at"], done["completed_at"] >= done["at"]) == ([], True)
    assert done["blocks"] > 0
