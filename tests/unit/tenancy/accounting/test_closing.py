"""The daily close: counted, summed, hashed and final."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing

import pytest
from msgspec.structs import replace

from tenancy.accounting import closing as daily_close
from tenancy.accounting.audit import check_books
from tenancy.accounting.closing import close_days, list_closes
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import BadName, CloseRefused, ConstraintBroken, LedgerUnavailable
from tenancy.ledger.adjustments import Adjustment, adjust
from tenancy.ledger.ledger import EngineTotals, Hold, Ledger
from tenancy.ledger.transactions import StorageReading, StorageReadings
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.interface import Store, Transaction
from tenancy.types import DAY_MS, UsageEntry
from tests.actors import TESTER
from tests.tables import each_row
from tests.unit.tenancy.conftest import Wall
from tests.unit.tenancy.ledger.written import done

READING = StorageReading(1, "1h", 55)


def entry(request_id: str, at_ms: int) -> UsageEntry:
    return UsageEntry(request_id, 1, 1, "m", "done", at_ms, at_ms, 10, 2, 3, 5, 4, 0)


@pytest.fixture
def ledger(store: Store, wall: Wall) -> Iterator[Ledger]:
    create_tenant(store, wall, "ada")
    add_card(store, wall, RateCard("std", input=10**12, cache_read=7))
    ledger = Ledger(store, wall)
    yield ledger
    ledger.close()


def code_of(store: Store, wall: Wall, through: str | None = None) -> str:
    with pytest.raises(CloseRefused) as caught:
        close_days(store, wall, through, by=TESTER)
    return caught.value.code


def pass_days(ledger: Ledger, wall: Wall, days: int = 1) -> int:
    """Let days pass, of which the ledger learns. Returns the time before."""
    before_ms, wall.ms = wall.ms, wall.ms + days * DAY_MS
    done(ledger.write(EngineTotals("idle", wall(), 0, 0, 0, 0, 0, 0)))
    return before_ms


def booked(store: Store) -> list[tuple[str, int]]:
    return [tuple(row) for row in store.query("select request_id, booked_ms from ledger")]


def test_close_has_the_days_totals(store: Store, ledger: Ledger, wall: Wall) -> None:
    """Any program can recompute them from the entries."""
    for number in range(3):
        done(ledger.settle(entry(str(number), wall() + number)))
    adjust(store, wall, Adjustment("x", "1", -9, "an outage"), by=TESTER)
    done(ledger.write(StorageReadings("e1", wall(), (READING,))))
    pass_days(ledger, wall)
    (day,) = close_days(store, wall, by=TESTER)

    assert (day.day, day.entries, day.prompt_tokens, day.output_tokens) == ("1970-01-01", 3, 30, 12)
    assert (day.cache_read_tokens, day.cache_write_tokens) == (6, 9)
    assert day.charge_pico == 3 * (2 * 7 + 8 * 10**12)
    assert (day.adjustments, day.adjusted_pico, day.storage_token_seconds) == (1, -9, 55)
    assert day.closed_ms == wall()
    assert list_closes(store) == [day]
    entries = store.query("select chain from ledger order by entry_id")
    adjustments = store.query("select chain from adjustments")
    hashed = b"".join(bytes(chain) for (chain,) in entries + adjustments)
    hashed += repr((0, 3, 30, 6, 9, 12, str(day.charge_pico), 1, "-9", 55)).encode()
    assert day.digest == hashlib.sha256(hashed).hexdigest()


def test_late_entry_is_booked_on_the_next_open_day(
    store: Store, ledger: Ledger, wall: Wall
) -> None:
    """At the price of its admission; only its period moves."""
    done(ledger.settle(entry("a", wall())))
    began_ms = pass_days(ledger, wall)
    (closed,) = close_days(store, wall, by=TESTER)
    done(ledger.settle(entry("b", began_ms)))
    done(ledger.write(StorageReadings("e1", began_ms, (READING,))))
    pass_days(ledger, wall)
    (after,) = close_days(store, wall, by=TESTER)

    assert booked(store) == [("a", began_ms), ("b", DAY_MS)]
    assert (closed.entries, after.entries, after.storage_token_seconds) == (1, 1, 55)
    assert after.charge_pico == closed.charge_pico


def test_clock_set_back_changes_no_closed_day(store: Store, ledger: Ledger, wall: Wall) -> None:
    """L9: holds and entries with a wrong time go to the first open day."""
    done(ledger.settle(entry("a", wall())))
    pass_days(ledger, wall, 3)
    before = close_days(store, wall, by=TESTER)
    wall.ms -= 3 * DAY_MS
    done(ledger.hold(Hold("b", 1, 1, "m", wall())))
    done(ledger.settle(entry("b", wall())))

    assert [row[1] // DAY_MS for row in booked(store)] == [0, 3]
    assert list_closes(store) == before
    assert len(before) == 3
    assert code_of(store, wall, "1970-01-01") == "day_not_over"


def test_clock_ahead_closes_no_day_that_still_runs(
    store: Store, ledger: Ledger, wall: Wall
) -> None:
    """Its entries would be booked days later. A day by name closes, or a stopped gateway's last
    would stay open."""
    for number in range(2):
        done(ledger.settle(entry(str(number), wall() + number * DAY_MS)))
    wall.ms += 5 * DAY_MS
    closed = [day.day for day in close_days(store, wall, by=TESTER)]
    named = [day.day for day in close_days(store, wall, "1970-01-02", by=TESTER)]

    assert (closed, named) == (["1970-01-01"], ["1970-01-02"])


def at_each_change(
    store: Store, monkeypatch: pytest.MonkeyPatch, what: Callable[[int], None]
) -> None:
    """Call `what` before each transaction, with its number."""
    change, count = store.change, itertools.count(1)

    def changed() -> AbstractContextManager[Transaction]:
        what(next(count))
        return change()

    monkeypatch.setattr(store, "change", changed)


def test_writers_continue_while_a_day_is_counted(
    store: Store, ledger: Ledger, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day may have millions of entries: writers wait for the close's rows only, and what came
    meanwhile is counted too."""
    for number in range(9):
        done(ledger.settle(entry(str(number), wall())))
    began_ms = pass_days(ledger, wall)
    tries: list[int] = []
    with closing(store.open_another()) as other:

        def late(number: int) -> None:
            tries.append(number)
            if number == 1:
                done(ledger.settle(entry("late", began_ms)))
            elif number == 2:
                adjust(
                    store, wall, Adjustment("x", "1", -9, "an outage"), by=TESTER
                )  # of another day

        at_each_change(other, monkeypatch, late)
        (day,) = close_days(other, wall, by=TESTER)

    assert (tries, day.entries, day.prompt_tokens, day.adjustments) == ([1, 2], 10, 100, 0)
    assert check_books(store) == []


