"""Findings of a window: sums of stored counts with prices, thresholds and words, by dollars.

A finding is stable: the same cause of the same tenant at the same place has the same id. Whether it
is worth a line is decided here, when it is read. Its saving in a month is the cost of the time that
was observed, at the same pace. The module reads the database and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gateway.analytics.prompt_findings import KEPT_BY, READ_BACK
from gateway.findings.causes import (
    LEGITIMATE,
    NOT_CHARGED,
    NOT_SERVED,
    OF_HARDWARE,
    OF_REQUESTS,
    ONE_TIME,
    WITHOUT_TOKENS,
    CauseFacts,
    CauseWords,
    describe,
)
from gateway.findings.finding_store import TAKER
from tenancy.accounting.usage import UsageTotal, usage
from tenancy.accounts.tenants import find_tenant, find_tenant_record, list_tenants
from tenancy.history.request_records import received_between
from tenancy.pricing.charges import PICO_PER_DOLLAR, RateCard
from tenancy.pricing.rate_cards import RateCards, load_cards
from tenancy.reuse.finding_counts import WORKING_SET, FindingCount, read_counts, sum_counts
from tenancy.reuse.miss_causes import WRITE, WRITTEN_NEVER_READ, finding_id, waste_cost
from tenancy.storage.interface import Store
from tenancy.types import DAY_MS, HOUR_MS, Tenant

WINDOW_MS_DEFAULT = 7 * DAY_MS
MONTH_MS = 30 * DAY_MS
BLOCK_TOKENS = 16
FINDINGS_MAX = 500
"""Findings in one answer: those that would save most."""
REQUESTS_MIN = 2
"""One request is chance: a change that was made once, or a cosmic ray."""
REQUESTS_MIN_OF = {"prompt_changes": 5, NOT_SERVED: 3}
"""The same of other causes: a few documents may have come in another order, a name be mistyped."""
TOKENS_SHARE_MIN = 0.05
"""The least share of a tenant's computed tokens that a cause must waste. No share of its requests
counts: an agent misses once in a session of 3 to 100 requests."""
READ_SHARE_MIN = 0.1
"""If a smaller share of the written tokens was read, they were written for nothing."""
COVERED_SHARE_MIN = 0.5
"""The least share of expired prefixes that a longer class must have kept to be advised."""
CLASS_GROUPS = (frozenset({"5m", "1h"}), frozenset({"30m", "12h"}))
"""Classes that one field of a request can name: `cache_control`, and the options of caching."""


class FindingsWindow(Struct, frozen=True):
    """A time window [since, until) in wall-clock milliseconds, from a whole hour on."""

    since_ms: int
    until_ms: int

    @classmethod
    def of(cls, since_ms: int, until_ms: int) -> FindingsWindow:
        """Return the window, widened to whole hours at its beginning."""
        return cls(since_ms // HOUR_MS * HOUR_MS, until_ms)

    def observed_ms(self, store: Store) -> int:
        """Return the length of the part of the window that had requests, of any tenant; at least
        an hour, and the whole window where that is not known. While no request comes it stays."""
        found = received_between(store, self.since_ms, self.until_ms)
        whole = self.until_ms - self.since_ms
        return whole if found is None else min(whole, max(HOUR_MS, found[1] - found[0]))


def find(
    store: Store, window: FindingsWindow, tenant: str | None = None, *, is_own: bool = False
) -> dict[str, Any]:
    """Return the findings of one tenant, or of all, as the API shows them: those that save most in
    a month first, legitimate ones last.

    `is_own`: for the tenant itself; no other tenant is named. O(counts of the window). Raises
    StoreError, and BadName for an unknown tenant.
    """
    tenants = [find_tenant(store, tenant)] if tenant else list_tenants(store)
    names = {} if is_own else {one.tenant_id: one.name for one in list_tenants(store)}
    only = tenants[0].tenant_id if tenant else None
    totals = {
        one.tenant: one
        for one in usage(
            store, tenant=tenant, since_ms=window.since_ms, until_ms=window.until_ms + 1
        )
    }
    sums = _sums(read_counts(store, window.since_ms, window.until_ms, only))
    cards, observed_ms = RateCards(load_cards(store)), window.observed_ms(store)
    found: list[tuple[int, dict[str, Any]]] = []
    for owner in tenants:
        total = totals.get(owner.name) or UsageTotal(owner.name)
        shown = [
            one
            for one in sums.get(owner.tenant_id, ())
            if is_finding(one.cause, one.requests, one.wasted_tokens, _computed(total), one.facts)
        ]
        changes_itself = any(one.cause in OF_REQUESTS for one in shown)
        # A floor holds in the cache of each model, so the largest need is the answer for all.
        working_set = max((one.facts.get(WORKING_SET, 0) for one in shown), default=0)
        of_owner = []
        for one in shown:
            card = cards.in_force(one.model, owner.tier, window.until_ms)
            facts = _facts(store, one, owner, total, names, changes_itself=changes_itself)
            facts = replace(
                facts,
                paying_class=_paying_class(one, card, observed_ms / HOUR_MS),
                lost_blocks=-(-working_set // BLOCK_TOKENS),
                is_own=is_own,
            )
            of_owner.append(_finding(one, owner, total, card, observed_ms, facts))
        found += _cheapest_cure_first(of_owner)
    found.sort(key=lambda pair: (pair[1]["legitimate"], -pair[0], -pair[1]["wasted_tokens"]))
    return {
        "findings": [finding for _, finding in found[:FINDINGS_MAX]],
        "has_more": len(found) > FINDINGS_MAX,
        "window": {
            "since_ms": window.since_ms,
            "until_ms": window.until_ms,
            "observed_ms": observed_ms,
        },
        "pace": f"at the pace of the last {span(observed_ms)}",
    }


def _sums(counts: Sequence[FindingCount]) -> dict[int, list[FindingCount]]:
    """Return the sums of each tenant over all hours."""
    by_tenant: dict[int, list[FindingCount]] = {}
    for one in sum_counts(counts, over_hours=True):
        by_tenant.setdefault(one.tenant_id, []).append(one)
    return by_tenant


def _computed(total: UsageTotal) -> int:
    """Return a tenant's prompt tokens that were computed, or charged as if they had been."""
    return total.prompt_tokens - min(total.cache_read_tokens, total.physical_cached_tokens)


