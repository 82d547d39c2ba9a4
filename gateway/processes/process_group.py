"""Keeps the processes of a gateway running: starts each, starts it again, and ends them together.

The processes listen on one port, among which the kernel deals out connections; the group only
reserves it. A process that dies takes its own connections with it, and no engine: its requests are
settled as those of any gateway that died.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from gateway.config import Config, ConfigError, format_address
from gateway.processes.child_process import ChildProcess, Report, RestartPolicy
from gateway.processes.member import Announcement, read_announcement
from tenancy.storage.backends import is_server

RESTARTS = RestartPolicy((0.1, 0.5, 1.0, 2.0, 5.0), first_starts_max=1)
"""A process that never served has a fault that another start would not cure."""
END_S = 15.0
"""Seconds beyond the drain for a process to end."""


def check_processes(config: Config) -> None:
    """Raise ConfigError for several processes without what they share."""
    count = config.server.processes
    if count == 1:
        return
    if not is_server(config.tenancy.database):
        raise ConfigError(
            f"server.processes = {count} needs a PostgreSQL database: tenancy.database is a file,"
            " which one process writes; expected postgresql://USER@HOST/NAME"
        )
    if not config.fleet.shared:
        raise ConfigError(
            f"server.processes = {count} needs fleet.shared: without it each process has the limits"
            " of tenants for itself; expected the address of a Valkey, such as"
            " redis://127.0.0.1:6379/0"
        )
    for model in config.served_models():
        if not model.is_elsewhere:
            raise ConfigError(
                f"server.processes = {count} needs engines that the processes share: the model"
                f" {model.name or model.source} has no replicas; expected those of"
                " `trunkline engine serve`, such as replicas = ['e0=127.0.0.1:7443']"
            )


def reserve_port(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen, so that processes may share its port.

    `port`: 0 for a free one. Raises OSError.
    """
    ((family, kind, protocol, _, place), *_) = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(place)
    except BaseException:
        bound.close()
        raise
    return bound


class ProcessGroup:
    """The processes of a gateway. Belongs to one event loop."""

    def __init__(self, commands: Sequence[Sequence[str]], report: Report) -> None:
        """`commands`: of each process."""
        self.serving: list[Announcement | None] = [None] * len(commands)
        self._ends: list[socket.socket | None] = [None] * len(commands)
        self._children = [
            ChildProcess(
                *("gateway", command, RESTARTS, partial(_report, report, number)),
                partial(self._run, number),
                variables=("*",),
            )
            for number, command in enumerate(commands)
        ]

    @property
    def pids(self) -> list[int]:
        """The ids of the running processes; 0 for one that is started again."""
        return [child.pid for child in self._children]

    async def open(self) -> None:
        """Start all; return when all serve. Raises StartLimit if one ends before."""
        for child in self._children:
            child.start()
        await asyncio.gather(*(child.wait_ready() for child in self._children))

    def signal(self, number: int) -> None:
        """Send a signal to each process."""
        for pid in self.pids:
            if pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    async def close(self, timeout_s: float) -> bool:
        """Let all drain for `timeout_s`, at once, then end them. Returns whether all ended well."""
        for child in self._children:
            await child.stop()
        for end in self._ends:
            if end is not None:
                end.close()
        ended = await asyncio.gather(*(child.end(timeout_s + END_S) for child in self._children))
        return all(status in (0, None) for status in ended)

    async def _run(self, number: int) -> str:
        """Run one process until it ends; see `ChildProcess`."""
        child = self._children[number]
        end = self._ends[number] = await child.spawn()
        end.setblocking(False)
        serving = await read_announcement(end)
        if serving is None:
            return self._lose(number, "it ended before it served")
        self.serving[number] = serving
        child.set_ready(admin=serving.urls[1])
        await asyncio.get_running_loop().sock_recv(end, 1)
        return self._lose(number, "it ended")

    def _lose(self, number: int, reason: str) -> str:
        end, self._ends[number] = self._ends[number], None
        if end is not None:
            end.close()
        return reason


def member_commands(
    argv: Sequence[str], listen: str, admin: tuple[str, int], count: int
) -> list[list[str]]:
    """Return the command of each process: this one's, on `listen`, with an admin listener of its
    own on the ports from that of `admin` on; of port 0, on a free one."""
    host, port = admin
    return [
        [
            *(sys.executable, "-m", "gateway", *argv, "--listen", listen),
            *("--admin-listen", format_address(host, port + number if port else 0)),
            *("--process", str(number)),
        ]
        for number in range(count)
    ]


def _report(report: Report, number: int, event: str, facts: dict[str, object]) -> None:
    report(event, {"process": number, **facts})
