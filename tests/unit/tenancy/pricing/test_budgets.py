"""Hard budgets: spent and reserved never exceed them, however many requests run at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from fractions import Fraction

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from msgspec import structs

from tenancy.accounting.audit import check_books
from tenancy.accounting.closing import close_days
from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.keys import create_key, rotate_key
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import BadPrice, BudgetExceeded
from tenancy.ledger.ledger import Hold, Ledger
from tenancy.pricing.budgets import MICROS_MAX, Budget, budget_states, set_budget, window_of
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.interface import Store
from tenancy.types import DAY_MS, TokenCounts, UsageEntry
from tests.actors import TESTER
from tests.examples import examples
from tests.tables import each_row
from tests.unit.tenancy.book_machine import BookMachine, run_on_server
from tests.unit.tenancy.conftest import Wall
from tests.unit.tenancy.ledger.written import holds
from tests.unit.tenancy.storage.postgres_server import Server

PATIENCE_S = 60
CARD = RateCard("std", input=1_000_000, output=2_000_000, cache_read=0)
"""One micro-dollar for a prompt token, two for an output token."""


def hold(request_id: str, at_ms: int, tokens: int = 10, key_id: int = 1) -> Hold:
    return Hold(request_id, 1, key_id, "m", at_ms, tokens, 0)


def entry(request_id: str, at_ms: int, fresh: int, key_id: int = 1) -> UsageEntry:
    return UsageEntry(
        request_id, 1, key_id, "m", "done", at_ms, at_ms + 1, fresh, 0, 0, fresh, 0, 0
    )


@pytest.fixture
def ledger(store: Store, wall: Wall) -> Iterator[Ledger]:
    create_tenant(store, wall, "ada")
    create_key(store, wall, 1)
    create_key(store, wall, 1)
    add_card(store, wall, CARD)
    ledger = Ledger(store, wall)
    yield ledger
    ledger.close()


def is_held(ledger: Ledger, what: Hold) -> bool:
    try:
        ledger.hold(what).result(PATIENCE_S)
    except BudgetExceeded:
        return False
    return True


def sums(store: Store, wall: Wall) -> list[tuple[int, int]]:
    """Return (spent, reserved) in micro-dollars, by budget."""
    states = budget_states(store, wall)
    return [(state.spent_pico // 10**6, state.reserved_pico // 10**6) for state in states]


def test_refusal_names_budget_and_window_end(store: Store, ledger: Ledger, wall: Wall) -> None:
    """Clients wait for the window; operators read the sums."""
    set_budget(store, Budget(1, "month", hard_micros=5))
    with pytest.raises(BudgetExceeded) as caught:
        ledger.hold(hold("a", wall())).result(PATIENCE_S)

    refusal = caught.value
    assert (refusal.code, refusal.scope, refusal.window) == ("budget_exceeded", "tenant", "month")
    assert (refusal.hard_pico, refusal.spent_pico, refusal.reserved_pico) == (5_000_000, 0, 0)
    assert datetime.fromtimestamp(refusal.resets_ms / 1000, UTC) == datetime(1970, 2, 1, tzinfo=UTC)
    assert refusal.retry_after_s is None, "it would not fit an empty window either"
    assert holds(store) == 0


def test_refusal_has_retry_time(store: Store, ledger: Ledger, wall: Wall) -> None:
    """Until the window ends, unless no window would admit the request."""
    set_budget(store, Budget(1, "day", hard_micros=15, soft_micros=15))
    assert is_held(ledger, hold("a", wall()))
    with pytest.raises(BudgetExceeded) as caught:
        ledger.hold(hold("b", wall(), 15)).result(PATIENCE_S)

    assert caught.value.retry_after_s == (DAY_MS - wall()) / 1000
    assert "retry in the next day (UTC)" in caught.value.message
    with pytest.raises(BudgetExceeded, match="more than the whole budget of this tenant for a day"):
        ledger.hold(hold("c", wall(), 16)).result(PATIENCE_S)


def test_rotated_keys_share_a_budget(store: Store, ledger: Ledger, wall: Wall) -> None:
    """A new key must not be new money."""
    set_budget(store, Budget(1, "day", hard_micros=25, key_id=1))
    assert is_held(ledger, hold("a", wall(), 10, 1))
    new_id = rotate_key(store, wall, "1", DAY_MS, by=TESTER)[1].key_id
    newer_id = rotate_key(store, wall, str(new_id), DAY_MS, by=TESTER)[1].key_id
    held = [
        is_held(ledger, hold("b", wall(), 10, newer_id)),
        is_held(ledger, hold("c", wall(), 10, new_id)),
        is_held(ledger, hold("d", wall(), 10, 1)),
        is_held(ledger, hold("e", wall(), 10, 2)),
    ]

    assert held == [True, False, False, True]
    assert sums(store, wall) == [(0, 20)]
    assert check_books(store) == []

    set_budget(store, Budget(1, "day", hard_micros=31, key_id=newer_id))

    (state,) = budget_states(store, wall)
    assert (state.budget.key_id, sums(store, wall)) == (newer_id, [(0, 20)])
    assert is_held(ledger, hold("f", wall(), 10, 1))
    assert not is_held(ledger, hold("g", wall(), 10, newer_id))


def test_refused_request_id_is_free(store: Store, ledger: Ledger, wall: Wall) -> None:
    """A refusal leaves nothing, in the batch or in the file."""
    set_budget(store, Budget(1, "day", hard_micros=5))
    refused = is_held(ledger, hold("a", wall()))
    set_budget(store, Budget(1, "day", hard_micros=50))

    assert not refused
    assert is_held(ledger, hold("a", wall()))


def test_budgets_of_the_day_and_the_month_both_apply(
    store: Store, ledger: Ledger, wall: Wall
) -> None:
    set_budget(store, Budget(1, "day", hard_micros=15))
    set_budget(store, Budget(1, "month", hard_micros=25))
    first = [is_held(ledger, hold(name, wall())) for name in "ab"]
    wall.ms += DAY_MS
    second = [is_held(ledger, hold(name, wall(), tokens)) for name, tokens in (("c", 10), ("d", 6))]
    wall.ms += DAY_MS
    third = [is_held(ledger, hold(name, wall(), tokens)) for name, tokens in (("e", 6), ("f", 5))]

    assert (first, second, third) == ([True, False], [True, False], [False, True])
    assert sums(store, wall) == [(0, 5), (0, 25)]


def test_hold_from_before_a_close_reserves_on_the_open_day(
    store: Store, ledger: Ledger, wall: Wall
) -> None:
    """L9: where its charge will count, although its clock is set back to a closed day."""
    ledger.settle(entry("a", wall(), 1)).result(PATIENCE_S)
    began_ms, wall.ms = wall.ms, wall.ms + DAY_MS
    close_days(store, wall, "1970-01-01", by=TESTER)
    set_budget(store, Budget(1, "day", hard_micros=10))
    early = is_held(ledger, hold("b", began_ms, 9))
    reserved = sums(store, wall)
    held = is_held(ledger, hold("c", wall(), 2))
    ledger.settle(entry("b", began_ms, 4)).result(PATIENCE_S)

    assert (early, reserved, held) == (True, [(0, 9)], False)
    assert sums(store, wall) == [(4, 0)]


def test_new_budget_counts_from_its_windows_first_instant_to_its_last(
    store: Store, ledger: Ledger, wall: Wall
) -> None:
    """At midnight the next day's begins."""
    wall.ms = DAY_MS
    ledger.hold(hold("a", wall())).result(PATIENCE_S)
    ledger.settle(entry("b", wall(), 3)).result(PATIENCE_S)
    set_budget(store, Budget(1, "day", hard_micros=20))
    found = []
    for at_ms in (DAY_MS - 1, DAY_MS, 2 * DAY_MS):
        wall.ms = at_ms
        found.append(sums(store, wall))

    assert found == [[(0, 0)], [(3, 10)], [(0, 0)]]


