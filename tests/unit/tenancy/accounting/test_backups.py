"""Backups beside a running server, and restores that begin a new epoch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import apsw
import pytest

from tenancy.accounting.audit import check_books
from tenancy.accounting.backups import MissingEntries, backup, mark_restored, restore
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import StoreError
from tenancy.ledger.ledger import Hold, Ledger
from tenancy.storage import sqlite
from tenancy.storage.interface import Store
from tenancy.storage.schema import migrations
from tenancy.storage.sqlite import SqliteStore
from tenancy.types import DAY_MS, TokenCounts
from tests.actors import TESTER
from tests.crash.ledger_child import entry
from tests.unit.tenancy.conftest import Wall
from tests.unit.tenancy.storage.new_sqlite import new_sqlite

PATIENCE_S = 60
ROOT = Path(__file__).parents[4]


@pytest.fixture
def path(tmp_path: Path, wall: Wall) -> Path:
    """The path of a ledger with two entries."""
    store = new_sqlite(tmp_path / "data" / "test.db")
    create_tenant(store, wall, "ada")
    store.close()
    settle(tmp_path / "data" / "test.db", wall, "1-1", "1-2")
    return tmp_path / "data" / "test.db"


def settle(path: Path, wall: Wall, *request_ids: str) -> None:
    """Settle entries during one server life."""
    store = SqliteStore(path)
    ledger = Ledger(store, wall)
    for request_id in request_ids:
        ledger.settle(entry(request_id)).result(PATIENCE_S)
    ledger.close()
    store.close()


def ids(path: Path) -> list[str]:
    """Return a ledger's request ids, after an audit."""
    store = SqliteStore(path)
    assert check_books(store) == []
    found = [row[0] for row in store.query("select request_id from ledger order by entry_id")]
    store.close()
    return found


def refusal(source: Path, path: Path, wall: Wall) -> str:
    """Return the code with which a restore is refused, and check that nothing changed."""
    before = ids(path)
    with pytest.raises(StoreError) as caught:
        restore(source, path, wall)
    assert ids(path) == before
    assert not list(path.parent.glob("*part*"))
    return caught.value.code


FULL = """
import resource, sys
from pathlib import Path
from tenancy.accounting.backups import backup
from tenancy.errors import StoreError
source, target = map(Path, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    backup(source, target)
except StoreError as error:
    print(error.code, error.message)
"""


def test_backup_onto_a_full_disk_names_the_folder_and_the_bytes(path: Path, tmp_path: Path) -> None:
    """With the operating system's file size limit, not a fake. SQLite says "not an error"."""
    (tmp_path / "full").mkdir()
    size = path.stat().st_size
    command = [sys.executable, "-c", FULL, str(path), str(tmp_path / "full" / "copy.db")]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)

    assert size > 100_000, "the copy must not fit"
    assert said.stdout.startswith(f"no_room Cannot write the copy in {tmp_path / 'full'}: it needs")
    assert f"{size} bytes" in said.stdout
    assert "Free space there" in said.stdout
    assert list((tmp_path / "full").iterdir()) == []


def test_backup_beside_a_writing_server_is_complete(path: Path, wall: Wall) -> None:
    """As of one commit, in one file, readable by its owner only; the server does not wait."""
    store = SqliteStore(path)
    ledger = Ledger(store, wall)
    has_ended = threading.Event()

    def write() -> None:
        for number in range(200):
            ledger.settle(entry(f"2-{number}")).result(PATIENCE_S)
        has_ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    copies: list[Path] = []
    while not has_ended.is_set() or not copies:
        copies.append(path.parent / f"{len(copies)}.db")
        assert backup(path, copies[-1]) == copies[-1].stat().st_size
    writer.join()
    ledger.close()
    store.close()

    beside = {file.name for file in path.parent.iterdir()} - {copy.name for copy in copies}
    assert beside == {"test.db", "test.db.lock", "test.db.known"}
    assert {copy.stat().st_mode & 0o777 for copy in copies} == {0o600}
    lengths = [len(ids(copy)) for copy in copies]
    assert lengths == sorted(lengths)
    assert lengths[0] >= 2


