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

TABLE = (JSON, "text/csv")
"""Content types of a table: the parameter `format` chooses."""


class TenantPatch(TenantSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Changes to a tenant; an omitted field stays. `status`: `active` or `suspended`."""

    status: str | None = None


def _show(path: str, text: str, answer: type | None = None, query: str = "") -> Operation:
    """Return what reads. `query`: the names of its parameters."""
    names = tuple(query.split())
    content = TABLE if "format" in names else (JSON,)
    whole = f"/admin/v1{path}"
    return Operation("GET", whole, "admin:read", text, None, answer, names, content=content)


def _act(
    route: str,
    text: str,
    body: type | None = None,
    answer: type | None = None,
    status: int = 200,
    role: Role = "admin:tenants",
) -> Operation:
    """Return what changes something. `route`: its method and path."""
    method, path = route.split()
    return Operation(method, f"/admin/v1{path}", role, text, body, answer, status=status)


_TENANTS_AND_KEYS = (
    _show("/tenants", "List tenants.", answers.TenantPage, "after limit format"),
    _act("POST /tenants", "Create a tenant.", NewTenant, answers.TenantAnswer, 201),
    _show("/tenants/{name}", "Show a tenant.", answers.TenantAnswer),
    _act("PATCH /tenants/{name}", "Change a tenant.", TenantPatch, answers.TenantAnswer),
    _act("DELETE /tenants/{name}", "Delete a tenant and its data.", None, answers.TenantDeleted),
    _show("/tenants/{name}/state", "Show a tenant's state.", TenantStateAnswer),
    _act("POST /reload", "Reload the configuration file."),
    _show("/tenants/{name}/keys", "List a tenant's keys.", answers.KeyPage, "after limit"),
    _act("POST /tenants/{name}/keys", "Create a tenant's key.", NewKey, answers.NewKeyAnswer, 201),
    _show("/keys", "List all keys.", answers.KeyPage, "after limit admin"),
    _act("POST /keys", "Create an admin key.", NewAdminKey, answers.NewKeyAnswer, 201),
    _show("/keys/{key_id}", "Show a key.", answers.KeyAnswer),
    _act("PATCH /keys/{key_id}", "Change a key.", KeyUpdate, answers.KeyAnswer),
    _act("POST /keys/{key_id}/rotate", "Replace a key.", Rotation, answers.NewKeyAnswer, 201),
    _act("POST /keys/{key_id}/revoke", "Disable a key now.", None, answers.KeyAnswer),
    _show("/shared-scopes", "List shared scopes.", answers.ScopeList),
    _show("/shared-scopes/{name}", "Show a shared scope.", answers.ScopeAnswer),
    _act(
        "PUT /shared-scopes/{name}",
        "Create or change a shared scope.",
        ScopeBody,
        answers.ScopeAnswer,
    ),
    _act("DELETE /shared-scopes/{name}", "Remove a shared scope.", None, answers.ScopeRemoved),
)
_MONEY_AND_CACHE = (
    _show(
        "/usage",
        "Report usage.",
        answers.UsageAnswer,
        "tenant format since until group_by key_id model",
    ),
    _show("/cache", "Show the blocks.", None, "tenant"),
    _act("POST /erase", "Erase a cache.", EraseBody, answers.ErasureAnswer, role="admin:erase"),
    _show("/erasures", "List receipts.", answers.ReceiptList, "tenant limit"),
    _show("/rate-cards", "List rate cards.", answers.RateCardList),
    _act(
        "POST /rate-cards",
        "Add a rate card.",
        RateCard,
        answers.RateCardAnswer,
        status=201,
        role="admin:money",
    ),
    _show("/budgets", "List budgets.", answers.BudgetList, "tenant"),
    _act(
        "PUT /tenants/{name}/budgets",
        "Set or remove a budget.",
        BudgetBody,
        answers.BudgetList,
        role="admin:money",
    ),
    _show("/webhooks", "List webhooks and deliveries.", answers.WebhookList, "state limit"),
    _act("POST /webhooks/{name}/test", "Send a test event.", None, answers.WebhookTested, 201),
)
_VIEWS = (
    _show(
        "/audit",
        "List changes.",
        answers.AuditPage,
        "since until tenant actor actor_id action before limit format",
    ),
    Operation(
        *("GET", "/admin/v1/me", "admin", "Show the asking administrator."),
        answer=answers.AdministratorAnswer,
    ),
    _show("/analytics", "Show analytics since the start."),
    _show("/levels", "Show the cache's levels.", LevelsAnswer),
    _show("/levels/tenants", "Show bytes by tenant and level.", LevelTenants, "format"),
    _show("/analytics/{name}", "Show a tenant's analytics."),
    _show("/tree/{name}", "Show the shape of a tenant's prefix trees."),
    Operation(
        *("GET", "/metrics", "open", "Show metrics in Prometheus's format."),
        content=("text/plain",),
    ),
    _show(
        "/history",
        "Draw charts over time.",
        HistoryAnswer,
        "range since until step_ms tenant model format",
    ),
    _show(
        "/requests",
        "List ended requests.",
        RequestPage,
        "tenant code since until limit before format",
    ),
    _show("/requests/{request_id}", "Show an ended request.", RequestAnswer),
    _show(
        "/findings",
        "Say which prompts are paid for twice.",
        answers.FindingList,
        "tenant since until",
    ),
)


def operations() -> tuple[Operation, ...]:
    """Return the operations of the admin listener."""
    return (*_TENANTS_AND_KEYS, *_MONEY_AND_CACHE, *_VIEWS, *open_operations())
