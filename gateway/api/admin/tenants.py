"""`/admin/v1/tenants` and `/admin/v1/keys`: tenants and their keys, for administrators.

These handlers change what the command line changes; a running server sees either within a second. A
key's secret is shown once, in the response that creates it; later responses show its prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType, structs

from engine.errors import EngineError
from gateway.api.admin.audit import ChangeLog
from gateway.api.tenant_state import KeyAnswer, TenantStateAnswer, TenantStates, key_body
from gateway.background.config_reload import ConfigReload
from gateway.background.erasure import CacheErasure
from gateway.caching.floors import check_floor, guaranteed_blocks
from gateway.config import Config
from gateway.dialects.validation import convert
from gateway.engines.served_models import ServedModels
from gateway.errors import Kind, Refusal
from gateway.http import json_api
from gateway.http.request_context import STATE
from gateway.http.route_table import Role, Route
from gateway.ledger.query_pool import QueryPool
from tenancy.accounts import keys, tenants
from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.keys import Key
from tenancy.accounts.tenants import TenantRecord, floor_blocks_of
from tenancy.storage.interface import Store
from tenancy.types import (
    AtRest,
    CacheKeyMode,
    Fidelity,
    Limits,
    TenantSettings,
    ToleranceMode,
    WallClock,
)

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


class TenantAnswer(Struct, frozen=True):
    """A tenant. Limits in blocks, requests or tokens; null for no limit. `created`: RFC 3339.

    `floor_blocks_kept`: the guaranteed part of `floor_blocks`; null without an engine.
    """

    name: str
    tenant_id: int
    status: Literal["active", "suspended"]
    declared: bool
    created: str
    tier: str
    floor_blocks: int
    floor_blocks_kept: int | None
    ceiling_blocks: int | None
    weight: float
    priority: int
    classes: tuple[str, ...] | None
    default_class: str | None
    fidelity: Fidelity
    at_rest: AtRest
    attention: str
    promised_blocks_max: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    input_tokens_per_minute: int | None
    output_tokens_per_minute: int | None
    requests_at_once: int | None


class TenantSummary(Struct, frozen=True):
    """What a tenant may do now, and why not, as its state says in full. `reasons`: sentences.
    `top_code`: the most frequent error of the refused requests; null without one."""

    status: Literal["ok", "limited", "over_budget", "suspended"]
    reasons: list[str]
    refused_last_hour: int
    top_code: str | None


class ListedTenant(TenantAnswer, frozen=True, kw_only=True):
    """A tenant of a list."""

    state: TenantSummary


class TenantPage(Struct, frozen=True):
    """Tenants by name. `has_more`: ask again with `after`, the last name."""

    tenants: list[ListedTenant]
    has_more: bool


class TenantDeleted(Struct, frozen=True):
    """A deleted tenant and the pseudonym of its ledger entries."""

    name: str
    deleted: Literal[True]
    pseudonym: str | None


class NewKeyAnswer(KeyAnswer, frozen=True, kw_only=True):
    """A created key. `key`: the secret, which no later response shows."""

    key: str
    replaces: KeyAnswer | None = None


class KeyPage(Struct, frozen=True):
    """Keys by number. `has_more`: ask again with `after`, the last number."""

    keys: list[KeyAnswer]
    has_more: bool


class TenantPatch(TenantSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Changes to a tenant; an omitted field stays. `status`: `active` or `suspended`."""

    status: str | None = None


def _route(
    what: str,
    text: str,
    handler: Callable[..., Awaitable[object]],
    answer: type,
    query: str = "",
    *,
    status: int = 200,
    of: type | None = None,
) -> Route:
    role: Role = "admin:read" if what.startswith("GET") else "admin:tenants"
    about: Any = {"answer": answer, "query": query, "status": status, "body": of}
    return json_api.route(what, role, text, handler, **about)


def reload_route(reload: ConfigReload, changes: ChangeLog) -> Route:
    """Return the route of a reload."""

    async def handle(request: web.BaseRequest) -> object:
        return await reload.reload(changes.actor(request))

    text = "Reload the configuration file."
    return json_api.route("POST /admin/v1/reload", "admin:tenants", text, handle)


