"""Charges against exact fractions, to the pico-dollar."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tenancy.errors import BadPrice
from tenancy.pricing.charges import (
    CHARGE_MAX,
    FREE_CARD,
    PAYERS,
    PRICE_MAX,
    RateCard,
    check_card,
    compute_savings,
    is_charged,
    itemize,
    max_charge,
    storage_charge,
)
from tenancy.types import UsageEntry
from tests.tables import each_row

CARD = RateCard(
    "std",
    input=3_000_000,
    output=15_000_000,
    cache_read=300_000,
    cache_write={"5m": 3_750_000, "1h": 6_000_000},
    storage={"1h": 1_000_000},
    minimum_charge=10,
)


def used(
    fresh: int = 0,
    read: int = 0,
    write: dict[str, int] | None = None,
    output: int = 0,
    ending: str = "done",
) -> UsageEntry:
    written = write or {}
    total = sum(written.values())
    return UsageEntry(
        request_id="a",
        tenant_id=1,
        key_id=1,
        model="m",
        ending=ending,
        started_ms=10,
        ended_ms=20,
        prompt_tokens=fresh + read + total,
        cache_read_tokens=read,
        cache_write_tokens=total,
        fresh_tokens=fresh,
        output_tokens=output,
        physical_cached_tokens=0,
        write=written,
    )


counts = st.integers(0, 10**6)
prices = st.integers(0, 10**11)
classes = st.dictionaries(st.sampled_from(["5m", "1h", "24h"]), counts, max_size=3)
cards = st.builds(
    RateCard,
    name=st.just("std"),
    input=prices,
    output=prices,
    cache_read=prices,
    cache_write=st.dictionaries(st.sampled_from(["5m", "1h", "*"]), prices),
    minimum_charge=st.integers(0, 10**6),
)
usages = st.builds(used, counts, counts, classes, counts)


def in_fractions(card: RateCard, usage: UsageEntry) -> Fraction:
    """Return dollars by the words of a price list, without our integers."""
    per_token = {
        name: Fraction(getattr(card, name), 10**6) / 10**6
        for name in ("input", "output", "cache_read")
    }
    dollars = usage.fresh_tokens * per_token["input"] + usage.output_tokens * per_token["output"]
    dollars += usage.cache_read_tokens * per_token["cache_read"]
    for name, tokens in usage.write.items():
        each = card.cache_write.get(name, card.cache_write.get("*", card.input))
        dollars += tokens * Fraction(each, 10**12)
    if usage.prompt_tokens or usage.output_tokens:
        dollars = max(dollars, Fraction(card.minimum_charge, 10**6))
    return dollars


@given(cards, usages)
def test_charge_equals_exact_fractions(card: RateCard, usage: UsageEntry) -> None:
    """Nothing is rounded."""
    charge = itemize(card, usage)

    assert Fraction(charge.pico, 10**12) == in_fractions(card, usage)
    assert sum(item.pico for item in charge.items) == charge.pico


@given(cards, usages)
def test_max_charge_bounds_every_charge(card: RateCard, usage: UsageEntry) -> None:
    """A hold's reservation bounds its charge, so a hard budget is never exceeded."""
    assert itemize(card, usage).pico <= max_charge(card, usage.prompt_tokens, usage.output_tokens)


@each_row(
    "price", [{"input": 9}, {"cache_read": 9}, {"cache_write": {"1h": 9, "5m": 1}}, {"output": 9}]
)
def test_max_charge_takes_the_dearest_price(price: dict[str, Any]) -> None:
    assert max_charge(RateCard("std", **price), 10, 10) == 90


@given(cards, usages)
def test_savings_are_the_difference_to_plain_input(card: RateCard, usage: UsageEntry) -> None:
    """Below zero where writes cost more than reads saved."""
    plain = structs.replace(card, minimum_charge=0)
    without = used(fresh=usage.prompt_tokens, output=usage.output_tokens)

    assert compute_savings(card, usage) == itemize(plain, without).pico - itemize(plain, usage).pico


def test_savings_fit_into_64_bits() -> None:
    """A prompt that was read almost for nothing may have saved more than any charge."""
    dear, reads = RateCard("std", input=PRICE_MAX), used(read=10**8)
    wasteful = RateCard("std", cache_write={"1h": PRICE_MAX})

    assert itemize(dear, reads).pico == 0
    assert compute_savings(dear, reads) == CHARGE_MAX
    assert compute_savings(wasteful, used(write={"1h": 10**8})) == -CHARGE_MAX


