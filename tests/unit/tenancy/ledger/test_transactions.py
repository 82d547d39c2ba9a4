"""What one transaction writes: holds, priced entries, storage and engine counts."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tenancy.accounting.audit import check_books
from tenancy.accounting.closing import close_days
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import BadName, BadPrice, BudgetExceeded, LedgerUnavailable
from tenancy.ledger.engine_counts import EngineTotals
from tenancy.ledger.holds import ProgressNote
from tenancy.ledger.ledger import Hold, Ledger
from tenancy.ledger.transactions import (
    METER_KEPT_MS,
    Item,
    LedgerTransactions,
    StorageReading,
    StorageReadings,
    forget_readings,
)
from tenancy.ledger.writer import LedgerWriter
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import PRICE_MAX, RateCard, compute_savings, itemize
from tenancy.pricing.rate_cards import add_card, load_cards
from tenancy.storage.interface import Store
from tenancy.types import DAY_MS, TokenCounts
from tests.actors import TESTER
from tests.examples import examples
from tests.unit.tenancy.conftest import Wall, new_store, used
from tests.unit.tenancy.ledger.written import done, entries, holds

READING = StorageReading(1, "1h", 5)
CARD = RateCard("std", input=3_000, output=9_000, cache_read=300, cache_write={"1h": 6_000})


def test_entry_is_priced_and_keeps_its_fields(store: Store, ledger: Ledger, wall: Wall) -> None:
    """With the money filled in."""
    card = add_card(store, wall, CARD)
    sent = used("a", wall())
    done(ledger.settle(sent))

    assert entries(store)["a"] == structs.replace(
        sent,
        rate_card_id="std@1",
        charge_pico=itemize(card, sent).pico,
        saved_pico=compute_savings(card, sent),
    )


@pytest.mark.parametrize("money", [{"rate_card_id": "x@1"}, {"charge_pico": 5}, {"saved_pico": 5}])
def test_money_of_the_sender_is_not_stored(
    store: Store, ledger: Ledger, wall: Wall, money: dict[str, Any]
) -> None:
    """Without a card an entry is free, and its sender cannot say otherwise."""
    done(ledger.settle(structs.replace(used("a", wall()), **money)))

    assert entries(store) == {"a": used("a", wall())}
    assert check_books(store) == []


def test_price_at_admission_applies(store: Store, ledger: Ledger, wall: Wall) -> None:
    """After a restart, and when the response ends long after a price change."""
    add_card(store, wall, CARD)
    done(ledger.hold(Hold("a", 1, 1, "m", wall(), 10, 4)))
    began_ms, wall.ms = wall.ms, wall.ms + 1000
    add_card(store, wall, structs.replace(CARD, input=1))
    done(ledger.settle(used("a", began_ms)))
    done(ledger.settle(used("b", wall())))

    assert [entry.rate_card_id for entry in entries(store).values()] == ["std@1", "std@2"]


@pytest.mark.parametrize(
    "change", [{"read": {"5m": 4}}, {"write": {"5m": 4, "1h": -1}}, {"read": {"a": -1, "b": 6}}]
)
def test_refuses_class_sums_that_do_not_add_up(
    store: Store, ledger: Ledger, wall: Wall, change: dict[str, dict[str, int]]
) -> None:
    """L6: every token is in one class, and priced once."""
    refused = ledger.settle(structs.replace(used("a", wall()), **change))
    with pytest.raises(LedgerUnavailable) as caught:
        done(refused)

    assert caught.value.code == "impossible_entry"
    assert entries(store) == {}


def test_refuses_a_hold_beyond_the_largest_charge(store: Store, ledger: Ledger, wall: Wall) -> None:
    add_card(store, wall, structs.replace(CARD, output=PRICE_MAX))
    with pytest.raises(BadPrice):
        done(ledger.hold(Hold("a", 1, 1, "m", wall(), 1, 10**9)))

    assert holds(store) == 0


def test_progress_applies_to_holds_of_the_same_batch(store: Store, wall: Wall) -> None:
    """A stream's first note may share its hold's batch; settled requests need none."""
    create_tenant(store, wall, "ada")
    noted = ProgressNote({"a": TokenCounts(output_tokens=3), "b": TokenCounts(output_tokens=5)})
    held = [Hold(name, 1, 1, "m", wall()) for name in "ab"]
    items: list[Item] = [*held, noted, used("b", wall())]
    writer = LedgerWriter(store, wall)
    answers = writer.write(items)
    writer.close_own_holds()
    writer.close()

    assert answers == [None] * 4
    rows = store.query("select request_id, ending, output_tokens from ledger order by entry_id")
    assert rows == [("b", "done", 4), ("a", "interrupted", 3)]


def test_storage_is_summed_by_hour_class_and_card(store: Store, ledger: Ledger, wall: Wall) -> None:
    """In whole token-seconds; a new price begins a new sum."""
    add_card(store, wall, CARD)
    done(ledger.write(readings(wall(), StorageReading(1, "1h", 5, "m"))))
    done(ledger.write(readings(wall(), StorageReading(1, "1h", 12, "m"))))
    wall.ms += 1
    add_card(store, wall, structs.replace(CARD, input=9))
    done(ledger.write(readings(wall(), StorageReading(1, "1h", 23, "m"))))

    assert store.query("select class, rate_card_id, token_seconds from storage_hours") == [
        ("1h", "std@1", 12),
        ("1h", "std@2", 11),
    ]


@pytest.mark.parametrize("is_lost", [False, True], ids=["answered", "after a lost answer"])
def test_readings_written_again_count_once(store: Store, wall: Wall, is_lost: bool) -> None:
    """Whether the ledger runs on or its process died between commit and answer; a second life of
    the engine counts from its own start."""
    create_tenant(store, wall, "ada")
    add_card(store, wall, CARD)
    ledger = Ledger(store, wall)
    first = readings(wall(), StorageReading(1, "1h", 5), StorageReading(1, "5m", 6))
    done(ledger.write(first))
    if is_lost:
        ledger.close()
        ledger = Ledger(store, wall)
    done(ledger.write(first))
    done(ledger.write(readings(wall(), StorageReading(1, "1h", 12))))
    done(ledger.write(structs.replace(first, epoch="another life")))
    ledger.close()

    sql = "select class, sum(token_seconds) from storage_hours group by class order by class"
    assert store.query(sql) == [("1h", 17), ("5m", 12)]


@given(data=st.data())
@settings(max_examples=examples(60))
def test_two_gateways_enter_what_one_engine_held_once(data: st.DataObject) -> None:
    """However their readings of it are repeated, delayed, lost or out of order: what the ledger has
    is the largest number of each tenant, model and class that came."""
    told = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(["a", "b"]),
                st.lists(
                    st.builds(
                        StorageReading,
                        st.integers(1, 2),
                        st.sampled_from(["1h", "5m"]),
                        st.integers(0, 99),
                        st.sampled_from(["m", "n"]),
                    ),
                    min_size=1,
                    max_size=4,
                    unique_by=lambda one: (one.tenant_id, one.retention, one.model),
                ),
            ),
            max_size=12,
        )
    )
    wall, most = Wall(), dict[tuple[str, int, str, str], int]()
    with new_store() as store, closing(store.open_another()) as beside:
        for name in ("ada", "bob"):
            create_tenant(store, wall, name)
        gateways = LedgerTransactions(), LedgerTransactions()
        for number, (epoch, some) in enumerate(told):
            place = store if number % 2 else beside
            with place.change() as db:
                gateways[number % 2].apply(db, [StorageReadings(epoch, wall(), tuple(some))])
            gateways[number % 2].mark_committed(db)
            for one in some:
                key = epoch, one.tenant_id, one.model, one.retention
                most[key] = max(most.get(key, 0), one.token_seconds)
        sums = Counter[tuple[int, str, str]]()
        for (_, tenant_id, model, name), seconds in most.items():
            sums[tenant_id, model, name] += seconds
        rows = store.query("select tenant_id, model, class, token_seconds from storage_hours")

    assert {row[:3]: row[3] for row in rows} == {key: n for key, n in sums.items() if n}


def test_readings_of_a_deleted_tenant_are_left_out(store: Store, ledger: Ledger) -> None:
    """It left no rows, and others' readings of the same write count."""
    mixed = readings(1, StorageReading(1, "1h", 5), StorageReading(99, "1h", 1))
    done(ledger.write(mixed))

    assert store.query("select tenant_id, token_seconds from storage_hours") == [(1, 5)]


