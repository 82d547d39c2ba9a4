"""`/admin/v1/tenants` and `/admin/v1/keys`: tenants and their keys, for administrators.

These handlers change what the command line changes; a running server sees either within a second. A
key's secret is shown once, in the response that creates it; later responses show its prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType, structs

from engine.errors import EngineError
from gateway.api.admin.audit import actor_of, note_change
from gateway.api.tenant_state import key_body, tenant_state, tenant_summaries
from gateway.background.config_reload import reload
from gateway.background.erasure import erase_removed
from gateway.background.webhooks import WebhookSender
from gateway.caching.floors import check_floor, guaranteed_blocks
from gateway.context import Context
from gateway.dialects.validation import convert
from gateway.errors import Kind, Refusal
from gateway.http import json_api
from gateway.http.middleware import Handler, Role, Route
from gateway.http.request_context import STATE
from tenancy.accounts import keys, tenants
from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.keys import Key
from tenancy.accounts.tenants import TenantRecord, floor_blocks_of
from tenancy.types import CacheKeyMode, Limits, TenantSettings, ToleranceMode

PAGE = ("after", "limit")
"""Parameters of a page: the last row of the one before, and the most rows."""
PAGE_MAX = 1_000
"""Most rows of one page."""
DAY_S = 86_400
Seconds = Annotated[int, Meta(ge=-(2**53), le=2**53)]
"""A time in whole seconds, as JSON's readers keep it exactly; the accounts have narrower bounds."""


