"""Engines on a Ray cluster of two nodes: killed, lost, drained, and without the cluster's head.

Real keepers and engines of a tiny model, a real gateway over the file that `fleet watch` writes.
It is one test, since a cluster takes half a minute to start, and its head dies once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.config.fleet import parse_replicas
from gateway.fleet.replica_file import Sighting, lookout_command
from gateway.fleet.seats import KeeperReport
from tests.e2e.ray_cluster import ROOT, ClusterOfRay, ray_cluster
from tests.models import tiny_config, write_folder
from tests.ports import free_ports
from tests.server_process import Server, serve_command, serving

pytestmark = [pytest.mark.slow, pytest.mark.ray]

PATIENCE_S = 120.0
NODES = ("127.0.0.2", "127.0.0.3")
TOKENS = 1_500
SETTINGS = """
[engine]
threads = 1
kv_blocks = 1024
device = "cpu"
"""


async def until(what: str, found: Callable[[], Any]) -> Any:
    """Return the first true value of a function; fail with what it was to be."""
    began_s = time.monotonic()
    while not (value := found()):
        assert time.monotonic() - began_s < PATIENCE_S, f"never: {what}"
        await asyncio.sleep(0.05)
    return value


class FleetOfRay:
    """The commands on a cluster, and the file that the watch writes."""

    def __init__(self, cluster: ClusterOfRay, folder: Path, ports: str) -> None:
        self.cluster, self.folder, self.ports = cluster, folder, ports
        self.data = folder / "data"
        self.file = folder / "replicas"
        self.watch_log, self.seen = folder / "watch.log", folder / "seen"
        self.settings = folder / "host.toml"
        self.settings.write_text(SETTINGS)
        self.model = write_folder(folder / "tiny", tiny_config(context=4096))
        self.said("init", cluster=False)

    def command(self, action: str, *arguments: str, cluster: bool = True) -> list[str]:
        where = ["--address", self.cluster.address] if cluster else []
        program = [sys.executable, "-m", "gateway", "fleet", action]
        return [*program, *arguments, *where, "--data-dir", str(self.data)]

    def said(self, action: str, *arguments: str, cluster: bool = True, status: int = 0) -> str:
        """Run a command of `trunkline fleet`; return what it says."""
        done = subprocess.run(
            self.command(action, *arguments, cluster=cluster),
            env=self.cluster.environment,
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            timeout=PATIENCE_S,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stderr if status else done.stdout

    def up(self, *arguments: str, status: int = 0) -> str:
        """Ask for engines of the tiny model."""
        host = ["--host-config", str(self.settings), "--ports", self.ports]
        return self.said("up", *arguments, str(self.model), *host, status=status)

    @contextmanager
    def looks(self) -> Iterator[None]:
        """Have a lookout say once a second how the keepers are."""
        with self.seen.open("wb") as seen:
            process = subprocess.Popen(
                lookout_command(self.cluster.address),
                env=self.cluster.environment,
                stdout=seen,
                cwd=ROOT,
            )
        try:
            yield
        finally:
            process.kill()
            process.wait()

    def keepers(self) -> dict[str, KeeperReport]:
        """Return what the keepers have said last, by name."""
        *lines, _ = self.seen.read_bytes().split(b"\n")
        if not lines:
            return {}
        sighting = msgspec.json.decode(lines[-1], type=Sighting)
        assert not sighting.problem
        assert "failed" not in {one.state for one in sighting.keepers}, sighting
        return {one.name: one for one in sighting.keepers}

    async def ready(self, *names: str, but: str = "") -> dict[str, KeeperReport]:
        """Return the keepers as soon as they are these, all ready, none with the epoch `but`."""

        def found() -> dict[str, KeeperReport] | None:
            there = self.keepers()
            is_so = there.keys() == set(names) and all(
                one.state == "ready" and one.epoch != but for one in there.values()
            )
            return there if is_so else None

        there: dict[str, KeeperReport] = await until(f"{names} ready", found)
        return there

    def listed(self) -> dict[str, str]:
        """Return the addresses in the file, by name."""
        text = self.file.read_text() if self.file.exists() else ""
        return {one.name: str(one).partition("=")[2] for one in parse_replicas(text.splitlines())}

    async def in_file(self, keepers: dict[str, KeeperReport]) -> None:
        """Wait until the file has these keepers and no others."""
        wanted = {name: one.address for name, one in keepers.items()}
        await until(f"{wanted} in the file", lambda: self.listed() == wanted)

    @contextmanager
    def watch(self) -> Iterator[subprocess.Popen[str]]:
        """Run the watch, which gives up on a lost head after two seconds rather than sixty."""
        soon = {"RAY_gcs_rpc_server_reconnect_timeout_s": "2"}
        with self.watch_log.open("w") as log:
            process = subprocess.Popen(
                self.command("watch", "--file", str(self.file)),
                env=self.cluster.environment | soon,
                stderr=log,
                text=True,
                cwd=ROOT,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FleetOfRay]:
    """Yield a fleet's commands over a cluster of two nodes with two GPUs each, in name."""
    with ray_cluster(2, 2) as cluster, free_ports(1) as (port,):
        # A kept port begins the range: the next ones may be another test's, and are passed over.
        last = min(port + 40, 65_535)
        fleet = FleetOfRay(cluster, tmp_path, f"{port}-{last}")
        cluster.wait()
        yield fleet


