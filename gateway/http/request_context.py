"""The request context: a request's id and state, and the log line and span made from them.

    id, clock ─ route, shape ─ identity ─ counts from handlers ─ log line, span

It knows no engine and no prompt. `gateway.http.middleware` makes one `RequestState` for each
request; handlers fill in the counts.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from aiohttp import web
from msgspec import Struct

from engine.api import Clock
from gateway.config import Config, is_model_name
from gateway.context import Log
from gateway.dialects.canonical import NO_METADATA, Boundary, RequestMetadata, UsageRecord
from gateway.dialects.families import PLAIN, VERSION_HEADERS
from gateway.dialects.protocol import ErrorShape
from gateway.http.connection import CONNECTION
from gateway.http.route_table import Route
from gateway.observability.ended_requests import EndedRequests
from gateway.observability.logging import RefusalLines
from gateway.observability.metrics import Metrics, cache_outcome
from gateway.observability.tracing import CompletedRequest, Tracer
from gateway.routing.router import RouteChoice, pack_choice
from tenancy.history.request_records import RequestRecord
from tenancy.limits import Reservation
from tenancy.types import Fidelity, Identity, WallClock

BASE_HEADERS = {
    "Server": "trunkline",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""Headers of every response."""

ID_BYTES, IDS_AT_ONCE = 10, 128


class RequestIds:
    """Generates request ids: the `X-Request-Id` header and the key of the ledger entry.

    An id is the wall-clock millisecond and 80 random bits, in hexadecimal. It cannot be guessed,
    and the ledger's index of ids grows only at its end. Random bytes are read for 128 ids at once,
    because one system call takes as long as the rest of a request's head. Not thread-safe.
    """

    def __init__(
        self, wall: WallClock, random_bytes: Callable[[int], bytes] = secrets.token_bytes
    ) -> None:
        self._wall = wall
        self._random_bytes = random_bytes
        self._suffixes: list[str] = []

    def __call__(self) -> str:
        """Return a new id of 32 hexadecimal characters. O(1) amortised."""
        if not self._suffixes:
            data = self._random_bytes(ID_BYTES * IDS_AT_ONCE).hex()
            size = 2 * ID_BYTES
            self._suffixes = [data[at : at + size] for at in range(0, len(data), size)]
        return f"{self._wall():012x}{self._suffixes.pop()}"


class KeyOwner(Struct, frozen=True):
    """A tenant's key and its tenant."""

    key_id: int
    tenant_id: int
    tenant: str


class RequestState(Struct):
    """The mutable state of a request, filled in until its log line is written.

    Instants are readings of the gateway's monotonic clock, in seconds.
    """

    request_id: str
    started_s: float
    route: str = "unknown"
    shape: ErrorShape = PLAIN
    identity: Identity | None = None
    owner: KeyOwner | None = None
    """The tenant of the key. Without an `identity` the request was refused: its key is revoked or
    expired, or the tenant is suspended."""
    admin_key_id: int | None = None
    admin_user: str = ""
    """The administrator that a trusted proxy named; "" with a key."""
    admin_scopes: frozenset[str] = frozenset()
    place: Reservation | None = None
    """The request's place among its tenant's, with its share of the rate limits."""
    ending: str = "done"
    code: str = ""
    model: str = ""
    asked_model: str = ""
    """The name that the client sent. It may be any text, so neither logs nor spans have it."""
    is_generation: bool = False
    """Whether a model runs for the request, so that it has a record and a span."""
    is_stream: bool = False
    is_complete: bool = False
    epoch: str = ""
    """The engine's epoch."""
    response_id: str = ""
    usage: UsageRecord = UsageRecord(0)
    """The tokens of all prompts together."""
    finish_reasons: dict[int, str] = {}
    fidelity: Fidelity = "exact"
    """How far from exact copies might be; `read_fidelity`: how far those may be that were found."""
    read_fidelity: Fidelity = "exact"
    attention: str = ""
    """The attention window, as "window=W;sinks=S"; "" for all tokens."""
    submitted_s: float | None = None
    """When the engine accepted the request."""
    queue_s: float = 0.0
    """How long the request waited in the engine for its first step."""
    load_s: float = 0.0
    """The part of `queue_s` that it waited for its load from `load_level`, the slowest one."""
    load_level: str = ""
    first_token_s: float | None = None
    """Seconds from the engine's receipt of the request to its first token."""
    settled_s: float | None = None
    missed: str = ""
    """The cause of the first miss, and its tokens."""
    missed_tokens: int = 0
    segments: tuple[Boundary, ...] = ()
    """The parts of a single prompt."""
    choice: RouteChoice | None = None
    """Why a single prompt went to its engine, where there are several."""
    headers: dict[str, str] = {}
    """Headers that are added to any response."""
    parameters: dict[str, str] = {}
    """The decoded path parameters."""
    declared: Route | None = None
    total_s: float = 0.0
    """How long the request took, once it has ended."""

    def response_headers(self, own: dict[str, str]) -> dict[str, str]:
        """Return `own` with the headers that every response to this request has."""
        shape = self.shape.headers(self.request_id)
        return {**BASE_HEADERS, "X-Request-Id": self.request_id, **shape, **own, **self.headers}

    def mark_client_left(self) -> int:
        """Mark the request as cancelled and return the HTTP status for the log, 0.

        A request with a complete response stays done, with status 200.
        """
        if self.is_complete:
            return 200
        self.ending = "cancelled"
        return 0


