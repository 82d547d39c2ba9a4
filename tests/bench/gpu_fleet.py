"""A fleet on this machine, for `tests.bench.gpu_http`: an engine for each GPU, as `trunkline engine
serve` keeps it, several processes of a gateway with what they share, and what these cost.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from engine.signals import handle_signals
from gateway.config import Config
from gateway.engines.elsewhere.certificates import make_certificates
from gateway.engines.keeper import ListeningSocket
from gateway.fleet.keeping import KeptEngine, keep_engine, open_listener
from gateway.observability.logging import LogLines
from gateway.processes.process_group import ProcessGroup, reserve_port
from tenancy.types import wall_ms
from tests.bench.results import print_line
from tests.unit.gateway.shared.valkey_server import ValkeyServer
from tests.unit.tenancy.storage.postgres_server import Server as PostgresServer

FIRST_PORT = 18_490


def addresses(count: int) -> tuple[str, ...]:
    """Return the settings `model.replicas` of so many engines."""
    return tuple(f"e{number}=127.0.0.1:{FIRST_PORT + number}" for number in range(count))


def certify(data: Path, count: int) -> None:
    """Make the certificates of a gateway and its engines, in `data`."""
    holders = ["gateway/g0", *(f"engine/e{number}" for number in range(count))]
    make_certificates(data / "fleet", holders)


def keep(config: Config, number: int) -> None:
    """Keep an engine of the model in the data directory, in its own process, until SIGTERM."""
    name = f"e{number}"

    async def run() -> None:
        stop = asyncio.Event()
        with (
            open_listener("127.0.0.1", FIRST_PORT + number) as end,
            handle_signals({signal.SIGTERM: stop.set}),
        ):
            tls = config.data / "fleet" / f"engine-{name}"
            listening = ListeningSocket(end.fileno(), name, tls)
            log = LogLines(sys.stderr.fileno(), wall_ms)
            kept = KeptEngine(time.monotonic)
            await keep_engine(config, config.data / "model", listening, kept, stop, log)
            log.close()

    asyncio.run(run())


@contextmanager
def shared_services(folder: Path) -> Iterator[tuple[str, str]]:
    """Run PostgreSQL and Valkey; give the address of each."""
    valkey = ValkeyServer(folder)
    try:
        with closing(PostgresServer()) as postgres:
            yield postgres.url(postgres.database()), valkey.socket_url
    finally:
        valkey.kill()


def keep_gateways(command: Sequence[str], port: int, count: int) -> None:
    """Keep so many processes of a gateway on a port until SIGTERM. `command`: of a process, without
    its number."""

    async def run() -> None:
        stop, log = asyncio.Event(), LogLines(sys.stderr.fileno(), wall_ms)
        commands = [[*command, "--process", str(number)] for number in range(count)]
        with (
            closing(log),
            closing(reserve_port("127.0.0.1", port)),
            handle_signals({signal.SIGTERM: stop.set}),
        ):
            group = ProcessGroup(commands, log)
            try:
                await group.open()
                print_line("ready")
                await stop.wait()
            finally:
                await group.close(10.0)

    asyncio.run(run())


class EngineProcesses:
    """The keepers of the engines. Ends them on leaving."""

    def __init__(self, command: Sequence[str], count: int) -> None:
        """`command`: of a keeper, without its engine's number."""
        self._count = count
        self._processes = [
            subprocess.Popen([*command, "--engine", str(number)]) for number in range(count)
        ]

    def __enter__(self) -> EngineProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(60)

    def wait_ready(self, admin_url: str, timeout_s: float) -> None:
        """Return when a process of the gateway is connected to all of them. Raises TimeoutError."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            with urllib.request.urlopen(f"{admin_url}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
            ready = [one for one in lines if one.startswith("trunkline_replica_ready{")]
            if sum(float(one.rsplit(" ", 1)[1]) for one in ready) == self._count:
                return
            if any(process.poll() is not None for process in self._processes):
                raise RuntimeError("an engine has ended; its log is above")
            time.sleep(0.5)
        raise TimeoutError(f"not all of {self._count} engines were ready after {timeout_s} s")


def moved(admin_url: str) -> dict[str, str]:
    """Return what a process of the gateway says of prompts apart and of fetches."""
    with urllib.request.urlopen(f"{admin_url}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    words = "apart", 'level="peer"'
    found = (one.rsplit(" ", 1) for one in lines if any(word in one for word in words))
    return {name: value for name, value in found if not name.startswith("#")}


def gateway_pids(server: int, processes: int) -> list[int]:
    """Return the ids of a gateway's processes, without those of ledger and analytics. `server`: the
    one process, or the keeper of several."""
    if processes == 1:
        return [server]
    children = Path(f"/proc/{server}/task/{server}/children").read_text()
    return [int(pid) for pid in children.split()]
