"""`trunkline usage`: a table that fits, exact numbers for programs, the filters of the API."""

from __future__ import annotations

import csv
import io
import os
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.cli.ledger.usage import short_count
from tenancy.accounts.keys import create_key
from tenancy.accounts.tenants import create_tenant, find_tenant
from tenancy.ledger.ledger import Ledger
from tenancy.types import DAY_MS, UsageEntry
from tests.tables import each_row
from tests.unit.gateway.cli.command_output import Run, data_of, error_line
from tests.unit.tenancy.storage.new_sqlite import new_sqlite

NOW_MS = 1_795_000_000_000
LONG = "a-tenant-with-a-name-that-no-table-has-room-for"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data directory with a ledger of three tenants, at `NOW_MS`."""
    monkeypatch.setenv("TRUNKLINE_CONFIG", os.devnull)
    monkeypatch.setenv("TRUNKLINE_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("gateway.cli.ledger.usage.wall_ms", lambda: NOW_MS)
    store = new_sqlite(tmp_path / "trunkline.db")
    for name in ("ada", "bob", LONG):
        tenant = create_tenant(store, lambda: NOW_MS, name)
        create_key(store, lambda: NOW_MS, tenant.tenant_id)
    now_ms = NOW_MS
    ledger = Ledger(store, lambda: now_ms)
    for name, model, days_ago, tokens in (
        ("ada", "small", 0, 1_000),
        ("ada", "large", 10, 2_000),
        ("bob", "small", 0, 4_000),
        (LONG, "small", 0, 987_654_321_000),
    ):
        now_ms = NOW_MS - days_ago * DAY_MS
        owner = find_tenant(store, name).tenant_id
        counts = (tokens, tokens // 2, 0, tokens - tokens // 2, 7, 0)
        request_id = f"{name}-{model}"
        one = UsageEntry(request_id, owner, owner, model, "done", now_ms, now_ms, *counts)
        ledger.settle(one).result(60)
    ledger.close()
    store.close()
    return tmp_path


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_table_fits_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Wider terminals see more columns; the heading names units, and the last line is the sum."""
    monkeypatch.setenv("COLUMNS", str(columns))
    _, text, _ = run("usage")
    lines = text.rstrip("\n").split("\n")

    assert max(map(len, lines)) <= columns
    assert ("fresh" in lines[0]) == (columns > 80)
    assert lines[0].endswith("saved $")
    assert len({len(line) for line in lines}) == 1, "numbers end below each other"
    assert lines[-1].startswith("total")
    assert "…" in text


def test_levels_have_columns_where_anything_came_from_them(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside the hit ratio, and in every row for programs."""
    monkeypatch.setenv("COLUMNS", "200")
    _, before, _ = run("usage")
    store = new_sqlite(tmp_path / "trunkline.db")
    with closing(store), closing(Ledger(store, lambda: NOW_MS)) as ledger:
        counts = (1_000, 900, 0, 100, 7, 900)
        one = UsageEntry("leveled", 1, 1, "small", "done", NOW_MS, NOW_MS, *counts)
        one = replace(one, host_cached_tokens=600, disk_cached_tokens=150, remote_cached_tokens=50)
        ledger.settle(one).result(60)
    _, after, _ = run("usage")
    (ada,) = data_of(run, "usage", "--tenant", "ada")

    assert "host" not in before.split("\n")[0]
    assert after.split("\n")[0].split()[4:9] == ["hit", "%", "host", "disk", "remote"]
    found = [ada[f"{level}_cached_tokens"] for level in ("host", "disk", "remote")]
    assert found == [600, 150, 50]


def test_programs_get_every_column_and_exact_numbers(run: Run) -> None:
    """CSV and JSON have the same rows."""
    _, text, _ = run("usage", "--csv")
    table = list(csv.DictReader(io.StringIO(text)))
    rows = data_of(run, "usage")

    assert [row["tenant"] for row in table] == [LONG, "ada", "bob"]
    assert table[0]["prompt_tokens"] == "987654321000"
    for name in ("requests", "prompt_tokens", "output_tokens"):
        assert [int(row[name]) for row in table] == [row[name] for row in rows]
    assert [(row["requests"], row["output_tokens"]) for row in rows] == [(1, 7), (2, 14), (1, 7)]
    assert set(table[0]) == set(rows[0])


def test_csv_without_usage_has_the_same_heading(run: Run) -> None:
    """A program that reads columns by name finds them on the first day, too."""
    _, some, _ = run("usage", "--csv")
    _, none, _ = run("usage", "--csv", "--model", "unheard")

    assert none.splitlines() == some.splitlines()[:1]
    assert run("usage", "--model", "unheard")[1] == "nothing yet\n"


def test_filters_are_those_of_the_api(run: Run) -> None:
    """By tenant, key and model; grouped by any of them, and by time."""
    ada = data_of(run, "usage", "--tenant", "ada")
    small = data_of(run, "usage", "--model", "small", "--tenant", "ada")
    key = data_of(run, "usage", "--key", "2")
    by_model = data_of(run, "usage", "--group-by", "model")
    by_key = data_of(run, "usage", "--group-by", "tenant,key")
    by_day = data_of(run, "usage", "--group-by", "day", "--tenant", "ada")

    assert [row["prompt_tokens"] for row in ada] == [3_000]
    assert [row["prompt_tokens"] for row in small] == [1_000]
    assert [(row["tenant"], row["prompt_tokens"]) for row in key] == [("bob", 4_000)]
    assert [(row["model"], row["requests"]) for row in by_model] == [("large", 1), ("small", 3)]
    assert [(row["tenant"], row["key_id"]) for row in by_key][1:] == [("ada", 1), ("bob", 2)]
    assert [row["from"] for row in by_day] == [
        "2026-11-08T00:00:00.000Z",
        "2026-11-18T00:00:00.000Z",
    ]


@pytest.mark.parametrize(
    ("period", "tokens"),
    [
        (("--since", "7d"), 1_000),
        (("--since", "2w"), 3_000),
        (("--days", "7"), 1_000),
        (("--since", "2026-11-01", "--until", "2026-11-10"), 2_000),
        (("--until", "2026-11-08T12:00:00Z"), 2_000),
        (("--since", "12h"), 1_000),
    ],
)
def test_periods_are_dates_or_durations(run: Run, period: tuple[str, ...], tokens: int) -> None:
    """Both for either end."""
    (row,) = data_of(run, "usage", "--tenant", "ada", *period)

    assert row["prompt_tokens"] == tokens


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ("--tenant adda", "unknown tenant: 'adda'; did you mean 'ada'?"),
        ("--group-by person", "--group-by: invalid groups 'person'; expected some of tenant"),
        ("--group-by hour,day", "hour or day, not both"),
        ("--since soon", "--since: invalid time 'soon': expected 2026-11-21"),
        ("--since 7d --days 7", "--days: not allowed with argument --since"),
        ("--since 1d --until 2d", "--since must be before --until"),
    ],
)
def test_wrong_filters_are_one_line(run: Run, arguments: str, what: str) -> None:
    """The line names the option and what is expected."""
    assert what in error_line(run, "usage", *arguments.split(), status=2)


@each_row(
    ("count", "shown"),
    [(0, "0"), (99_999, "99999"), (100_000, "100k"), (1_234_567, "1.235M"), (10**13, "10T")],
)
def test_short_counts_have_a_unit(count: int, shown: str) -> None:
    assert short_count(count) == shown
