"""Selection of the rate card in force; cards are never edited."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tenancy.errors import BadPrice, ConstraintBroken
from tenancy.pricing import rate_cards
from tenancy.pricing.charges import FREE_CARD, RateCard
from tenancy.pricing.rate_cards import RateCards, add_card, load_cards
from tenancy.storage.interface import Store
from tests.unit.tenancy.conftest import Wall

CARD = RateCard("std", input=3, cache_write={"5m": 4}, storage={"1h": 1})


def code_of(store: Store, wall: Wall, card: RateCard) -> str:
    with pytest.raises(BadPrice) as caught:
        add_card(store, wall, card)
    return caught.value.code


def test_added_card_is_read_back(store: Store, wall: Wall) -> None:
    """Field for field, with its version."""
    added = add_card(store, wall, CARD)

    assert added == structs.replace(CARD, version=1, valid_from_ms=wall())
    assert load_cards(store) == [added]


def test_most_specific_card_wins(store: Store, wall: Wall) -> None:
    """Model before tier; a card for everything is the last."""
    for name, model, tier in (
        ("all", "*", "*"),
        ("gold", "*", "gold"),
        ("m", "m", "*"),
        ("m-gold", "m", "gold"),
    ):
        add_card(store, wall, structs.replace(CARD, name=name, model=model, tier=tier))
    book = RateCards(load_cards(store))

    def winner(model: str, tier: str) -> str:
        return book.in_force(model, tier, wall()).name

    assert (winner("m", "gold"), winner("m", "x")) == ("m-gold", "m")
    assert (winner("y", "gold"), winner("y", "x")) == ("gold", "all")
    without = RateCards([card for card in load_cards(store) if card.name != "m-gold"])
    assert without.in_force("m", "gold", wall()).name == "m", "the model comes before the tier"


def test_card_beyond_the_most_names_their_number(
    store: Store, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All versions are read into memory."""
    monkeypatch.setattr(rate_cards, "CARDS_MAX", 1)
    add_card(store, wall, CARD)
    with pytest.raises(BadPrice, match=r": 2; limit 1\.") as caught:
        add_card(store, wall, CARD)

    assert caught.value.code == "too_many_rate_cards"
    assert len(load_cards(store)) == 1


def test_refuses_overlapping_cards(store: Store, wall: Wall) -> None:
    """Otherwise a charge would depend on the order of rows."""
    add_card(store, wall, CARD)
    other = structs.replace(CARD, name="other")
    codes = [
        code_of(store, wall, other),
        code_of(store, wall, structs.replace(other, valid_from_ms=wall() + 10**9)),
    ]
    add_card(store, wall, structs.replace(CARD, valid_until_ms=wall() + 50))
    codes.append(code_of(store, wall, structs.replace(other, valid_from_ms=wall() + 49)))
    after = add_card(store, wall, structs.replace(other, valid_from_ms=wall() + 50))
    codes.append(code_of(store, wall, CARD))  # would go on where the other has begun

    assert codes == ["rate_cards_overlap"] * 4
    assert after.version == 1
    assert len(load_cards(store)) == 3


def test_refuses_cards_in_the_past(store: Store, wall: Wall) -> None:
    assert code_of(store, wall, structs.replace(CARD, valid_from_ms=wall() - 1)) == (
        "rate_card_in_the_past"
    )


def test_name_keeps_its_model_tier_and_currency(store: Store, wall: Wall) -> None:
    add_card(store, wall, CARD)

    for change in ({"model": "m"}, {"tier": "gold"}, {"currency": "EUR"}):
        assert code_of(store, wall, structs.replace(CARD, **change)) == "rate_card_scope"


@pytest.mark.parametrize("statement", ["delete from rate_cards", "update rate_cards set tier = 1"])
def test_database_refuses_edits_of_cards(store: Store, wall: Wall, statement: str) -> None:
    """By a trigger."""
    add_card(store, wall, CARD)

    with pytest.raises(ConstraintBroken), store.change() as db:
        db.execute(statement)


spans = st.lists(
    st.tuples(st.integers(0, 20), st.none() | st.integers(1, 20)), min_size=1, max_size=6
)


@given(spans, st.integers(0, 45))
def test_newest_begun_version_applies(versions: list[tuple[int, int | None]], at_ms: int) -> None:
    """Against the rule itself, over random versions."""
    cards = [
        RateCard(
            "std",
            version=number,
            valid_from_ms=begin,
            valid_until_ms=None if length is None else begin + length,
        )
        for number, (begin, length) in enumerate(versions, 1)
    ]
    begun = [card for card in cards if card.valid_from_ms <= at_ms]
    last = begun[-1] if begun else None
    over = last is None or (last.valid_until_ms is not None and last.valid_until_ms <= at_ms)

    assert RateCards(cards).in_force("m", "t", at_ms) == (FREE_CARD if over else last)
