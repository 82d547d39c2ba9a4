"""Costs in the format of FOCUS 1.2: one row per tenant, key, model, component and hour.

FOCUS is the FinOps Foundation's common format of cloud bills. The rows have its columns that apply
to tokens, and five of our own (`x_`). The sum of BilledCost is what the ledger charged, with
adjustments and storage, to the pico-dollar. The module knows no file formats; `exports` writes
files.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

from msgspec import Struct

from tenancy.accounting.exports import Rows, pages
from tenancy.pricing.budgets import window_of
from tenancy.pricing.charges import (
    SECONDS_PER_HOUR,
    RateCard,
    format_dollars,
    itemize,
    storage_charge,
    write_tokens_by_class,
)
from tenancy.pricing.rate_cards import RateCards, load_cards
from tenancy.storage.interface import Row, Store
from tenancy.types import HOUR_MS, format_utc

PROVIDER = "Trunkline"
COLUMNS = (
    *("BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency"),
    *("BillingPeriodStart", "BillingPeriodEnd", "ChargeCategory", "ChargeClass"),
    *("ChargeDescription", "ChargeFrequency", "ChargePeriodStart", "ChargePeriodEnd"),
    *("ConsumedQuantity", "ConsumedUnit", "ContractedCost", "EffectiveCost", "InvoiceIssuerName"),
    *("ListCost", "ListUnitPrice", "PricingCategory", "PricingQuantity", "PricingUnit"),
    *("ProviderName", "PublisherName", "ResourceId", "ResourceType", "ServiceCategory"),
    *("ServiceName", "SkuId", "SkuMeter", "SkuPriceId", "SubAccountId", "SubAccountName", "Tags"),
    *("x_Requests", "x_UncachedCost", "x_CacheSavings", "x_BilledPico", "x_RateCard"),
)
"""The columns of a row."""


class HeldStorage(Struct, frozen=True):
    """Token-seconds held in a retention class, and their charge."""

    retention: str
    token_seconds: int
    pico: int


class _Group(Struct, frozen=True):
    """The key of a usage row."""

    tenant: str
    tenant_id: int
    key_id: int
    model: str
    component: str
    hour_ms: int
    rate_card_id: str


class _Sum(Struct):
    """Sums of a row."""

    tokens: int = 0
    priced: int = 0
    """The tokens that were charged."""
    pico: int = 0
    uncached: int = 0
    requests: int = 0


def cost_rows(
    store: Store, tenant: str | None, since_ms: int, until_ms: int | None, account: str
) -> Rows:
    """Yield the rows booked in a period, with `COLUMNS`. `account`: the billing account.

    O(entries) time; memory for one row per tenant, key, model, component and hour.
    """
    cards = RateCards(load_cards(store))
    for group, total in _sum_entries(store, cards, tenant, since_ms, until_ms).items():
        card = cards.card(group.rate_card_id)
        yield _usage_row(account, card, group, total)
    yield from _adjustment_rows(store, cards, tenant, since_ms, until_ms, account)
    yield from _storage_rows(store, cards, tenant, since_ms, until_ms, account)


def _sum_entries(
    store: Store, cards: RateCards, tenant: str | None, since_ms: int, until_ms: int | None
) -> dict[_Group, _Sum]:
    sums: dict[_Group, _Sum] = {}
    for _, booked_ms, name, entry in pages(store, tenant, since_ms, until_ms):
        card = cards.card(entry.rate_card_id)
        hour_ms = booked_ms // HOUR_MS * HOUR_MS
        charged = itemize(card, entry)
        tokens = {
            "input": entry.fresh_tokens,
            "cache_read": entry.cache_read_tokens,
            **{
                f"cache_write:{kind}": count for kind, count in write_tokens_by_class(entry).items()
            },
            "output": entry.output_tokens,
            "minimum": 0,
        }
        pico = {item.component: item.pico for item in charged.items}
        for component, count in tokens.items():
            if count or component in pico:
                group = _Group(
                    *(name, entry.tenant_id, entry.key_id, entry.model),
                    *(component, hour_ms, entry.rate_card_id),
                )
                one = sums.setdefault(group, _Sum())
                one.tokens += count
                one.priced += count if charged.items else 0
                one.pico += pico.get(component, 0)
                one.requests += 1
                if charged.items:
                    plain = card.output if component == "output" else card.input
                    one.uncached += count * plain if count else pico.get(component, 0)
    return sums


def _adjustment_rows(
    store: Store,
    cards: RateCards,
    tenant: str | None,
    since_ms: int,
    until_ms: int | None,
    account: str,
) -> Rows:
    """Yield one row per adjustment."""
    for name, reason, amount, booked_ms, entry_ms, *entry in store.query(
        "select name, reason, amount_pico, a.booked_ms, ledger.booked_ms, ledger.tenant_id,"
        " key_id, model, rate_card_id, request_id from adjustments as a"
        " join ledger using (request_id)"
        " join tenants on tenants.tenant_id = a.tenant_id"
        " where (cast(?1 as text) is null or name = ?1)"
        " and a.booked_ms >= ?2 and (cast(?3 as bigint) is null or a.booked_ms < ?3)"
        " order by number",
        (tenant, since_ms, until_ms),
    ):
        tenant_id, key_id, model, rate_card_id, request_id = entry
        hour_ms = booked_ms // HOUR_MS * HOUR_MS
        group = _Group(name, tenant_id, key_id, model, "adjustment", hour_ms, rate_card_id)
        category = "Credit" if amount < 0 else "Adjustment"
        total = _Sum(pico=amount, uncached=amount, requests=1)
        text = f"{reason} (request {request_id})"
        card = cards.card(rate_card_id)
        # FOCUS: a correction refers to a month that was invoiced before.
        is_late = window_of("month", booked_ms) != window_of("month", entry_ms)
        charge_class = "Correction" if is_late else None
        yield _row(account, card, group, total, category, charge_class, text)


def storage(
    store: Store, tenant: str | None, since_ms: int, until_ms: int | None
) -> list[HeldStorage]:
    """Return held storage by class, for the hours that begin in the period.

    Each hour has the price it was booked at, so the sum equals that of the cost rows. O(tenants *
    hours * classes).
    """
    cards = RateCards(load_cards(store))
    found: dict[str, HeldStorage] = {}
    for _, _, _, _, name, card_id, seconds in _storage_hours(store, tenant, since_ms, until_ms):
        before = found.get(name, HeldStorage(name, 0, 0))
        pico = storage_charge(cards.card(card_id), name, seconds)
        found[name] = HeldStorage(name, before.token_seconds + seconds, before.pico + pico)
    return [found[name] for name in sorted(found)]


def storage_by_tenant(
    store: Store, tenant: str | None, since_ms: int, until_ms: int | None
) -> dict[str, int]:
    """Return the storage charge in pico-dollars of each tenant with a price; see `storage`.

    The database sums each hour's whole quotient and its rounded-down remainder. O(hours * prices)
    there.
    """
    values = (tenant, since_ms, until_ms)
    kinds = store.query(f"select distinct class, rate_card_id {_STORAGE_HOURS}", values)
    cards = RateCards(load_cards(store))
    found: dict[str, int] = {}
    for retention, card_id in kinds:
        rate = cards.card(card_id).storage_price(retention)
        if rate:
            for name, hours, rest in store.query(
                f"select name, sum(token_seconds / {SECONDS_PER_HOUR}),"
                f" sum(token_seconds % {SECONDS_PER_HOUR} * ?4 / {SECONDS_PER_HOUR})"
                f" {_STORAGE_HOURS}"
                " and class = ?5 and rate_card_id = ?6 group by name",
                (*values, rate, retention, card_id),
            ):
                found[name] = found.get(name, 0) + hours * rate + rest
    return found


_STORAGE_HOURS = (
    "from storage_hours join tenants using (tenant_id)"
    " where (cast(?1 as text) is null or name = ?1)"
    " and hour_ms >= ?2 and (cast(?3 as bigint) is null or hour_ms < ?3)"
)


def _storage_hours(
    store: Store, tenant: str | None, since_ms: int, until_ms: int | None
) -> list[Row]:
    """Return (tenant, its id, hour, model, class, card, token-seconds) rows.

    An hour belongs to the period in which it begins.
    """
    return store.query(
        "select name, tenant_id, hour_ms, model, class, rate_card_id, token_seconds"
        f" {_STORAGE_HOURS} order by name, hour_ms, class",
        (tenant, since_ms, until_ms),
    )


def _storage_rows(
    store: Store,
    cards: RateCards,
    tenant: str | None,
    since_ms: int,
    until_ms: int | None,
    account: str,
) -> Iterator[dict[str, object]]:
    """Yield storage rows by class."""
    rows = _storage_hours(store, tenant, since_ms, until_ms)
    for name, tenant_id, hour_ms, model, retention, rate_card_id, token_seconds in rows:
        card = cards.card(rate_card_id)
        component = f"storage:{retention}"
        group = _Group(name, tenant_id, 0, model, component, hour_ms, rate_card_id)
        pico = storage_charge(card, retention, token_seconds)
        yield _usage_row(account, card, group, _Sum(tokens=token_seconds, pico=pico))


def _usage_row(account: str, card: RateCard, group: _Group, total: _Sum) -> dict[str, object]:
    """Return a usage row with consumed quantity, priced quantity and unit price."""
    kind, _, retention = group.component.partition(":")
    row = _row(account, card, group, total, "Usage", None, group.component)
    measured: tuple[object, ...]
    match kind:
        case "storage":
            hours = Decimal(total.tokens) / SECONDS_PER_HOUR
            each = format_dollars(card.storage_price(retention))
            measured = (total.tokens, "token-seconds", each, f"{hours:.12f}", "token-hours")
        case "minimum":  # amounts differ per request: quantity in dollars
            cost = format_dollars(total.pico)
            measured = (total.requests, "requests", format_dollars(10**12), cost, card.currency)
        case _:
            each = format_dollars(_token_price(card, kind, retention))
            measured = (total.tokens, "tokens", each, total.priced, "tokens")
    return {**row, **dict(zip(_QUANTITY_COLUMNS, measured, strict=True))}


def _row(
    account: str,
    card: RateCard,
    group: _Group,
    total: _Sum,
    category: str,
    charge_class: str | None,
    text: str,
) -> dict[str, object]:
    start_ms, end_ms = window_of("month", group.hour_ms)
    cost = format_dollars(total.pico)
    is_usage = category == "Usage"
    return {
        "BilledCost": cost,
        "BillingAccountId": account,
        "BillingAccountName": account,
        "BillingCurrency": card.currency,
        "BillingPeriodStart": _format_second(start_ms),
        "BillingPeriodEnd": _format_second(end_ms),
        "ChargeCategory": category,
        "ChargeClass": charge_class,
        "ChargeDescription": text,
        "ChargeFrequency": "Usage-Based" if is_usage else "One-Time",
        "ChargePeriodStart": _format_second(group.hour_ms),
        "ChargePeriodEnd": _format_second(group.hour_ms + HOUR_MS),
        "ConsumedQuantity": None,
        "ConsumedUnit": None,
        "ContractedCost": cost,
        "EffectiveCost": cost,
        "InvoiceIssuerName": account,
        "ListCost": cost,
        "ListUnitPrice": None,
        "PricingCategory": "Standard" if is_usage else None,
        "PricingQuantity": None,
        "PricingUnit": None,
        "ProviderName": PROVIDER,
        "PublisherName": PROVIDER,
        "ResourceId": group.model,
        "ResourceType": "Model",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Inference",
        "SkuId": f"{group.model}/{group.component}",
        "SkuMeter": group.component,
        "SkuPriceId": f"{group.rate_card_id}/{group.component}",
        "SubAccountId": str(group.tenant_id),
        "SubAccountName": group.tenant,
        "Tags": f'{{"key_id":"{group.key_id}"}}',
        "x_Requests": total.requests,
        "x_UncachedCost": format_dollars(total.uncached),
        "x_CacheSavings": format_dollars(total.uncached - total.pico),
        "x_BilledPico": total.pico,
        "x_RateCard": group.rate_card_id,
    }


_QUANTITY_COLUMNS = (
    "ConsumedQuantity",
    "ConsumedUnit",
    "ListUnitPrice",
    "PricingQuantity",
    "PricingUnit",
)
"""Columns of usage rows only. Unit price times priced quantity is the cost."""


def _token_price(card: RateCard, kind: str, retention: str) -> int:
    if kind == "cache_write":
        return card.write_price(retention)
    price: int = getattr(card, kind)
    return price


def _format_second(at_ms: int) -> str:
    return f"{format_utc(at_ms)[:19]}Z"
