"""What a tenant may do now, and why not: its status, budgets, limits and refusals.

    suspended ─ over_budget ─ limited ─ ok        the first that holds

The status comes from the tenant's settings, its budgets and the refusals of the last hour: a raised
budget or limit shows at once. The admin API and self-service show it; the module knows no route.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import Struct

from gateway.api.usage_report import budget_body, budget_share
from gateway.background.history_sampling import HistorySampling
from gateway.http import json_api
from gateway.ledger.query_pool import QueryPool
from gateway.observability.ended_requests import EndedRequests
from tenancy.accounts.keys import Key, list_keys, tenants_with_keys
from tenancy.accounts.tenants import TenantRecord
from tenancy.history.request_records import last_request_ms
from tenancy.history.samples import read_samples
from tenancy.limits import Limiter
from tenancy.pricing.budgets import BudgetState, budget_states
from tenancy.pricing.charges import PICO_PER_MICRO
from tenancy.storage.audit_log import AuditFilter, all_changes, list_changes
from tenancy.storage.interface import Store
from tenancy.types import DAY_MS, HOUR_MS, MINUTE_MS, Limits, WallClock

TenantStatus = Literal["ok", "limited", "over_budget", "suspended"]
LIMITED_MS = 5 * MINUTE_MS
"""How long a tenant counts as limited after a limit refused a request."""
BUDGET_CODES = ("budget_exceeded",)
LIMIT_CODES = ("rate_limit_exceeded", "request_exceeds_limit")
"""Codes of refusals by a tenant's or a key's own limits."""
MODEL_CODE = "model_not_found"
LIMIT_FIELDS = frozenset({*Limits.__struct_fields__, "limits", "what"})
"""Values of the audit log that are limits: a tenant's, a key's, or both as the file declares."""


class KeyAnswer(Struct, frozen=True):
    """A key without its secret. `shown`: its prefix. Times: RFC 3339."""

    key_id: int
    shown: str
    tenant: str | None
    workspace: str | None
    label: str
    scopes: tuple[str, ...]
    limits: Limits
    tolerance: str | None
    cache_key: str | None
    replaced_by: int | None
    declared: bool
    created: str | None
    expires: str | None
    revoked: str | None


class StateBudget(Struct, frozen=True):
    """A budget in its present window."""

    window: Literal["day", "month"]
    key_id: int | None
    hard_usd: str | None
    soft_usd: str | None
    spent_usd: str
    reserved_usd: str
    ends_at_ms: int
    share: float | None


class StateLimit(Struct, frozen=True):
    """A limit of a tenant, and how much of the last minute's is used."""

    limit: int
    used_last_minute: int


class TenantStateAnswer(Struct, frozen=True):
    """What a tenant may do now, and why not."""

    tenant: str
    status: Literal["ok", "limited", "over_budget", "suspended"]
    since_ms: int | None
    reasons: list[str]
    budgets: list[StateBudget]
    limits: dict[str, StateLimit]
    keys: list[KeyAnswer]
    refusals_last_hour: dict[str, int]
    refusals_today: dict[str, int]
    last_request_ms: int | None


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


class _Accounts(Struct, frozen=True):
    """What the database knows that decides a tenant's status. `budget_set_ms`, `limits_set_ms`:
    when that was changed in the last hour; 0 if it was not."""

    budgets: Sequence[BudgetState]
    has_key: bool
    budget_set_ms: int
    limits_set_ms: int


class _Facts(Struct, frozen=True):
    """What the database knows of a tenant's state beside `accounts`."""

    accounts: _Accounts
    keys: list[Key]
    written: list[tuple[int, Mapping[str, int]]]
    last_request_ms: int | None
    suspended_ms: int | None
    """None if the audit log does not tell."""


class _Seen(Struct, frozen=True):
    """What this gateway has seen of a tenant's refused requests."""

    refusals: Refusals
    recent: Mapping[str, int]
    """The exact time of the last refusal by each code, while a written minute says only when it
    began."""
    asked_models: Sequence[str]
    """Those that are not served, the last one first."""


