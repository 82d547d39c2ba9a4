"""Opens the configured database for a command, with or without a running server."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep

from gateway.app import open_store
from gateway.cli.result import CommandError
from gateway.config import Config
from gateway.ledger.metering import wall_ms
from tenancy.pricing.budget_watch import REFRESH_S
from tenancy.storage.audit_log import Actor
from tenancy.storage.backends import is_server
from tenancy.storage.interface import Store


def command_actor() -> Actor:
    """Return the operating system's user that runs this command, for the audit log."""
    user_id = os.getuid()
    try:
        name = pwd.getpwuid(user_id).pw_name
    except KeyError:  # a container may have no entry for its user
        name = str(user_id)
    return Actor("command", name, wall_ms())


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