@asynccontextmanager
async def gateway_of(fleet: FleetOfRay) -> AsyncIterator[Server]:
    """Run a gateway over the file."""
    settings = fleet.folder / "gateway.toml"
    text = SETTINGS + f'[model]\nreplicas_file = "{fleet.file}"\n'
    settings.write_text(text)
    command = serve_command(fleet.model, fleet.data, settings)
    with serving(command, fleet.folder / "gateway.log") as server:
        yield server


async def answer(server: Server, tokens: int = TOKENS) -> int:
    """Return how many tokens a streamed answer has; fails if it is not whole."""
    async with server.request(
        stream=True, max_tokens=tokens, stream_options={"include_usage": True}
    ) as (status, content):
        body = (await content.read()).decode()
    assert status == 200, body
    lines = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", body[-500:]
    usage = json.loads(lines[-2])["usage"]
    return int(usage["completion_tokens"])


def logged(file: Path, event: str) -> list[dict[str, Any]]:
    """Return the lines of a log with an event."""
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def check_refusals(fleet: FleetOfRay) -> None:
    """What a cluster has no room for is one line that says what would be right."""
    many = fleet.up("--replicas", "5", status=1)

    assert many == (
        "trunkline: 5 engines of 1 GPUs each: the cluster's nodes have 2, 2; expected at most 4, or"
        " more nodes\n"
    )
    assert fleet.keepers() == {}


def check_token(fleet: FleetOfRay) -> None:
    """A cluster with a token is seen to ask for it: off loopback no other is used."""
    program = (
        "import sys; from gateway.fleet.ray_keeper import RayCluster\n"
        "sys.exit(RayCluster(sys.argv[1]).takes_anyone())"
    )
    command = [sys.executable, "-c", program, fleet.cluster.address]
    done = subprocess.run(command, env=fleet.cluster.environment, cwd=ROOT, check=False)

    assert done.returncode == 0


async def check_up_twice(fleet: FleetOfRay, before: dict[str, KeeperReport]) -> None:
    """The second time starts nothing and changes nothing."""
    said = fleet.up("--replicas", "2")
    status = fleet.said("status")
    after = await fleet.ready("e0", "e1")

    assert said == "e0: is there\ne1: is there\n"
    assert [(one.pid, one.epoch, one.address, one.node) for one in after.values()] == [
        (one.pid, one.epoch, one.address, one.node) for one in before.values()
    ]
    for line, one in zip(status.splitlines()[1:], after.values(), strict=True):
        assert line.split()[:4] == [one.name, "ready", one.node, one.address]