def test_backup_refuses_an_existing_target(path: Path) -> None:
    """Above all the ledger itself."""
    with pytest.raises(StoreError, match="File exists"):
        backup(path, path)
    with pytest.raises(OSError, match="No such file"):
        backup(path, path.parent / "nowhere" / "b.db")


def test_restore_begins_an_epoch_and_reports_missing_entries(path: Path, wall: Wall) -> None:
    """L8. The replaced database is kept with its entries."""
    backup(path, path.parent / "b.db")
    wall.ms += DAY_MS
    settle(path, wall, "1-3", "1-4")
    done = restore(path.parent / "b.db", path, wall)
    settle(path, wall, "1-5")

    assert done.missing == MissingEntries(2, 1, 2)
    assert (done.epoch.number, done.epoch.reason, done.epoch.entry_id) == (2, "restored", 2)
    assert ids(path) == ["1-1", "1-2", "1-5"]
    assert done.kept == path.with_name("test.db.replaced")
    assert ids(done.kept) == ["1-1", "1-2", "1-3", "1-4"]
    store = SqliteStore(path)
    reasons = store.query("select reason from ledger_epochs order by number")
    store.close()
    assert reasons == [("begun",), ("restored",)], "it is not found once more at the start"


def test_second_restore_begins_another_epoch(path: Path, wall: Wall) -> None:
    backup(path, path.parent / "b.db")
    numbers = [restore(path.parent / "b.db", path, wall).epoch.number for _ in range(3)]

    assert numbers == [2, 3, 4]


def test_open_hold_in_a_backup_is_closed_by_its_progress(path: Path, wall: Wall) -> None:
    store = SqliteStore(path)
    ledger = Ledger(store, wall)
    ledger.hold(Hold("1-9", 1, 1, "m", wall(), 9, 9)).result(PATIENCE_S)
    ledger.note_progress({"1-9": TokenCounts(fresh_tokens=9, output_tokens=4)})
    ledger.settle(entry("1-3")).result(PATIENCE_S)
    backup(path, path.parent / "b.db")
    ledger.settle(entry("1-9")).result(PATIENCE_S)
    ledger.close()
    store.close()
    restore(path.parent / "b.db", path, wall)
    settle(path, wall)

    store = SqliteStore(path)
    found = store.query("select ending, output_tokens from ledger where request_id = '1-9'")
    store.close()
    assert found == [("interrupted", 4)]


def test_restores_where_no_database_is(path: Path, wall: Wall) -> None:
    """As on a new machine."""
    backup(path, path.parent / "b.db")
    elsewhere = path.parent / "new" / "test.db"
    elsewhere.parent.mkdir()
    (elsewhere.parent / "test.db-wal").write_bytes(b"of another time")
    done = restore(path.parent / "b.db", elsewhere, wall)

    assert (done.kept, done.missing, done.epoch.number) == (None, MissingEntries(), 2)
    assert ids(elsewhere) == ["1-1", "1-2"]


def test_replaces_a_damaged_ledger(path: Path, wall: Wall) -> None:
    """The last known point says how far it had come."""
    backup(path, path.parent / "b.db")
    wall.ms += DAY_MS
    settle(path, wall, "1-3")
    path.write_bytes(b"no database at all, " * 500)
    done = restore(path.parent / "b.db", path, wall)

    assert done.missing == MissingEntries(None, None, wall.ms)
    assert done.epoch.number == 2
    assert ids(path) == ["1-1", "1-2"]


def test_reports_a_ledger_that_does_not_continue_the_backup(
    path: Path, wall: Wall, tmp_path: Path
) -> None:
    """The missing entries cannot be determined then."""
    other = tmp_path / "other.db"
    store = SqliteStore(other)
    create_tenant(store, wall, "bob")
    store.close()
    settle(other, wall, "1-7", "1-8", "1-9")
    done = restore(other, path, wall)

    assert done.missing == MissingEntries()
    assert ids(path) == ["1-7", "1-8", "1-9"]


