"""`/admin/v1/usage`, `/cache`, `/erase` and `/erasures`: usage, cache contents, erasure.

For administrators; `gateway.api.self_service` has the same for a tenant itself.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any

from aiohttp import web
from msgspec import Struct

from gateway.api import usage_report
from gateway.api.admin.audit import ChangeLog
from gateway.api.usage_report import UsageAnswer, UsageReports
from gateway.background import erasure
from gateway.background.erasure import CacheErasure, ReceiptAnswer
from gateway.caching.namespaces import namespaces_of
from gateway.engines.served_models import ServedModels
from gateway.errors import Kind, Refusal
from gateway.http import json_api
from gateway.http.request_context import STATE
from gateway.http.route_table import Route
from tenancy.accounts.erasure_receipts import RECEIPTS_MAX, digest_namespaces, list_receipts
from tenancy.accounts.keys import check_name
from tenancy.accounts.shared_scopes import find_scope
from tenancy.accounts.tenants import find_tenant_record
from tenancy.storage.interface import Store

NAMESPACES_MAX = 1_000
"""Most namespaces in one response; the largest ones."""


class ErasureAnswer(ReceiptAnswer, frozen=True, kw_only=True, omit_defaults=True):
    """The receipt of an administrator's erasure, and whose cache it was."""

    tenant: str
    shared_scope: str | None = None


class ReceiptList(Struct, frozen=True):
    """Receipts, newest first."""

    erasures: list[ReceiptAnswer]


class EraseBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The cache to erase: a tenant's or one workspace's or lease of it, or a shared scope's."""

    tenant: str | None = None
    workspace: str | None = None
    lease_id: str | None = None
    shared_scope: str | None = None


class UsageHandlers:
    """One handler per route of usage, cache contents and erasures."""

    def __init__(
        self,
        store: Store,
        models: ServedModels,
        reports: UsageReports,
        erasure: CacheErasure,
        changes: ChangeLog,
        name_of: Callable[[int], str | None],
    ) -> None:
        """`name_of`: the name of a tenant that exists."""
        self._store, self._models, self._reports = store, models, reports
        self._erasure, self._changes, self._name_of = erasure, changes, name_of

    def routes(self) -> tuple[Route, ...]:
        """Return the routes."""
        route, of_usage = json_api.route, f"tenant format {usage_report.PARAMETERS}"
        return (
            route(
                *("GET /admin/v1/usage", "admin:read", "Report usage.", self.usage),
                answer=UsageAnswer,
                query=of_usage,
            ),
            route(
                *("GET /admin/v1/cache", "admin:read", "Show the blocks.", self.cache),
                query="tenant",
            ),
            route(
                *("POST /admin/v1/erase", "admin:erase", "Erase a cache.", self.erase),
                answer=ErasureAnswer,
            ),
            route(
                *("GET /admin/v1/erasures", "admin:read", "List receipts.", self.erasures),
                answer=ReceiptList,
                query="tenant limit",
            ),
        )

    async def usage(self, request: web.BaseRequest) -> object:
        """Report the usage of one tenant or of all."""
        given = request.query
        name, is_csv = given.get("tenant"), json_api.wants_csv(given)
        if name is not None:
            await self._tenant(name)
        body = await self._reports.report(given, name)
        if is_csv:
            return json_api.csv_answer(body["rows"] or [body["totals"]], "usage")
        return body

    async def cache(self, request: web.BaseRequest) -> object:
        """Show the pool and the blocks of one tenant or of all."""
        name = request.query.get("tenant")
        return await self._contents(None if name is None else await self._tenant(name))

    async def erase(self, request: web.BaseRequest, body: EraseBody) -> object:
        """Erase a cache, and return the receipt."""
        if len(body.lease_id or "") > erasure.LEASE_ID_CHARS_MAX:
            raise Refusal(Kind.NOT_FOUND, "lease_unknown", "Lease not found.", param="lease_id")
        owner, target = await self._target(body, request[STATE].admin_key_id or 0)
        receipt = await self._erasure.erase(target, self._changes.actor(request))
        return {**owner, **erasure.receipt_body(receipt)}

    async def erasures(self, request: web.BaseRequest) -> object:
        """List a tenant's receipts."""
        given = request.query
        if "tenant" not in given:
            raise Refusal(
                Kind.BAD, "missing_required_parameter", "tenant is required.", param="tenant"
            )
        tenant_id = await self._tenant(given["tenant"])
        limit = json_api.positive_int(given, "limit", 100, RECEIPTS_MAX)
        receipts = await asyncio.to_thread(list_receipts, self._store, tenant_id, limit)
        return {"erasures": [erasure.receipt_body(one) for one in receipts]}

    async def _target(
        self, body: EraseBody, by: int
    ) -> tuple[dict[str, str], erasure.ErasureTarget]:
        """Return the owner for the response, and the target. Raises Refusal and BadName."""
        if body.workspace is not None:
            check_name(body.workspace, "workspace")
        if body.tenant is not None and body.shared_scope is None:
            tenant_id = await self._tenant(body.tenant)
            target = erasure.ErasureTarget(tenant_id, by, body.workspace, body.lease_id)
            return {"tenant": body.tenant}, target
        if body.shared_scope is None:
            message = "tenant or shared_scope is required."
            raise Refusal(Kind.BAD, "missing_required_parameter", message, param="tenant")
        if body.tenant is not None or body.workspace is not None:
            message = "shared_scope is not allowed with tenant or workspace; omit them."
            raise Refusal(Kind.BAD, "invalid_value", message, param="shared_scope")
        scope = await asyncio.to_thread(find_scope, self._store, body.shared_scope)
        owner = {"tenant": scope.owner, "shared_scope": scope.name}
        return owner, erasure.scope_target(scope, by, body.lease_id)

    async def _tenant(self, name: str) -> int:
        found = await asyncio.to_thread(find_tenant_record, self._store, name)
        return found.tenant.tenant_id

    def _model(self, one: erasure.Holding) -> dict[str, str]:
        """Return the model of a holding, where several are served."""
        model = self._models.of_namespace(one.stats.namespace)
        return {"model": model.name} if model is not None and self._models.are_several else {}

    async def _contents(self, wanted: int | None) -> dict[str, Any]:
        """Return the pool and the blocks by namespace; their sum is the number of allocated
        blocks."""
        stats = await self._models.refresh()
        scopes = await self._erasure.scope_names()
        spaces = namespaces_of(self._models.namespaces(), wanted)
        largest = heapq.nlargest(NAMESPACES_MAX + 1, spaces, key=lambda one: one.blocks)
        held = erasure.list_holdings(largest)
        counts = ("blocks", "pinned_blocks", "promised_blocks", "promised_below")
        rows = [
            {
                "tenant": self._name_of(one.tenant_id),
                **one.shown(scopes),
                **self._model(one),
                "namespace_digest": digest_namespaces([one.stats.namespace]),
                **{name: getattr(one.stats, name) for name in (*counts, "running", "waiting")},
            }
            for one in held[:NAMESPACES_MAX]
        ]
        of_pool = ("blocks", "free_blocks", "cached_blocks", "pinned_blocks")
        return {
            "pool": {name: getattr(stats, name) for name in of_pool},
            "namespaces": rows,
            "has_more": len(held) > NAMESPACES_MAX,
        }