async def check_killed(
    fleet: FleetOfRay, before: dict[str, KeeperReport]
) -> dict[str, KeeperReport]:
    """Ray starts a killed keeper again, and the file has where it is now."""
    os.kill(before["e0"].pid, signal.SIGKILL)
    after = await fleet.ready("e0", "e1", but=before["e0"].epoch)
    await fleet.in_file(after)

    assert after["e0"].pid != before["e0"].pid
    assert after["e1"].pid == before["e1"].pid
    return after


async def check_lost_node(
    fleet: FleetOfRay, before: dict[str, KeeperReport]
) -> dict[str, KeeperReport]:
    """The name of a lost node is on the other one, and in the file."""
    (lost,) = [name for name, one in before.items() if one.node == NODES[1]]
    fleet.cluster.lose(NODES[1])
    after = await fleet.ready("e0", "e1", but=before[lost].epoch)
    await fleet.in_file(after)

    assert after[lost].node == NODES[0]
    moved = logged(fleet.watch_log, "replica_moved")[-1]
    assert moved["replica"] == lost
    assert (moved["from"], moved["to"]) == (before[lost].address, after[lost].address)
    return after


async def check_drain(fleet: FleetOfRay, server: Server) -> None:
    """`down` lets running answers finish: none moves, none fails."""
    moved = len(logged(fleet.folder / "gateway.log", "request_moved"))
    answers = [asyncio.create_task(answer(server)) for _ in range(6)]
    said = await asyncio.to_thread(fleet.said, "down", "e1")
    tokens = await asyncio.gather(*answers)
    await until("e1 out of the file", lambda: fleet.listed().keys() == {"e0"})

    assert said == "e1: ended\n"
    assert tokens == [TOKENS] * 6
    assert len(logged(fleet.folder / "gateway.log", "request_moved")) == moved
    await until("e1 gone", lambda: fleet.keepers().keys() == {"e0"})


async def check_lost_head(
    fleet: FleetOfRay, server: Server, watch: subprocess.Popen[str], pid: int
) -> None:
    """Streams go on, new ones come, and the file stays as it is."""
    before = fleet.file.read_bytes(), fleet.file.stat().st_mtime_ns
    answers = [asyncio.create_task(answer(server)) for _ in range(4)]
    await asyncio.to_thread(fleet.cluster.lose, "head")
    await until("the loss in the log", lambda: logged(fleet.watch_log, "cluster_lost"))
    tokens = await asyncio.gather(*answers)

    assert tokens == [TOKENS] * 4
    assert await answer(server, 16) == 16
    assert (fleet.file.read_bytes(), fleet.file.stat().st_mtime_ns) == before
    assert watch.poll() is None
    os.kill(pid, 0)  # the keeper is there


async def test_engines_on_ray_live_through_what_a_cluster_does(fleet: FleetOfRay) -> None:
    """In the order in which a cluster can do it to the same engines; its head dies last."""
    with fleet.looks(), fleet.watch() as watch:
        await asyncio.gather(
            asyncio.to_thread(check_refusals, fleet), asyncio.to_thread(check_token, fleet)
        )
        assert fleet.up("--replicas", "2") == "e0: asked for\ne1: asked for\n"
        keepers = await fleet.ready("e0", "e1")
        assert {one.node for one in keepers.values()} == set(NODES)
        await fleet.in_file(keepers)
        async with gateway_of(fleet) as server:
            assert await answer(server, 16) == 16
            await check_up_twice(fleet, keepers)
            keepers = await check_killed(fleet, keepers)
            keepers = await check_lost_node(fleet, keepers)
            await check_drain(fleet, server)
            await check_lost_head(fleet, server, watch, keepers["e0"].pid)
