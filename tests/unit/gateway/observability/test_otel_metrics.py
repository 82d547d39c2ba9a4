"""Metrics as a collector receives them: a real gateway and a real exporter, over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from gateway.app import open_metrics_exporter
from gateway.background.metrics_export import MetricsExport
from gateway.config import Config, MetricsConfig
from tests.unit.gateway.gateway_fixture import GatewayFixture
from tests.unit.gateway.observability.otlp_collector import OtlpCollector

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the same")

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)


class Collector(OtlpCollector):
    """Reads the metrics that it was sent."""

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last request by name."""
        request = ExportMetricsServiceRequest.FromString(self.bodies[-1])
        (resource,) = request.resource_metrics
        (scope,) = resource.scope_metrics
        return {metric.name: metric for metric in scope.metrics}


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    one = Collector(keeps_all=True)
    async with one.listen("/v1/metrics"):
        yield one


async def send_to(gateway: GatewayFixture, collector: Collector) -> MetricsExport:
    """Return an export of an open gateway's metrics."""
    config = Config(metrics=MetricsConfig(endpoint=collector.url))
    exporter = await asyncio.to_thread(open_metrics_exporter, config, gateway.log)
    assert exporter is not None
    return MetricsExport(gateway.gateway.context, exporter)


def labels_of(point: Any) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in point.attributes}


def value_of(point: Any) -> float:
    """Return a point's value, whole or not."""
    return float(getattr(point, point.WhichOneof("value")))


async def test_sends_counters_gauges_and_histograms(
    gateway: GatewayFixture, collector: Collector
) -> None:
    """With the counts of the exposition."""
    await gateway.ask(body=gateway.chat())
    await gateway.quiet()
    export = await send_to(gateway, collector)
    await export.send()
    found = collector.metrics()
    prompt, first = found["trunkline_prompt_tokens"].sum, found["trunkline_first_token_seconds"]
    (tokens,) = gateway.store.query("select prompt_tokens from ledger")[0]
    (point,) = first.histogram.data_points

    assert (prompt.is_monotonic, prompt.aggregation_temporality) == (True, 2)
    assert [(labels_of(one), value_of(one)) for one in prompt.data_points] == [
        ({"tenant": "ada"}, tokens)
    ]
    assert value_of(found["trunkline_kv_blocks"].gauge.data_points[0]) == 256
    assert (point.count, sum(point.bucket_counts), first.unit) == (1, 1, "s")
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
    assert labels_of(point) == {"cache": "miss"}
    assert value_of(found["process_resident_memory_bytes"].gauge.data_points[0]) > 0
    await export.close()
    assert len(collector.bodies) == 2


async def test_tells_once_that_the_collector_fails(
    gateway: GatewayFixture, collector: Collector
) -> None:
    export, collector.status = await send_to(gateway, collector), 400
    for _ in range(2):
        await export.send()
    collector.status = 200
    for _ in range(2):
        await export.send()
    await export.close()
    events = [str(line["event"]) for line in gateway.lines]

    assert [name for name in events if name.startswith("metrics_export")] == [
        "metrics_export_failed",
        "metrics_export_recovered",
    ]


async def test_a_gateway_sends_while_it_runs(
    unopened_gateway: GatewayFixture, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once more at its end."""
    gateway = unopened_gateway
    settings = MetricsConfig(endpoint=f"{collector.url}/v1/metrics", interval_s=0.001)
    gateway.config = msgspec.structs.replace(gateway.config, metrics=settings)
    await gateway.open()
    await gateway.until(lambda: len(collector.bodies) > 1)
    await gateway.close()

    assert "trunkline_engine_ready" in collector.metrics()


def test_nothing_is_sent_without_an_endpoint() -> None:
    assert open_metrics_exporter(Config(), lambda event, facts: None) is None
