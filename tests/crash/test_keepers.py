"""`trunkline engine serve` and a gateway as an operator starts them: killed, stopped and drained.

Real commands, a tiny real model, certificates by `trunkline fleet init`.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from aiohttp import ClientError, ClientSession

from tests.crash.fleet import gateway_settings
from tests.crash.test_process_deaths import Place, ended, until
from tests.crash.test_replicated_server import CheckedLoad, count_of
from tests.models import tiny_config, write_folder
from tests.ports import free_ports
from tests.server_process import GATEWAY, SETTINGS, Server, run_server, spawn
from tests.unit.engine.server.fleet_certificates import certificate

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(480)]

NAMES = ("e0", "e1")
STREAMS, TOKENS = 6, 300
START_S = 120.0


class Hosts:
    """Two keepers and the settings of their gateway, in a folder."""

    def __init__(self, folder: Path, ports: list[int], opened: ExitStack) -> None:
        self.folder, self._opened = folder, opened
        self.model = write_folder(folder / "tiny", tiny_config(context=1024))
        self.ports = dict(zip(NAMES, ports, strict=True))
        self.settings = folder / "engine.toml"
        self.settings.write_text(SETTINGS)
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.place = Place(folder, None)
        self.place.settings.write_text(gateway_settings(self.ports, "g0"))

    def command(self, name: str, *words: str) -> list[str]:
        """Return a command of an engine of a name."""
        more = ["--data-dir", str(self.folder / name), "--config", str(self.settings)]
        return [*GATEWAY, "engine", *words, *more]

    def start(self, name: str) -> None:
        """Start a keeper."""
        serve = self.command(name, "serve", str(self.model), "--name", name)
        serve += ["--listen", f"127.0.0.1:{self.ports[name]}"]
        serve += ["--tls", str(certificate(f"engine/{name}"))]
        process = self._opened.enter_context(spawn(serve, self.log(name)))
        self._opened.callback(process.kill)
        self.processes[name] = process

    def log(self, name: str) -> Path:
        """Return a keeper's log."""
        return self.folder / f"{name}.log"

    def says(self, name: str, event: str) -> int:
        """Return how often a keeper's log, or its engine's, has an event."""
        return self.log(name).read_text().count(f'"event":"{event}"')


@contextmanager
def hosts(folder: Path) -> Iterator[Hosts]:
    """Start both keepers."""
    with ExitStack() as opened:
        found = Hosts(folder, opened.enter_context(free_ports(len(NAMES))), opened)
        for name in NAMES:
            found.start(name)
        yield found


async def until_all(server: Server, count: int) -> None:
    """Wait until so many engines take requests."""
    ready = "trunkline_replica_ready"
    async with asyncio.timeout(START_S), ClientSession() as session:
        while await count_of(server, session, ready) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def through(kept: Hosts, load: CheckedLoad, fault: Callable[[], object]) -> list[str]:
    """Return the answers of streams during which something is done. A hold is there before the
    first token; an engine tells of running sequences once a second, when all may have ended."""
    streams = [
        asyncio.create_task(load.ask(number, TOKENS, None, is_streamed=True))
        for number in range(STREAMS)
    ]
    await until(lambda: kept.place.has_holds(STREAMS))
    fault()
    return await asyncio.gather(*streams)


async def test_keepers_that_are_killed_stopped_or_drained_cut_no_stream(tmp_path: Path) -> None:
    """A killed keeper takes its engine with it; a stopped one lets its requests finish, and so does
    a drain, after which the engine stays down."""
    with hosts(tmp_path) as kept:
        await until(lambda: all(kept.says(name, "ready") for name in NAMES))
        starting = run_server(kept.model, kept.place.data, kept.place.settings)
        server = await asyncio.to_thread(starting.__enter__)
        try:
            await until_all(server, 2)
            load = CheckedLoad(server)
            whole = await through(kept, load, lambda: None)
            killed = await through(kept, load, kept.processes["e0"].kill)
            await until_all(server, 1)
            kept.start("e0")
            await until_all(server, 2)
            stopped = await through(kept, load, kept.processes["e1"].terminate)
            status = await asyncio.to_thread(kept.processes["e1"].wait, START_S)
            kept.start("e1")
            await until_all(server, 2)
            drain = kept.command("e0", "drain", "e0")
            drained = await through(kept, load, lambda: subprocess.run(drain, check=True))
            await until_all(server, 1)
            await until(lambda: kept.says("e0", "engine_drained") == 1)
            undrain = kept.command("e0", "undrain", "e0")
            await asyncio.to_thread(subprocess.run, undrain, check=True)
            await until_all(server, 2)
            ended_with = await ended(server)
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)

    assert killed == stopped == drained == whole
    assert not any(text.startswith(("503", "a cut")) for text in whole)
    assert (status, ended_with) == (0, 0)
    assert kept.place.entries() == {name: ("done", count) for name, count in load.entered.items()}
    kept.place.check()


async def test_a_killed_gateways_holds_are_closed_and_the_next_one_is_served(
    tmp_path: Path,
) -> None:
    """Its clients see their connections end."""
    with hosts(tmp_path) as kept:
        await until(lambda: all(kept.says(name, "ready") for name in NAMES))
        first = run_server(kept.model, kept.place.data, kept.place.settings)
        server = await asyncio.to_thread(first.__enter__)
        try:
            await until_all(server, 2)
            load = CheckedLoad(server)
            streams = [
                asyncio.create_task(load.ask(number, TOKENS, None, is_streamed=True))
                for number in range(STREAMS)
            ]
            await until(lambda: kept.place.has_holds(STREAMS))
            server.process.kill()
            answers = await asyncio.gather(*streams, return_exceptions=True)
        finally:
            await asyncio.to_thread(first.__exit__, None, None, None)
        again = run_server(kept.model, kept.place.data, kept.place.settings)
        server = await asyncio.to_thread(again.__enter__)
        try:
            await until_all(server, 2)
            text = await CheckedLoad(server).ask(1, 4, None, is_streamed=False)
            await ended(server)
        finally:
            await asyncio.to_thread(again.__exit__, None, None, None)

    endings = sorted(ending for ending, _ in kept.place.entries().values())
    assert all(isinstance(one, ClientError) for one in answers)
    assert not text.startswith("503")
    assert endings == ["done"] + ["interrupted"] * STREAMS
    assert kept.place.has_holds(0)
