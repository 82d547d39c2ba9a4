"""Charts of the ledger add up to its entries, for any buckets."""

from __future__ import annotations

import pytest

from tenancy.history.ledger_history import LedgerBucket, ledger_history
from tenancy.ledger.ledger import Ledger
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.interface import Store
from tenancy.types import DAY_MS, HOUR_MS, MINUTE_MS
from tests.unit.tenancy.conftest import Wall, used

AT_MS = 20_000 * DAY_MS + 5 * HOUR_MS
CARD = RateCard("std", input=100, cache_read=10, cache_write={"*": 200}, output=300)
ONE = LedgerBucket(
    requests=1,
    prompt_tokens=10,
    cache_read_tokens=5,
    cache_write_tokens=3,
    fresh_tokens=2,
    output_tokens=4,
    physical_cached_tokens=5,
    recomputed_promised_tokens=1,
    host_cached_tokens=2,
    disk_cached_tokens=1,
    remote_cached_tokens=1,
    charge_pico=2 * 100 + 5 * 10 + 3 * 200 + 4 * 300,
    saved_pico=5 * 90 - 3 * 100,
)


@pytest.fixture
def filled(ledger: Ledger, store: Store, wall: Wall) -> Store:
    """A store with entries of one tenant: two in a minute, and one two hours later."""
    add_card(store, wall, CARD)
    for number, at_ms in enumerate((AT_MS, AT_MS + 59_999, AT_MS + 2 * HOUR_MS)):
        wall.ms = at_ms
        ledger.settle(used(f"r{number}", at_ms)).result(60)
    return store


@pytest.mark.parametrize("step_ms", [MINUTE_MS, 30 * MINUTE_MS, HOUR_MS])
def test_buckets_have_the_entries_booked_in_them(filled: Store, step_ms: int) -> None:
    found = ledger_history(filled, AT_MS, AT_MS + DAY_MS, step_ms)

    assert found.keys() == {AT_MS, AT_MS + 2 * HOUR_MS}
    assert found[AT_MS + 2 * HOUR_MS] == ONE
    assert (found[AT_MS].requests, found[AT_MS].saved_pico) == (2, 2 * ONE.saved_pico)


@pytest.mark.parametrize("step_ms", [12 * HOUR_MS, DAY_MS])
def test_long_buckets_come_from_sums(filled: Store, step_ms: int) -> None:
    since_ms = AT_MS - 5 * HOUR_MS

    (bucket,) = ledger_history(filled, since_ms, since_ms + 2 * DAY_MS, step_ms).values()

    assert (bucket.requests, bucket.charge_pico) == (3, 3 * ONE.charge_pico)
    assert (bucket.device_cached_tokens, bucket.host_cached_tokens) == (3, 6)
    assert (bucket.disk_cached_tokens, bucket.remote_cached_tokens) == (3, 3)


def test_filters_by_tenant_and_model(filled: Store) -> None:
    def count(tenant_id: int | None = None, model: str | None = None) -> int:
        found = ledger_history(
            filled, AT_MS, AT_MS + DAY_MS, HOUR_MS, tenant_id=tenant_id, model=model
        )
        return sum(bucket.requests for bucket in found.values())

    assert count(tenant_id=1) == count(model="m") == 3
    assert count(tenant_id=2) == count(model="other") == 0