def is_finding(
    cause: str, requests: int, tokens: int, of_computed: int, facts: Mapping[str, int]
) -> bool:
    """Whether a cause is worth a line: it is no chance, and more than a trifle. `tokens`: wasted by
    these requests; `of_computed`: the tenant's computed tokens in the same window."""
    if cause in LEGITIMATE or cause in ONE_TIME:
        return requests > 0
    if requests < REQUESTS_MIN_OF.get(cause, REQUESTS_MIN):
        return False
    if cause in OF_HARDWARE or cause in WITHOUT_TOKENS:
        return True
    if cause == WRITTEN_NEVER_READ and facts.get(READ_BACK, 0) >= READ_SHARE_MIN * tokens:
        return False
    return tokens >= TOKENS_SHARE_MIN * of_computed


def _cheapest_cure_first(
    found: Sequence[tuple[int, dict[str, Any]]],
) -> list[tuple[int, dict[str, Any]]]:
    """Return a tenant's findings with evictions no higher than what the tenant itself can change:
    a floor takes blocks from others, and a stable prompt takes nothing."""
    own = [saving for saving, one in found if one["cause"] in OF_REQUESTS]
    return [
        (min(saving, min(own) - 1) if own and one["cause"] == "evicted" else saving, one)
        for saving, one in found
    ]


def _facts(
    store: Store,
    one: FindingCount,
    owner: Tenant,
    total: UsageTotal,
    names: Mapping[int, str],
    *,
    changes_itself: bool,
) -> CauseFacts:
    """Return what the words of a finding are made of, without what its reader decides."""
    of_requests = max(total.requests, one.requests)
    if one.cause in WITHOUT_TOKENS:
        of_requests = total.requests + one.requests
    ceiling = None
    if "evicted_own_quota" in one.facts:
        ceiling = find_tenant_record(store, owner.name).policy.ceiling_blocks
    return CauseFacts(
        place=one.place,
        requests=one.requests,
        of_requests=of_requests,
        sums=one.facts,
        takers=_takers(one, names),
        ceiling_blocks=ceiling,
        changes_itself=changes_itself,
        tenant=owner.name,
    )


