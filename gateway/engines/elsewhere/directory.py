"""Where the replicas of a model are: a list, a file that is followed, or a DNS name.

A directory that cannot be read leaves the last list: a lost directory stops changes alone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from gateway.config import parse_address
from gateway.config.fleet import ReplicaAddress, ReplicaSettings, parse_replicas
from gateway.processes.child_process import Report

READ_EVERY_S: Final = 1.0
RESOLVE_EVERY_S: Final = 5.0

Read = Callable[[], Awaitable[Sequence[ReplicaAddress]]]
OnChange = Callable[[Sequence[ReplicaAddress]], None]


def reader_of(settings: ReplicaSettings) -> tuple[Read, float | None]:
    """Return what reads the present replicas of a model, raising OSError and ValueError, and how
    often to ask it; None: a list never changes."""
    if settings.replicas:
        fixed = parse_replicas(settings.replicas)

        async def read_list() -> Sequence[ReplicaAddress]:
            return fixed

        return read_list, None
    if settings.replicas_file:
        file = Path(settings.replicas_file)

        async def read_file() -> Sequence[ReplicaAddress]:
            try:
                text = await asyncio.to_thread(file.read_text)
                found = parse_replicas(text.splitlines())
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from error
            if not found:
                raise ValueError(f"{file} names no replica; expected lines of NAME=HOST:PORT")
            return found

        return read_file, READ_EVERY_S
    host, port = parse_address(settings.replicas_dns, "replicas_dns")

    async def resolve() -> Sequence[ReplicaAddress]:
        loop = asyncio.get_running_loop()
        places = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [ReplicaAddress("", *one) for one in sorted({place[4][:2] for place in places})]

    return resolve, RESOLVE_EVERY_S


async def follow(settings: ReplicaSettings, on_change: OnChange, report: Report) -> None:
    """Call `on_change` with the replicas, at once and when they have changed, until cancelled."""
    read, every_s = reader_of(settings)
    known: Sequence[ReplicaAddress] | None = None
    problem = ""
    while True:
        try:
            found = await read()
        except (OSError, ValueError) as error:
            if str(error) != problem:
                problem = str(error)
                report("replicas_unknown", {"reason": problem})
        else:
            problem = ""
            if found != known:
                known = found
                on_change(found)
        if every_s is None:
            return
        await asyncio.sleep(every_s)