STATE = web.RequestKey("state", RequestState)


def identity_of(request: web.BaseRequest) -> Identity:
    """Return whose key came with a request, on a route that requires a tenant's key."""
    identity = request[STATE].identity
    assert identity is not None, "this route requires a tenant's key"
    return identity


def log_facts(
    state: RequestState, method: str, status: int, total_s: float, address: str
) -> dict[str, object]:
    """Return the fields of the request's log line: ids, counts and the declared route.

    `address`: the client's, as the connection has it. The received path is never logged: it may
    hold a key or a prompt.
    """
    owner, first_s = state.owner, state.first_token_s
    return {
        "id": state.request_id,
        "address": address,
        "method": method if method.isalpha() and len(method) <= 8 else "other",
        "route": state.route,
        "status": status,
        "ending": state.ending,
        "code": state.code,
        "tenant": None if owner is None else owner.tenant,
        "tenant_id": None if owner is None else owner.tenant_id,
        "key_id": state.admin_key_id if owner is None else owner.key_id,
        "model": state.model,
        "stream": state.is_stream,
        "prompt_tokens": state.usage.total_in,
        "cached_tokens": state.usage.physical_cached,
        "output_tokens": state.usage.out,
        "load_ms": round(state.load_s * 1000, 1) if state.load_level else None,
        "first_token_ms": None if first_s is None else round(first_s * 1000, 1),
        "total_ms": round(total_s * 1000, 1),
    }


def _model_name(text: str) -> str:
    """Return a text that could be a model's name, else ""."""
    return text if is_model_name(text) else ""


def record_of(state: RequestState, status: int, total_s: float) -> RequestRecord:
    """Return the record of an ended request: counts, times and codes."""
    owner = state.owner
    submitted_s, first_token_s, settled_s = _phases(state)
    return RequestRecord(
        request_id=state.request_id,
        tenant_id=0 if owner is None else owner.tenant_id,
        key_id=0 if owner is None else owner.key_id,
        endpoint=state.route,
        dialect=state.shape.name,
        model=state.model or _model_name(state.asked_model),
        is_stream=state.is_stream,
        status=status,
        ending=state.ending,
        code=state.code,
        total_s=total_s,
        submitted_s=submitted_s,
        started_s=None if submitted_s is None else submitted_s + state.queue_s,
        first_token_s=first_token_s,
        settled_s=settled_s,
        prompt_tokens=state.usage.total_in,
        cached_tokens=state.usage.physical_cached,
        output_tokens=state.usage.out,
        missed=state.missed,
        missed_tokens=state.missed_tokens,
        loaded_tokens=state.usage.loaded,
        fidelity=state.fidelity,
        read_fidelity=state.read_fidelity,
        load_s=state.load_s if state.load_level else None,
        attention=state.attention,
        choice=b"" if state.choice is None else pack_choice(state.choice),
    )


def span_facts(
    state: RequestState, status: int, total_s: float, ended_ms: int, traceparent: str
) -> CompletedRequest:
    """Return the fields of the request's span: the log line's, and the time of each phase."""
    reasons = state.finish_reasons
    submitted_s, first_token_s, settled_s = _phases(state)
    return CompletedRequest(
        operation=state.shape.operation,
        route=state.route,
        ended_ms=ended_ms,
        total_s=total_s,
        request_id=state.request_id,
        tenant_id=None if state.identity is None else state.identity.tenant.tenant_id,
        status=status,
        ending=state.ending,
        error=state.code or ("" if state.ending == "done" else state.ending),
        model=state.model,
        response_id=state.response_id,
        is_stream=state.is_stream,
        usage=state.usage,
        load_s=state.load_s if state.load_level else None,
        finish_reasons=tuple(reasons[index] for index in sorted(reasons)),
        submitted_s=submitted_s,
        first_token_s=first_token_s,
        settled_s=settled_s,
        traceparent=traceparent,
    )


