"""Around every handler: a request id, the door check, who is asking, and the one place where
errors become bytes.

    request ─ id ─ Host ─ route's declared role ─ key ─ handler ─ answer
                 └──────────── any error: Refusal ─ dialect's bytes ┘ ─ one log line, metrics

It knows no engine and no prompt. `app` installs it; handlers declare `Route`s.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from aiohttp import web

from gateway.bodies import accept_expectation
from gateway.context import Context
from gateway.door import WRONG_KEYS_PER_MINUTE_MAX, WrongKeys, bearer_key, check_host
from gateway.errors import Kind, Refusal
from gateway.refusals import refusal_of, where
from gateway.request_state import PLAIN, STATE, ErrorShape, RequestState, log_facts, span_facts
from gateway.server import ClientGone, cut
from gateway.whole import Whole
from tenancy.errors import KeyRefused

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Role = Literal["open", "inference", "usage", "cache", "admin"]
"""What a key has to be for: a tenant's scope, or an administrator's key."""


@dataclass(frozen=True, slots=True)
class Route:
    """A way in. Only what is declared here can be reached; `open` needs no key."""

    method: str
    path: str
    handler: Handler
    role: Role
    shape: ErrorShape = PLAIN


_HEADERS = {
    "Server": "trunkline",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def install(
    app: web.Application,
    routes: tuple[Route, ...],
    gateway: Context,
    hosts: tuple[str, ...],
    shapes: tuple[tuple[str, ErrorShape], ...] = (),
) -> None:
    """Put routes and middleware on an application. Everything else is refused.

    `shapes`: (header, whose errors a client that sends it reads), for paths that are nobody's.
    """
    declared: dict[tuple[str, str], Route] = {}
    for route in routes:
        added = app.router.add_route(
            route.method, route.path, route.handler, expect_handler=accept_expectation
        )
        assert added.resource is not None, "an added route has its resource"
        declared[route.method, added.resource.canonical] = route
    guard = Guard(gateway, declared, hosts, shapes)

    @web.middleware
    async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await guard.handle(request, handler)

    app.middlewares.append(around)
    app.on_response_prepare.append(_name_response)


async def _name_response(request: web.Request, response: web.StreamResponse) -> None:
    """Every answer says which request it answers."""
    headers = response.headers
    headers["Server"] = _HEADERS["Server"]  # aiohttp has named itself by now
    for name, value in _HEADERS.items():
        headers.setdefault(name, value)
    state = request.get(STATE)
    if state is not None:
        headers["X-Request-Id"] = state.request_id
        for name, value in state.shape.headers(state.request_id).items():
            headers.setdefault(name, value)
        headers.update(state.headers)


class Guard:
    """The middleware of one listener."""

    def __init__(
        self,
        gateway: Context,
        declared: Mapping[tuple[str, str], Route],
        hosts: tuple[str, ...],
        shapes: tuple[tuple[str, ErrorShape], ...] = (),
    ) -> None:
        self._gateway = gateway
        self._hosts = hosts
        self._shapes = shapes
        self._declared = declared
        self._wrong_keys = WrongKeys(gateway.clock)

    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """One request, from its id to its log line. Raises only what closes the connection."""
        gateway = self._gateway
        state = RequestState(gateway.new_id(), gateway.clock())
        request[STATE] = state
        status = 0
        try:
            response = await self._enter(request, handler, state)
            if isinstance(response, Whole):  # it asks nobody before it goes
                ids = {"X-Request-Id": state.request_id, **state.shape.headers(state.request_id)}
                response.head = {**_HEADERS, **ids, **response.head, **state.headers}
            status = response.status
            return response
        except asyncio.CancelledError:
            status = state.left()
            raise
        except ClientGone:
            status = state.left()
            raise ConnectionResetError("the client left") from None
        except Exception as error:
            # Not by a name of this frame: the refusal's traceback holds it, and the whole body.
            answer = self._refuse(error, state, request)
            if answer is not None:
                status = answer.status
                return answer
            raise ConnectionResetError("the answer broke off") from None
        finally:
            self._report(state, request, status)

    async def _enter(
        self, request: web.Request, handler: Handler, state: RequestState
    ) -> web.StreamResponse:
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else ""
        route = self._declared.get((request.method, path))
        state.shape = route.shape if route is not None else PLAIN
        if state.shape is PLAIN:
            state.shape = self._shape_by_header(request)
        check_host(request, self._hosts)
        failure = request.match_info.http_exception
        if failure is not None:
            raise failure
        if route is None:
            raise web.HTTPNotFound
        state.route = path
        if route.role != "open":
            self._identify(request, route.role, state)
        return await handler(request)

    def _shape_by_header(self, request: web.Request) -> ErrorShape:
        """Whose errors a client reads that is at no path of a dialect's."""
        named = (shape for header, shape in self._shapes if header in request.headers)
        return next(named, PLAIN)

    def _identify(self, request: web.Request, role: Role, state: RequestState) -> None:
        """Who is asking. Before the body is read: nobody gets parser time without a key."""
        address = request.remote or "local"
        registry = self._gateway.registry
        try:
            key = bearer_key(request)
            if role == "admin":
                state.admin_key_id = registry.authenticate_admin(key)
                return
            state.identity = registry.authenticate(key)
            if role not in state.identity.scopes:
                raise KeyRefused("scope_missing", f"This key has not the scope {role!r}.")
        except KeyRefused as error:
            if error.code == "scope_missing":
                raise Refusal(Kind.PERMISSION, error.code, error.message) from error
            if self._wrong_keys.is_too_many(address):
                raise Refusal(
                    Kind.RATE,
                    "too_many_wrong_keys",
                    f"More than {WRONG_KEYS_PER_MINUTE_MAX} wrong keys came from this address"
                    " within a minute.",
                    retry_after_s=60.0,
                ) from error
            if error.code == "tenant_suspended":
                raise Refusal(Kind.PERMISSION, error.code, "This account is suspended.") from error
            raise Refusal(Kind.AUTH, "invalid_api_key", error.message) from error

    def _refuse(
        self, error: Exception, state: RequestState, request: web.Request
    ) -> web.Response | None:
        """What the client is told; None, and it is cut off, if it has part of an answer."""
        refusal = self._refusal(error, state)
        state.ending, state.code = "refused", refusal.code
        if request.writer.output_size > 0:
            cut(request)
            return None
        return error_response(refusal, state, request)

    def _refusal(self, error: Exception, state: RequestState) -> Refusal:
        refusal = refusal_of(error)
        if refusal is None:
            self._gateway.log("error", {"id": state.request_id, **where(error)})
            refusal = Refusal(Kind.INTERNAL, "internal_error", "Something failed on our side.")
        return refusal

    def _report(self, state: RequestState, request: web.Request, status: int) -> None:
        """One line, a few counts and perhaps a span per request, at its end."""
        total_s = self._gateway.clock() - state.started_s
        telemetry = self._gateway.telemetry
        tenant = "none"
        if state.identity is not None:
            tenant = telemetry.tenant_label(state.identity.tenant.name)
            telemetry.prompt_tokens.add(state.prompt_tokens, tenant)
            telemetry.cached_tokens.add(state.cached_tokens, tenant)
            telemetry.output_tokens.add(state.output_tokens, tenant)
            telemetry.count_epoch(
                *(state.epoch, state.prompt_tokens, state.cached_tokens, state.output_tokens),
                state.unneeded_tokens,
            )
            telemetry.duration_s.add(total_s)
        telemetry.requests.add(1, tenant, state.route, state.ending)
        if state.code:
            telemetry.refusals.add(1, state.code)
        if state.first_token_s is not None:
            telemetry.first_token_s.add(
                state.first_token_s, "hit" if state.cached_tokens else "miss"
            )
        # Probes ask every second and say nothing: only what had a key, or was refused.
        has_key = state.identity is not None or state.admin_key_id is not None
        has_news = has_key or state.ending != "done"
        if self._gateway.config.log.requests and has_news:
            self._gateway.log("request", log_facts(state, request.method, status, total_s))
        tracer = self._gateway.tracer
        if tracer is not None and state.operation:
            traceparent = request.headers.get("traceparent", "")
            facts = span_facts(state, status, total_s, self._gateway.wall(), traceparent)
            tracer.record(facts)


