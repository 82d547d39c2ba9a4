"""Two gateways over one database and two engines, all killed under load: the books close.

Real gateways, ledgers, keepers and engine processes over the fake runner; PostgreSQL is killed too.
`CRASH=long` (`make crash`) kills more often; `DEATHS` says how often.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path

import pytest
from aiohttp import ClientError, ClientSession

from engine.model_store import ModelCard
from tenancy.accounting.audit import check_books
from tenancy.accounting.reconcile import Epoch, reconcile
from tenancy.storage.backends import open_store
from tenancy.storage.interface import Store
from tests.crash.fleet import KeptReplica, gateway_settings
from tests.crash.test_process_deaths import IS_LONG
from tests.crash.test_replicated_server import NAMES, kept_engines
from tests.server_process import Server, children, run_server
from tests.unit.tenancy.storage.postgres_server import Server as Postgres
from tests.unit.tenancy.storage.postgres_server import own_server

DEATHS = int(os.environ.get("DEATHS", "300" if IS_LONG else "6"))
BUDGET_S = float(os.environ.get("DEATHS_S", "3000"))
"""Seconds after which nothing further is killed."""
CLIENTS = 3
"""Of each gateway."""
PATIENCE_S = 200.0
"""A host that was killed is known as gone after a minute, and its holds are closed then."""
LENGTHS = (1, 20, 100, 300)
KINDS = ("gateway", "host", "gateway", "host", "engine", "postgres")
REFUSALS = {"ledger_unavailable", "not_ready", "engine_starting", "overloaded", "unavailable"}

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(BUDGET_S + 900)]


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    """A server of the test's own, which it kills."""
    yield from own_server()


class OneGateway:
    """A gateway with a data directory of its own, started again after each death."""

    def __init__(
        self, name: str, folder: Path, database: str, kept: dict[str, KeptReplica]
    ) -> None:
        self.name, self.data = name, folder / name
        self.settings = folder / f"{name}.toml"
        self.settings.write_text(
            gateway_settings({one: kept[one].port for one in kept}, name)
            + f'[tenancy]\ndatabase = "{database}"\n'
        )
        self.server: Server | None = None
        self.deaths = 0

    async def start(self, model: Path, key: str = "") -> None:
        """Start it. `key`: of the first gateway of the database, which made it."""
        if key:
            self.data.mkdir(mode=0o700, exist_ok=True)
            (self.data / "default.key").write_text(key)
        self._run = run_server(model, self.data, self.settings)
        self.server = await asyncio.to_thread(self._run.__enter__)

    async def kill(self, *, with_children: bool) -> None:
        """Kill it: alone, or with its ledger's process and all others, as a host that is lost."""
        assert self.server is not None
        process: subprocess.Popen[str] = self.server.process
        pids = [process.pid, *(children(process.pid).values() if with_children else ())]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.server = None
        self.deaths += 1
        await asyncio.to_thread(self._run.__exit__, None, None, None)

    async def stop(self) -> int:
        """Stop it as an operator does; return its status."""
        assert self.server is not None
        try:
            return await asyncio.to_thread(self.server.stop)
        finally:
            await asyncio.to_thread(self._run.__exit__, None, None, None)

    @property
    def key(self) -> str:
        """The key of the default tenant."""
        assert self.server is not None
        return self.server.key

    def end(self) -> None:
        """End what is left of it after a failure."""
        if self.server is not None and self.server.process.poll() is None:
            self.server.process.kill()

    def told(self, event: str) -> list[str]:
        """Return the lines of its log with an event."""
        lines = self.data.with_suffix(".log").read_text().splitlines()
        return [line for line in lines if f'"{event}"' in line]


class Load:
    """Clients of one gateway. What they were answered whole must have an entry of that usage."""

    def __init__(self, gateway: OneGateway) -> None:
        self.gateway = gateway
        self.whole: dict[str, int] = {}
        self.wrong: list[str] = []
        self.is_over = False

    async def run(self, number: int) -> None:
        """Ask until it is over: streamed or not, with and without a stop string."""
        chance = random.Random(number)
        async with ClientSession() as session:
            while not self.is_over:
                server = self.gateway.server
                if server is None:
                    await asyncio.sleep(0.05)  # until it is started again
                    continue
                more: dict[str, object] = {"max_tokens": chance.choice(LENGTHS)}
                if chance.random() < 0.3:
                    more["stop"] = ["a", "e"]
                if chance.random() < 0.6:
                    more |= {"stream": True, "stream_options": {"include_usage": True}}
                words = [{"role": "user", "content": f"hello {chance.randrange(50)}"}]
                with contextlib.suppress(ClientError, asyncio.IncompleteReadError, TimeoutError):
                    async with session.post(
                        f"{server.url}/v1/chat/completions",
                        json={"model": "tiny", "messages": words, **more},
                        headers={"Authorization": f"Bearer {server.key}"},
                    ) as response:
                        self.note(response.status, await response.text())

    def note(self, status: int, text: str) -> None:
        """Record an answer."""
        if status != 200:
            code = json.loads(text)["error"]["code"]
            if code not in REFUSALS:
                self.wrong.append(f"{status}: {text[:300]}")
            return
        if text.startswith("{"):
            said = json.loads(text)
        elif text.endswith("data: [DONE]\n\n"):
            said = json.loads(text.split("\n\n")[-3][6:])
        elif '"error"' in text.rpartition("data: ")[2]:
            return  # it ended with an error
        else:
            self.wrong.append(f"cut without an error: {text[-200:]!r}")
            return
        self.whole[said["id"].partition("-")[2]] = said["usage"]["completion_tokens"]


