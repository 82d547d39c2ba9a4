"""`trunkline adjust`, `close`, `check-books` and `reconcile`: corrections and checks of the ledger.

They work while a server runs.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from functools import partial

from msgspec import structs

from gateway.cli.arguments import UsageError
from gateway.cli.database import command_actor, open_database
from gateway.cli.ledger.amounts import amount_of_dollars
from gateway.cli.result import (
    CommandCall,
    CommandResult,
    Entry,
    Table,
    add_nothing,
    table_result,
)
from gateway.cli.times import show_second
from tenancy.accounting.audit import check_books
from tenancy.accounting.closing import close_days, list_closes
from tenancy.accounting.reconcile import Counts, reconcile
from tenancy.ledger.adjustments import Adjustment, adjust
from tenancy.ledger.epochs import ledger_epoch
from tenancy.types import wall_ms


def _add_adjust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "request", metavar="REQUEST_ID", help="request id of the entry, or its response id"
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--credit", type=amount_of_dollars, metavar="USD", help="credit the tenant")
    which.add_argument("--debit", type=amount_of_dollars, metavar="USD", help="charge the tenant")
    text = "idempotency key: an adjustment is booked once per id"
    parser.add_argument("--id", required=True, metavar="ID", help=text)
    parser.add_argument("--reason", required=True, metavar="TEXT")


_ANSWER_ID = re.compile(r"[a-z]+[-_]([0-9a-f]{32})")
"""A response id: a dialect's prefix, such as chatcmpl- or msg_, and the request id."""


def _adjust(call: CommandCall) -> CommandResult:
    """Book a credit or a debit on a ledger entry."""
    options, config = call.options, call.config
    amount = options.debit if options.credit is None else -options.credit
    pico = amount.scaleb(12)
    if pico != int(pico):
        raise UsageError(f"{abs(amount)} dollars are not whole pico-dollars")
    found = _ANSWER_ID.fullmatch(options.request)
    request_id = found[1] if found else options.request
    adjustment = Adjustment(options.id, request_id, int(pico), options.reason)
    with open_database(config) as store:
        is_new = adjust(store, wall_ms, adjustment, command_actor())
    text = (
        f"adjustment {options.id} booked"
        if is_new
        else f"adjustment {options.id} was already booked"
    )
    return CommandResult(text, {**structs.asdict(adjustment), "is_new": is_new})


def _add_close(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--through", metavar="DAY", help="last day: 2026-11-21 (default: yesterday)"
    )
    parser.add_argument("--list", action="store_true", help="list closed days; close none")
    text = "close even if the engine's token counts differ"
    parser.add_argument("--despite-counts", action="store_true", help=text)


def _close(call: CommandCall) -> CommandResult:
    """Close complete days, or list closed ones. Keep the printed digests elsewhere."""
    options, config = call.options, call.config
    with open_database(config) as store:
        days = (
            list_closes(store)
            if options.list
            else close_days(
                store,
                wall_ms,
                options.through,
                despite_counts=options.despite_counts,
                by=command_actor(),
            )
        )
    rows: Table = [
        {
            **structs.asdict(day),
            "charge_pico": str(day.charge_pico),
            "adjusted_pico": str(day.adjusted_pico),
        }
        for day in days
    ]
    return table_result(rows, none="nothing to close")


def _check_books(call: CommandCall) -> CommandResult:
    """Check the ledger. Status 1 if a check fails."""
    with open_database(call.config) as store:
        findings = check_books(store, partial(call.show, "checked"))
    text = "\n".join(findings) if findings else "all checks passed"
    return CommandResult(text, findings, 1 if findings else 0)


def _reconcile(call: CommandCall) -> CommandResult:
    """Compare ledger, engine and metrics by engine epoch. Status 1 if they differ."""
    with open_database(call.config) as store:
        epochs, life = reconcile(store, wall_ms()), ledger_epoch(store).number
    rows: Table = []
    for epoch in epochs:
        row: dict[str, object] = {"epoch": epoch.epoch[:12], "state": epoch.state}
        row["from"] = show_second(epoch.first_seen_ms)
        for field in Counts.__struct_fields__:
            row[field] = getattr(epoch.ledger, field)
        for name, other in (("engine", epoch.engine), ("metrics", epoch.metrics)):
            difference = structs.astuple(epoch.ledger.minus(other))
            row[f"ledger_minus_{name}"] = "/".join(map(str, difference))
        row["unbilled"] = "/".join(map(str, structs.astuple(epoch.unbilled)))
        rows.append({**row, "ledger_epoch": life})
    status = 1 if any(epoch.has_mismatch for epoch in epochs) else 0
    return table_result(rows, status, none="no engine epoch recorded yet")


COMMANDS: Mapping[str, Entry] = {
    "adjust": Entry(_add_adjust, _adjust),
    "close": Entry(_add_close, _close),
    "check-books": Entry(add_nothing, _check_books),
    "reconcile": Entry(add_nothing, _reconcile),
}
