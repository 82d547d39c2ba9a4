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

from gateway.dialects.canonical import NO_METADATA, Boundary, RequestMetadata
from gateway.dialects.openai import wire as openai_wire
from gateway.dialects.protocol import ErrorShape
from gateway.observability.tracing import CompletedRequest
from tenancy.history.request_records import RequestRecord
from tenancy.limits import Reservation
from tenancy.types import Fidelity, Identity, ToleranceMode, WallClock

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


class _DefaultErrorShape:
    """OpenAI's error body without extra headers."""

    name = ""
    error_body = staticmethod(openai_wire.error_body)

    def headers(self, request_id: str) -> dict[str, str]:
        return {}


PLAIN = _DefaultErrorShape()
"""The error shape for paths outside all dialects: OpenAI's, which most clients read."""


class KeyOwner(Struct, frozen=True):
    """A tenant's key and its tenant."""

    key_id: int
    tenant_id: int
    tenant: str


class RequestState(Struct):
    """The mutable state of a request, filled in until its log line is written.

    `former_owner`: of a key that is revoked or expired, or whose tenant is suspended: the request
    was refused, and belongs to that tenant. `place`: the request's place among its tenant's, with
    its share of the rate limits. `admin_user`: the administrator that a trusted proxy named; ""
    with a key. `parameters`: the decoded path parameters. `headers`: added to any response.
    `operation`: the span's name; empty for a request without a span. `epoch`: the engine's epoch.
    `submitted_s`: the time the engine accepted the request. `queue_s`: how long it waited there for
    its first step.
    `loaded_tokens`: of the cached ones, by the level below the device that had them. `load_s`: the
    part of `queue_s` that it waited for its load from `load_level`, the slowest one; "": no load.
    `fidelity`: how far from exact copies might be; `read_fidelity`: how far those may be that were
    found. `attention`: the attention window, as "window=W;sinks=S"; "" for all tokens.
    `missed`: the cause of the first miss. `segments`: the parts of a single prompt. `first_token_s`
    is relative to `submitted_s`; the other times are readings of the gateway's monotonic clock, in
    seconds.
    """

    request_id: str
    started_s: float
    route: str = "unknown"
    shape: ErrorShape = PLAIN
    identity: Identity | None = None
    former_owner: KeyOwner | None = None
    admin_key_id: int | None = None
    place: Reservation | None = None
    admin_user: str = ""
    admin_scopes: frozenset[str] = frozenset()
    ending: str = "done"
    code: str = ""
    model: str = ""
    is_stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: dict[str, int] = {}
    fidelity: Fidelity = "exact"
    read_fidelity: Fidelity = "exact"
    attention: str = ""
    load_s: float = 0.0
    load_level: str = ""
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    epoch: str = ""
    first_token_s: float | None = None
    is_complete: bool = False
    operation: str = ""
    response_id: str = ""
    finish_reasons: dict[int, str] = {}
    submitted_s: float | None = None
    queue_s: float = 0.0
    settled_s: float | None = None
    missed: str = ""
    missed_tokens: int = 0
    segments: tuple[Boundary, ...] = ()
    headers: dict[str, str] = {}
    parameters: dict[str, str] = {}

    def response_headers(self, own: dict[str, str]) -> dict[str, str]:
        """Return `own` with the headers that every response to this request has."""
        shape = self.shape.headers(self.request_id)
        return {**BASE_HEADERS, "X-Request-Id": self.request_id, **shape, **own, **self.headers}

    def mark_client_left(self) -> int:
        """Mark the request as cancelled and return the HTTP status for the log, 0.

        A request whose response is complete stays done, with status 200.
        """
        if self.is_complete:
            return 200
        self.ending = "cancelled"
        return 0


STATE = web.RequestKey("state", RequestState)


def log_facts(
    state: RequestState, method: str, status: int, total_s: float, address: str
) -> dict[str, object]:
    """Return the fields of the request's log line: ids, counts and the declared route.

    `address`: the client's, as the connection has it. The received path is never logged: it may
    hold a key or a prompt.
    """
    identity, former, first_s = state.identity, state.former_owner, state.first_token_s
    tenant, tenant_id, key_id = None, None, state.admin_key_id
    if identity is not None:
        tenant, tenant_id = identity.tenant.name, identity.tenant.tenant_id
        key_id = identity.key_id
    elif former is not None:
        tenant, tenant_id, key_id = former.tenant, former.tenant_id, former.key_id
    return {
        "id": state.request_id,
        "address": address,
        "method": method if method.isalpha() and len(method) <= 8 else "other",
        "route": state.route,
        "status": status,
        "ending": state.ending,
        "code": state.code,
        "tenant": tenant,
        "tenant_id": tenant_id,
        "key_id": key_id,
        "model": state.model,
        "stream": state.is_stream,
        "prompt_tokens": state.prompt_tokens,
        "cached_tokens": state.cached_tokens,
        "output_tokens": state.output_tokens,
        "load_ms": round(state.load_s * 1000, 1) if state.load_level else None,
        "first_token_ms": None if first_s is None else round(first_s * 1000, 1),
        "total_ms": round(total_s * 1000, 1),
    }


