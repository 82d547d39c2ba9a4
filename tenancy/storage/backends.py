"""Chooses the database: a file in the data directory, or a PostgreSQL server.

A setting is a file name, or a URL that begins with `postgresql://`. The server's driver is imported
only for a URL. The composition roots and the command line call this module.
"""

from __future__ import annotations

import getpass
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tenancy.errors import StoreError
from tenancy.storage.interface import Store
from tenancy.storage.postgres_address import read_address
from tenancy.storage.sqlite import SqliteStore

if TYPE_CHECKING:
    from tenancy.storage.postgres import PostgresStore

SCHEMES = ("postgresql://", "postgres://")


def is_server(place: str) -> bool:
    """Return whether the setting names a server; otherwise it is a file name."""
    return place.startswith(SCHEMES)


def check_place(place: str) -> None:
    """Check a setting. Raises StoreError for an invalid address, and for an address with a
    password."""
    if is_server(place):
        read_address(place, {}, "anybody")


def open_store(place: str, folder: Path, environment: Mapping[str, str]) -> Store:
    """Open a database and run its missing migrations.

    `folder`: where files are. `environment`: where passwords of servers may be. Raises StoreError.
    """
    if is_server(place):
        return open_server(place, environment)
    return SqliteStore(folder / place)


def describe_place(place: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Describe the database in words without creating it. Raises StoreError."""
    with closing_existing(place, folder, environment) as (store, is_ours):
        if store is None:
            return f"{folder / place}, made at the first start"
        return store.place if is_ours else f"{store.place}, filled at the first start"


@contextmanager
def closing_existing(
    place: str, folder: Path, environment: Mapping[str, str]
) -> Iterator[tuple[Store | None, bool]]:
    """Open a database that exists, and close it: (the store, whether it has our tables). None for
    a file that the first start makes. Raises StoreError."""
    if is_server(place):
        with closing(open_server(place, environment, is_ready=True)) as server:
            yield server, not server.is_empty()
    elif (folder / place).exists():
        with closing(SqliteStore(folder / place)) as file:
            yield file, True
    else:
        yield None, False


def open_server(
    place: str, environment: Mapping[str, str], *, is_ready: bool = False
) -> PostgresStore:
    """Open a PostgreSQL store, for callers that need one. Raises StoreError."""
    try:
        from tenancy.storage.postgres import PostgresStore
    except ImportError as error:
        message = "PostgreSQL needs the extra `postgres`: pip install 'trunkline[postgres]'"
        raise StoreError("no_driver", message) from error
    address = read_address(place, environment, getpass.getuser())
    return PostgresStore(address, is_ready=is_ready)
