"""The operations of the admin listener: what administrators can ask."""

from __future__ import annotations

from gateway.api.admin.billing import BudgetBody
from gateway.api.admin.shared_scopes import ScopeBody
from gateway.api.admin.tenants import KeyUpdate, NewAdminKey, NewKey, NewTenant, Rotation
from gateway.api.admin.usage import EraseBody
from gateway.api.openapi import answers
from gateway.api.openapi.history_answers import (
    HistoryAnswer,
    RequestAnswer,
    RequestPage,
    TenantStateAnswer,
)
from gateway.api.openapi.level_answers import LevelsAnswer, LevelTenants
from gateway.api.openapi.operation import JSON, Operation
from gateway.api.openapi.public_operations import open_operations
from gateway.http.middleware import Role
from tenancy.pricing.charges import RateCard
from tenancy.types import TenantSettings

API = "/admin/v1"
PAGE = ("after", "limit")
TABLE = (JSON, "text/csv")
"""Content types of a table: the parameter `format` chooses."""
READ: Role = "admin:read"
TENANTS: Role = "admin:tenants"
MONEY: Role = "admin:money"
ERASE: Role = "admin:erase"


class TenantPatch(TenantSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Changes to a tenant; an omitted field stays. `status`: `active` or `suspended`."""

    status: str | None = None


def operations() -> tuple[Operation, ...]:
    """Return the operations of the admin listener."""
    changing = (*_tenants(), *_keys(), *_scopes(), *_usage(), *_money(), *_webhooks())
    return (*changing, *_views(), *_history(), *open_operations())


def _tenants() -> tuple[Operation, ...]:
    many, one = f"{API}/tenants", API + "/tenants/{name}"
    tenant, page, gone = answers.TenantAnswer, answers.TenantPage, answers.TenantDeleted
    return (
        Operation("GET", many, READ, "List tenants.", None, page, (*PAGE, "format"), content=TABLE),
        Operation("POST", many, TENANTS, "Create a tenant.", NewTenant, tenant, status=201),
        Operation("GET", one, READ, "Show a tenant.", None, tenant),
        Operation("PATCH", one, TENANTS, "Change a tenant.", TenantPatch, tenant),
        Operation("DELETE", one, TENANTS, "Delete a tenant and its data.", None, gone),
        Operation("GET", f"{one}/state", READ, "Show its state.", None, TenantStateAnswer),
        Operation("POST", f"{API}/reload", TENANTS, "Reload the configuration file."),
    )


def _keys() -> tuple[Operation, ...]:
    many, own, one = f"{API}/keys", API + "/tenants/{name}/keys", API + "/keys/{key_id}"
    key, page, made = answers.KeyAnswer, answers.KeyPage, answers.NewKeyAnswer
    rotate, revoke = f"{one}/rotate", f"{one}/revoke"
    return (
        Operation("GET", own, READ, "List a tenant's keys.", None, page, PAGE),
        Operation("POST", own, TENANTS, "Create a tenant's key.", NewKey, made, status=201),
        Operation("GET", many, READ, "List all keys.", None, page, (*PAGE, "admin")),
        Operation("POST", many, TENANTS, "Create an admin key.", NewAdminKey, made, status=201),
        Operation("GET", one, READ, "Show a key.", None, key),
        Operation("PATCH", one, TENANTS, "Change a key.", KeyUpdate, key),
        Operation("POST", rotate, TENANTS, "Replace a key.", Rotation, made, status=201),
        Operation("POST", revoke, TENANTS, "Disable a key now.", None, key),
    )


def _scopes() -> tuple[Operation, ...]:
    many, one = f"{API}/shared-scopes", API + "/shared-scopes/{name}"
    scope, gone = answers.ScopeAnswer, answers.ScopeRemoved
    return (
        Operation("GET", many, READ, "List shared scopes.", None, answers.ScopeList),
        Operation("GET", one, READ, "Show a shared scope.", None, scope),
        Operation("PUT", one, TENANTS, "Create or change a shared scope.", ScopeBody, scope),
        Operation("DELETE", one, TENANTS, "Remove a shared scope.", None, gone),
    )


def _usage() -> tuple[Operation, ...]:
    report = ("tenant", "format", "since", "until", "group_by", "key_id", "model")
    usage, erase, receipt = answers.UsageAnswer, f"{API}/erase", answers.ErasureAnswer
    many, receipts = ("tenant", "limit"), answers.ReceiptList
    return (
        Operation("GET", f"{API}/usage", READ, "Report usage.", None, usage, report, content=TABLE),
        Operation("GET", f"{API}/cache", READ, "Show the blocks.", query=("tenant",)),
        Operation("POST", erase, ERASE, "Erase a cache.", EraseBody, receipt),
        Operation("GET", f"{API}/erasures", READ, "List receipts.", None, receipts, many),
    )


def _money() -> tuple[Operation, ...]:
    cards = f"{API}/rate-cards"
    card, listed, budgets = answers.RateCardAnswer, answers.RateCardList, answers.BudgetList
    own = API + "/tenants/{name}/budgets"
    return (
        Operation("GET", cards, READ, "List rate cards.", None, listed),
        Operation("POST", cards, MONEY, "Add a rate card.", RateCard, card, status=201),
        Operation("GET", f"{API}/budgets", READ, "List budgets.", None, budgets, ("tenant",)),
        Operation("PUT", own, MONEY, "Set or remove a budget.", BudgetBody, budgets),
    )


def _views() -> tuple[Operation, ...]:
    changes = (
        *("since", "until", "tenant", "actor", "actor_id", "action", "before", "limit"),
        "format",
    )
    page, metrics, me = answers.AuditPage, ("text/plain",), answers.AdministratorAnswer
    return (
        Operation("GET", f"{API}/audit", READ, "List changes.", None, page, changes, content=TABLE),
        Operation("GET", f"{API}/me", "admin", "Show the asking administrator.", None, me),
        Operation("GET", f"{API}/analytics", READ, "Show analytics since the start."),
        Operation("GET", f"{API}/levels", READ, "Show the cache's levels.", None, LevelsAnswer),
        Operation(
            "GET",
            f"{API}/levels/tenants",
            READ,
            "Show bytes by tenant and level.",
            answer=LevelTenants,
            query=("format",),
            content=TABLE,
        ),
        Operation("GET", API + "/analytics/{name}", READ, "Show a tenant's analytics."),
        Operation("GET", API + "/tree/{name}", READ, "Show the shape of a tenant's prefix trees."),
        Operation(
            "GET", "/metrics", "open", "Show metrics in Prometheus's format.", content=metrics
        ),
    )


def _history() -> tuple[Operation, ...]:
    drawn = ("range", "since", "until", "step_ms", "tenant", "model", "format")
    listed = ("tenant", "code", "since", "until", "limit", "before", "format")
    many, one, text = f"{API}/requests", API + "/requests/{request_id}", "List ended requests."
    found, why, findings = (
        ("tenant", "since", "until"),
        "Say what is paid for twice.",
        f"{API}/findings",
    )
    return (
        Operation(
            "GET",
            f"{API}/history",
            READ,
            "Draw charts over time.",
            answer=HistoryAnswer,
            query=drawn,
            content=TABLE,
        ),
        Operation("GET", many, READ, text, None, RequestPage, listed, content=TABLE),
        Operation("GET", one, READ, "Show an ended request.", None, RequestAnswer),
        Operation("GET", findings, READ, why, None, answers.FindingList, found),
    )


def _webhooks() -> tuple[Operation, ...]:
    path, test = f"{API}/webhooks", API + "/webhooks/{name}/test"
    listed, tested, query = answers.WebhookList, answers.WebhookTested, ("state", "limit")
    return (
        Operation("GET", path, READ, "List webhooks and deliveries.", None, listed, query),
        Operation("POST", test, TENANTS, "Send a test event.", None, tested, status=201),
    )
