"""`trunkline backup`, `restore` and `move-database`.

A backup copies the database while a server runs. A restore replaces the database, and a move copies
it to PostgreSQL, while none runs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

from msgspec import structs

from gateway.cli.arguments import UsageError
from gateway.cli.database import (
    command_actor,
    connect,
    database_file,
    open_database,
    prepare_data_dir,
)
from gateway.cli.result import CommandCall, CommandError, CommandResult, Entry
from gateway.cli.times import show_second
from tenancy.accounting import backups
from tenancy.accounting.move_to_postgres import move
from tenancy.pricing.charges import format_dollars
from tenancy.storage.backends import is_server, open_server
from tenancy.types import wall_ms


def _add_backup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="new file")


def _backup(call: CommandCall) -> CommandResult:
    options, config = call.options, call.config
    path = database_file(config)
    if path is None:
        raise UsageError("the database is in PostgreSQL; back it up with pg_dump, at any time")
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


def _restore(call: CommandCall) -> CommandResult:
    options, config = call.options, call.config
    if options.mark:
        with open_database(config) as store:
            epoch = backups.mark_restored(store, wall_ms, command_actor())
        return CommandResult(f"ledger epoch {epoch.number} begins", {"ledger_epoch": epoch.number})
    path = database_file(config)
    if path is None:
        message = "restore it with pg_restore, then run trunkline restore --mark"
        raise UsageError(f"the database is in PostgreSQL; {message}")
    prepare_data_dir(config)  # a replacement machine has none yet
    done = backups.restore(options.file, path, wall_ms, partial(call.show, "checked"))
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
        text += f", from {show_second(missing.since_ms)}"
    if missing.until_ms is not None:
        text += f" until {show_second(missing.until_ms)}"
    if done.kept is not None:
        text += f"\nthe previous database is kept as {done.kept}"
    return CommandResult(text, data)


def _add_move(parser: argparse.ArgumentParser) -> None:
    text = "an empty PostgreSQL database: postgresql://USER@HOST/DATABASE"
    parser.add_argument("to", metavar="ADDRESS", help=text)


def _move(call: CommandCall) -> CommandResult:
    options, config = call.options, call.config
    path = database_file(config)
    if path is None:
        raise UsageError("the database is in PostgreSQL already; expected a file")
    if not is_server(options.to):
        raise UsageError("ADDRESS is wrong; expected postgresql://USER@HOST/DATABASE")
    if not path.exists():
        raise CommandError(f"database not found: {path}")
    with (
        closing(connect(config)) as source,
        closing(open_server(options.to, os.environ)) as target,
    ):
        done = move(source, target, call.show)
        place = target.place
    data = {
        "rows": done.rows,
        "charge_pico": str(done.charge_pico),
        "chain": done.chain.hex(),
        "was_there": done.was_there,
    }
    state = "was already moved to" if done.was_there else "is moved to"
    text = (
        f"the database {path} {state} {place}"
        f"\n{sum(done.rows.values())} rows, {done.rows['ledger']} entries, charged"
        f" ${format_dollars(done.charge_pico)}, last chain digest {done.chain.hex()[:16] or '-'};"
        " all checks passed"
        f'\nnow set in the configuration: tenancy.database = "{options.to}"'
        "\nand start no server on the file any more"
    )
    return CommandResult(text, data)


COMMANDS: Mapping[str, Entry] = {
    "backup": Entry(_add_backup, _backup),
    "restore": Entry(_add_restore, _restore),
    "move-database": Entry(_add_move, _move),
}