def test_new_budget_counts_running_requests_and_refuses_none(
    store: Store, ledger: Ledger, wall: Wall
) -> None:
    """Their holds may be written after the budget was set, and again after a crash."""
    set_budget(store, Budget(1, "day", hard_micros=15))
    late = structs.replace(hold("a", wall(), 20), is_running=True)
    answers = [is_held(ledger, late), is_held(ledger, late), is_held(ledger, hold("b", wall(), 1))]
    reserved = sums(store, wall)
    ledger.settle(entry("a", wall(), 14)).result(PATIENCE_S)

    assert answers == [True, True, False]
    assert reserved == [(0, 20)]
    assert is_held(ledger, hold("b", wall(), 1))


def test_soft_budget_refuses_nothing(store: Store, ledger: Ledger, wall: Wall) -> None:
    set_budget(store, Budget(1, "day", soft_micros=5))
    held = is_held(ledger, hold("a", wall()))
    over = []
    for request_id, tokens in (("a", 5), ("b", 1)):
        ledger.settle(entry(request_id, wall(), tokens)).result(PATIENCE_S)
        (state,) = budget_states(store, wall, (1,))
        over.append(state.is_over_soft)

    assert held
    assert over == [False, True]
    assert budget_states(store, wall, (2,)) == []


def test_failure_spends_nothing(store: Store, ledger: Ledger, wall: Wall) -> None:
    set_budget(store, Budget(1, "day", hard_micros=10))
    ledger.hold(hold("a", wall())).result(PATIENCE_S)
    failed = UsageEntry("a", 1, 1, "m", "failed", wall(), wall(), 9, 0, 0, 9, 0, 0)
    ledger.settle(failed).result(PATIENCE_S)

    assert sums(store, wall) == [(0, 0)]


