"""A store on each kind of database, and a wall clock that stands still until it is moved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tenancy.postgres_store import PostgresStore
from tenancy.sqlite_store import SqliteStore
from tenancy.store import Store
from tests.tenancy.postgres_server import Server


class Wall:
    """Milliseconds that a test sets."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def postgres(postgres_server: Server) -> Iterator[PostgresStore]:
    """A database of the test's own."""
    name = postgres_server.database()
    store = PostgresStore(postgres_server.address(name), is_ready=True)
    yield store
    store.close()
    postgres_server.drop(name)


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A new store of either kind."""
    if request.param == "postgres":
        yield request.getfixturevalue("postgres")
        return
    store = SqliteStore(tmp_path / "test.db")
    yield store
    store.close()
