"""A store on each kind of database, a wall clock that stands still until it is moved, an entry."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tenancy.accounts.tenants import create_tenant
from tenancy.ledger.ledger import Ledger
from tenancy.storage.interface import Store
from tenancy.storage.postgres import PostgresStore
from tenancy.storage.sqlite import SqliteStore
from tenancy.types import UsageEntry
from tests.unit.tenancy.storage.postgres_server import IN_MEMORY, Server


class Wall:
    """Milliseconds that a test sets."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


def used(request_id: str, at_ms: int) -> UsageEntry:
    """An entry with something in every field."""
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
    )


@pytest.fixture
def wall() -> Wall:
    return Wall()


@contextmanager
def on_server(server: Server) -> Iterator[PostgresStore]:
    """A database of somebody's own."""
    name = server.database()
    with closing(PostgresStore(server.address(name), is_ready=True)) as store:
        yield store
    server.drop(name)


@contextmanager
def new_store(server: Server | None = None) -> Iterator[Store]:
    """For one example of a property: in a file, or on this server. What a disk may do is tried
    elsewhere: here nobody waits for one, where there is another place."""
    if server is None:
        place = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None
        with (
            TemporaryDirectory(dir=place) as folder,
            closing(SqliteStore(Path(folder) / "t.db")) as store,
        ):
            yield store
    else:
        with on_server(server) as store:
            yield store


@pytest.fixture
def postgres(postgres_server: Server) -> Iterator[PostgresStore]:
    """A database of the test's own."""
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
def ledger(store: Store, wall: Wall) -> Iterator[Ledger]:
    """With one tenant."""
    create_tenant(store, wall, "ada")
    ledger = Ledger(store, wall)
    yield ledger
    ledger.close()
