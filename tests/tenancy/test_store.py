"""The database file: whose it is, who may read it, and what it survives."""

from __future__ import annotations

import threading
from pathlib import Path

import apsw
import pytest

from tenancy.errors import BadName, StoreError
from tenancy.registry import create_tenant, set_status
from tenancy.store import APPLICATION_ID, SQLITE_MIN, Store, check_sqlite, migrations
from tests.tenancy.conftest import Wall

INSERT = (
    "insert into ledger (request_id, tenant_id, key_id, model, ending, started_ms, ended_ms,"
    " prompt_tokens, cache_read_tokens, cache_write_tokens, fresh_tokens, output_tokens,"
    " physical_cached_tokens) values (?, 1, 1, 'm', 'done', 0, 0, 1, 0, 0, ?, 1, 0)"
)


def refusal(path: Path) -> str:
    with pytest.raises(StoreError) as caught:
        Store(path)
    assert str(path) in caught.value.message
    return caught.value.code


def test_only_its_owner_reads_it(tmp_path: Path) -> None:
    """Digests of keys and the usage of tenants are nobody else's business; a wider mode that an
    earlier hand left is narrowed."""
    path = tmp_path / "test.db"
    path.touch(mode=0o644)
    store = Store(path)
    create_tenant(store, Wall(), "ada")

    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    store.close()
    assert set(modes) == {"test.db", "test.db-wal", "test.db-shm"}
    assert set(modes.values()) == {0o600}


def test_a_commit_is_on_the_disk_when_it_returns(store: Store) -> None:
    """Anything less than `full` loses confirmed entries when the power goes."""
    with store.transaction() as db:
        settings = [db.execute(f"pragma {name}").get for name in ("synchronous", "foreign_keys")]

    assert settings == [2, 1]
    assert store.query("pragma journal_mode") == [("wal",)]


def test_a_second_start_finds_what_the_first_left(tmp_path: Path) -> None:
    """Migrations run once."""
    first = Store(tmp_path / "test.db")
    create_tenant(first, Wall(), "ada")
    first.close()
    second = Store(tmp_path / "test.db")

    names = second.query("select name from tenants")
    version = second.query("pragma user_version")
    second.close()
    assert names == [("ada",)]
    assert version == [(len(migrations()),)]


def test_a_database_of_the_first_schema_is_brought_up_to_date(tmp_path: Path) -> None:
    """Data made by an earlier version stay, and what came later works on them."""
    db = apsw.Connection(str(tmp_path / "test.db"))
    db.execute(migrations()[0]).fetchall()
    db.execute("pragma user_version=1").fetchall()
    db.execute("insert into tenants values (1, 'ada', 'active', 0, null, 1.0, 0, 0)").fetchall()
    db.close()
    store = Store(tmp_path / "test.db")

    before = store.registry_version()
    set_status(store, "ada", "suspended")
    after = store.registry_version()
    store.close()
    assert after > before


def test_a_database_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    """Writing to a schema one does not know would damage it."""
    store = Store(tmp_path / "test.db")
    with store.transaction() as db:
        db.execute("pragma user_version=999").fetchall()
    store.close()

    assert refusal(tmp_path / "test.db") == "newer_schema"


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    """A path typed wrong must not put our tables into somebody's file."""
    path = tmp_path / "other.db"
    db = apsw.Connection(str(path))
    db.execute("create table songs (name)").fetchall()

    code = refusal(path)
    tables = db.execute("select name from sqlite_schema").fetchall()
    db.close()
    assert code == "not_ours"
    assert tables == [("songs",)]


@pytest.mark.parametrize("kind", ["text", "folder", "missing_parent_is_a_file"])
def test_what_is_no_database_is_named(tmp_path: Path, kind: str) -> None:
    """The message says which file, or nobody finds it."""
    path = tmp_path / "test.db"
    if kind == "text":
        path.write_text("not a database, and long enough to be taken for one" * 100)
    elif kind == "folder":
        path.mkdir()
    else:
        (tmp_path / "file").touch()
        path = tmp_path / "file" / "test.db"

    assert refusal(path) == "unusable"


def test_an_old_sqlite_is_refused() -> None:
    """Before 3.51.3 two connections that write and checkpoint at once could damage the file."""
    check_sqlite(".".join(map(str, SQLITE_MIN)))
    check_sqlite("4.0.0")

    with pytest.raises(StoreError, match=r"3\.51\.2"):
        check_sqlite("3.51.2")


def test_what_fails_inside_a_transaction_leaves_nothing(store: Store) -> None:
    """Half a change is worse than none."""

    def half() -> None:
        with store.change() as db:
            db.execute("insert into tenants (name, status, created_ms) values ('ada', 'active', 0)")
            raise BadName("any", "any")

    with pytest.raises(BadName):
        half()
    assert store.query("select * from tenants") == []


def test_a_reader_does_not_wait_for_a_writer(store: Store) -> None:
    """Authentication happens on the event loop; a commit waits for the disk."""
    create_tenant(store, Wall(), "ada")
    found: list[object] = []
    with store.transaction() as db:
        db.execute("update tenants set name = 'bob'")
        thread = threading.Thread(
            target=lambda: found.extend(store.query("select name from tenants"))
        )
        thread.start()
        thread.join(timeout=10)

    assert found == [("ada",)]


def test_entries_cannot_be_changed_or_deleted(store: Store) -> None:
    """The database itself says no, whatever program asks."""
    create_tenant(store, Wall(), "ada")
    with store.change() as db:
        db.execute(INSERT, ("a", 1))

    for sql in ("delete from ledger", "update ledger set output_tokens = 0"):
        with pytest.raises(StoreError, match="never"), store.change() as db:
            db.execute(sql)
    assert store.query("select output_tokens from ledger") == [(1,)]


def test_counts_that_do_not_add_up_are_no_entry(store: Store) -> None:
    """prompt = read + write + fresh, for ever and in the schema."""
    create_tenant(store, Wall(), "ada")

    with pytest.raises(StoreError, match="not changed"), store.change() as db:
        db.execute(INSERT, ("a", 2))


def test_a_store_opens_again_after_an_error(store: Store) -> None:
    """What the disk kept is there, and the file was checked."""
    create_tenant(store, Wall(), "ada")
    store.reopen()

    create_tenant(store, Wall(), "bob")
    assert store.query("select name from tenants") == [("ada",), ("bob",)]


def test_a_damaged_file_does_not_open_again(tmp_path: Path) -> None:
    """Going on over damage spreads it."""
    store = Store(tmp_path / "test.db")
    for number in range(200):
        create_tenant(store, Wall(), f"tenant-{number}")
    store.close()
    content = bytearray((tmp_path / "test.db").read_bytes())
    (page,) = apsw.Connection(str(tmp_path / "test.db")).execute(
        "select rootpage from sqlite_schema where name = 'tenants'"
    )
    start = (page[0] - 1) * 4096
    content[start + 8 : start + 64] = b"\xff" * 56
    store = Store(tmp_path / "test.db")
    (tmp_path / "test.db").write_bytes(content)

    with pytest.raises(StoreError):
        store.reopen()
    with pytest.raises(StoreError):
        store.query("select * from tenants")


def test_a_database_says_whose_it_is(store: Store) -> None:
    """`file` and other programs can tell."""
    assert store.query("pragma application_id") == [(APPLICATION_ID,)]
