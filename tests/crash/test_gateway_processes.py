"""`server.processes`: two real gateway processes on one port, one of which is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession

from engine.model_store import ModelCard
from tenancy.accounting.audit import check_books
from tenancy.accounting.reconcile import reconcile
from tenancy.storage.backends import open_store
from tenancy.storage.interface import Store
from tests.crash.fleet import KeptReplica, gateway_settings
from tests.crash.test_replicated_server import kept_engines
from tests.server_process import Server, run_server
from tests.unit.gateway.shared.valkey_server import ValkeyServer
from tests.unit.tenancy.storage.postgres_server import Server as Postgres

PATIENCE_S = 90.0
PROCESSES = 2

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(400)]


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path)
    yield server
    server.kill()


def write_settings(
    folder: Path, kept: dict[str, KeptReplica], database: str, valkey: ValkeyServer
) -> Path:
    """Write the settings of a gateway of two processes."""
    ports = {name: one.port for name, one in kept.items()}
    file = folder / "settings.toml"
    file.write_text(
        f'[server]\nprocesses = {PROCESSES}\n[tenancy]\ndatabase = "{database}"\n'
        f"{gateway_settings(ports, shared=valkey.url)}"
    )
    return file


class Group:
    """A server's processes, as its log tells of them."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def told(self, event: str) -> list[dict[str, Any]]:
        """Return the facts of an event, so far."""
        lines = self._log.read_text().rpartition("\n")[0].splitlines()
        facts = [json.loads(line) for line in lines if line.startswith("{")]
        return [one for one in facts if one["event"] == event]

    def latest(self, event: str) -> dict[int, dict[str, Any]]:
        """Return the last facts of an event by process."""
        return {one["process"]: one for one in self.told(event)}


async def until(holds: Callable[[], bool]) -> None:
    """Wait until other processes have made a condition true."""
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(holds):  # noqa: ASYNC110 (other processes' doing)
            await asyncio.sleep(0.02)


async def ask(server: Server, session: ClientSession, **more: object) -> str:
    """Send a chat over a connection of its own; return its whole answer."""
    async with session.post(
        f"{server.url}/v1/chat/completions",
        json=server.body(**more),
        headers={"Authorization": f"Bearer {server.key}", "Connection": "close"},
    ) as response:
        return await response.text()


async def explained(data: Path, admins: dict[int, str], answers: list[str]) -> list[set[str]]:
    """Ask every process why the requests of these answers went to their engines; return the engines
    that each names, by request."""
    key = (data / "admin.key").read_text().strip()
    found = []
    async with ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
        for answer in answers:
            path = f"/admin/v1/fleet/choices/{json.loads(answer)['id'].partition('-')[2]}"
            engines = set()
            for url in admins.values():
                async with asyncio.timeout(PATIENCE_S):  # another process has a record of the end
                    while "replica" not in (told := await _get(session, url + path)):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                engines.add(told["replica"])
            found.append(engines)
    return found


async def _get(session: ClientSession, url: str) -> Any:
    async with session.get(url) as response:
        return await response.json()


async def answered(session: ClientSession, admin_url: str) -> int:
    """Return how many requests a process has answered."""
    async with session.get(f"{admin_url}/metrics") as response:
        lines = (await response.text()).splitlines()
    name = "trunkline_requests_total{"
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(name)))


