"""The events of webhooks: finds what has happened, and says it in a sentence.

    budget.threshold   a budget has reached 50, 80 or 100 %
    hit_ratio.fell     a tenant reads less of its prompts from the cache than the day before
    promises.broken    promised prefixes were lost
    key.expires        a key expires within seven days
    engine.restarted   the engine was lost
    tenant.limited     a tenant was refused by its limits
    finding.new        a finding is new

Each event has a key that names what happened, and the outbox records a key once: a restart, or a
second gateway over the same database, repeats no event. `gateway.background.webhooks` calls this
module each minute and sends what it finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec

from engine.api import Clock
from gateway.caching import ContractManager
from gateway.engines.served_models import ServedModels
from gateway.findings.report import FindingsWindow, find
from gateway.ledger.query_pool import QueryPool
from tenancy.accounting.usage import UsageTotal, usage
from tenancy.accounting.webhook_outbox import WebhookEvent
from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.accounts.keys import Key, list_keys
from tenancy.accounts.tenants import list_tenants
from tenancy.pricing.budgets import BudgetState, budget_states
from tenancy.pricing.charges import PICO_PER_MICRO, format_dollars
from tenancy.storage.interface import Store
from tenancy.types import DAY_MS, HOUR_MS, WallClock, format_utc

THRESHOLDS = (100, 80, 50)
"""Percents of a budget, the highest first: a check reports the highest that is reached."""
EXPIRES_WITHIN_MS = 7 * DAY_MS
FELL_BY_MIN = 0.15
"""Least fall of a hit ratio that makes an event."""
PROMPT_TOKENS_MIN = 100_000
"""Least prompt tokens of both days: ratios of little traffic mean nothing."""


class WebhookEvents:
    """Finds the events of one gateway. Belongs to its event loop."""

    def __init__(
        self,
        models: ServedModels,
        contracts: ContractManager,
        limited: Counter[int],
        authenticator: KeyAuthenticator,
        reports: QueryPool,
        clock: Clock,
        wall: WallClock,
    ) -> None:
        self._models, self._contracts, self._limited = models, contracts, limited
        self._authenticator, self._reports, self._clock = authenticator, reports, clock
        self._wall = wall
        self._restarts = {one.name: one.replicas.restarts for one in self._models}
        self._broken: dict[tuple[int, str], int] = {}
        self._told: dict[int, int] = {}

    def count(self) -> list[WebhookEvent]:
        """Return what this gateway has counted since the last call, which returns it no more.

        O(tenants).
        """
        now_ms = self._wall()
        return [*self._restarted(now_ms), *self._lost_promises(now_ms), *self._refused(now_ms)]

    async def read(self) -> list[WebhookEvent]:
        """Return what the database tells, which the outbox may know already.

        O(budgets + keys + tenants), queries on another thread. Raises StoreError.
        """
        now_ms = self._wall()
        return await self._reports.ask(lambda store: self._read(store, now_ms))

    def _read(self, store: Store, now_ms: int) -> list[WebhookEvent]:
        states = budget_states(store, lambda: now_ms)
        ids = {tenant.name: tenant.tenant_id for tenant in list_tenants(store)}
        found = find(store, FindingsWindow.of(now_ms - DAY_MS, now_ms))
        return [
            *budget_events(states, self._name),
            *key_events(list_keys(store), ids, now_ms),
            *_fallen(store, ids, now_ms),
            *finding_events(found["findings"], ids),
        ]

    def _name(self, tenant_id: int) -> str:
        found = self._authenticator.tenant(tenant_id)
        return f"tenant {tenant_id}" if found is None else found.tenant.name

    def _restarted(self, now_ms: int) -> list[WebhookEvent]:
        before = self._restarts
        self._restarts = {one.name: one.replicas.restarts for one in self._models}
        return [
            WebhookEvent(
                f"{now_ms}:{count}:{name}" if len(before) > 1 else f"{now_ms}:{count}",
                "engine.restarted",
                {"restarts": count, "model": name},
            )
            for name, count in self._restarts.items()
            if count > before[name]
        ]

    def _lost_promises(self, now_ms: int) -> list[WebhookEvent]:
        """Return an event for each tenant and class that lost promises, one an hour."""
        counts = self._contracts.promises.counts(self._clock())
        before, self._broken = (
            self._broken,
            {key: row["broken"] for key, row in counts.items() if row["broken"]},
        )
        return [
            WebhookEvent(
                f"{tenant_id}:{name}:{now_ms // HOUR_MS}",
                "promises.broken",
                {"tenant": self._name(tenant_id), "class": name, "broken": broken - was},
                tenant_id,
            )
            for (tenant_id, name), broken in self._broken.items()
            if broken > (was := before.get((tenant_id, name), 0))
        ]

    def _refused(self, now_ms: int) -> list[WebhookEvent]:
        """Return an event for each tenant that its limits refused, one an hour."""
        before, self._told = self._told, dict(self._limited)
        return [
            WebhookEvent(
                f"{tenant_id}:{now_ms // HOUR_MS}",
                "tenant.limited",
                {"tenant": self._name(tenant_id), "refused": count - before.get(tenant_id, 0)},
                tenant_id,
            )
            for tenant_id, count in self._told.items()
            if count > before.get(tenant_id, 0)
        ]


def _fallen(store: Store, ids: Mapping[str, int], now_ms: int) -> list[WebhookEvent]:
    """Compare the last 24 whole hours with those before; an event a day for each tenant."""
    end_ms = now_ms // HOUR_MS * HOUR_MS
    late, early = (
        usage(store, since_ms=until_ms - DAY_MS, until_ms=until_ms)
        for until_ms in (end_ms, end_ms - DAY_MS)
    )
    return ratio_events(early, late, ids, now_ms)


def budget_events(states: list[BudgetState], name_of: Callable[[int], str]) -> list[WebhookEvent]:
    """Return an event for each budget that has reached a threshold of its window."""
    found = []
    for state in states:
        budget = state.budget
        limit_micros = budget.soft_micros if budget.hard_micros is None else budget.hard_micros
        if not limit_micros:
            continue
        spent_percent = state.spent_pico * 100 // (limit_micros * PICO_PER_MICRO)
        reached = next((one for one in THRESHOLDS if spent_percent >= one), None)
        if reached is None:
            continue
        key = (budget.tenant_id, budget.key_id, budget.window, state.starts_ms, reached)
        data: dict[str, object] = {
            "tenant": name_of(budget.tenant_id),
            "key_id": budget.key_id or None,
            "window": budget.window,
            "threshold_percent": reached,
            "spent_usd": format_dollars(state.spent_pico),
            "limit_usd": format_dollars(limit_micros * PICO_PER_MICRO),
            "is_hard": budget.hard_micros is not None,
            "resets": format_utc(state.resets_ms),
        }
        text = ":".join(map(str, key))
        found.append(WebhookEvent(text, "budget.threshold", data, budget.tenant_id))
    return found


def key_events(keys: list[Key], ids: Mapping[str, int], now_ms: int) -> list[WebhookEvent]:
    """Return an event for each working key that expires soon and has no successor.

    `ids`: the tenants' ids by name.
    """
    return [
        WebhookEvent(
            f"{key.key_id}:{key.expires_ms}",
            "key.expires",
            {
                "key_id": key.key_id,
                "label": key.label,
                "tenant": key.tenant,
                "expires": format_utc(key.expires_ms),
            },
            None if key.tenant is None else ids.get(key.tenant),
        )
        for key in keys
        if key.revoked_ms is None
        and key.replaced_by is None
        and key.expires_ms is not None
        and now_ms < key.expires_ms <= now_ms + EXPIRES_WITHIN_MS
    ]


def ratio_events(
    early: list[UsageTotal], late: list[UsageTotal], ids: Mapping[str, int], now_ms: int
) -> list[WebhookEvent]:
    """Return an event for each tenant whose hit ratio fell between two days of enough traffic."""
    before = {one.tenant: one for one in early}
    found = []
    for now in late:
        was = before.get(now.tenant)
        if was is None or min(was.prompt_tokens, now.prompt_tokens) < PROMPT_TOKENS_MIN:
            continue
        ratios = [one.cache_read_tokens / one.prompt_tokens for one in (was, now)]
        if ratios[0] - ratios[1] >= FELL_BY_MIN:
            data: dict[str, object] = {
                "tenant": now.tenant,
                "hit_ratio_before": round(ratios[0], 4),
                "hit_ratio": round(ratios[1], 4),
                "prompt_tokens": now.prompt_tokens,
            }
            tenant_id = ids.get(now.tenant)
            key = f"{tenant_id}:{now_ms // DAY_MS}"
            found.append(WebhookEvent(key, "hit_ratio.fell", data, tenant_id))
    return found


def finding_events(
    found: Sequence[Mapping[str, Any]], ids: Mapping[str, int]
) -> list[WebhookEvent]:
    """Return an event for each finding that costs something. Its id stays, so it is sent once."""
    names = ("finding_id", "tenant", "cause", "sentence", "advice", "saving_usd_month")
    return [
        WebhookEvent(
            str(one["finding_id"]),
            "finding.new",
            {name: one[name] for name in names},
            ids.get(str(one["tenant"])),
        )
        for one in found
        if not one["legitimate"]
    ]


# --- sentences -----------------------------------------------------------------------------------


def message_of(body: bytes) -> str:
    """Return an event, as its JSON body, in a sentence for people."""
    event = msgspec.json.decode(body)
    data: Mapping[str, Any] = event["data"]
    match event["type"]:
        case "budget.threshold":
            of_key = f", key {data['key_id']}" if data["key_id"] else ""
            return (
                f"{data['tenant']}{of_key}: {data['threshold_percent']} % of the {data['window']}'s"
                f" budget is spent (${_short(data['spent_usd'])} of ${_short(data['limit_usd'])})"
            )
        case "hit_ratio.fell":
            return (
                f"{data['tenant']}: hit ratio fell from {100 * data['hit_ratio_before']:.1f} % to"
                f" {100 * data['hit_ratio']:.1f} % within a day"
            )
        case "promises.broken":
            return f"{data['tenant']}: {data['broken']} promised prefixes of {data['class']} lost"
        case "key.expires":
            owner = data["tenant"] or "an administrator"
            label = f" ({data['label']})" if data["label"] else ""
            return f"key {data['key_id']}{label} of {owner} expires {data['expires']}"
        case "engine.restarted":
            return (
                f"the engine of {data['model']} was lost and restarted, without what only its"
                " device memory held"
            )
        case "tenant.limited":
            return f"{data['tenant']}: {data['refused']} requests refused by its limits"
        case "finding.new":
            return f"{data['sentence']} {data['advice']}"
        case kind:
            return f"trunkline: {kind}"


def _short(dollars: str) -> str:
    """Return an amount with two decimals, or six below a dollar."""
    amount = Decimal(dollars)
    return f"{amount:.2f}" if amount >= 1 else f"{amount:.6f}"
