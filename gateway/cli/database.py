"""Opens the configured database for a command, with or without a running server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep

from gateway.app import open_store
from gateway.cli.result import CommandError
from gateway.config import Config
from tenancy.pricing.budget_watch import REFRESH_S
from tenancy.storage.backends import is_server
from tenancy.storage.interface import Store


@contextmanager
def open_database(config: Config, *, create: bool = True) -> Iterator[Store]:
    """Open the store. After a change, wait until a running server has seen it.

    The command thus returns after the change has taken effect. `create`: create a missing database
    file; commands that only read do not, so that a misspelt folder is an error. Raises CommandError
    and StoreError.
    """
    place = config.tenancy.database
    if not create and not is_server(place) and not (config.data / place).exists():
        hint = (
            "check --data-dir and --config; the first start or trunkline tenant create creates it"
        )
        raise CommandError(f"database not found: {config.data / place} ({hint})")
    try:
        store, _ = open_store(config)
    except OSError as error:
        raise CommandError(
            f"cannot use the data directory {config.data}: {error.strerror}"
        ) from error
    before = store.changes
    try:
        yield store
        if store.is_local and store.changes != before:
            sleep(REFRESH_S)
    finally:
        store.close()
