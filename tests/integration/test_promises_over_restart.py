"""A promise outlives its gateway: what was written for an hour is read after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from engine.model_store import ModelCard
from gateway.background.erasure import ErasureTarget
from gateway.caching import promise_store
from tenancy.accounting.audit import check_books
from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.written_prefixes import take_over
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.interface import Row, Store
from tenancy.storage.postgres import PostgresStore
from tenancy.types import wall_ms
from tests.unit.gateway.gateway_fixture import PATIENCE_S, GatewayFixture
from tests.unit.tenancy.storage.new_sqlite import new_sqlite

TEXT = "A handbook of many words that is read again and again. " * 5
CARD = RateCard(
    "std",
    input=30,
    output=150,
    cache_read=3,
    cache_write={"1h": 60},
    breach_credit="write_price",
)


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store of either kind."""
    if request.param == "postgres":
        server = request.getfixturevalue("postgres_server")
        name = server.database()
        with closing(PostgresStore(server.address(name), is_ready=True)) as store:
            yield store
        server.drop(name)
    else:
        with closing(new_sqlite(tmp_path / "t.db")) as store:
            yield store


class Deploys:
    """Gateways over one database, one after the other, each with an engine of its own."""

    def __init__(self, card: ModelCard, folder: Path, store: Store) -> None:
        self._card, self._folder, self._store = card, folder, store
        self._number = 0

    @asynccontextmanager
    async def gateway(self) -> AsyncIterator[GatewayFixture]:
        """Run the next gateway."""
        self._number += 1
        gateway = await asyncio.to_thread(GatewayFixture, self._card, self._folder, self._store)
        gateway.epoch = str(self._number)
        await gateway.open()
        try:
            yield gateway
        finally:
            await gateway.close()


@pytest.fixture
def deploys(card: ModelCard, tmp_path: Path, store: Store) -> Deploys:
    add_card(store, wall_ms, CARD)
    return Deploys(card, tmp_path, store)


async def ask(gateway: GatewayFixture, ttl: str = "1h") -> dict[str, int]:
    """Send the long prompt; return its usage by prompt component."""
    mark = {"type": "ephemeral", "ttl": ttl}
    body: dict[str, Any] = {
        "model": gateway.model,
        "max_tokens": 1,
        "system": [{"type": "text", "text": TEXT, "cache_control": mark}],
        "messages": [{"role": "user", "content": "x"}],
    }
    status, answer, _ = await gateway.ask("/v1/messages", body)
    assert status == 200, answer
    return {
        "read": answer["usage"]["cache_read_input_tokens"],
        "written": answer["usage"]["cache_creation_input_tokens"],
    }


async def query(store: Store, sql: str) -> list[Row]:
    """Query in a thread: a server's answer may take a round trip."""
    return await asyncio.to_thread(store.query, sql)


async def rows(store: Store) -> int:
    return int((await query(store, "select count(*) from written_prefixes"))[0][0])


async def test_written_prefix_is_read_after_a_restart(deploys: Deploys, store: Store) -> None:
    """Billed as read; the engine had to compute it again, which the card credits, once."""
    async with deploys.gateway() as first:
        wrote = await ask(first)
        again = await ask(first)
    async with deploys.gateway() as second:
        after = await ask(second)
        later = await ask(second)
        promises = second.gateway.context.contracts.promises.counts(second.gateway.context.clock())
    written = wrote["written"]
    credited = await query(store, "select request_id from adjustments")
    sql = "select recomputed_promised_tokens from ledger order by entry_id"
    breached = await query(store, sql)

    assert written > 50
    assert again == after == later == {"read": written, "written": 0}
    assert [row[0] > 0 for row in breached] == [False, False, True, False]
    assert len(credited) == 1
    assert promises[(1, "1h")]["broken"] == 1
    assert await asyncio.to_thread(check_books, store) == []


async def test_erasure_deletes_the_rows_before_its_receipt(deploys: Deploys, store: Store) -> None:
    """What a tenant erased must not come back with the next gateway."""
    async with deploys.gateway() as first:
        await ask(first)
        await first.gateway.context.promise_store.flush()
        before = await rows(store)
        await first.gateway.erasure.erase(ErasureTarget(1, 0))
        at_receipt = await rows(store)
    async with deploys.gateway() as second:
        after = await ask(second)

    assert (before, at_receipt) == (1, 0)
    assert after["read"] == 0


async def test_deleted_tenant_leaves_no_rows(deploys: Deploys, store: Store) -> None:
    """Neither now nor with the next gateway."""
    async with deploys.gateway() as first:
        await ask(first)
        await first.gateway.context.running.wait_idle(PATIENCE_S)
        await first.gateway.context.promise_store.flush()
        await asyncio.to_thread(delete_tenant, store, wall_ms, "ada")
        left = await rows(store)

    assert left == 0


async def test_expired_promise_is_not_taken_over(
    deploys: Deploys, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five minutes pass while no gateway runs; the row goes at the start."""
    async with deploys.gateway() as first:
        await ask(first, "5m")
    assert await rows(store) == 1
    later = wall_ms() + 301_000
    monkeypatch.setattr(
        promise_store, "take_over", lambda store, name, _: take_over(store, name, later)
    )
    async with deploys.gateway() as second:
        left = await rows(store)
        after = await ask(second, "5m")

    assert left == 0
    assert after["read"] == 0
