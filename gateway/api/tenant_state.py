"""What a tenant may do now, and why not: its status, budgets, limits and refusals.

    suspended ─ over_budget ─ limited ─ ok        the first that holds

The status comes from the tenant's settings, its budgets and the refusals of the last hour: a raised
budget or limit shows at once. The admin API and self-service show it; the module knows no route.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import Struct

from gateway.api.usage_report import budget_body, budget_share
from gateway.background.history_sampling import count_ended, read_at_once
from gateway.context import Context
from gateway.http import json_api
from tenancy.accounts.keys import Key, list_keys
from tenancy.accounts.tenants import TenantRecord
from tenancy.history.request_records import last_request_ms
from tenancy.history.samples import read_samples
from tenancy.pricing.budgets import BudgetState, budget_states
from tenancy.pricing.charges import PICO_PER_MICRO
from tenancy.storage.audit_log import AuditFilter, list_changes
from tenancy.storage.interface import Store
from tenancy.types import DAY_MS, HOUR_MS, MINUTE_MS, Limits

TenantStatus = Literal["ok", "limited", "over_budget", "suspended"]
LIMITED_MS = 5 * MINUTE_MS
"""How long a tenant counts as limited after a limit refused a request."""
BUDGET_CODES = ("budget_exceeded",)
LIMIT_CODES = ("rate_limit_exceeded", "request_exceeds_limit")
"""Codes of refusals by a tenant's or a key's own limits."""
LIMIT_FIELDS = frozenset({*Limits.__struct_fields__, "limits", "what"})
"""Values of the audit log that are limits: a tenant's, a key's, or both as the file declares."""
CHANGES_READ_MAX = 1_000


class Refusals(Struct, frozen=True):
    """A tenant's refusals since midnight or in the last hour, by the instant they are known for:
    a written minute is known by its start."""

    minutes: Sequence[tuple[int, Mapping[str, int]]]

    def since(self, at_ms: int) -> dict[str, int]:
        """Return the refusals from an instant on, by code."""
        found: Counter[str] = Counter()
        for began_ms, codes in self.minutes:
            if began_ms >= at_ms:
                found.update(codes)
        return dict(found)

    def times(self, codes: Sequence[str], after_ms: int) -> list[int]:
        """Return when requests were refused with one of these codes, after an instant."""
        return [
            at_ms
            for at_ms, found in self.minutes
            if at_ms > after_ms and any(code in found for code in codes)
        ]


class _Facts(Struct, frozen=True):
    """What the database knows of a tenant's state. `budget_set_ms`, `limits_set_ms`,
    `suspended_ms`: when that was changed last; 0 or None if the audit log does not tell."""

    budgets: list[BudgetState]
    keys: list[Key]
    written: list[tuple[int, Mapping[str, int]]]
    last_request_ms: int | None
    budget_set_ms: int
    limits_set_ms: int
    suspended_ms: int | None


async def tenant_state(
    gateway: Context, found: TenantRecord, *, key_id: int | None = None
) -> dict[str, Any]:
    """Return a tenant's state as responses show it. `key_id`: show this key only, for a tenant that
    asks itself. Raises StoreError."""
    return await read_at_once(gateway, partial(_tenant_state, gateway, found, key_id))


async def _tenant_state(
    gateway: Context, found: TenantRecord, key_id: int | None
) -> dict[str, Any]:
    tenant, now_ms = found.tenant, gateway.wall()
    read = partial(_read, tenant_id=tenant.tenant_id, name=tenant.name, now_ms=now_ms)
    facts = await gateway.reports.ask(read, None if key_id is None else tenant.tenant_id)
    await count_ended(gateway)
    own = [
        (counts[tenant.tenant_id].last_refused_ms, counts[tenant.tenant_id].refusals)
        for _, counts in gateway.ended_requests.minutes()
        if tenant.tenant_id in counts
    ]
    live = [
        (at_ms, {code: refusals[code]}) for last, refusals in own for code, at_ms in last.items()
    ]
    refusals = Refusals([*facts.written, *live])
    last_hour = refusals.since(now_ms - HOUR_MS)
    recent = gateway.ended_requests.last_refused_ms.get(tenant.tenant_id, {})
    status, since_ms, reasons = _status(found, facts, refusals, recent, now_ms)
    unwritten = [max(last.values()) for last, _ in own if last]
    return {
        "tenant": tenant.name,
        "status": status,
        "since_ms": since_ms,
        "reasons": reasons,
        "budgets": [_budget(one) for one in facts.budgets],
        "limits": _limits(gateway, found),
        "keys": [key_body(one) for one in facts.keys if key_id in (None, one.key_id)],
        "refusals_last_hour": last_hour,
        "refusals_today": refusals.since(now_ms // DAY_MS * DAY_MS),
        "last_request_ms": max(
            (at_ms for at_ms in (facts.last_request_ms, *unwritten) if at_ms is not None),
            default=None,
        ),
    }


def _read(store: Store, tenant_id: int, name: str, now_ms: int) -> _Facts:
    since_ms = min(now_ms // DAY_MS * DAY_MS, now_ms - HOUR_MS)
    samples = read_samples(store, tenant_id, since_ms, now_ms + 1)
    budget_set = list_changes(store, AuditFilter(tenant_id=tenant_id, action="budget.set"), limit=1)
    suspended_ms = next(
        (
            change.at_ms
            for change in list_changes(
                store, AuditFilter(tenant_id=tenant_id, action="tenant.change")
            )
            if (change.after or {}).get("status") == "suspended"
        ),
        None,
    )
    return _Facts(
        budgets=budget_states(store, lambda: now_ms, tenant_id),
        keys=list_keys(store, name),
        written=[(one.at_ms, one.details.refusals) for one in samples if one.refused],
        last_request_ms=last_request_ms(store, tenant_id),
        budget_set_ms=budget_set[0].at_ms if budget_set else 0,
        limits_set_ms=_limits_set_ms(store, tenant_id, now_ms),
        suspended_ms=suspended_ms,
    )


def _limits_set_ms(store: Store, tenant_id: int, now_ms: int) -> int:
    """Return when a limit of the tenant or its keys was changed last; 0 if not in the last hour."""
    recent = AuditFilter(tenant_id=tenant_id, since_ms=now_ms - HOUR_MS)
    return next(
        (
            change.at_ms
            for change in list_changes(store, recent, limit=CHANGES_READ_MAX)
            if change.action.startswith(("tenant.", "key."))
            and not LIMIT_FIELDS.isdisjoint((*(change.before or ()), *(change.after or ())))
        ),
        0,
    )


def _refused(
    codes: Sequence[str], refusals: Refusals, recent: Mapping[str, int], after_ms: int
) -> list[int]:
    """Return when requests were refused with one of these codes, after an instant."""
    exact = [recent[code] for code in codes if recent.get(code, 0) > after_ms]
    return [*refusals.times(codes, after_ms), *exact]


# --- the status and its reasons ------------------------------------------------------------------


def _status(
    found: TenantRecord,
    facts: _Facts,
    refusals: Refusals,
    recent: Mapping[str, int],
    now_ms: int,
) -> tuple[TenantStatus, int | None, list[str]]:
    """Return the status, since when it holds, and sentences that say why. `recent`: the exact time
    of the last refusal by each code, of which a written minute tells the start alone."""
    last_hour, reasons = refusals.since(now_ms - HOUR_MS), list[str]()
    states: list[tuple[TenantStatus, int | None]] = []
    if found.tenant.status == "suspended":
        states.append(("suspended", facts.suspended_ms))
        reasons.append("The tenant is suspended: each request is refused with 403.")
    changed_ms = max([facts.budget_set_ms, *(one.starts_ms for one in facts.budgets)], default=0)
    hard = [one for one in facts.budgets if one.budget.hard_micros is not None]
    changed_ms = max(changed_ms, now_ms - HOUR_MS)
    refused = _refused(BUDGET_CODES, refusals, recent, changed_ms) if hard else []
    spent = [one for one in hard if not one.budget.key_id and _is_used_up(one)]
    if spent or refused:
        states.append(("over_budget", min(refused, default=None)))
        reasons += [_budget_sentence(one) for one in spent or hard]
        reasons += _counted(last_hour, BUDGET_CODES, "did not fit a budget")
    after_ms = max(facts.limits_set_ms, now_ms - HOUR_MS)
    limited = _refused(LIMIT_CODES, refusals, recent, after_ms)
    if limited and max(limited) > now_ms - LIMITED_MS - MINUTE_MS:
        states.append(("limited", _streak_began_ms(limited)))
        reasons += _counted(last_hour, LIMIT_CODES, "exceeded a limit")
    known = (*BUDGET_CODES, *LIMIT_CODES)
    for code in sorted(set(last_hour) - set(known)):
        reasons += _counted(last_hour, (code,), f"got the error {code}")
    reasons += [
        f"The soft budget of {_dollars(soft * PICO_PER_MICRO)} a {one.budget.window} is passed."
        for one in facts.budgets
        if one.is_over_soft and (soft := one.budget.soft_micros) is not None
    ]
    if not any(_is_live(key, now_ms) for key in facts.keys):
        reasons.append("The tenant has no valid key.")
    status, since_ms = states[0] if states else ("ok", None)
    return status, since_ms, reasons


def _is_used_up(state: BudgetState) -> bool:
    hard = state.budget.hard_micros
    return hard is not None and state.spent_pico + state.reserved_pico >= hard * PICO_PER_MICRO


def _budget_sentence(state: BudgetState) -> str:
    budget = state.budget
    assert budget.hard_micros is not None, "only hard budgets refuse"
    owner = f"key {budget.key_id}" if budget.key_id else "the tenant"
    return (
        f"The budget of {owner} is {_dollars(budget.hard_micros * PICO_PER_MICRO)} a"
        f" {budget.window}: {_dollars(state.spent_pico)} spent, {_dollars(state.reserved_pico)}"
        f" reserved; the next {budget.window} begins at {json_api.instant(state.resets_ms)}."
    )


def _counted(refusals: Mapping[str, int], codes: Sequence[str], what: str) -> list[str]:
    count = sum(refusals.get(code, 0) for code in codes)
    requests = "request" if count == 1 else "requests"
    return [f"{count} {requests} {what} in the last hour."] if count else []


def _streak_began_ms(times: Sequence[int]) -> int:
    """Return the first of the latest times without a pause of `LIMITED_MS` between them."""
    ordered = sorted(times, reverse=True)
    began_ms = ordered[0]
    for at_ms in ordered:
        if began_ms - at_ms > LIMITED_MS + MINUTE_MS:
            break
        began_ms = at_ms
    return began_ms


def _is_live(key: Key, now_ms: int) -> bool:
    return key.revoked_ms is None and (key.expires_ms is None or key.expires_ms > now_ms)


def _dollars(pico: int) -> str:
    """Return an amount as people read it, to the micro-dollar: $20, $0.0123."""
    amount = (Decimal(pico) / 10**12).quantize(Decimal("0.000001"))
    return f"${amount.normalize():f}"


# --- budgets, limits and keys as responses show them ----------------------------------------------


def _budget(state: BudgetState) -> dict[str, Any]:
    names = ("window", "key_id", "hard_usd", "soft_usd", "spent_usd", "reserved_usd")
    body = budget_body(state)
    return {
        **{name: body[name] for name in names},
        "ends_at_ms": state.resets_ms,
        "share": budget_share(state),
    }


def _limits(gateway: Context, found: TenantRecord) -> dict[str, dict[str, int]]:
    """Return each limit of the tenant, and how much of the last minute's is used."""
    states = gateway.limiter.status_of_tenant(found.tenant.tenant_id, found.limits)
    limits = {
        f"{meter}_per_minute": {
            "limit": state.limit,
            "used_last_minute": state.limit - state.remaining,
        }
        for meter, state in states.items()
    }
    most = found.limits.requests_at_once
    if most is not None:
        running = gateway.limiter.running_of(found.tenant.tenant_id)
        limits["requests_at_once"] = {"limit": most, "used_last_minute": running}
    return limits


def key_body(key: Key) -> dict[str, Any]:
    """Return a key as responses show it, without its secret."""
    instants = {
        name: None if at_ms is None else json_api.instant(at_ms)
        for name, at_ms in (
            ("created", key.created_ms),
            ("expires", key.expires_ms),
            ("revoked", key.revoked_ms),
        )
    }
    return {
        "key_id": key.key_id,
        "shown": f"{key.shown}…",
        "tenant": key.tenant,
        "workspace": key.workspace or None,
        "label": key.label,
        "scopes": key.scopes,
        "limits": msgspec.to_builtins(key.limits),
        "tolerance": key.tolerance,
        "cache_key": key.cache_key,
        "replaced_by": key.replaced_by,
        "declared": key.is_declared,
        **instants,
    }
