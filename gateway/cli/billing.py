"""Commands of billing: `prices`, `budget`, `adjust`, `close`, `check-books`, `reconcile`, `export`.

They work while a server runs. Amounts are decimal dollars on the command line and exact integers
everywhere else.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path

import msgspec
from msgspec import structs

from gateway.cli.database import command_actor, open_database
from gateway.cli.result import CommandError, CommandResult, ShowProgress, Table, table_result
from gateway.config import Config
from gateway.dialects.validation import find_duplicate_key
from gateway.ledger.metering import wall_ms
from tenancy.accounting.audit import check_books
from tenancy.accounting.closing import close_days, list_closes
from tenancy.accounting.exports import (
    ENTRY_COLUMNS,
    as_csv,
    cloud_events,
    entry_rows,
    write_parquet,
)
from tenancy.accounting.focus_export import COLUMNS, cost_rows
from tenancy.accounting.reconcile import Counts, reconcile
from tenancy.accounts.tenants import find_tenant, list_tenants
from tenancy.ledger.adjustments import Adjustment, adjust
from tenancy.ledger.epochs import ledger_epoch
from tenancy.pricing.budgets import Budget, budget_states, set_budget
from tenancy.pricing.charges import ANY, RateCard, format_dollars
from tenancy.pricing.rate_cards import add_card, load_cards
from tenancy.storage.atomic_files import atomic_write

Adder = Callable[[argparse.ArgumentParser], None]
Write = Callable[[bytes], object]
FILE_BYTES_MAX = 1_000_000
"""Largest rate card file."""


# --- prices and budgets --------------------------------------------------------------------------


def _add_prices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--add", type=Path, metavar="FILE", help="add a rate card from a JSON file")


def _prices(
    options: argparse.Namespace, config: Config, write: Write, show: ShowProgress
) -> CommandResult:
    """List all versions of all rate cards, or add one."""
    with open_database(config, create=False) as store:
        if options.add is not None:
            card = _read_card(options.add)
            config.check_card(card)
            card = add_card(store, wall_ms, card, command_actor())
            text = f"{card.rate_card_id} applies from {_instant(card.valid_from_ms)}"
            if card.tier not in (ANY, *(one.tier for one, _ in list_tenants(store))):
                text += f"; no tenant has the tier {card.tier!r} yet"
            return CommandResult(text, structs.asdict(card))
        rows = [_card_row(card) for card in load_cards(store)]
    if not rows:
        return CommandResult("no rate cards: nothing is charged", [])
    table = table_result(rows, shown=_PRICE_COLUMNS)
    unit = "micro-dollars per million tokens, of storage for an hour; minimum_charge: micro-dollars"
    return CommandResult(f"{unit}\n{table.text}", table.data)


_PRICE_COLUMNS = (
    *("id", "model", "tier", "input", "output", "cache_read", "cache_write", "storage"),
    *("minimum_charge", "breach_credit", "from", "until"),
)
"""Columns of a rate card in the printed table."""


def _card_row(card: RateCard) -> dict[str, object]:
    ends = card.valid_until_ms
    until = None if ends is None else _instant(ends)
    times = {"from": _instant(card.valid_from_ms), "until": until}
    return {"id": card.rate_card_id, **structs.asdict(card), **times}


def _read_card(path: Path) -> RateCard:
    data = path.read_bytes()[: FILE_BYTES_MAX + 1]
    try:
        card = msgspec.json.decode(data, type=RateCard)
        duplicate = find_duplicate_key(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CommandError(f"{path} is not a rate card: {error}") from error
    if duplicate is not None:
        raise CommandError(f"{path} is not a rate card: duplicate key {duplicate!r}")
    return card


def _add_budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", nargs="?", metavar="TENANT")
    parser.add_argument(
        "--key", type=int, default=0, metavar="ID", help="key id, for a budget of one key"
    )
    parser.add_argument(
        "--window", choices=("day", "month"), default="month", help="in UTC (default: month)"
    )
    text = "hard limit; requests that could exceed it are refused"
    parser.add_argument("--hard", type=_amount, metavar="USD", help=text)
    parser.add_argument(
        "--soft", type=_amount, metavar="USD", help="soft limit; exceeding it only alerts"
    )
    parser.add_argument("--remove", action="store_true", help="remove the budget")


def _budget(
    options: argparse.Namespace, config: Config, write: Write, show: ShowProgress
) -> CommandResult:
    """Set a budget, or list budgets with their spent amounts."""
    hard, soft = _micros(options.hard, "--hard"), _micros(options.soft, "--soft")
    is_change = options.remove or hard is not None or soft is not None
    if is_change and options.tenant is None:
        raise CommandError("TENANT is required: trunkline budget TENANT --hard USD")
    if options.remove and (hard is not None or soft is not None):
        raise CommandError("--remove is not allowed with --hard or --soft")
    with open_database(config, create=False) as store:
        names = {tenant.tenant_id: tenant.name for tenant, _ in list_tenants(store)}
        tenant_id = None
        if options.tenant is not None:
            tenant_id = find_tenant(store, options.tenant)[0].tenant_id
        if is_change and tenant_id is not None:
            budget = Budget(tenant_id, options.window, hard, soft, options.key)
            set_budget(store, budget, command_actor())
        states = budget_states(store, wall_ms, tenant_id)
    rows: Table = [
        {
            "tenant": names[state.budget.tenant_id],
            "key": state.budget.key_id or None,
            "window": state.budget.window,
            "hard_usd": _usd(state.budget.hard_micros),
            "soft_usd": _usd(state.budget.soft_micros),
            "spent_usd": format_dollars(state.spent_pico),
            "reserved_usd": format_dollars(state.reserved_pico),
            "over_soft": state.is_over_soft,
            "resets": _instant(state.resets_ms),
        }
        for state in states
    ]
    return table_result(rows) if rows else CommandResult("no budgets", [])


# --- the books -----------------------------------------------------------------------------------


def _add_adjust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "request", metavar="REQUEST_ID", help="request id of the entry, or its response id"
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--credit", type=_amount, metavar="USD", help="credit the tenant")
    which.add_argument("--debit", type=_amount, metavar="USD", help="charge the tenant")
    text = "idempotency key: an adjustment is booked once per id"
    parser.add_argument("--id", required=True, metavar="ID", help=text)
    parser.add_argument("--reason", required=True, metavar="TEXT")


_ANSWER_ID = re.compile(r"[a-z]+[-_]([0-9a-f]{32})")
"""A response id: a dialect's prefix, such as chatcmpl- or msg_, and the request id."""


