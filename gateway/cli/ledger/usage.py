"""`trunkline usage`: sums of the ledger by tenant, key, model, day or hour.

The table fits the terminal: it has as many columns as there is room for, and short numbers.
`--csv` and `--json` have every column and exact numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, get_args

from msgspec import structs

from gateway.cli.database import open_database
from gateway.cli.result import CommandCall, CommandResult, Entry, cell_text, table_text
from gateway.cli.times import TIME_HELP, UNITS_MS, parse_period
from tenancy.accounting.exports import as_csv
from tenancy.accounting.focus_export import storage_by_tenant
from tenancy.accounting.usage import UsageGroup, UsageTotal, sum_tenants
from tenancy.accounting.usage import usage as total_usage
from tenancy.accounts.tenants import find_tenant
from tenancy.errors import BadName
from tenancy.ledger.epochs import ledger_epoch
from tenancy.pricing.charges import PICO_PER_DOLLAR, format_dollars
from tenancy.types import TOKEN_COLUMNS, format_utc, wall_ms

Row = dict[str, Any]
DAYS_MAX = 36_500
"""Longest period of `--days`."""
NAME_CHARACTERS_MAX = 24
"""A longer name is cut in the table."""
_MONEY = ("charge", "storage", "adjusted", "saved")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", metavar="NAME")
    parser.add_argument("--key", type=int, metavar="ID", help="only this key, by its key_id")
    parser.add_argument("--model", metavar="NAME", help="only this model")
    groups = ", ".join(get_args(UsageGroup))
    text = f"comma-separated, some of {groups} (default: tenant)"
    parser.add_argument("--group-by", default="tenant", metavar="NAMES", help=text)
    since = parser.add_mutually_exclusive_group()
    since.add_argument("--since", metavar="TIME", help=TIME_HELP)
    since.add_argument("--days", type=int, metavar="N", help="only the last N days")
    parser.add_argument("--until", metavar="TIME", help=f"{TIME_HELP}; exclusive")
    parser.add_argument("--csv", action="store_true", help="print CSV with every column")


def _run(call: CommandCall) -> CommandResult:
    """Return sums of ledger entries, adjustments and storage. Raises BadName and StoreError."""
    options, now_ms = call.options, wall_ms()
    groups = parse_groups(options.group_by)
    since_ms, until_ms = parse_period(options.since, options.until, now_ms)
    if options.days is not None:
        if not 1 <= options.days <= DAYS_MAX:
            message = f"--days: {options.days} is out of range; expected 1 to {DAYS_MAX}"
            raise BadName("bad_time", message)
        since_ms = now_ms - options.days * UNITS_MS["d"]
    has_storage = groups == ("tenant",) and options.key is None and options.model is None
    with open_database(call.config) as store:
        if options.tenant is not None:
            find_tenant(store, options.tenant)
        found = total_usage(
            store,
            tenant=options.tenant,
            key_id=options.key,
            model=options.model,
            since_ms=since_ms or 0,
            until_ms=until_ms,
            by=groups,
        )
        held = (
            storage_by_tenant(store, options.tenant, since_ms or 0, until_ms) if has_storage else {}
        )
        epoch = ledger_epoch(store).number
    if "tenant" not in groups:
        found = sum_tenants(found)
    there = {one.tenant for one in found}
    found = [*found, *(UsageTotal(name) for name in held if name not in there)]
    if has_storage:
        found.sort(key=lambda one: one.tenant)
    rows = [_row(one, groups, held.get(one.tenant, 0)) | {"ledger_epoch": epoch} for one in found]
    if options.csv:
        columns = (*_row(UsageTotal(""), groups, 0), "ledger_epoch")  # also without rows
        text = b"".join(as_csv(columns, rows)).decode().replace("\r\n", "\n").rstrip("\n")
        return CommandResult(text, rows)
    if not rows:
        return CommandResult("nothing yet", rows)
    return CommandResult(_table(rows, groups, call.columns), rows, has_heading=True)


def parse_groups(text: str) -> tuple[UsageGroup, ...]:
    """Return the groups of `--group-by day,model`, each at most once. Raises BadName."""
    known: tuple[UsageGroup, ...] = get_args(UsageGroup)
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in known]
    if not names or unknown or len(set(names)) < len(names) or {"hour", "day"} <= set(names):
        message = (
            f"--group-by: invalid groups {text[:80]!r}; expected some of {', '.join(known)}, each"
            " once, and hour or day, not both"
        )
        raise BadName("bad_group", message)
    return tuple(name for name in known if name in names)


def _row(one: UsageTotal, groups: Sequence[UsageGroup], storage_pico: int) -> Row:
    """Return a row of `--json` and `--csv`: the groups first, then counts, then money."""
    facts = structs.asdict(one)
    starts_ms = facts.pop("from_ms")
    start = "from", None if starts_ms is None else format_utc(starts_ms)
    names = {"tenant": "tenant", "key": "key_id", "model": "model", "user": "user"}
    parts = {group: (name, facts.pop(name)) for group, name in names.items()}
    parts |= {"hour": start, "day": start}
    counts = {name: facts.pop(name) for name in ("requests", *TOKEN_COLUMNS)}
    row: Row = dict(parts[group] for group in groups) | counts | facts
    row["hit_ratio"] = (
        round(one.cache_read_tokens / one.prompt_tokens, 6) if one.prompt_tokens else None
    )
    row["storage_pico"] = storage_pico
    for money in _MONEY:
        row[f"{money}_usd"] = format_dollars(row[f"{money}_pico"])
    return row


# --- the table -----------------------------------------------------------------------------------

_COLUMNS = (
    ("requests", "requests"),
    ("prompt", "prompt_tokens"),
    ("read", "cache_read_tokens"),
    ("hit %", "hit_ratio"),
    ("host", "host_cached_tokens"),
    ("disk", "disk_cached_tokens"),
    ("remote", "remote_cached_tokens"),
    ("written", "cache_write_tokens"),
    ("fresh", "fresh_tokens"),
    ("output", "output_tokens"),
    ("bill $", "bill_pico"),
    ("charge $", "charge_pico"),
    ("storage $", "storage_pico"),
    ("adjusted $", "adjusted_pico"),
    ("saved $", "saved_pico"),
)
"""Headings of the table, and the columns of a row."""
_BILLED = ("charge", "storage", "adjusted")
"""The parts of a bill."""
_LEAST = (
    *("host", "disk", "remote", "written", "fresh", "read"),
    *("charge $", "storage $", "adjusted $"),
)
"""Columns that a narrow terminal does without, the first ones first."""
_LEVELS = {name: f"{name}_cached_tokens" for name in ("host", "disk", "remote")}
"""Columns of the levels below the device, which a table has where something came from there."""


def _table(rows: Sequence[Row], groups: Sequence[UsageGroup], width: int) -> str:
    """Return the rows and their sum as a table of at most `width` columns, if that can be."""
    keys = [name for name in rows[0] if name in ("tenant", "key_id", "model", "user", "from")]
    rows = [row | {"bill_pico": sum(row[f"{part}_pico"] for part in _BILLED)} for row in rows]
    decimals = _decimals(rows)
    lines: list[dict[str, object]] = []
    for row in [*rows, *([_sum(rows)] if len(rows) > 1 else [])]:
        shown: dict[str, object] = {name: _name(name, row.get(name)) for name in keys}
        lines.append(shown | {title: _short(name, row[name], decimals) for title, name in _COLUMNS})
    if len(rows) > 1:
        lines[-1][keys[0]] = "total"
    right = [title for title, _ in _COLUMNS]
    has_parts = any(row["storage_pico"] or row["adjusted_pico"] for row in rows)
    empty = [] if has_parts else [f"{part} $" for part in _BILLED]  # the charge is the bill
    empty += [title for title, name in _LEVELS.items() if not any(row[name] for row in rows)]
    text = ""
    for left_out in range(len(_LEAST) + 1):
        hidden = {*empty, *_LEAST[:left_out]}
        table = [{n: v for n, v in line.items() if n not in hidden} for line in lines]
        text = table_text(table, right=right)
        if max(map(len, text.split("\n"))) <= width:
            break
    return text


def _sum(rows: Sequence[Row]) -> Row:
    total: Row = {
        name: sum(row[name] for row in rows) for _, name in _COLUMNS if name != "hit_ratio"
    }
    read, prompt = total["cache_read_tokens"], total["prompt_tokens"]
    return {**total, "hit_ratio": read / prompt if prompt else None}


def _name(column: str, value: object) -> str:
    text = cell_text(value)
    if column == "from" and isinstance(value, str):
        return value[:16].replace("T", " ")
    return text if len(text) <= NAME_CHARACTERS_MAX else f"{text[: NAME_CHARACTERS_MAX - 1]}…"


def _short(name: str, value: Any, decimals: int) -> str:
    if name.endswith("_pico"):
        return f"{Decimal(value).scaleb(-12):.{decimals}f}"
    if name == "hit_ratio":
        return "-" if value is None else f"{100 * value:.1f}"
    return short_count(value)


def _decimals(rows: Sequence[Row]) -> int:
    """Return the decimals of all amounts of a table: more for smaller ones."""
    largest = max(abs(row[f"{money}_pico"]) for row in rows for money in _MONEY)
    return 2 if largest >= 100 * PICO_PER_DOLLAR else 4 if largest >= PICO_PER_DOLLAR else 6


def short_count(count: int) -> str:
    """Return a count in at most six characters: 99999, 1.23M, 45.6G."""
    if count < 100_000:
        return str(count)
    for unit, size in (("k", 10**3), ("M", 10**6), ("G", 10**9), ("T", 10**12)):
        if count < 1_000 * size:
            return f"{count / size:.4g}{unit}"
    return f"{count / 10**12:.4g}T"


COMMANDS: Mapping[str, Entry] = {"usage": Entry(_add_arguments, _run)}
