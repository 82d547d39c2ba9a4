"""A gateway with two engines, one of them without a copy: over HTTP the second one starts warm.

A real gateway, keepers, TLS, engine and storage processes, and a folder that the engines share.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.config import LevelsConfig, RemoteConfig
from engine.model_store import ModelCard
from tests.crash.fleet import PATIENCE_S, KeptReplica, gateway_settings
from tests.crash.patient_peer import COMMAND
from tests.crash.peers import CONFIG
from tests.crash.test_missed_erasures import Operator, all_ready
from tests.crash.test_process_deaths import Place
from tests.server_process import run_server
from tests.unit.engine.storage.local_storage import write_key
from tests.unit.engine.storage.shared_rig import MASTER

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(600)]

NAMES = ("e0", "e1")
TEXT = "A system prompt that every request of this tenant begins with. " * 8


async def ask(operator: Operator) -> dict[str, Any]:
    """Return the answer to a request whose prompt is promised for an hour."""
    kept = {"type": "ephemeral", "ttl": "1h"}
    part = {"type": "text", "text": TEXT, "cache_control": kept}
    messages = [{"role": "user", "content": [part]}]
    asked = operator.server.request(messages=messages, max_tokens=4, temperature=0)
    async with asked as (status, content):
        text = (await content.read()).decode()
    assert status == 200, text
    found: dict[str, Any] = json.loads(text)
    return found


async def level(operator: Operator) -> dict[str, Any]:
    """Return what the gateway shows of the shared store."""
    found = (await operator.ask("GET", "/admin/v1/levels"))["levels"]
    return next((one for one in found if one["name"] == "remote"), {"state": "starting"})


async def test_a_replica_without_copies_starts_warm_and_a_receipt_names_the_store(
    model: Path, card: ModelCard, tmp_path: Path
) -> None:
    """The engine that has computed the prompt is gone, which the receipt names beside the store."""
    place = Place(tmp_path, None)
    key_file = write_key(tmp_path / "key", MASTER).key_file
    far = RemoteConfig(f"file://{tmp_path}/far", timeout_ms=10_000, tokens_min=64, shared=True)
    levels = LevelsConfig(
        host_mib=8, disk_gib=0.25, slab_mib=4, disk_tokens_min=16, look_ms=5_000.0,
        seal=True, key_file=key_file, remote=far,
    )  # fmt: skip
    async with AsyncExitStack() as opened:
        kept = {}
        for name in NAMES:
            own = replace(CONFIG, levels=replace(levels, dir=str(tmp_path / name)))
            kept[name] = KeptReplica(name, "", config=own, model=Path(card.folder), command=COMMAND)
            opened.push_async_callback(kept[name].close)
            kept[name].keeper.start()
        ports = {name: one.port for name, one in kept.items()}
        place.settings.write_text(gateway_settings(ports))
        starting = run_server(model, place.data, place.settings)
        server = await asyncio.to_thread(starting.__enter__)
        try:
            operator = Operator(server, place.data)
            await operator.until(all_ready)
            (tenant,) = (await operator.ask("GET", "/admin/v1/tenants"))["tenants"]
            path = f"/admin/v1/tenants/{tenant['name']}"
            await operator.ask("PATCH", path, {"at_rest": "remote", "promised_blocks_max": 256})
            async with asyncio.timeout(PATIENCE_S):
                while (await level(operator))["state"] != "open":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                first = await ask(operator)
                while not list((tmp_path / "far").glob("*/m/*")):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            seen = await operator.replicas()
            (home,) = [name for name, one in seen.items() if one["device_prefix_tokens"]]
            await kept[home].keeper.close()  # no peer has the prefix any more
            await operator.until(lambda seen: seen[home]["state"] != "ready")
            second = await ask(operator)
            async with asyncio.timeout(PATIENCE_S):
                while not (shown := await level(operator)).get("loaded_tokens_total"):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            receipt = await operator.ask("POST", "/admin/v1/erase", {"tenant": tenant["name"]})
        finally:
            server.process.kill()
            await asyncio.to_thread(starting.__exit__, None, None, None)
    left = [path.name for path in (tmp_path / "far").rglob("*") if path.is_file()]

    assert second["choices"][0]["message"] == first["choices"][0]["message"]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, second)]
    assert cached[0] == 0
    assert cached[1] > 0.8 * first["usage"]["prompt_tokens"]
    assert 0 <= shown["loaded_tokens_total"] - cached[1] < 16  # whole blocks are loaded
    assert shown["written_bytes_total"] > 0
    assert receipt["levels"]["remote"]["state"] == "gone"
    assert receipt["levels"]["remote"]["blocks"] > 0
    assert (receipt["pending_at"], receipt["completed_at"]) == ([home], None)
    assert left == ["proof"]