class TenantHandlers:
    """One handler per route of tenants and keys. Database calls run in a thread.

    Reads of a whole table run in the query pool, so authentication does not wait for them.
    """

    def __init__(
        self,
        store: Store,
        reports: QueryPool,
        config: Config,
        models: ServedModels,
        authenticator: KeyAuthenticator,
        wall: WallClock,
        changes: ChangeLog,
        states: TenantStates,
        erasure: CacheErasure,
    ) -> None:
        self._store, self._reports, self._wall = store, reports, wall
        self._config, self._models = config, models
        self._authenticator, self._changes = authenticator, changes
        self._states, self._erasure = states, erasure

    def routes(self) -> tuple[Route, ...]:
        """Return the routes."""
        many, keys_path, page = "/admin/v1/tenants", "/admin/v1/keys", "after limit"
        one, key = f"{many}/{{name}}", f"{keys_path}/{{key_id}}"
        tenant, shown, made = TenantAnswer, KeyAnswer, NewKeyAnswer
        state, deleted = TenantStateAnswer, TenantDeleted
        tenants, pages = TenantPage, KeyPage
        text = "Delete a tenant and its data."
        return (
            _route(f"GET {many}", "List tenants.", self.list_tenants, tenants, f"{page} format"),
            _route(f"POST {many}", "Create a tenant.", self.create_tenant, tenant, status=201),
            _route(f"GET {one}", "Show a tenant.", self.show_tenant, tenant),
            _route(f"PATCH {one}", "Change a tenant.", self.change_tenant, tenant, of=TenantPatch),
            _route(f"DELETE {one}", text, self.delete_tenant, deleted),
            _route(f"GET {one}/state", "Show a tenant's state.", self.show_state, state),
            _route(f"GET {one}/keys", "List a tenant's keys.", self.list_tenant_keys, pages, page),
            _route(f"POST {one}/keys", "Create a tenant's key.", self.create_key, made, status=201),
            _route(f"GET {keys_path}", "List all keys.", self.list_keys, pages, f"{page} admin"),
            _route(
                f"POST {keys_path}", "Create an admin key.", self.create_admin_key, made, status=201
            ),
            _route(f"GET {key}", "Show a key.", self.show_key, shown),
            _route(f"PATCH {key}", "Change a key.", self.change_key, shown),
            _route(f"POST {key}/rotate", "Replace a key.", self.rotate_key, made, status=201),
            _route(f"POST {key}/revoke", "Disable a key now.", self.revoke_key, shown),
        )

    # -- tenants ------------------------------------------------------------------------------

    async def list_tenants(self, request: web.BaseRequest) -> object:
        given = request.query
        is_csv = json_api.wants_csv(given)
        limit, after = json_api.positive_int(given, "limit", 100, PAGE_MAX), given.get("after", "")
        find = partial(tenants.list_tenant_records, after=after, limit=limit + 1)
        found = await self._reports.ask(find)
        has_more, found = len(found) > limit, found[:limit]
        states = await self._states.summaries(found)
        page = [
            {**self._body(one), "state": state} for one, state in zip(found, states, strict=True)
        ]
        if is_csv:
            next_page = json_api.page_url(request, after=page[-1]["name"]) if has_more else ""
            return json_api.csv_answer(page, "tenants", next_page)
        return {"tenants": page, "has_more": has_more}

    async def create_tenant(self, request: web.BaseRequest, body: NewTenant) -> object:
        self._config.caching.check_settings(body)
        tenants.check_settings(body)
        await asyncio.to_thread(
            tenants.create_tenant,
            self._store,
            self._wall,
            body.name,
            body.policy,
            tier=body.tier,
            limits=body.limits,
            check=self._floor_check(body.name, body),
            by=self._changes.actor(request),
        )
        made = await self._tenant(body.name)
        self._changes.note(request, "tenant_created", tenant_id=made.tenant.tenant_id)
        return self._body(made)

    async def show_tenant(self, request: web.BaseRequest) -> object:
        return self._body(await self._tenant(request[STATE].parameters["name"]))

    async def show_state(self, request: web.BaseRequest) -> object:
        found = await self._tenant(request[STATE].parameters["name"])
        return await self._states.state(found)

    async def change_tenant(self, request: web.BaseRequest, body: dict[str, Any]) -> object:
        name = request[STATE].parameters["name"]
        status = body.pop("status", None)
        if status not in (None, "active", "suspended"):
            message = f"status: {str(status)[:100]!r} is unknown; expected 'active' or 'suspended'."
            raise Refusal(Kind.BAD, "invalid_value", message, param="status")
        # Report each wrong field by its path, before the first write.
        settings = convert(body, TenantSettings, "")
        self._config.caching.check_settings(settings)
        tenants.check_settings(settings)
        check = self._floor_check(name, settings)
        by = self._changes.actor(request)
        change = partial(tenants.change_tenant, self._store, name, body, status, check=check, by=by)
        found = await asyncio.to_thread(change)
        self._changes.note(request, "tenant_changed", tenant_id=found.tenant.tenant_id)
        return self._body(found)

    async def delete_tenant(self, request: web.BaseRequest) -> object:
        json_api.refuse_body(request)
        found = await self._tenant(request[STATE].parameters["name"])
        name = found.tenant.name
        pseudonym = await asyncio.to_thread(
            delete_tenant, self._store, self._wall, name, self._changes.actor(request)
        )
        self._changes.note(request, "tenant_deleted", tenant_id=found.tenant.tenant_id)
        with suppress(EngineError):  # the minutely task tries again
            await self._erasure.erase_removed()
        return {"name": name, "deleted": True, "pseudonym": pseudonym}

    def _floor_check(self, name: str, settings: TenantSettings) -> tenants.TenantCheck | None:
        """Return a check that runs in the transaction: of two concurrent changes the second is
        refused."""
        floor, models = settings.floor_blocks, self._models
        if not floor:
            return None
        checks = [
            partial(
                check_floor,
                name=name,
                floor_blocks=floor,
                info=model.replicas.info,
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
        most = self._models.floor_blocks_max()
        asked = self._authenticator.floor_blocks()
        floor = floor_blocks_of(one)
        kept = None if most is None else guaranteed_blocks(floor, asked, most)
        return {**tenant_body(one), "floor_blocks_kept": kept}

    # -- keys ---------------------------------------------------------------------------------

    async def list_tenant_keys(self, request: web.BaseRequest) -> object:
        given = request.query
        found = await self._tenant(request[STATE].parameters["name"])
        return await self._key_page(given, tenant=found.tenant.name)

    async def create_key(self, request: web.BaseRequest, body: NewKey) -> object:
        found = await self._tenant(request[STATE].parameters["name"])
        secret = await asyncio.to_thread(
            keys.create_key,
            self._store,
            self._wall,
            found.tenant.tenant_id,
            workspace=body.workspace,
            label=body.label,
            lives_ms=_milliseconds(body.expires_in_s),
            scopes=body.scopes,
            limits=body.limits,
            by=self._changes.actor(request),
            tolerance=body.tolerance,
            cache_key=body.cache_key,
        )
        return await self._made(request, secret)

    async def list_keys(self, request: web.BaseRequest) -> object:
        given = request.query
        is_admin = json_api.choice(given, "admin", ("true",)) is not None
        return await self._key_page(given, is_admin=is_admin)

    async def create_admin_key(self, request: web.BaseRequest, body: NewAdminKey) -> object:
        _check_holds(request, body.scopes or keys.ADMIN_SCOPES)
        secret = await asyncio.to_thread(
            keys.create_admin_key,
            self._store,
            self._wall,
            label=body.label,
            lives_ms=_milliseconds(body.expires_in_s),
            scopes=body.scopes,
            by=self._changes.actor(request),
        )
        return await self._made(request, secret)

    async def show_key(self, request: web.BaseRequest) -> object:
        return key_body(await self._key(request))

    async def change_key(self, request: web.BaseRequest, body: KeyUpdate) -> object:
        changes = {
            name: value for name, value in structs.asdict(body).items() if value is not UNSET
        }
        key_id = str((await self._changeable_key(request)).key_id)
        if body.scopes is not UNSET:
            _check_holds(request, body.scopes)
        by = self._changes.actor(request)
        key = await asyncio.to_thread(keys.change_key, self._store, key_id, **changes, by=by)
        self._changes.note(request, "key_changed", key_id=key.key_id)
        return key_body(key)

    async def rotate_key(self, request: web.BaseRequest, body: Rotation) -> object:
        key_id = str((await self._changeable_key(request)).key_id)
        grace_ms = body.grace_s * 1000
        secret, new, old = await asyncio.to_thread(
            keys.rotate_key,
            self._store,
            self._wall,
            key_id,
            grace_ms,
            self._changes.actor(request),
        )
        self._changes.note(request, "key_rotated", key_id=new.key_id)
        return {"key": secret, **key_body(new), "replaces": key_body(old)}

    async def revoke_key(self, request: web.BaseRequest) -> object:
        key_id = str((await self._changeable_key(request)).key_id)
        by = self._changes.actor(request)
        key = await asyncio.to_thread(keys.revoke_key, self._store, self._wall, key_id, by)
        self._changes.note(request, "key_revoked", key_id=key.key_id)
        return key_body(key)

    # -- shared --------------------------------------------------------------------------------

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
    ) -> object:
        limit = json_api.positive_int(given, "limit", 100, PAGE_MAX)
        after = json_api.positive_int(given, "after", 0, 2**53)
        find = partial(keys.list_keys, is_admin=is_admin, after=after, limit=limit + 1)
        found = await self._reports.ask(partial(find, tenant=tenant))
        page = [key_body(key) for key in found[:limit]]
        return {"keys": page, "has_more": len(found) > limit}

    async def _made(self, request: web.BaseRequest, secret: str) -> object:
        key = await asyncio.to_thread(keys.find_key, self._store, secret)
        self._changes.note(request, "key_created", key_id=key.key_id)
        return {"key": secret, **key_body(key)}


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
