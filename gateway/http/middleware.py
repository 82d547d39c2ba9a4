"""Around every handler: a request id, the door check, who is asking, and the one place where
errors become bytes.

    request ─ id ─ Host ─ route's declared role ─ key ─ handler ─ answer
                 └──────────── any error: Refusal ─ dialect's bytes ┘ ─ one log line, metrics

It knows no engine and no prompt. `app` makes one for each listener; handlers declare `Route`s. It
writes whole responses itself, so that a request's log line comes after its last byte.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from aiohttp import web

from gateway.context import Context
from gateway.dialects.protocol import ErrorShape
from gateway.errors import Kind, Refusal
from gateway.http.authentication import WRONG_KEYS_PER_MINUTE_MAX, WrongKeys, bearer_key, check_host
from gateway.http.connection import CONNECTION
from gateway.http.error_mapping import refusal_of, where
from gateway.http.request_context import (
    PLAIN,
    STATE,
    RequestState,
    log_facts,
    span_facts,
)
from gateway.http.response import RESPONSE_HEADERS, ClientGone, abort, finish
from gateway.http.route_table import RouteTable, canonical
from gateway.observability.metrics import cache_outcome
from tenancy.errors import KeyRefused

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
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


class Middleware:
    """Everything around the handlers of one listener."""

    def __init__(
        self,
        routes: tuple[Route, ...],
        gateway: Context,
        hosts: tuple[str, ...],
        shapes: tuple[tuple[str, ErrorShape], ...] = (),
    ) -> None:
        """`shapes`: (header, error shape that clients which send it read), for undeclared paths."""
        self.routes = routes
        self._gateway = gateway
        self._hosts = hosts
        self._shapes = shapes
        self._table = RouteTable[tuple[Route, str]]()
        for route in routes:
            self._table.add(route.method, route.path, (route, canonical(route.path)))
        self._wrong_keys = WrongKeys(gateway.clock)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request, from its id to its log line. Raises only what closes the connection."""
        gateway = self._gateway
        state = RequestState(gateway.new_id(), gateway.clock())
        request[STATE] = state
        request[RESPONSE_HEADERS] = state.response_headers
        status = 0
        try:
            response = await self._enter(request, state)
            status = response.status
            await _finish(request, response, state)
            return response
        except asyncio.CancelledError:
            status = state.left()
            raise
        except ClientGone:
            status = state.left()
            raise ConnectionResetError("the client left") from None
        except ConnectionError:
            raise
        except Exception as error:
            # Not by a name of this frame: the refusal's traceback holds it, and the whole body.
            if (answer := self._refuse(error, state, request)) is None:
                raise ConnectionResetError("the answer broke off") from None
            status = answer.status
            await _finish(request, answer, state)
            return answer
        finally:
            self._report(state, request, status)

    def _enter(
        self, request: web.BaseRequest, state: RequestState
    ) -> Awaitable[web.StreamResponse]:
        """The handler at work, behind the door. Raises what keeps a request out."""
        try:
            (route, path), state.parameters = self._table.find(request)
        except web.HTTPException as error:
            state.shape = self._shape_by_header(request)
            check_host(request, self._hosts)
            if isinstance(error, web.HTTPMethodNotAllowed):
                state.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
            raise
        state.shape = route.shape
        if state.shape is PLAIN:
            state.shape = self._shape_by_header(request)
        check_host(request, self._hosts)
        state.route = path
        if route.role != "open":
            self._identify(request, route.role, state)
        return route.handler(request)

    def _shape_by_header(self, request: web.BaseRequest) -> ErrorShape:
        """Whose errors a client reads that is at no path of a dialect's."""
        return next((shape for name, shape in self._shapes if name in request.headers), PLAIN)

    def _identify(self, request: web.BaseRequest, role: Role, state: RequestState) -> None:
        """Who is asking. Before the body is read: nobody gets parser time without a key."""
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
            # One that was ever good is no guess: it is told why it is not, however often it comes.
            is_guess = error.code == "key_unknown"
            if is_guess and self._wrong_keys.is_too_many(request.remote or "local"):
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
        self, error: Exception, state: RequestState, request: web.BaseRequest
    ) -> web.Response | None:
        """What the client is told; None, and it is cut off, if it has part of an answer."""
        refusal = refusal_of(error, request.path)
        if refusal is None:
            self._gateway.log("error", {"id": state.request_id, **where(error)})
            refusal = Refusal(Kind.INTERNAL, "internal_error", "Something failed on our side.")
        state.ending, state.code = "refused", refusal.code
        if request[CONNECTION].has_answer_begun:
            abort(request)
            return None
        return error_response(refusal, state, request)

    def _report(self, state: RequestState, request: web.BaseRequest, status: int) -> None:
        """One line, a few counts and perhaps a span per request, at its end."""
        total_s = self._gateway.clock() - state.started_s
        telemetry = self._gateway.telemetry
        tenant = "none"
        if state.identity is not None:
            tenant = telemetry.tenant_label(state.identity.tenant.name)
            telemetry.duration_s.add(total_s)
        telemetry.requests.add(1, tenant, state.route, state.ending)
        if state.code:
            telemetry.refusals.add(1, state.code)
        if state.first_token_s is not None:
            cached = cache_outcome(state.cached_tokens, state.prompt_tokens)
            telemetry.first_token_s.add(state.first_token_s, cached)
        # Probes ask every second and say nothing: only what had a key, or was refused.
        has_key = state.identity is not None or state.admin_key_id is not None
        if self._gateway.config.log.requests and (has_key or state.ending != "done"):
            self._gateway.log("request", log_facts(state, request.method, status, total_s))
        tracer = self._gateway.tracer
        if tracer is not None and state.operation:
            traceparent = request.headers.get("traceparent", "")
            facts = span_facts(state, status, total_s, self._gateway.wall(), traceparent)
            tracer.record(facts)


async def _finish(
    request: web.BaseRequest, response: web.StreamResponse, state: RequestState
) -> None:
    """Send what has not been sent of a response, named as every response is."""
    if not response.prepared:
        headers = response.headers
        for name, value in state.response_headers({}).items():
            headers.setdefault(name, value)
        headers.update(state.headers)
        if not request.content.is_eof():
            response.force_close()  # what still comes of its body would be taken for a head
    await finish(request, response)


# --- errors to bytes -----------------------------------------------------------------------------


def error_response(refusal: Refusal, state: RequestState, request: web.BaseRequest) -> web.Response:
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
        response.headers["Allow"] = state.headers.get("Allow", "GET, POST")
    if not request.content.at_eof():
        response.force_close()  # the rest of its body is not worth reading
    return response