async def test_processes_share_a_port_and_one_that_dies_touches_neither_engine_nor_others(
    model: Path,
    card: ModelCard,
    tmp_path: Path,
    postgres_server: Postgres,
    valkey: ValkeyServer,
) -> None:
    """Both answer; after one was killed the other goes on, it is started again, and the books
    close. SIGTERM lets streams of both end, and leaves no process."""
    database = postgres_server.url(await asyncio.to_thread(postgres_server.database))
    async with kept_engines(card) as kept, ClientSession() as session:
        engines = [await one.pid() for one in kept.values()]
        settings = write_settings(tmp_path, kept, database, valkey)
        data = tmp_path / "data"
        starting = run_server(model, data, settings)
        server = await asyncio.to_thread(starting.__enter__)
        try:
            group = Group(data.with_suffix(".log"))
            await until(lambda: len(group.latest("gateway_started")) == PROCESSES)
            admins = {n: one["admin"] for n, one in group.latest("gateway_started").items()}
            short = [await ask(server, session, max_tokens=2) for _ in range(40)]
            told = await explained(data, admins, short[-8:])
            shares = [await answered(session, admin) for admin in admins.values()]
            first = group.latest("gateway_started")[0]["pid"]
            dying = await gateways_of_first(database)
            long = [
                asyncio.create_task(ask(server, session, max_tokens=400, stream=True))
                for _ in range(16)
            ]
            await asyncio.wait(long, return_when=asyncio.FIRST_COMPLETED, timeout=0.2)
            os.kill(first, signal.SIGKILL)
            ended = await asyncio.gather(*long, return_exceptions=True)
            await until(lambda: group.latest("gateway_started")[0]["pid"] != first)
            after = [await ask(server, session, max_tokens=2) for _ in range(20)]
            pids = [one["pid"] for one in group.latest("gateway_started").values()]
            with closing(open_store(database, Path(), {})) as store:
                await until(lambda: store.query("select 1 from holds limit 1") == [])
                await until(lambda: len(counting(store) - dying) == PROCESSES)
                await until(lambda: counting(store).isdisjoint(dying))
                last = [
                    asyncio.create_task(ask(server, session, max_tokens=300, stream=True))
                    for _ in range(8)
                ]
                await until(partial(has_running, store, 1))
                server.process.send_signal(signal.SIGTERM)
                drained = await asyncio.gather(*last)
                status = await asyncio.to_thread(server.wait)
                left = [pid for pid in pids if is_there(pid)]
                epochs = reconcile(store)
                faults = check_books(store)
                ids = {one[0].rpartition("/")[0] for one in store.query(GATEWAYS)}
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)
        engines_after = [await one.pid() for one in kept.values()]

    whole = [one for one in ended if isinstance(one, str) and one.endswith("data: [DONE]\n\n")]
    cut = [one for one in ended if not isinstance(one, str)]
    assert min(shares) > 0
    assert all(len(one) == 1 for one in told), "every process explains each request"
    assert sum(shares) >= 40
    assert len(whole) + len(cut) == len(ended)
    assert whole, "the other process goes on"
    assert all(isinstance(one, ClientError) for one in cut)
    assert all('"completion_tokens":2' in one for one in after)
    assert engines_after == engines
    assert all(one.endswith("data: [DONE]\n\n") for one in drained)
    assert status == 0
    assert (left, faults) == ([], [])
    assert [(one.state, one.has_mismatch) for one in epochs] == [("final", False)] * len(kept)
    assert {one.rpartition("/")[2] for one in ids} == {"0", "1"}


GATEWAYS = "select distinct gateway from engine_epochs"


async def gateways_of_first(database: str) -> set[str]:
    """Return how the first process is named in the books, once both are."""
    with closing(open_store(database, Path(), {})) as store:
        await until(lambda: len(counting(store)) == PROCESSES)
        return {one for one in counting(store) if "/0/" in one}


def counting(store: Store) -> set[str]:
    """Return the gateways whose counts of some engine are not final."""
    rows = store.query("select distinct gateway from engine_epochs where is_ended = 0")
    return {name for (name,) in rows}


def is_there(pid: int) -> bool:
    """Return whether a process runs."""
    return Path(f"/proc/{pid}").exists()


def has_running(store: Any, count: int) -> bool:
    """Return whether so many requests have holds."""
    return int(store.query("select count(*) from holds")[0][0]) >= count


async def test_a_process_that_cannot_start_ends_the_server(
    model: Path,
    card: ModelCard,
    tmp_path: Path,
    postgres_server: Postgres,
    valkey: ValkeyServer,
) -> None:
    """In one line, with the reason in the log above it, and no process left."""
    database = postgres_server.url(await asyncio.to_thread(postgres_server.database))
    async with kept_engines(card) as kept:
        settings = write_settings(tmp_path, kept, database, valkey)
        settings.write_text(
            settings.read_text() + "[admin]\nlisten = '127.0.0.1:0'\n[tracing]\n"
            "endpoint = 'http://127.0.0.1:9'\nsample_ratio = 7\n"
        )
        starting = run_server(model, tmp_path / "data", settings)
        with pytest.raises(AssertionError) as caught:
            await asyncio.to_thread(starting.__enter__)

    assert "sample_ratio" in str(caught.value)