def _phases(state: RequestState) -> tuple[float | None, float | None, float | None]:
    """Return when the request was submitted, had its first token and was settled, in seconds after
    its arrival; None for what has not happened."""
    submitted_s = None if state.submitted_s is None else state.submitted_s - state.started_s
    settled_s = None if state.settled_s is None else state.settled_s - state.started_s
    if submitted_s is None or state.first_token_s is None:
        return submitted_s, None, settled_s
    first_token_s = submitted_s + state.first_token_s
    if settled_s is not None:
        # The engine counts from its receipt, which is before this process knows of it.
        first_token_s = min(first_token_s, settled_s)
    return submitted_s, first_token_s, settled_s


def request_metadata(request: web.BaseRequest, config: Config) -> RequestMetadata:
    """Return the path and header fields that dialects read beside the body, and the modes of the
    request's key, or else of the server.

    The path parameter `target` is "model:action".
    """
    state, headers = request[STATE], request.headers
    target, identity = state.parameters.get("target"), state.identity
    tolerance, cache_key = config.server.tolerance, config.caching.cache_key
    if identity is not None:
        tolerance = identity.tolerance or tolerance
        cache_key = identity.cache_key or cache_key
    separates = cache_key == "namespace"
    if target is None and VERSION_HEADERS[0] not in headers:
        if tolerance == "standard" and not separates:
            return NO_METADATA
        return RequestMetadata(tolerance=tolerance, separates_cache_key=separates)
    model, _, action = (target or "").rpartition(":")
    return RequestMetadata(
        model=model,
        action=action,
        version=headers.get(VERSION_HEADERS[0], ""),
        tolerance=tolerance,
        separates_cache_key=separates,
    )


class RequestMetrics:
    """Counts requests, refusals and times."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def leave(self, request: web.BaseRequest, state: RequestState, status: int) -> None:
        """Count a request."""
        metrics = self._metrics
        tenant = "none" if state.owner is None else metrics.tenant_label(state.owner.tenant)
        if state.identity is not None:
            metrics.duration_s.add(state.total_s)
        metrics.requests.add(1, tenant, state.route, state.ending)
        if state.code:
            metrics.refusals.add(1, state.code)
            if tenant != "none":
                metrics.tenant_refusals.add(1, tenant, state.code)
        if state.first_token_s is not None:
            cached = cache_outcome(state.usage.physical_cached, state.usage.total_in)
            metrics.first_token_s.add(state.first_token_s, cached)


class RequestRecords:
    """Keeps the record of a request that ran a model, and of a refused one that has an owner."""

    def __init__(self, ended: EndedRequests, *, is_public: bool) -> None:
        self._ended, self._is_public = ended, is_public

    def leave(self, request: web.BaseRequest, state: RequestState, status: int) -> None:
        """Keep a record."""
        has_owner = state.identity is not None or (self._is_public and state.route != "unknown")
        if state.is_generation or (state.ending == "refused" and has_owner):
            self._ended.add((record_of(state, status, state.total_s), state.segments))


class RequestLines:
    """Logs requests. Health probes come every second: only those of known callers, and failures."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self._log = log
        self._refusal_lines = RefusalLines(log, clock)

    def leave(self, request: web.BaseRequest, state: RequestState, status: int) -> None:
        """Log a request."""
        identity, admin_id = state.identity, state.admin_key_id
        is_known = identity is not None or admin_id is not None or state.admin_user != ""
        if not is_known and state.ending == "done":
            return
        if state.ending == "refused":
            owner = admin_id if identity is None else identity.tenant.name
            if not self._refusal_lines.admit(owner):
                return
        address = request[CONNECTION].address
        self._log("request", log_facts(state, request.method, status, state.total_s, address))


class RequestSpans:
    """Traces requests that ran a model."""

    def __init__(self, tracer: Tracer, wall: WallClock) -> None:
        self._tracer, self._wall = tracer, wall

    def leave(self, request: web.BaseRequest, state: RequestState, status: int) -> None:
        """Record a span."""
        if state.is_generation:
            traceparent = request.headers.get("traceparent", "")
            self._tracer.record(span_facts(state, status, state.total_s, self._wall(), traceparent))
