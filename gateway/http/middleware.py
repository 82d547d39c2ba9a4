"""The middlewares of a listener, in order: from a request's head to its log line.

    request ─ id ─ entering, one after another ─ handler ─ response ─ leaving, one after another
                 └── any error: Refusal ─ its payer's pace ─ dialect's bytes ┘

`gateway.api.listeners` declares both lists in one place. No other module turns an error into bytes.
The whole response is written here, so that a request's log line follows its last byte.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence

from aiohttp import web

from engine.api import Clock
from gateway.context import Log
from gateway.dialects.families import PLAIN, find_family
from gateway.dialects.protocol import ErrorShape
from gateway.errors import Kind, Refusal, error_location
from gateway.http.connection import CONNECTION
from gateway.http.error_mapping import no_path, refusal_of
from gateway.http.request_body import BODY_SHARE, BodyBudget, BodyShare
from gateway.http.request_context import STATE, RequestState
from gateway.http.response import RESPONSE_HEADERS, ClientGone, abort, finish
from gateway.http.route_table import PathNotFound, Route, RouteTable, canonical, tidy
from tenancy.limits import NO_DEMAND

Found = web.Response | None
Enter = Callable[[web.BaseRequest, RequestState], Awaitable[Found] | Found]
"""Checks a request before its handler. Raises Refusal; a response ends the request."""
Leave = Callable[[web.BaseRequest, RequestState, int], None]
"""Called once when a request has ended, with its status; 0 if the client left."""


ANY_ORIGIN = "*"
CORS_METHODS = "GET, HEAD, POST, PATCH, DELETE"
"""The methods of the public listener."""
CORS_HEADERS = "Authorization, Content-Type"
PREFLIGHT_MAX_AGE_S = 600
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_-]{1,64}(, ?[A-Za-z0-9_-]{1,64}){0,63}")


class Origins:
    """The origins whose pages may call the listener; `ANY_ORIGIN` among them admits all.

    Keys travel in headers and never in cookies, so no answer allows credentials: a page can only
    use a key that it was given.
    """

    def __init__(
        self,
        origins: Collection[str],
        check_host: Callable[[web.BaseRequest], None] = lambda request: None,
    ) -> None:
        """`check_host`: raises Refusal for a name that is not the listener's."""
        self._origins, self._check_host = frozenset(origins), check_host
        self.are_allowed = bool(origins)

    def enter(self, request: web.BaseRequest, state: RequestState) -> web.Response | None:
        """Add the headers that every answer needs; answer a preflight at any path."""
        state.headers.update(self.headers(request))
        if not self.is_preflight(request):
            return None
        self._check_host(request)
        return web.Response(status=204)

    def headers(self, request: web.BaseRequest) -> dict[str, str]:
        """Return the headers that every answer to the request needs, errors too: without them a
        page cannot even read why it was refused. O(1); empty if no origin is allowed."""
        if not self._origins:
            return {}
        allowed = ANY_ORIGIN
        if ANY_ORIGIN not in self._origins:
            allowed = request.headers.get("Origin", "")
            if allowed not in self._origins:
                return {"Vary": "Origin"}
        found = {"Access-Control-Allow-Origin": allowed, "Access-Control-Expose-Headers": "*"}
        if allowed != ANY_ORIGIN:
            found["Vary"] = "Origin"
        if self.is_preflight(request):
            asked = request.headers.get("Access-Control-Request-Headers", "")
            names = asked if _HEADER_NAMES.fullmatch(asked) else CORS_HEADERS
            found["Access-Control-Allow-Methods"] = CORS_METHODS
            found["Access-Control-Allow-Headers"] = names
            found["Access-Control-Max-Age"] = str(PREFLIGHT_MAX_AGE_S)
        return found

    def is_preflight(self, request: web.BaseRequest) -> bool:
        """Return whether a browser asks if a page may send a request; the answer names no path's
        methods, so that the request itself tells what is wrong with it."""
        return (
            bool(self._origins)
            and request.method == "OPTIONS"
            and "Origin" in request.headers
            and "Access-Control-Request-Method" in request.headers
        )


