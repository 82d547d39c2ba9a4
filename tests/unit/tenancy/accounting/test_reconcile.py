"""Three counts of the same tokens agree, or the difference is shown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tenancy.accounting.reconcile import Counts, reconcile, reconcile_living
from tenancy.accounts.tenants import create_tenant
from tenancy.ledger.ledger import EngineTotals, Hold, Ledger
from tenancy.storage.interface import Store
from tenancy.types import UsageEntry
from tests.unit.tenancy.conftest import Wall


def entry(request_id: str, epoch: str, ended_ms: int = 20) -> UsageEntry:
    return UsageEntry(request_id, 1, 1, "m", "done", 10, ended_ms, 9, 4, 0, 5, 3, 4, epoch=epoch)


def totals(epoch: str, times: int, at_ms: int = 20, *, is_ended: bool = False) -> EngineTotals:
    counts = (9 * times, 4 * times, 3 * times)
    return EngineTotals(epoch, at_ms, *counts, *counts, is_ended=is_ended)


@pytest.fixture
def ledger(store: Store, wall: Wall) -> Iterator[Ledger]:
    create_tenant(store, wall, "ada")
    ledger = Ledger(store, wall)
    for number in range(3):
        ledger.settle(entry(str(number), "e1")).result(60)
    yield ledger
    ledger.close()


def test_equal_counts_do_not_mismatch(store: Store, ledger: Ledger) -> None:
    """They are shown, so that zero is a number and not a claim."""
    ledger.write(totals("e1", 3)).result(60)
    (epoch,) = reconcile(store)

    assert (epoch.state, epoch.has_mismatch, epoch.entries) == ("running", False, 3)
    assert epoch.ledger == epoch.engine == epoch.metrics == Counts(27, 12, 9)


@pytest.mark.parametrize("times", [2, 4])
def test_finds_differences_either_way(store: Store, ledger: Ledger, times: int) -> None:
    """An entry that no engine computed, and tokens without a charge."""
    ledger.write(totals("e1", times, is_ended=True)).result(60)
    (epoch,) = reconcile(store)

    assert epoch.has_mismatch
    assert epoch.ledger.minus(epoch.engine).prompt_tokens == 9 * (3 - times)


def test_running_requests_defer_the_comparison(store: Store, ledger: Ledger) -> None:
    """Also entries that came after the engine's last reading."""
    ledger.write(totals("e1", 4)).result(60)
    ledger.hold(Hold("x", 1, 1, "m", 10, epoch="e1")).result(60)
    running = reconcile(store)[0]
    ledger.settle(entry("x", "e1", 99)).result(60)
    later = reconcile(store)[0]
    ledger.write(totals("e1", 4, 99)).result(60)
    asked = reconcile(store)[0]

    assert [one.state for one in (running, later, asked)] == ["pending", "pending", "running"]
    assert not running.has_mismatch
    assert not asked.has_mismatch


def test_died_epoch_shows_its_difference(store: Store, ledger: Ledger) -> None:
    """It is not a mistake of the books."""
    ledger.write(totals("e1", 2)).result(60)
    ledger.write(totals("e2", 0, 30)).result(60)
    newer, older = reconcile(store)

    assert (newer.epoch, newer.state, older.state) == ("e2", "running", "died")
    assert not older.has_mismatch
    assert older.ledger.minus(older.engine).output_tokens == 3


def test_epoch_of_another_gateway_is_pending(store: Store, ledger: Ledger) -> None:
    """It may be running: it is not compared, and not called dead while its record is fresh."""
    ledger.write(totals("e1", 4, 20_000)).result(60)
    ledger.write(totals("e2", 0, 30_000)).result(60)
    states = [[one.state for one in reconcile(store, now_ms)] for now_ms in (150_000, 170_001)]
    own = reconcile_living(store, "e1")

    assert states == [["running", "pending"], ["running", "died"]]
    assert own is not None
    assert (own.state, own.has_mismatch) == ("running", True)
    assert reconcile_living(store, "e3") is None


def test_no_epochs_give_no_rows(store: Store) -> None:
    assert reconcile(store) == []
