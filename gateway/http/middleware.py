"""The middleware of a listener: request ids, authentication, routing, and errors as bytes.

    request ─ id ─ Host ─ route's declared role ─ key ─ place ─ handler ─ response
                 └──────────── any error: Refusal ─ dialect's bytes ┘ ─ one log line, metrics

No other module turns an error into bytes. The middleware knows no engine and no prompt.
`gateway.app` makes one for each listener from the `Route`s that `gateway.api` declares. The
middleware writes whole responses itself, so that a request's log line follows its last byte.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from aiohttp import web

from gateway.context import Context
from gateway.dialects.families import PLAIN, find_family
from gateway.dialects.protocol import ErrorShape
from gateway.errors import Kind, Refusal, error_location
from gateway.http.authentication import (
    LOOKUP_S_MAX,
    NO_TRUSTED_HEADER,
    WRONG_KEYS_PER_MINUTE_MAX,
    CheckedKeys,
    CrossOrigin,
    KeyLookups,
    TrustedHeader,
    WrongKeys,
    check_host,
    key_problem,
    request_keys,
)
from gateway.http.connection import CONNECTION
from gateway.http.error_mapping import refusal_of
from gateway.http.request_body import BODY_SHARE, BodyBudget, BodyShare
from gateway.http.request_context import (
    STATE,
    KeyOwner,
    RequestState,
    log_facts,
    record_of,
    span_facts,
)
from gateway.http.response import RESPONSE_HEADERS, ClientGone, abort, finish
from gateway.http.route_table import PathNotFound, RouteTable, canonical, tidy
from gateway.observability.logging import RefusalLines
from gateway.observability.metrics import cache_outcome
from tenancy.accounts.keys import ADMIN, is_key
from tenancy.errors import KeyRefused
from tenancy.limits import NO_DEMAND
from tenancy.types import Identity

T = TypeVar("T")
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Role = Literal[
    "open",
    "inference",
    "usage",
    "cache",
    "admin",
    "admin:read",
    "admin:tenants",
    "admin:money",
    "admin:erase",
]
"""What a route requires of a key: a tenant's scope, an administrator's (`admin`: any of them), or
`open` for no key."""

ADMINISTRATOR = 0
"""What connections and bodies of the admin API count for; no tenant has this id."""


@dataclass(frozen=True, slots=True)
class Route:
    """A declared route. Undeclared paths give 404; the role `open` needs no key."""

    method: str
    path: str
    handler: Handler
    role: Role
    shape: ErrorShape = PLAIN


class Middleware:
    """Authenticates, routes, answers and logs the requests of one listener."""

    def __init__(
        self,
        routes: tuple[Route, ...],
        gateway: Context,
        hosts: tuple[str, ...],
        take_place: Callable[[Context, RequestState], None] = lambda gateway, state: None,
        trusted: TrustedHeader = NO_TRUSTED_HEADER,
        *,
        is_public: bool = True,
    ) -> None:
        """Build the route table. `hosts`: of [server], or of [admin] unless `is_public`.

        `take_place` admits a tenant's request before its body is read: it sets the state's `place`
        or raises Refusal. `trusted` signs in administrators that a proxy has authenticated.
        """
        self.routes = routes
        self._gateway = gateway
        self._hosts, self._is_public = hosts, is_public
        self._hosts_setting = "server.hosts" if is_public else "admin.hosts"
        self._cross_origin = CrossOrigin(gateway.config.server.cors_origins if is_public else ())
        self._take_place = take_place
        self._trusted = trusted
        self._bodies = BodyBudget(gateway.config.server.body_bytes_in_flight_max)
        self._table = RouteTable[tuple[Route, str]]()
        for route in routes:
            self._table.add(route.method, route.path, (route, canonical(route.path)))
        self._wrong_keys = WrongKeys(lambda: gateway.clock())
        self._lookups = KeyLookups(lambda: gateway.clock())
        self._refusal_lines = RefusalLines(gateway.log, lambda: gateway.clock())

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Process one request, from its id to its log line.

        Raises CancelledError and ConnectionError only; both close the connection.
        """
        gateway = self._gateway
        state = RequestState(gateway.new_id(), gateway.clock())
        state.headers.update(self._cross_origin.headers(request))
        request[STATE] = state
        request[RESPONSE_HEADERS] = state.response_headers
        status = 0
        try:
            handled = await (await self._dispatch(request, state))
            status = handled.status
            await _finish(request, handled, state)
            return handled
        except asyncio.CancelledError:
            status = state.mark_client_left()
            raise
        except ClientGone:
            status = state.mark_client_left()
            raise ConnectionResetError("the client closed the connection") from None
        except Exception as error:
            if isinstance(error, ConnectionError) and request[CONNECTION].is_closing():
                status = status or state.mark_client_left()
                raise
            # This frame keeps no name for the refusal: its traceback holds the frame, and with it
            # the whole body, until the garbage collector runs.
            if (response := self._refuse(error, state, request)) is None:
                raise ConnectionResetError("the response was aborted") from None
            status = response.status
            await _finish(request, response, state)
            return response
        finally:
            if state.place is not None:
                state.place.settle(NO_DEMAND)
                state.place = None  # an idle connection keeps its last request
            share = request.get(BODY_SHARE)
            if share is not None and share.bytes_taken:
                share.release()
            self._report(state, request, status)

    async def _dispatch(
        self, request: web.BaseRequest, state: RequestState
    ) -> Awaitable[web.StreamResponse]:
        """Check route, Host, key and the tenant's limits, then start the handler.

        OPTIONS is answered with the methods of the path; a browser's preflight at any path, with
        what `server.cors_origins` allows.

        Raises Refusal, and PathNotFound or web.HTTPMethodNotAllowed for an undeclared route.
        """
        if self._cross_origin.is_preflight(request):
            check_host(request, self._hosts, self._hosts_setting)
            return _no_content()
        try:
            _check_no_websocket(request, state)
            (route, path), state.parameters = self._table.find(request)
        except (web.HTTPException, Refusal) as error:
            state.shape = self._shape_of(request)
            check_host(request, self._hosts, self._hosts_setting)
            if isinstance(error, PathNotFound) and not (self._is_public or error.close):
                raise Refusal(Kind.NOT_FOUND, "not_found", _NO_ADMIN_PATH) from None
            if isinstance(error, web.HTTPMethodNotAllowed):
                state.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
                if request.method == "OPTIONS":
                    return _no_content()
            raise
        state.shape = route.shape
        if state.shape is PLAIN:
            state.shape = self._shape_of(request)
        check_host(request, self._hosts, self._hosts_setting)
        state.route = path
        if route.role != "open":
            await self._authenticate(request, route.role, state)
            identity, connection = state.identity, request[CONNECTION]
            payer = ADMINISTRATOR if identity is None else identity.tenant.tenant_id
            if connection.payer != payer:
                connection.identify(payer)
            request[BODY_SHARE] = BodyShare(self._bodies, payer)
            if identity is not None:
                self._take_place(self._gateway, state)
        return route.handler(request)

    def _shape_of(self, request: web.BaseRequest) -> ErrorShape:
        """Return the error shape of a request if its route has none: its family's."""
        if not self._is_public:
            return PLAIN
        return find_family(tidy(request.path) + "/", request.headers).errors

    async def _authenticate(
        self, request: web.BaseRequest, role: Role, state: RequestState
    ) -> None:
        """Record the key's identity in `state`. Raises Refusal.

        The body has not been read yet: a request without a valid key gets no parser time.
        """
        registry = self._gateway.authenticator
        try:
            if role.startswith(ADMIN):
                await self._authenticate_administrator(request, state)
                scope = role.removeprefix(ADMIN).removeprefix(":")
                if scope and scope not in state.admin_scopes:
                    raise KeyRefused("scope_missing", _lacks_scope(state, scope))
                return
            checked = await self._check(request, request_keys(request), registry.authenticate)
            identity = checked.one(_cache_owner, lambda found: role in found.scopes)
            state.identity = identity
            tenant = identity.tenant
            state.owner = KeyOwner(identity.key_id, tenant.tenant_id, tenant.name)
            if role not in identity.scopes:
                raise KeyRefused("scope_missing", f"This key does not have the {role!r} scope.")
        except KeyRefused as error:
            if error.code == "scope_missing":
                raise Refusal(Kind.PERMISSION, error.code, error.message) from error
            state.owner = self._former_owner(error)
            if error.code == "tenant_suspended":
                raise Refusal(Kind.PERMISSION, error.code, "This tenant is suspended.") from error
            family = find_family(tidy(request.path) + "/", request.headers)
            header = "" if role.startswith(ADMIN) else next(iter(family.key_headers), "")
            message = key_problem(error, header, is_admin=role.startswith(ADMIN))
            raise Refusal(Kind.AUTH, "invalid_api_key", message) from error

    async def _check(
        self, request: web.BaseRequest, keys: list[str], authenticate: Callable[[str], T]
    ) -> CheckedKeys[T]:
        """Check the keys of a request; where none is valid and one is unknown, once more with the
        keys that the database has now. Raises Refusal for too many wrong ones."""
        checked = CheckedKeys(keys, authenticate)
        is_looked_up = not checked.valid and any(map(is_key, checked.unknown))
        if is_looked_up and self._lookups.admit(request.remote or "local"):
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOKUP_S_MAX):
                    await asyncio.wrap_future(self._gateway.authenticator.read_now())
            checked = CheckedKeys(keys, authenticate)
        self._count_guesses(request, checked)
        return checked

    def _count_guesses(self, request: web.BaseRequest, checked: CheckedKeys[T]) -> None:
        """Count unknown keys. Raises Refusal beyond the limit of the request's address.

        A revoked or suspended key is no guess: a single one always gets its own error, never a 429.
        """
        address = request.remote or "local"
        if checked.is_guess:
            exceeded = [self._wrong_keys.record(address) for _ in checked.unknown or ("",)]
        else:
            exceeded = [self._wrong_keys.record_beside(address, key) for key in checked.unknown]
        if any(exceeded):
            raise Refusal(
                Kind.RATE,
                "too_many_wrong_keys",
                "Wrong-key limit reached for this address: limit"
                f" {WRONG_KEYS_PER_MINUTE_MAX} per minute.",
                retry_after_s=60.0,
            )

    def _former_owner(self, error: KeyRefused) -> KeyOwner | None:
        """Return whose the refused key was, or None for a key that never was a tenant's."""
        found = self._gateway.authenticator.tenant(error.tenant_id) if error.tenant_id else None
        if found is None:
            return None
        return KeyOwner(error.key_id, error.tenant_id, found.tenant.name)

    async def _authenticate_administrator(
        self, request: web.BaseRequest, state: RequestState
    ) -> None:
        """Record the administrator of a key, or the one that a trusted proxy names."""
        user = self._trusted.user_of(request)
        if user is not None:
            state.admin_user, state.admin_scopes = user, self._trusted.scopes
            return
        keys = request_keys(request, takes_query=False)
        checked = await self._check(request, keys, self._gateway.authenticator.authenticate_admin)
        administrator = checked.one(lambda found: found.key_id)
        state.admin_key_id, state.admin_scopes = administrator.key_id, administrator.scopes

    def _refuse(
        self, error: Exception, state: RequestState, request: web.BaseRequest
    ) -> web.Response | None:
        """Return the error response.

        If part of a response was sent already, reset the connection and return None.
        """
        refusal = refusal_of(error, request.method, request.path)
        if refusal is None:
            self._gateway.log("error", {"id": state.request_id, **error_location(error)})
            refusal = Refusal(Kind.INTERNAL, "internal_error", "Internal server error.")
        state.ending, state.code = "refused", refusal.code
        if request[CONNECTION].has_response_begun:
            abort(request)
            return None
        return error_response(refusal, state)

    def _report(self, state: RequestState, request: web.BaseRequest, status: int) -> None:
        """Record the request's metrics, its log line and its span, if there is a tracer."""
        total_s = self._gateway.clock() - state.started_s
        metrics = self._gateway.metrics
        tenant = "none" if state.owner is None else metrics.tenant_label(state.owner.tenant)
        if state.identity is not None:
            metrics.duration_s.add(total_s)
        metrics.requests.add(1, tenant, state.route, state.ending)
        if state.code:
            metrics.refusals.add(1, state.code)
            if tenant != "none":
                metrics.tenant_refusals.add(1, tenant, state.code)
        is_refused = state.ending == "refused"
        has_owner = state.identity is not None or (self._is_public and state.route != "unknown")
        if state.is_generation or (is_refused and has_owner):
            self._gateway.ended_requests.add((record_of(state, status, total_s), state.segments))
        if state.first_token_s is not None:
            cached = cache_outcome(state.usage.physical_cached, state.usage.total_in)
            metrics.first_token_s.add(state.first_token_s, cached)
        # Health probes come every second: log only requests of known callers, and failures.
        is_known = (
            state.identity is not None or state.admin_key_id is not None or state.admin_user != ""
        )
        is_told = is_known or state.ending != "done"
        if is_told and is_refused:
            identity = state.identity
            owner = state.admin_key_id if identity is None else identity.tenant.name
            is_told = self._refusal_lines.admit(owner)
        if self._gateway.config.log.requests and is_told:
            address = request[CONNECTION].address
            facts = log_facts(state, request.method, status, total_s, address)
            self._gateway.log("request", facts)
        tracer = self._gateway.tracer
        if tracer is not None and state.is_generation:
            traceparent = request.headers.get("traceparent", "")
            span = span_facts(state, status, total_s, self._gateway.wall(), traceparent)
            tracer.record(span)


