"""FOCUS rows whose sum is the bill, to the pico-dollar."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenancy.accounting.focus_export import (
    COLUMNS,
    HeldStorage,
    cost_rows,
    storage,
    storage_by_tenant,
)
from tenancy.accounting.usage import usage
from tenancy.accounts.tenants import create_tenant
from tenancy.ledger.adjustments import Adjustment, adjust
from tenancy.ledger.ledger import Ledger
from tenancy.ledger.transactions import StorageReading, StorageReadings
from tenancy.pricing.charges import RateCard, format_dollars, storage_charge
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.interface import Store
from tenancy.types import HOUR_MS, UsageEntry
from tests.actors import TESTER
from tests.unit.tenancy.conftest import Wall

CARD = RateCard(
    "std",
    input=3_000_000,
    output=15_000_001,
    cache_read=300_000,
    cache_write={"1h": 6_000_000},
    storage={"1h": 999},
    minimum_charge=100,
)


def entry(number: int, at_ms: int) -> UsageEntry:
    return UsageEntry(
        request_id=f"r{number}",
        tenant_id=1 + number % 2,
        key_id=1 + number % 3,
        model="m",
        ending="failed" if number == 4 else "done",
        started_ms=at_ms,
        ended_ms=at_ms,
        prompt_tokens=10 + number,
        cache_read_tokens=5,
        cache_write_tokens=3,
        fresh_tokens=2 + number,
        output_tokens=number,
        physical_cached_tokens=0,
        write={"1h": 3},
    )


@pytest.fixture
def store(store: Store, wall: Wall) -> Store:
    for name in ("ada", "bob"):
        create_tenant(store, wall, name)
    wall.ms = 0
    add_card(store, wall, CARD)
    ledger = Ledger(store, wall)
    for number in range(30):
        ledger.settle(entry(number, number * HOUR_MS // 5)).result(60)
    ledger.write(StorageReadings("e1", 0, (StorageReading(1, "1h", 12_345),))).result(60)
    ledger.close()
    adjust(store, wall, Adjustment("x", "r5", -7, "an outage"), by=TESTER)
    return store


def test_rows_add_up_to_the_bill(store: Store) -> None:
    """Charges, adjustments and storage; uncached cost less billed cost is the savings."""
    rows = list(cost_rows(store, None, 0, None, "acme"))
    totals = usage(store)
    charged = sum(total.charge_pico + total.adjusted_pico for total in totals)
    held = storage_charge(CARD, "1h", 12_345)
    tokens = [row for row in rows if not str(row["SkuMeter"]).startswith("storage")]
    saved = [row for row in tokens if row["SkuMeter"] != "minimum"]

    assert sum(Decimal(str(row["BilledCost"])) for row in rows) == Decimal(charged + held) / 10**12
    assert sum(Decimal(str(row["x_CacheSavings"])) for row in saved) == Decimal(
        sum(total.saved_pico for total in totals)
    ) / Decimal(10**12)
    assert sum(int(str(row["x_BilledPico"])) for row in rows) == charged + held


def test_storage_by_class_equals_the_bill(store: Store) -> None:
    """For one tenant or all, in the hours of a period."""
    mine = storage(store, "ada", 0, None)

    assert mine == [HeldStorage("1h", 12_345, storage_charge(CARD, "1h", 12_345))]
    assert mine[0].pico > 0
    assert storage(store, None, 0, None) == mine
    assert storage(store, "ada", HOUR_MS, None) == storage(store, "bob", 0, None) == []
    assert storage_by_tenant(store, None, 0, None) == {"ada": mine[0].pico}
    assert storage_by_tenant(store, "bob", 0, None) == {}


def test_storage_by_tenant_rounds_each_hour(store: Store, wall: Wall) -> None:
    """Whether Python or the database adds the hours."""
    hours = [1, 2**40 + 7, 3_599, 3_601, 0, 12_345]
    ledger = Ledger(store, wall)
    for number, seconds in enumerate(hours):
        reading = StorageReading(2, "1h", seconds)
        at_ms = number * HOUR_MS
        ledger.write(StorageReadings(f"life {number}", at_ms, (reading,))).result(60)
    ledger.close()

    charges = [storage_charge(CARD, "1h", seconds) for seconds in hours]
    assert storage_by_tenant(store, "bob", 0, None) == {"bob": sum(charges)}
    assert storage_by_tenant(store, None, HOUR_MS, None) == {"bob": sum(charges[1:])}


def test_row_tokens_equal_ledger_tokens(store: Store) -> None:
    """Each once, free failures included."""
    rows = [row for row in cost_rows(store, "ada", 0, None, "acme") if row["ConsumedQuantity"]]
    (total,) = usage(store, tenant="ada")
    counted = sum(
        int(str(row["ConsumedQuantity"])) for row in rows if row["ConsumedUnit"] == "tokens"
    )

    assert counted == total.prompt_tokens + total.output_tokens


def test_unit_price_times_quantity_is_the_cost(store: Store) -> None:
    """FOCUS requires it of every usage row (storage is rounded down). Tokens of failures are
    consumed and not priced."""
    rows = [row for row in cost_rows(store, None, 0, None, "acme") if row["PricingUnit"]]
    apart = {}
    for row in rows:
        product = Decimal(str(row["ListUnitPrice"])) * Decimal(str(row["PricingQuantity"]))
        apart[str(row["SkuMeter"])] = product - Decimal(str(row["ListCost"]))
    (failure,) = [
        row
        for row in rows
        if row["SkuMeter"] == "output" and row["ConsumedQuantity"] != row["PricingQuantity"]
    ]

    assert 0 <= apart.pop("storage:1h") < Decimal("1e-12")
    assert set(apart.values()) == {0}
    assert set(apart) == {"input", "cache_read", "cache_write:1h", "output", "minimum"}
    assert failure["ChargePeriodStart"] == "1970-01-01T00:00:00Z"
    assert int(str(failure["ConsumedQuantity"])) - int(str(failure["PricingQuantity"])) == 4


def test_correction_refers_to_an_invoiced_month(store: Store, wall: Wall) -> None:
    """A credit in the same month has no charge class."""
    wall.ms = 31 * 24 * HOUR_MS
    adjust(store, wall, Adjustment("y", "r7", 5, "of January, in February"), by=TESTER)
    rows = [row for row in cost_rows(store, None, 0, None, "acme") if not row["PricingUnit"]]

    assert [(row["ChargeCategory"], row["ChargeClass"]) for row in rows] == [
        ("Credit", None),
        ("Adjustment", "Correction"),
    ]


def test_rows_have_every_column_and_a_category(store: Store) -> None:
    """The names are the specification's."""
    rows = list(cost_rows(store, None, 0, None, "acme"))

    assert all(tuple(row) == COLUMNS for row in rows)
    assert {row["ChargeCategory"] for row in rows} == {"Usage", "Credit"}
    (credit,) = [row for row in rows if row["ChargeCategory"] == "Credit"]
    assert credit["BilledCost"] == "-0.000000000007"
    assert credit["ConsumedQuantity"] is None


