"""What usage costs: rate cards and exact charges. Pure.

A price is whole micro-dollars per million tokens, and so is whole pico-dollars per token: tokens
times price is an exact number of pico-dollars, and nothing is rounded before the invoice. (Storage
alone is divided, by the seconds of an hour, and rounded down to the pico-dollar per booked row.)
It knows no database and no clock; `rate_cards` keeps the cards, `bookkeeping` charges by them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from tenancy.errors import BadPrice
from tenancy.types import FREE, UsageEntry

PICO_PER_MICRO = 1_000_000
PRICE_MAX = 10**12
"""A dollar per token: beyond it a price is a slip of the unit."""

CHARGE_MAX = 2**63 - 1
SECONDS_PER_HOUR = 3_600
LATEST_MS = 253_370_764_800_000
"""The year 9999: the calendar ends there."""

ANY = "*"
CLASSES_MAX = 32
CHARGED = frozenset({"done", "cancelled", "interrupted"})
"""Endings that are paid for: a whole answer, one that its client broke off, and of one that died
with its server what had been delivered. Failures of ours are free, whatever they used."""

BreachCredit = Literal["none", "read_price", "write_price"]

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_CURRENCY = re.compile(r"[A-Z]{3}")


class RateCard(Struct, frozen=True, forbid_unknown_fields=True):
    """Prices for one model (or "*") and one tier (or "*"), from an instant to another.

    Prices are whole micro-dollars per million tokens; `storage` per million tokens held for an
    hour. A class that `cache_write` does not name costs what "*" names there, else what input
    costs; one that `storage` does not name costs what "*" names there, else nothing.
    `minimum_charge` is micro-dollars for a request, where one is charged. `breach_credit`: what is
    given back for tokens that were promised to a request and had to be computed again.
    """

    name: str
    model: str = ANY
    tier: str = ANY
    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: dict[str, int] = {}
    storage: dict[str, int] = {}
    minimum_charge: int = 0
    currency: str = "USD"
    valid_from_ms: int = 0
    valid_until_ms: int | None = None
    version: int = 1
    breach_credit: BreachCredit = "none"

    @property
    def rate_card_id(self) -> str:
        """As entries carry it."""
        return self.name if self.name == FREE else f"{self.name}@{self.version}"

    def write_price(self, retention: str) -> int:
        """For writing a token in a class."""
        return self.cache_write.get(retention, self.cache_write.get(ANY, self.input))

    def storage_price(self, retention: str) -> int:
        """For holding a million tokens of a class for an hour."""
        return self.storage.get(retention, self.storage.get(ANY, 0))


FREE_CARD = RateCard(name=FREE)


class LineItem(Struct, frozen=True):
    """`tokens` of a component at `itemize` pico-dollars each. `component`: `input`, `output`,
    `cache_read`, `cache_write:CLASS`, or `minimum` for what lifts a charge to it."""

    component: str
    tokens: int
    price: int
    pico: int


class Charge(Struct, frozen=True):
    """What a request costs, with its parts: `pico` is their sum."""

    rate_card_id: str
    currency: str
    pico: int
    items: tuple[LineItem, ...]


def itemize(card: RateCard, usage: UsageEntry) -> Charge:
    """The exact charge. Raises BadPrice for more than a charge can hold (9.2 million dollars)."""
    items: list[LineItem] = []
    if usage.ending in CHARGED:
        counts = {
            "input": (usage.fresh_tokens, card.input),
            "cache_read": (usage.cache_read_tokens, card.cache_read),
        }
        for retention, tokens in write_tokens_by_class(usage).items():
            counts[f"cache_write:{retention}"] = (tokens, card.write_price(retention))
        counts["output"] = (usage.output_tokens, card.output)
        items = [LineItem(name, n, each, n * each) for name, (n, each) in counts.items() if n]
    pico = compute_charge(card, usage)
    missing = pico - sum(item.pico for item in items)
    if missing:
        items.append(LineItem("minimum", 0, 0, missing))
    return Charge(card.rate_card_id, card.currency, pico, tuple(items))


def compute_charge(card: RateCard, usage: UsageEntry) -> int:
    """The pico-dollars of `itemize`, which raises as this does, without its parts."""
    if usage.ending not in CHARGED:
        return 0
    tokens = usage.fresh_tokens + usage.cache_read_tokens + usage.output_tokens
    pico = usage.fresh_tokens * card.input
    pico += usage.cache_read_tokens * card.cache_read
    pico += usage.output_tokens * card.output
    for retention, written in write_tokens_by_class(usage).items():
        tokens += written
        pico += written * card.write_price(retention)
    if tokens:
        pico = max(pico, card.minimum_charge * PICO_PER_MICRO)
    if pico > CHARGE_MAX:
        raise BadPrice("charge_too_large", "A single charge beyond 9.2 million dollars.")
    return pico


def compute_savings(card: RateCard, usage: UsageEntry) -> int:
    """Pico-dollars by which the prompt was cheaper than if all of it had been plain input.

    Reads save and dear writes cost, so that a retention class that does not pay shows below zero.
    """
    if usage.ending not in CHARGED:
        return 0
    saved = usage.cache_read_tokens * (card.input - card.cache_read)
    for retention, tokens in write_tokens_by_class(usage).items():
        saved += tokens * (card.input - card.write_price(retention))
    return max(-CHARGE_MAX, min(CHARGE_MAX, saved))


def compute_breach_credit(card: RateCard, usage: UsageEntry) -> int:
    """Pico-dollars to be given back because a promise was not kept: for each token that was read by
    contract and computed again its price by the card's policy, at most the request's charge.

    Where tokens of several classes were read, those of the dearest count as lost first.
    """
    lost = usage.recomputed_promised_tokens
    if card.breach_credit == "none" or not lost:
        return 0
    if card.breach_credit == "read_price":
        pico = lost * card.cache_read
    else:
        pico = 0
        classes = usage.read or {ANY: lost}
        for retention in sorted(classes, key=card.write_price, reverse=True):
            tokens = min(lost, classes[retention])
            pico += tokens * card.write_price(retention)
            lost -= tokens
    return min(pico, itemize(card, usage).pico)


def max_charge(card: RateCard, input_tokens: int, output_tokens: int) -> int:
    """Pico-dollars that a request cannot exceed: each prompt token at the dearest thing that can
    happen to it, and all the output it may have. Raises BadPrice as `itemize` does."""
    if card is FREE_CARD:
        return 0
    dearest = max(card.input, card.cache_read, *card.cache_write.values())
    pico = input_tokens * dearest + output_tokens * card.output
    pico = max(pico, card.minimum_charge * PICO_PER_MICRO)
    if pico > CHARGE_MAX:
        raise BadPrice("charge_too_large", "This request could cost beyond 9.2 million dollars.")
    return pico


def storage_charge(card: RateCard, retention: str, token_seconds: int) -> int:
    """Pico-dollars for holding tokens, rounded down once."""
    return token_seconds * card.storage_price(retention) // SECONDS_PER_HOUR


def format_dollars(pico: int) -> str:
    """Exact: twelve decimals."""
    whole, rest = divmod(abs(pico), 10**12)
    return f"{'-' if pico < 0 else ''}{whole}.{rest:012}"


def write_tokens_by_class(usage: UsageEntry) -> Mapping[str, int]:
    """Written tokens by class; where the classes are not known, all under "*"."""
    if usage.write or not usage.cache_write_tokens:
        return usage.write
    return {ANY: usage.cache_write_tokens}


def check_card(card: RateCard) -> None:
    """Raises BadPrice for what cannot be, saying what came and what would be right."""
    if not _NAME.fullmatch(card.name):
        raise _invalid(
            "name", f"{card.name[:80]!r} is no name: use 1 to 64 of a-z, 0-9, -, _ and ."
        )
    if card.name == FREE:
        raise _invalid("name", f"{FREE!r} is what holds where there is no card; name it otherwise")
    if not 0 < len(card.model) <= 256 or not card.model.isprintable():
        raise _invalid("model", f"{card.model[:80]!r} is no model; name one, or write * for all")
    if card.tier != ANY and not _NAME.fullmatch(card.tier):
        raise _invalid(
            "tier", f"{card.tier[:80]!r} is no tenant's tier; name one, or write * for all"
        )
    if not _CURRENCY.fullmatch(card.currency):
        raise _invalid("currency", f"{card.currency[:80]!r} is no currency code such as USD")
    prices = {name: getattr(card, name) for name in ("input", "output", "cache_read")}
    for group in ("cache_write", "storage"):
        classes: dict[str, int] = getattr(card, group)
        if len(classes) > CLASSES_MAX:
            raise _invalid(group, f"{len(classes)} classes are more than {CLASSES_MAX}")
        prices |= {f"{group}.{name}": value for name, value in classes.items()}
    for name, value in prices.items():
        if not 0 <= value <= PRICE_MAX:
            hint = f"is not between 0 and {PRICE_MAX} micro-dollars per million tokens"
            raise _invalid(name, f"a price of {value} {hint}")
    if not 0 <= card.minimum_charge <= PRICE_MAX:
        hint = f"is not between 0 and {PRICE_MAX} micro-dollars"
        raise _invalid("minimum_charge", f"{card.minimum_charge} {hint}")
    for what, at_ms in (
        ("valid_from_ms", card.valid_from_ms),
        ("valid_until_ms", card.valid_until_ms or 0),
    ):
        if not 0 <= at_ms <= LATEST_MS:
            raise _invalid(what, f"{at_ms} ms is no time between 1970 and the year 9999")
    if card.valid_until_ms is not None and card.valid_until_ms <= card.valid_from_ms:
        raise _invalid("valid_until_ms", "a card has to end after it begins")


def _invalid(field: str, message: str) -> BadPrice:
    return BadPrice("bad_rate_card", f"{field}: {message}")
