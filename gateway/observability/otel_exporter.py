"""Export of spans to a collector, by OTLP over HTTP, with OpenTelemetry's SDK.

Only `app` imports this module, and only if `tracing.endpoint` is set. A thread of the SDK sends
spans from a bounded queue: a slow or dead collector costs spans and delays no response. Spans are
made only from `tracing.CompletedRequest`.
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
"""Seconds for one batch, with the SDK's retries."""
QUEUED_SPANS_MAX = 4_096
"""Spans that wait to be sent, some kilobytes each; the oldest are dropped first."""
BATCH_SPANS_MAX = 512
EXPORT_DELAY_MS = 2_000

Log = Callable[[str, dict[str, object]], None]


class SpanTracer:
    """Makes spans and sends them. Runs one thread until `close`."""

    def __init__(
        self, exporter: SpanExporter, sample_ratio: float, address: tuple[str, int], version: str
    ) -> None:
        """`sample_ratio`: of traces that begin here; a client's trace follows the client's sampling
        decision. `address`: of the public listener."""
        host, port = address
        self._server_attributes: dict[str, Attribute] = {"server.address": host}
        if port:
            self._server_attributes["server.port"] = port
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
                max_queue_size=QUEUED_SPANS_MAX,
                max_export_batch_size=BATCH_SPANS_MAX,
                schedule_delay_millis=EXPORT_DELAY_MS,
            )
        )
        self._tracer = self._provider.get_tracer("trunkline", version)

    def record(self, request: CompletedRequest) -> None:
        """Make a span of a request, if sampled.

        The end is read from the wall clock, and all other times are counted back from it, so that a
        step of that clock distorts no duration.
        """
        began_ns = request.ended_ms * 1_000_000 - _ns(request.total_s)
        # Without `tracestate`: it belongs to the next hop, which is this gateway, and clients may
        # write any value to it.
        parent = self._parents.extract({"traceparent": request.traceparent}, Context())
        span = self._tracer.start_span(
            request.name, parent, SpanKind.SERVER, start_time=began_ns, record_exception=False
        )
        if span.is_recording():
            span.set_attributes({**self._server_attributes, **request.attributes()})
            for name, at_s in request.events():
                span.add_event(name, timestamp=began_ns + _ns(at_s))
            if request.is_failure:
                span.set_status(StatusCode.ERROR, request.error)
        span.end(began_ns + _ns(request.total_s))

    def flush(self) -> None:
        """Send queued spans now. Blocks."""
        self._provider.force_flush()

    def close(self) -> None:
        """Send queued spans if the collector accepts them. Blocks, for at most two batches'
        timeouts."""
        if isinstance(self._exporter, WatchedExporter):
            self._exporter.is_closing = True
        self._provider.shutdown()


class WatchedExporter(SpanExporter):
    """An OTLP exporter that logs once when it begins to fail and once when it recovers."""

    def __init__(self, endpoint: str, log: Log) -> None:
        # The SDK logs every failure, with the collector's response.
        own_log = logging.getLogger("opentelemetry")
        own_log.addHandler(logging.NullHandler())
        own_log.propagate = False
        self._inner: SpanExporter = OTLPSpanExporter(traces_url(endpoint), timeout=TIMEOUT_S)
        self._log = log
        self._lost_spans = 0
        self.is_closing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send one batch. During shutdown a failed batch is the last attempt."""
        if self.is_closing and self._lost_spans:
            self._lost_spans += len(spans)
            return SpanExportResult.FAILURE
        result = self._inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._lost_spans:
                self._log("tracing_recovered", {"lost_spans": self._lost_spans})
            self._lost_spans = 0
            return result
        if not self._lost_spans:
            self._log("tracing_failed", {"spans": len(spans)})
        self._lost_spans += len(spans)
        return result

    def shutdown(self) -> None:
        """Close the connections."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Do nothing: the exporter has no queue."""
        return True


def traces_url(endpoint: str) -> str:
    """Return the collector's URL for traces; an endpoint that ends with `/v1/traces` stays as it
    is."""
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