# --- errors to bytes -----------------------------------------------------------------------------


def error_response(refusal: Refusal, state: RequestState, request: web.Request) -> web.Response:
    """The dialect's bytes and the headers clients act on."""
    status, body = state.shape.error_body(refusal, state.request_id)
    response = web.Response(
        status=status,
        body=body,
        content_type="application/json",
        headers=state.shape.headers(state.request_id),
    )
    after_s = refusal.retry_after_s
    if after_s is not None:
        if refusal.kind is not Kind.QUOTA:  # a budget's window ends when it ends
            after_s = min(60.0, after_s)
        # Rounded up: whoever comes a moment too early is refused again.
        response.headers["Retry-After"] = str(max(1, math.ceil(after_s)))
    if refusal.kind is Kind.QUOTA or (
        refusal.kind in (Kind.RATE, Kind.CONFLICT) and after_s is None
    ):
        response.headers["X-Should-Retry"] = "false"
    if refusal.kind is Kind.AUTH:
        response.headers["WWW-Authenticate"] = "Bearer"
    if refusal.kind is Kind.METHOD:
        failure = request.match_info.http_exception
        allowed = failure.headers.get("Allow", "") if failure is not None else ""
        response.headers["Allow"] = allowed or "GET, POST"
    if not request.content.at_eof():
        response.force_close()  # the rest of its body is not worth reading
    return response
