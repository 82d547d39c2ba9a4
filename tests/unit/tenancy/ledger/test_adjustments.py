"""Adjustments: booked once, with a reason, never beyond the charge."""

from __future__ import annotations

import pytest

from tenancy.accounting.closing import close_days
from tenancy.accounting.usage import usage
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import BadPrice, ConstraintBroken
from tenancy.ledger.adjustments import Adjustment, adjust
from tenancy.ledger.ledger import Ledger
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.interface import Store
from tenancy.types import DAY_MS, UsageEntry
from tests.actors import TESTER
from tests.tables import each_row
from tests.unit.tenancy.conftest import Wall

CHARGE = 7 * 3_000_000


@pytest.fixture
def books(store: Store, wall: Wall) -> Store:
    create_tenant(store, wall, "ada")
    add_card(store, wall, RateCard("std", input=3_000_000))
    ledger = Ledger(store, wall)
    entry = UsageEntry("a", 1, 1, "m", "done", wall(), wall(), 7, 0, 0, 7, 0, 0)
    ledger.settle(entry).result(60)
    ledger.close()
    return store


def credit(pico: int = 5, adjustment_id: str = "x", reason: str = "an outage") -> Adjustment:
    return Adjustment(adjustment_id, "a", -pico, reason)


def code_of(store: Store, wall: Wall, adjustment: Adjustment) -> str:
    with pytest.raises(BadPrice) as caught:
        adjust(store, wall, adjustment, by=TESTER)
    return caught.value.code


def test_credit_is_booked_once(books: Store, wall: Wall) -> None:
    """However often it is sent; usage shows it beside the charge."""
    answers = [adjust(books, wall, credit(), by=TESTER), adjust(books, wall, credit(), by=TESTER)]

    assert answers == [True, False]
    (total,) = usage(books)
    assert (total.charge_pico, total.adjusted_pico) == (CHARGE, -5)
    (piece,) = usage(books, since_ms=wall() - 1, until_ms=wall() + 1)
    assert (piece.charge_pico, piece.adjusted_pico) == (CHARGE, -5)


def test_id_cannot_be_reused_for_another_adjustment(books: Store, wall: Wall) -> None:
    adjust(books, wall, credit(), by=TESTER)

    assert code_of(books, wall, credit(6)) == "adjustment_id_used"
    assert code_of(books, wall, credit(reason="another")) == "adjustment_id_used"


def test_credits_never_exceed_the_charge(books: Store, wall: Wall) -> None:
    """To the pico-dollar, all credits and debits together."""
    adjust(books, wall, credit(CHARGE - 1), by=TESTER)
    too_much = code_of(books, wall, credit(2, "y"))
    adjust(books, wall, Adjustment("z", "a", 4, "counted twice"), by=TESTER)
    adjust(books, wall, credit(5, "y"), by=TESTER)

    assert too_much == "credit_exceeds_charge"
    assert usage(books)[0].adjusted_pico == -CHARGE


def test_late_adjustments_are_booked_on_the_next_open_day(books: Store, wall: Wall) -> None:
    """A closed day stays as reported, also when the clock goes back."""
    wall.ms += 2 * DAY_MS
    close_days(books, wall, "1970-01-02", by=TESTER)
    wall.ms -= 2 * DAY_MS
    adjust(books, wall, credit(), by=TESTER)

    assert books.query("select booked_ms from adjustments") == [(2 * DAY_MS,)]


@each_row(
    ("adjustment", "code"),
    [
        (Adjustment("x", "nothing", -1, "r"), "entry_unknown"),
        (Adjustment("x", "a'; drop table ledger; --", -1, "r"), "entry_unknown"),
        (Adjustment("", "a", -1, "r"), "bad_adjustment"),
        (Adjustment("a b", "a", -1, "r"), "bad_adjustment"),
        (Adjustment("x", "a", 0, "r"), "bad_adjustment"),
        (Adjustment("x", "a", 2**63, "r"), "bad_adjustment"),
        (Adjustment("x", "a", -1, " "), "bad_adjustment"),
        (Adjustment("x", "a", -1, "a\nb"), "bad_adjustment"),
        (Adjustment("x", "a", -1, "r" * 501), "bad_adjustment"),
    ],
)
def test_refuses_invalid_adjustments(
    books: Store, wall: Wall, adjustment: Adjustment, code: str
) -> None:
    """With nothing written."""
    assert code_of(books, wall, adjustment) == code
    assert books.query("select count(*) from adjustments") == [(0,)]


@each_row(
    ("adjustment", "says"),
    [
        (Adjustment("a b", "a", -1, "r"), "id: 'a b'; expected 1 to 128"),
        (Adjustment("x", "a", 10**19, "r"), "range: 10000000(.0+)? dollars; expected above 0"),
        (Adjustment("x", "a", -1, "a\nb"), r"reason: 'a\\nb'; expected 1 to 500"),
    ],
)
def test_a_refusal_says_the_wrong_value(
    books: Store, wall: Wall, adjustment: Adjustment, says: str
) -> None:
    """A caller who books many finds the one by it."""
    with pytest.raises(BadPrice, match=says):
        adjust(books, wall, adjustment, by=TESTER)


@pytest.mark.parametrize(
    "statement", ["delete from adjustments", "update adjustments set amount_pico = 1"]
)
def test_database_refuses_edits_of_adjustments(books: Store, wall: Wall, statement: str) -> None:
    """By a trigger."""
    adjust(books, wall, credit(), by=TESTER)

    with pytest.raises(ConstraintBroken), books.change() as db:
        db.execute(statement)
