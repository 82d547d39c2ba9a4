"""What the gateway asks of a dialect: parse a body, encode an answer, encode an error.

Every wire dialect implements `Dialect`. It knows no socket, no route and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gateway.dialects.canonical import Call, Delta, Reply, RequestMetadata
from gateway.errors import Refusal


class ErrorShape(Protocol):
    """The part of a dialect that errors need."""

    def error_body(self, refusal: Refusal, request_id: str) -> tuple[int, bytes]:
        """(HTTP status, JSON)."""

    def headers(self, request_id: str) -> dict[str, str]:
        """Headers that name the request, beside `X-Request-Id`."""


class Encoder(Protocol):
    """One answer's way to bytes."""

    def stream(self, delta: Delta) -> bytes:
        """Bytes of one delta; may be none."""

    def close(self) -> bytes:
        """After the last one."""

    def unary(self, deltas: Sequence[Delta]) -> bytes:
        """The fold of the stream."""

    def error_event(self, refusal: Refusal) -> bytes:
        """The answer breaks off."""


class Dialect(ErrorShape, Protocol):
    """What inference needs of a dialect."""

    name: str
    stream_content_type: str

    def parse(self, body: bytes, asked: RequestMetadata) -> Call:
        """Raises Refusal."""

    def encoder(self, call: Call, reply: Reply) -> Encoder:
        """For one answer."""

    def keep_alive(self) -> bytes:
        """Bytes that mean nothing."""

    def count_body(self, tokens: int, cached: int) -> bytes:
        """The answer to a call that only counts: `cached` of the tokens are cached content."""
