"""Export of metrics to a collector, by OTLP over HTTP, with OpenTelemetry's SDK.

Only `app` imports this module, and only if `metrics.endpoint` is set. The metrics are those of
`/metrics`, with the same names, labels and counts. `background.metrics_export` sends them from time
to time; a slow or dead collector delays no response.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import core

TIMEOUT_S = 3.0
"""Seconds for one export, with the SDK's retries."""
NS_PER_MS = 1_000_000

Log = Callable[[str, dict[str, object]], None]
Labels = tuple[tuple[str, str], ...]


class OtlpMetrics:
    """Sends families of metrics. Logs once when that begins to fail and once when it recovers."""

    def __init__(self, exporter: MetricExporter, version: str, began_ms: int, log: Log) -> None:
        """`began_ms`: when the counters began, in Unix milliseconds."""
        self._exporter = exporter
        self._resource = Resource.create({"service.name": "trunkline", "service.version": version})
        self._scope = InstrumentationScope("trunkline", version)
        self._began_ns = began_ms * NS_PER_MS
        self._log = log
        self._is_failing = False

    def send(self, families: Sequence[core.Metric], at_ms: int) -> None:
        """Send the families as they were at an instant, in Unix milliseconds. Blocks."""
        metrics = [self._metric(one, at_ms * NS_PER_MS) for one in families if one.samples]
        scoped = ScopeMetrics(self._scope, metrics, "")
        data = MetricsData([ResourceMetrics(self._resource, [scoped], "")])
        is_failing = self._exporter.export(data) is not MetricExportResult.SUCCESS
        if is_failing != self._is_failing:
            self._is_failing = is_failing
            event = "metrics_export_failed" if is_failing else "metrics_export_recovered"
            self._log(event, {"metrics": len(metrics)})

    def close(self) -> None:
        """Close the connections."""
        self._exporter.shutdown()

    def _metric(self, family: core.Metric, at_ns: int) -> Metric:
        data: Sum | Gauge | Histogram
        if family.type == "histogram":
            data = Histogram(self._histograms(family, at_ns), AggregationTemporality.CUMULATIVE)
        else:
            points = [
                NumberDataPoint(dict(sample.labels), self._began_ns, at_ns, sample.value)
                for sample in family.samples
            ]
            data = Gauge(points)
            if family.type == "counter":
                data = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
        unit = "s" if family.name.endswith("_seconds") else ""
        return Metric(family.name, family.documentation, unit, data)

    def _histograms(self, family: core.Metric, at_ns: int) -> list[HistogramDataPoint]:
        """Return a point for each series; the collector gets counts of buckets, not their sums."""
        below: dict[Labels, list[tuple[float, int]]] = {}
        sums: dict[Labels, float] = {}
        for sample in family.samples:
            labels = tuple((name, text) for name, text in sample.labels.items() if name != "le")
            if sample.name.endswith("_bucket"):
                edge = float(sample.labels["le"])
                below.setdefault(labels, []).append((edge, int(sample.value)))
            elif sample.name.endswith("_sum"):
                sums[labels] = sample.value
        points = []
        for labels, steps in below.items():
            edges, counts_below = zip(*steps, strict=True)
            counts = [
                count - before
                for count, before in zip(counts_below, (0, *counts_below), strict=False)
            ]
            bounds = edges[:-1]
            # The SDK asks for extremes; only the edges of the buckets in use are known.
            used = [place for place, count in enumerate(counts) if count] or [0]
            points.append(
                HistogramDataPoint(
                    attributes=dict(labels),
                    start_time_unix_nano=self._began_ns,
                    time_unix_nano=at_ns,
                    count=counts_below[-1],
                    sum=sums[labels],
                    bucket_counts=counts,
                    explicit_bounds=bounds,
                    min=(0.0, *bounds)[used[0]],
                    max=bounds[min(used[-1], len(bounds) - 1)],
                )
            )
        return points


def open_exporter(endpoint: str) -> MetricExporter:
    """Return an exporter to a collector; an endpoint that ends with `/v1/metrics` stays as it
    is."""
    # The SDK logs every failure, with the collector's response.
    own_log = logging.getLogger("opentelemetry")
    own_log.addHandler(logging.NullHandler())
    own_log.propagate = False
    base = endpoint.rstrip("/")
    url = base if base.endswith("/v1/metrics") else f"{base}/v1/metrics"
    return OTLPMetricExporter(url, timeout=TIMEOUT_S)