def test_an_engine_that_was_away_for_a_month_is_not_charged_twice(
    store: Store, ledger: Ledger
) -> None:
    """Its readings were forgotten: what it tells next, in however many writes, is where it counts
    from. Those of an engine that is heard stay."""
    late = 10 + METER_KEPT_MS
    away = structs.replace(readings(10, StorageReading(1, "1h", 50)), epoch="away")
    done(ledger.write(away))
    done(ledger.write(readings(late, READING)))
    forget_readings(store, late + 1)
    for seconds in (80, 90):
        for name in ("1h", "5m"):
            more = StorageReading(1, name, seconds)
            done(ledger.write(structs.replace(away, at_ms=late, readings=(more,))))

    sql = "select class, sum(token_seconds) from storage_hours group by class order by class"
    assert store.query(sql) == [("1h", 50 + 5 + 10), ("5m", 10)]
    assert store.query("select count(*) from storage_readings where epoch = 'e1'") == [(1,)]


def readings(at_ms: int, *given: StorageReading) -> StorageReadings:
    return StorageReadings("e1", at_ms, given)


def test_engine_totals_never_fall(store: Store, ledger: Ledger) -> None:
    """Readings may come late or twice."""
    for totals in (
        EngineTotals("e1", 10, 5, 3, 1, 5, 3, 1),
        EngineTotals("e1", 20, 9, 4, 2, 9, 4, 2, is_ended=True),
        EngineTotals("e1", 15, 7, 4, 2, 7, 4, 2),
    ):
        done(ledger.write(totals))
    (row,) = store.query("select prompt_tokens, cached_tokens, is_ended from engine_epochs")

    assert row == (9, 4, 1)


