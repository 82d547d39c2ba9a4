"""Spans to a collector, by OTLP over HTTP with OpenTelemetry's own SDK.

Only `app` imports it, and only where `tracing.endpoint` is set. A thread of the SDK's sends, from a
bounded queue: a collector that is slow or gone costs spans, never an answer. It knows no request;
`tracing.BatchResult` is all that it is told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.observability.tracing import Attribute, CompletedRequest

TIMEOUT_S = 3.0
"""For one batch, with the SDK's retries."""
QUEUE_SPANS_MAX = 4_096
"""Waiting to be sent, some kilobytes each; the oldest go when there are more."""
BATCH_SPANS_MAX = 512
DELAY_MS = 2_000

Log = Callable[[str, dict[str, object]], None]


class SpanTracer:
    """Makes spans and sends them. One thread, from its making to `close`."""

    def __init__(
        self, exporter: SpanExporter, sample_ratio: float, address: tuple[str, int], version: str
    ) -> None:
        """`sample_ratio`: of traces that begin here; one that a client began is sampled as it
        says. `address`: the public listener's."""
        host, port = address
        self._where: dict[str, Attribute] = {"server.address": host}
        if port:
            self._where["server.port"] = port
        self._parents = TraceContextTextMapPropagator()
        self._exporter = exporter
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create({"service.name": "trunkline", "service.version": version}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=QUEUE_SPANS_MAX,
                max_export_batch_size=BATCH_SPANS_MAX,
                schedule_delay_millis=DELAY_MS,
            )
        )
        self._tracer = self._provider.get_tracer("trunkline", version)

    def record(self, answered: CompletedRequest) -> None:
        """Make a span of it, if it is sampled. Its end is read from the wall clock and all else
        counted back from there, so that no step of that clock bends a duration."""
        began_ns = answered.ended_ms * 1_000_000 - _ns(answered.total_s)
        # Not its `tracestate`: nobody's but ours is the next hop, and clients write in it.
        parent = self._parents.extract({"traceparent": answered.traceparent}, Context())
        span = self._tracer.start_span(
            answered.name, parent, SpanKind.SERVER, start_time=began_ns, record_exception=False
        )
        if span.is_recording():
            span.set_attributes({**self._where, **answered.attributes()})
            for name, at_s in answered.events():
                span.add_event(name, timestamp=began_ns + _ns(at_s))
            if answered.is_failure:
                span.set_status(StatusCode.ERROR, answered.error)
        span.end(began_ns + _ns(answered.total_s))

    def flush(self) -> None:
        """Send what waits, now. Blocks."""
        self._provider.force_flush()

    def close(self) -> None:
        """Send what is left, while the collector takes it. Blocks, for two batches' time."""
        if isinstance(self._exporter, WatchedExporter):
            self._exporter.is_closing = True
        self._provider.shutdown()


class WatchedExporter(SpanExporter):
    """OTLP to one collector; says once when it fails and once when it takes spans again."""

    def __init__(self, endpoint: str, log: Log) -> None:
        # The SDK logs every failure, with what the collector answered.
        own_log = logging.getLogger("opentelemetry")
        own_log.addHandler(logging.NullHandler())
        own_log.propagate = False
        self._inner: SpanExporter = OTLPSpanExporter(traces_url(endpoint), timeout=TIMEOUT_S)
        self._log = log
        self._lost_spans = 0
        self.is_closing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """One batch. While the server closes, a failure is the last try."""
        if self.is_closing and self._lost_spans:
            self._lost_spans += len(spans)
            return SpanExportResult.FAILURE
        result = self._inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._lost_spans:
                self._log("tracing_again", {"lost_spans": self._lost_spans})
            self._lost_spans = 0
            return result
        if not self._lost_spans:
            self._log("tracing_failed", {"spans": len(spans)})
        self._lost_spans += len(spans)
        return result

    def shutdown(self) -> None:
        """Close its connections."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """It keeps nothing."""
        return True


def traces_url(endpoint: str) -> str:
    """Where traces go at a collector's base address; one that says so itself stays as it is."""
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