def _finding(
    one: FindingCount,
    owner: Tenant,
    total: UsageTotal,
    card: RateCard,
    observed_ms: int,
    facts: CauseFacts,
) -> tuple[int, dict[str, Any]]:
    """Return what it costs in a month, in pico-dollars, and the finding."""
    words = describe(one.cause, facts)
    cost = waste_cost(one.cause, one.wasted_tokens, one.facts, card)
    if total.charge_pico and one.cause not in NOT_CHARGED:
        cost = min(cost, total.charge_pico)
    month = 1.0 if one.cause in ONE_TIME else MONTH_MS / observed_ms
    is_legitimate = one.cause in LEGITIMATE
    cost = 0 if is_legitimate else cost
    saving = round(cost * month)
    return saving, {
        "finding_id": finding_id(one.tenant_id, one.model, one.cause, one.place),
        "tenant": owner.name,
        "model": one.model,
        "cause": one.cause,
        "place": one.place,
        "title": words.title,
        "sentence": _sentence(owner.name, words, one, cost, total.charge_pico),
        "advice": words.advice,
        "confidence": round(words.confidence * one.requests / (one.requests + 1), 2),
        "requests": one.requests,
        "of_requests": facts.of_requests,
        "wasted_tokens": one.wasted_tokens,
        "cost_usd": dollars(cost),
        "of_cost_usd": dollars(total.charge_pico),
        "saving_usd_month": dollars(saving),
        "first_seen_ms": one.first_ms,
        "last_seen_ms": one.last_ms,
        "example_request_ids": list(reversed(one.examples)),
        "legitimate": is_legitimate,
    }


def _paying_class(one: FindingCount, card: RateCard, hours: float) -> str:
    """Return the class that would have saved most, after its own price; "" if none would have, and
    for another cause than `expired`.

    What it keeps is read instead of written; what it writes, and holds, costs its own prices.
    """
    best, best_saving = "", 0.0
    if one.cause != "expired":
        return best
    tokens_each = one.wasted_tokens / one.requests
    current = card.write_price(one.place) if one.place else card.input
    for fact, kept in one.facts.items():
        name = fact.removeprefix(KEPT_BY)
        if (
            name == fact
            or not _may_replace(one.place, name)
            or kept < COVERED_SHARE_MIN * one.requests
        ):
            continue
        premium = card.write_price(name) - current
        saving = kept * tokens_each * (current - card.cache_read)
        saving -= (one.requests - kept + 1) * tokens_each * premium
        saving -= tokens_each * hours * card.storage_price(name)
        if saving > best_saving or (not best and not card.input):
            best, best_saving = name, saving
    return best


def _may_replace(current: str, name: str) -> bool:
    """Whether a request that names one class can name the other; operators' own classes always."""
    groups = [group for group in CLASS_GROUPS if current in group or name in group]
    return current != name and len(groups) < 2


def _takers(one: FindingCount, names: Mapping[int, str]) -> tuple[str, ...]:
    """Return the names of the tenants that took most blocks; none for unknown ones."""
    blocks = {
        names[int(fact.removeprefix(TAKER))]: number
        for fact, number in one.facts.items()
        if fact.startswith(TAKER) and int(fact.removeprefix(TAKER)) in names
    }
    return tuple(sorted(blocks, key=lambda name: -blocks[name])[:3])


def _sentence(tenant: str, words: CauseWords, one: FindingCount, cost: int, of_cost: int) -> str:
    """Return one sentence: who, what, how often, how much."""
    if one.cause in LEGITIMATE:
        return f"{tenant}: {words.what}."
    if one.cause in WITHOUT_TOKENS:
        return f"{tenant}: {words.what}."
    much = f"about {one.wasted_tokens:,} tokens again"
    written = sum(number for fact, number in one.facts.items() if fact.startswith(WRITE))
    if one.cause == WRITTEN_NEVER_READ:
        much = "more than their input price was paid for nothing"
    elif written:
        much = f"{much}, {written:,} of them charged as written"
    if one.cause in NOT_CHARGED:
        much += f", about ${dollars(cost)} not charged for them" if cost else ""
    elif cost:
        much = f"{much}, about ${dollars(cost)} of ${dollars(of_cost)}"
    return f"{tenant}: {words.what}: {much}."


def span(length_ms: int) -> str:
    """Return a length of time as people say it: "7 d", "24 h", "3 h", "hour"."""
    hours = round(length_ms / HOUR_MS)
    if hours <= 1:
        return "hour"
    return f"{hours} h" if hours < 48 else f"{round(hours / 24)} d"


def dollars(pico: int) -> str:
    """Return an amount in dollars: with cents, and below ten cents with two significant digits."""
    dollars = Decimal(pico) / PICO_PER_DOLLAR
    decimals = max(2, 1 - dollars.adjusted()) if pico else 2
    return f"{dollars:.{decimals}f}"
