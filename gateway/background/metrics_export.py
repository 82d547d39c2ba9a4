"""Refresh of the metrics that are read from elsewhere, and their export to a collector.

`/metrics` refreshes before it answers. With `metrics.endpoint` set, `gateway.app` runs the task,
which sends the same metrics every `metrics.interval_s`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import asdict
from prometheus_client.core import Metric

from gateway.context import Context
from gateway.engines.apart.prompts_apart import OUTCOMES as APART_OUTCOMES
from gateway.observability.metrics import EngineState
from gateway.periodic_task import PeriodicTask


class MetricsExporter(Protocol):
    """Sends metrics to a collector: `gateway.observability.otel_metrics.OtlpMetrics`, or a fake."""

    def send(self, families: Sequence[Metric], at_ms: int) -> None:
        """Send the families as they were at an instant, in Unix milliseconds. Blocks."""

    def close(self) -> None:
        """Close the connections. Blocks."""


async def refresh_metrics(gateway: Context) -> None:
    """Set the metrics that the engine, the ledger, the cache and the process keep themselves."""
    metrics = gateway.metrics
    await asyncio.to_thread(metrics.process.read)
    models = gateway.models
    replicas = models.default.replicas
    metrics.set_engine_stats(
        models.stats(),
        is_ready=gateway.is_ready(),
        restarts=replicas.restarts,
        moved=replicas.moved,
        several=[
            EngineState(one.name, of.stats, of.ready(), of.restarts, of.moved)
            for one in models
            if models.are_several
            for of in (one.replicas,)
        ],
    )
    metrics.set_replicas(
        {(one.name, of.name): of.ready() for one in models for of in one.replicas if of.name}
    )
    metrics.replica_facts.clear()
    metrics.routed_tokens.clear()
    metrics.replica_roles.clear()
    for one in models:
        for outcome in APART_OUTCOMES:
            count = one.replicas.apart.outcomes[outcome]
            metrics.prompts_apart.set(count, one.name, outcome)
        roles = Counter(of.role for of in one.replicas if of.name and of.ready())
        for role, number in roles.items():
            metrics.replica_roles.labels(one.name, role).set(number)
        for of in one.replicas:
            if (facts := one.replicas.chooser.facts_of(of)) is not None:
                metrics.replica_facts.set(facts.received, one.name, of.name)
                for kind, tokens in asdict(facts.routed).items():
                    metrics.routed_tokens.set(tokens, one.name, of.name, kind)
    metrics.ledger_restarts.set(gateway.ledger.restarts)
    if (embedder := gateway.embeddings) is not None:
        encoder, shown = embedder.encoder, metrics.encoder
        shown.ready.set(encoder.is_ready)
        shown.waiting_tokens.set(encoder.waiting_tokens)
        shown.cached_bytes.set(embedder.cached_bytes)
        shown.restarts.set(encoder.restarts)
        shown.batches.set(encoder.batches)
    gateway.usage.update_churn()
    metrics.inserted_blocks.set(gateway.usage.churn.all.total[0])
    metrics.promises.by_class = gateway.contracts.promises.by_class(gateway.clock())


class MetricsExport:
    """The task that sends metrics. Belongs to one event loop."""

    def __init__(self, gateway: Context, exporter: MetricsExporter) -> None:
        self._gateway = gateway
        self._exporter = exporter
        interval_s = gateway.config.metrics.interval_s
        self._task = PeriodicTask(
            "metrics_export", self.send, interval_s, gateway.log, gateway.clock
        )

    def start(self) -> None:
        """Start the task on the running event loop."""
        self._task.start()

    async def close(self) -> None:
        """Stop the task, send the last counts and close the connections.

        An export under way ends first: its thread cannot be cancelled, and would take a connection
        that nothing closes any more.
        """
        await self._task.close()
        await self.send()
        await asyncio.to_thread(self._exporter.close)

    async def send(self) -> None:
        """Send the metrics of this moment."""
        await refresh_metrics(self._gateway)
        families = list(self._gateway.metrics.registry.collect())
        await asyncio.to_thread(self._exporter.send, families, self._gateway.wall())