def _cache_owner(identity: Identity) -> object:
    """Return what two keys of one request must have in common: bill and cache."""
    return identity.tenant.tenant_id, identity.workspace


_NO_ADMIN_PATH = (
    "Path not found on the admin listener; models are served on the public one (`server.listen`)."
)


def _check_no_websocket(request: web.BaseRequest, state: RequestState) -> None:
    """Raise Refusal for a handshake: with this status clients fall back to streaming at once."""
    if request.method == "GET" and "websocket" in request.headers.get("Upgrade", "").lower():
        state.headers["Upgrade"] = "HTTP/1.1"
        raise Refusal(
            Kind.UPGRADE,
            "websocket_not_supported",
            "WebSocket mode is not supported; use streaming: POST with `stream` true.",
        )


async def _no_content() -> web.StreamResponse:
    return web.Response(status=204)


async def _finish(
    request: web.BaseRequest, response: web.StreamResponse, state: RequestState
) -> None:
    """Add the headers that every response has and send the rest of the response."""
    if not response.prepared:
        headers = response.headers
        for name, value in state.response_headers({}).items():
            headers.setdefault(name, value)
        headers.update(state.headers)
        if not request.content.is_eof() or request[CONNECTION].owner.is_draining:
            response.force_close()  # the rest of the body is not read
    await finish(request, response)


