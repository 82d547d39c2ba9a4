"""`trunkline backup`, `restore` and `move-database`.

A backup copies the database while a server runs. A restore replaces the database, and a move copies
it to PostgreSQL, while none runs.
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
from gateway.cli.database import command_actor, open_database
from gateway.cli.result import CommandError, CommandResult, ShowProgress
from gateway.config import Config
from gateway.ledger.metering import wall_ms
from tenancy.accounting import backups
from tenancy.accounting.move_to_postgres import move
from tenancy.pricing.charges import format_dollars
from tenancy.storage.backends import is_server, open_server

Adder = Callable[[argparse.ArgumentParser], None]


def _add_backup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="new file")


def _backup(options: argparse.Namespace, config: Config, show: ShowProgress) -> CommandResult:
    if is_server(config.tenancy.database):
        raise CommandError("the ledger is in PostgreSQL; back it up with pg_dump, at any time")
    path = config.data / config.tenancy.database
    if not path.exists():
        raise CommandError(f"database not found: {path}")
    size = backups.backup(path, options.file)
    text = f"{size} bytes in {options.file}"
    return CommandResult(text, {"file": str(options.file), "bytes": size})


def _add_restore(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("file", type=Path, nargs="?", metavar="FILE", help="backup file")
    text = "restore no file; start a new ledger epoch after a restore by other means"
    which.add_argument("--mark", action="store_true", help=text)


def _restore(options: argparse.Namespace, config: Config, show: ShowProgress) -> CommandResult:
    if options.mark:
        with open_database(config, create=False) as store:
            epoch = backups.mark_restored(store, wall_ms, command_actor())
        return CommandResult(f"ledger epoch {epoch.number} begins", {"ledger_epoch": epoch.number})
    if is_server(config.tenancy.database):
        message = "restore it with pg_restore, then run trunkline restore --mark"
        raise CommandError(f"the ledger is in PostgreSQL; {message}")
    path = config.data / config.tenancy.database
    prepare_data_dir(config)  # a replacement machine has none yet
    done = backups.restore(options.file, path, wall_ms, partial(show, "checked"))
    missing = done.missing
    data = {
        "ledger_epoch": done.epoch.number,
        "missing": structs.asdict(missing),
        "kept": None if done.kept is None else str(done.kept),
    }
    text = f"{path} restored from {options.file}; ledger epoch {done.epoch.number} begins"
    if missing.entries is not None:
        text += f"\nmissing: {missing.entries} entries"
    else:
        text += "\nmissing: entries after the backup"
    if missing.since_ms is not None:
        text += f", from {_instant(missing.since_ms)}"
    if missing.until_ms is not None:
        text += f" until {_instant(missing.until_ms)}"
    if done.kept is not None:
        text += f"\nthe previous database is kept as {done.kept}"
    return CommandResult(text, data)


def _add_move(parser: argparse.ArgumentParser) -> None:
    text = "an empty PostgreSQL database: postgresql://USER@HOST/DATABASE"
    parser.add_argument("to", metavar="ADDRESS", help=text)


def _move(options: argparse.Namespace, config: Config, show: ShowProgress) -> CommandResult:
    if is_server(config.tenancy.database) or not is_server(options.to):
        raise CommandError("a ledger moves from a file to PostgreSQL; expected postgresql://…")
    path = config.data / config.tenancy.database
    if not path.exists():
        raise CommandError(f"database not found: {path}")
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
    state = "was already moved to" if done.was_there else "is moved to"
    text = (
        f"the ledger of {path} {state} {place}"
        f"\n{sum(done.rows.values())} rows, {done.rows['ledger']} entries, charged"
        f" ${format_dollars(done.charge_pico)}, last chain digest {done.chain.hex()[:16] or '-'};"
        " all checks passed"
        f'\nnow set in the configuration: tenancy.database = "{options.to}"'
        "\nand start no server on the file any more"
    )
    return CommandResult(text, data)


def _instant(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


_RUN = {"backup": _backup, "restore": _restore, "move-database": _move}
COMMANDS: Mapping[str, tuple[str, Adder]] = {
    "backup": ("Copy the database to a file; a server may run.", _add_backup),
    "restore": ("Replace the database by a backup; no server may run.", _add_restore),
    "move-database": ("Move the ledger from a file to a PostgreSQL server.", _add_move),
}


def run(options: argparse.Namespace, config: Config, show: ShowProgress) -> CommandResult:
    """Run one of `COMMANDS`."""
    return _RUN[options.command](options, config, show)
