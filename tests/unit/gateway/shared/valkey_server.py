"""A Redis server of Debian for tests, on a port of its own."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")


class ValkeyServer:
    """A server that tests may kill, start again and empty."""

    def __init__(self, folder: Path, *more: str) -> None:
        if PROGRAM is None:
            pytest.skip("no redis-server here: apt-get install redis-server")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.folder, self.more = folder, more
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.socket_url = f"unix://{folder}/valkey.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        assert PROGRAM is not None
        options = f"--port {self.port} --bind 127.0.0.1 --unixsocket valkey.sock"
        self._process = subprocess.Popen(
            [PROGRAM, *options.split(), "--save", "", *self.more],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if b"ready to accept" in line.lower():
                return
        raise AssertionError("redis-server did not start")

    def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None
