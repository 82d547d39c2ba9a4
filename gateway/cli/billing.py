"""Commands of billing: `prices`, `budget`, `adjust`, `close`, `check-books`, `reconcile`, `export`.

They work while a server runs. Amounts are decimal dollars on the command line and exact integers
everywhere else.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path

import msgspec
from msgspec import structs

from gateway.cli.database import command_actor, open_database
from gateway.cli.result import (
    CommandCall,
    CommandError,
    CommandResult,
    Entry,
    Table,
    add_nothing,
    table_result,
    table_text,
)
from gateway.cli.times import TIME_HELP, parse_period, show_second
from gateway.dialects.validation import find_duplicate_key
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
from tenancy.types import wall_ms

FILE_BYTES_MAX = 1_000_000
"""Largest rate card file."""


# --- prices and budgets --------------------------------------------------------------------------


def _add_prices(parser: argparse.ArgumentParser) -> None:
    text = "rate card to add, with its prices in dollars per million tokens"
    parser.add_argument("name", nargs="?", metavar="NAME", help=text)
    for option in ("--input", "--output", "--cache-read"):
        parser.add_argument(option, type=_amount, metavar="USD")
    for option, text in (
        ("--cache-write", "price of writing in a retention class, such as 1h=0.50; repeat it"),
        ("--storage", "price of a million tokens held for an hour in a class; repeat it"),
    ):
        parser.add_argument(
            option, action="append", type=_class_price, metavar="CLASS=USD", help=text
        )
    parser.add_argument("--minimum", type=_amount, metavar="USD", help="least charge of a request")
    parser.add_argument("--model", default=ANY, help="model that the card is for (default: any)")
    parser.add_argument("--tier", default=ANY, help="tier that the card is for (default: any)")
    text = "add a rate card from a JSON file; its prices are whole micro-dollars"
    parser.add_argument("--add", type=Path, metavar="FILE", help=text)


def _prices(call: CommandCall) -> CommandResult:
    """List all versions of all rate cards, or add one."""
    options, config = call.options, call.config
    given = _card_of_options(options)
    if given is not None and options.add is not None:
        raise CommandError("--add is not allowed with NAME and prices: the file has them")
    with open_database(config, create=False) as store:
        if given is not None or options.add is not None:
            card = _read_card(options.add) if given is None else given
            config.check_card(card)
            card = add_card(store, wall_ms, card, command_actor())
            text = f"{card.rate_card_id} applies from {show_second(card.valid_from_ms)}"
            text += _small_prices(card)
            if card.tier not in (ANY, *(one.tier for one, _ in list_tenants(store))):
                text += f"; no tenant has the tier {card.tier!r} yet"
            return CommandResult(text, structs.asdict(card))
        rows = [_card_row(card) for card in load_cards(store)]
    if not rows:
        return CommandResult("no rate cards: nothing is charged", [])
    shown = [_in_dollars({name: row[name] for name in _PRICE_COLUMNS}) for row in rows]
    unit = "dollars per million tokens, of storage for an hour; minimum_charge: dollars"
    return CommandResult(f"{unit}\n{table_text(shown)}", rows)


_PRICE_COLUMNS = (
    *("id", "model", "tier", "input", "output", "cache_read", "cache_write", "storage"),
    *("minimum_charge", "breach_credit", "from", "until"),
)
"""Columns of a rate card in the printed table."""


def _card_row(card: RateCard) -> dict[str, object]:
    ends = card.valid_until_ms
    until = None if ends is None else show_second(ends)
    times = {"from": show_second(card.valid_from_ms), "until": until}
    return {"id": card.rate_card_id, **structs.asdict(card), **times}


def _in_dollars(row: dict[str, object]) -> dict[str, object]:
    """Return a row of the table with its whole micro-dollars as dollars."""
    for name in ("input", "output", "cache_read", "minimum_charge"):
        row[name] = _dollars(row[name])
    for name in ("cache_write", "storage"):
        prices = row[name]
        assert isinstance(prices, dict), "a rate card has both"
        row[name] = {one: _dollars(micros) for one, micros in prices.items()}
    return row


def _dollars(micros: object) -> str:
    text = f"{Decimal(str(micros)).scaleb(-6):f}"
    whole, _, rest = text.partition(".")
    return f"{whole}.{rest.rstrip('0').ljust(2, '0')}"


def _card_of_options(options: argparse.Namespace) -> RateCard | None:
    """Return the rate card that the options describe; None without a name. Raises CommandError."""
    prices = {
        name: _micros(amount, f"--{name.replace('_', '-')}")
        for name in ("input", "output", "cache_read")
        if (amount := getattr(options, name)) is not None
    }
    classes = {
        name: {one: _micros(amount, f"--{name.replace('_', '-')}") or 0 for one, amount in given}
        for name in ("cache_write", "storage")
        if (given := getattr(options, name))
    }
    if options.name is None:
        if prices or classes or options.minimum is not None:
            raise CommandError("NAME is required: trunkline prices NAME --input USD --output USD")
        return None
    if "input" not in prices or "output" not in prices:
        raise CommandError("--input USD and --output USD are required")
    fields = {"name": options.name, "model": options.model, "tier": options.tier}
    minimum = _micros(options.minimum, "--minimum") or 0
    return msgspec.convert({**fields, **prices, **classes, "minimum_charge": minimum}, RateCard)


def _class_price(text: str) -> tuple[str, Decimal]:
    name, _, amount = text.partition("=")
    if not name:
        raise ValueError(text)
    return name, _amount(amount)


_class_price.__name__ = "CLASS=USD"
SMALL_MICROS = 1_000
"""A price below a tenth of a cent per million tokens was probably meant in another unit."""


def _small_prices(card: RateCard) -> str:
    """Return a warning of prices that are probably meant in dollars, or per token."""
    prices = {
        **{name: getattr(card, name) for name in ("input", "output", "cache_read")},
        **{f"cache_write {name}": micros for name, micros in card.cache_write.items()},
        **{f"storage {name}": micros for name, micros in card.storage.items()},
    }
    small = [
        f"{name} ${_dollars(micros)}"
        for name, micros in prices.items()
        if 0 < micros < SMALL_MICROS and not name.startswith("storage")
    ]
    if not small:
        return ""
    return (
        f"; warning: below $0.001 per million tokens: {', '.join(small)}. A file has whole"
        " micro-dollars per million tokens: 3000000 is $3.00"
    )


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


def _budget(call: CommandCall) -> CommandResult:
    """Set a budget, or list budgets with their spent amounts."""
    options, config = call.options, call.config
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
            "key_id": state.budget.key_id or None,
            "window": state.budget.window,
            "hard_usd": _usd(state.budget.hard_micros),
            "soft_usd": _usd(state.budget.soft_micros),
            "spent_usd": format_dollars(state.spent_pico),
            "reserved_usd": format_dollars(state.reserved_pico),
            "over_soft": state.is_over_soft,
            "resets": show_second(state.resets_ms),
        }
        for state in states
    ]
    if not rows:
        return CommandResult("no budgets", [])
    shown = [row | {name: _six_decimals(row[name]) for name in _SPENT} for row in rows]
    return CommandResult(table_text(shown, right=_SPENT), rows, has_heading=True)


_SPENT = ("hard_usd", "soft_usd", "spent_usd", "reserved_usd")


def _six_decimals(dollars: object) -> str | None:
    """Return an exact amount as a table shows it."""
    return None if dollars is None else f"{Decimal(str(dollars)):.6f}"


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


def _adjust(call: CommandCall) -> CommandResult:
    """Book a credit or a debit on a ledger entry."""
    options, config = call.options, call.config
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


def _close(call: CommandCall) -> CommandResult:
    """Close complete days, or list closed ones. Keep the printed digests elsewhere."""
    options, config = call.options, call.config
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


def _check_books(call: CommandCall) -> CommandResult:
    """Check the ledger. Status 1 if a check fails."""
    with open_database(call.config, create=False) as store:
        findings = check_books(store, partial(call.show, "checked"))
    text = "\n".join(findings) if findings else "all checks passed"
    return CommandResult(text, findings, 1 if findings else 0)


def _reconcile(call: CommandCall) -> CommandResult:
    """Compare ledger, engine and metrics by engine epoch. Status 1 if they differ."""
    with open_database(call.config, create=False) as store:
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
        rows.append({**row, "ledger_epoch": life})
    if not rows:
        return CommandResult("no engine epoch recorded yet", [])
    return table_result(rows, 1 if any(epoch.has_mismatch for epoch in epochs) else 0)


# --- exports -------------------------------------------------------------------------------------


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
                call.write(chunk)
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


COMMANDS: Mapping[str, Entry] = {
    "prices": Entry(_add_prices, _prices),
    "budget": Entry(_add_budget, _budget),
    "adjust": Entry(_add_adjust, _adjust),
    "close": Entry(_add_close, _close),
    "check-books": Entry(add_nothing, _check_books),
    "reconcile": Entry(add_nothing, _reconcile),
    "export": Entry(_add_export, _export),
}
