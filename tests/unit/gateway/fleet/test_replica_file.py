"""The gateway's file of replicas: what changes it, and what leaves it as it is."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.fleet import ReplicaSettings, parse_replicas
from gateway.engines.elsewhere.directory import reader_of
from gateway.fleet.errors import FleetError
from gateway.fleet.replica_file import ReplicaFile, ReplicaMove, Sighting, follow_cluster, places
from gateway.fleet.seats import KeeperReport

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> None:
    """Disabled here: these tests read the file themselves."""


def keeper(name: str, address: str = "") -> KeeperReport:
    return KeeperReport(name, "ready" if address else "waiting", address)


class Reports:
    """What was reported; `wait` ends at an event."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self._told = asyncio.Event()

    def __call__(self, event: str, facts: dict[str, Any]) -> None:
        self.told.append((event, facts))
        self._told.set()

    def moves(self) -> list[tuple[str, str, str]]:
        return [
            (facts["replica"], facts["from"], facts["to"])
            for event, facts in self.told
            if event == "replica_moved"
        ]

    async def wait(self, event: str, times: int = 1) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while sum(one == event for one, _ in self.told) < times:
                await self._told.wait()
                self._told.clear()


def test_a_moved_replica_is_one_line_of_the_log(tmp_path: Path) -> None:
    """The others are as they were; what says no address is where it was."""
    file = tmp_path / "replicas"
    kept = ReplicaFile(file)
    begun = kept.take([keeper("e0", "10.0.0.1:7443"), keeper("e1", "10.0.0.2:7443")])
    moved = kept.take([keeper("e0"), keeper("e1", "[2001:db8::5]:7443")])

    assert begun == [ReplicaMove("e0", "", "10.0.0.1:7443"), ReplicaMove("e1", "", "10.0.0.2:7443")]
    assert moved == [ReplicaMove("e1", "10.0.0.2:7443", "[2001:db8::5]:7443")]
    assert [str(one) for one in parse_replicas(file.read_text().splitlines())] == [
        "e0=10.0.0.1:7443",
        "e1=[2001:db8::5]:7443",
    ]


async def test_a_gateway_reads_what_was_written(tmp_path: Path) -> None:
    """It is the format of `replicas_file`."""
    file = tmp_path / "replicas"
    ReplicaFile(file).take([keeper("e0", "10.0.0.1:7443")])
    read, _ = reader_of(ReplicaSettings(replicas_file=str(file)))

    assert [str(one) for one in await read()] == ["e0=10.0.0.1:7443"]


def test_no_names_and_nothing_new_leave_the_file(tmp_path: Path) -> None:
    """A cluster that has begun anew knows no names; the engines may run on."""
    file = tmp_path / "replicas"
    file.write_text("# by hand\ne0=10.0.0.1:7443\n")
    kept = ReplicaFile(file)
    seen: list[list[KeeperReport]] = [[], [keeper("e0")], [keeper("e0", "10.0.0.1:7443")]]

    assert [kept.take(keepers) for keepers in seen] == [[], [], []]
    assert file.read_text() == "# by hand\ne0=10.0.0.1:7443\n"


def test_a_replica_that_was_ended_goes(tmp_path: Path) -> None:
    """Its name is no longer the cluster's."""
    file = tmp_path / "replicas"
    file.write_text("e0=10.0.0.1:7443\ne1=10.0.0.2:7443\n")
    moved = ReplicaFile(file).take([keeper("e0")])

    assert moved == [ReplicaMove("e1", "10.0.0.2:7443", "")]
    assert "e1" not in file.read_text()


def test_a_file_that_cannot_be_replaced_stays(tmp_path: Path) -> None:
    """And nothing beside it is left over; the next time it is tried again."""
    folder = tmp_path / "list"
    folder.mkdir()
    file = folder / "replicas"
    file.write_text("e0=10.0.0.1:7443\n")
    kept = ReplicaFile(file)
    file.unlink()
    file.mkdir()  # a rename onto it fails, for root as well
    with pytest.raises(OSError, match=r"replicas"):
        kept.take([keeper("e0", "10.0.0.9:7443")])
    left = [one.name for one in folder.iterdir()]
    file.rmdir()
    moved = kept.take([keeper("e0", "10.0.0.9:7443")])

    assert left == ["replicas"]
    assert moved == [ReplicaMove("e0", "10.0.0.1:7443", "10.0.0.9:7443")]


def test_a_file_that_is_no_list_is_not_overwritten(tmp_path: Path) -> None:
    """It may be another one, named by mistake."""
    file = tmp_path / "notes"
    file.write_text("dear diary\n")

    with pytest.raises(FleetError, match=r"notes: 'dear diary': expected NAME=HOST:PORT"):
        ReplicaFile(file)


