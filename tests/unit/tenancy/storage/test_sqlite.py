"""The database file: its owner and mode, and disk errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import apsw
import pytest

from tenancy.accounts.tenants import create_tenant
from tenancy.errors import StoreBusy, StoreError
from tenancy.storage import sqlite
from tenancy.storage.interface import Store
from tenancy.storage.schema import migrations
from tenancy.storage.sqlite import (
    APPLICATION_ID,
    SQLITE_MIN,
    UNRELEASED_ID,
    SqliteStore,
    check_sqlite,
)
from tests.crash.power_cut import Disk, disk_of
from tests.unit.tenancy.conftest import Wall

INSERT = "insert into tenants (name, status, created_ms) values (?, 'active', 0)"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = SqliteStore(tmp_path / "test.db")
    yield store
    store.close()


def refusal(path: Path) -> str:
    with pytest.raises(StoreError) as caught:
        SqliteStore(path)
    assert str(path) in caught.value.message
    return caught.value.code


def test_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    """It has key digests and tenants' usage; a wider mode is narrowed."""
    path = tmp_path / "test.db"
    path.touch(mode=0o644)
    store = SqliteStore(path)
    create_tenant(store, Wall(), "ada")

    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    store.close()
    assert set(modes) == {"test.db", "test.db-wal", "test.db-shm"}
    assert set(modes.values()) == {0o600}


def test_commits_with_full_sync(store: Store) -> None:
    """Less than `full` loses confirmed entries in a power failure."""
    with store.change() as db:
        settings = [db.rows(f"pragma {name}") for name in ("synchronous", "foreign_keys")]

    assert settings == [[(2,)], [(1,)]]
    assert store.query("pragma journal_mode") == [("wal",)]


def test_a_file_is_opened_without_a_write(tmp_path: Path) -> None:
    """A command that only reads waits for no change, and needs no room on the disk."""
    path = tmp_path / "test.db"
    with closing(SqliteStore(path)) as first, first.change(), closing(SqliteStore(path)) as second:
        found = second.query("select count(*) from tenants")

    assert found == [(0,)]


def test_migrates_database_of_an_older_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later migration runs once, and keeps the data."""
    first = SqliteStore(tmp_path / "test.db")
    create_tenant(first, Wall(), "ada")
    first.close()
    motto = "alter table tenants add column motto text not null default 'none'"
    later = [*migrations("sqlite"), motto]
    monkeypatch.setattr(sqlite, "migrations", lambda _: later)
    SqliteStore(tmp_path / "test.db").close()
    store = SqliteStore(tmp_path / "test.db")

    found = store.query("select name, motto from tenants")
    version = store.query("pragma user_version")
    store.close()
    assert (found, version) == ([("ada", "none")], [(len(later),)])


def test_refuses_database_of_a_newer_version(tmp_path: Path) -> None:
    """Writing to an unknown schema would damage it."""
    store = SqliteStore(tmp_path / "test.db")
    with store.change() as db:
        db.execute("pragma user_version=999")
    store.close()

    assert refusal(tmp_path / "test.db") == "newer_schema"


@pytest.mark.parametrize("version", [1, 18])
def test_refuses_database_from_before_the_first_release(tmp_path: Path, version: int) -> None:
    """Its numbers name other schemas; one of them may be this version's."""
    path = tmp_path / "test.db"
    with closing(SqliteStore(path)) as store, store.change() as db:
        db.execute(f"pragma application_id={UNRELEASED_ID}")
        db.execute(f"pragma user_version={version}")

    with pytest.raises(StoreError, match=f"schema {version} .* move it away") as caught:
        SqliteStore(path)
    assert caught.value.code == "unreleased_schema"


@pytest.mark.parametrize("version", [0, 1])
def test_refuses_database_of_another_program(tmp_path: Path, version: int) -> None:
    """A mistyped path must not create tables in it; its own version may be a number of ours."""
    path = tmp_path / "other.db"
    db = apsw.Connection(str(path))
    db.execute(f"create table songs (name); pragma user_version={version}").fetchall()

    code = refusal(path)
    tables = db.execute("select name from sqlite_schema").fetchall()
    ids = db.execute("pragma application_id").fetchall()
    db.close()
    assert code == "not_ours"
    assert (tables, ids) == ([("songs",)], [(0,)])