def record_of(state: RequestState, status: int, total_s: float) -> RequestRecord:
    """Return the record of an ended request: counts, times and codes."""
    identity, former = state.identity, state.former_owner
    began_s, first_s = state.started_s, None
    submitted_s, settled_s = state.submitted_s, state.settled_s
    if submitted_s is not None:
        submitted_s -= began_s
        first_s = None if state.first_token_s is None else submitted_s + state.first_token_s
        if first_s is not None and settled_s is not None:
            # The engine counts from its receipt, which is before this process knows of it.
            first_s = min(first_s, settled_s - began_s)
    tenant_id = key_id = 0
    if identity is not None:
        tenant_id, key_id = identity.tenant.tenant_id, identity.key_id
    elif former is not None:
        tenant_id, key_id = former.tenant_id, former.key_id
    return RequestRecord(
        request_id=state.request_id,
        tenant_id=tenant_id,
        key_id=key_id,
        endpoint=state.route,
        dialect=state.shape.name,
        model=state.model,
        is_stream=state.is_stream,
        status=status,
        ending=state.ending,
        code=state.code,
        total_s=total_s,
        submitted_s=submitted_s,
        started_s=None if submitted_s is None else submitted_s + state.queue_s,
        first_token_s=first_s,
        settled_s=None if settled_s is None else settled_s - began_s,
        prompt_tokens=state.prompt_tokens,
        cached_tokens=state.cached_tokens,
        output_tokens=state.output_tokens,
        missed=state.missed,
        missed_tokens=state.missed_tokens,
        loaded_tokens=state.loaded_tokens,
        fidelity=state.fidelity,
        read_fidelity=state.read_fidelity,
        load_s=state.load_s if state.load_level else None,
        attention=state.attention,
    )


def span_facts(
    state: RequestState, status: int, total_s: float, ended_ms: int, traceparent: str
) -> CompletedRequest:
    """Return the fields of the request's span: the log line's, and the time of each phase."""
    reasons = state.finish_reasons
    submitted_s = _after(state, state.submitted_s)
    first_token_s = None
    if submitted_s is not None and state.first_token_s is not None:
        first_token_s = submitted_s + state.first_token_s
    return CompletedRequest(
        operation=state.operation,
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
        prompt_tokens=state.prompt_tokens,
        cached_tokens=state.cached_tokens,
        load_s=state.load_s if state.load_level else None,
        cache_read_tokens=state.cache_read_tokens,
        cache_write_tokens=state.cache_write_tokens,
        output_tokens=state.output_tokens,
        finish_reasons=tuple(reasons[index] for index in sorted(reasons)),
        submitted_s=submitted_s,
        first_token_s=first_token_s,
        settled_s=_after(state, state.settled_s),
        traceparent=traceparent,
    )


def _after(state: RequestState, at_s: float | None) -> float | None:
    return None if at_s is None else at_s - state.started_s


def request_metadata(request: web.BaseRequest, tolerance: ToleranceMode) -> RequestMetadata:
    """Return the path and header fields that dialects read beside the body.

    The path parameter `target` is "model:action" in Gemini's paths. `tolerance`: the server's mode,
    which the request's key may override.
    """
    state, headers = request[STATE], request.headers
    target = state.parameters.get("target")
    if state.identity is not None and state.identity.tolerance is not None:
        tolerance = state.identity.tolerance
    if target is None and "anthropic-version" not in headers and "anthropic-beta" not in headers:
        return NO_METADATA if tolerance == "standard" else RequestMetadata(tolerance=tolerance)
    model, _, action = (target or "").rpartition(":")
    names = [name.strip() for name in headers.get("anthropic-beta", "").split(",")]
    return RequestMetadata(
        model=model,
        action=action,
        version=headers.get("anthropic-version", ""),
        betas=tuple(filter(None, names)),
        tolerance=tolerance,
    )