OPERATORS = sorted(ending for ending, payer in PAYERS.items() if payer == "operator")
CLIENTS = sorted(PAYERS.keys() - set(OPERATORS))


@each_row("ending", OPERATORS)
def test_failures_of_the_server_are_free(ending: str) -> None:
    """The minimum charge included."""
    charge = itemize(CARD, used(100, 100, {"5m": 5}, 100, ending))

    assert (charge.pico, charge.items) == (0, ())


@each_row("ending", [*CLIENTS, "an_ending_of_tomorrow"])
def test_everything_else_is_charged(ending: str) -> None:
    """A disconnect before the last byte is no discount, and neither is a schema that fails behind
    the text that was wanted."""
    assert itemize(CARD, used(10, ending=ending)).pico == 30_000_000
    assert is_charged(ending)


def test_minimum_charge_has_a_line_item() -> None:
    """The other items show the charge for tokens alone."""
    charge = itemize(CARD, used(1))

    assert charge.pico == 10_000_000
    assert [item.component for item in charge.items] == ["input", "minimum"]


def test_request_without_usage_is_free() -> None:
    """The minimum applies to requests that ran."""
    assert itemize(CARD, used(ending="cancelled")).pico == 0


def test_free_card_charges_nothing() -> None:
    charge = itemize(FREE_CARD, used(10**6, 10**6, {"5m": 10}, 10**6))

    assert (charge.pico, charge.rate_card_id) == (0, "free")


def test_unknown_write_classes_cost_the_star_price() -> None:
    """Entries without classes are priced too."""
    usage = structs.replace(used(0, 0, {"x": 5}), write={})
    star = structs.replace(CARD, cache_write={"*": 7}, minimum_charge=0)

    assert itemize(star, usage).pico == 35
    assert itemize(structs.replace(star, cache_write={}), usage).pico == 5 * CARD.input


@given(st.integers(0, 10**12))
def test_storage_is_rounded_down_once(token_seconds: int) -> None:
    """By less than a pico-dollar, in the tenant's favour."""
    exact = Fraction(token_seconds * CARD.storage["1h"], 3600)

    assert 0 <= exact - storage_charge(CARD, "1h", token_seconds) < 1
    assert storage_charge(CARD, "5m", token_seconds) == 0


def test_largest_charge_is_that_of_64_bits() -> None:
    """To the pico-dollar, for a hold and for an entry."""
    price, tokens = 60_247_241_209, 153_092_023
    assert price * tokens == CHARGE_MAX == 2**63 - 1
    dear = RateCard("std", output=price)

    assert itemize(dear, used(output=tokens)).pico == max_charge(dear, 0, tokens) == CHARGE_MAX
    more = tokens + 1
    for ask in (lambda: max_charge(dear, 0, more), lambda: itemize(dear, used(output=more))):
        with pytest.raises(BadPrice) as caught:
            ask()
        assert caught.value.code == "charge_too_large"


@each_row(
    ("change", "word"),
    [
        ({"input": -1}, "input"),
        ({"output": PRICE_MAX + 1}, "output"),
        ({"cache_write": {"5m": -5}}, "cache_write.5m"),
        ({"storage": {"5m": 10**13}}, "storage.5m"),
        ({"minimum_charge": -1}, "minimum_charge"),
        ({"name": "../x"}, "name"),
        ({"name": "free"}, "name"),
        ({"model": ""}, "model"),
        ({"tier": "a\nb"}, "tier"),
        ({"tier": "Gold"}, "tier"),
        ({"currency": "usd"}, "currency"),
        ({"valid_from_ms": -1}, "valid_from_ms"),
        ({"valid_from_ms": 10, "valid_until_ms": 10}, "valid_until_ms"),
        ({"storage": {str(n): 1 for n in range(40)}}, "storage"),
    ],
)
def test_invalid_card_names_its_field(change: dict[str, object], word: str) -> None:
    """Negative and absurd prices never reach a charge."""
    with pytest.raises(BadPrice, match=f"^{word}: ") as caught:
        check_card(structs.replace(CARD, **change))

    assert caught.value.code == "bad_rate_card"