def test_concurrent_holds_never_exceed_the_budget(store: Store, ledger: Ledger, wall: Wall) -> None:
    """L4, with threads: exactly as many as fit are admitted."""
    set_budget(store, Budget(1, "day", hard_micros=375))
    with ThreadPoolExecutor(16) as pool:
        futures = list(pool.map(lambda n: ledger.hold(hold(str(n), wall(), 3)), range(1000)))
    taken = sum(future.exception(PATIENCE_S) is None for future in futures)

    assert taken == 125
    assert sums(store, wall) == [(0, 375)]


def test_unused_tenant_is_deleted_with_its_budget(store: Store, ledger: Ledger, wall: Wall) -> None:
    """A budget is a setting and no usage."""
    bob = create_tenant(store, wall, "bob")
    set_budget(store, Budget(bob.tenant_id, "day", hard_micros=375))
    budget_states(store, wall)
    delete_tenant(store, lambda: 1, "bob")

    assert budget_states(store, wall) == []


@each_row(
    "budget",
    [
        Budget(1, "day", hard_micros=-1),
        Budget(1, "day", hard_micros=MICROS_MAX + 1),
        Budget(1, "day", hard_micros=1, soft_micros=2),
        Budget(7, "day", hard_micros=1),
        Budget(1, "day", hard_micros=1, key_id=9),
        Budget(1, "day", hard_micros=1, key_id=-1),
        Budget(1, "day", hard_micros=1, key_id=2**63),
    ],
)
def test_refuses_invalid_budgets(store: Store, ledger: Ledger, budget: Budget) -> None:
    """With a code, and nothing changed."""
    with pytest.raises(BadPrice) as caught:
        set_budget(store, budget)

    assert caught.value.code == "bad_budget"
    assert store.query("select count(*) from budgets") == [(0,)]


def test_largest_budget_is_accepted(store: Store, ledger: Ledger, wall: Wall) -> None:
    set_budget(store, Budget(1, "day", hard_micros=MICROS_MAX))

    assert is_held(ledger, hold("a", wall()))


def test_windows_follow_the_utc_calendar() -> None:
    """Half-open, through leap years, to the end of the calendar."""

    def ms(year: int, month: int, day: int) -> int:
        return int(datetime(year, month, day, tzinfo=UTC).timestamp()) * 1000

    assert window_of("day", ms(2024, 2, 29) + 5) == (ms(2024, 2, 29), ms(2024, 3, 1))
    assert window_of("month", ms(2024, 2, 29)) == (ms(2024, 2, 1), ms(2024, 3, 1))
    assert window_of("month", ms(2024, 12, 31)) == (ms(2024, 12, 1), ms(2025, 1, 1))
    assert window_of("day", -5)[0] == 0
    assert window_of("month", 2**62)[0] < 2**62