def test_sees_cards_of_another_process(store: Store, ledger: Ledger, wall: Wall) -> None:
    """From the next request."""
    done(ledger.settle(used("a", wall())))
    beside = store.open_another()
    add_card(beside, wall, structs.replace(CARD, tier="gold"))
    beside.close()
    done(ledger.settle(used("b", wall())))

    assert len(load_cards(store)) == 1
    assert [entry.rate_card_id for entry in entries(store).values()] == ["free", "std@1"]


def test_rolled_back_chain_is_not_continued(store: Store, wall: Wall) -> None:
    """The chain continues from the stored entries, also after another writer's."""
    create_tenant(store, wall, "ada")
    books, others = LedgerTransactions(), LedgerTransactions()

    def write(books: LedgerTransactions, request_id: str, *, fails: bool = False) -> None:
        with store.change() as db:
            books.apply(db, [used(request_id, wall())])
            if fails:
                raise BadName("any", "any")
        books.mark_committed(db)

    write(books, "a")
    with pytest.raises(BadName):
        write(books, "b", fails=True)
    write(books, "c")
    write(others, "d")
    write(books, "e")
    write(books, "f")

    assert list(entries(store)) == ["a", "c", "d", "e", "f"]
    assert check_books(store) == []


def test_caches_are_dropped_when_the_database_changes(store: Store, wall: Wall) -> None:
    """Another program's price, budget or close applies to every later item."""
    create_tenant(store, wall, "ada")
    writer = LedgerWriter(store, wall)
    writer.write([used("a", wall())])
    with closing(store.open_another()) as other:
        wall.ms += DAY_MS
        add_card(other, wall, CARD)
        set_budget(other, Budget(1, "day", hard_micros=1))
        close_days(other, wall, "1970-01-01", by=TESTER)
    writer.write([ProgressNote({"a": TokenCounts()})])  # which reads no caches
    refused = writer.write([used("b", wall()), Hold("c", 1, 1, "m", wall(), 10**6, 10**6)])
    refused += writer.write([structs.replace(used("d", wall() - DAY_MS), ended_ms=wall())])
    writer.close()

    assert (refused[0], refused[2]) == (None, None)
    assert isinstance(refused[1], BudgetExceeded)
    assert [entry.rate_card_id for entry in entries(store).values()] == ["free", "std@1", "free"]
    assert check_books(store) == []
