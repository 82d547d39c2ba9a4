"""Two gateways over one database and two engines, all killed under load: the books close.

Real gateways, ledgers, keepers, engines of a tiny model and their storage processes; PostgreSQL and
Valkey are killed, too. `CRASH=long` (`make crash`) kills more often; `DEATHS` says how often,
`DEATHS_SEED` in which order.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path

import pytest
from aiohttp import ClientError, ClientSession
from msgspec.structs import replace

from engine.config import LevelsConfig
from engine.model_store import ModelCard
from tenancy.accounting.audit import check_books
from tenancy.accounting.reconcile import Epoch, reconcile
from tenancy.accounts.tenants import change_tenant
from tenancy.storage.backends import open_store
from tenancy.storage.interface import Store
from tests.actors import TESTER
from tests.crash import peers
from tests.crash.fleet import KeptReplica, gateway_settings
from tests.crash.test_process_deaths import IS_LONG
from tests.crash.test_replicated_server import NAMES, kept_engines
from tests.server_process import Server, children, run_server
from tests.unit.gateway.shared.valkey_server import ValkeyServer
from tests.unit.tenancy.storage.postgres_server import Server as Postgres
from tests.unit.tenancy.storage.postgres_server import own_server

DEATHS = int(os.environ.get("DEATHS", "300" if IS_LONG else "6"))
SEED = int(os.environ.get("DEATHS_SEED", "11"))
BUDGET_S = float(os.environ.get("DEATHS_S", "3000"))
"""Seconds after which nothing further is killed."""
CLIENTS = 3
"""Of each gateway."""
PATIENCE_S = 200.0
"""A host that was killed is known as gone after a minute, and its holds are closed then."""
LENGTHS = (1, 20, 100, 300)
KINDS = ("gateway", "host", "engine", "storage", "postgres", "valkey")
REFUSALS = {"ledger_unavailable", "engine_unavailable", "overloaded", "unavailable"}
TEXT = "A system prompt that every request of this tenant begins with. " * 3
CONFIG = replace(
    peers.CONFIG,
    step_timeout_s=30.0,
    levels=LevelsConfig(host_mib=8, disk_gib=0.25, slab_mib=4, disk_tokens_min=16),
)
COMMAND = (sys.executable, "-m", "engine.server.server")

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(BUDGET_S + 900)]


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    """A server of the test's own, which it kills."""
    yield from own_server()


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server of the test's own, which it kills, too: it comes back empty."""
    server = ValkeyServer(tmp_path)
    yield server
    server.kill()


