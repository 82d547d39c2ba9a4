"""Storage metering: whole token-seconds, none lost, sums equal to the use of the pool."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.api import Quota
from engine.cache import PrefixCache
from engine.client.namespace_stats import NamespaceTable
from engine.statistics import NamespaceStats
from gateway.background.storage_metering import (
    NS_PER_S,
    StorageMeter,
    StorageMetering,
    token_changes,
)
from gateway.retention_classes import BEST_EFFORT
from tenancy.accounting.focus_export import cost_rows
from tenancy.errors import LedgerUnavailable, StoreError
from tenancy.ledger.transactions import Item, StorageReadings
from tenancy.pricing.charges import RateCard, format_dollars
from tenancy.pricing.rate_cards import add_card
from tenancy.types import wall_ms
from tests.fakes import FakeClock
from tests.unit.gateway.gateway_fixture import GatewayFixture


def namespace(tenant: int, workspace: str = "default") -> bytes:
    parts = (str(tenant), workspace, "model", "template", "")
    return b"".join(len(part).to_bytes(4, "big") + part.encode() for part in parts)


def stats_of(namespace: bytes, blocks: int, **promised: int) -> NamespaceStats:
    """Return the stats of so many blocks, some of them promised in a class."""
    return NamespaceStats(namespace, blocks, 0, 0, 0, promised)


def table_of(book: NamespaceTable, **blocks: int) -> NamespaceTable:
    """Return a namespace table of `t1=5`: tenant and blocks."""
    book.add(stats_of(namespace(int(name[1:])), count) for name, count in blocks.items())
    return book


def text(words: str, **more: object) -> dict[str, object]:
    return {"type": "text", "text": words, **more}


def test_a_promise_that_moved_down_is_metered_as_before() -> None:
    """Once, in its class: also where the device has no block of it any more."""
    here = NamespaceStats(namespace(1), 5, 0, 0, 0, {"1h": 3})
    below = replace(here, promised_below=3)
    away = NamespaceStats(namespace(1), 2, 0, 0, 0, {"1h": 3}, promised_below=3, promised_away=3)

    assert token_changes([(None, here)], 16) == {(1, "1h"): 48, (1, BEST_EFFORT): 32}
    assert token_changes([(here, below)], 16) == {}
    assert token_changes([(below, away)], 16) == {}
    assert away.promised_on_device == 0


def test_state_holds_until_the_next_update() -> None:
    """Five blocks of sixteen tokens for ten seconds."""
    meter, book = StorageMeter(), NamespaceTable()
    meter.update(table_of(book, t1=5), 16, 0)
    meter.update(table_of(book, t1=1), 16, 10 * NS_PER_S)
    meter.update(table_of(book, t1=0), 16, 12 * NS_PER_S)

    assert meter.take() == {(1, BEST_EFFORT): 5 * 16 * 10 + 16 * 2}
    assert meter.take() == {}


def test_promised_blocks_count_in_their_class() -> None:
    """A tenant's workspaces count together."""
    spaces = (
        NamespaceStats(namespace(1), 5, 0, 0, 0, {"1h": 2, "5m": 1}),
        NamespaceStats(namespace(1, "lab"), 1, 0, 0, 0, {"1h": 1}),
        NamespaceStats(b"", 9, 0, 0, 0),
    )

    found = token_changes(((None, one) for one in spaces), 16)

    assert found == {(1, "1h"): 48, (1, "5m"): 16, (1, BEST_EFFORT): 32}
    assert token_changes([(spaces[0], spaces[1])], 16) == {
        (1, "1h"): -16,
        (1, "5m"): -16,
        (1, BEST_EFFORT): -32,
    }


def test_new_engine_starts_empty() -> None:
    """Without an engine nothing is held."""
    meter = StorageMeter()
    meter.update(table_of(NamespaceTable(), t1=5, t2=1), 16, 0)
    meter.update(table_of(NamespaceTable(), t2=2), 16, 10 * NS_PER_S)
    meter.update(None, 0, 11 * NS_PER_S)
    meter.update(table_of(NamespaceTable()), 16, 20 * NS_PER_S)

    assert meter.take() == {(1, BEST_EFFORT): 800, (2, BEST_EFFORT): 160 + 32}


def test_two_meters_of_one_table_see_all_changes() -> None:
    book, meters = table_of(NamespaceTable(), t1=5), (StorageMeter(), StorageMeter())
    for now_s in (0, 10):
        for meter in meters:
            meter.update(book, 16, now_s * NS_PER_S)

    assert [meter.take() for meter in meters] == [{(1, BEST_EFFORT): 800}] * 2


