"""The default model in a pool of few blocks with a disk: promises of three times the pool, read
back after pressure through a real server; none is broken and the books are right.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from tenancy.accounting.audit import check_books
from tenancy.accounts.keys import create_admin_key
from tenancy.storage.sqlite import SqliteStore
from tenancy.types import wall_ms
from tests.e2e.patient_engine import LOOK_MS
from tests.server_process import Server, run_server

pytestmark = [pytest.mark.model, pytest.mark.slow]

PATIENT = (sys.executable, "-m", "tests.e2e.patient_server")
PATIENCE_S = 60.0
BLOCKS, PROMPTS, WORDS = 48, 18, 140
"""Blocks of the pool; prompts, and their words, which fill `RUNS` blocks at least."""
RUNS = 9
SETTINGS = f"""
[engine]
threads = 2
kv_blocks = {BLOCKS}
context_tokens_max = 384
[engine.levels]
disk_gib = 2.0
disk_tokens_min = 64
look_ms = {LOOK_MS}
[caching.profiles.anthropic]
min_tokens = 0
[[models]]
name = "kept"
path = "smollm2-135m-instruct"
"""
VOCABULARY = ["apple", "river", "stone", "music", "table", "green", "seven", "quiet"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a data folder over the models on disk."""
    models = (Path(os.environ.get("TRUNKLINE_DATA_DIR", "data")) / "models").resolve()
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    (data / "models").symlink_to(models)
    return data


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """Return the settings of a small pool over a disk."""
    settings = tmp_path / "settings.toml"
    settings.write_text(SETTINGS)
    return settings


@pytest.fixture
def server(data: Path, settings: Path) -> Iterator[Server]:
    """Yield a server over the models on disk."""
    with run_server(None, data, settings, PATIENT) as running:
        yield running


def kill_all(pid: int) -> None:
    """Kill a process and all below it, at once."""
    below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in below:
        kill_all(int(child))
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def promises(server: Server, session: ClientSession, key: str, blocks: int) -> None:
    """Wait until the engine counts so many blocks as promised below the device."""
    headers = {"Authorization": f"Bearer {key}"}
    found = -1
    async with asyncio.timeout(PATIENCE_S):
        while found != blocks:
            url = f"{server.admin_url}/admin/v1/cache"
            async with session.get(url, headers=headers) as response:
                answer = await response.json()
                assert response.status == 200, answer
                found = sum(int(one["promised_below"]) for one in answer["namespaces"])


async def booked(data: Path, prefixes: int) -> None:
    """Wait until the gateway's books, which it writes each second, have so many prefixes."""
    found = 0
    with closing(SqliteStore(data / "trunkline.db")) as store:
        async with asyncio.timeout(PATIENCE_S):
            while found != prefixes:
                await asyncio.sleep(0.05)
                ((found,),) = store.query("select count(*) from written_prefixes")


async def ask(server: Server, session: ClientSession, seed: int, *, is_promised: bool) -> Any:
    """Send the prompt of a seed; return usage and the parts of `X-Trunkline-Cache`."""
    chance = random.Random(seed)
    text = " ".join(chance.choice(VOCABULARY) for _ in range(WORDS))
    block: dict[str, Any] = {"type": "text", "text": f"{seed} {text}"}
    if is_promised:
        block["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    body = {
        "model": "kept",
        "max_tokens": 1,
        "system": [block],
        "messages": [{"role": "user", "content": "x"}],
    }
    headers = {"x-api-key": server.key, "anthropic-version": "2023-06-01"}
    async with session.post(f"{server.url}/v1/messages", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        told = response.headers["X-Trunkline-Cache"]
        parts = dict(part.strip().split("=", 1) for part in told.split(";"))
        return answer["usage"], parts


async def test_promises_of_three_pools_are_read_back(server: Server, tmp_path: Path) -> None:
    """Under pressure the pool holds a third of them, and the disk has all."""
    async with ClientSession() as session:
        written = []
        for seed in range(PROMPTS):
            usage, parts = await ask(server, session, seed, is_promised=True)
            assert "lease" not in parts, parts
            written.append(usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"])
        began_s = time.monotonic()
        for seed in range(100, 106):
            await ask(server, session, seed, is_promised=False)
        back = [await ask(server, session, seed, is_promised=True) for seed in range(PROMPTS)]

    assert sum(tokens // 16 for tokens in written) > 3 * BLOCKS
    assert [usage["cache_read_input_tokens"] for usage, _ in back] == written
    missing = [
        tokens - int(parts["physical"]) for tokens, (_, parts) in zip(written, back, strict=True)
    ]
    assert max(missing) < 16, missing
    held = sum(tokens // 16 * 16 for tokens in written) * (time.monotonic() - began_s)
    loaded = sum(int(parts.get("disk", 0)) + int(parts.get("host", 0)) for _, parts in back)
    assert loaded > sum(written) / 2
    assert server.stop() == 0
    with closing(SqliteStore(tmp_path / "data" / "trunkline.db")) as store:
        assert check_books(store) == []
        (broken,) = store.query("select sum(recomputed_promised_tokens) from ledger")
        (credits,) = store.query("select count(*) from adjustments")
        (stored,) = store.query("select sum(token_seconds) from storage_hours where class = '1h'")
    assert (broken[0], credits[0]) == (0, 0)
    assert held <= int(stored[0])  # each promised block once, wherever it is


async def test_promises_go_on_after_every_process_was_killed(data: Path, settings: Path) -> None:
    """The next engine charges what the disk promises before any request reads it, and then reads
    all of it back; what was promised by then is promised once."""
    with closing(SqliteStore(data / "trunkline.db")) as store:
        key = create_admin_key(store, wall_ms)
    async with ClientSession() as session:
        with run_server(None, data, settings, PATIENT) as first:
            written = [await ask(first, session, seed, is_promised=True) for seed in range(6)]
            counted = ("cache_creation_input_tokens", "cache_read_input_tokens")
            sizes = [sum(usage[name] for name in counted) for usage, _ in written]
            blocks = sum(size // 16 for size in sizes)
            await promises(first, session, key, blocks)  # the disk has confirmed them
            await booked(data, len(written))
            kill_all(first.process.pid)
        with run_server(None, data, settings, PATIENT) as second:
            await promises(second, session, key, blocks)
            back = [await ask(second, session, seed, is_promised=True) for seed in range(6)]
            await promises(second, session, key, blocks)

    assert min(sizes) >= RUNS * 16
    assert [usage["cache_read_input_tokens"] for usage, _ in back] == sizes
    assert all(int(parts["disk"]) >= RUNS * 16 for _, parts in back)
    assert all(usage["cache_creation_input_tokens"] == 0 for usage, _ in back)
