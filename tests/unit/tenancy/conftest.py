"""Fixtures of tenancy tests: a store on each database, a wall clock, a ledger entry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tenancy.accounts.tenants import create_tenant
from tenancy.ledger.ledger import Ledger
from tenancy.storage.interface import Store
from tenancy.storage.postgres import PostgresStore
from tenancy.types import UsageEntry
from tests.unit.tenancy.storage.new_sqlite import new_sqlite
from tests.unit.tenancy.storage.postgres_server import Server


class Wall:
    """A wall clock that returns the milliseconds that the test has set."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


def used(request_id: str, at_ms: int) -> UsageEntry:
    """Return an entry with a value in every field."""
    return UsageEntry(
        request_id=request_id,
        tenant_id=1,
        key_id=1,
        model="m",
        ending="done",
        started_ms=at_ms,
        ended_ms=at_ms + 9,
        prompt_tokens=10,
        cache_read_tokens=5,
        cache_write_tokens=3,
        fresh_tokens=2,
        output_tokens=4,
        physical_cached_tokens=5,
        read={"5m": 1, "1h": 4},
        write={"1h": 3},
        workspace="lab",
        tier="gold",
        dialect="openai",
        recomputed_promised_tokens=1,
        ttft_ms=12,
        epoch="e1",
        host_cached_tokens=2,
        disk_cached_tokens=1,
        remote_cached_tokens=1,
    )


@pytest.fixture
def wall() -> Wall:
    return Wall()


@contextmanager
def on_server(server: Server) -> Iterator[PostgresStore]:
    """Return a new database on the server."""
    name = server.database()
    with closing(PostgresStore(server.address(name), is_ready=True)) as store:
        yield store
    server.drop(name)


@contextmanager
def new_store(server: Server | None = None) -> Iterator[Store]:
    """Return a new store, in a file or on this server, for one example of a property."""
    if server is None:
        with TemporaryDirectory() as folder, closing(new_sqlite(Path(folder) / "t.db")) as store:
            yield store
    else:
        with on_server(server) as store:
            yield store


@pytest.fixture
def postgres(postgres_server: Server) -> Iterator[PostgresStore]:
    """A new PostgreSQL database for the test."""
    with on_server(postgres_server) as store:
        yield store


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """A new store of either kind."""
    if request.param == "postgres":
        yield request.getfixturevalue("postgres")
    else:
        with new_store() as store:
            yield store


@pytest.fixture
def owned(store: Store) -> Store:
    """A store with two tenants, ada and bob."""
    for name in ("ada", "bob"):
        create_tenant(store, Wall(), name)
    return store


@pytest.fixture
def ledger(store: Store, wall: Wall) -> Iterator[Ledger]:
    """A ledger with one tenant."""
    create_tenant(store, wall, "ada")
    ledger = Ledger(store, wall)
    yield ledger
    ledger.close()
