"""The default model twice in one server, under two names: two engine processes."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from tests.server_process import Server, run_server

pytestmark = [pytest.mark.model, pytest.mark.slow]

PATIENCE_S = 60.0
SETTINGS = """
[engine]
threads = 1
kv_memory_mib = 64
context_tokens_max = 1024
[[models]]
name = "first"
path = "smollm2-135m-instruct"
[[models]]
name = "second"
path = "smollm2-135m-instruct"
[models.engine]
kv_memory_mib = 32
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Yield a server with both models, over the models on disk."""
    models = (Path(os.environ.get("TRUNKLINE_DATA_DIR", "data")) / "models").resolve()
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    (data / "models").symlink_to(models)
    settings = tmp_path / "settings.toml"
    settings.write_text(SETTINGS)
    with run_server(None, data, settings) as running:
        yield running


async def ask(server: Server, model: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of a greedy answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Count from one to five."}],
        "max_tokens": 12,
        "temperature": 0,
    }
    async with (
        ClientSession() as session,
        session.post(
            f"{server.url}/v1/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {server.key}"},
        ) as response,
    ):
        return response.status, await response.json()


async def answer(server: Server, model: str) -> dict[str, Any]:
    """Return an answer as soon as the model's engine gives one."""
    began_s = time.monotonic()
    while True:
        status, body = await ask(server, model)
        if status == 200:
            return body
        assert status == 503, body
        assert time.monotonic() - began_s < PATIENCE_S, body


def engine_pid(log: Path, model: str) -> int:
    """Return the process of the latest engine of a model, as the log names it."""
    found = re.findall(rf'"engine_started","model":"{model}","pid":(\d+)', log.read_text())
    return int(found[-1])


async def test_two_engines_answer_alike_and_die_apart(server: Server, tmp_path: Path) -> None:
    """The same weights give the same tokens; a killed engine costs the other nothing."""
    first, second = await answer(server, "first"), await answer(server, "second")
    log = tmp_path / "data.log"
    pids = [engine_pid(log, name) for name in ("first", "second")]
    os.kill(pids[1], signal.SIGKILL)
    alive, _ = await ask(server, "first")
    back = await answer(server, "second")

    assert pids[0] != pids[1]
    assert re.search(r"trunkline serves first.*, second.* at http", server.text)
    assert first["choices"] == second["choices"] == back["choices"]
    assert (first["model"], second["model"]) == ("first", "second")
    assert alive == 200
    assert engine_pid(log, "second") != pids[1]
    assert engine_pid(log, "first") == pids[0]
    assert server.stop() == 0
