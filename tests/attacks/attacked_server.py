"""A server under attack: `trunkline serve` as a process, its tenants, and what it uses.

The engine is real. The model is tiny unless a test names another one. Calls block: attackers are
threads (`flood`) or bare sockets (`AttackedServer.connect`), and the quiet tenant is a process of
its own (`tests.attacks.probe`), so that no attacker's Python slows the measurement down.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.server_process import GATEWAY, SETTINGS, Server, serve_command, serving

ANSWER_S = 60.0
"""The longest that a client of an attack waits for an answer, in seconds."""


@dataclass(frozen=True)
class Answer:
    """An HTTP response, read whole."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The code of an error in OpenAI's shape; empty if the body has none."""
        with contextlib.suppress(ValueError):
            error = json.loads(self.body).get("error")
            return str(error.get("code")) if isinstance(error, dict) else ""
        return ""


class AttackedServer:
    """A server process with its data directory, and an operator that makes tenants."""

    def __init__(
        self,
        folder: Path,
        model: str,
        settings: str = "",
        *,
        data: Path | None = None,
        descriptors: int = 0,
    ) -> None:
        """Prepare a server; `start` runs it.

        `settings`: TOML beside the tests' own [engine] table, or a whole file that has one.
        `data`: a data directory with a fetched model. `descriptors`: the process's soft limit.
        """
        self.model = Path(model).name
        self.log = folder / "server.log"
        self._data = folder / "data"
        self._data.mkdir(mode=0o700, parents=True)
        if data is not None:
            (self._data / "models").symlink_to((data / "models").resolve())
        self._settings = folder / "settings.toml"
        self._settings.write_text(settings if "[engine]" in settings else settings + SETTINGS)
        self._source = model
        self._descriptors = descriptors
        self._running = contextlib.ExitStack()
        self._server: Server | None = None

    def start(self) -> None:
        """Start the process and wait until it is ready. Raises AssertionError if it ends."""
        limit = ("prlimit", f"--nofile={self._descriptors}:") if self._descriptors else ()
        program = (*limit, *GATEWAY)
        command = serve_command(self._source, self._data, self._settings, program)
        self._server = self._running.enter_context(serving(command, self.log))

    def stop(self) -> int:
        """Stop the server and return its exit status. Kills it, and raises TimeoutExpired, if it
        does not end."""
        with self._running:
            return self.server.stop()

    @property
    def server(self) -> Server:
        """The last process that was started."""
        assert self._server is not None, "the server was not started"
        return self._server

    @property
    def port(self) -> int:
        """The public listener's."""
        return int(self.server.url.rpartition(":")[2])

    # -- the operator ---------------------------------------------------------------------------

    def tenant(self, name: str, **settings: object) -> str:
        """Create a tenant with these settings of the admin API, and return a new key of it."""
        self._administer("/admin/v1/tenants", {"name": name, **settings})
        return str(self._administer(f"/admin/v1/tenants/{name}/keys", {})["key"])

    def _administer(self, path: str, body: object) -> Any:
        key = (self._data / "admin.key").read_text().strip()
        port = int(self.server.admin_url.rpartition(":")[2])
        answer = self.ask(key, path, body, port=port)
        assert answer.status in (200, 201), answer
        return json.loads(answer.body)

    # -- clients --------------------------------------------------------------------------------

    def chat(self, text: str = "hello", **more: object) -> dict[str, object]:
        """Return a greedy chat of one token that does not stop early."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }

    def ask(
        self,
        key: str,
        path: str,
        body: object = None,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        port: int = 0,
    ) -> Answer:
        """Send one request on a connection of its own. Raises OSError and HTTPException."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        if key:
            sent["Authorization"] = f"Bearer {key}"
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=ANSWER_S)
        with contextlib.closing(connection):
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())

    def connect(self, address: str = "127.0.0.1") -> socket.socket:
        """Open a bare connection from an address of the loopback network."""
        return socket.create_connection(
            ("127.0.0.1", self.port), timeout=ANSWER_S, source_address=(address, 0)
        )

    def head(self, key: str, path: str, *lines: str, method: str = "POST") -> bytes:
        """Return the bytes of a request's head, to which the caller adds a body."""
        head = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
        if key:
            head.append(f"Authorization: Bearer {key}")
        return "\r\n".join([*head, *lines]).encode("latin-1") + b"\r\n\r\n"

    # -- what the engine has done ---------------------------------------------------------------

    def engine_total(self, name: str) -> float:
        """Return a counter of the engine, such as `steps`, as of half a second ago at the most."""
        port = int(self.server.admin_url.rpartition(":")[2])
        text = self.ask("", "/metrics", method="GET", port=port).body.decode()
        line = f"trunkline_engine_{name}_total "
        return float(next(one for one in text.splitlines() if one.startswith(line)).split()[1])

    # -- what the gateway's process uses --------------------------------------------------------

    @property
    def pid(self) -> int:
        """The gateway's process id."""
        return self.server.process.pid

    def resident_mib(self) -> float:
        """Return the gateway's resident memory in MiB."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20

    def open_descriptors(self) -> int:
        """Return the number of the gateway's open descriptors."""
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())

    def log_events(self, event: str) -> list[dict[str, Any]]:
        """Return the log lines of one event."""
        lines = map(json.loads, self.log.read_text().splitlines())
        return [line for line in lines if line.get("event") == event]


@contextlib.contextmanager
def flood(act: Callable[[], object], threads: int = 4) -> Iterator[list[object]]:
    """Call `act` again and again in threads; yield the list of what it returned.

    The threads run at idle priority, as if the clients were elsewhere: what a quiet tenant then
    waits for is the server, not the attacker's Python on the same cores.

    A connection that the server closes is part of an attack: OSError and HTTPException are kept as
    results. Any other error ends the test when the block is left.
    """
    is_over = threading.Event()
    results: list[object] = []
    faults: list[Exception] = []

    def repeat() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread
        while not is_over.is_set():
            try:
                results.append(act())
            except (OSError, http.client.HTTPException) as error:
                results.append(error)
            except Exception as error:
                faults.append(error)
                return

    running = [threading.Thread(target=repeat, daemon=True) for _ in range(threads)]
    for one in running:
        one.start()
    try:
        yield results
    finally:
        is_over.set()
        for one in running:
            one.join(ANSWER_S)
    assert not faults, faults
