"""Usage over any period equals the sum of its entries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenancy.accounting.usage import UsageGroup, UsageTotal, entries_of, span_of, usage
from tenancy.accounts.tenants import create_tenant
from tenancy.ledger.ledger import Ledger
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.interface import Store
from tenancy.storage.postgres import PostgresStore
from tenancy.types import DAY_MS, HOUR_MS, UsageEntry
from tests.unit.tenancy.conftest import Wall
from tests.unit.tenancy.storage.new_sqlite import new_sqlite
from tests.unit.tenancy.storage.postgres_server import Server

ENTRIES = 60
BYS: list[UsageGroup] = ["key", "model", "hour", "day"]


def entry(number: int) -> UsageEntry:
    """Return entry number `number`, spread over two tenants, three keys, two models and three
    days."""
    at_ms = 2 * HOUR_MS + number * 4_217_000
    return UsageEntry(
        request_id=str(number),
        tenant_id=1 + number % 2,
        key_id=1 + number % 3,
        model="ab"[number % 2],
        ending="done",
        started_ms=at_ms,
        ended_ms=at_ms + 5,
        prompt_tokens=3 + number,
        cache_read_tokens=number,
        cache_write_tokens=2,
        fresh_tokens=1,
        output_tokens=7,
        physical_cached_tokens=number // 2,
        read={"5m": number} if number else {},
        write={"5m": 1, "1h": 1},
        recomputed_promised_tokens=1,
        ttft_ms=None if number % 5 == 0 else 10 + number,
        host_cached_tokens=number // 4,
        disk_cached_tokens=number // 8,
        remote_cached_tokens=number // 16,
    )


INSTANTS = st.one_of(
    st.integers(0, 80 * HOUR_MS),
    st.builds(  # just before an entry, at it, and just after it
        lambda number, more: entry(number).started_ms + more,
        st.integers(0, ENTRIES - 1),
        st.integers(-1, 1),
    ),
)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    store: Store
    if request.param == "postgres":
        server: Server = request.getfixturevalue("postgres_server")
        store = PostgresStore(server.address(server.database()), is_ready=True)
    else:
        store = new_sqlite(tmp_path_factory.mktemp("usage") / "test.db")
    wall = Wall()
    for name in ("ada", "bob"):
        create_tenant(store, wall, name)
    add_card(store, wall, RateCard("std", input=5, output=10**12 // 7, cache_read=1))
    ledger = Ledger(store, wall)
    for number in range(ENTRIES):
        ledger.settle(entry(number)).result(60)
    ledger.close()
    yield store
    store.close()


def facts(total: UsageTotal) -> tuple[int, ...]:
    return (
        *(total.requests, total.prompt_tokens, total.cache_read_tokens, total.cache_write_tokens),
        *(total.fresh_tokens, total.output_tokens, total.physical_cached_tokens, total.hits),
        *(total.ttft_hits, total.ttft_hit_ms, total.charge_pico, total.saved_pico),
        *(total.host_cached_tokens, total.disk_cached_tokens, total.remote_cached_tokens),
    )


def in_words(entries: list[UsageEntry]) -> tuple[int, ...]:
    """Compute the sums by iterating over all entries."""
    timed = [e for e in entries if e.ttft_ms is not None and e.cache_read_tokens]
    return (
        *(len(entries), sum(e.prompt_tokens for e in entries)),
        *(sum(e.cache_read_tokens for e in entries), sum(e.cache_write_tokens for e in entries)),
        *(sum(e.fresh_tokens for e in entries), sum(e.output_tokens for e in entries)),
        sum(e.physical_cached_tokens for e in entries),
        sum(e.cache_read_tokens > 0 for e in entries),
        *(len(timed), sum(e.ttft_ms or 0 for e in timed)),
        *(sum(e.charge_pico for e in entries), sum(e.saved_pico for e in entries)),
        *(sum(e.host_cached_tokens for e in entries), sum(e.disk_cached_tokens for e in entries)),
        sum(e.remote_cached_tokens for e in entries),
    )


@given(st.data())
def test_any_period_equals_the_sum_of_its_entries(store: Store, data: st.DataObject) -> None:
    """Whole hours from sums, partial hours from entries: nothing twice, nothing left out."""
    since_ms = data.draw(INSTANTS)
    until_ms = data.draw(st.none() | INSTANTS)
    tenant = data.draw(st.sampled_from([None, "ada", "bob"]))
    key_id = data.draw(st.sampled_from([None, 1, 2, 3]))
    model = data.draw(st.sampled_from([None, "a", "b"]))
    by = data.draw(st.lists(st.sampled_from(BYS), unique=True))
    found = usage(
        store,
        tenant=tenant,
        key_id=key_id,
        model=model,
        since_ms=since_ms,
        until_ms=until_ms,
        by=by,
    )
    meant: dict[tuple[object, ...], list[UsageEntry]] = {}
    for _, booked_ms, name, one in entries_of(store, tenant, since_ms, until_ms, 0, 1000):
        if key_id in (None, one.key_id) and model in (None, one.model):
            of = {
                "key": one.key_id,
                "model": one.model,
                "hour": booked_ms // HOUR_MS * HOUR_MS,
                "day": booked_ms // DAY_MS * DAY_MS,
            }
            group = (name, *(of[name] for name in by))
            meant.setdefault(group, []).append(one)

    assert [facts(total) for total in found] == [in_words(meant[key]) for key in sorted(meant)]


@given(st.data())
def test_span_bounds_the_entries_of_a_period(store: Store, data: st.DataObject) -> None:
    """An export of one day does not read earlier or later entries."""
    since_ms, until_ms = data.draw(INSTANTS), data.draw(st.none() | INSTANTS)
    tenant = data.draw(st.sampled_from([None, "ada", "bob", "nobody"]))
    found = entries_of(store, tenant, since_ms, until_ms, 0, 1000)
    ids = [entry_id for entry_id, *_ in found]
    after, last = span_of(store, tenant, since_ms, until_ms)

    if since_ms > 0 or until_ms is not None:
        assert (after, last) == ((min(ids) - 1, max(ids)) if ids else (0, 0))
    assert entries_of(store, tenant, since_ms, until_ms, after, 1000, last) == found


def test_groups_by_the_requested_columns_only(store: Store) -> None:
    (first, *_), (total, *_) = usage(store, by=["hour", "key"]), usage(store)

    assert (first.tenant, first.from_ms, first.key_id, first.model) == ("ada", 2 * HOUR_MS, 1, None)
    assert (total.from_ms, total.key_id, total.model) == (None, None, None)


def test_entries_come_in_pages(store: Store) -> None:
    """An export of millions never holds all of them."""
    seen: list[str] = []
    after = 0
    while page := entries_of(store, None, 0, None, after, 7):
        seen += [one.request_id for _, _, _, one in page]
        after = page[-1][0]

    assert seen == [str(number) for number in range(ENTRIES)]


def test_names_are_bound_not_interpolated(store: Store) -> None:
    assert usage(store, tenant="ada' or '1'='1") == []
    assert usage(store, model="a\x00' --") == []


def test_reversed_period_is_empty(store: Store) -> None:
    assert usage(store, since_ms=5 * HOUR_MS + 1, until_ms=4 * HOUR_MS) == []