def living(store: Store, epochs: set[str]) -> list[Epoch]:
    """Return the lives of engines that go on."""
    return [one for one in reconcile(store) if one.epoch in epochs]


def open_starts(store: Store, epochs: set[str]) -> dict[str, int]:
    """Return how many starts of gateways have told no last counts of each of these lives."""
    sql = "select epoch, count(*) from engine_epochs where is_ended = 0 group by epoch"
    return {epoch: int(count) for epoch, count in store.query(sql) if epoch in epochs}


async def until(holds: Callable[[], bool]) -> None:
    """Wait until other processes have made a condition true."""
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(holds):  # noqa: ASYNC110 (other processes' doing)
            await asyncio.sleep(0.05)


def has_answers(load: Load, goal: int) -> bool:
    """Return whether clients have had so many answers."""
    return len(load.whole) >= goal


async def kill_one(
    kind: str,
    gateway: OneGateway,
    engine: KeptReplica,
    postgres: Postgres,
    model: Path,
) -> None:
    """Kill one thing; gateways and the database are started again."""
    if kind == "engine":
        await engine.kill()
    elif kind == "postgres":
        await asyncio.to_thread(postgres.kill)
        await asyncio.to_thread(postgres.start)
    else:
        await gateway.kill(with_children=kind == "host")
        await gateway.start(model)


async def idle_lives(kept: dict[str, KeptReplica]) -> set[str]:
    """Wait until the engines have nothing to do; return their lives."""
    epochs = set[str]()
    for one in kept.values():
        await one.pid()
        await one.is_idle()
        info = one.running().info
        assert info is not None
        epochs.add(info.epoch)
    return epochs


async def test_books_close_over_killed_gateways_hosts_engines_and_databases(
    model: Path, card: ModelCard, tmp_path: Path, postgres: Postgres
) -> None:
    """Each whole answer has one entry with its usage, nothing stays open, and engine, ledger and
    metrics agree to the token for each engine that lives, and name what no whole entry has. No
    gateway has logged a mismatch."""
    database = postgres.url(postgres.database())
    chance, began_s, deaths = random.Random(11), time.monotonic(), 0
    async with AsyncExitStack() as opened:
        kept = await opened.enter_async_context(kept_engines(card))
        gateways = [OneGateway(name, tmp_path, database, kept) for name in ("g0", "g1")]
        loads = [Load(gateway) for gateway in gateways]
        key = ""
        for gateway in gateways:
            opened.callback(gateway.end)
            await gateway.start(model, key)
            key = gateway.key
        numbers = itertools.count()
        tasks = [
            asyncio.create_task(load.run(next(numbers))) for load in loads for _ in range(CLIENTS)
        ]
        while deaths < DEATHS and time.monotonic() - began_s < BUDGET_S:
            load, engine = chance.choice(loads), kept[chance.choice(NAMES)]
            goal = len(load.whole) + chance.randrange(1, 9)
            await until(partial(has_answers, load, goal))
            kind = KINDS[deaths % len(KINDS)]
            await kill_one(kind, load.gateway, engine, postgres, model)
            deaths += 1
        for load in loads:
            load.is_over = True
        await asyncio.gather(*tasks)
        epochs = await idle_lives(kept)
        store = opened.enter_context(closing(open_store(database, Path(), {})))
        await until(lambda: store.query("select 1 from holds limit 1") == [])
        running = dict.fromkeys(epochs, len(gateways))
        await until(lambda: open_starts(store, epochs) == running)
        statuses = [await gateway.stop() for gateway in gateways]
        found, faults = living(store, epochs), check_books(store)
        rows = store.query("select request_id, ending, output_tokens from ledger")
    entries = {name: (ending, tokens) for name, ending, tokens in rows}
    whole = {name: ("done", tokens) for load in loads for name, tokens in load.whole.items()}
    unbilled = [one.unbilled for one in found]
    print(f"{deaths} deaths, {len(whole)} answers, {len(rows)} entries, {unbilled}")  # noqa: T201

    assert [line for load in loads for line in load.wrong] == []
    assert statuses == [0, 0]
    assert len(entries) == len(rows)
    assert {name: entries.get(name) for name in whole} == whole
    assert faults == []
    assert [(one.state, one.has_mismatch) for one in found] == [("final", False)] * len(epochs)
    assert [line for gateway in gateways for line in gateway.told("ledger_mismatch")] == []
