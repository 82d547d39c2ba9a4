"""The database that a command works on, beside a running server or without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gateway.app import open_store
from gateway.commands.answer import CommandError
from gateway.config import Config
from tenancy.store import Store


@contextmanager
def opened(config: Config) -> Iterator[Store]:
    """For as long as the command takes. Raises CommandError and StoreError."""
    try:
        store, _ = open_store(config)
    except OSError as error:
        raise CommandError(
            f"the data directory {config.data} cannot be used: {error.strerror}"
        ) from error
    try:
        yield store
    finally:
        store.close()
