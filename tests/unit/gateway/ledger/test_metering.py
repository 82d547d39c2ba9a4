"""One hold and one entry per request, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.dialects.canonical import UsageRecord
from gateway.ledger.interface import InProcessLedger
from gateway.ledger.metering import LedgerReservation
from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.accounts.keys import create_key
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import BudgetExceeded, LedgerUnavailable
from tenancy.ledger.ledger import Ledger
from tenancy.limits import Demand
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.types import Identity
from tests.unit.tenancy.ledger.written import holds
from tests.unit.tenancy.storage.new_sqlite import new_sqlite

RECORD = UsageRecord(
    total_in=10,
    read={"best_effort": 4},
    fresh=6,
    out=3,
    physical_cached=4,
    loaded={"host": 1, "disk": 1, "remote": 1},
)


class MeteringLedger:
    """A ledger with one tenant, at a fixed time."""

    def __init__(self, folder: Path) -> None:
        self.store = new_sqlite(folder / "test.db")
        tenant = create_tenant(self.store, self.wall, "ada")
        key = create_key(self.store, self.wall, tenant.tenant_id)
        self.identity: Identity = KeyAuthenticator(self.store, self.wall, lambda: 0.0).authenticate(
            key
        )
        self.ledger = Ledger(self.store, self.wall)

    def wall(self) -> int:
        return 1_000

    def reservation(self, request_id: str, **more: Any) -> LedgerReservation:
        client = InProcessLedger(self.ledger)
        return LedgerReservation(client, self.wall, request_id, self.identity, "m", **more)

    def rows(self) -> list[tuple[object, ...]]:
        return self.store.query("select request_id, ending, output_tokens from ledger")


@pytest.fixture
def metering(tmp_path: Path) -> Iterator[MeteringLedger]:
    metering = MeteringLedger(tmp_path)
    yield metering
    metering.ledger.close()
    metering.store.close()


async def test_settles_hold_into_entry_with_disjoint_counts(metering: MeteringLedger) -> None:
    """prompt = read + write + fresh, or a tenant pays twice for the same tokens."""
    reservation = metering.reservation("a")
    await reservation.open()
    held = holds(metering.store)
    await reservation.settle("done", RECORD)

    (row,) = metering.store.query(
        "select prompt_tokens, cache_read_tokens, cache_write_tokens, fresh_tokens, output_tokens,"
        " physical_cached_tokens, host_cached_tokens, disk_cached_tokens, remote_cached_tokens"
        " from ledger"
    )
    assert (held, holds(metering.store)) == (1, 0)
    assert row == (10, 4, 0, 6, 3, 4, 1, 1, 1)


async def test_settling_twice_keeps_the_first(metering: MeteringLedger) -> None:
    """Every path out settles; the first call has the true counts."""
    reservation = metering.reservation("a")
    await reservation.open()
    await reservation.settle("done", RECORD)
    await reservation.settle("cancelled", UsageRecord(total_in=0))

    assert metering.rows() == [("a", "done", 3)]


async def test_cancelled_settle_writes_and_leaves_writer_running(
    metering: MeteringLedger,
) -> None:
    """A cancelled future must not kill the one thread that writes for all requests."""
    first, second = metering.reservation("a"), metering.reservation("b")
    await first.open()
    waiting = asyncio.ensure_future(first.settle("cancelled", RECORD))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await second.open()
    await second.settle("done", RECORD)

    assert waiting.cancelled()
    assert metering.rows() == [("a", "cancelled", 3), ("b", "done", 3)]


async def test_closed_ledger_refuses_reservations(metering: MeteringLedger) -> None:
    """Fail closed."""
    await asyncio.to_thread(metering.ledger.close)

    with pytest.raises(LedgerUnavailable):
        await metering.reservation("a").open()


async def test_request_over_budget_leaves_nothing_to_settle(metering: MeteringLedger) -> None:
    """The request never ran, so it has no entry; the error names the budget."""
    add_card(metering.store, metering.wall, RateCard("std", input=1_000_000, output=1_000_000))
    set_budget(metering.store, Budget(1, "day", hard_micros=10))
    reservation = metering.reservation("a", most=Demand(8, 3))
    with pytest.raises(BudgetExceeded):
        await reservation.open()
    await reservation.settle("failed", RECORD)

    assert (reservation.is_open, metering.rows(), holds(metering.store)) == (False, [], 0)


async def test_entry_keeps_classes_and_context(metering: MeteringLedger) -> None:
    """Pricing and reconciliation need them."""
    reservation = metering.reservation("a", dialect="d", epoch="e")
    await reservation.open()
    await reservation.settle("done", RECORD, 0.25)
    (row,) = metering.store.query(
        "select reads, writes, workspace, dialect, epoch, ttft_ms from ledger"
    )

    assert row == ('{"best_effort":4}', "{}", "default", "d", "e", 250)
