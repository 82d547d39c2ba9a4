"""Rate cards and exact charges, as pure functions.

A price is whole micro-dollars per million tokens, which equals whole pico-dollars per token: tokens
times price is an exact number of pico-dollars, and nothing is rounded before the invoice. Only
storage is divided, by the seconds of an hour, and rounded down to the pico-dollar per booked row.
The module knows no database and no clock. `rate_cards` stores the cards; `ledger.transactions`
charges by them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from tenancy.errors import BadPrice
from tenancy.types import FREE, LATEST_MS, UsageEntry

PICO_PER_MICRO, PICO_PER_DOLLAR = 10**6, 10**12
PRICE_MAX = 10**12
"""A dollar per token. A higher price is a mistake of the unit."""

CHARGE_MAX = 2**63 - 1
"""The largest charge in pico-dollars (9.2 million dollars): a signed 64-bit integer."""
SECONDS_PER_HOUR = 3_600

ANY = "*"
"""Matches every model, tier or retention class."""
CLASSES_MAX = 32
"""The most retention classes that a card may price."""
Payer = Literal["client", "operator"]

PAYERS: Mapping[str, Payer] = {
    "done": "client",
    "cancelled": "client",
    "interrupted": "client",
    # the request's own schema, prompt, settings or budget of memory ended it
    "attention_invalid": "client",
    "attention_not_allowed": "client",
    "attention_not_available": "client",
    "attention_with_prompt_logprobs": "client",
    "context_exceeded": "client",
    "context_length_exceeded": "client",
    "grammar_dead_end": "client",
    "grammar_invalid": "client",
    "grammar_too_big": "client",
    "grammar_unsupported": "client",
    "invalid_json_schema": "client",
    "invalid_value": "client",
    "json_schema_too_complex": "client",
    "kv_exceeded": "client",
    "prompt_empty": "client",
    "token_out_of_range": "client",
    "unsupported_value": "client",
    # the memory was promised to tenants, this one among them
    "cache_memory_promised": "client",
    "kv_promised": "client",
    # the request never ran
    "duplicate_request": "operator",
    "engine_starting": "operator",
    "engine_unavailable": "operator",
    "not_ready": "operator",
    "overloaded": "operator",
    "queue_full": "operator",
    "queue_timeout": "operator",
    "timeout": "operator",
    # a stop of the server cut it
    "draining": "operator",
    "shutting_down": "operator",
    # the server failed
    "answer_lost": "operator",
    "engine_died": "operator",
    "engine_restarting": "operator",
    "failed": "operator",
    "internal_error": "operator",
    "ledger_unavailable": "operator",
    "nan_logits": "operator",
    "poison_request": "operator",
    "step_failed": "operator",
}
"""Who pays for what a request used, by its ending.

The rule: delivered tokens are charged at every ending, unless the fault is the operator's.
`interrupted` is a request that lost its server: its entry has only what the client had received.
"""

BreachCredit = Literal["none", "read_price", "write_price"]

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_CURRENCY = re.compile(r"[A-Z]{3}")


class RateCard(Struct, frozen=True, forbid_unknown_fields=True):
    """Prices for one model (or "*") and one tier (or "*"), for a time range.

    Prices are whole micro-dollars per million tokens; `storage` is per million tokens held for an
    hour. A class without a price in `cache_write` costs the price of "*" there, else the input
    price; in `storage`, the price of "*" there, else nothing. `minimum_charge`: micro-dollars per
    request that used anything. `breach_credit`: the price that is credited for promised tokens that
    had to be computed again.
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
        """The id that entries contain: name and version."""
        return self.name if self.name == FREE else f"{self.name}@{self.version}"

    def write_price(self, retention: str) -> int:
        """Return the price of writing a token in a class, in pico-dollars."""
        return self.cache_write.get(retention, self.cache_write.get(ANY, self.input))

    def storage_price(self, retention: str) -> int:
        """Return the price of a million tokens of a class held for an hour, in micro-dollars."""
        return self.storage.get(retention, self.storage.get(ANY, 0))


FREE_CARD = RateCard(name=FREE)


class LineItem(Struct, frozen=True):
    """`tokens` of a component at `price` pico-dollars each."""

    component: str
    """`input`, `output`, `cache_read`, `cache_write:CLASS`, or `minimum` for the amount that raises
    a charge to the minimum."""
    tokens: int
    price: int
    pico: int


class Charge(Struct, frozen=True):
    """The charge of a request with its line items; `pico` is their sum."""

    rate_card_id: str
    currency: str
    pico: int
    items: tuple[LineItem, ...]


def is_charged(ending: str) -> bool:
    """Return whether the client pays for a request with this ending. An unknown ending is charged:
    a new failure must not become a way to be answered for nothing."""
    return PAYERS.get(ending, "client") == "client"


