"""`QueryPool`: long queries on connections of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.ledger.query_pool import QueryPool
from tenancy.accounts.tenants import create_tenant, list_tenants
from tenancy.errors import StoreError
from tenancy.storage.interface import Store
from tenancy.types import wall_ms
from tests.unit.tenancy.storage.new_sqlite import new_sqlite

PATIENCE_S = 60


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = new_sqlite(tmp_path / "test.db")
    create_tenant(store, wall_ms, "ada")
    return store


async def test_query_sees_committed_changes(store: Store) -> None:
    """Of another connection."""
    pool = QueryPool(store)
    before = await pool.ask(list_tenants)
    await asyncio.to_thread(create_tenant, store, wall_ms, "bob")
    after = await pool.ask(list_tenants)
    await pool.close()
    await asyncio.to_thread(store.close)

    assert (len(before), len(after)) == (1, 2)


class QueryRunner:
    """Queries that block in their threads until `end`, and the names of those that began."""

    def __init__(self, store: Store) -> None:
        self.pool = QueryPool(store)
        self.begun: list[str] = []
        self.asked: dict[str, asyncio.Task[object]] = {}
        self._go: dict[str, threading.Event] = {}
        self._began = threading.Condition()

    def ask(self, name: str, tenant_id: int | None = None) -> None:
        """Start a query; it runs until `end`."""
        go = self._go[name] = threading.Event()

        def answer(_: Store) -> None:
            with self._began:
                self.begun.append(name)
                self._began.notify_all()
            assert go.wait(PATIENCE_S)

        self.asked[name] = asyncio.create_task(self.pool.ask(answer, tenant_id))

    async def have_begun(self, *names: str) -> None:
        """Wait until exactly these have begun."""

        def wait() -> bool:
            with self._began:
                return self._began.wait_for(lambda: len(self.begun) >= len(names), PATIENCE_S)

        assert await asyncio.to_thread(wait)
        for _ in range(50):  # enough turns for a query that may begin wrongly
            await asyncio.sleep(0)
        assert sorted(self.begun) == sorted(names)

    async def end(self, name: str) -> None:
        """Let a query return."""
        self._go[name].set()
        await asyncio.wait([self.asked[name]])

    async def close(self) -> None:
        """Let all running queries return."""
        for go in self._go.values():
            go.set()
        for asked in self.asked.values():
            asked.cancel()
        await asyncio.wait(self.asked.values())
        await self.pool.close()


@pytest.fixture
async def runner(store: Store) -> AsyncIterator[QueryRunner]:
    runner = QueryRunner(store)
    yield runner
    await runner.close()
    await asyncio.to_thread(store.close)


async def test_long_query_does_not_delay_others(runner: QueryRunner, store: Store) -> None:
    """A report over years runs beside the dashboard's queries and authentication."""
    runner.ask("long")
    await runner.have_begun("long")
    found = await runner.pool.ask(list_tenants)
    version = await asyncio.to_thread(store.registry_version)

    assert len(found) == 1
    assert version > 0


async def test_operators_and_tenants_leave_each_other_a_connection(runner: QueryRunner) -> None:
    """And no more queries run at once than there are connections."""
    for number in range(3):
        runner.ask(f"operator {number}")
    await runner.have_begun("operator 0", "operator 1")
    for number in range(3):
        runner.ask(f"tenant {number}", tenant_id=number)
    await runner.have_begun("operator 0", "operator 1", "tenant 0")
    for number in range(2):
        await runner.end(f"operator {number}")
    await runner.have_begun("operator 0", "operator 1", "tenant 0", "tenant 1", "operator 2")

    assert not runner.asked["tenant 2"].done()


async def test_tenant_runs_one_query_at_a_time(runner: QueryRunner) -> None:
    """A tenant with a hundred queries takes turns with the others."""
    for number in range(3):
        runner.ask(f"ada {number}", tenant_id=1)
    await runner.have_begun("ada 0")
    for number in range(2, 4):
        runner.ask(f"tenant {number}", tenant_id=number)
    await runner.have_begun("ada 0", "tenant 2")
    await runner.end("ada 0")
    await runner.have_begun("ada 0", "tenant 2", "tenant 3")


async def test_cancelled_query_keeps_its_connection_until_it_ends(runner: QueryRunner) -> None:
    """A thread cannot be stopped: clients that ask and leave must not take every connection. A
    query that has not begun is dropped."""
    runner.ask("gone", tenant_id=1)
    await runner.have_begun("gone")
    runner.ask("waits and goes", tenant_id=1)
    runner.ask("waits", tenant_id=1)
    await asyncio.sleep(0)
    for name in ("gone", "waits and goes"):
        runner.asked[name].cancel()
        await asyncio.wait([runner.asked[name]])
    await runner.have_begun("gone")
    await runner.end("gone")
    await runner.have_begun("gone", "waits")


async def test_query_cancelled_in_queue_frees_its_turn(runner: QueryRunner) -> None:
    for number in range(2, 4):
        runner.ask(f"tenant {number}", tenant_id=number)
    await runner.have_begun("tenant 2", "tenant 3")
    runner.ask("goes", tenant_id=1)
    await asyncio.sleep(0)
    runner.asked["goes"].cancel()
    runner.ask("comes", tenant_id=1)
    await runner.end("tenant 2")
    await runner.have_begun("tenant 2", "tenant 3", "comes")


async def test_failed_query_does_not_affect_the_next(store: Store) -> None:
    """Closing twice is safe."""
    pool = QueryPool(store)
    with pytest.raises(StoreError):
        await pool.ask(lambda store: store.query("select * from nowhere"))
    found = await pool.ask(list_tenants)
    await pool.close()
    await pool.close()
    await asyncio.to_thread(store.close)

    assert len(found) == 1
