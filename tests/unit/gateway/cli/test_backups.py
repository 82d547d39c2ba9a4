"""Backups by command, and the ledger epoch that reports show afterwards."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tenancy.ledger.ledger import EngineTotals, Ledger
from tenancy.storage.backends import open_store
from tenancy.types import UsageEntry, wall_ms
from tests.unit.gateway.cli.command_output import Run, data_of, error_line
from tests.unit.gateway.gateway_fixture import GatewayFixture
from tests.unit.tenancy.storage.postgres_server import Server


class Installation:
    """A data directory, and the database of its configuration."""

    def __init__(self, data: Path, database: str) -> None:
        self.data = data
        self.database = database

    def use(self, request_id: str) -> None:
        """Write an entry of the default tenant, from yesterday."""
        store = open_store(self.database, self.data, {})
        ledger = Ledger(store, wall_ms)
        at_ms = wall_ms() - 86_400_000
        counts = (10, 0, 0, 10, 1, 0)
        one = UsageEntry(request_id, 1, 1, "m", "done", at_ms, at_ms, *counts, epoch="e")
        ledger.settle(one).result(60)
        totals = EngineTotals("e", wall_ms(), 10, 0, 1, 10, 0, 1, is_ended=True)
        ledger.write(totals).result(60)
        ledger.close()
        store.close()


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data directory of a configuration that each test writes."""
    monkeypatch.setenv("TRUNKLINE_CONFIG", str(tmp_path / "trunkline.toml"))
    monkeypatch.setenv("TRUNKLINE_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def file(run: Run, tmp_path: Path) -> Installation:
    (tmp_path / "trunkline.toml").write_text('tenancy.database = "books.db"\n')
    assert run("key", "create", "--tenant", "default")[0] == 0
    return Installation(tmp_path / "data", "books.db")


@pytest.fixture
def server(run: Run, tmp_path: Path, postgres_server: Server) -> Installation:
    url = postgres_server.url(postgres_server.database(is_empty=True))
    (tmp_path / "trunkline.toml").write_text(f'tenancy.database = "{url}"\n')
    assert run("key", "create", "--tenant", "default")[0] == 0
    return Installation(tmp_path / "data", url)


def test_backs_up_and_restores(run: Run, file: Installation, tmp_path: Path) -> None:
    """The text and the JSON say what is missing."""
    copy = str(tmp_path / "b.db")
    file.use("a")
    made = data_of(run, "backup", copy)
    file.use("b")
    status, text, _ = run("restore", copy)
    again = data_of(run, "restore", copy)

    assert made == {"file": copy, "bytes": Path(copy).stat().st_size}
    assert status == 0
    assert "ledger epoch 2 begins\nmissing: 1 entries, from 20" in text
    assert f"the previous database is kept as {file.data / 'books.db.replaced'}" in text
    assert again["ledger_epoch"] == 3
    assert again["missing"] == {"entries": 0, "since_ms": None, "until_ms": None}


def test_restores_to_an_empty_machine(run: Run, file: Installation, tmp_path: Path) -> None:
    copy = str(tmp_path / "b.db")
    file.use("a")
    assert run("backup", copy)[0] == 0
    shutil.rmtree(file.data)
    restored = data_of(run, "restore", copy)

    assert (restored["ledger_epoch"], restored["kept"]) == (2, None)
    assert data_of(run, "usage")[0]["requests"] == 1
    assert file.data.stat().st_mode & 0o777 == 0o700


def test_reports_show_the_ledger_epoch(run: Run, file: Installation) -> None:
    """A reader of a series of sums sees why a sum fell."""
    file.use("a")
    before = [data_of(run, name)[0]["ledger_epoch"] for name in ("usage", "reconcile")]
    marked = data_of(run, "restore", "--mark")
    closed = data_of(run, "close")
    after = [data_of(run, name)[0]["ledger_epoch"] for name in ("usage", "reconcile")]

    assert (before, marked, after) == ([1, 1], {"ledger_epoch": 2}, [2, 2])
    assert [day["ledger_epoch"] for day in closed] == [2]
    assert run("check-books")[0] == 0


def test_shows_progress_on_a_terminal_only(
    run: Run,
    file: Installation,
    postgres_server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Millions of entries take minutes."""
    file.use("a")
    url = postgres_server.url(postgres_server.database(is_empty=True))
    _, _, nothing = run("check-books")
    monkeypatch.setattr("gateway.__main__.is_terminal", lambda: True)
    _, _, checked = run("check-books")
    _, _, moved = run("move-database", url)

    assert nothing == ""
    assert "checked: 100%" in checked
    for part in ("checked", "written", "read back"):
        assert f"{part}: 100%" in moved


def test_moves_to_postgresql(
    run: Run, file: Installation, postgres_server: Server, tmp_path: Path
) -> None:
    """One command with control totals and the line for the configuration. A second run says that
    it was done; a refusal is one line."""
    file.use("a")
    name = postgres_server.database(is_empty=True)
    url = postgres_server.url(name)
    backwards = error_line(run, "move-database", "other.db", status=2)
    status, text, _ = run("move-database", url)
    again = data_of(run, "move-database", url)
    (tmp_path / "trunkline.toml").write_text(f'tenancy.database = "{url}"\n')
    from_server = error_line(run, "move-database", url, status=2)
    tenants = data_of(run, "tenant", "list")
    checked = run("check-books")[0]
    Installation(tmp_path / "data", url).use("b")
    (tmp_path / "trunkline.toml").write_text('tenancy.database = "books.db"\n')
    used = error_line(run, "move-database", url)
    (tmp_path / "trunkline.toml").write_text('tenancy.database = "nowhere.db"\n')
    nothing = error_line(run, "move-database", url)
    postgres_server.drop(name)

    assert "expected postgresql://" in backwards
    assert "is in PostgreSQL already" in from_server
    assert status == 0
    assert "1 entries, charged $0.000000000000, last chain digest " in text
    assert f'tenancy.database = "{url}"' in text
    assert (again["was_there"], again["rows"]["ledger"]) == (True, 1)
    assert [tenant["name"] for tenant in tenants] == ["default"]
    assert checked == 0
    assert "Target is not empty and differs from this ledger: " in used
    assert "database not found" in nothing


def test_postgresql_backups_refer_to_pg_dump(run: Run, server: Installation) -> None:
    server.use("a")
    back = error_line(run, "backup", "b.db", status=2)
    restore = error_line(run, "restore", "b.db", status=2)
    marked = data_of(run, "restore", "--mark")

    assert "pg_dump" in back
    assert "pg_restore, then run trunkline restore --mark" in restore
    assert marked == {"ledger_epoch": 2}


def test_errors_are_one_line(run: Run, file: Installation, tmp_path: Path) -> None:
    """It says what is expected."""
    assert "one of the arguments FILE --mark is required" in error_line(run, "restore", status=2)
    assert "not allowed with argument" in error_line(run, "restore", "b.db", "--mark", status=2)
    assert "Not a file" in error_line(run, "restore", str(tmp_path / "nowhere.db"))
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("no database")
    assert "Not a ledger" in error_line(run, "restore", str(tmp_path / "empty"))
    assert "Not a database" in error_line(run, "restore", str(tmp_path / "text"))
    assert "File exists" in error_line(run, "backup", str(file.data / "books.db"))
    (tmp_path / "trunkline.toml").write_text('tenancy.database = "other.db"\n')
    assert "database not found" in error_line(run, "backup", str(tmp_path / "b.db"))


async def test_gateway_reports_the_ledger_epoch(gateway: GatewayFixture) -> None:
    """To its operator and to the tenant."""
    _, own, _ = await gateway.ask("/v1/usage", method="GET")
    async with gateway.session.get(gateway.admin_url + "/metrics") as answer:
        metrics = await answer.text()

    assert own["ledger_epoch"] == 1
    assert "\ntrunkline_ledger_epoch 1.0\n" in metrics


async def test_gateway_logs_a_replaced_ledger(
    unopened_gateway: GatewayFixture,
) -> None:
    """With the point from which the epoch counts."""
    known = '{"epoch": 3, "entry_id": 9, "chain": "00", "at_ms": 1}'
    await asyncio.to_thread(unopened_gateway.store.save_marker, known.encode())
    await unopened_gateway.open()
    await unopened_gateway.close()

    (line,) = [line for line in unopened_gateway.lines if line["event"] == "ledger_replaced"]
    assert (line["number"], line["reason"], line["entry_id"]) == (4, "found", 0)
