"""The file that names a model's replicas, kept up to date with what keepers say of themselves.

A gateway follows the file (`replicas_file`). It is replaced as a whole. Whatever cannot be told, an
answer that is late or a cluster without its head, leaves it as it is: a replica goes from the file
when the cluster no longer has its name, and moves when it says another address itself.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from gateway.config.fleet import parse_replica, parse_replicas
from gateway.fleet.errors import FleetError
from gateway.fleet.seats import KeeperReport
from gateway.processes.child_process import Report

PAUSES_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses before a cluster is asked again after it was lost; the last one repeats."""
LINE_BYTES_MAX: Final = 2**20
HEADING: Final = "# Written by trunkline fleet watch.\n"


class Sighting(Struct, frozen=True):
    """What a cluster has, as `lookout` prints it. `problem`: why it cannot be asked."""

    keepers: tuple[KeeperReport, ...] = ()
    problem: str = ""


class ReplicaMove(Struct, frozen=True):
    """A replica that is at another address; "" for none."""

    replica: str
    before: str
    after: str

    def facts(self) -> dict[str, object]:
        """Return what a log line has of it."""
        return {"replica": self.replica, "from": self.before, "to": self.after}


class ReplicaFile:
    """The file, and the addresses by name that it has."""

    def __init__(self, file: Path) -> None:
        """Read what is there. Raises FleetError for a file that is no list of replicas."""
        self._file = file
        self._places: Mapping[str, str] = {}
        try:
            known = parse_replicas(file.read_text().splitlines())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise FleetError(f"--file {file}: {error}") from error
        self._places = {one.name: str(one).partition("=")[2] for one in known}

    def take(self, keepers: Sequence[KeeperReport]) -> list[ReplicaMove]:
        """Change the file if these keepers are elsewhere; return each change. Raises OSError.
        Blocks."""
        found, known = places(self._places, keepers), self._places
        if not found or found == known:
            return []
        lines = [str(parse_replica(f"{name}={place}")) for name, place in sorted(found.items())]
        _write_whole(self._file, HEADING + "".join(f"{line}\n" for line in lines))
        self._places = found
        return [
            ReplicaMove(name, known.get(name, ""), found.get(name, ""))
            for name in sorted({*found, *known})
            if known.get(name) != found.get(name)
        ]


def places(known: Mapping[str, str], keepers: Sequence[KeeperReport]) -> Mapping[str, str]:
    """Return where the replicas are, by name. A keeper that says no address is where it was known
    to be, unless another one says that it is there now."""
    told = {one.name: one.address for one in keepers if one.address}
    taken = set(told.values())
    kept = {
        one.name: known[one.name]
        for one in keepers
        if one.name not in told and one.name in known and known[one.name] not in taken
    }
    return told | kept


def _write_whole(file: Path, text: str) -> None:
    """Replace a file: who reads it sees the old text or the new one. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(descriptor, "w") as opened:
            os.fchmod(descriptor, 0o644)  # a gateway may be another user
            opened.write(text)
            opened.flush()
            os.fsync(descriptor)
        Path(name).replace(file)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


async def follow_cluster(command: Sequence[str], file: ReplicaFile, report: Report) -> None:
    """Keep the file up to date until cancelled, with what lookouts print, one after another: Ray
    ends a process whose cluster has lost its head.

    `command`: starts a lookout, which prints a line for each `Sighting`.
    """
    problem, failures = "", 0
    while True:
        lookout = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=LINE_BYTES_MAX,
        )
        reason = "the connection ended"
        try:
            assert lookout.stdout is not None
            async for line in lookout.stdout:
                sighting = _sighting(line)
                if reason := sighting.problem:
                    break
                if problem or not failures:
                    report("cluster_reached", {"keepers": len(sighting.keepers)})
                problem, failures = "", 1
                try:
                    for move in await asyncio.to_thread(file.take, sighting.keepers):
                        report("replica_moved", move.facts())
                except OSError as error:
                    report("replica_file_failed", {"reason": error.strerror or str(error)})
                reason = "the connection ended"
        finally:
            with suppress(ProcessLookupError):
                lookout.kill()
            await lookout.wait()
        if reason != problem:
            report("cluster_lost", {"reason": reason})
            problem = reason
        await asyncio.sleep(PAUSES_S[min(failures, len(PAUSES_S) - 1)])
        failures += 1


def _sighting(line: bytes) -> Sighting:
    try:
        return msgspec.json.decode(line, type=Sighting)
    except msgspec.DecodeError:
        text = line.decode(errors="replace").strip()
        return Sighting(problem=f"the lookout said {text[:80]!r}; expected how keepers are")


def lookout_command(address: str) -> list[str]:
    """Return the command of a lookout over a Ray cluster."""
    return [sys.executable, "-m", "gateway.fleet.lookout", address]
