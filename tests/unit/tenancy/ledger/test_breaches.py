"""Credits of broken promises: exact, and once, also over crashes and retries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tenancy.accounting.audit import check_books
from tenancy.accounting.closing import close_days
from tenancy.accounting.usage import usage
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import BadPrice
from tenancy.ledger.adjustments import BREACH, Adjustment, adjust, credit_of
from tenancy.ledger.ledger import Hold, Ledger
from tenancy.pricing.charges import PICO_PER_MICRO, BreachCredit, RateCard, itemize
from tenancy.pricing.rate_cards import add_card, load_cards
from tenancy.storage.interface import Store
from tenancy.types import UsageEntry
from tests.actors import TESTER
from tests.examples import examples
from tests.tables import each_row
from tests.unit.tenancy.conftest import Wall, new_store
from tests.unit.tenancy.storage.postgres_server import Server

POLICIES: list[BreachCredit] = ["none", "read_price", "write_price"]
WRITE = {"5m": 3_750_000, "1h": 6_000_000}
CARD = RateCard(
    "std",
    input=3_000_000,
    output=15_000_000,
    cache_read=300_000,
    cache_write=WRITE,
    breach_credit="write_price",
)


def entry(
    request_id: str = "a",
    lost: int = 40,
    read: dict[str, int] | None = None,
    output: int = 100,
    ending: str = "done",
) -> UsageEntry:
    """Return an entry that read by contract, of which `lost` tokens were computed again."""
    found = {"1h": 100} if read is None else read
    total = sum(found.values())
    return UsageEntry(
        request_id=request_id,
        tenant_id=1,
        key_id=1,
        model="m",
        ending=ending,
        started_ms=1_000_000,
        ended_ms=1_000_000,
        prompt_tokens=total + 5,
        cache_read_tokens=total,
        cache_write_tokens=0,
        fresh_tokens=5,
        output_tokens=output,
        physical_cached_tokens=total - lost,
        read=found,
        recomputed_promised_tokens=lost,
    )


@contextmanager
def opened(kept: Store, wall: Wall, card: RateCard = CARD) -> Iterator[tuple[Store, Ledger]]:
    """Yield a ledger with a tenant and this card. `kept`: a store that stays open."""
    store = kept.open_another()
    if not load_cards(store):
        create_tenant(store, wall, "ada")
        add_card(store, wall, card)
    ledger = Ledger(store, wall)
    yield store, ledger
    ledger.close()
    store.close()


def credits(store: Store) -> dict[str, int]:
    """Return credits by adjustment id."""
    return dict(store.query("select adjustment_id, amount_pico from adjustments"))


def test_breach_is_credited_once(store: Store, wall: Wall) -> None:
    """Settled again, after a restart, after a price change, and on a closed day."""
    with opened(store, wall) as (_, ledger):
        ledger.hold(Hold("a", 1, 1, "m", 1_000_000, 200, 200)).result(60)
        for again in [ledger.settle(entry()), ledger.settle(entry())]:
            again.result(60)
        first = credits(store)
    with opened(store, wall) as (_, ledger):
        wall.ms += 86_400_000
        add_card(store, wall, structs.replace(CARD, breach_credit="read_price"))
        close_days(store, wall, "1970-01-01", by=TESTER)
        ledger.settle(entry()).result(60)

        assert credits(store) == first
        assert check_books(store) == []


def test_breach_ids_are_reserved(store: Store, wall: Wall) -> None:
    """A manual adjustment under such an id would block the credit."""
    with opened(store, wall) as (_, ledger):
        ledger.settle(entry("b", lost=0)).result(60)

        with pytest.raises(BadPrice) as caught:
            adjust(store, wall, Adjustment(f"{BREACH}a", "b", -1, "by hand"), by=TESTER)
        assert caught.value.code == "bad_adjustment"
        ledger.settle(entry()).result(60)
        assert list(credits(store)) == ["breach:a"]


@pytest.mark.parametrize(
    "damage",
    [
        "delete from adjustments",
        "update adjustments set amount_pico = -1",
        "update adjustments set adjustment_id = 'x'",
    ],
)
def test_audit_finds_missing_or_wrong_credits(store: Store, wall: Wall, damage: str) -> None:
    """It recomputes them from entries and cards."""
    with opened(store, wall) as (_, ledger):
        ledger.settle(entry()).result(60)
        where = "" if store.is_local else " on adjustments"
        with store.change() as db:
            db.execute(f"drop trigger adjustments_stay{where}")
            db.execute(f"drop trigger adjustments_never_change{where}")
            db.execute(damage)

        assert any("breach of entry 1" in finding for finding in check_books(store))


@each_row(
    ("card", "lost", "pico"),
    [
        (CARD, 12, 10 * WRITE["1h"] + 2 * WRITE["5m"]),
        (CARD, 20, 10 * WRITE["1h"] + 10 * WRITE["5m"]),
        (structs.replace(CARD, breach_credit="read_price"), 12, 12 * CARD.cache_read),
        (structs.replace(CARD, input=0, output=0, cache_read=1), 20, 20),
    ],
)
def test_credit_follows_the_cards_policy(card: RateCard, lost: int, pico: int) -> None:
    owed = credit_of(card, entry(lost=lost, read={"5m": 10, "1h": 10}))

    assert owed is not None
    assert owed.amount_pico == -pico


@given(
    policy=st.sampled_from(POLICIES),
    prices=st.tuples(*[st.integers(0, 10**9)] * 5),
    minimum=st.integers(0, 1_000),
    read=st.dictionaries(st.sampled_from(["5m", "1h", "24h"]), st.integers(0, 999), max_size=3),
    output=st.integers(0, 99),
    part=st.fractions(0, 1),
)
@settings(max_examples=examples(150))
def test_credit_equals_exact_fractions(
    policy: BreachCredit,
    prices: tuple[int, ...],
    minimum: int,
    read: dict[str, int],
    output: int,
    part: Fraction,
) -> None:
    """Each lost token at its price, the most expensive first, up to the charge."""
    card = RateCard(
        "std",
        input=prices[0],
        output=prices[1],
        cache_read=prices[2],
        cache_write={"5m": prices[3], "1h": prices[4]},
        minimum_charge=minimum,
        breach_credit=policy,
    )
    lost = int(part * sum(read.values()))
    used = entry("a", lost, read, output)
    by_price = {"5m": prices[3], "1h": prices[4], "24h": prices[0]}
    each = sorted((by_price[name] for name, n in read.items() for _ in range(n)), reverse=True)
    dollars = Fraction(0)
    if policy == "read_price":
        dollars = lost * Fraction(prices[2], 10**12)
    elif policy == "write_price":
        dollars = Fraction(sum(each[:lost]), 10**12)
    owed = credit_of(card, used)

    charged = Fraction(itemize(card, used).pico, 10**12)
    pico = 0 if owed is None else -owed.amount_pico
    assert Fraction(pico, 10**12) == min(dollars, charged)


LOST = st.lists(st.integers(0, 100), min_size=1, max_size=8)
AGAIN = st.lists(st.integers(0, 7), max_size=6)


@given(lost=LOST, again=AGAIN)
@settings(max_examples=examples(15), deadline=None)
def test_credits_match_breaches_over_any_batches(lost: list[int], again: list[int]) -> None:
    """However entries are batched, repeated and interrupted by restarts."""
    with new_store() as store:
        check_credits(store, lost, again)


@given(lost=LOST, again=AGAIN)
@settings(max_examples=4, deadline=None)
def test_credits_match_breaches_on_a_server(
    postgres_server: Server, lost: list[int], again: list[int]
) -> None:
    """There a batch is written in few statements."""
    with new_store(postgres_server) as store:
        check_credits(store, lost, again)


def check_credits(store: Store, lost: list[int], again: list[int]) -> None:
    wall = Wall()
    entries = [entry(str(number), tokens) for number, tokens in enumerate(lost)]
    with opened(store, wall) as (_, ledger):
        for future in [ledger.settle(one) for one in entries]:
            future.result(60)
    with opened(store, wall) as (_, ledger):
        for future in [ledger.settle(entries[n % len(entries)]) for n in again]:
            future.result(60)

    (total,) = usage(store)
    assert total.adjusted_pico == -sum(lost) * WRITE["1h"]
    assert total.adjusted_pico % PICO_PER_MICRO == 0
    assert check_books(store) == []
