"""`LockedTransaction`: how it ends, and who may write then."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from tenancy.errors import BadName, StoreError
from tenancy.storage.sqlite import LockedTransaction


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[apsw.Connection]:
    with closing(apsw.Connection(str(tmp_path / "t.db"))) as connection:
        connection.execute("create table things (number integer primary key)").fetchall()
        yield connection


def named(error: apsw.Error) -> StoreError:
    return StoreError("any", type(error).__name__)


def numbers(connection: apsw.Connection) -> list[int]:
    return [row[0] for row in connection.execute("select number from things")]


def test_releases_the_lock_however_it_ends(connection: apsw.Connection) -> None:
    """Committed, failed in a statement, in the commit or at its beginning, or interrupted; only a
    commit leaves data."""
    lock = threading.Lock()
    counted: list[bool] = []

    def count() -> None:
        counted.append(lock.locked())

    def fail(error: BaseException) -> apsw.Connection:
        raise error

    def change(*new: int, breaks: bool = False) -> None:
        with LockedTransaction(lock, lambda: connection, named, count) as db:
            db.execute_many("insert into things values (?)", [(number,) for number in new])
            if breaks:
                raise BadName("any", "any")

    change(1)
    with pytest.raises(StoreError, match="ConstraintError"):
        change(2, 2)
    with pytest.raises(BadName):
        change(3, breaks=True)
    connection.set_commit_hook(lambda: True)
    with pytest.raises(StoreError, match="ConstraintError"):
        change(4)
    connection.set_commit_hook(None)
    for error, kind in ((apsw.IOError("x"), StoreError), (BadName("any", "any"), BadName)):
        with (
            pytest.raises(kind),
            LockedTransaction(lock, lambda error=error: fail(error), named, count),  # type: ignore[misc]
        ):
            pass
    change(5)

    assert numbers(connection) == [1, 5]
    assert counted == [True, True]
    assert not lock.locked()


def test_excludes_other_writers(connection: apsw.Connection) -> None:
    """From its beginning on, whether or not it has written yet."""
    lock = threading.Lock()
    with (
        LockedTransaction(lock, lambda: connection, named, lambda: None),
        closing(apsw.Connection(connection.filename)) as other,
        pytest.raises(apsw.BusyError),
    ):
        other.execute("begin immediate").fetchall()

    assert not lock.locked()
