"""The product as a process: `trunkline serve` with a real engine process and a tiny model."""

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

from aiohttp import ClientSession

START_S = 60.0
SETTINGS = "[engine]\nthreads = 1\nkv_blocks = 256\n"
"""One thread: on a busy host the second one is waited for more than it helps."""


class Server:
    """One `trunkline serve`."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, key: str, text: str) -> None:
        self.process = process
        self.url = url
        self.key = key
        self.text = text

    def body(self, **more: object) -> dict[str, object]:
        messages = [{"role": "user", "content": "hello"}]
        return {"model": "tiny", "messages": messages, "ignore_eos": True, **more}

    @asynccontextmanager
    async def asked(self, **more: object) -> AsyncIterator[tuple[int, asyncio.StreamReader]]:
        """A request's status and body while it comes."""
        async with (
            ClientSession() as session,
            session.post(
                f"{self.url}/chat/completions",
                json=self.body(**more),
                headers={"Authorization": f"Bearer {self.key}"},
            ) as response,
        ):
            yield response.status, response.content  # type: ignore[misc]

    async def ended(self) -> int:
        """The exit status, once it is over."""
        async with asyncio.timeout(START_S):
            return await self.process.wait()


@asynccontextmanager
async def serving(model: Path, data: Path, settings: Path | None = None) -> AsyncIterator[Server]:
    """Started and ready; killed afterwards if it still runs. Its log is beside its data.
    `settings`: a file other than the model's."""
    log = data.with_suffix(".log")
    with log.open("ab") as errors:
        process = await started(model, data, settings or model.parent / "settings.toml", errors)
    assert process.stdout is not None
    try:
        text = ""
        async with asyncio.timeout(START_S):
            while "key file" not in text:
                line = (await process.stdout.readline()).decode()
                assert line, f"it ended: {text}{log.read_text()}"
                text += line
        found = re.search(r"http://\S+/v1", text)
        assert found is not None, text
        key = (await asyncio.to_thread((data / "default.key").read_text)).strip()
        yield Server(process, found[0], key, text)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def started(
    model: Path, data: Path, settings: Path, errors: IO[bytes], **environment: str
) -> asyncio.subprocess.Process:
    """Of which nothing is known yet."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway",
        "serve",
        str(model),
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
