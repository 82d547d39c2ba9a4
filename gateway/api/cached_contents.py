"""Cached contents: create, list, get, update, delete. Every success has status 200.

Creating computes the prefix as an ordinary request, which is held, settled and billed as a write;
requests with one `Idempotency-Key` create once. A cached content survives eviction and restarts:
its content is stored in the database and computed again when a request needs it.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from aiohttp import web
from msgspec.structs import replace

from engine.errors import EngineError
from gateway.context import Context
from gateway.dialects.canonical import (
    Call,
    Delta,
    GenerationParameters,
    Prompt,
    Reply,
)
from gateway.dialects.families import cache_profile, cached_contents
from gateway.dialects.protocol import Encoder
from gateway.errors import Kind, Refusal
from gateway.generation.cached_contents import (
    PREFIX,
    load_cached_content,
    retention_until,
    with_breakpoint,
)
from gateway.generation.generation import Generation
from gateway.generation.preparation import Prepared, check_model, parse_body, prepare
from gateway.http.middleware import Handler, Route
from gateway.http.request_body import BODY_SHARE, SMALL_VALUES_MAX, check_values, read_body
from gateway.http.request_context import STATE, identity_of
from gateway.http.response import send_json
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
ONE = "/{version:v1|v1beta}/cachedContents/{name}"
ALL = "/{version:v1|v1beta}/cachedContents"
Method = Callable[[Context, web.BaseRequest, Identity], Awaitable[web.StreamResponse]]


def routes(gateway: Context) -> tuple[Route, ...]:
    """Return the routes of cachedContents."""
    return (
        Route("POST", ALL, _bind(gateway, _create), "inference", SHAPE),
        Route("GET", ALL, _bind(gateway, _list), "inference", SHAPE),
        Route("GET", ONE, _bind(gateway, _get), "inference", SHAPE),
        Route("PATCH", ONE, _bind(gateway, _change), "inference", SHAPE),
        Route("DELETE", ONE, _bind(gateway, _delete), "inference", SHAPE),
    )


def _bind(gateway: Context, method: Method) -> Handler:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return await method(gateway, request, identity_of(request))

    return handle


class _CreationEncoder(Encoder):
    """Encodes the response to a creation: the resource."""

    def __init__(self, resource: CachedContentRecord) -> None:
        self._resource = resource

    def stream(self, delta: Delta) -> bytes:
        return b""

    def close(self) -> bytes:
        return b""

    def unary(self, deltas: Sequence[Delta]) -> bytes:
        return cached_contents.resource(_view(self._resource))

    def error_event(self, refusal: Refusal) -> bytes:
        return b""


async def _create(
    gateway: Context, request: web.BaseRequest, identity: Identity
) -> web.StreamResponse:
    """Render, store and compute; a request repeated under its idempotency key creates nothing."""
    now_ms, generation = gateway.wall(), Generation(gateway, SHAPE, request)
    body = await read_body(request, gateway.config.server)
    tenant_id = identity.tenant.tenant_id
    creation = await parse_body(gateway, tenant_id, cached_contents.parse_create, body, now_ms)
    call = Call(
        creation.model,
        (with_breakpoint(creation.prompt),),
        GenerationParameters(max_tokens=0),
        operation="prewarm",
        # All tokens are billed as written, even if they are cached: the tenant buys retention.
        cache=replace(cached_contents.DIRECTIVES, lookup="none"),
    )
    model = check_model(gateway, call.model, identity)
    if (replay := await generation.find_replay(body, identity)) is not None:
        return replay
    terms = retention_until(creation.expires_ms, now_ms)
    made = await prepare(gateway, model, call, identity, {RESOURCE: terms})
    tokens = made.rendered[0].boundaries[-1].tokens
    tokens_min = cache_profile(gateway.config.caching, call.cache.profile).min_tokens
    if tokens < tokens_min:
        message = f"Cached content is too small: {tokens} tokens; expected at least {tokens_min}."
        raise Refusal(Kind.BAD, "invalid_value", message, param="contents")
    # Only the stored part is computed, not the template's text after it.
    made = replace(
        made, rendered=[replace(made.rendered[0], token_ids=made.rendered[0].token_ids[:tokens])]
    )
    contract = gateway.contracts.resolve(call, made.rendered[0], made.scope, {RESOURCE: terms})
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
    return await generation.run_to_completion(
        _store_and_compute(
            gateway, request, generation, made, (identity, resource, creation.prompt)
        )
    )


async def _store_and_compute(
    gateway: Context,
    request: web.BaseRequest,
    generation: Generation,
    made: Prepared,
    kept: tuple[Identity, CachedContentRecord, Prompt],
) -> web.StreamResponse:
    """Store the resource, compute its prefix, answer; undo all if computing fails or is cancelled.

    The client's disconnect cancels no idempotent request: nothing raises here once it is charged.
    """
    identity, resource, prompt = kept
    content = msgspec.msgpack.encode(prompt)
    reply = Reply(PREFIX + resource.resource_id, resource.model, resource.created_ms // 1000)
    try:
        storing = gateway.contents.ask(
            lambda _: _store(gateway, resource, content), resource.tenant_id
        )
        await gateway.run_to_completion(storing)
        return await generation.execute(made, identity, _CreationEncoder(resource), reply)
    except BadName as error:
        raise Refusal(Kind.QUOTA, error.code, f"{error.message}.") from None
    except BaseException:
        begun = None if request[STATE].submitted_s is None else made
        rollback = _roll_back(gateway, identity, resource.resource_id, prompt, begun)
        await gateway.shield(rollback)
        raise


async def _roll_back(
    gateway: Context, identity: Identity, resource_id: str, content: Prompt, begun: Prepared | None
) -> None:
    """Delete the resource, and release its blocks if `begun`: the engine may hold some."""
    await _end_resource(gateway, identity, resource_id)
    with _log_failed_release(gateway):
        if begun is not None and await _is_last_reference(gateway, identity, content):
            await _release_leases(gateway, begun)


def _store(gateway: Context, resource: CachedContentRecord, content: bytes) -> None:
    sweep_cached_contents(gateway.store, resource.created_ms)
    create_cached_content(gateway.store, resource, content, _quota(gateway))


def _quota(gateway: Context) -> CachedContentQuota:
    caching = gateway.config.caching
    return CachedContentQuota(
        caching.resources_per_tenant_max, caching.resource_bytes_per_tenant_max
    )


async def _end_resource(gateway: Context, identity: Identity, resource_id: str) -> None:
    tenant_id, now_ms = identity.tenant.tenant_id, gateway.wall()
    asked = gateway.store, tenant_id, identity.workspace, resource_id, now_ms
    await gateway.contents.ask(lambda _: end_cached_content(*asked), tenant_id)


async def _is_last_reference(gateway: Context, identity: Identity, content: Prompt) -> bool:
    """Return whether the workspace has no other resource with this content.

    False in a shared scope: the content may belong to another tenant too.
    """
    if identity.scope is not None:
        return False
    tenant_id, now_ms = identity.tenant.tenant_id, gateway.wall()

    def is_held(store: Store) -> bool:
        data = msgspec.msgpack.encode(content)
        return has_cached_content(store, tenant_id, identity.workspace, data, now_ms)

    return not await gateway.contents.ask(is_held, tenant_id)


async def _list(
    gateway: Context, request: web.BaseRequest, identity: Identity
) -> web.StreamResponse:
    size, after = cached_contents.parse_page(
        request.query.get("pageSize", request.query.get("page_size", "")),
        request.query.get("pageToken", request.query.get("page_token", "")),
    )
    asked = identity.tenant.tenant_id, identity.workspace, gateway.wall(), after, size + 1
    found = await gateway.contents.ask(
        lambda store: list_cached_contents(store, *asked), identity.tenant.tenant_id
    )
    is_more = len(found) > size
    page = [_view(resource) for resource in found[:size]]
    return await send_json(
        request, cached_contents.page(page, page[-1].resource_id if is_more else "")
    )


async def _get(
    gateway: Context, request: web.BaseRequest, identity: Identity
) -> web.StreamResponse:
    name = request[STATE].parameters["name"]
    resource, _ = await load_cached_content(gateway, name, identity, request[BODY_SHARE])
    return await send_json(request, cached_contents.resource(_view(resource)))


async def _change(
    gateway: Context, request: web.BaseRequest, identity: Identity
) -> web.StreamResponse:
    now_ms = gateway.wall()
    mask = request.query.get("updateMask", request.query.get("update_mask", ""))
    body = await read_body(request, gateway.config.server)
    check_values(body, SMALL_VALUES_MAX)
    change = cached_contents.parse_update(body, mask, now_ms)
    name = request[STATE].parameters["name"]
    kept, _ = await load_cached_content(gateway, name, identity, request[BODY_SHARE])
    change.check(kept.model, kept.display_name)
    owner = identity.tenant.tenant_id, identity.workspace
    changed = gateway.store, *owner, name, change.expires_ms, now_ms
    await gateway.contents.ask(lambda _: set_expiry(*changed), identity.tenant.tenant_id)
    resource, _ = await load_cached_content(gateway, name, identity, request[BODY_SHARE])
    return await send_json(request, cached_contents.resource(_view(resource)))


async def _delete(
    gateway: Context, request: web.BaseRequest, identity: Identity
) -> web.StreamResponse:
    """Delete the resource, and release its blocks if nothing else retains the same prefix.

    Another cached content or a breakpoint may retain it. In a shared scope the blocks stay until
    the lease ends, since other tenants may use them.
    """
    name = request[STATE].parameters["name"]
    resource, stored = await load_cached_content(gateway, name, identity, request[BODY_SHARE])
    call = Call(
        resource.model,
        (with_breakpoint(stored),),
        GenerationParameters(max_tokens=0),
        cache=cached_contents.DIRECTIVES,
    )
    terms = retention_until(resource.expires_ms, gateway.wall())

    async def work() -> None:
        await _end_resource(gateway, identity, resource.resource_id)
        with _log_failed_release(gateway):
            model = gateway.models.by_name.get(resource.model)  # also one now closed to the tenant
            if model is not None and await _is_last_reference(gateway, identity, stored):
                made = await prepare(gateway, model, call, identity, {RESOURCE: terms})
                await _release_leases(gateway, made)

    await gateway.shield(work())
    return await send_json(request, b"{}")


async def _release_leases(gateway: Context, made: Prepared) -> None:
    """End the leases in the prefix index and in the engine. Raises EngineError."""
    space, book = made.scope.namespace, gateway.contracts.entries
    for lease in made.contracts[0].leases:
        key = (space, bytes.fromhex(lease.lease_id))
        if book.end_class(key, RESOURCE, gateway.clock()):
            await made.model.engine.erase(space, lease_id=lease.lease_id)


@contextmanager
def _log_failed_release(gateway: Context) -> Iterator[None]:
    """Log a failed release; the engine's blocks are then freed when their lease ends."""
    try:
        yield
    except (EngineError, Refusal, StoreError) as error:
        gateway.log("cached_content_not_erased", {"reason": type(error).__name__})


def _view(resource: CachedContentRecord) -> cached_contents.CachedContentView:
    """Return the resource as its dialect shows it."""
    return msgspec.convert(resource, cached_contents.CachedContentView, from_attributes=True)
