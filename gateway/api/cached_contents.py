"""Cached contents: create, list, get, update, delete. Every success has status 200.

Creating computes the prefix as an ordinary request, which is held, settled and billed as a write;
requests with one `Idempotency-Key` create once. A cached content survives eviction and restarts:
its content is stored in the database and computed again when a request needs it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
from aiohttp import web
from msgspec.structs import replace

from engine.errors import EngineError
from gateway.dialects.canonical import (
    Call,
    Delta,
    GenerationParameters,
    Prompt,
)
from gateway.dialects.families import cache_profile, cached_contents
from gateway.errors import Kind, Refusal
from gateway.generation.delivery import PlainAnswer
from gateway.generation.execution import Execution
from gateway.generation.preparation import PREFIX, Prepared, retention_until, with_breakpoint
from gateway.generation.serving import Serving
from gateway.http.request_body import BODY_SHARE, SMALL_VALUES_MAX, check_values, read_body
from gateway.http.request_context import STATE, identity_of
from gateway.http.response import send_json
from gateway.http.route_table import INFERENCE, Route
from gateway.retention_classes import RESOURCE
from tenancy.accounts.cached_contents import (
    CachedContentQuota,
    CachedContentRecord,
    create_cached_content,
    end_cached_content,
    has_cached_content,
    list_cached_contents,
    set_expiry,
    sweep_cached_contents,
)
from tenancy.errors import BadName, StoreError
from tenancy.storage.interface import Store
from tenancy.types import Identity

SHAPE = cached_contents.SHAPE
PAGE = ("pageSize", "page_size", "pageToken", "page_token")


def routes(serving: Serving) -> tuple[Route, ...]:
    """Return the routes of cachedContents."""
    of, many = CachedContentHandlers(serving), "/{version:v1|v1beta|v1alpha}/cachedContents"
    one, body = f"{many}/{{name}}", cached_contents.Body
    delete = "Delete a cached content and release its blocks."
    about = (INFERENCE, SHAPE)
    return (
        Route("POST", many, of.create, *about, "Compute and keep a prefix.", body),
        Route("GET", many, of.list, *about, "List cached contents.", query=PAGE),
        Route("GET", one, of.get, *about, "Show a cached content."),
        Route(
            *("PATCH", one, of.change, *about, "Change a cached content's expiry.", body),
            query=("updateMask", "update_mask"),
        ),
        Route("DELETE", one, of.delete, *about, delete),
    )


class _CreationAnswer(PlainAnswer):
    """The answer to a creation: the resource."""

    def __init__(self, resource: CachedContentRecord) -> None:
        self._resource = resource

    async def unary(self, deltas: Sequence[Delta]) -> bytes:
        """Return the resource."""
        return cached_contents.resource(_view(self._resource))


def _view(resource: CachedContentRecord) -> cached_contents.CachedContentView:
    """Return the resource as its dialect shows it."""
    return msgspec.convert(resource, cached_contents.CachedContentView, from_attributes=True)


def _owner(request: web.BaseRequest) -> tuple[tuple[int, str], int]:
    """Return whose objects a request may read: the tenant and workspace, and the tenant again."""
    identity = identity_of(request)
    return (identity.tenant.tenant_id, identity.workspace), identity.tenant.tenant_id


class CachedContentHandlers:
    """One handler per route of cachedContents."""

    def __init__(self, serving: Serving) -> None:
        self._serving, self._gateway = serving, serving.gateway
        self._preparation = serving.preparation

    async def create(self, request: web.BaseRequest) -> web.StreamResponse:
        """Render, store and compute; a request repeated under its idempotency key creates
        nothing."""
        gateway, preparation, identity = self._gateway, self._preparation, identity_of(request)
        now_ms, request[STATE].is_generation = gateway.wall(), True
        body, parse = await read_body(request), cached_contents.parse_create
        creation = await preparation.parse(identity.tenant.tenant_id, parse, body, now_ms)
        call = Call(
            creation.model,
            (with_breakpoint(creation.prompt),),
            GenerationParameters(max_tokens=0),
            operation="prewarm",
            # All tokens are billed as written, even if they are cached: the tenant buys retention.
            cache=replace(cached_contents.DIRECTIVES, lookup="none"),
        )
        model = preparation.check_model(call.model, identity)
        delivery = await self._serving.delivery(request, body, identity)
        if isinstance(delivery, web.StreamResponse):
            return delivery
        terms = retention_until(creation.expires_ms, now_ms)
        made = await preparation.prepare(model, call, identity, {RESOURCE: terms})
        tokens = made.rendered[0].boundaries[-1].tokens
        tokens_min = cache_profile(self._gateway.config.caching, call.cache.profile).min_tokens
        if tokens < tokens_min:
            message = (
                f"Cached content is too small: {tokens} tokens; expected at least {tokens_min}."
            )
            raise Refusal(Kind.BAD, "invalid_value", message, param="contents")
        # Only the stored part is computed, not the template's text after it.
        made = replace(
            made,
            rendered=[replace(made.rendered[0], token_ids=made.rendered[0].token_ids[:tokens])],
        )
        contract = self._gateway.contracts.resolve(
            call, made.rendered[0], made.scope, {RESOURCE: terms}
        )
        made = replace(made, contracts=[contract])
        resource = CachedContentRecord(
            resource_id=secrets.token_hex(16),
            tenant_id=identity.tenant.tenant_id,
            workspace=identity.workspace,
            model=creation.model,
            display_name=creation.display_name,
            tokens=tokens,
            created_ms=now_ms,
            updated_ms=now_ms,
            expires_ms=creation.expires_ms,
        )
        answer = _CreationAnswer(resource)
        execution = Execution(self._serving, SHAPE, made, answer, delivery)
        work = self._store_and_compute(execution, made, (identity, resource, creation.prompt))
        return await delivery.run(work)

    async def _store_and_compute(
        self,
        execution: Execution,
        made: Prepared,
        kept: tuple[Identity, CachedContentRecord, Prompt],
    ) -> web.StreamResponse:
        """Store the resource, compute its prefix, answer; undo all if computing fails or is
        cancelled.

        The client's disconnect cancels no idempotent request: nothing raises here once it is
        charged.
        """
        identity, resource, prompt = kept
        content = msgspec.msgpack.encode(prompt)
        try:
            storing = self._gateway.contents.ask(
                lambda _: self._store(resource, content), resource.tenant_id
            )
            await self._gateway.work.run_to_completion(storing)
            return await execution.run(PREFIX + resource.resource_id)
        except BadName as error:
            raise Refusal(Kind.QUOTA, error.code, f"{error.message}.") from None
        except BaseException:
            begun = made if execution.is_submitted else None
            rollback = self._roll_back(identity, resource.resource_id, prompt, begun)
            await self._gateway.work.shield(rollback)
            raise

    async def _roll_back(
        self, identity: Identity, resource_id: str, content: Prompt, begun: Prepared | None
    ) -> None:
        """Delete the resource, and release its blocks if `begun`: the engine may hold some."""
        await self._end_resource(identity, resource_id)
        with self._log_failed_release():
            if begun is not None and await self._is_last_reference(identity, content):
                await self._release_leases(begun)

    def _store(self, resource: CachedContentRecord, content: bytes) -> None:
        sweep_cached_contents(self._gateway.store, resource.created_ms)
        create_cached_content(self._gateway.store, resource, content, self._quota())

    def _quota(self) -> CachedContentQuota:
        caching = self._gateway.config.caching
        return CachedContentQuota(
            caching.resources_per_tenant_max, caching.resource_bytes_per_tenant_max
        )

    async def _end_resource(self, identity: Identity, resource_id: str) -> None:
        tenant_id, now_ms = identity.tenant.tenant_id, self._gateway.wall()
        asked = self._gateway.store, tenant_id, identity.workspace, resource_id, now_ms
        await self._gateway.contents.ask(lambda _: end_cached_content(*asked), tenant_id)

    async def _is_last_reference(self, identity: Identity, content: Prompt) -> bool:
        """Return whether the workspace has no other resource with this content.

        False in a shared scope: the content may belong to another tenant too.
        """
        if identity.scope is not None:
            return False
        tenant_id, now_ms = identity.tenant.tenant_id, self._gateway.wall()

        def is_held(store: Store) -> bool:
            data = msgspec.msgpack.encode(content)
            return has_cached_content(store, tenant_id, identity.workspace, data, now_ms)

        return not await self._gateway.contents.ask(is_held, tenant_id)

    async def list(self, request: web.BaseRequest) -> web.StreamResponse:
        size, after = cached_contents.parse_page(
            request.query.get("pageSize", request.query.get("page_size", "")),
            request.query.get("pageToken", request.query.get("page_token", "")),
        )
        owner, tenant_id = _owner(request)
        asked = *owner, self._gateway.wall(), after, size + 1
        found = await self._gateway.contents.ask(
            lambda one: list_cached_contents(one, *asked), tenant_id
        )
        is_more = len(found) > size
        page = [_view(resource) for resource in found[:size]]
        return await send_json(
            request, cached_contents.page(page, page[-1].resource_id if is_more else "")
        )

    async def get(self, request: web.BaseRequest) -> web.StreamResponse:
        resource, _ = await self._load(request)
        return await send_json(request, cached_contents.resource(_view(resource)))

    async def change(self, request: web.BaseRequest) -> web.StreamResponse:
        now_ms = self._gateway.wall()
        mask = request.query.get("updateMask", request.query.get("update_mask", ""))
        body = await read_body(request)
        check_values(body, SMALL_VALUES_MAX)
        change = cached_contents.parse_update(body, mask, now_ms)
        kept, _ = await self._load(request)
        change.check(kept.model, kept.display_name)
        owner, tenant_id = _owner(request)
        name = request[STATE].parameters["name"]
        changed = self._gateway.store, *owner, name, change.expires_ms, now_ms
        await self._gateway.contents.ask(lambda _: set_expiry(*changed), tenant_id)
        resource, _ = await self._load(request)
        return await send_json(request, cached_contents.resource(_view(resource)))

    async def delete(self, request: web.BaseRequest) -> web.StreamResponse:
        """Delete the resource, and release its blocks if nothing else retains the same prefix.

        Another cached content or a breakpoint may retain it. In a shared scope the blocks stay
        until the lease ends, since other tenants may use them.
        """
        identity, (resource, stored) = identity_of(request), await self._load(request)
        call = Call(
            resource.model,
            (with_breakpoint(stored),),
            GenerationParameters(max_tokens=0),
            cache=cached_contents.DIRECTIVES,
        )
        terms = retention_until(resource.expires_ms, self._gateway.wall())

        async def work() -> None:
            await self._end_resource(identity, resource.resource_id)
            with self._log_failed_release():
                model = self._gateway.models.by_name.get(
                    resource.model
                )  # also one now closed to the tenant
                if model is not None and await self._is_last_reference(identity, stored):
                    made = await self._preparation.prepare(model, call, identity, {RESOURCE: terms})
                    await self._release_leases(made)

        await self._gateway.work.shield(work())
        return await send_json(request, b"{}")

    async def _release_leases(self, made: Prepared) -> None:
        """End the leases in the prefix index and in the engines; on one that is away, a lease ends
        by itself. Raises EngineError."""
        space, book = made.scope.namespace, self._gateway.contracts.entries
        for lease in made.contracts[0].leases:
            key = (space, bytes.fromhex(lease.lease_id))
            if book.end_class(key, RESOURCE, self._gateway.clock()):
                await made.model.replicas.erase(space, lease_id=lease.lease_id)

    async def _load(self, request: web.BaseRequest) -> tuple[CachedContentRecord, Prompt]:
        name, share = request[STATE].parameters["name"], request[BODY_SHARE]
        return await self._preparation.contents.load(name, identity_of(request), share)

    @contextmanager
    def _log_failed_release(self) -> Iterator[None]:
        """Log a failed release; the engine's blocks are then freed when their lease ends."""
        try:
            yield
        except (EngineError, Refusal, StoreError) as error:
            self._gateway.log("cached_content_not_erased", {"reason": type(error).__name__})