ODD_PRICE = 700_001
"""Pico-dollars of a token: sums of these have parts above and below the micro-dollar."""


def cost_of(tokens: int) -> Fraction:
    return Fraction(tokens * ODD_PRICE, 10**12)


class Spending(BookMachine):
    """A state machine: a tenant and a key with budgets against sums of fractions."""

    def __init__(self) -> None:
        super().__init__()
        create_key(self.store, self.wall, 1)
        add_card(self.store, self.wall, structs.replace(CARD, input=ODD_PRICE))
        self.hard: dict[int, int | None] = {0: None, 1: None}
        self.reserved: dict[str, tuple[int, int]] = {}
        self.spent: dict[int, Fraction] = {}
        self.noted: dict[str, int] = {}
        self.count = 0

    def day(self, at_ms: int) -> int:
        return at_ms // DAY_MS

    @rule(key=st.sampled_from([0, 1]), hard=st.none() | st.integers(0, 60))
    def budget(self, key: int, hard: int | None) -> None:
        set_budget(self.store, Budget(1, "day", hard_micros=hard, key_id=key))
        self.hard[key] = hard

    @rule(tokens=st.integers(0, 20))
    def hold(self, tokens: int) -> None:
        self.count += 1
        request_id, used = str(self.count), self.used(self.day(self.wall())) + cost_of(tokens)
        fits = all(hard is None or used <= Fraction(hard, 10**6) for hard in self.hard.values())
        assert is_held(self.ledger, hold(request_id, self.wall(), tokens)) == fits
        if fits:
            self.reserved[request_id] = (self.wall(), tokens)

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        if not self.reserved:
            return
        request_id = data.draw(st.sampled_from(sorted(self.reserved)))
        at_ms, most = self.reserved.pop(request_id)
        tokens = data.draw(st.integers(0, most))
        self.ledger.settle(entry(request_id, at_ms, tokens)).result(PATIENCE_S)
        self.spend(at_ms, tokens)

    @rule(days=st.sampled_from([1, 1, -1]))
    def clock(self, days: int) -> None:
        self.wall.ms = max(1_000_000, self.wall.ms + days * DAY_MS)

    @rule()
    def restart(self) -> None:
        self.restart_ledger()
        assert self.ledger.interrupted == len(self.reserved)
        for request_id, (at_ms, _) in self.reserved.items():
            self.spend(at_ms, self.noted.get(request_id, 0))
        self.reserved.clear()

    @rule(data=st.data())
    def note(self, data: st.DataObject) -> None:
        if not self.reserved:
            return
        request_id = data.draw(st.sampled_from(sorted(self.reserved)))
        tokens = data.draw(st.integers(0, self.reserved[request_id][1]))
        self.ledger.note_progress({request_id: TokenCounts(fresh_tokens=tokens)})
        self.noted[request_id] = tokens

    def spend(self, at_ms: int, tokens: int) -> None:
        day = self.day(at_ms)
        self.spent[day] = self.spent.get(day, Fraction(0)) + cost_of(tokens)

    def used(self, day: int) -> Fraction:
        held = [cost_of(most) for at_ms, most in self.reserved.values() if self.day(at_ms) == day]
        return self.spent.get(day, Fraction(0)) + sum(held, Fraction(0))

    @invariant()
    def sums_match_the_model(self) -> None:
        states = budget_states(self.store, self.wall)
        assert len(states) == sum(hard is not None for hard in self.hard.values())
        for state in states:
            total = Fraction(state.spent_pico + state.reserved_pico, 10**12)
            assert total == self.used(self.day(self.wall()))


TestSpending = Spending.TestCase


@pytest.mark.slow
def test_budgets_on_a_server_match_the_model(postgres_server: Server) -> None:
    run_on_server(Spending, postgres_server)


TestSpending.settings = settings(max_examples=examples(25), stateful_step_count=30, deadline=None)