_NO_ADMIN_PATH = (
    "Path not found on the admin listener; models are served on the public one (`server.listen`)."
)


class RequestRouting:
    """The routes and names of one listener."""

    def __init__(
        self,
        routes: tuple[Route, ...],
        check_host: Callable[[web.BaseRequest], None],
        *,
        is_public: bool,
    ) -> None:
        """`check_host`: raises Refusal for a name that is not the listener's."""
        self._check_host, self._is_public = check_host, is_public
        self._table = RouteTable[tuple[Route, str]]()
        for route in routes:
            self._table.add(route.method, route.path, (route, canonical(route.path)))

    def enter(self, request: web.BaseRequest, state: RequestState) -> web.Response | None:
        """Note the route, and the shape of errors: that of the client's family, if the route has
        no other. Answers OPTIONS with the methods of the path.

        Raises Refusal, and PathNotFound or web.HTTPMethodNotAllowed for an undeclared route.
        """
        try:
            _check_no_websocket(request, state)
            (route, path), state.parameters = self._table.find(request)
        except (web.HTTPException, Refusal) as error:
            state.shape = self._shape_of(request)
            self._check_host(request)
            if isinstance(error, PathNotFound) and not self._is_public:
                if error.close:
                    raise no_path(request.path, error.close) from None
                raise Refusal(Kind.NOT_FOUND, "not_found", _NO_ADMIN_PATH) from None
            if isinstance(error, web.HTTPMethodNotAllowed):
                state.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
                if request.method == "OPTIONS":
                    return web.Response(status=204)
            raise
        state.shape = self._shape_of(request) if route.shape is PLAIN else route.shape
        self._check_host(request)
        state.declared, state.route = route, path
        return None

    def _shape_of(self, request: web.BaseRequest) -> ErrorShape:
        if not self._is_public:
            return PLAIN
        return find_family(tidy(request.path) + "/", request.headers).errors


def _check_no_websocket(request: web.BaseRequest, state: RequestState) -> None:
    """Raise Refusal for a handshake: with this status clients fall back to streaming at once."""
    if request.method == "GET" and "websocket" in request.headers.get("Upgrade", "").lower():
        state.headers["Upgrade"] = "HTTP/1.1"
        raise Refusal(
            Kind.UPGRADE,
            "websocket_not_supported",
            "WebSocket mode is not supported; use streaming: POST with `stream` true.",
        )


ADMINISTRATOR = 0
"""What connections and bodies of the admin API count for; no tenant has this id."""


class Places:
    """What a request with a key takes of the room that requests share: memory of bodies, and a
    place among its tenant's requests."""

    def __init__(
        self, body_bytes_max: int, take: Callable[[RequestState], Awaitable[None] | None]
    ) -> None:
        """`take`: sets the state's place, or raises Refusal, at once or once it was waited for."""
        self._budget = BodyBudget(body_bytes_max)
        self._take = take

    def enter(self, request: web.BaseRequest, state: RequestState) -> Awaitable[None] | None:
        """Admit a request before its body is read. Raises Refusal, or what it returns does."""
        assert state.declared is not None
        if state.declared.role == "open":
            return None
        identity, connection = state.identity, request[CONNECTION]
        payer = ADMINISTRATOR if identity is None else identity.tenant.tenant_id
        if connection.payer != payer:
            connection.identify(payer)
        request[BODY_SHARE] = BodyShare(self._budget, payer)
        return None if identity is None else self._take(state)

    def leave(self, request: web.BaseRequest, state: RequestState, status: int) -> None:
        """Give back what is left of it."""
        give_back(request, state)


def give_back(request: web.BaseRequest, state: RequestState) -> None:
    """Give back a request's place and its body's bytes; a second call changes nothing. O(1)."""
    if state.place is not None:
        state.place.settle(NO_DEMAND)
        state.place = None  # an idle connection keeps its last request
    share = request.get(BODY_SHARE)
    if share is not None and share.bytes_taken:
        share.release()


