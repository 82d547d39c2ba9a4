"""`trunkline prices`: lists, adds and ends rate cards. Amounts are decimal dollars; those of a file
are whole micro-dollars. A running server sees a new card within a second."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path

import msgspec
from msgspec import structs

from gateway.cli.arguments import UsageError, named
from gateway.cli.database import command_actor, open_database
from gateway.cli.ledger.amounts import amount_of_dollars, whole_micros
from gateway.cli.result import CommandCall, CommandResult, Entry, table_text
from gateway.cli.times import parse_time, show_second
from gateway.dialects.validation import find_duplicate_key
from tenancy.accounts.tenants import list_tenants
from tenancy.pricing.charges import ANY, RateCard
from tenancy.pricing.rate_cards import add_card, end_card, load_cards
from tenancy.storage.interface import Store
from tenancy.types import wall_ms

ACTIONS = ("list", "add", "end")
ADD_USAGE = "trunkline prices add NAME --input USD --output USD"
FREE_TEXT = ": nothing is charged"
FILE_BYTES_MAX = 1_000_000
"""Largest rate card file."""


def _add_prices(parser: argparse.ArgumentParser) -> None:
    text = f"{', '.join(ACTIONS)} (default: list)"
    parser.add_argument("action", nargs="?", choices=ACTIONS, default="list", help=text)
    text = "the rate card; its prices are dollars per million tokens"
    parser.add_argument("name", nargs="?", metavar="NAME", help=text)
    for option in ("--input", "--output", "--cache-read"):
        parser.add_argument(option, type=amount_of_dollars, metavar="USD")
    for option, text in (
        ("--cache-write", "price of writing in a retention class, such as 1h=0.50; repeat it"),
        ("--storage", "price of a million tokens held for an hour in a class; repeat it"),
    ):
        parser.add_argument(
            option, action="append", type=_class_price, metavar="CLASS=USD", help=text
        )
    parser.add_argument(
        "--minimum", type=amount_of_dollars, metavar="USD", help="least charge of a request"
    )
    parser.add_argument("--model", default=ANY, help="model that the card is for (default: any)")
    parser.add_argument("--tier", default=ANY, help="tier that the card is for (default: any)")
    text = "add the rate card of a JSON file; its prices are whole micro-dollars"
    parser.add_argument("--file", type=Path, metavar="FILE", help=text)
    text = "when the rate card ends: 2027-01-01 or 2027-01-01T10:00:00Z (default of end: now)"
    parser.add_argument("--until", metavar="TIME", help=text)


def _prices(call: CommandCall) -> CommandResult:
    """List all versions of rate cards, add a card, or end one."""
    options, prices = call.options, _prices_of(call.options)
    if options.action != "add" and (prices or options.file is not None):
        raise UsageError(f"prices are not allowed with {options.action}; expected {ADD_USAGE}")
    with open_database(call.config) as store:
        if options.action == "add":
            return _add(call, store, prices)
        if options.action == "end":
            if options.name is None:
                raise UsageError("NAME is required: trunkline prices end NAME")
            until_ms = parse_time(options.until, "--until", wall_ms())
            card = end_card(store, wall_ms, options.name, until_ms, command_actor())
            assert card.valid_until_ms is not None, "it was given an end"
            text = f"{card.rate_card_id} ends at {show_second(card.valid_until_ms)}"
            return CommandResult(text, structs.asdict(card))
        if options.until is not None:
            raise UsageError("--until is not allowed with list")
        cards = [one for one in load_cards(store) if options.name in (None, one.name)]
    rows = [_card_row(card) for card in cards]
    if not rows:
        name = "" if options.name is None else f" of the name {options.name!r}"
        return CommandResult(f"no rate cards{name}" + ("" if name else FREE_TEXT), [])
    shown = [_in_dollars({name: row[name] for name in _PRICE_COLUMNS}) for row in rows]
    unit = "dollars per million tokens, of storage for an hour; minimum_charge: dollars"
    return CommandResult(f"{unit}\n{table_text(shown)}", rows)


def _add(call: CommandCall, store: Store, prices: Mapping[str, object]) -> CommandResult:
    """Add the card of the options or of a file."""
    options, config = call.options, call.config
    if options.file is None:
        card = _card_of_options(options, prices)
    elif options.name is not None or prices or options.until is not None:
        raise UsageError("--file is not allowed with NAME, prices or --until: the file has them")
    else:
        card = _read_card(options.file)
    config.check_card(card)
    card = add_card(store, wall_ms, card, command_actor())
    text = f"{card.rate_card_id} applies from {show_second(card.valid_from_ms)}"
    text += _small_prices(card)
    if card.tier not in (ANY, *(one.tier for one in list_tenants(store))):
        text += f"; no tenant has the tier {card.tier!r} yet"
    return CommandResult(text, structs.asdict(card))


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


def _prices_of(options: argparse.Namespace) -> dict[str, object]:
    """Return the given prices, in whole micro-dollars. Raises UsageError."""
    prices: dict[str, object] = {
        name: whole_micros(amount, f"--{name.replace('_', '-')}")
        for name in ("input", "output", "cache_read")
        if (amount := getattr(options, name)) is not None
    }
    classes = {
        name: {
            one: whole_micros(amount, f"--{name.replace('_', '-')}") or 0 for one, amount in given
        }
        for name in ("cache_write", "storage")
        if (given := getattr(options, name))
    }
    if options.minimum is not None:
        prices["minimum_charge"] = whole_micros(options.minimum, "--minimum")
    return {**prices, **classes}


def _card_of_options(options: argparse.Namespace, prices: Mapping[str, object]) -> RateCard:
    """Return the rate card that the options describe. Raises UsageError."""
    if options.name is None:
        raise UsageError(f"NAME is required: {ADD_USAGE}")
    if "input" not in prices or "output" not in prices:
        raise UsageError("--input USD and --output USD are required")
    until_ms = parse_time(options.until, "--until", wall_ms())
    fields = {"name": options.name, "model": options.model, "tier": options.tier}
    return msgspec.convert({**fields, **prices, "valid_until_ms": until_ms}, RateCard)


@named("price", "CLASS=USD, such as 5m=3.75")
def _class_price(text: str) -> tuple[str, Decimal]:
    name, _, amount = text.partition("=")
    if not name:
        raise ValueError(text)
    return name, amount_of_dollars(amount)


SMALL_MICROS = 1_000
"""A price below a tenth of a cent per million tokens was probably meant in another unit."""


def _small_prices(card: RateCard) -> str:
    """Return a warning of prices that are probably meant in dollars, or per token. Storage may cost
    as little."""
    prices = {
        **{name: getattr(card, name) for name in ("input", "output", "cache_read")},
        **{f"cache_write {name}": micros for name, micros in card.cache_write.items()},
    }
    small = [
        f"{name} ${_dollars(micros)}"
        for name, micros in prices.items()
        if 0 < micros < SMALL_MICROS
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
        raise UsageError(f"{path} is not a rate card: {error}") from error
    if duplicate is not None:
        raise UsageError(f"{path} is not a rate card: duplicate key {duplicate!r}")
    return card


COMMANDS: Mapping[str, Entry] = {
    "prices": Entry(_add_prices, _prices),
}
