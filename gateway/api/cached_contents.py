"""Gemini's cachedContents: create, list, get, change, delete. Every success is a 200.

Creating computes the prefix as a request of its own, held, settled and billed as a write, and once
only under one `Idempotency-Key`; what is kept survives eviction and restarts, since its content is
stored and computed again when needed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
from aiohttp import web
from msgspec.structs import replace

from engine.errors import EngineError
from gateway.context import Context
from gateway.dialects.canonical import (
    CacheDirectives,
    Call,
    Delta,
    GenerationParameters,
    Prompt,
    Reply,
)
from gateway.dialects.gemini import cached_contents as gemini_cached
from gateway.dialects.gemini import generate_content as gemini
from gateway.dialects.protocol import Encoder
from gateway.errors import Kind, Refusal
from gateway.generation.cached_contents import (
    PREFIX,
    load_cached_content,
    retention_until,
    with_breakpoint,
)
from gateway.generation.generation import Generation
from gateway.generation.preparation import Prepared, check_model, prepare
from gateway.http.middleware import Handler, Route
from gateway.http.request_body import read_body
from gateway.http.request_context import STATE
from gateway.http.response import send
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
from tenancy.types import Identity

SHAPE = gemini.DIALECT
ONE = "/{version:v1|v1beta}/cachedContents/{name}"
ALL = "/{version:v1|v1beta}/cachedContents"


def routes(gateway: Context) -> tuple[Route, ...]:
    """The resource's methods."""
    return (
        Route("POST", ALL, _handler(gateway, _create), "inference", SHAPE),
        Route("GET", ALL, _handler(gateway, _list), "inference", SHAPE),
        Route("GET", ONE, _handler(gateway, _get), "inference", SHAPE),
        Route("PATCH", ONE, _handler(gateway, _change), "inference", SHAPE),
        Route("DELETE", ONE, _handler(gateway, _delete), "inference", SHAPE),
    )


def _handler(gateway: Context, act: object) -> Handler:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        identity = request[STATE].identity
        assert identity is not None, "these routes ask for a key"
        assert callable(act)
        found: web.StreamResponse = await act(gateway, request, identity)
        return found

    return handle


class _Created(Encoder):
    """The whole answer to a creation: the resource."""

    def __init__(self, resource: CachedContentRecord) -> None:
        self._resource = resource

    def stream(self, delta: Delta) -> bytes:
        return b""

    def close(self) -> bytes:
        return b""

    def unary(self, deltas: Sequence[Delta]) -> bytes:
        return gemini_cached.resource(shown(self._resource))

    def error_event(self, refusal: Refusal) -> bytes:
        return b""


async def _create(
    gateway: Context, request: web.BaseRequest, identity: Identity
) -> web.StreamResponse:
    """Render, store, compute, answer; sent again under its name it makes nothing."""
    now_ms, answer = gateway.wall(), Generation(gateway, SHAPE, request)
    body = await read_body(request, gateway.config.server)
    asked = gemini_cached.parse_create(body, now_ms)
    call = Call(
        asked.model,
        (with_breakpoint(asked.prompt),),
        GenerationParameters(max_tokens=0),
        operation="prewarm",
        # All of it is written and paid for, whatever is there: what is bought is its keeping.
        cache=CacheDirectives(profile="gemini", lookup="none"),
    )
    check_model(gateway, call)
    if (again := await answer.find_replay(body, identity)) is not None:
        return again
    terms = retention_until(asked.expires_ms, now_ms)
    made = await prepare(gateway, call, identity, {RESOURCE: terms})
    tokens = made.rendered[0].boundaries[-1].tokens
    least = gateway.config.caching.profile("gemini").min_tokens
    if tokens < least:
        message = f"Cached content is too small: it has {tokens} tokens, the minimum is {least}."
        raise Refusal(Kind.BAD, "invalid_value", message, param="contents")
    # Only the kept part is computed, not what a template would put behind it.
    made = replace(
        made, rendered=[replace(made.rendered[0], token_ids=made.rendered[0].token_ids[:tokens])]
    )
    contract = gateway.contracts.resolve(call, made.rendered[0], made.scope, {RESOURCE: terms})
    made = replace(made, contracts=[contract])
    resource = CachedContentRecord(
        resource_id=secrets.token_hex(16),
        tenant_id=identity.tenant.tenant_id,
        workspace=identity.workspace,
        model=asked.model,
        display_name=asked.display_name,
        tokens=tokens,
        created_ms=now_ms,
        updated_ms=now_ms,
        expires_ms=asked.expires_ms,
    )
    return await answer.run_to_completion(
        _keep(gateway, request, answer, made, (identity, resource, asked.prompt))
    )


