"""`trunkline audit`: the log of changes that administrators, commands and the file made."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from gateway.cli.billing import parse_time, write_file
from gateway.cli.database import open_database
from gateway.cli.result import CommandError, CommandResult, table_result
from gateway.config import Config
from tenancy.accounting.exports import as_csv
from tenancy.accounts.tenants import find_tenant, list_tenants
from tenancy.storage.audit_log import PAGE_MAX, AuditFilter, all_changes, change_row
from tenancy.storage.interface import Store

_COLUMNS = ("at", "actor", "actor_id", "address", "action", "tenant", "target", "before", "after")
"""Columns of the printed table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    text = "UTC day or instant: 2026-11-21 or 2026-11-21T10:00:00Z"
    parser.add_argument("--since", metavar="TIME", help=text)
    parser.add_argument("--until", metavar="TIME", help=f"{text}; exclusive")
    parser.add_argument("--tenant", metavar="NAME", help="only changes that concern this tenant")
    parser.add_argument("--action", metavar="NAME", help="for example key or key.revoke")
    parser.add_argument("--actor", choices=("admin_key", "command", "file"))
    text = "number of the administrator's key, or user of the command"
    parser.add_argument("--actor-id", metavar="ID", help=text)
    text = f"the latest N changes (default: 100, at most {PAGE_MAX}); --out has all"
    parser.add_argument("--limit", type=int, default=100, metavar="N", help=text)
    parser.add_argument(
        "--format", choices=("csv", "jsonl"), default="csv", help="of --out (default: csv)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all changes to a file")


def run(options: argparse.Namespace, config: Config) -> CommandResult:
    """List the latest changes, or export all that the filter has."""
    if not 1 <= options.limit <= PAGE_MAX:
        raise CommandError(f"--limit: {options.limit} is out of range; expected 1 to {PAGE_MAX}")
    with open_database(config, create=False) as store:
        tenant_id = None
        if options.tenant is not None:
            tenant_id = find_tenant(store, options.tenant)[0].tenant_id
        wanted = AuditFilter(
            since_ms=parse_time(options.since, "--since"),
            until_ms=parse_time(options.until, "--until"),
            tenant_id=tenant_id,
            actor=options.actor,
            actor_id=options.actor_id,
            action=options.action,
        )
        if options.out is None:
            rows = list(islice(_rows(store, wanted), options.limit))
            return table_result(rows, shown=_COLUMNS)
        size = write_file(options.out, _encoded(_rows(store, wanted), options.format))
    return CommandResult(f"{size} bytes in {options.out}", {"bytes": size})


def _rows(store: Store, wanted: AuditFilter) -> Iterator[dict[str, object]]:
    names = {one.tenant_id: one.name for one, _ in list_tenants(store)}
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
