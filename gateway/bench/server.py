"""A Trunkline server for the length of a benchmark, on free ports and a temporary data directory.

It uses the models of the configured data directory, so nothing is fetched twice; its keys, tenants
and ledger are new, and deleted afterwards.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import aiohttp
from msgspec import Struct

from gateway.bench.client import BenchError, Clock
from gateway.bench.memory import MemoryWatch

START_TIMEOUT_S = 300.0
"""Longest time until the server is ready."""
STOP_TIMEOUT_S = 20.0
"""Time between SIGTERM and SIGKILL."""
KEY_FILE = "default.key"


class BenchServer(Struct, frozen=True):
    """A running server."""

    url: str
    keys: tuple[str, ...]
    ready_s: float
    """Seconds from its start until it was ready."""
    memory: MemoryWatch


@asynccontextmanager
async def bench_server(
    model: str, models_dir: Path, clock: Clock, *, tenants: int, config: Path | None = None
) -> AsyncIterator[BenchServer]:
    """Start `trunkline serve` with keys of `tenants` tenants; stop it at the end.

    Raises BenchError with the end of the server's log if it does not become ready.
    """
    with _scratch(models_dir) as data:
        public, admin = _free_port(), _free_port()
        command = ["serve", model, "--data-dir", str(data)]
        command += ["--listen", f"127.0.0.1:{public}", "--admin-listen", f"127.0.0.1:{admin}"]
        if config is not None:
            command += ["--config", str(config)]
        with (data / "server.log").open("wb") as log:
            started_s = clock()
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gateway", *command, stdout=log, stderr=log
            )
            try:
                await _until_ready(process, f"http://127.0.0.1:{public}/readyz", data)
                ready_s = clock() - started_s
                keys = [(data / KEY_FILE).read_text().strip()]
                keys += [await _new_key(data, f"bench-{i}") for i in range(1, tenants)]
                memory = MemoryWatch(process.pid)
                yield BenchServer(f"http://127.0.0.1:{public}/v1", tuple(keys), ready_s, memory)
            finally:
                await _stop(process)


@contextmanager
def _scratch(models_dir: Path) -> Iterator[Path]:
    """Yield a temporary data directory with a link to the models."""
    models_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="trunkline-bench-") as folder:
        (Path(folder) / "models").symlink_to(models_dir.resolve())
        yield Path(folder)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _until_ready(process: asyncio.subprocess.Process, url: str, data: Path) -> None:
    try:
        async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as session:
            while process.returncode is None:
                with suppress(aiohttp.ClientError):
                    async with session.get(url) as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.02)
    except TimeoutError:
        pass  # reported below, with the end of the server's log
    log = (data / "server.log").read_text(errors="replace").strip()[-600:]
    raise BenchError(f"The server did not become ready. Its log ends with: {log or 'nothing'}")


async def _new_key(data: Path, tenant: str) -> str:
    """Create a tenant by the command line, and return a key of it."""
    await _trunkline("tenant", "create", tenant, "--data-dir", str(data))
    return await _trunkline("key", "create", "--tenant", tenant, "--data-dir", str(data))


async def _trunkline(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    if process.returncode != 0:
        raise BenchError(f"trunkline {arguments[0]} failed: {err.decode(errors='replace')[-300:]}")
    return out.decode().strip()


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