class TenantStates:
    """Says of tenants what they may do now, and why not."""

    def __init__(
        self,
        reports: QueryPool,
        limiter: Limiter,
        ended_requests: EndedRequests,
        history: HistorySampling,
        wall: WallClock,
    ) -> None:
        self._reports, self._limiter, self._ended_requests = reports, limiter, ended_requests
        self._history, self._wall = history, wall

    async def summaries(self, found: Sequence[TenantRecord]) -> list[dict[str, Any]]:
        """Return the status of each tenant, why, its refusals of the last hour and the most
        frequent code, as a list of tenants shows them: the status and the reasons of `state`.
        Raises StoreError."""
        now_ms = self._wall()
        read = partial(_read_accounts, tenant_ids={one.tenant.tenant_id for one in found})
        accounts = await self._reports.ask(partial(read, now_ms=now_ms))
        await self._history.count_ended()
        written: defaultdict[int, list[tuple[int, Mapping[str, int]]]] = defaultdict(list)
        for sample in self._ended_requests.last_hour:
            written[sample.tenant_id].append((sample.at_ms, sample.details.refusals))
        shown = []
        for one in found:
            tenant_id = one.tenant.tenant_id
            seen = self._seen(tenant_id, written[tenant_id])
            status, _, reasons = _status(one, accounts[tenant_id], seen, now_ms)
            last_hour = seen.refusals.since(now_ms - HOUR_MS)
            shown.append(
                {
                    "status": status,
                    "reasons": reasons,
                    "refused_last_hour": sum(last_hour.values()),
                    "top_code": max(sorted(last_hour), key=last_hour.__getitem__, default=None),
                }
            )
        return shown

    async def state(self, found: TenantRecord, *, key_id: int | None = None) -> dict[str, Any]:
        """Return a tenant's state as responses show it. `key_id`: show this key only, for a tenant
        that asks itself. Raises StoreError."""
        return await self._history.read_at_once(partial(self._state, found, key_id))

    async def _state(self, found: TenantRecord, key_id: int | None) -> dict[str, Any]:
        tenant, now_ms = found.tenant, self._wall()
        read = partial(_read, tenant_id=tenant.tenant_id, name=tenant.name, now_ms=now_ms)
        facts = await self._reports.ask(read, None if key_id is None else tenant.tenant_id)
        await self._history.count_ended()
        seen = self._seen(tenant.tenant_id, facts.written)
        refusals, last_refused = seen.refusals, self._unwritten(tenant.tenant_id)
        last_hour = refusals.since(now_ms - HOUR_MS)
        status, since_ms, reasons = _status(found, facts.accounts, seen, now_ms)
        unwritten = [max(last.values()) for last, _ in last_refused if last]
        return {
            "tenant": tenant.name,
            "status": status,
            "since_ms": facts.suspended_ms if status == "suspended" else since_ms,
            "reasons": reasons,
            "budgets": [_budget(one) for one in facts.accounts.budgets],
            "limits": self._limits(found),
            "keys": [key_body(one) for one in facts.keys if key_id in (None, one.key_id)],
            "refusals_last_hour": last_hour,
            "refusals_today": refusals.since(now_ms // DAY_MS * DAY_MS),
            "last_request_ms": max(
                (at_ms for at_ms in (facts.last_request_ms, *unwritten) if at_ms is not None),
                default=None,
            ),
        }

    def _unwritten(self, tenant_id: int) -> list[tuple[Mapping[str, int], Mapping[str, int]]]:
        """Return when a tenant was refused last and how often, by code, in each of the minutes that
        the database lacks."""
        minutes = [counts for _, counts in self._ended_requests.minutes() if tenant_id in counts]
        return [(one[tenant_id].last_refused_ms, one[tenant_id].refusals) for one in minutes]

    def _seen(self, tenant_id: int, written: Sequence[tuple[int, Mapping[str, int]]]) -> _Seen:
        """Return what was seen of a tenant's refusals. `written`: those that the database has."""
        live = [
            (at_ms, {code: refusals[code]})
            for last, refusals in self._unwritten(tenant_id)
            for code, at_ms in last.items()
        ]
        ended = self._ended_requests
        recent = ended.last_refused_ms.get(tenant_id, {})
        return _Seen(Refusals([*written, *live]), recent, ended.asked_models.get(tenant_id, ()))

    def _limits(self, found: TenantRecord) -> dict[str, dict[str, int]]:
        """Return each limit of the tenant, and how much of the last minute's is used."""
        states = self._limiter.status_of_tenant(found.tenant.tenant_id, found.limits)
        limits = {
            f"{meter}_per_minute": {
                "limit": state.limit,
                "used_last_minute": state.limit - state.remaining,
            }
            for meter, state in states.items()
        }
        most = found.limits.requests_at_once
        if most is not None:
            running = self._limiter.running_of(found.tenant.tenant_id)
            limits["requests_at_once"] = {"limit": most, "used_last_minute": running}
        return limits


def _read(store: Store, tenant_id: int, name: str, now_ms: int) -> _Facts:
    since_ms = min(now_ms // DAY_MS * DAY_MS, now_ms - HOUR_MS)
    samples = read_samples(store, tenant_id, since_ms, now_ms + 1)
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
        accounts=_read_accounts(store, {tenant_id}, now_ms)[tenant_id],
        keys=list_keys(store, name),
        written=[(one.at_ms, one.details.refusals) for one in samples if one.refused],
        last_request_ms=last_request_ms(store, tenant_id),
        suspended_ms=suspended_ms,
    )


def _read_accounts(store: Store, tenant_ids: Collection[int], now_ms: int) -> dict[int, _Accounts]:
    """Return what decides the status of each tenant. Raises StoreError."""
    budgets: defaultdict[int, list[BudgetState]] = defaultdict(list)
    for state in budget_states(store, lambda: now_ms, tenant_ids):
        budgets[state.budget.tenant_id].append(state)
    budget_set_ms, limits_set_ms = dict[int | None, int](), dict[int | None, int]()
    only = next(iter(tenant_ids)) if len(tenant_ids) == 1 else None
    for change in all_changes(store, AuditFilter(tenant_id=only, since_ms=now_ms - HOUR_MS)):
        if change.action == "budget.set":
            budget_set_ms.setdefault(change.tenant_id, change.at_ms)  # the newest comes first
        elif change.action.startswith(("tenant.", "key.")) and not LIMIT_FIELDS.isdisjoint(
            (*(change.before or ()), *(change.after or ()))
        ):
            limits_set_ms.setdefault(change.tenant_id, change.at_ms)
    with_keys = tenants_with_keys(store, now_ms)
    return {
        one: _Accounts(
            budgets[one], one in with_keys, budget_set_ms.get(one, 0), limits_set_ms.get(one, 0)
        )
        for one in tenant_ids
    }


def _refused(
    codes: Sequence[str], refusals: Refusals, recent: Mapping[str, int], after_ms: int
) -> list[int]:
    """Return when requests were refused with one of these codes, after an instant."""
    exact = [recent[code] for code in codes if recent.get(code, 0) > after_ms]
    return [*refusals.times(codes, after_ms), *exact]


# --- the status and its reasons ------------------------------------------------------------------


def _status(
    found: TenantRecord, facts: _Accounts, seen: _Seen, now_ms: int
) -> tuple[TenantStatus, int | None, list[str]]:
    """Return the status, since when it holds (None for a suspension), and sentences that say
    why."""
    refusals, recent = seen.refusals, seen.recent
    last_hour, reasons = refusals.since(now_ms - HOUR_MS), list[str]()
    states: list[tuple[TenantStatus, int | None]] = []
    if found.tenant.status == "suspended":
        states.append(("suspended", None))
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
        asked = ", ".join(seen.asked_models) if code == MODEL_CODE else ""
        what = f"got the error {code} (asks for {asked})" if asked else f"got the error {code}"
        reasons += _counted(last_hour, (code,), what)
    reasons += [
        f"The soft budget of {_dollars(soft * PICO_PER_MICRO)} a {one.budget.window} is passed."
        for one in facts.budgets
        if one.is_over_soft and (soft := one.budget.soft_micros) is not None
    ]
    if not facts.has_key:
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
