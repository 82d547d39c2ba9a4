"""Servers whose processes are killed under load: each complete response has exactly one entry.

`CRASH=long` (`make crash`) kills more often.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest
from aiohttp import ClientError, ClientSession

from tenancy.accounting.audit import check_books
from tenancy.accounting.reconcile import reconcile
from tenancy.accounts.tenants import create_tenant
from tenancy.ledger.ledger import Hold, Ledger
from tenancy.storage.backends import open_store
from tenancy.storage.interface import Store
from tests.models import write_folder
from tests.server_process import SETTINGS, Server, children, run_server, stopped
from tests.unit.tenancy.ledger.written import holds
from tests.unit.tenancy.storage.postgres_server import Server as Postgres

IS_LONG = os.environ.get("CRASH") == "long"
DEATHS = 60 if IS_LONG else 3
CLIENTS = 6
TURNS = 50
"""Requests that are refused after others, which the gateway has taken up by then."""
PATIENCE_S = 60.0
STREAM_TOKENS = 400

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800 if IS_LONG else 240)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny")


class Place:
    """A server's database: its configuration, and a view of it."""

    def __init__(self, folder: Path, postgres: Postgres | None) -> None:
        self.data = folder / "data"
        self.settings = folder / "settings.toml"
        self.database = str(self.data / "trunkline.db")
        more = ""
        if postgres is not None:
            self.database = postgres.url(postgres.database())
            more = f'[tenancy]\ndatabase = "{self.database}"\n'
        self.settings.write_text(SETTINGS + more)

    def look(self) -> Store:
        """Open the database."""
        return open_store(self.database, Path(), {})

    def entries(self) -> dict[str, tuple[str, int]]:
        """Return (ending, output tokens) by request id, each once."""
        with closing(self.look()) as store:
            rows = store.query("select request_id, ending, output_tokens from ledger")
        found = {request_id: (ending, tokens) for request_id, ending, tokens in rows}
        assert len(found) == len(rows)
        return found

    def check(self) -> None:
        """Check that nothing is open, the books are right, and the engine counted the same."""
        with closing(self.look()) as store:
            assert store.query("select count(*) from holds") == [(0,)]
            assert check_books(store) == []
            assert [life.epoch for life in reconcile(store) if life.has_mismatch] == []

    def has_holds(self, count: int) -> bool:
        """Return whether so many requests have holds."""
        with closing(self.look()) as store:
            return store.query("select count(*) from holds") == [(count,)]

    def events(self) -> list[str]:
        """Return the events of the server's log, as far as its lines are complete."""
        lines = self.data.with_suffix(".log").read_text().rpartition("\n")[0].splitlines()
        return [json.loads(line)["event"] for line in lines if line.startswith("{")]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, None)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.nightly)])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    postgres = request.param == "postgres"
    return Place(tmp_path, request.getfixturevalue("postgres_server") if postgres else None)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until the condition holds, checking every few milliseconds."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 (another process's doing)
            await asyncio.sleep(0.01)


