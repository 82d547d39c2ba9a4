"""`trunkline audit`: the log of changes that administrators, commands and the file made."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import get_args

import msgspec

from gateway.cli.arguments import UsageError
from gateway.cli.database import open_database
from gateway.cli.result import CommandCall, CommandResult, Entry, table_result
from gateway.cli.times import TIME_HELP, parse_period
from tenancy.accounting.exports import as_csv
from tenancy.accounts.tenants import find_tenant, list_tenants
from tenancy.storage.atomic_files import write_chunks
from tenancy.storage.audit_log import (
    PAGE_MAX,
    ActorKind,
    AuditFilter,
    all_changes,
    change_row,
)
from tenancy.storage.interface import Store
from tenancy.types import wall_ms

_COLUMNS = ("at", "actor", "actor_id", "address", "action", "tenant", "target", "before", "after")
"""Columns of the printed table."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--since", metavar="TIME", help=TIME_HELP)
    parser.add_argument("--until", metavar="TIME", help=f"{TIME_HELP}; exclusive")
    parser.add_argument("--tenant", metavar="NAME", help="only changes that concern this tenant")
    parser.add_argument("--action", metavar="NAME", help="for example key or key.revoke")
    parser.add_argument("--actor", choices=get_args(ActorKind))
    text = "number of the administrator's key, or user of the command or of the proxy"
    parser.add_argument("--actor-id", metavar="ID", help=text)
    text = f"the latest N changes (default: 100, at most {PAGE_MAX}); --out has all"
    parser.add_argument("--limit", type=int, default=100, metavar="N", help=text)
    parser.add_argument(
        "--format", choices=("csv", "jsonl"), default="csv", help="of --out (default: csv)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all changes to a file")


def _run(call: CommandCall) -> CommandResult:
    """List the latest changes, or export all that the filter has."""
    options = call.options
    if not 1 <= options.limit <= PAGE_MAX:
        raise UsageError(f"--limit: {options.limit} is out of range; expected 1 to {PAGE_MAX}")
    since_ms, until_ms = parse_period(options.since, options.until, wall_ms())
    with open_database(call.config) as store:
        tenant_id = None
        if options.tenant is not None:
            tenant_id = find_tenant(store, options.tenant).tenant_id
        wanted = AuditFilter(
            since_ms=since_ms,
            until_ms=until_ms,
            tenant_id=tenant_id,
            actor=options.actor,
            actor_id=options.actor_id,
            action=options.action,
        )
        if options.out is None:
            rows = list(islice(_rows(store, wanted), options.limit))
            return table_result(rows, columns=_COLUMNS)
        size = write_chunks(options.out, _encoded(_rows(store, wanted), options.format))
    return CommandResult(f"{size} bytes in {options.out}", {"bytes": size})


def _rows(store: Store, wanted: AuditFilter) -> Iterator[dict[str, object]]:
    names = {one.tenant_id: one.name for one in list_tenants(store)}
    return (change_row(one, names) for one in all_changes(store, wanted))


def _encoded(rows: Iterator[dict[str, object]], form: str) -> Iterator[bytes]:
    if form == "jsonl":
        return (msgspec.json.encode(row) + b"\n" for row in rows)
    columns = ("audit_id", "tenant_id", *_COLUMNS)
    return as_csv(columns, ({**row, **_as_json(row)} for row in rows))


def _as_json(row: dict[str, object]) -> dict[str, object]:
    """Return the values before and after as JSON text, for one cell each."""
    return {
        name: None if row[name] is None else msgspec.json.encode(row[name]).decode()
        for name in ("before", "after")
    }


COMMANDS: Mapping[str, Entry] = {"audit": Entry(_add_arguments, _run)}
