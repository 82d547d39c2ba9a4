"""Ledger epochs: totals never fall within one, and a replaced database begins the next."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tenancy.accounting.audit import check_books
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import ConstraintBroken
from tenancy.ledger.epochs import (
    begin_ledger_epoch,
    has_history,
    ledger_epoch,
    save_known_point,
)
from tenancy.ledger.ledger import Ledger
from tenancy.storage.interface import Store
from tenancy.storage.sqlite import SqliteStore
from tests.crash.ledger_child import entry, hold
from tests.unit.tenancy.conftest import Wall
from tests.unit.tenancy.storage.new_sqlite import new_sqlite

PATIENCE_S = 60


class Life:
    """A ledger file that is opened and closed, copied and restored."""

    def __init__(self, folder: Path, wall: Wall) -> None:
        self.path = folder / "test.db"
        self.known = folder / "test.db.known"
        self.wall = wall
        store = SqliteStore(self.path)
        create_tenant(store, wall, "ada")
        store.close()

    def run(
        self, *request_ids: str, held: str | None = None, is_killed: bool = False
    ) -> tuple[int, int]:
        """Run one server life. Returns the epoch it found and the entries then.

        It leaves a hold. A killed one leaves the point known at its last minute.
        """
        store = SqliteStore(self.path)
        ledger = Ledger(store, self.wall)
        known = self.known.read_bytes()
        for request_id in request_ids:
            ledger.settle(entry(request_id)).result(PATIENCE_S)
        if held is not None:
            ledger.hold(hold(held)).result(PATIENCE_S)
        ledger.close()
        found = ledger_epoch(store).number, store.query("select count(*) from ledger")[0][0]
        assert check_books(store) == []
        store.close()
        if is_killed:
            self.known.write_bytes(known)
        return found

    def copy(self, name: str) -> Path:
        return Path(shutil.copy(self.path, self.path.with_name(name)))

    def put_back(self, copy: Path) -> None:
        shutil.copy(copy, self.path)

    def epochs(self) -> list[tuple[int, str, int]]:
        store = SqliteStore(self.path)
        found = store.query("select number, reason, entry_id from ledger_epochs order by number")
        store.close()
        return found


@pytest.fixture
def life(tmp_path: Path, wall: Wall) -> Life:
    return Life(tmp_path, wall)


def test_restarts_and_crashes_keep_the_epoch(life: Life) -> None:
    """L8: they lose nothing, so no total falls."""
    found = [life.run(name, is_killed=True) for name in ("1-1", "1-2")]
    found += [life.run("1-3"), life.run()]

    assert found == [(1, 1), (1, 2), (1, 3), (1, 3)]
    assert life.epochs() == [(1, "begun", 0)]


def test_history_begins_with_the_first_entry(store: Store, wall: Wall) -> None:
    """Entries that another gateway wrote count."""
    create_tenant(store, wall, "ada")
    before = has_history(store)
    ledger = Ledger(store, wall)
    ledger.settle(entry("1-1")).result(PATIENCE_S)
    ledger.close()

    assert (before, has_history(store)) == (False, True)


def test_detects_a_file_restored_by_hand(life: Life) -> None:
    """Before its open holds are closed: their entries are of the new epoch."""
    life.run("1-1", held="1-9")
    old = life.copy("old.db")
    life.run("1-2", "1-3")
    life.put_back(old)

    assert life.run("1-4") == (2, 3)
    assert life.run("1-5") == (2, 4), "found once"
    assert life.epochs() == [(1, "begun", 0), (2, "found", 1)]


def test_detects_a_copy_that_went_on_elsewhere(life: Life) -> None:
    """It has an entry of the known number, but another one."""
    life.run("1-1")
    old = life.copy("old.db")
    life.run("1-2")
    known = life.known.read_bytes()
    life.put_back(old)
    life.known.unlink()
    life.run("1-3", "1-4")
    life.known.write_bytes(known)

    assert life.run() == (2, 3)


def test_diverging_histories_have_different_numbers(life: Life) -> None:
    """The same backup restored twice makes two histories."""
    life.run("1-1")
    old = life.copy("old.db")
    for _ in range(2):
        life.run("1-2")
        life.put_back(old)
    third = life.run("1-3")
    newer = life.copy("newer.db")
    life.put_back(old)
    fourth = life.run()
    life.put_back(newer)

    assert (third, fourth) == ((3, 2), (4, 1))
    assert life.run() == (5, 2), "another epoch was here in between"


def test_detects_an_empty_replacement(life: Life) -> None:
    life.run("1-1")
    life.path.unlink()

    assert life.run() == (2, 0)


@pytest.mark.parametrize("known", [None, b"", b"{}", b"\xff", b'{"epoch": "1"}'])
def test_missing_or_unreadable_point_is_no_alarm(life: Life, known: bytes | None) -> None:
    """It is saved again from this start on."""
    life.run("1-1")
    life.known.unlink()
    if known is not None:
        life.known.write_bytes(known)

    assert life.run("1-2") == (1, 2)
    assert b'"entry_id":2' in life.known.read_bytes()


def test_saves_the_point_each_minute(tmp_path: Path, wall: Wall) -> None:
    """A server killed after days must not have saved its first day only, nor one whose clock was
    set back."""
    store = new_sqlite(tmp_path / "test.db")
    create_tenant(store, wall, "ada")
    ledger = Ledger(store, wall)
    known = tmp_path / "test.db.known"
    first = known.read_bytes()
    ledger.settle(entry("1-1")).result(PATIENCE_S)
    ledger.settle(entry("1-2")).result(PATIENCE_S)
    same = known.read_bytes()
    wall.ms += 60_000
    ledger.settle(entry("1-3")).result(PATIENCE_S)
    ledger.settle(entry("1-4")).result(PATIENCE_S)
    then = known.read_bytes()
    wall.ms -= 60_000
    ledger.settle(entry("1-5")).result(PATIENCE_S)
    ledger.settle(entry("1-6")).result(PATIENCE_S)
    back = known.read_bytes()
    ledger.close()
    store.close()

    assert same == first
    assert b'"entry_id":3' in then
    assert back.endswith(b'"at_ms":%d}' % wall())
    assert b'"entry_id":5' in back
    assert known.stat().st_mode & 0o777 == 0o600


def test_failure_to_save_the_point_is_tolerated(tmp_path: Path, wall: Wall) -> None:
    """Saving it is best effort."""
    (tmp_path / "test.db.known").mkdir()
    store = new_sqlite(tmp_path / "test.db")
    create_tenant(store, wall, "ada")
    ledger = Ledger(store, wall)
    ledger.settle(entry("1-1")).result(PATIENCE_S)
    ledger.close()
    found = store.query("select count(*) from ledger")
    store.close()

    assert found == [(1,)]


def test_epochs_begin_after_the_last_entry(store: Store, wall: Wall) -> None:
    """The audit finds one that does not fit."""
    create_tenant(store, wall, "ada")
    ledger = Ledger(store, wall)
    ledger.settle(entry("1-1")).result(PATIENCE_S)
    ledger.close()
    with store.change() as db:
        made = begin_ledger_epoch(db, wall(), "marked", above=4)
    save_known_point(store, wall)

    assert (made.number, made.begun_ms, made.entry_id) == (5, wall(), 1)
    assert ledger_epoch(store) == made
    assert check_books(store) == []
    for sql in ("delete from ledger_epochs", "update ledger_epochs set number = 9"):
        with pytest.raises(ConstraintBroken), store.change() as db:
            db.execute(sql)


def test_audit_finds_an_epoch_with_a_wrong_chain(store: Store, wall: Wall) -> None:
    create_tenant(store, wall, "ada")
    with store.change() as db:
        db.execute("insert into ledger_epochs values (2, 0, 'marked', 7, ?)", (b"x",))

    assert check_books(store) == ["ledger epoch 2 does not match entry 7"]
