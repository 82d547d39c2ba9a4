"""`trunkline serve` as a process: started, its addresses read, ended. All but `request` blocks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from threading import Timer

from aiohttp import ClientSession, StreamReader

START_S = 60.0
SETTINGS = "[engine]\nthreads = 1\nkv_blocks = 256\n"
"""One thread: on a busy host, waiting for a second thread costs more than it gains."""
GATEWAY = (sys.executable, "-m", "gateway")


class Server:
    """A running `trunkline serve`."""

    def __init__(self, process: subprocess.Popen[str], text: str) -> None:
        lines = r"(http://\S+)/metrics +(http://\S+)/readyz\n.*key file: +(\S+)"
        found = re.search(lines, text, re.DOTALL)
        assert found is not None, text
        self.process = process
        self.text = text
        self.admin_url, self.url, key_file = found.groups()
        self.key = Path(key_file).read_text().strip()

    def body(self, **more: object) -> dict[str, object]:
        """Return a chat with the tiny model."""
        messages = [{"role": "user", "content": "hello"}]
        return {"model": "tiny", "messages": messages, "ignore_eos": True, **more}

    @asynccontextmanager
    async def request(self, **more: object) -> AsyncIterator[tuple[int, StreamReader]]:
        """Send a chat; yield its status and its body's stream."""
        async with (
            ClientSession() as session,
            session.post(
                f"{self.url}/v1/chat/completions",
                json=self.body(**more),
                headers={"Authorization": f"Bearer {self.key}"},
            ) as response,
        ):
            yield response.status, response.content

    def wait(self) -> int:
        """Wait for the exit; return the status."""
        return self.process.wait(START_S)

    def stop(self) -> int:
        """Send SIGTERM, wait for the exit and return the status."""
        self.process.terminate()
        return self.wait()


def children(pid: int) -> dict[str, int]:
    """Return the ids of a process's running children by their modules."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if int(fields[1]) == pid and fields[0] != "Z" and b"-m" in words:
                found[words[words.index(b"-m") + 1].decode()] = int(folder.name)
    return found


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Keep a process from running until the end of the block, however that ends."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def serve_command(
    model: Path | str | None, data: Path, settings: Path, program: Sequence[str] = GATEWAY
) -> list[str]:
    """Return the command of a server on free ports. `model`: None for those of the settings."""
    command = [*program, "serve", *([] if model is None else [str(model)])]
    command += ["--config", str(settings), "--data-dir", str(data)]
    return [*command, "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]


def spawn(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] = os.environ,
    folder: Path | None = None,
) -> subprocess.Popen[str]:
    """Start a command that serves, in a folder, without waiting for it; its log goes to a file."""
    with log.open("a") as errors:
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**environment, "OMP_NUM_THREADS": "1"},
            cwd=folder,
        )


@contextmanager
def serving(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] = os.environ,
    folder: Path | None = None,
) -> Iterator[Server]:
    """Run a command that serves, and yield its server when it is ready; kill it afterwards if it
    still runs. Raises AssertionError with its log if it ends."""
    with spawn(command, log, environment, folder) as process:
        try:
            yield Server(process, _read_addresses(process, log))
        finally:
            process.kill()


@contextmanager
def run_server(
    model: Path | None,
    data: Path,
    settings: Path | None = None,
    program: Sequence[str] = GATEWAY,
) -> Iterator[Server]:
    """Run a server as `serving` does, with its log beside its data, and with `SETTINGS` if a file
    has no others."""
    if settings is None:
        settings = data.with_suffix(".toml")
        settings.write_text(SETTINGS)
    command = serve_command(model, data, settings, program)
    with serving(command, data.with_suffix(".log")) as server:
        yield server


def _read_addresses(process: subprocess.Popen[str], log: Path) -> str:
    deadline = Timer(START_S, process.kill)
    deadline.start()
    text = ""
    assert process.stdout is not None
    try:
        while "administrator's key" not in text:
            line = process.stdout.readline()
            assert line, f"the server ended: {text}{log.read_text()}"
            text += line
    finally:
        deadline.cancel()
    return text
