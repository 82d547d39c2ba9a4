"""The export of metrics ends in order: one export at a time, and the connections last."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import msgspec
from prometheus_client.core import Metric

from gateway.background.metrics_export import MetricsExport
from gateway.config import MetricsConfig
from tests.unit.gateway.gateway_fixture import GatewayFixture


class SlowExporter:
    """An exporter whose first export lasts until `go_on`. Counts exports that overlap."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.exports = self.overlaps = 0
        self.is_closed = False
        self._sending = threading.Lock()

    def send(self, families: Sequence[Metric], at_ms: int) -> None:
        if not self._sending.acquire(blocking=False):
            self.overlaps += 1
            return
        try:
            self.exports += 1
            self.began.set()
            self.go_on.wait()
            self.overlaps += self.is_closed
        finally:
            self._sending.release()

    def close(self) -> None:
        self.is_closed = True


async def test_closing_waits_for_the_export_under_way(unopened_gateway: GatewayFixture) -> None:
    """Its thread cannot be cancelled, and would take a connection that nothing closes."""
    settings = MetricsConfig(interval_s=0.001)
    unopened_gateway.config = msgspec.structs.replace(unopened_gateway.config, metrics=settings)
    await unopened_gateway.open()
    exporter = SlowExporter()
    export = MetricsExport(unopened_gateway.gateway.context, exporter)
    export.start()
    await asyncio.to_thread(exporter.began.wait)
    closing = asyncio.create_task(export.close())
    for _ in range(20):
        await asyncio.to_thread(bool)  # turns of the loop in which a second export could begin
    exporter.go_on.set()
    await closing
    await unopened_gateway.close()

    assert exporter.overlaps == 0
    assert exporter.exports >= 2
    assert exporter.is_closed