happenings = st.tuples(
    st.integers(1, 3),
    st.sampled_from(["", "1h"]),
    st.integers(0, 9),
    st.integers(0, 3 * NS_PER_S),
    st.sampled_from(["", "", "", "read", "restart"]),
)


@given(st.lists(happenings, max_size=30))
def test_readings_add_up_to_the_held_token_seconds(
    history: list[tuple[int, str, int, int, str]],
) -> None:
    """For any changes and any times of reading, whole seconds add up to the total."""
    meter, book, now_ns = StorageMeter(), NamespaceTable(), 0
    total: Counter[tuple[int, str]] = Counter()
    taken: Counter[tuple[int, str]] = Counter()
    present: dict[int, tuple[str, int]] = {}
    meter.update(book, 16, 0)
    for tenant, kind, blocks, pause_ns, what in history:
        now_ns += pause_ns
        for owner, (name, count) in present.items():
            total[owner, name or BEST_EFFORT] += count * 16 * pause_ns
        if what == "restart":
            book, present = NamespaceTable(), {}
        present[tenant] = (kind, blocks)
        book.add([stats_of(namespace(tenant), blocks, **({kind: blocks} if kind else {}))])
        meter.update(book, 16, now_ns)
        if what == "read":
            taken.update(meter.take())
    taken.update(meter.take())

    assert taken == Counter({key: whole for key, n in total.items() if (whole := n // NS_PER_S)})


@given(st.lists(st.tuples(st.integers(1, 3), st.lists(st.integers(0, 1), min_size=1, max_size=12))))
def test_tenants_blocks_add_up_to_the_pools_use(prompts: list[tuple[int, list[int]]]) -> None:
    """A shared block counts once: for the namespace that holds it."""
    cache = PrefixCache(blocks=32, block_size=4)
    tables = []
    for number, (tenant, words) in enumerate(prompts):
        table = cache.begin(namespace(tenant), words, float(number), quota=Quota())
        if cache.grow(table, len(words), float(number)):
            cache.take_copies()
            cache.commit(table, words, len(words), float(number))
        tables.append((table, words))
        if number % 2:
            cache.release(*tables.pop(0), float(number))

    seen = token_changes(((None, stats_of(u.namespace, u.blocks)) for u in cache.namespaces()), 4)
    used = cache.stats()
    assert sum(seen.values()) == 4 * (used.blocks - used.free)


async def begin_metering(gateway: GatewayFixture) -> tuple[StorageMetering, FakeClock]:
    """Return a meter that has read once what the cache keeps, and its clock."""
    context, clock = gateway.gateway.context, FakeClock()
    await gateway.until(lambda: gateway.engine.stats.cached_blocks > 0)
    context.clock = clock
    watch = StorageMetering(context, gateway.gateway.erasure)
    await watch.close()
    return watch, clock


async def test_storage_is_charged_by_class(gateway: GatewayFixture) -> None:
    """From the breakpoint of a request to the cost row: a class's price applies to its blocks."""
    card = add_card(gateway.store, wall_ms, RateCard("list", storage={"1h": 20_000}))
    hour = {"type": "ephemeral", "ttl": "1h"}
    messages = [{"role": "user", "content": [text("word " * 40, cache_control=hour)]}]
    asked = {"model": gateway.model, "max_tokens": 2, "messages": messages}
    status, _, _ = await gateway.ask("/v1/messages", asked)
    watch, clock = await begin_metering(gateway)
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
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    context = gateway.gateway.context
    await gateway.ask(body=gateway.chat())
    watch, clock = await begin_metering(gateway)
    clock.advance(10.0)

    with monkeypatch.context() as broken:
        broken.setattr(context, part, _Unavailable())
        await watch.close()
    await watch.close()

    ((seconds,),) = gateway.store.query("select sum(token_seconds) from storage_hours")
    assert seconds == 10 * 16 * sum(one.blocks for one in gateway.engine.namespaces) > 0


async def test_a_reading_whose_answer_was_lost_counts_once(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger's process may die between its commit and its answer."""
    context = gateway.gateway.context
    write = context.ledger.write

    async def lose_answer(item: Item) -> None:
        await write(item)
        raise LedgerUnavailable("not_durable", "The ledger process died.")

    await gateway.ask(body=gateway.chat())
    watch, clock = await begin_metering(gateway)
    clock.advance(10.0)
    with monkeypatch.context() as lossy:
        lossy.setattr(context.ledger, "write", lose_answer)
        await watch.close()
    clock.advance(5.0)
    await watch.close()

    ((seconds,),) = gateway.store.query("select sum(token_seconds) from storage_hours")
    assert seconds == 15 * 16 * sum(one.blocks for one in gateway.engine.namespaces) > 0


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