def itemize(card: RateCard, usage: UsageEntry) -> Charge:
    """Return the exact charge with its line items.

    Raises BadPrice if it exceeds `CHARGE_MAX` (9.2 million dollars).
    """
    items: list[LineItem] = []
    if is_charged(usage.ending):
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
    """Return the pico-dollars of `itemize` without the items. Raises BadPrice as it does."""
    if not is_charged(usage.ending):
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
        raise BadPrice("charge_too_large", "The charge exceeds 9.2 million dollars.")
    return pico


def compute_savings(card: RateCard, usage: UsageEntry) -> int:
    """Return by how many pico-dollars caching made the prompt cheaper than plain input.

    Reads save and expensive writes cost, so a retention class that does not pay is below zero.
    """
    if not is_charged(usage.ending):
        return 0
    saved = usage.cache_read_tokens * (card.input - card.cache_read)
    for retention, tokens in write_tokens_by_class(usage).items():
        saved += tokens * (card.input - card.write_price(retention))
    return max(-CHARGE_MAX, min(CHARGE_MAX, saved))


def compute_breach_credit(card: RateCard, usage: UsageEntry) -> int:
    """Return the pico-dollars to credit for a broken promise.

    Each token that the contract read and the engine computed again is credited by the card's
    policy, up to the request's charge. With several classes, tokens of the most expensive count as
    lost first.
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
    """Return the pico-dollars that a request cannot exceed.

    Each prompt token counts at the card's highest price for it, and the output at its maximum.
    Raises BadPrice as `itemize` does.
    """
    if card is FREE_CARD:
        return 0
    dearest = max(card.input, card.cache_read, *card.cache_write.values())
    pico = input_tokens * dearest + output_tokens * card.output
    pico = max(pico, card.minimum_charge * PICO_PER_MICRO)
    if pico > CHARGE_MAX:
        raise BadPrice("charge_too_large", "The request could cost more than 9.2 million dollars.")
    return pico


def storage_charge(card: RateCard, retention: str, token_seconds: int) -> int:
    """Return the pico-dollars for holding tokens, rounded down once."""
    return token_seconds * card.storage_price(retention) // SECONDS_PER_HOUR


def format_dollars(pico: int) -> str:
    """Format pico-dollars as dollars, exactly: twelve decimals."""
    whole, rest = divmod(abs(pico), 10**12)
    return f"{'-' if pico < 0 else ''}{whole}.{rest:012}"


def write_tokens_by_class(usage: UsageEntry) -> Mapping[str, int]:
    """Return the written tokens by class; all under "*" if the classes are not known."""
    if usage.write or not usage.cache_write_tokens:
        return usage.write
    return {ANY: usage.cache_write_tokens}


def check_card(card: RateCard) -> None:
    """Raise BadPrice if a field of the card is invalid."""
    if not _NAME.fullmatch(card.name):
        raise _invalid(
            "name",
            f"invalid name: {card.name[:80]!r}; expected 1 to 64 of a-z, 0-9, -, _ and .",
        )
    if card.name == FREE:
        raise _invalid("name", f"reserved name: {FREE!r}; expected another name")
    if not 0 < len(card.model) <= 256 or not card.model.isprintable():
        raise _invalid("model", f"invalid model: {card.model[:80]!r}; expected a model name or *")
    if card.tier != ANY and not _NAME.fullmatch(card.tier):
        raise _invalid("tier", f"invalid tier: {card.tier[:80]!r}; expected a tier name or *")
    if not _CURRENCY.fullmatch(card.currency):
        raise _invalid(
            "currency", f"invalid currency: {card.currency[:80]!r}; expected a code such as USD"
        )
    prices = {name: getattr(card, name) for name in ("input", "output", "cache_read")}
    for group in ("cache_write", "storage"):
        classes: dict[str, int] = getattr(card, group)
        if len(classes) > CLASSES_MAX:
            raise _invalid(group, f"too many classes: {len(classes)}; limit {CLASSES_MAX}")
        prices |= {f"{group}.{name}": value for name, value in classes.items()}
    for name, value in prices.items():
        if not 0 <= value <= PRICE_MAX:
            hint = f"expected 0 to {PRICE_MAX} micro-dollars per million tokens"
            raise _invalid(name, f"price out of range: {value}; {hint}")
    if not 0 <= card.minimum_charge <= PRICE_MAX:
        hint = f"expected 0 to {PRICE_MAX} micro-dollars"
        raise _invalid("minimum_charge", f"out of range: {card.minimum_charge}; {hint}")
    for what, at_ms in (
        ("valid_from_ms", card.valid_from_ms),
        ("valid_until_ms", card.valid_until_ms or 0),
    ):
        if not 0 <= at_ms <= LATEST_MS:
            raise _invalid(what, f"out of range: {at_ms} ms; expected a time between 1970 and 9999")
    if card.valid_until_ms is not None and card.valid_until_ms <= card.valid_from_ms:
        raise _invalid("valid_until_ms", "expected a time after valid_from_ms")


def _invalid(field: str, message: str) -> BadPrice:
    return BadPrice("bad_rate_card", f"{field}: {message}")