def test_day_that_keeps_growing_stays_open(
    store: Store, ledger: Ledger, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries, adjustments or storage at every try."""
    done(ledger.settle(entry("a", wall())))
    began_ms = pass_days(ledger, wall)

    def late(number: int) -> None:
        if number == 1:
            done(ledger.settle(entry("late", began_ms)))
        elif number == 2:
            done(ledger.write(StorageReadings("e1", began_ms, (READING,))))
        else:
            wall.ms -= DAY_MS
            adjust(store, wall, Adjustment("x", "a", -9, "an outage"), by=TESTER)
            wall.ms += DAY_MS

    with closing(store.open_another()) as other, monkeypatch.context() as patch:
        at_each_change(other, patch, late)
        code = code_of(other, wall)

    assert (code, list_closes(store)) == ("days_change", [])
    assert [day.entries for day in close_days(store, wall, by=TESTER)] == [2]


def test_day_with_a_running_request_stays_open(store: Store, ledger: Ledger, wall: Wall) -> None:
    """So its reservation and its charge share a window."""
    done(ledger.hold(Hold("a", 1, 1, "m", wall())))
    began_ms = pass_days(ledger, wall)
    running = code_of(store, wall)
    done(ledger.settle(entry("a", began_ms)))
    (day,) = close_days(store, wall, by=TESTER)

    assert (running, day.entries) == ("requests_running", 1)


@pytest.mark.parametrize(
    ("item", "code"),
    [
        (Hold("b", 1, 1, "m", 1_000_000), "requests_running"),
        (EngineTotals("e", 1_000_000, 7, 0, 0, 7, 0, 0, is_ended=True), "counts_apart"),
    ],
)
def test_what_keeps_a_day_open_may_come_while_it_is_counted(
    store: Store,
    ledger: Ledger,
    wall: Wall,
    monkeypatch: pytest.MonkeyPatch,
    item: Hold | EngineTotals,
    code: str,
) -> None:
    done(ledger.settle(entry("a", wall())))
    pass_days(ledger, wall)
    with closing(store.open_another()) as other, monkeypatch.context() as patch:
        at_each_change(other, patch, lambda _: done(ledger.write(item)))
        found = code_of(other, wall)

    assert (found, list_closes(store)) == (code, [])


def test_closing_again_changes_nothing(store: Store, ledger: Ledger, wall: Wall) -> None:
    """For an hourly job, nothing to do is no error; for a day by name it is."""
    done(ledger.settle(entry("a", wall())))
    pass_days(ledger, wall)
    days = close_days(store, wall, by=TESTER)

    assert close_days(store, wall, by=TESTER) == []
    assert code_of(store, wall, "1970-01-01") == "day_closed"
    assert list_closes(store) == days


@each_row("day", ["yesterday", "1970-13-01", "", "'; --"])
def test_refuses_invalid_and_unfinished_days(store: Store, wall: Wall, day: str) -> None:
    with pytest.raises(BadName, match="Invalid day"):
        close_days(store, wall, day, by=TESTER)
    assert code_of(store, wall, "1970-01-01") == "day_not_over"


def test_empty_ledger_closes_nothing(store: Store, wall: Wall) -> None:
    """The first day is that of the first entry."""
    wall.ms += 500 * DAY_MS

    assert close_days(store, wall, "1970-01-01", by=TESTER) == []


def test_close_of_too_many_days_names_their_number(
    store: Store, ledger: Ledger, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One transaction would be too long; earlier days can be closed first."""
    monkeypatch.setattr(daily_close, "DAYS_PER_CLOSE_MAX", 2)
    done(ledger.settle(entry("a", wall())))
    pass_days(ledger, wall, 3)
    with pytest.raises(CloseRefused, match=r": 3; limit 2\.") as caught:
        close_days(store, wall, by=TESTER)

    assert caught.value.code == "too_many_days"
    assert len(close_days(store, wall, "1970-01-02", by=TESTER)) == 2


def test_each_close_is_chained_to_the_one_before(store: Store, ledger: Ledger, wall: Wall) -> None:
    """Days with equal totals have different digests."""
    pass_days(ledger, wall, 3)
    done(ledger.settle(entry("a", 0)))
    days = close_days(store, wall, by=TESTER)

    assert len({day.digest for day in days}) == 3


def test_database_refuses_rows_in_closed_days(store: Store, ledger: Ledger, wall: Wall) -> None:
    """From any program."""
    done(ledger.settle(entry("a", wall())))
    pass_days(ledger, wall)
    close_days(store, wall, by=TESTER)
    copied = (
        "insert into ledger select 9, 'z', tenant_id, key_id, model, ending, started_ms, ended_ms,"
        " prompt_tokens, cache_read_tokens, cache_write_tokens, fresh_tokens, output_tokens,"
        " physical_cached_tokens, reads, writes, workspace, tier, dialect,"
        " recomputed_promised_tokens, ttft_ms, epoch, rate_card_id, charge_pico, saved_pico,"
        " booked_ms, chain, host_cached_tokens, disk_cached_tokens, remote_cached_tokens"
        " from ledger"
    )
    for statement in (copied, "delete from closes", "update closes set entries = 0"):
        with pytest.raises(ConstraintBroken), store.change() as db:
            db.execute(statement)


def test_hold_cannot_settle_into_a_closed_day(store: Store, ledger: Ledger, wall: Wall) -> None:
    """The impossible entry is refused; the day is unchanged."""
    done(ledger.settle(entry("a", wall())))
    pass_days(ledger, wall)
    close_days(store, wall, by=TESTER)
    refused = ledger.settle(UsageEntry("b", 1, 1, "m", "done", 0, 0, 9, 2, 3, 5, 4, 0))

    assert isinstance(refused.exception(60), LedgerUnavailable)
    assert len(booked(store)) == 1


def test_day_with_a_count_mismatch_stays_open(store: Store, ledger: Ledger, wall: Wall) -> None:
    """Until an operator has explained it; later days close."""
    done(ledger.settle(replace(entry("a", wall()), epoch="e1")))
    done(ledger.write(EngineTotals("e1", wall(), 11, 0, 4, 11, 0, 4, is_ended=True)))
    pass_days(ledger, wall)
    refused = code_of(store, wall)
    closed = close_days(store, wall, despite_counts=True, by=TESTER)
    done(ledger.settle(entry("b", wall())))
    pass_days(ledger, wall)

    assert (refused, len(closed)) == ("counts_apart", 1)
    assert len(close_days(store, wall, by=TESTER)) == 1
