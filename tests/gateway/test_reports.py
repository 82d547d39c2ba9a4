"""The database once more, for questions that take their time."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from gateway.metering import wall_ms
from gateway.reports import Reports
from tenancy.errors import StoreError
from tenancy.registry import create_tenant, list_tenants
from tenancy.sqlite_store import SqliteStore
from tenancy.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = SqliteStore(tmp_path / "test.db")
    create_tenant(store, wall_ms, "ada")
    return store


async def test_a_question_sees_what_was_committed(store: Store) -> None:
    """By another connection, without being told."""
    reports = Reports(store)
    before = await reports.ask(list_tenants)
    await asyncio.to_thread(create_tenant, store, wall_ms, "bob")
    after = await reports.ask(list_tenants)
    await reports.close()
    await asyncio.to_thread(store.close)

    assert (len(before), len(after)) == (1, 2)


async def test_a_long_question_keeps_nobody_waiting_but_the_next(store: Store) -> None:
    """The registry goes on reading; a second question has its turn after the first."""
    reports = Reports(store)
    go = threading.Event()
    order: list[str] = []

    def long(_: Store) -> None:
        go.wait(10)
        order.append("long")

    first = asyncio.create_task(reports.ask(long))
    second = asyncio.create_task(reports.ask(lambda _: order.append("next")))
    await asyncio.sleep(0)
    version = await asyncio.to_thread(store.registry_version)
    seen = list(order)
    go.set()
    await asyncio.gather(first, second)
    await reports.close()
    await asyncio.to_thread(store.close)

    assert version > 0
    assert (seen, order) == ([], ["long", "next"])


async def test_a_question_that_fails_fails_alone(store: Store) -> None:
    """The next one is answered; closing twice is closing."""
    reports = Reports(store)
    with pytest.raises(StoreError):
        await reports.ask(lambda store: store.query("select * from nowhere"))
    found = await reports.ask(list_tenants)
    await reports.close()
    await reports.close()
    await asyncio.to_thread(store.close)

    assert len(found) == 1
