"""What a trace says of a request that asked for an answer, by OpenTelemetry's names for it.

It imports nothing of OpenTelemetry: with tracing off nothing does. The middleware makes
`CompletedRequest` when a request is over, from facts that hold no prompt, no output and no key, and
hands it to a `Tracer`; `gateway.observability.otel_exporter` is the one that sends spans, made by
`app` where it was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

Attribute = str | int | float | bool | Sequence[str]

_OPERATIONS = {"openai_completions": "text_completion", "gemini": "generate_content"}

CACHE_READ = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE = "gen_ai.usage.cache_write.input_tokens"


def operation_of(dialect: str) -> str:
    """What the conventions call an answer in this dialect."""
    return _OPERATIONS.get(dialect, "chat")


class CompletedRequest(Struct, frozen=True):
    """One request, at its end. Times are seconds after its arrival; `ended_ms` is wall time.

    `error`: a refusal's code, or the ending where there is none, or "". `traceparent`: as it came.
    """

    operation: str
    route: str
    ended_ms: int
    total_s: float
    request_id: str
    tenant_id: int | None = None
    status: int = 0
    ending: str = "done"
    error: str = ""
    model: str = ""
    response_id: str = ""
    is_stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()
    submitted_s: float | None = None
    first_token_s: float | None = None
    settled_s: float | None = None
    traceparent: str = ""

    @property
    def name(self) -> str:
        """The span's: few different ones, as backends group by it."""
        return f"{self.operation} {self.model}".rstrip()

    @property
    def is_failure(self) -> bool:
        """Is it ours? A client's mistake is none, nor is its leaving."""
        return self.ending == "failed" or self.status >= 500

    def attributes(self) -> dict[str, Attribute]:
        """By the conventions' names; `trunkline.` where they have none."""
        found: dict[str, Attribute] = {
            "gen_ai.operation.name": self.operation,
            "gen_ai.provider.name": "trunkline",
            "gen_ai.request.stream": self.is_stream,
            "http.request.method": "POST",
            "http.route": self.route,
            "trunkline.ending": self.ending,
            "trunkline.request_id": self.request_id,
        }
        if self.status:
            found["http.response.status_code"] = self.status
        if self.model:
            found["gen_ai.request.model"] = found["gen_ai.response.model"] = self.model
        if self.tenant_id is not None:
            found["trunkline.tenant_id"] = self.tenant_id
        if self.error:
            found["error.type"] = self.error
        if self.submitted_s is not None:  # else it never ran: there is nothing to count
            found.update(self._usage())
        return found

    def events(self) -> list[tuple[str, float]]:
        """(name, seconds after arrival) of what it reached, in order."""
        reached = (
            ("submitted", self.submitted_s),
            ("first_token", self.first_token_s),
            ("settled", self.settled_s),
        )
        return [(name, at_s) for name, at_s in reached if at_s is not None]

    def _usage(self) -> dict[str, Attribute]:
        found: dict[str, Attribute] = {
            "gen_ai.response.id": self.response_id,
            "gen_ai.usage.input_tokens": self.prompt_tokens,
            "gen_ai.usage.output_tokens": self.output_tokens,
            CACHE_READ: self.cache_read_tokens,
            CACHE_WRITE: self.cache_write_tokens,
            "trunkline.cached_tokens": self.cached_tokens,
        }
        if self.finish_reasons:
            found["gen_ai.response.finish_reasons"] = self.finish_reasons
        if self.first_token_s is not None:
            found["gen_ai.response.time_to_first_chunk"] = self.first_token_s
        return found


class Tracer(Protocol):
    """Where spans go."""

    def record(self, answered: CompletedRequest) -> None:
        """Make a span of it, if it is sampled. Waits for nothing; raises nothing."""

    def close(self) -> None:
        """Send what is left, for a bounded time. Blocks."""
