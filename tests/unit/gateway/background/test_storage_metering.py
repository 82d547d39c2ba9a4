"""Storage metering: what engines tell is written once, by however many gateways."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.api import HeldTokens
from engine.model_store import ModelCard
from gateway.background.storage_metering import READINGS_AT_ONCE, StorageMetering, readings_of
from gateway.retention_classes import BEST_EFFORT
from tenancy.accounting.focus_export import cost_rows
from tenancy.errors import LedgerUnavailable, StoreError
from tenancy.ledger.transactions import Item, StorageReading, StorageReadings
from tenancy.pricing.charges import RateCard, format_dollars
from tenancy.pricing.rate_cards import add_card
from tenancy.types import wall_ms
from tests.fakes import FakeClock
from tests.unit.gateway.gateway_fixture import GatewayFixture


@pytest.fixture
def clock() -> FakeClock:
    """The clock of the engine's core, which only a test moves."""
    return FakeClock()


@pytest.fixture
def unopened_gateway(card: ModelCard, tmp_path: Path, clock: FakeClock) -> Iterator[GatewayFixture]:
    fixture = GatewayFixture(card, tmp_path)
    fixture.clock = clock
    yield fixture
    fixture.discard()


def text(words: str, **more: object) -> dict[str, object]:
    return {"type": "text", "text": words, **more}


def test_readings_are_of_tenants_and_of_classes() -> None:
    """What is no tenant's is charged to nobody; a write has a bounded number of readings."""
    held = [
        HeldTokens(b"1", "", 7),
        HeldTokens(b"1", "1h", 8),
        HeldTokens(b"2", "", 9),
        HeldTokens(b"smoke test", "", 3),
    ]
    (few,) = readings_of("e1", 5, "m", held, {1: "gold"})
    many = [HeldTokens(b"1", f"{number}", 1) for number in range(2 * READINGS_AT_ONCE + 1)]

    assert few == StorageReadings(
        "e1",
        5,
        (
            StorageReading(1, BEST_EFFORT, 7, "m", "gold"),
            StorageReading(1, "1h", 8, "m", "gold"),
        ),
    )
    assert [len(one.readings) for one in readings_of("e1", 5, "m", many, {1: "gold"})] == [
        *(READINGS_AT_ONCE, READINGS_AT_ONCE, 1)
    ]
    assert readings_of("e1", 5, "m", held, {}) == []


async def new_metering(gateway: GatewayFixture) -> StorageMetering:
    """Return what writes what the engine holds, once all of it rests in the cache and is
    counted."""
    await gateway.quiet()
    await gateway.engine.get_held()
    return StorageMetering(gateway.gateway.context, gateway.gateway.erasure)


async def test_storage_is_charged_by_class(gateway: GatewayFixture, clock: FakeClock) -> None:
    """From the breakpoint of a request to the cost row: a class's price applies to its blocks."""
    card = add_card(gateway.store, wall_ms, RateCard("list", storage={"1h": 20_000}))
    hour = {"type": "ephemeral", "ttl": "1h"}
    messages = [{"role": "user", "content": [text("word " * 40, cache_control=hour)]}]
    asked = {"model": gateway.model, "max_tokens": 2, "messages": messages}
    status, _, _ = await gateway.ask("/v1/messages", asked)
    watch = await new_metering(gateway)
    clock.advance(3_600.0)
    await watch.close()

    ((tokens, card_id),) = gateway.store.query(
        "select token_seconds / 3600, rate_card_id from storage_hours where class = '1h'"
    )
    rows = list(cost_rows(gateway.store, "ada", 0, None, "us"))
    (row,) = (row for row in rows if row["ChargeDescription"] == "storage:1h")
    assert (status, card_id) == (200, card.rate_card_id)
    assert tokens >= 200
    assert row["x_BilledPico"] == tokens * 20_000
    _, usage, _ = await gateway.ask("/v1/usage", method="GET")
    row_told = next(one for one in usage["storage"] if one["class"] == "1h")
    assert row_told["token_seconds"] == tokens * 3_600
    assert row_told["charge_usd"] == format_dollars(tokens * 20_000)


@pytest.mark.parametrize("part", ["store", "ledger"])
async def test_failed_writes_are_part_of_the_next_reading(
    gateway: GatewayFixture, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    context = gateway.gateway.context
    await gateway.ask(body=gateway.chat())
    watch = await new_metering(gateway)
    clock.advance(10.0)

    with monkeypatch.context() as broken:
        broken.setattr(context, part, _Unavailable())
        await watch.close()
    await watch.close()

    ((seconds,),) = gateway.store.query("select sum(token_seconds) from storage_hours")
    assert seconds == 10 * 16 * sum(one.blocks for one in gateway.engine.namespaces) > 0


async def test_a_reading_whose_answer_was_lost_counts_once(
    gateway: GatewayFixture, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger's process may die between its commit and its answer."""
    context = gateway.gateway.context
    write = context.ledger.write

    async def lose_answer(item: Item) -> None:
        await write(item)
        raise LedgerUnavailable("not_durable", "The ledger process died.")

    await gateway.ask(body=gateway.chat())
    watch = await new_metering(gateway)
    clock.advance(10.0)
    with monkeypatch.context() as lossy:
        lossy.setattr(context.ledger, "write", lose_answer)
        await watch.close()
    clock.advance(5.0)
    await watch.close()

    ((seconds,),) = gateway.store.query("select sum(token_seconds) from storage_hours")
    assert seconds == 15 * 16 * sum(one.blocks for one in gateway.engine.namespaces) > 0


async def test_two_gateways_enter_what_one_engine_holds_once(
    gateway: GatewayFixture, clock: FakeClock
) -> None:
    """Each asks when it likes; the second of two at one time adds nothing. A minute and a half in
    which none asks is part of the next reading."""
    await gateway.ask(body=gateway.chat())
    gateways = [await new_metering(gateway) for _ in range(2)]
    for pause_s, asking in ((20.0, (0, 1)), (15.0, (1,)), (90.0, (0, 1, 0))):
        clock.advance(pause_s)
        for number in asking:
            await gateways[number].write()

    ((seconds,),) = gateway.store.query("select sum(token_seconds) from storage_hours")
    assert seconds == 125 * 16 * sum(one.blocks for one in gateway.engine.namespaces) > 0


async def test_what_a_dead_engine_told_last_is_written(
    gateway: GatewayFixture, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger that was away meanwhile gets it later."""
    await gateway.ask(body=gateway.chat())
    watch = await new_metering(gateway)
    held = sum(one.blocks for one in gateway.engine.namespaces)
    clock.advance(10.0)
    with monkeypatch.context() as broken:
        broken.setattr(gateway.gateway.context, "ledger", _Unavailable())
        await watch.write()
    clock.advance(10.0)
    await gateway.engine.close()
    await watch.write()

    ((seconds,),) = gateway.store.query("select sum(token_seconds) from storage_hours")
    assert seconds == 10 * 16 * held > 0


class _Unavailable:
    """A store, or a ledger over one, that fails."""

    def query(self, sql: str, values: object = ()) -> None:
        raise StoreError("gone", "The database is away.")

    def write(self, reading: StorageReadings) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_exception(LedgerUnavailable("not_durable", "The database is away."))
        return future

    def change(self) -> None:
        raise StoreError("gone", "The database is away.")