def test_row_groups_by_hour_key_and_component(store: Store) -> None:
    """With the rate card it was charged by."""
    row = next(
        row
        for row in cost_rows(store, "bob", 0, None, "acme")
        if (row["SkuMeter"], row["ChargePeriodStart"]) == ("cache_write:1h", "1970-01-01T01:00:00Z")
    )

    assert (row["SubAccountName"], row["ChargePeriodEnd"]) == ("bob", "1970-01-01T02:00:00Z")
    assert (row["ListUnitPrice"], row["SkuPriceId"]) == (
        "0.000006000000",
        "std@1/cache_write:1h",
    )
    assert (row["BillingPeriodStart"], row["BillingPeriodEnd"]) == (
        "1970-01-01T00:00:00Z",
        "1970-02-01T00:00:00Z",
    )


@given(st.integers(-(10**20), 10**20))
def test_dollars_are_exact(pico: int) -> None:
    """Twelve decimals, also below zero."""
    assert Decimal(format_dollars(pico)) == Decimal(pico).scaleb(-12)


def test_formats_dollars_with_sign() -> None:
    assert [format_dollars(pico) for pico in (0, 1, -1_500_000_000_000, 10**12)] == [
        "0.000000000000",
        "0.000000000001",
        "-1.500000000000",
        "1.000000000000",
    ]