async def _keep(
    gateway: Context,
    request: web.BaseRequest,
    answer: Generation,
    made: Prepared,
    kept: tuple[Identity, CachedContentRecord, Prompt],
) -> web.StreamResponse:
    """Store it, compute it, answer; what was stored goes again if it cannot be computed, or if
    nobody waits for it. A named one is waited for: nothing raises here once it is paid for."""
    identity, resource, prompt = kept
    content = msgspec.msgpack.encode(prompt)
    reply = Reply(PREFIX + resource.resource_id, resource.model, resource.created_ms // 1000)
    try:
        await gateway.run_to_completion(asyncio.to_thread(_store, gateway, resource, content))
        return await answer.execute(made, identity, _Created(resource), reply)
    except BadName as error:
        raise Refusal(Kind.QUOTA, error.code, f"{error.message}.") from None
    except BaseException:
        begun = None if request[STATE].submitted_s is None else made
        taken = _take_back(gateway, identity, resource.resource_id, prompt, begun)
        await gateway.finish(taken)
        raise


async def _take_back(
    gateway: Context, identity: Identity, resource_id: str, content: Prompt, begun: Prepared | None
) -> None:
    """It could not be computed, or nobody waited for it. `begun`: what an engine may hold of it."""
    await _drop(gateway, identity, resource_id)
    with _told_if_not(gateway):
        if begun is not None and await _is_nobodys(gateway, identity, content):
            await _let_go(gateway, begun)


def _store(gateway: Context, resource: CachedContentRecord, content: bytes) -> None:
    sweep_cached_contents(gateway.store, resource.created_ms)
    create_cached_content(gateway.store, resource, content, _quota(gateway))


def _quota(gateway: Context) -> CachedContentQuota:
    caching = gateway.config.caching
    return CachedContentQuota(
        caching.resources_per_tenant_max, caching.resource_bytes_per_tenant_max
    )


async def _drop(gateway: Context, identity: Identity, resource_id: str) -> None:
    tenant_id, now_ms = identity.tenant.tenant_id, gateway.wall()
    await asyncio.to_thread(
        end_cached_content, gateway.store, tenant_id, identity.workspace, resource_id, now_ms
    )


async def _is_nobodys(gateway: Context, identity: Identity, content: Prompt) -> bool:
    """Does the workspace keep the same content under no other name? In a shared scope nobody can
    tell: it may be another tenant's too."""
    return identity.scope is None and not await asyncio.to_thread(
        has_cached_content,
        gateway.store,
        identity.tenant.tenant_id,
        identity.workspace,
        msgspec.msgpack.encode(content),
        gateway.wall(),
    )


async def _list(
    gateway: Context, request: web.BaseRequest, identity: Identity
) -> web.StreamResponse:
    size, after = gemini_cached.parse_page(
        request.query.get("pageSize", request.query.get("page_size", "")),
        request.query.get("pageToken", request.query.get("page_token", "")),
    )
    found = await asyncio.to_thread(
        list_cached_contents,
        gateway.store,
        identity.tenant.tenant_id,
        identity.workspace,
        gateway.wall(),
        after,
        size + 1,
    )
    is_more = len(found) > size
    page = [shown(resource) for resource in found[:size]]
    return await _ok(request, gemini_cached.page(page, page[-1].resource_id if is_more else ""))


async def _get(
    gateway: Context, request: web.BaseRequest, identity: Identity
) -> web.StreamResponse:
    resource, _ = await load_cached_content(gateway, request[STATE].parameters["name"], identity)
    return await _ok(request, gemini_cached.resource(shown(resource)))


async def _change(
    gateway: Context, request: web.BaseRequest, identity: Identity
) -> web.StreamResponse:
    now_ms = gateway.wall()
    mask = request.query.get("updateMask", request.query.get("update_mask", ""))
    body = await read_body(request, gateway.config.server)
    change = gemini_cached.parse_update(body, mask, now_ms)
    name = request[STATE].parameters["name"]
    kept, _ = await load_cached_content(gateway, name, identity)
    change.check(kept.model, kept.display_name)
    await asyncio.to_thread(
        set_expiry,
        gateway.store,
        identity.tenant.tenant_id,
        identity.workspace,
        name,
        change.expires_ms,
        now_ms,
    )
    resource, _ = await load_cached_content(gateway, name, identity)
    return await _ok(request, gemini_cached.resource(shown(resource)))


async def _delete(
    gateway: Context, request: web.BaseRequest, identity: Identity
) -> web.StreamResponse:
    """It is gone for its owner at once; its blocks too, where nothing else keeps the same words:
    another cached content, a breakpoint. In a shared scope they stay until the lease ends: they may
    be held for another tenant."""
    name = request[STATE].parameters["name"]
    resource, stored = await load_cached_content(gateway, name, identity)
    call = Call(
        resource.model,
        (with_breakpoint(stored),),
        GenerationParameters(max_tokens=0),
        cache=CacheDirectives("gemini"),
    )
    terms = retention_until(resource.expires_ms, gateway.wall())

    async def work() -> None:
        await _drop(gateway, identity, resource.resource_id)
        with _told_if_not(gateway):
            if await _is_nobodys(gateway, identity, stored):
                made = await prepare(gateway, call, identity, {RESOURCE: terms})
                await _let_go(gateway, made)

    await gateway.finish(work())
    return await _ok(request, b"{}")


async def _let_go(gateway: Context, made: Prepared) -> None:
    """In the books and in the engine. Raises EngineError."""
    space, book = made.scope.namespace, gateway.contracts.entries
    for lease in made.contracts[0].leases:
        key = (space, bytes.fromhex(lease.lease_id))
        if book.end_class(key, RESOURCE, gateway.clock()):
            await gateway.engine.erase(space, lease_id=lease.lease_id)


@contextmanager
def _told_if_not(gateway: Context) -> Iterator[None]:
    """What an engine still holds when it cannot be told goes when its lease ends."""
    try:
        yield
    except (EngineError, Refusal, StoreError) as error:
        gateway.log("cached_content_not_erased", {"reason": type(error).__name__})


async def _ok(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
    return await send(request, 200, body, {"Content-Type": "application/json"})


def shown(resource: CachedContentRecord) -> gemini_cached.CachedContentView:
    """As it is told."""
    return gemini_cached.CachedContentView(
        resource.resource_id,
        resource.model,
        resource.display_name,
        resource.tokens,
        resource.created_ms,
        resource.updated_ms,
        resource.expires_ms,
    )