class OneGateway:
    """A gateway with a data directory of its own, started again after each death."""

    def __init__(
        self, name: str, folder: Path, database: str, shared: str, kept: dict[str, KeptReplica]
    ) -> None:
        self.name, self.data = name, folder / name
        self.settings = folder / f"{name}.toml"
        self.settings.write_text(
            gateway_settings({one: kept[one].port for one in kept}, name, shared=shared)
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
        if self.server is not None:
            self.server.process.kill()
            self.server.process.wait()

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
        self.told: Counter[str] = Counter()
        """Codes of errors that clients were told."""
        self.is_over = False

    async def run(self, number: int) -> None:
        """Ask until it is over: streamed or not, with and without a stop string."""
        chance = random.Random(f"{SEED} {number}")
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
                words = [{"role": "user", "content": f"{TEXT}{chance.randrange(50)}"}]
                try:
                    async with session.post(
                        f"{server.url}/v1/chat/completions",
                        json={"model": "tiny", "messages": words, **more},
                        headers={"Authorization": f"Bearer {server.key}"},
                    ) as response:
                        self.note(response.status, await response.text())
                except (ClientError, TimeoutError) as error:
                    if self.gateway.server is server:
                        self.wrong.append(f"cut by a gateway that lives: {error!r}")

    def note(self, status: int, text: str) -> None:
        """Record an answer."""
        if status != 200:
            code = json.loads(text)["error"]["code"]
            self.told[code] += 1
            if code not in REFUSALS:
                self.wrong.append(f"{status}: {text[:300]}")
            return
        if text.startswith("{"):
            said = json.loads(text)
        elif text.endswith("data: [DONE]\n\n"):
            said = json.loads(text.split("\n\n")[-3][6:])
        elif '"error"' in (end := text.rpartition("data: ")[2]):
            self.told[json.loads(end)["error"]["code"]] += 1
            return
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


class Stores:
    """What the gateways share: a database and a Valkey."""

    def __init__(self, postgres: Postgres, valkey: ValkeyServer) -> None:
        self.postgres, self.valkey = postgres, valkey
        self.database = postgres.url(postgres.database())

    def limit(self) -> None:
        """Give the tenant limits that it never reaches, so that each request asks Valkey."""
        with closing(open_store(self.database, Path(), {})) as store:
            limits = {"requests_at_once": 1_000, "tokens_per_minute": 10**9}
            change_tenant(store, "default", limits, by=TESTER)


def storage_of(engine: KeptReplica) -> int | None:
    """Return the process id of the storage of the engine that serves now, once it runs: one that
    was killed just before may be known as that for a moment longer."""
    serving = engine.engine
    if serving is None or serving.info is None:
        return None
    return children(serving.info.pid).get("engine.storage.process")


async def kill_one(
    kind: str, gateway: OneGateway, engine: KeptReplica, stores: Stores, model: Path
) -> None:
    """Kill one thing; gateways and what they share are started again."""
    match kind:
        case "engine":
            await engine.kill()
        case "storage":
            await until(lambda: storage_of(engine) is not None)
            if (storage := await asyncio.to_thread(storage_of, engine)) is not None:
                os.kill(storage, signal.SIGKILL)
        case "postgres" | "valkey":
            server = stores.postgres if kind == "postgres" else stores.valkey
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
        case _:
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


async def test_books_close_over_killed_gateways_hosts_engines_and_stores(
    model: Path, card: ModelCard, tmp_path: Path, postgres: Postgres, valkey: ValkeyServer
) -> None:
    """Each whole answer has one entry with its usage, no other answer ends without an error, and
    nothing stays open. Engine, ledger and metrics agree to the token for each engine that lives,
    and name what no whole entry has. No gateway has logged a mismatch."""
    stores = await asyncio.to_thread(Stores, postgres, valkey)
    chance, began_s, deaths = random.Random(SEED), time.monotonic(), Counter[str]()
    async with AsyncExitStack() as opened:
        engines = kept_engines(card, CONFIG, COMMAND, tmp_path)
        kept = await opened.enter_async_context(engines)
        gateways = [
            OneGateway(name, tmp_path, stores.database, valkey.url, kept) for name in ("g0", "g1")
        ]
        loads = [Load(gateway) for gateway in gateways]
        key = ""
        for gateway in gateways:
            opened.callback(gateway.end)
            await gateway.start(model, key)
            key = gateway.key
        await asyncio.to_thread(stores.limit)
        numbers = itertools.count()
        tasks = [
            asyncio.create_task(load.run(next(numbers))) for load in loads for _ in range(CLIENTS)
        ]
        while deaths.total() < DEATHS and time.monotonic() - began_s < BUDGET_S:
            load, engine = chance.choice(loads), kept[chance.choice(NAMES)]
            goal = len(load.whole) + chance.randrange(1, 9)
            await until(partial(has_answers, load, goal))
            kind = KINDS[deaths.total() % len(KINDS)]
            await kill_one(kind, load.gateway, engine, stores, model)
            deaths[kind] += 1
        for load in loads:
            load.is_over = True
        await asyncio.gather(*tasks)
        epochs = await idle_lives(kept)
        store = opened.enter_context(closing(open_store(stores.database, Path(), {})))
        await until(lambda: store.query("select 1 from holds limit 1") == [])
        running = dict.fromkeys(epochs, len(gateways))
        await until(lambda: open_starts(store, epochs) == running)
        statuses = [await gateway.stop() for gateway in gateways]
        found, faults = living(store, epochs), check_books(store)
        rows = store.query("select request_id, ending, output_tokens from ledger")
    entries = {name: (ending, tokens) for name, ending, tokens in rows}
    whole = {name: ("done", tokens) for load in loads for name, tokens in load.whole.items()}
    told = loads[0].told + loads[1].told
    print(f"seed {SEED}: {dict(deaths)}, {len(whole)} answers, {len(rows)} entries, {told}")  # noqa: T201

    assert [line for load in loads for line in load.wrong] == []
    assert statuses == [0, 0]
    assert len(entries) == len(rows)
    assert {name: entries.get(name) for name in whole} == whole
    assert faults == []
    assert [(one.state, one.has_mismatch) for one in found] == [("final", False)] * len(epochs)
    assert [line for gateway in gateways for line in gateway.told("ledger_mismatch")] == []
