"""Sums in `recent_sums` and in their permanent tables give the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from msgspec import structs

from tenancy.accounting.audit import check_books
from tenancy.accounting.reconcile import reconcile
from tenancy.accounting.usage import UsageGroup, usage
from tenancy.accounts.tenants import create_tenant
from tenancy.ledger.aggregates import FOLD_ROWS_MAX, fold_recent_sums
from tenancy.ledger.engine_counts import EngineTotals
from tenancy.ledger.transactions import Item, LedgerTransactions
from tenancy.ledger.writer import LedgerWriter
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.interface import Store
from tenancy.types import DAY_MS, HOUR_MS, UsageEntry
from tests.unit.tenancy.conftest import Wall, used

GROUPS: tuple[Sequence[UsageGroup], ...] = (
    (),
    ("key",),
    ("model",),
    ("hour",),
    ("day",),
    ("day", "key"),
)
PLACES = ("usage_hours", "usage_days", "epoch_sums", "recent_sums")


def some_entries(random: Random, count: int) -> list[UsageEntry]:
    """Return hits and misses of two tenants, in few hours of three days, and two engine epochs."""
    return [
        structs.replace(
            used(str(number), random.randrange(3) * DAY_MS + random.randrange(2 * HOUR_MS)),
            cache_read_tokens=(read := random.choice((0, 1, 5))),
            fresh_tokens=7 - read,
            read={"1h": read},
            tenant_id=random.choice((1, 2)),
            key_id=random.choice((1, 2)),
            ttft_ms=random.choice((None, 3)),
            epoch=random.choice(("", "e1", "e2")),
        )
        for number in range(count)
    ]


def answers(store: Store) -> list[object]:
    """Return the results of every query over sums."""
    asked = [usage(store, by=by) for by in GROUPS]
    parts = [
        usage(store, tenant="ada", since_ms=HOUR_MS // 2, until_ms=2 * DAY_MS + 5, by=by)
        for by in GROUPS
    ]
    return [*asked, *parts, reconcile(store), check_books(store)]


def test_folding_changes_no_query_result(store: Store, wall: Wall) -> None:
    """Before, between and after, with entries booked meanwhile."""
    for name in ("ada", "bob"):
        create_tenant(store, wall, name)
    add_card(store, wall, RateCard("std", input=3_000, output=900_000, cache_write={"1h": 9_000}))
    set_budget(store, Budget(1, "day", hard_micros=10**12))
    entries, books = some_entries(Random(3), 200), LedgerTransactions()
    totals: list[Item] = [EngineTotals(f"e{n}", 1, 0, 0, 0, 0, 0, 0) for n in (1, 2)]
    seen = []
    for items in ([*totals, *entries[:100]], [], entries[100:], []):
        with store.change() as db:
            if items:
                books.apply(db, items)
            else:
                fold_recent_sums(db)
        seen.append(answers(store))
    places = {place: len(store.query(f"select * from {place}")) for place in PLACES}

    assert seen[0] == seen[1] != seen[2] == seen[3]
    assert seen[3][-1] == []
    assert usage(store, by=["day"]) != []
    assert (places["recent_sums"], places["epoch_sums"]) == (0, 2)


def test_folds_a_bounded_number_of_rows(store: Store, wall: Wall) -> None:
    """A tenant with thousands of keys must not block others."""
    create_tenant(store, wall, "ada")
    count = 2 * FOLD_ROWS_MAX + 50
    sent = [structs.replace(used(str(key), wall()), key_id=key) for key in range(count)]
    with store.change() as db:
        LedgerTransactions().apply(db, sent)
    left = []
    for _ in range(3):
        with store.change() as db:
            has_more = fold_recent_sums(db)
        left.append((has_more, store.query("select count(*) from recent_sums")[0][0]))

    assert left == [(True, FOLD_ROWS_MAX + 50), (True, 50), (False, 0)]
    assert store.query("select count(*), sum(requests) from usage_days") == [(count, count)]
    assert check_books(store) == []


def test_writer_folds_each_minute_and_at_its_end(store: Store, wall: Wall) -> None:
    """So recent rows stay few and old rows are in their place."""
    create_tenant(store, wall, "ada")
    writer = LedgerWriter(store, wall)
    left: list[int] = []
    for minutes in (0, 0, 1, 0):
        wall.ms += 60_000 * minutes
        writer.write([used(str(len(left)), wall())])
        writer.run_maintenance()
        left.append(store.query("select coalesce(sum(requests), 0) from recent_sums")[0][0])
    keys = range(FOLD_ROWS_MAX + 1)
    writer.write([structs.replace(used(f"k{key}", wall()), key_id=key) for key in keys])
    writer.close()

    assert left == [1, 2, 0, 1]
    assert store.query("select sum(requests) from usage_hours") == [(4 + len(keys),)]
    assert store.query("select * from recent_sums") == []