class NewTenant(TenantSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tenant to create."""

    name: str


class NewKey(Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant's key to create."""

    workspace: str = "default"
    label: str = ""
    expires_in_s: Seconds | None = None
    scopes: tuple[str, ...] = keys.SCOPES
    limits: Limits = Limits()
    tolerance: ToleranceMode | None = None
    cache_key: CacheKeyMode | None = None


class NewAdminKey(Struct, frozen=True, forbid_unknown_fields=True):
    """An administrator's key to create. `scopes`: None for all."""

    label: str = ""
    expires_in_s: Seconds | None = None
    scopes: tuple[str, ...] | None = None


class KeyUpdate(Struct, frozen=True, forbid_unknown_fields=True):
    """Changes to a key; an omitted field stays."""

    label: str | UnsetType = UNSET
    scopes: tuple[str, ...] | UnsetType = UNSET
    limits: Limits | UnsetType = UNSET
    tolerance: ToleranceMode | UnsetType | None = UNSET
    cache_key: CacheKeyMode | UnsetType | None = UNSET


class Rotation(Struct, frozen=True, forbid_unknown_fields=True):
    """A rotation. `grace_s`: seconds for which the old key stays valid."""

    grace_s: Seconds = DAY_S


def routes(gateway: Context, webhooks: WebhookSender) -> tuple[Route, ...]:
    """Return the routes of tenants and keys, and of the reload, which applies `webhooks` too."""
    handlers = _TenantHandlers(gateway, webhooks)
    one, tenant_keys = "/admin/v1/tenants/{name}", "/admin/v1/tenants/{name}/keys"
    key = "/admin/v1/keys/{key_id}"
    return (
        _route("GET", "/admin/v1/tenants", handlers.list_tenants),
        _route("POST", "/admin/v1/tenants", handlers.create_tenant),
        _route("GET", one, handlers.show_tenant),
        _route("PATCH", one, handlers.change_tenant),
        _route("GET", f"{one}/state", handlers.show_state),
        _route("DELETE", one, handlers.delete_tenant),
        _route("GET", tenant_keys, handlers.list_tenant_keys),
        _route("POST", tenant_keys, handlers.create_key),
        _route("GET", "/admin/v1/keys", handlers.list_keys),
        _route("POST", "/admin/v1/keys", handlers.create_admin_key),
        _route("GET", key, handlers.show_key),
        _route("PATCH", key, handlers.change_key),
        _route("POST", f"{key}/rotate", handlers.rotate_key),
        _route("POST", f"{key}/revoke", handlers.revoke_key),
        _route("POST", "/admin/v1/reload", handlers.reload),
    )


def _route(method: str, path: str, handler: Handler) -> Route:
    role: Role = "admin:read" if method == "GET" else "admin:tenants"
    return Route(method, path, handler, role, json_api.SHAPE)


class _TenantHandlers:
    """One handler per route. Database calls run in a thread.

    Reads of a whole table run in the query pool, so authentication does not wait for them.
    """

    def __init__(self, gateway: Context, webhooks: WebhookSender) -> None:
        self._gateway = gateway
        self._webhooks = webhooks
        self._store = gateway.store

    # -- tenants ------------------------------------------------------------------------------

    async def list_tenants(self, request: web.BaseRequest) -> web.StreamResponse:
        given = json_api.query(request, *PAGE, "format")
        is_csv = json_api.wants_csv(given)
        limit, after = json_api.positive_int(given, "limit", 100, PAGE_MAX), given.get("after", "")
        find = partial(tenants.list_tenant_records, after=after, limit=limit + 1)
        found = await self._gateway.reports.ask(find)
        has_more, found = len(found) > limit, found[:limit]
        states = await tenant_summaries(self._gateway, found)
        page = [
            {**self._body(one), "state": state} for one, state in zip(found, states, strict=True)
        ]
        if is_csv:
            next_page = json_api.page_url(request, after=page[-1]["name"]) if has_more else ""
            return json_api.csv_answer(page, "tenants", next_page)
        return json_api.answer({"tenants": page, "has_more": has_more})

    async def create_tenant(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await self._read(request, NewTenant)
        self._gateway.config.caching.check_settings(body)
        tenants.check_settings(body)
        await asyncio.to_thread(
            tenants.create_tenant,
            self._store,
            self._gateway.wall,
            body.name,
            body.policy,
            tier=body.tier,
            limits=body.limits,
            check=self._floor_check(body.name, body),
            by=actor_of(self._gateway, request),
        )
        made = await self._tenant(body.name)
        note_change(self._gateway, request, "tenant_created", tenant_id=made.tenant.tenant_id)
        return json_api.answer(self._body(made), 201)

    async def show_tenant(self, request: web.BaseRequest) -> web.StreamResponse:
        json_api.query(request)
        return json_api.answer(self._body(await self._tenant(request[STATE].parameters["name"])))

    async def show_state(self, request: web.BaseRequest) -> web.StreamResponse:
        json_api.query(request)
        found = await self._tenant(request[STATE].parameters["name"])
        return json_api.answer(await tenant_state(self._gateway, found))

    async def change_tenant(self, request: web.BaseRequest) -> web.StreamResponse:
        name = request[STATE].parameters["name"]
        body = await self._read(request, dict[str, Any])
        status = body.pop("status", None)
        if status not in (None, "active", "suspended"):
            message = f"status: {str(status)[:100]!r} is unknown; expected 'active' or 'suspended'."
            raise Refusal(Kind.BAD, "invalid_value", message, param="status")
        # Report each wrong field by its path, before the first write.
        settings = convert(body, TenantSettings, "")
        self._gateway.config.caching.check_settings(settings)
        tenants.check_settings(settings)
        check = self._floor_check(name, settings)
        by = actor_of(self._gateway, request)
        change = partial(tenants.change_tenant, self._store, name, body, status, check=check, by=by)
        found = await asyncio.to_thread(change)
        note_change(self._gateway, request, "tenant_changed", tenant_id=found.tenant.tenant_id)
        return json_api.answer(self._body(found))

    async def delete_tenant(self, request: web.BaseRequest) -> web.StreamResponse:
        json_api.query(request)
        json_api.refuse_body(request)
        found = await self._tenant(request[STATE].parameters["name"])
        gateway, name = self._gateway, found.tenant.name
        pseudonym = await asyncio.to_thread(
            delete_tenant, self._store, gateway.wall, name, actor_of(gateway, request)
        )
        note_change(self._gateway, request, "tenant_deleted", tenant_id=found.tenant.tenant_id)
        with suppress(EngineError):  # the minutely task tries again
            await erase_removed(gateway)
        return json_api.answer({"name": name, "deleted": True, "pseudonym": pseudonym})

    def _floor_check(self, name: str, settings: TenantSettings) -> tenants.TenantCheck | None:
        """Return a check that runs in the transaction: of two concurrent changes the second is
        refused."""
        floor, models = settings.floor_blocks, self._gateway.models
        if not floor:
            return None
        checks = [
            partial(
                check_floor,
                name=name,
                floor_blocks=floor,
                info=model.engine.info,
                scale=model.quota_scale,
                model=model.name if models.are_several else "",
            )
            for model in models
        ]

        def check(found: Sequence[TenantRecord]) -> None:
            for one in checks:
                one(found)

        return check

    def _body(self, one: TenantRecord) -> dict[str, Any]:
        """Return a tenant as responses show it, with the floor that this engine grants."""
        most = self._gateway.models.floor_blocks_max()
        asked = self._gateway.authenticator.floor_blocks()
        floor = floor_blocks_of(one)
        kept = None if most is None else guaranteed_blocks(floor, asked, most)
        return {**tenant_body(one), "floor_blocks_kept": kept}

    # -- keys ---------------------------------------------------------------------------------

    async def list_tenant_keys(self, request: web.BaseRequest) -> web.StreamResponse:
        given = json_api.query(request, *PAGE)
        found = await self._tenant(request[STATE].parameters["name"])
        return await self._key_page(given, tenant=found.tenant.name)

    async def create_key(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await self._read(request, NewKey)
        found = await self._tenant(request[STATE].parameters["name"])
        secret = await asyncio.to_thread(
            keys.create_key,
            self._store,
            self._gateway.wall,
            found.tenant.tenant_id,
            workspace=body.workspace,
            label=body.label,
            lives_ms=_milliseconds(body.expires_in_s),
            scopes=body.scopes,
            limits=body.limits,
            by=actor_of(self._gateway, request),
            tolerance=body.tolerance,
            cache_key=body.cache_key,
        )
        return await self._made(request, secret)

    async def list_keys(self, request: web.BaseRequest) -> web.StreamResponse:
        given = json_api.query(request, *PAGE, "admin")
        is_admin = json_api.choice(given, "admin", ("true",)) is not None
        return await self._key_page(given, is_admin=is_admin)

    async def create_admin_key(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await self._read(request, NewAdminKey)
        _check_holds(request, body.scopes or keys.ADMIN_SCOPES)
        secret = await asyncio.to_thread(
            keys.create_admin_key,
            self._store,
            self._gateway.wall,
            label=body.label,
            lives_ms=_milliseconds(body.expires_in_s),
            scopes=body.scopes,
            by=actor_of(self._gateway, request),
        )
        return await self._made(request, secret)

    async def show_key(self, request: web.BaseRequest) -> web.StreamResponse:
        json_api.query(request)
        return json_api.answer(key_body(await self._key(request)))

    async def change_key(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await self._read(request, KeyUpdate)
        changes = {
            name: value for name, value in structs.asdict(body).items() if value is not UNSET
        }
        key_id = str((await self._changeable_key(request)).key_id)
        if body.scopes is not UNSET:
            _check_holds(request, body.scopes)
        by = actor_of(self._gateway, request)
        key = await asyncio.to_thread(keys.change_key, self._store, key_id, **changes, by=by)
        note_change(self._gateway, request, "key_changed", key_id=key.key_id)
        return json_api.answer(key_body(key))

    async def rotate_key(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await self._read(request, Rotation)
        key_id = str((await self._changeable_key(request)).key_id)
        grace_ms = body.grace_s * 1000
        secret, new, old = await asyncio.to_thread(
            keys.rotate_key,
            self._store,
            self._gateway.wall,
            key_id,
            grace_ms,
            actor_of(self._gateway, request),
        )
        note_change(self._gateway, request, "key_rotated", key_id=new.key_id)
        return json_api.answer({"key": secret, **key_body(new), "replaces": key_body(old)}, 201)

    async def revoke_key(self, request: web.BaseRequest) -> web.StreamResponse:
        json_api.query(request)
        key_id = str((await self._changeable_key(request)).key_id)
        by = actor_of(self._gateway, request)
        key = await asyncio.to_thread(keys.revoke_key, self._store, self._gateway.wall, key_id, by)
        note_change(self._gateway, request, "key_revoked", key_id=key.key_id)
        return json_api.answer(key_body(key))

    # -- the configuration file ---------------------------------------------------------------

    async def reload(self, request: web.BaseRequest) -> web.StreamResponse:
        json_api.query(request)
        by = actor_of(self._gateway, request)
        return json_api.answer(await reload(self._gateway, self._webhooks, by))

    # -- shared --------------------------------------------------------------------------------

    async def _read(self, request: web.BaseRequest, kind: type[json_api.T]) -> json_api.T:
        return await json_api.read(request, self._gateway.config.server, kind)

    async def _tenant(self, name: str) -> TenantRecord:
        return await asyncio.to_thread(tenants.find_tenant_record, self._store, name)

    async def _key(self, request: web.BaseRequest) -> Key:
        """Return the key with the id of the path. A key's prefix is not accepted here."""
        key_id = request[STATE].parameters["key_id"]
        if not (key_id.isascii() and key_id.isdigit()):
            raise Refusal(
                Kind.NOT_FOUND,
                "key_unknown",
                "Key not found; expected the number of an existing key.",
            )
        return await asyncio.to_thread(keys.find_key, self._store, key_id)

    async def _changeable_key(self, request: web.BaseRequest) -> Key:
        """Return the key of the path. An administrator changes no administrator's key that has
        scopes beyond its own: a rotation would hand them out. Raises Refusal."""
        key = await self._key(request)
        if key.tenant is None:
            _check_holds(request, key.scopes)
        return key

    async def _key_page(
        self, given: Mapping[str, str], *, tenant: str | None = None, is_admin: bool = False
    ) -> web.StreamResponse:
        limit = json_api.positive_int(given, "limit", 100, PAGE_MAX)
        after = json_api.positive_int(given, "after", 0, 2**53)
        find = partial(keys.list_keys, is_admin=is_admin, after=after, limit=limit + 1)
        found = await self._gateway.reports.ask(partial(find, tenant=tenant))
        page = [key_body(key) for key in found[:limit]]
        return json_api.answer({"keys": page, "has_more": len(found) > limit})

    async def _made(self, request: web.BaseRequest, secret: str) -> web.StreamResponse:
        key = await asyncio.to_thread(keys.find_key, self._store, secret)
        note_change(self._gateway, request, "key_created", key_id=key.key_id)
        return json_api.answer({"key": secret, **key_body(key)}, 201)


def _check_holds(request: web.BaseRequest, scopes: Iterable[str]) -> None:
    """Check that the asking administrator has these scopes. Raises Refusal."""
    wanted = set(scopes)
    if keys.ADMIN in wanted:
        wanted = set(keys.ADMIN_SCOPES)
    missing = sorted((wanted & set(keys.ADMIN_SCOPES)) - request[STATE].admin_scopes)
    if missing:
        raise Refusal(
            Kind.PERMISSION,
            "scope_missing",
            f"This administrator does not have the scopes {', '.join(missing)}, which the other key"
            " has or would have.",
        )


def tenant_body(one: TenantRecord) -> dict[str, Any]:
    """Return a tenant as responses show it."""
    tenant = one.tenant
    return {
        "name": tenant.name,
        "tenant_id": tenant.tenant_id,
        "status": tenant.status,
        "declared": tenant.is_declared,
        "created": json_api.instant(tenant.created_ms),
        **structs.asdict(one.settings),
    }


def _milliseconds(seconds: int | None) -> int | None:
    return None if seconds is None else seconds * 1000
