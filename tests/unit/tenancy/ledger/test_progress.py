"""Progress: an open request is settled to its last note, once, at its price, when its server
dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenancy.accounting.audit import check_books
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import LedgerUnavailable, StoreBusy
from tenancy.ledger.idempotency import Claim
from tenancy.ledger.ledger import Ledger
from tenancy.ledger.transactions import Hold
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.interface import Store
from tenancy.types import TokenCounts
from tests.crash.ledger_child import entry
from tests.unit.tenancy.conftest import Wall
from tests.unit.tenancy.ledger.written import done, entries
from tests.unit.tenancy.storage.new_sqlite import new_sqlite

CARD = RateCard("std", input=2, output=10, cache_read=1, cache_write={"5m": 3})
PROGRESS = TokenCounts({"1h": 4}, {"5m": 6}, 10, 3, 5, 0, 2, 1, 1)


def held(store: Store, wall: Wall, *request_ids: str) -> Ledger:
    """Open a ledger with priced holds on a budget."""
    create_tenant(store, wall, "ada")
    add_card(store, wall, CARD)
    set_budget(store, Budget(1, "day", hard_micros=10**9))
    ledger = Ledger(store, wall)
    futures = [ledger.hold(Hold(one, 1, 1, "m", wall(), 100, 100)) for one in request_ids]
    for future in futures:
        done(future)
    return ledger


def restart(ledger: Ledger, store: Store, wall: Wall) -> None:
    """Close the ledger, and start another that closes the open holds."""
    ledger.close()
    Ledger(store, wall).close()


@pytest.mark.parametrize("when", ["before", "at once", "after"])
def test_settlement_overrides_progress(store: Store, wall: Wall, when: str) -> None:
    """In any order of transactions; a late note and one for an unknown id have no effect."""
    ledger = held(store, wall, "1-1")
    if when != "after":
        ledger.note_progress({"1-1": PROGRESS, "nobody": PROGRESS})
    if when == "before":
        done(ledger.settle(entry("1-2")))
    settled = ledger.settle(entry("1-1"))
    if when == "after":
        ledger.note_progress({"1-1": PROGRESS, "nobody": PROGRESS})
    done(settled)
    restart(ledger, store, wall)

    assert entries(store)["1-1"].output_tokens == entry("1-1").output_tokens
    assert store.query("select * from holds") == []
    assert check_books(store) == []


def test_named_dead_request_is_free(store: Store, wall: Wall) -> None:
    """L11: its client sends it again and pays once."""
    ledger = held(store, wall)
    claim = Claim("n", bytes(32), 10)
    done(ledger.hold(Hold("a", 1, 1, "m", wall(), 100, 100, claim=claim)))
    ledger.note_progress({"a": PROGRESS})
    restart(ledger, store, wall)

    assert entries(store)["a"].charge_pico == 0
    assert store.query("select * from named_requests") == []


@pytest.mark.parametrize("count", [1, 3, 200])
def test_writes_any_number_of_notes(store: Store, wall: Wall, count: int) -> None:
    """Each to its own hold."""
    ledger = held(store, wall, *(str(number) for number in range(count)))
    ledger.note_progress({str(n): TokenCounts(output_tokens=n + 1) for n in range(count)})
    restart(ledger, store, wall)

    found = {request_id: one.output_tokens for request_id, one in entries(store).items()}
    assert found == {str(n): n + 1 for n in range(count)}


@pytest.mark.parametrize("blob", [b"", b"\x93\x01", b"\x93\x80\x80\xff", b"\xc1"])
def test_unreadable_note_does_not_fail_a_start(store: Store, wall: Wall, blob: bytes) -> None:
    """It costs us one response, not the service."""
    ledger = held(store, wall, "a")
    with store.change() as db:
        db.execute("update holds set progress = ?", (blob,))
    restart(ledger, store, wall)

    assert entries(store)["a"].charge_pico == 0


def test_failed_note_does_no_harm(
    tmp_path: Path, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream goes on, and its settlement shows whether the disk is well. The same after
    close."""

    def busy() -> None:
        raise StoreBusy("not_written", "the disk")

    store = new_sqlite(tmp_path / "test.db")
    ledger = held(store, wall, "1-1", "1-2")
    with monkeypatch.context() as patch:
        patch.setattr(store, "change", busy)
        ledger.note_progress({"1-1": PROGRESS})
        with pytest.raises(LedgerUnavailable):  # so the note before it was tried too
            done(ledger.settle(entry("1-2")))
    done(ledger.settle(entry("1-2")))
    restart(ledger, store, wall)
    ledger.note_progress({"1-1": PROGRESS})

    found = {request_id: one.output_tokens for request_id, one in entries(store).items()}
    store.close()
    assert found == {"1-1": 0, "1-2": entry("1-2").output_tokens}
