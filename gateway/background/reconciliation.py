"""Records the token counts of engine and metrics beside the ledger, and checks that they agree.

It records when an engine epoch begins, every minute, at shutdown, and while the ledger is not well:
a gateway that gets no requests, since it is not ready, learns by that write that the ledger is well
again. The counts are stored by engine epoch; `trunkline reconcile` compares them. An unexplained
difference is logged as `ledger_mismatch`. It bills nothing. `gateway.app` runs it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from engine.api import Clock, EngineInfo
from engine.client.client import Engine
from engine.errors import EngineError
from engine.statistics import Stats
from gateway.context import Log
from gateway.engines.served_models import ServedModels
from gateway.ledger.interface import LedgerClient
from gateway.observability.metrics import Metrics
from gateway.periodic_task import PeriodicTask
from tenancy.accounting.reconcile import Counts, reconcile_living
from tenancy.errors import LedgerUnavailable, StoreError
from tenancy.ledger.epochs import ledger_epoch
from tenancy.ledger.transactions import EngineTotals
from tenancy.storage.interface import Store
from tenancy.types import WallClock

NOTE_INTERVAL_S = 60.0
"""Interval of records."""
POLL_INTERVAL_S = 0.5
"""Interval of checks for a new engine epoch; one that ends before its first record would be
missed."""

STATS_TIMEOUT_S = 5.0
"""Most time for the engine to return its counts."""


class Reconciler:
    """Records and checks the counts of one gateway."""

    def __init__(
        self,
        models: ServedModels,
        ledger: LedgerClient,
        store: Store,
        metrics: Metrics,
        clock: Clock,
        wall: WallClock,
        log: Log,
    ) -> None:
        self._models, self._ledger, self._store = models, ledger, store
        self._metrics, self._clock, self._wall = metrics, clock, wall
        self._log = log
        self._known_epochs, self._noted_s = set[str](), self._clock()
        self._task = PeriodicTask(
            "reconciliation", self._watch, POLL_INTERVAL_S, self._log, self._clock
        )

    def start(self) -> None:
        """Start the task on the running event loop."""
        self._task.start()

    async def close(self) -> None:
        """Stop the task, after a last record if the engine still answers. Safe to call twice."""
        await self._task.close()
        await self.note(is_last=True)

    async def note(self, *, is_last: bool = False) -> None:
        """Record the counts of each model's engine now. Without an engine it does nothing; after a
        failed write, the next record has these counts too."""
        for model in self._models:
            await self._note(model.engine, is_last=is_last)

    async def _note(self, engine: Engine, *, is_last: bool) -> None:
        info = engine.info
        if info is None or (not engine.ready() and not is_last):
            return
        # Each request in the engine's counts then has its hold or its entry in the ledger.
        with self._ledger.holds_first():
            at_ms = self._wall()
            try:
                async with asyncio.timeout(STATS_TIMEOUT_S):
                    stats = await engine.get_stats()
            except (EngineError, TimeoutError):
                return
            totals = self._totals(info.epoch, stats, at_ms, is_last=is_last)
            with suppress(LedgerUnavailable):
                await self._ledger.write(totals)

    def _totals(self, epoch: str, stats: Stats, at_ms: int, *, is_last: bool) -> EngineTotals:
        metrics = self._metrics
        prompt, cached, output = metrics.epoch_tokens(epoch)
        # Tokens after a stop are not charged, whether the engine or the gateway found the stop.
        unneeded = stats.unneeded_tokens_total + metrics.epoch_unneeded_tokens(epoch)
        return EngineTotals(
            epoch=epoch,
            at_ms=at_ms,
            prompt_tokens=stats.prompt_tokens_total,
            cached_tokens=stats.cached_tokens_total,
            output_tokens=stats.output_tokens_total - unneeded,
            metric_prompt_tokens=prompt,
            metric_cached_tokens=cached,
            metric_output_tokens=output,
            is_ended=is_last,
        )

    async def check(self) -> bool:
        """Return whether the counts of each engine's epoch agree, as far as they can be compared
        now."""
        agree = [await self._check(model.engine.info) for model in self._models]
        return all(agree)

    async def _check(self, info: EngineInfo | None) -> bool:
        epoch = None
        try:
            if info is not None:
                epoch = await asyncio.to_thread(reconcile_living, self._store, info.epoch)
            life = await asyncio.to_thread(ledger_epoch, self._store)
        except StoreError:
            return True  # other tasks report an unreadable store
        self._metrics.ledger_epoch.set(life.number)
        if epoch is None or not epoch.has_mismatch:
            return True
        facts = {"epoch": epoch.epoch, "state": epoch.state}
        for name in ("ledger", "engine", "metrics"):
            counts: Counts = getattr(epoch, name)
            for field in Counts.__struct_fields__:
                facts[f"{name}_{field}"] = getattr(counts, field)
        self._log("ledger_mismatch", dict(facts))
        return False

    async def _watch(self) -> None:
        """Record the counts if they are due, and compare them."""
        clock, epochs = self._clock, self._models.epochs()
        if not epochs <= self._known_epochs:
            self._known_epochs = epochs
            await self.note()
        elif not self._ledger.is_well:
            await self.note()
        if clock() - self._noted_s >= NOTE_INTERVAL_S:
            self._noted_s = clock()
            await self.note()
            await self.check()
