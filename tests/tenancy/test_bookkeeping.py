"""What one transaction writes: an entry at its hold's price, its chain, its sums, its seal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec import structs

from tenancy.bookkeeping import (
    ENTRY_FIELDS,
    HOUR_MS,
    EngineTotals,
    StorageReading,
    chained,
    entry_row,
)
from tenancy.errors import BadPrice, LedgerUnavailable
from tenancy.ledger import Hold, Ledger
from tenancy.pricing import PRICE_MAX, RateCard, price, savings
from tenancy.rate_cards import add_card, load_cards
from tenancy.registry import create_tenant
from tenancy.store import Store
from tenancy.types import UsageEntry
from tenancy.usage import entries_of
from tests.tenancy.conftest import Wall

CARD = RateCard("std", input=3_000, output=9_000, cache_read=300, cache_write={"1h": 6_000})


def used(request_id: str, at_ms: int) -> UsageEntry:
    return UsageEntry(
        request_id=request_id,
        tenant_id=1,
        key_id=1,
        model="m",
        ending="done",
        started_ms=at_ms,
        ended_ms=at_ms + 9,
        prompt_tokens=10,
        cache_read_tokens=5,
        cache_write_tokens=3,
        fresh_tokens=2,
        output_tokens=4,
        physical_cached_tokens=5,
        read={"5m": 1, "1h": 4},
        write={"1h": 3},
        workspace="lab",
        tier="gold",
        dialect="openai",
        recomputed_promised_tokens=1,
        ttft_ms=12,
        epoch="e1",
    )


@pytest.fixture
def ledger(store: Store, wall: Wall) -> Iterator[Ledger]:
    create_tenant(store, wall, "ada")
    ledger = Ledger(store, wall)
    yield ledger
    ledger.close()


def entries(store: Store) -> list[UsageEntry]:
    return [entry for *_, entry in entries_of(store, None, 0, None, 0, 1000)]


def test_an_entry_is_priced_and_keeps_all_its_detail(
    store: Store, ledger: Ledger, wall: Wall
) -> None:
    """Field for field, with the money filled in."""
    card = add_card(store, wall, CARD)
    sent = used("a", wall())
    ledger.settle(sent).result(20)

    assert entries(store) == [
        structs.replace(
            sent,
            rate_card_id="std@1",
            charge_pico=price(card, sent).pico,
            saved_pico=savings(card, sent),
        )
    ]


def test_the_price_at_the_time_of_the_request_wins(
    store: Store, ledger: Ledger, wall: Wall
) -> None:
    """Also over a restart, and when the answer ends long after the price has changed."""
    add_card(store, wall, CARD)
    ledger.hold(Hold("a", 1, 1, "m", wall(), 10, 4)).result(20)
    began_ms, wall.ms = wall.ms, wall.ms + 1000
    add_card(store, wall, structs.replace(CARD, input=1))
    ledger.settle(used("a", began_ms)).result(20)
    ledger.settle(used("b", wall())).result(20)

    assert [entry.rate_card_id for entry in entries(store)] == ["std@1", "std@2"]


@pytest.mark.parametrize(
    "change", [{"read": {"5m": 4}}, {"write": {"5m": 4, "1h": -1}}, {"read": {"a": -1, "b": 6}}]
)
def test_detail_that_does_not_make_up_its_sum_is_refused(
    store: Store, ledger: Ledger, wall: Wall, change: dict[str, dict[str, int]]
) -> None:
    """L6: every token is in one class, and priced once."""
    refused = ledger.settle(structs.replace(used("a", wall()), **change))
    with pytest.raises(LedgerUnavailable) as caught:
        refused.result(20)

    assert caught.value.code == "impossible_entry"
    assert entries(store) == []


def test_a_request_that_could_cost_too_much_is_not_admitted(
    store: Store, ledger: Ledger, wall: Wall
) -> None:
    """Where no number could hold its charge, it never runs."""
    add_card(store, wall, structs.replace(CARD, output=PRICE_MAX))
    with pytest.raises(BadPrice):
        ledger.hold(Hold("a", 1, 1, "m", wall(), 1, 10**9)).result(20)

    assert ledger.open_holds() == 0


def test_each_entry_is_chained_to_the_one_before(store: Store, ledger: Ledger, wall: Wall) -> None:
    """A row that is changed, taken out or put between breaks every chain behind it."""
    for name in "abc":
        ledger.settle(used(name, wall())).result(20)
    rows = store.query(f"select {', '.join(ENTRY_FIELDS)}, chain from ledger order by entry_id")
    before = b""
    for *row, chain in rows:
        before = chained(before, row)
        assert chain == before

    changed = [*rows[0][:-1]]
    changed[ENTRY_FIELDS.index("charge_pico")] = 7
    assert chained(b"", changed) != rows[0][-1]
    assert tuple(rows[0][:-1]) == entry_row(used("a", wall()), wall())


def test_settling_again_leaves_the_chain_and_the_sums(
    store: Store, ledger: Ledger, wall: Wall
) -> None:
    """In one batch or in two."""
    sent = [ledger.settle(used(name, wall())) for name in "aabab"]
    for future in sent:
        future.result(20)

    assert [entry.request_id for entry in entries(store)] == ["a", "b"]
    assert store.query("select requests, prompt_tokens from usage_hours") == [(2, 20)]


def test_the_chain_is_sealed_once_an_hour(store: Store, ledger: Ledger, wall: Wall) -> None:
    """By the hours that come, whichever way the clock is set."""
    for number, hours in enumerate((1, 0, 0, 500, 0, -500)):
        wall.ms += hours * HOUR_MS
        ledger.settle(used(str(number), wall())).result(20)
    seals = store.query("select entry_id, chain from seals order by number")

    assert [row[0] for row in seals] == [1, 4, 6]
    assert seals[-1][1] == store.query("select chain from ledger where entry_id = 6")[0][0]


def test_storage_is_summed_by_hour_class_and_card(store: Store, ledger: Ledger, wall: Wall) -> None:
    """Whole token-seconds; a new price begins a new sum."""
    add_card(store, wall, CARD)
    for seconds in (5, 7):
        ledger.add_storage(StorageReading(1, "1h", seconds, wall(), "m")).result(20)
    wall.ms += 1
    add_card(store, wall, structs.replace(CARD, input=9))
    ledger.add_storage(StorageReading(1, "1h", 11, wall(), "m")).result(20)
    wrong = ledger.add_storage(StorageReading(99, "1h", 1, wall(), "m"))

    assert isinstance(wrong.exception(20), LedgerUnavailable)
    assert store.query("select class, rate_card_id, token_seconds from storage_hours") == [
        ("1h", "std@1", 12),
        ("1h", "std@2", 11),
    ]


def test_what_the_engine_counts_only_grows(store: Store, ledger: Ledger) -> None:
    """Notes may come late or twice."""
    for totals in (
        EngineTotals("e1", 10, 5, 3, 1, 5, 3, 1),
        EngineTotals("e1", 20, 9, 4, 2, 9, 4, 2, is_ended=True),
        EngineTotals("e1", 15, 7, 4, 2, 7, 4, 2),
    ):
        ledger.note_engine(totals).result(20)
    (row,) = store.query("select prompt_tokens, cached_tokens, is_ended from engine_epochs")

    assert row == (9, 4, 1)


def test_cards_of_other_names_stay_apart(store: Store, ledger: Ledger, wall: Wall) -> None:
    """A card that another process adds is seen by the next request."""
    ledger.settle(used("a", wall())).result(20)
    beside = store.another()
    add_card(beside, wall, structs.replace(CARD, tier="gold"))
    beside.close()
    ledger.settle(used("b", wall())).result(20)

    assert len(load_cards(store)) == 1
    assert [entry.rate_card_id for entry in entries(store)] == ["free", "std@1"]
