"""The protocol of wire dialects: parse a request body, encode an answer, encode an error.

`gateway.generation` and `gateway.http` call dialects through it. A dialect knows no socket, no
route and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from gateway.dialects.canonical import Call, Delta, End, Reply, RequestMetadata, StoredItem
from gateway.errors import Refusal


class ErrorShape(Protocol):
    """The part of a dialect that encodes errors. `name`: the dialect's, or empty outside of all."""

    @property
    def name(self) -> str: ...

    def error_body(self, refusal: Refusal, request_id: str) -> tuple[int, bytes]:
        """Return the HTTP status and the JSON body."""

    def headers(self, request_id: str) -> dict[str, str]:
        """Return the headers that carry the request id beside `X-Request-Id`."""


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
    """Encodes an answer that may be stored. `is_stored`: what the answer says about that, and
    `is_appended` about the items in their conversation."""

    is_stored: bool
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
