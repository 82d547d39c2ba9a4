"""Trace attributes of a generation request, by OpenTelemetry's semantic conventions.

This module does not import OpenTelemetry, so nothing does while tracing is off. The middleware
makes a `CompletedRequest` when a request ends, from facts that hold no prompt, output or key, and
hands it to a `Tracer`. `gateway.observability.otel_exporter` has the implementation that sends
spans; `app` makes it if tracing is configured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from gateway.dialects.canonical import UsageRecord

Attribute = str | int | float | bool | Sequence[str]

CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE_TOKENS = "gen_ai.usage.cache_write.input_tokens"


class CompletedRequest(Struct, frozen=True):
    """A finished request. Times are seconds after its arrival; `ended_ms` is wall time."""

    operation: str
    route: str
    ended_ms: int
    total_s: float
    request_id: str
    tenant_id: int | None = None
    status: int = 0
    ending: str = "done"
    error: str = ""
    """The error code of a refusal, else the ending, else ""."""
    model: str = ""
    response_id: str = ""
    is_stream: bool = False
    usage: UsageRecord = UsageRecord(0)
    load_s: float | None = None
    """How long it waited for a level below the device; None without a load."""
    finish_reasons: tuple[str, ...] = ()
    submitted_s: float | None = None
    first_token_s: float | None = None
    settled_s: float | None = None
    traceparent: str = ""
    """The client's header."""

    @property
    def name(self) -> str:
        """The span's name: of low cardinality, since backends group by it."""
        return f"{self.operation} {self.model}".rstrip()

    @property
    def is_failure(self) -> bool:
        """True if the server failed. A client's error or disconnect is no failure."""
        return self.ending == "failed" or self.status >= 500

    def attributes(self) -> dict[str, Attribute]:
        """Return attributes by the conventions' names, and `trunkline.` names where they have
        none."""
        attributes: dict[str, Attribute] = {
            "gen_ai.operation.name": self.operation,
            "gen_ai.provider.name": "trunkline",
            "gen_ai.request.stream": self.is_stream,
            "http.request.method": "POST",
            "http.route": self.route,
            "trunkline.ending": self.ending,
            "trunkline.request_id": self.request_id,
        }
        if self.status:
            attributes["http.response.status_code"] = self.status
        if self.model:
            attributes["gen_ai.request.model"] = attributes["gen_ai.response.model"] = self.model
        if self.tenant_id is not None:
            attributes["trunkline.tenant_id"] = self.tenant_id
        if self.error:
            attributes["error.type"] = self.error
        if self.submitted_s is not None:  # a request that never ran has no usage
            attributes.update(self._usage())
        return attributes

    def events(self) -> list[tuple[str, float]]:
        """Return (name, seconds after arrival) of the stages reached, in order."""
        reached = (
            ("submitted", self.submitted_s),
            ("first_token", self.first_token_s),
            ("settled", self.settled_s),
        )
        return [(name, at_s) for name, at_s in reached if at_s is not None]

    def _usage(self) -> dict[str, Attribute]:
        attributes: dict[str, Attribute] = {
            "gen_ai.usage.input_tokens": self.usage.total_in,
            "gen_ai.usage.output_tokens": self.usage.out,
            CACHE_READ_TOKENS: self.usage.read_tokens(),
            CACHE_WRITE_TOKENS: self.usage.write_tokens(),
            "trunkline.cached_tokens": self.usage.physical_cached,
        }
        if self.request_id in self.response_id:  # another id leads to what is stored under it
            attributes["gen_ai.response.id"] = self.response_id
        if self.load_s is not None:
            attributes["trunkline.load_s"] = self.load_s
        if self.finish_reasons:
            attributes["gen_ai.response.finish_reasons"] = self.finish_reasons
        if self.first_token_s is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = self.first_token_s
        return attributes


class Tracer(Protocol):
    """Receives finished requests."""

    def record(self, request: CompletedRequest) -> None:
        """Make a span of a request, if sampled. Does not block; raises nothing."""

    def close(self) -> None:
        """Send queued spans, for a bounded time. Blocks."""
