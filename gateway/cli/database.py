"""The database that a command works on, beside a running server or without one."""

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
def opened(config: Config, *, makes: bool = True) -> Iterator[Store]:
    """For as long as the command takes, and, where it has changed something, until a server beside
    it has seen that: nobody is told before. `makes`: a file that is not there is made; whoever asks
    for money would find the books of a misspelt folder right. Raises CommandError and StoreError.
    """
    place = config.tenancy.database
    if not makes and not is_server(place) and not (config.data / place).exists():
        hint = "see --data-dir and --config; the first start or trunkline tenant create makes it"
        raise CommandError(f"there is no database {config.data / place} ({hint})")
    try:
        store, _ = open_store(config)
    except OSError as error:
        raise CommandError(
            f"the data directory {config.data} cannot be used: {error.strerror}"
        ) from error
    before = store.changes
    try:
        yield store
        if store.is_local and store.changes != before:
            sleep(REFRESH_S)
    finally:
        store.close()