class Load:
    """Clients that send requests without a pause, and record complete responses."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.whole: dict[str, int] = {}
        self.refused = 0
        self.is_over = False

    async def ask(self, number: int) -> None:
        """Send requests until it is over; every other client streams."""
        rng = random.Random(number)
        while not self.is_over:
            tokens = rng.choice([1, 4, 60, 200])
            options: dict[str, object] = {"max_tokens": tokens}
            if number % 2:
                options |= {"stream": True, "stream_options": {"include_usage": True}}
            with contextlib.suppress(ClientError, asyncio.IncompleteReadError):
                async with self.server.request(**options) as (status, content):
                    self.note(status, (await content.read()).decode())

    def note(self, status: int, text: str) -> None:
        """Record a response."""
        if status != 200:
            assert json.loads(text)["error"]["code"] == "ledger_unavailable", text
            self.refused += 1
            return
        if text.startswith("{"):
            said = json.loads(text)
        elif text.endswith("data: [DONE]\n\n"):
            said = json.loads(text.split("\n\n")[-3][6:])
        else:
            return  # an incomplete response
        self.whole[said["id"].partition("-")[2]] = said["usage"]["completion_tokens"]


def reached(load: Load, goal: int) -> bool:
    """Return whether enough responses were complete."""
    return len(load.whole) >= goal


def died(place: Place, times: int) -> bool:
    """Return whether the log reports this many ledger deaths."""
    return place.events().count("ledger_died") >= times


async def ended(server: Server) -> int:
    """Stop the server and return its exit status when none of its processes is left."""
    pids = children(server.process.pid)
    status = server.stop()
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.values()))
    return status


async def until_engine_ended(server: Server, prompt_tokens: int) -> None:
    """Wait until the engine has ended all requests, which had so many prompt tokens together."""
    wanted = {"engine_prompt_tokens_total": prompt_tokens, "running_requests": 0}
    counts: dict[str, float] = {}
    async with asyncio.timeout(PATIENCE_S), ClientSession() as session:
        while {name: counts.get(name) for name in wanted} != wanted:
            async with session.get(f"{server.admin_url}/metrics") as response:
                text = await response.text()
            lines = re.findall(r"^trunkline_(\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE)
            counts = {name: float(count) for name, count in lines}


async def through_a_death(server: Server) -> bytes:
    """Read the rest of a stream whose ledger process is killed after its first event."""
    async with server.request(max_tokens=STREAM_TOKENS, stream=True) as (_, content):
        await content.readuntil(b"\n\n")
        os.kill(children(server.process.pid)["gateway.ledger.process"], signal.SIGKILL)
        rest = await content.read()
    await until(lambda: "gateway.ledger.process" in children(server.process.pid))
    return rest


async def test_repeated_ledger_deaths_lose_and_duplicate_nothing(
    model: Path, either: Place
) -> None:
    """Under load: running requests continue, the next process takes over their holds and writes
    their full usage; complete responses have entries, refused requests have no open holds, and the
    server's end leaves no process."""
    place, rng = either, random.Random(1)
    with run_server(model, place.data, place.settings) as server:
        stream = await through_a_death(server)
        load = Load(server)
        clients = [asyncio.create_task(load.ask(number)) for number in range(CLIENTS)]
        for death in range(DEATHS):
            goal = len(load.whole) + rng.randrange(3, 15)
            await until(partial(reached, load, goal))
            pid = children(server.process.pid)["gateway.ledger.process"]
            os.kill(pid, signal.SIGKILL)
            await until(partial(died, place, death + 2))
            await until(lambda: "gateway.ledger.process" in children(server.process.pid))
        goal = len(load.whole) + 10
        await until(partial(reached, load, goal))
        load.is_over = True
        await asyncio.gather(*clients)
        status = await ended(server)

    entries = place.entries()
    assert (status, stream.endswith(b"data: [DONE]\n\n")) == (0, True)
    assert ("done", STREAM_TOKENS) in entries.values()
    assert {name: entries.get(name) for name in load.whole} == {
        name: ("done", tokens) for name, tokens in load.whole.items()
    }
    assert len(load.whole) > 5 * DEATHS
    place.check()


async def test_killed_gateways_items_are_written(model: Path, place: Place) -> None:
    """The ledger's process writes them, closes the holds that remain, and ends; the engine ends
    too."""
    with run_server(model, place.data, place.settings) as server, ExitStack() as held:
        async with server.request(max_tokens=1) as (_, content):
            prompt_tokens = json.loads(await content.read())["usage"]["prompt_tokens"]
        pids = children(server.process.pid)
        load = Load(server)
        with stopped(pids["engine.server.server"]):
            clients = [asyncio.create_task(load.ask(number)) for number in range(CLIENTS)]
            await until(lambda: place.has_holds(CLIENTS))
            held.enter_context(stopped(pids["gateway.ledger.process"]))
        await until_engine_ended(server, prompt_tokens * (1 + CLIENTS))
        for _ in range(TURNS):  # they wait for their entries
            async with server.request(max_tokens="none") as (_, content):
                await content.read()
        load.is_over = True
        server.process.kill()
        held.close()
        await asyncio.gather(*clients)
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.values()))
        entries = place.entries()

    assert {ending for ending, _ in entries.values()} <= {"interrupted", "done"}
    assert len(entries) == 1 + CLIENTS
    place.check()


async def test_refuses_a_second_server_over_a_file(model: Path, place: Place) -> None:
    """In one line, with no process left; the first server is undisturbed."""
    with closing(place.look()) as store, closing(Ledger(store, lambda: 9)) as first:
        tenant = create_tenant(store, lambda: 9, "ada")
        first.hold(Hold("a", tenant.tenant_id, 1, "m", 9)).result(PATIENCE_S)
        with (
            pytest.raises(AssertionError) as caught,
            run_server(model, place.data, place.settings),
        ):
            pass
        held = holds(store)

    assert "trunkline.db is in use by another server; stop that server" in str(caught.value)
    assert held == 1
