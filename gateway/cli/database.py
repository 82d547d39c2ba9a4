"""The data directory and the configured database, with or without a running server.

The module imports no part of a gateway, so that a command starts fast.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep

from gateway.cli.result import CommandError
from gateway.config import Config
from tenancy.accounts import authentication
from tenancy.accounts.tenants import bootstrap, bootstrap_admin
from tenancy.pricing import budget_watch
from tenancy.storage import backends
from tenancy.storage.audit_log import Actor
from tenancy.storage.interface import Store
from tenancy.types import wall_ms

KEY_FILE = "default.key"
ADMIN_KEY_FILE = "admin.key"


OTHERS = stat.S_IRWXO | stat.S_IWGRP
"""Rights in the data directory by which others read its names or change its files."""


def prepare_data_dir(config: Config) -> str:
    """Create the data directory with mode 0700, or take from others what they may do in it.

    Returns a sentence for the operator if the mode was changed. One of root is taken as it is,
    unless all may write to it: a mounted volume may be so. Raises CommandError, also for one of
    another user.
    """
    folder = config.data
    try:
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True)
            return ""
        found = folder.stat()
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid not in (os.geteuid(), 0):
            raise CommandError(
                f"the data directory {folder} belongs to the user {found.st_uid}, who could read"
                f" and change what it holds; expected one of this user: chown {os.geteuid()}"
                f" {folder}"
            )
        if found.st_uid != os.geteuid():
            if mode & stat.S_IWOTH:
                raise CommandError(
                    f"the data directory {folder} of root has mode {mode:04o}, in which any user"
                    f" could change its files; expected none of others: chmod o-rwx {folder}"
                )
            return ""
        if not mode & OTHERS:
            return ""
        folder.chmod(mode & ~OTHERS)
    except OSError as error:
        raise CommandError(
            f"cannot use the data directory {folder}: {error.strerror}; expected one that this user"
            " can make and write: choose another with --data-dir"
        ) from error
    return f"the data directory {folder} had mode {mode:04o}; it has {mode & ~OTHERS:04o} now"


def database_file(config: Config) -> Path | None:
    """Return the path of the configured database; None for one on a server."""
    place = config.tenancy.database
    return None if backends.is_server(place) else config.data / place


def connect(config: Config) -> Store:
    """Open the configured database. Raises StoreError."""
    return backends.open_store(config.tenancy.database, config.data, os.environ)


def open_store(config: Config) -> tuple[Store, str | None]:
    """Open the database; the first start creates the default tenant: (store, its key or None)."""
    prepare_data_dir(config)
    store = connect(config)
    return store, create_first_keys(config, store)


def create_first_keys(config: Config, store: Store) -> str | None:
    """Create the default tenant at the first start; return its key, None at later starts.

    Writes that key, and the first administrator's key, to files that only their owner can read.
    """
    key = bootstrap(store, wall_ms)
    for name, made in ((KEY_FILE, key), (ADMIN_KEY_FILE, bootstrap_admin(store, wall_ms))):
        if made is not None:
            path = config.data / name
            path.touch(mode=0o600)
            path.chmod(0o600)
            path.write_text(made + "\n")
    return key


def command_actor() -> Actor:
    """Return the operating system's user that runs this command, for the audit log."""
    user_id = os.getuid()
    try:
        name = pwd.getpwuid(user_id).pw_name
    except KeyError:  # a container may have no entry for its user
        name = str(user_id)
    return Actor("command", name, wall_ms())


@contextmanager
def open_database(config: Config, *, create: bool = False) -> Iterator[Store]:
    """Open the store. After a change, wait until a running server has seen it.

    The command thus returns after the change has taken effect. `create`: create a missing database
    file, which the creation of tenants and keys does: elsewhere a misspelt folder is an error.
    Raises CommandError and StoreError.
    """
    file = database_file(config)
    if not create and file is not None and not file.exists():
        hint = (
            "check --data-dir and --config; the first start or trunkline tenant create creates it"
        )
        raise CommandError(f"database not found: {file} ({hint})")
    store, _ = open_store(config)
    before = store.changes
    try:
        yield store
        if store.is_local and store.changes != before:
            sleep(max(authentication.REFRESH_S, budget_watch.REFRESH_S))
    finally:
        store.close()