@pytest.mark.parametrize("kind", ["text", "folder", "missing_parent_is_a_file"])
def test_names_a_file_that_is_no_database(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "test.db"
    if kind == "text":
        path.write_text("not a database, and long enough to be taken for one" * 100)
    elif kind == "folder":
        path.mkdir()
    else:
        (tmp_path / "file").touch()
        path = tmp_path / "file" / "test.db"

    assert refusal(path) == "unusable"


def test_refuses_old_sqlite() -> None:
    """Before 3.51.3 two connections that write and checkpoint at once could damage the file."""
    check_sqlite(".".join(map(str, SQLITE_MIN)))
    check_sqlite("4.0.0")

    with pytest.raises(StoreError, match=r"3\.51\.2"):
        check_sqlite("3.51.2")


def test_does_not_reopen_a_damaged_file(tmp_path: Path) -> None:
    """Continuing would spread the damage."""
    store = SqliteStore(tmp_path / "test.db")
    for number in range(200):
        create_tenant(store, Wall(), f"tenant-{number}")
    store.close()
    content = bytearray((tmp_path / "test.db").read_bytes())
    (page,) = apsw.Connection(str(tmp_path / "test.db")).execute(
        "select rootpage from sqlite_schema where name = 'tenants'"
    )
    start = (page[0] - 1) * 4096
    content[start + 8 : start + 64] = b"\xff" * 56
    store = SqliteStore(tmp_path / "test.db")
    (tmp_path / "test.db").write_bytes(content)

    with pytest.raises(StoreError):
        store.reopen()
    with pytest.raises(StoreError):
        store.query("select * from tenants")


def attempts(*works: Callable[[], object]) -> list[str]:
    """Try a query and a change; return whether each succeeded."""
    found = []
    for work in works:
        try:
            work()
            found.append("done")
        except StoreError as error:
            found.append(error.code)
    return found


@pytest.mark.parametrize(
    ("sick", "while_failing"),
    [
        ("no_reads", ["unusable", "unusable", "not_written", "unusable"]),
        ("wrong_reads", ["unusable", "unusable", "not_written", "unusable"]),
        ("no_writes", ["done", "done", "not_written", "not_written"]),
        ("no_syncs", ["done", "done", "not_written", "not_written"]),
        ("full", ["done", "done", "not_written", "not_written"]),
    ],
)
def test_recovers_when_the_disk_recovers(
    tmp_path: Path,
    sick: Literal["no_reads", "wrong_reads", "no_writes", "no_syncs", "full"],
    while_failing: list[str],
) -> None:
    """A page read wrong once stays wrong in a connection's memory. Committed data, also in the log,
    is there."""
    disk, path = Disk(), tmp_path / "test.db"
    with disk_of(disk):
        store = SqliteStore(path)
        for number in range(200):
            create_tenant(store, Wall(), f"tenant-{number}")
        store.close()
        store = SqliteStore(path)
        create_tenant(store, Wall(), "the-last")

        def ask() -> None:
            assert len(store.query("select * from tenants")) == 201

        def ask_long() -> None:
            with store.snapshot() as db:
                assert len(db.rows("select * from tenants")) == 201

        def change() -> None:
            with store.change() as db:
                db.execute("update tenants set weight = weight + 1")

        disk.sick = sick
        before = attempts(ask, ask_long)
        disk.sick = ""
        after = attempts(ask, ask_long)
        disk.sick = sick
        before += attempts(change, change)
        disk.sick = ""
        after += attempts(change, ask, change)
        weights = store.query("select distinct weight from tenants")
        store.close()

    assert before == while_failing
    assert after == ["done"] * 5
    assert weights == [(3.0,)]


def test_does_not_write_a_damaged_file_after_a_disk_error(tmp_path: Path) -> None:
    """Until it is repaired, at each attempt; readable data is still read."""
    disk, path = Disk(), tmp_path / "test.db"
    with disk_of(disk):
        store = SqliteStore(path)
        create_tenant(store, Wall(), "ada")
        store.close()
        whole = path.read_bytes()
        store = SqliteStore(path)
        (page,) = store.query("select rootpage from sqlite_schema where name = 'ledger'")
        start = (page[0] - 1) * 4096
        disk.sick = "no_syncs"
        codes = attempts(lambda: create_tenant(store, Wall(), "bob"))
        disk.sick = ""
        path.write_bytes(whole[:start] + b"\xff" * 64 + whole[start + 64 :])
        codes += attempts(*[lambda: create_tenant(store, Wall(), "bob")] * 2)
        names = store.query("select name from tenants")
        path.write_bytes(whole)
        codes += attempts(lambda: create_tenant(store, Wall(), "bob"))
        store.close()

    assert codes == ["not_written", "damaged", "damaged", "done"]
    assert names == [("ada",)]


def test_file_has_the_application_id(store: Store) -> None:
    """`file` and other programs show it."""
    assert store.query("pragma application_id") == [(APPLICATION_ID,)]


def test_busy_behind_another_writer_or_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary errors are told from permanent ones."""
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_MS", 1)
    path = tmp_path / "test.db"
    store = SqliteStore(path)
    with store.change() as db:
        pages = db.rows("pragma page_count")[0][0]
        db.rows(f"pragma max_page_count={pages + 1}")
    with pytest.raises(StoreBusy, match="not changed"), store.change() as db:
        db.execute(INSERT, ("x" * 99_999,))
    with closing(apsw.Connection(str(path))) as other:
        other.execute("begin immediate")
        with pytest.raises(StoreBusy, match="not changed"), store.change():
            pass
    found = store.query("select * from tenants")
    store.close()

    assert found == []


def test_overwrites_deleted_content(tmp_path: Path) -> None:
    """Erased content must not remain in the file's free pages."""
    path, secret = tmp_path / "test.db", b"nobody may read this again. " * 500
    store = SqliteStore(path)
    create_tenant(store, lambda: 1, "ada")
    with store.change() as db:
        whose = (1, "n", "default", bytes(32), "r", 2, secret)
        db.execute(
            "insert into named_requests (tenant_id, name, workspace, digest, request_id, until_ms,"
            " body) values (?, ?, ?, ?, ?, ?, ?)",
            whose,
        )
    store.close()
    before = secret[:28] in path.read_bytes()
    store = SqliteStore(path)
    with store.change() as db:
        db.execute("delete from named_requests")
    store.close()

    assert before
    assert secret[:28] not in path.read_bytes()


def test_change_asks_for_a_busy_file_without_backing_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger's writer leaves the file free for microseconds: an administrator's change that
    asked ten times a second, as with SQLite's own handler, would starve behind it."""
    path, pauses = tmp_path / "test.db", list[float]()
    with closing(SqliteStore(path)) as store, closing(apsw.Connection(str(path))) as writer:
        writer.execute("begin immediate").fetchall()

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 9_000:  # more than two seconds later
                writer.execute("rollback").fetchall()

        monkeypatch.setattr("time.sleep", pause)
        create_tenant(store, Wall(), "ada")

    assert len(pauses) == 9_000
    assert max(pauses) <= 0.001
