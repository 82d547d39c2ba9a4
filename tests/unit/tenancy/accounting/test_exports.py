"""Exports contain the ledger's entries, token for token and pico-dollar for pico-dollar."""

from __future__ import annotations

import builtins
import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from pyarrow import parquet

from tenancy.accounting.exports import (
    ENTRY_COLUMNS,
    as_csv,
    cloud_events,
    entry_rows,
    write_parquet,
)
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import TenancyError
from tenancy.ledger.ledger import Ledger
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.interface import Store
from tenancy.types import UsageEntry, format_utc
from tests.tables import each_row
from tests.unit.tenancy.conftest import Wall

COUNT = 9


def entry(number: int) -> UsageEntry:
    return UsageEntry(
        request_id=f"r{number}",
        tenant_id=1 + number % 2,
        key_id=1,
        model="m",
        ending="done",
        started_ms=1_000 * number,
        ended_ms=1_000 * number + 7,
        prompt_tokens=10,
        cache_read_tokens=4,
        cache_write_tokens=3,
        fresh_tokens=3,
        output_tokens=number,
        physical_cached_tokens=4,
        read={"5m": 4},
        write={"5m": 1, "1h": 2},
        ttft_ms=number or None,
    )


@pytest.fixture
def store(store: Store, wall: Wall) -> Store:
    for name in ("ada", "bob"):
        create_tenant(store, wall, name)
    wall.ms = 0
    add_card(store, wall, RateCard("std", input=3, output=5, cache_read=1))
    ledger = Ledger(store, wall)
    for number in range(COUNT):
        ledger.settle(entry(number)).result(60)
    ledger.close()
    return store


def read_csv(data: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(data.decode(), newline="")))


def test_csv_has_every_entry_with_every_field(store: Store) -> None:
    """Read back by the csv module."""
    rows = read_csv(b"".join(as_csv(ENTRY_COLUMNS, entry_rows(store, None, 0, None))))

    assert [row["request_id"] for row in rows] == [f"r{number}" for number in range(COUNT)]
    assert set(rows[0]) == set(ENTRY_COLUMNS)
    assert (rows[2]["tenant"], rows[2]["write"]) == ("ada", '{"1h":2,"5m":1}')
    assert (rows[2]["started"], rows[2]["rate_card_id"]) == ("1970-01-01T00:00:02.000Z", "std@1")
    assert [int(row["charge_pico"]) for row in rows] == [22 + 5 * n for n in range(COUNT)]
    assert (rows[0]["ttft_ms"], rows[1]["ttft_ms"]) == ("", "1")


@each_row(
    ("value", "cell"),
    [
        ("-0.000478500000", "-0.000478500000"),
        ("-7", "-7"),
        ("-1+1", "'-1+1"),
        ("-1e5", "'-1e5"),
        ("-", "'-"),
        ("-٣", "'-٣"),
        ("+1", "'+1"),
        ("@x", "'@x"),
        ("=1", "'=1"),
        ("＝1", "'＝1"),
        ("\n=1", "'\n=1"),
    ],
)
def test_csv_has_no_formulas_and_every_number(value: str, cell: str) -> None:
    """A spreadsheet that opens the file runs nothing, and a column's sum is the bill."""
    (row,) = read_csv(b"".join(as_csv(["x"], [{"x": value}])))

    assert row["x"] == cell


def test_selects_by_period_and_tenant(store: Store) -> None:
    """Half-open, by the instant of booking."""
    rows = list(entry_rows(store, "ada", 2_000, 6_000))

    assert [row["request_id"] for row in rows] == ["r2", "r4"]
    assert list(entry_rows(store, "nobody", 0, None)) == []


def test_parquet_has_the_same_rows(store: Store, tmp_path: Path) -> None:
    """Read back by pyarrow, with integers as such."""
    path = tmp_path / "out.parquet"
    written = write_parquet(ENTRY_COLUMNS, entry_rows(store, None, 0, None), path)
    table = parquet.read_table(path)

    assert written == COUNT
    assert table.to_pylist() == list(entry_rows(store, None, 0, None))
    assert str(table.schema.field("charge_pico").type) == "int64"
    assert [file.name for file in tmp_path.iterdir() if "parquet" in file.name] == ["out.parquet"]


def test_failed_parquet_export_leaves_no_file(store: Store, tmp_path: Path) -> None:
    def broken() -> Iterator[dict[str, object]]:
        yield from entry_rows(store, None, 0, None)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_parquet(ENTRY_COLUMNS, broken(), tmp_path / "out.parquet")

    assert not [file for file in tmp_path.iterdir() if "parquet" in file.name]


def test_missing_pyarrow_names_the_extra(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "pyarrow":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(TenancyError, match="exports"):
        write_parquet(ENTRY_COLUMNS, iter(()), tmp_path / "out.parquet")


def test_cloud_events_add_up_to_the_entries(store: Store) -> None:
    """Summed by type."""
    events = [json.loads(line) for line in cloud_events(store, None, 0, None, "urn:here")]
    sums: dict[str, int] = {}
    for event in events:
        assert set(event) == {
            *("specversion", "id", "source", "type", "subject", "time"),
            *("datacontenttype", "data"),
        }
        assert (event["specversion"], event["source"]) == ("1.0", "urn:here")
        data = event["data"]
        sums[data["type"]] = sums.get(data["type"], 0) + int(data["tokens"])

    assert sums == {
        "input": 3 * COUNT,
        "cache_read": 4 * COUNT,
        "cache_write_5m": COUNT,
        "cache_write_1h": 2 * COUNT,
        "output": sum(range(COUNT)),
    }
    assert len({event["id"] for event in events}) == len(events)


def test_events_of_failures_are_not_charged(store: Store, wall: Wall) -> None:
    """A billing meter must not bill what the ledger does not."""
    ledger = Ledger(store, wall)
    for number, ending in enumerate(("failed", "cancelled", "interrupted"), COUNT):
        ledger.settle(structs.replace(entry(number), ending=ending)).result(60)
    ledger.close()
    events = [json.loads(line) for line in cloud_events(store, None, 0, None, "urn:here")]
    endings = {(event["data"]["ending"], event["data"]["charged"]) for event in events}

    assert endings == {
        *(("done", True), ("cancelled", True), ("interrupted", True)),
        ("failed", False),
    }


def test_repeated_export_has_the_same_ids(store: Store) -> None:
    """A receiver of half of it can take it all again."""
    first = list(cloud_events(store, None, 0, None, "urn:here"))

    assert list(cloud_events(store, None, 0, None, "urn:here")) == first


def test_times_are_iso_8601_in_utc() -> None:
    assert format_utc(1_700_000_000_007) == "2023-11-14T22:13:20.007Z"
