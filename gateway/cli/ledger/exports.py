"""`trunkline export`: entries, events or cost rows of a period, to a file or standard output."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from gateway.cli.arguments import UsageError
from gateway.cli.database import open_database
from gateway.cli.result import CommandCall, CommandResult, Entry
from gateway.cli.times import TIME_HELP, parse_period
from tenancy.accounting.exports import (
    ENTRY_COLUMNS,
    as_csv,
    cloud_events,
    entry_rows,
    write_parquet,
)
from tenancy.accounting.focus_export import COLUMNS, cost_rows
from tenancy.accounts.tenants import find_tenant
from tenancy.storage.atomic_files import write_chunks
from tenancy.types import wall_ms


def _add_export(parser: argparse.ArgumentParser) -> None:
    formats = ("csv", "parquet", "cloudevents", "focus")
    parser.add_argument("--format", choices=formats, required=True)
    parser.add_argument("--tenant", metavar="NAME")
    parser.add_argument("--since", metavar="TIME", help=TIME_HELP)
    parser.add_argument("--until", metavar="TIME", help=f"{TIME_HELP}; exclusive")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")
    text = "billing account in cost rows and event sources"
    parser.add_argument("--account", default="trunkline", metavar="NAME", help=text)


def _export(call: CommandCall) -> CommandResult:
    """Export entries, events or cost rows of a period."""
    options, config = call.options, call.config
    since_ms, until_ms = parse_period(options.since, options.until, wall_ms())
    if options.out is None and (options.json or options.format == "parquet"):
        raise UsageError("--out FILE is required for this format")
    with open_database(config) as store:
        if options.tenant is not None:
            find_tenant(store, options.tenant)
        period = (options.tenant, since_ms or 0, until_ms)
        if options.format == "parquet":
            count = write_parquet(ENTRY_COLUMNS, entry_rows(store, *period), options.out)
            return CommandResult(f"{count} entries in {options.out}", {"entries": count})
        if options.format == "csv":
            data = as_csv(ENTRY_COLUMNS, entry_rows(store, *period))
        elif options.format == "focus":
            data = as_csv(COLUMNS, cost_rows(store, *period, options.account))
        else:
            data = cloud_events(store, *period, f"urn:trunkline:{options.account}")
        if options.out is None:
            for chunk in data:
                call.write(chunk)
            return CommandResult("", None)
        size = write_chunks(options.out, data)
    return CommandResult(f"{size} bytes in {options.out}", {"bytes": size})


COMMANDS: Mapping[str, Entry] = {
    "export": Entry(_add_export, _export),
}