def test_refuses_invalid_backups(path: Path, wall: Wall) -> None:
    """Each with its own code; the ledger is unchanged."""
    folder = path.parent
    (folder / "text").write_text("no database" * 1_000)
    (folder / "empty").touch()
    songs = apsw.Connection(str(folder / "songs"))
    songs.execute("create table songs (name)").fetchall()
    songs.close()
    for name, sql in (
        ("wrong", "update usage_hours set requests = 9"),
        ("newer", f"pragma user_version={len(migrations('sqlite')) + 1}"),
    ):
        backup(path, folder / name)
        copy = apsw.Connection(str(folder / name))
        copy.execute(sql).fetchall()
        copy.close()
    backup(path, folder / "torn")
    with (folder / "torn").open("r+b") as file:
        file.truncate((folder / "torn").stat().st_size // 2)

    found = {
        name: refusal(folder / name, path, wall)
        for name in ("nothing", "text", "empty", "songs", "wrong", "newer", "torn")
    }

    assert found == {
        "nothing": "unusable",
        "text": "unusable",
        "empty": "not_ours",
        "songs": "not_ours",
        "wrong": "damaged",
        "newer": "newer_schema",
        "torn": found["torn"],
    }
    assert found["torn"] in ("unusable", "damaged")


def test_refuses_to_restore_under_a_server(path: Path, wall: Wall) -> None:
    """It would continue to write the replaced file."""
    backup(path, path.parent / "b.db")
    store = SqliteStore(path)
    ledger = Ledger(store, wall)

    with pytest.raises(StoreError, match="in use by another server"):
        restore(path.parent / "b.db", path, wall)
    beside = SqliteStore(path)
    with pytest.raises(StoreError, match="in use by another server"):
        mark_restored(beside, wall, by=TESTER)
    for one in (ledger, store, beside):
        one.close()


def test_refuses_to_restore_during_a_transaction(
    path: Path, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its changes would end in the replaced file."""
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_MS", 100)
    backup(path, path.parent / "b.db")
    store = SqliteStore(path)
    with store.change() as db:
        db.execute("update tenants set name = 'eve'")
        with pytest.raises(StoreError) as caught:
            restore(path.parent / "b.db", path, wall)
    store.close()

    assert caught.value.code == "in_use"
    assert ids(path) == ["1-1", "1-2"]


def test_marks_a_database_restored_by_other_means(store: Store, wall: Wall) -> None:
    """By `pg_restore` or a file system snapshot, on either database."""
    create_tenant(store, wall, "ada")
    marked = mark_restored(store, wall, by=TESTER)
    again = mark_restored(store, wall, by=TESTER)

    assert (marked.number, again.number, marked.reason) == (2, 3, "marked")


@pytest.mark.slow
def test_restore_killed_at_any_call_leaves_either_database(
    path: Path, wall: Wall, tmp_path: Path
) -> None:
    """Complete and correct; no server finds an old journal beside a new file."""
    backup(path, tmp_path / "b.db")
    settle(path, wall, "1-3")
    program = (
        "import os, signal, sys; from pathlib import Path; from tenancy.accounting import backups\n"
        "left = [int(sys.argv[3])]\n"
        "def look(frame, event, arg):\n"
        "    left[0] -= event == 'call' or event == 'c_call'\n"
        "    if left[0] <= 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.setprofile(look)\n"
        "backups.restore(Path(sys.argv[1]), Path(sys.argv[2]), lambda: 9)\n"
        "sys.setprofile(None)\n"
    )
    calls, ends = 40, set()
    while True:
        run = subprocess.run(
            [sys.executable, "-c", program, tmp_path / "b.db", path, str(calls)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
            timeout=60,
        )
        found = ids(path)
        ends.add(tuple(found))
        assert found in (["1-1", "1-2", "1-3"], ["1-1", "1-2"])
        if run.returncode == 0:
            break
        assert run.returncode == -signal.SIGKILL
        calls += max(40, calls // 4)

    assert found == ["1-1", "1-2"]
    assert len(ends) == 2