NAMES, PLACES = ("a", "b", "c"), ("h:1", "h:2", "h:3", "h:4")


@given(
    known=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(PLACES)),
    told=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(("", *PLACES))),
)
def test_no_two_replicas_have_one_address(known: dict[str, str], told: dict[str, str]) -> None:
    """Nor is there a name that the cluster does not have; what a keeper says is believed."""

    def once(by_name: Mapping[str, str]) -> dict[str, str]:
        return {name: place for place, name in {v: k for k, v in by_name.items()}.items()}

    known = once(known)
    told = once({name: place for name, place in told.items() if place}) | {
        name: "" for name, place in told.items() if not place
    }
    found = places(known, [keeper(name, place) for name, place in told.items()])

    assert len(set(found.values())) == len(found)
    assert found.keys() <= told.keys()
    assert all(found[name] == place for name, place in told.items() if place)
    assert all(found[name] == known[name] for name in found if not told[name])


# -- lookouts -------------------------------------------------------------------------------------


def lookout(*lines: str, then: str = "") -> list[str]:
    """Return the command of one that prints these lines, and then does something."""
    text = "".join(f"{line}\n" for line in lines)
    return [sys.executable, "-c", f"import sys, time\nprint({text!r}, end='', flush=True)\n{then}"]


def line_of(*keepers: KeeperReport, problem: str = "") -> str:
    return msgspec.json.encode(Sighting(keepers, problem)).decode()


STAYS = "time.sleep(600)"


@asynccontextmanager
async def following(command: list[str], file: Path) -> AsyncIterator[Reports]:
    reports = Reports()
    follows = asyncio.create_task(follow_cluster(command, ReplicaFile(file), reports))
    try:
        yield reports
    finally:
        follows.cancel()
        await asyncio.gather(follows, return_exceptions=True)


async def test_a_lookout_that_ends_changes_nothing_and_is_replaced(
    tmp_path: Path, forward: Callable[[float], None]
) -> None:
    """Ray ends it when the head is lost. The loss is one line, however often it is tried."""
    file = tmp_path / "replicas"
    command = lookout(line_of(keeper("e0", "10.0.0.1:7443")), then="sys.exit(1)")
    async with following(command, file) as reports:
        await reports.wait("cluster_lost")
        before = file.read_bytes(), file.stat().st_mtime_ns
        forward(60.0)
        await reports.wait("cluster_reached", 2)
        after = file.read_bytes(), file.stat().st_mtime_ns

    assert before == after
    assert reports.moves() == [("e0", "", "10.0.0.1:7443")]


async def test_why_a_cluster_cannot_be_asked_is_said_once(tmp_path: Path) -> None:
    """The file stays, until the cluster answers at the third try."""
    file, tries = tmp_path / "replicas", tmp_path / "tries"
    file.write_text("e0=10.0.0.1:7443\n")
    lost, found = line_of(problem="no way"), line_of(keeper("e0", "10.0.0.9:7443"))
    program = (
        "import pathlib, time\n"
        f"tries = pathlib.Path({str(tries)!r})\n"
        "before = len(tries.read_text()) if tries.exists() else 0\n"
        "tries.write_text('x' * (before + 1))\n"
        f"print({lost!r} if before < 2 else {found!r}, flush=True)\n"
        "time.sleep(600)"
    )
    async with following([sys.executable, "-c", program], file) as reports:
        await reports.wait("replica_moved")

    assert [event for event, _ in reports.told] == [
        "cluster_lost",
        "cluster_reached",
        "replica_moved",
    ]
    assert reports.told[0][1] == {"reason": "no way"}
    assert reports.moves() == [("e0", "10.0.0.1:7443", "10.0.0.9:7443")]


async def test_noise_of_a_lookout_is_a_lost_one(tmp_path: Path) -> None:
    """What is no sighting ends it, not the watch."""
    file = tmp_path / "replicas"
    async with following(lookout("[noise]", then=STAYS), file) as reports:
        await reports.wait("cluster_lost")

    assert reports.told[0][1]["reason"].startswith("the lookout said '[noise]'")
    assert not file.exists()


async def test_the_end_of_the_watch_ends_its_lookout(tmp_path: Path) -> None:
    """No process is left; the lookout tells its own id as a keeper's address."""
    file = tmp_path / "replicas"
    program = (
        "import os, sys, time\n"
        f"print({line_of(keeper('e0', 'h:PID'))!r}.replace('PID', str(os.getpid())), flush=True)\n"
        "time.sleep(600)"
    )
    async with following([sys.executable, "-c", program], file) as reports:
        await reports.wait("replica_moved")
    ((_, _, place),) = reports.moves()
    with pytest.raises(ProcessLookupError):
        os.kill(int(place.removeprefix("h:")), 0)