def _adjust(
    options: argparse.Namespace, config: Config, write: Write, show: ShowProgress
) -> CommandResult:
    """Book a credit or a debit on a ledger entry."""
    amount = options.debit if options.credit is None else -options.credit
    pico = amount.scaleb(12)
    if pico != int(pico):
        raise CommandError(f"{abs(amount)} dollars are not whole pico-dollars")
    found = _ANSWER_ID.fullmatch(options.request)
    request_id = found[1] if found else options.request
    adjustment = Adjustment(options.id, request_id, int(pico), options.reason)
    with open_database(config, create=False) as store:
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


def _close(
    options: argparse.Namespace, config: Config, write: Write, show: ShowProgress
) -> CommandResult:
    """Close complete days, or list closed ones. Keep the printed digests elsewhere."""
    with open_database(config, create=False) as store:
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
    rows = [
        {
            **structs.asdict(day),
            "charge_pico": str(day.charge_pico),
            "adjusted_pico": str(day.adjusted_pico),
        }
        for day in days
    ]
    return table_result(rows) if rows else CommandResult("nothing to close", [])


def _add_nothing(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def _check_books(
    options: argparse.Namespace, config: Config, write: Write, show: ShowProgress
) -> CommandResult:
    """Check the ledger. Status 1 if a check fails."""
    with open_database(config, create=False) as store:
        findings = check_books(store, partial(show, "checked"))
    text = "\n".join(findings) if findings else "all checks passed"
    return CommandResult(text, findings, 1 if findings else 0)


def _reconcile(
    options: argparse.Namespace, config: Config, write: Write, show: ShowProgress
) -> CommandResult:
    """Compare ledger, engine and metrics by engine epoch. Status 1 if they differ."""
    with open_database(config, create=False) as store:
        epochs, life = reconcile(store, wall_ms()), ledger_epoch(store).number
    rows: Table = []
    for epoch in epochs:
        row: dict[str, object] = {"epoch": epoch.epoch[:12], "state": epoch.state}
        row["from"] = _instant(epoch.first_seen_ms)
        for field in Counts.__struct_fields__:
            row[field] = getattr(epoch.ledger, field)
        for name, other in (("engine", epoch.engine), ("metrics", epoch.metrics)):
            difference = structs.astuple(epoch.ledger.minus(other))
            row[f"ledger_minus_{name}"] = "/".join(map(str, difference))
        rows.append({**row, "ledger_epoch": life})
    if not rows:
        return CommandResult("no engine epoch recorded yet", [])
    return table_result(rows, 1 if any(epoch.has_mismatch for epoch in epochs) else 0)


# --- exports -------------------------------------------------------------------------------------


def _add_export(parser: argparse.ArgumentParser) -> None:
    formats = ("csv", "parquet", "cloudevents", "focus")
    parser.add_argument("--format", choices=formats, required=True)
    parser.add_argument("--tenant", metavar="NAME")
    text = "UTC day or instant: 2026-11-21 or 2026-11-21T10:00:00Z"
    parser.add_argument("--since", metavar="TIME", help=text)
    parser.add_argument("--until", metavar="TIME", help=f"{text}; exclusive")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")
    text = "billing account in cost rows and event sources"
    parser.add_argument("--account", default="trunkline", metavar="NAME", help=text)


def _export(
    options: argparse.Namespace, config: Config, write: Write, show: ShowProgress
) -> CommandResult:
    """Export entries, events or cost rows of a period."""
    since_ms, until_ms = parse_time(options.since, "--since"), parse_time(options.until, "--until")
    if since_ms is not None and until_ms is not None and since_ms >= until_ms:
        raise CommandError("--since must be before --until")
    if options.out is None and (options.json or options.format == "parquet"):
        raise CommandError("--out FILE is required for this format")
    with open_database(config, create=False) as store:
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
                write(chunk)
            return CommandResult("", None)
        size = write_file(options.out, data)
    return CommandResult(f"{size} bytes in {options.out}", {"bytes": size})


def write_file(path: Path, data: Iterator[bytes]) -> int:
    """Write the file completely, or not at all. Returns its size in bytes."""
    size = 0
    with atomic_write(path) as part, part.open("wb") as file:
        for chunk in data:
            size += file.write(chunk)
    return size


# --- shared --------------------------------------------------------------------------------------

_RUN = {
    "prices": _prices,
    "budget": _budget,
    "adjust": _adjust,
    "close": _close,
    "check-books": _check_books,
    "reconcile": _reconcile,
    "export": _export,
}
COMMANDS: Mapping[str, tuple[str, Adder]] = {
    "prices": ("List rate cards, or add one.", _add_prices),
    "budget": ("List budgets, or set one.", _add_budget),
    "adjust": ("Credit or debit a ledger entry.", _add_adjust),
    "close": ("Close days of the ledger.", _add_close),
    "check-books": ("Recompute every sum, chain and charge of the ledger.", _add_nothing),
    "reconcile": ("Compare the token counts of ledger, engine and metrics.", _add_nothing),
    "export": ("Export the ledger as CSV, Parquet, CloudEvents or FOCUS.", _add_export),
}


def run(
    options: argparse.Namespace, config: Config, write: Write, show: ShowProgress
) -> CommandResult:
    """Run one of `COMMANDS`. `write` receives the bytes of an export without `--out`."""
    return _RUN[options.command](options, config, write, show)


def _amount(text: str) -> Decimal:
    try:
        amount = Decimal(text)
    except InvalidOperation as error:
        raise ValueError(text) from error
    if not amount.is_finite() or amount < 0 or amount > 10**12 or len(text) > 40:
        raise ValueError(text)
    return amount


_amount.__name__ = "amount of dollars"  # argparse: "invalid amount of dollars value: 'x'"


def _micros(amount: Decimal | None, what: str) -> int | None:
    if amount is None:
        return None
    micros = amount.scaleb(6)
    if micros != int(micros):
        raise CommandError(f"{what}: {amount} dollars are not whole micro-dollars")
    return int(micros)


def _usd(micros: int | None) -> str | None:
    return None if micros is None else f"{Decimal(micros).scaleb(-6):f}"


def parse_time(text: str | None, what: str) -> int | None:
    """Return milliseconds since the epoch of a UTC day or an instant. Raises CommandError."""
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
        at = at.replace(tzinfo=UTC) if at.tzinfo is None else at
        at_ms = round(at.timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        hint = "expected 2026-11-21 or 2026-11-21T10:00:00Z"
        raise CommandError(f"{what}: invalid time {text[:40]!r}: {hint}") from error
    return max(0, at_ms)


def _instant(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
