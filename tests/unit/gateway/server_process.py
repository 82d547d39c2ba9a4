"""`trunkline serve` as a process, with a real engine process and a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

from aiohttp import ClientSession, StreamReader

START_S = 60.0
SETTINGS = "[engine]\nthreads = 1\nkv_blocks = 256\n"
"""One thread: on a busy host, waiting for a second thread costs more than it gains."""


class Server:
    """A running `trunkline serve`."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, key: str, text: str) -> None:
        self.process = process
        self.url = url
        self.key = key
        self.text = text

    def body(self, **more: object) -> dict[str, object]:
        messages = [{"role": "user", "content": "hello"}]
        return {"model": "tiny", "messages": messages, "ignore_eos": True, **more}

    @asynccontextmanager
    async def request(self, **more: object) -> AsyncIterator[tuple[int, StreamReader]]:
        """Send a request; yield its status and its body's stream."""
        async with (
            ClientSession() as session,
            session.post(
                f"{self.url}/chat/completions",
                json=self.body(**more),
                headers={"Authorization": f"Bearer {self.key}"},
            ) as response,
        ):
            yield response.status, response.content

    async def wait(self) -> int:
        """Wait for the exit; return the status."""
        async with asyncio.timeout(START_S):
            return await self.process.wait()


@asynccontextmanager
async def run_server(
    model: Path | None, data: Path, settings: Path | None = None, module: str = "gateway"
) -> AsyncIterator[Server]:
    """Start a server and yield it when ready; kill it afterwards if it still runs.

    Its log is beside its data. `settings`: a file other than the model's; it names the models if
    `model` is None. `module`: what is run as `trunkline`.
    """
    if settings is None:
        assert model is not None, "the settings name the models"
        settings = model.parent / "settings.toml"
    log = data.with_suffix(".log")
    with log.open("ab") as errors:
        process = await start_server(model, data, settings, errors, module)
    assert process.stdout is not None
    try:
        text = ""
        async with asyncio.timeout(START_S):
            while "key file" not in text:
                line = (await process.stdout.readline()).decode()
                assert line, f"the server ended: {text}{log.read_text()}"
                text += line
        found = re.search(r"http://\S+/v1", text)
        assert found is not None, text
        key = (await asyncio.to_thread((data / "default.key").read_text)).strip()
        yield Server(process, found[0], key, text)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def start_server(
    model: Path | None,
    data: Path,
    settings: Path,
    errors: IO[bytes],
    module: str = "gateway",
    **environment: str,
) -> asyncio.subprocess.Process:
    """Start the process without waiting for it. `model`: None for those of the settings."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        "serve",
        *([] if model is None else [str(model)]),
        "--config",
        str(settings),
        "--data-dir",
        str(data),
        "--listen",
        "127.0.0.1:0",
        "--admin-listen",
        "127.0.0.1:0",
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