# --- errors to bytes -----------------------------------------------------------------------------


def _lacks_scope(state: RequestState, scope: str) -> str:
    """Return why an administrator without a scope is refused, and what has it."""
    held = ", ".join(sorted(state.admin_scopes)) or "none"
    if state.admin_user:
        return (
            f"This administrator does not have the {scope!r} scope, but {held}; expected a key with"
            " it, or the scope in admin.trusted_scopes."
        )
    return (
        f"This administrator's key does not have the {scope!r} scope, but {held}; expected a key of"
        f" `trunkline key create --admin --scopes {scope}`, or of all scopes."
    )


def error_response(refusal: Refusal, state: RequestState) -> web.Response:
    """Return a refusal in the dialect's shape, with Retry-After and the like."""
    status, body = state.shape.error_body(refusal, state.request_id)
    response = web.Response(
        status=status,
        body=body,
        content_type="application/json",
        headers=state.shape.headers(state.request_id),
    )
    after_s = refusal.retry_after_s
    if after_s is not None:
        if refusal.kind is not Kind.QUOTA:  # a budget's window may end hours later
            after_s = min(60.0, after_s)
        # Rounded up: a retry that comes a moment too early is refused again.
        response.headers["Retry-After"] = str(max(1, math.ceil(after_s)))
    if refusal.kind is Kind.QUOTA or (
        refusal.kind in (Kind.RATE, Kind.CONFLICT) and after_s is None
    ):
        response.headers["X-Should-Retry"] = "false"
    if refusal.kind is Kind.AUTH:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
