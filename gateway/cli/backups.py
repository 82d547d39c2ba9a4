"""`trunkline backup`, `restore` and `move-database`: a copy of the database beside a running
server; while none runs one put in its place, and one moved to a PostgreSQL server.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from msgspec import structs

from gateway.app import connect, prepare_data_dir
from gateway.cli.database import opened
from gateway.cli.result import CommandError, CommandResult, Show
from gateway.config import Config
from gateway.ledger.metering import wall_ms
from tenancy.accounting import backups
from tenancy.accounting.move_to_postgres import move
from tenancy.pricing.charges import format_dollars
from tenancy.storage.backends import is_server, open_server

Adder = Callable[[argparse.ArgumentParser], None]


def _add_backup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="to be made; not there yet")


def _backup(options: argparse.Namespace, config: Config, show: Show) -> CommandResult:
    if is_server(config.tenancy.database):
        raise CommandError("this ledger is on a server: back it up with pg_dump, at any time")
    path = config.data / config.tenancy.database
    if not path.exists():
        raise CommandError(f"there is nothing to back up: {path} is not there")
    size = backups.backup(path, options.file)
    text = f"{size} bytes in {options.file}"
    return CommandResult(text, {"file": str(options.file), "bytes": size})


def _add_restore(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("file", type=Path, nargs="?", metavar="FILE", help="a backup")
    text = "restore nothing: the database was restored by other means"
    which.add_argument("--mark", action="store_true", help=text)


def _restore(options: argparse.Namespace, config: Config, show: Show) -> CommandResult:
    if options.mark:
        with opened(config, makes=False) as store:
            epoch = backups.mark_restored(store, wall_ms)
        return CommandResult(f"ledger epoch {epoch.number} begins", {"ledger_epoch": epoch.number})
    if is_server(config.tenancy.database):
        message = "restore it with pg_restore, then say so: trunkline restore --mark"
        raise CommandError(f"this ledger is on a server: {message}")
    path = config.data / config.tenancy.database
    prepare_data_dir(config)  # of a machine that takes the place of one that is gone
    done = backups.restore(options.file, path, wall_ms, partial(show, "checked"))
    missing = done.missing
    data = {
        "ledger_epoch": done.epoch.number,
        "missing": structs.asdict(missing),
        "kept": None if done.kept is None else str(done.kept),
    }
    text = f"{path} is what {options.file} was; ledger epoch {done.epoch.number} begins"
    if missing.entries is not None:
        text += f"\nmissing: {missing.entries} entries"
    else:
        text += "\nmissing: what came after the backup"
    if missing.since_ms is not None:
        text += f", from {_instant(missing.since_ms)}"
    if missing.until_ms is not None:
        text += f" until {_instant(missing.until_ms)}"
    if done.kept is not None:
        text += f"\nwhat was there is kept as {done.kept}"
    return CommandResult(text, data)


def _add_move(parser: argparse.ArgumentParser) -> None:
    text = "a server's empty database: postgresql://USER@HOST/DATABASE"
    parser.add_argument("to", metavar="ADDRESS", help=text)


def _move(options: argparse.Namespace, config: Config, show: Show) -> CommandResult:
    if is_server(config.tenancy.database) or not is_server(options.to):
        raise CommandError("a ledger is moved from a file to a server: postgresql://…")
    path = config.data / config.tenancy.database
    if not path.exists():
        raise CommandError(f"there is nothing to move: {path} is not there")
    with (
        closing(connect(config)) as source,
        closing(open_server(options.to, os.environ)) as target,
    ):
        done = move(source, target, show)
        place = target.place
    data = {
        "rows": done.rows,
        "charge_pico": str(done.charge_pico),
        "chain": done.chain.hex(),
        "was_there": done.was_there,
    }
    what = "was there already" if done.was_there else "is there"
    text = (
        f"the ledger of {path} {what}: {place}"
        f"\n{sum(done.rows.values())} rows, {done.rows['ledger']} entries, charged"
        f" ${format_dollars(done.charge_pico)}, last of the chain {done.chain.hex()[:16] or '-'};"
        " the books are right"
        f'\nnow say so in the configuration: tenancy.database = "{options.to}"'
        "\nand start no server with the file any more"
    )
    return CommandResult(text, data)


def _instant(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


_RUN = {"backup": _backup, "restore": _restore, "move-database": _move}
COMMANDS: Mapping[str, tuple[str, Adder]] = {
    "backup": ("Copy the database to a file, beside a running server.", _add_backup),
    "restore": ("Put a backup in the database's place; no server may run.", _add_restore),
    "move-database": ("Move the ledger from a file to a PostgreSQL server.", _add_move),
}


def run(options: argparse.Namespace, config: Config, show: Show) -> CommandResult:
    """One of `COMMANDS`."""
    return _RUN[options.command](options, config, show)
