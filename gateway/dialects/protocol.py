"""The protocol of wire dialects: parse a request body, encode an answer, encode an error.

`gateway.generation` and `gateway.http` call dialects through it. A dialect knows no socket, no
route and no engine. An `ApiFamily` is all that a dialect's package exports to the server, which
finds it in `gateway.dialects.families`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from gateway.dialects.canonical import Call, Delta, End, Reply, RequestMetadata, StoredItem
from gateway.dialects.validation import parse_int
from gateway.errors import Refusal
from gateway.retention_classes import CacheProfile
from tenancy.limits import LimitState, Meter


class ErrorShape(Protocol):
    """The part of a dialect that answers without a call: errors and headers."""

    name: str
    """The dialect's name, or "" outside of all."""

    family: str
    """The name of the family, as documents and configurations have it."""

    operation: str
    """What traces call a request, by OpenTelemetry's conventions."""

    @property
    def error(self) -> type[Struct]:
        """The shape of the body, for the OpenAPI documents."""

    def error_body(self, refusal: Refusal, request_id: str) -> tuple[int, bytes]:
        """Return the HTTP status and the JSON body."""

    def headers(self, request_id: str) -> dict[str, str]:
        """Return the headers that carry the request id beside `X-Request-Id`: by default none."""
        return {}

    def limit_headers(self, states: Mapping[Meter, LimitState], now_ms: int) -> dict[str, str]:
        """Return the remaining limits, in the headers that the dialect's clients read: by default
        none."""
        return {}


class Encoder(Protocol):
    """Encodes the deltas of one answer."""

    def stream(self, delta: Delta) -> bytes:
        """Return the bytes of one delta, which may be empty."""

    def close(self) -> bytes:
        """Return the bytes after the last delta of a complete answer."""

    def unary(self, deltas: Sequence[Delta]) -> bytes:
        """Return the unary body: the fold of the stream."""

    def error_event(self, refusal: Refusal) -> bytes:
        """Return the bytes that end a failed stream."""


@runtime_checkable
class StoredEncoder(Encoder, Protocol):
    """Encodes an answer that may be stored."""

    is_stored: bool
    """What the answer says about that, and `is_appended` about the items in their conversation."""
    is_appended: bool

    def response(self, end: End) -> bytes:
        """Return the complete response. All deltas before the end must have been encoded."""

    def turn(self) -> list[StoredItem]:
        """Return the request's items and the answer's, as a conversation keeps them, after all
        deltas before the end. O(bytes)."""


class Dialect(ErrorShape, Protocol):
    """A wire dialect of an endpoint that generates."""

    stream_content_type: str

    def parse(self, body: bytes, metadata: RequestMetadata) -> Call:
        """Return the canonical call of a request. Raises Refusal."""

    def encoder(self, call: Call, reply: Reply) -> Encoder:
        """Return the encoder of one answer."""

    def keep_alive(self) -> bytes:
        """Return bytes that every client of the dialect ignores."""

    def count_body(self, tokens: int, cached: int) -> bytes:
        """Return the answer to a token count; `cached` of the tokens are cached content."""


class Endpoint(Struct, frozen=True):
    """A path that generates."""

    path: str
    dialect: Dialect
    summary: str
    body: type[Struct]
    """The struct of its requests' bodies."""
    id_prefix: str = ""
    """The prefix of the ids of its responses."""
    without_sse: Dialect | None = None
    """The dialect for requests without `alt=sse`; None, if there is only one."""
    counts: bool = False
    """Whether it only counts tokens."""


class ListedModel(Struct, frozen=True):
    """A served model. `context_tokens` is 0 until the engine has reported it."""

    name: str
    created_s: int
    context_tokens: int
    output_tokens: int


MODELS_PAGE_MAX = 1_000
"""Most models in one page."""


def page_number(query: Mapping[str, str], name: str, default: int, least: int = 1) -> int:
    """Return a number of a page's query, at most `MODELS_PAGE_MAX`. Raises Refusal."""
    text = query.get(name, "")
    return min(parse_int(text, name, least), MODELS_PAGE_MAX) if text else default


class ApiFamily(Struct, frozen=True):
    """The dialects of one vendor's API, and how the server tells its clients from others."""

    name: str
    errors: ErrorShape
    endpoints: tuple[Endpoint, ...]
    profile: CacheProfile
    """How answers count reads, unless the configuration says otherwise."""
    list_models: Callable[[Sequence[ListedModel], Mapping[str, str]], dict[str, Any]]
    show_model: Callable[[ListedModel], dict[str, Any]]
    find_dialect: Callable[[Collection[str]], Dialect]
    """Returns the dialect of a body with these fields."""
    paths: tuple[str, ...] = ()
    """Prefixes of paths that no other family has."""
    headers: tuple[str, ...] = ()
    """Sent by no other client."""
    key_headers: tuple[str, ...] = ()
    """May hold the key, beside Authorization."""
    key_parameter: str = ""
    """So may this parameter of the query."""
    version_headers: tuple[str, ...] = ()
    """Change what a body means."""
    is_camel_case: bool = False
    """Whether documents spell fields in camelCase."""
    lists_embeddings: bool = False
    """Whether the list of models has those of embeddings."""
