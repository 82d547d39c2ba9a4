"""The database once more, for questions that take their time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.ledger.metering import wall_ms
from gateway.ledger.query_pool import QueryPool
from tenancy.accounts.tenants import create_tenant, list_tenants
from tenancy.errors import StoreError
from tenancy.storage.interface import Store
from tenancy.storage.sqlite import SqliteStore

PATIENCE_S = 60


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = SqliteStore(tmp_path / "test.db")
    create_tenant(store, wall_ms, "ada")
    return store


async def test_a_question_sees_what_was_committed(store: Store) -> None:
    """By another connection, without being told."""
    reports = QueryPool(store)
    before = await reports.ask(list_tenants)
    await asyncio.to_thread(create_tenant, store, wall_ms, "bob")
    after = await reports.ask(list_tenants)
    await reports.close()
    await asyncio.to_thread(store.close)

    assert (len(before), len(after)) == (1, 2)


class Desk:
    """Questions that wait in their threads until they are let go, and who has begun."""

    def __init__(self, store: Store) -> None:
        self.reports = QueryPool(store)
        self.begun: list[str] = []
        self.asked: dict[str, asyncio.Task[object]] = {}
        self._go: dict[str, threading.Event] = {}
        self._began = threading.Condition()

    def ask(self, name: str, tenant_id: int | None = None) -> None:
        """Ask it; it runs until `end`."""
        go = self._go[name] = threading.Event()

        def answer(_: Store) -> None:
            with self._began:
                self.begun.append(name)
                self._began.notify_all()
            assert go.wait(PATIENCE_S)

        self.asked[name] = asyncio.create_task(self.reports.ask(answer, tenant_id))

    async def have_begun(self, *names: str) -> None:
        """Until these and no others have."""

        def wait() -> bool:
            with self._began:
                return self._began.wait_for(lambda: len(self.begun) >= len(names), PATIENCE_S)

        assert await asyncio.to_thread(wait)
        for _ in range(50):  # whoever could begin besides would have come to it
            await asyncio.sleep(0)
        assert sorted(self.begun) == sorted(names)

    async def end(self, name: str) -> None:
        """Let it answer."""
        self._go[name].set()
        await asyncio.wait([self.asked[name]])

    async def close(self) -> None:
        """Let all answer that have begun."""
        for go in self._go.values():
            go.set()
        for asked in self.asked.values():
            asked.cancel()
        await asyncio.wait(self.asked.values())
        await self.reports.close()


@pytest.fixture
async def desk(store: Store) -> AsyncIterator[Desk]:
    desk = Desk(store)
    yield desk
    await desk.close()
    await asyncio.to_thread(store.close)


async def test_a_long_question_keeps_no_short_one_waiting(desk: Desk, store: Store) -> None:
    """Nor authentication: a report over years runs beside the dashboard's."""
    desk.ask("long")
    await desk.have_begun("long")
    found = await desk.reports.ask(list_tenants)
    version = await asyncio.to_thread(store.registry_version)

    assert len(found) == 1
    assert version > 0


async def test_operators_leave_tenants_a_place_and_tenants_them(desk: Desk) -> None:
    """Whatever one side asks, the other is answered; no more run at once than there are places."""
    for number in range(3):
        desk.ask(f"operator {number}")
    await desk.have_begun("operator 0", "operator 1")
    for number in range(3):
        desk.ask(f"tenant {number}", tenant_id=number)
    await desk.have_begun("operator 0", "operator 1", "tenant 0")
    for number in range(2):
        await desk.end(f"operator {number}")
    await desk.have_begun("operator 0", "operator 1", "tenant 0", "tenant 1", "operator 2")

    assert not desk.asked["tenant 2"].done()


async def test_a_tenant_has_one_at_a_time(desk: Desk) -> None:
    """Whoever asks a hundred things at once has them answered between the others'."""
    for number in range(3):
        desk.ask(f"ada {number}", tenant_id=1)
    await desk.have_begun("ada 0")
    for number in range(2, 4):
        desk.ask(f"tenant {number}", tenant_id=number)
    await desk.have_begun("ada 0", "tenant 2")
    await desk.end("ada 0")
    await desk.have_begun("ada 0", "tenant 2", "tenant 3")


async def test_who_is_gone_has_a_place_until_its_question_is_over(desk: Desk) -> None:
    """A thread cannot be stopped: clients that ask and leave must not have every one. What has
    not begun is not asked."""
    desk.ask("gone", tenant_id=1)
    await desk.have_begun("gone")
    desk.ask("waits and goes", tenant_id=1)
    desk.ask("waits", tenant_id=1)
    await asyncio.sleep(0)
    for name in ("gone", "waits and goes"):
        desk.asked[name].cancel()
        await asyncio.wait([desk.asked[name]])
    await desk.have_begun("gone")
    await desk.end("gone")
    await desk.have_begun("gone", "waits")


async def test_who_goes_before_its_turn_keeps_nothing(desk: Desk) -> None:
    """Not even the place in front of the others of its own."""
    for number in range(2, 4):
        desk.ask(f"tenant {number}", tenant_id=number)
    await desk.have_begun("tenant 2", "tenant 3")
    desk.ask("goes", tenant_id=1)
    await asyncio.sleep(0)
    desk.asked["goes"].cancel()
    desk.ask("comes", tenant_id=1)
    await desk.end("tenant 2")
    await desk.have_begun("tenant 2", "tenant 3", "comes")


async def test_a_question_that_fails_fails_alone(store: Store) -> None:
    """The next one is answered; closing twice is closing."""
    reports = QueryPool(store)
    with pytest.raises(StoreError):
        await reports.ask(lambda store: store.query("select * from nowhere"))
    found = await reports.ask(list_tenants)
    await reports.close()
    await reports.close()
    await asyncio.to_thread(store.close)

    assert len(found) == 1
