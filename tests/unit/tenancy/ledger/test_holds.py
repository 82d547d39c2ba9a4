"""Items of one transaction see the effects of earlier items in it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs

from tenancy.accounts.tenants import create_tenant
from tenancy.errors import ConstraintBroken, TenancyError
from tenancy.ledger.holds import IDS_AT_ONCE, Holds
from tenancy.ledger.transactions import Hold, Item, LedgerTransactions
from tenancy.pricing.budgets import Budget, budget_states, set_budget
from tenancy.pricing.charges import PICO_PER_MICRO, RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.interface import Store
from tenancy.types import DAY_MS
from tests.unit.tenancy.conftest import Wall, used


@pytest.fixture(autouse=True)
def ada(store: Store, wall: Wall) -> None:
    create_tenant(store, wall, "ada")


def apply(store: Store, items: Sequence[Item]) -> list[TenancyError | None]:
    """Apply items in one transaction."""
    with store.change() as db:
        return LedgerTransactions().apply(db, items)


def codes(answers: list[TenancyError | None]) -> list[str]:
    return [answer.code if answer else "" for answer in answers]


def hold(request_id: str, at_ms: int, output_tokens: int = 4) -> Hold:
    return Hold(request_id, 1, 1, "m", at_ms, 10, output_tokens)


def request_ids(store: Store, table: str) -> list[str]:
    return [row[0] for row in store.query(f"select request_id from {table} order by 1")]


def test_hold_and_entry_may_share_a_transaction(store: Store, wall: Wall) -> None:
    """As after an immediate disconnect."""
    answers = apply(store, [hold("a", wall()), used("a", wall()), hold("a", wall())])

    assert codes(answers) == ["", "", "duplicate_request"]
    assert request_ids(store, "ledger") == ["a"]
    assert request_ids(store, "holds") == []


def test_released_budget_is_available_in_the_same_transaction(store: Store, wall: Wall) -> None:
    """Items apply in order: a budget for one request admits one after another."""
    add_card(store, wall, RateCard("std", output=PICO_PER_MICRO))
    set_budget(store, Budget(1, "day", hard_micros=8))
    apply(store, [hold("a", wall())])
    late = structs.replace(used("a", wall()), ending="engine_died")  # costs nothing
    answers = apply(store, [hold("b", wall(), 5), late, hold("c", wall(), 5), hold("d", wall(), 4)])
    (state,) = budget_states(store, wall)

    assert codes(answers) == ["budget_exceeded", "", "", "budget_exceeded"]
    assert (state.spent_pico, state.reserved_pico) == (0, 5 * PICO_PER_MICRO)


def test_entry_is_booked_in_its_holds_window(store: Store, wall: Wall) -> None:
    """The reservation is released in that window, for any start and key of the entry."""
    add_card(store, wall, RateCard("std", output=PICO_PER_MICRO))
    set_budget(store, Budget(1, "day", hard_micros=8))
    entry = structs.replace(used("a", wall() + DAY_MS), key_id=2)
    apply(store, [hold("a", wall()), entry])
    (state,) = budget_states(store, wall)

    assert (state.spent_pico, state.reserved_pico) == (4 * PICO_PER_MICRO, 0)


def test_reads_any_number_of_ids(store: Store, wall: Wall) -> None:
    """A start closes all holds of a dead process at once."""
    names = [f"{number:03}" for number in range(2 * IDS_AT_ONCE + 3)]
    apply(store, [hold(name, wall()) for name in names])
    apply(store, [used(name, wall()) for name in names[1:]])

    assert request_ids(store, "ledger") == names[1:]
    assert request_ids(store, "holds") == names[:1]


def test_database_refuses_duplicate_ids(store: Store, wall: Wall) -> None:
    row = ("a", 1, 1, "m", 1, "default", "standard", "", "", "free", 0, 0, 0, 0)

    def make_unasked() -> None:
        with store.change() as db:
            holds = Holds(db, [])
            holds.add("a", ("free", 0, 0), row)
            holds.finish()

    make_unasked()
    with pytest.raises(ConstraintBroken):
        make_unasked()