PACED_STATUSES = frozenset({402, 429, 503, 529})
"""Statuses that say: not now. Asking again costs a client nothing but the time of the answer."""
REFUSALS_AT_ONCE = 100
REFUSALS_PER_S = 50
REFUSAL_WAIT_S_MAX = 5.0
PAYERS_MAX = 4_096


class RefusalPace:
    """How fast a payer is told again and again that it has to wait.

    A client that ignores `Retry-After` and asks again as soon as it is refused would take the
    gateway's time from others. Of each payer (a key's tenant, or a stranger's address) 100 refusals
    are answered at once and then 50 a second. The further ones wait for their turn, up to 5 s, and
    hold nothing but their connection. Belongs to one event loop.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_s: OrderedDict[Hashable, float] = OrderedDict()
        """When the answers so far would have ended at the steady rate, by payer."""

    def wait_s(self, payer: Hashable) -> float:
        """Count one refusal of a payer; return how long its answer has to wait. O(1)."""
        now_s = self._clock()
        due_s = max(self._due_s.pop(payer, now_s), now_s)
        wait_s = max(0.0, due_s - now_s - (REFUSALS_AT_ONCE - 1) / REFUSALS_PER_S)
        if wait_s < REFUSAL_WAIT_S_MAX:
            due_s += 1 / REFUSALS_PER_S
        self._due_s[payer] = due_s
        if len(self._due_s) > PAYERS_MAX:
            self._due_s.popitem(last=False)
        return min(wait_s, REFUSAL_WAIT_S_MAX)


class Middleware:
    """Checks, answers and reports the requests of one listener."""

    def __init__(
        self,
        routes: tuple[Route, ...],
        entering: Sequence[Enter],
        leaving: Sequence[Leave],
        new_id: Callable[[], str],
        clock: Clock,
        log: Log,
    ) -> None:
        self.routes = routes
        self._entering, self._leaving = tuple(entering), tuple(leaving)
        self._new_id, self._clock, self._log = new_id, clock, log
        self._pace = RefusalPace(clock)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Process one request, from its id to its log line.

        Raises CancelledError and ConnectionError only; both close the connection.
        """
        state = RequestState(self._new_id(), self._clock())
        request[STATE] = state
        request[RESPONSE_HEADERS] = state.response_headers
        status = 0
        try:
            try:
                handled = await self._answer(request, state)
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
                # This frame keeps no name for the refusal: its traceback holds the frame, and with
                # it the whole body, until the garbage collector runs.
                if (refused := self._refuse(error, state, request)) is None:
                    raise ConnectionResetError("the response was aborted") from None
            status = refused.status
            if status in PACED_STATUSES:
                await self._wait_for_turn(request, state)
            await _finish(request, refused, state)
            return refused
        finally:
            state.total_s = self._clock() - state.started_s
            for leave in self._leaving:
                leave(request, state, status)

    async def _wait_for_turn(self, request: web.BaseRequest, state: RequestState) -> None:
        """Wait until the payer's pace allows this refusal; a server that drains waits for none."""
        connection, owner = request[CONNECTION], state.owner
        payer = connection.address if owner is None else owner.tenant_id
        wait_s = self._pace.wait_s(payer)
        if wait_s and not connection.owner.is_draining:
            give_back(request, state)
            await asyncio.sleep(wait_s)

    async def _answer(self, request: web.BaseRequest, state: RequestState) -> web.StreamResponse:
        for enter in self._entering:
            found = enter(request, state)
            if found is not None and not isinstance(found, web.Response):
                found = await found
            if found is not None:
                return found
        assert state.declared is not None, "a request without a route is refused before"
        return await state.declared.handler(request)

    def _refuse(
        self, error: Exception, state: RequestState, request: web.BaseRequest
    ) -> web.Response | None:
        """Return the error response.

        If part of a response was sent already, reset the connection and return None.
        """
        refusal = refusal_of(error, request.method, request.path)
        if refusal is None:
            self._log("error", {"id": state.request_id, **error_location(error)})
            refusal = Refusal(Kind.INTERNAL, "internal_error", "Internal server error.")
        state.ending, state.code = "refused", refusal.code
        if request[CONNECTION].has_response_begun:
            abort(request)
            return None
        return error_response(refusal, state)


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
