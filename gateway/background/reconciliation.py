"""Records the token counts of engine and metrics beside the ledger, and checks that they agree.

It records when an engine epoch begins, every minute, at shutdown, and while the ledger is not well:
a gateway that gets no requests, since it is not ready, learns by that write that the ledger is well
again. The counts are stored by engine epoch; `trunkline reconcile` compares them. An unexplained
difference is logged as `ledger_mismatch`. Gateways that died are settled by what their engines have
counted for them. It bills nothing. `gateway.app` runs it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from engine.api import Clock, DepartedGateway, EngineInfo
from engine.errors import EngineError
from engine.statistics import Stats
from gateway.context import Log
from gateway.engines.replica import Replica
from gateway.engines.served_models import ServedModels
from gateway.ledger.interface import LedgerClient
from gateway.observability.metrics import Metrics
from gateway.periodic_task import PeriodicTask
from gateway.shared.gateway_id import gateway_of
from tenancy.accounting.reconcile import Counts, reconcile_living
from tenancy.errors import LedgerUnavailable, StoreError
from tenancy.ledger.engine_counts import CountedRequest, EngineTotals, GatewayDeath, is_settled
from tenancy.ledger.epochs import ledger_epoch
from tenancy.storage.interface import Store
from tenancy.types import WallClock

NOTE_INTERVAL_S = 60.0
"""Interval of records."""
POLL_INTERVAL_S = 0.5
"""Interval of checks for a new engine epoch; one that ends before its first record would be
missed."""

SETTLE_INTERVAL_S = 5.0
"""Interval of looks for gateways that died."""
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
        start: str = "/",
    ) -> None:
        """`start`: names this start of the gateway, as `gateway.shared.gateway_id` does: its
        metrics count from zero."""
        self._gateway = start
        self._deaths = GatewayDeaths(models, ledger, store, wall, log, start)
        self._models, self._ledger, self._store = models, ledger, store
        self._metrics, self._clock, self._wall = metrics, clock, wall
        self._log = log
        self._known_epochs, self._noted_s = set[str](), self._clock()
        self._settled_s = self._clock()
        self._doubted = set[str]()
        """Epochs of several gateways that differed at the last check."""
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
        replicas = [replica for model in self._models for replica in model.replicas]
        await asyncio.gather(*(self._note(replica, is_last=is_last) for replica in replicas))

    async def _note(self, replica: Replica, *, is_last: bool) -> None:
        info = replica.info
        if info is None or (not replica.ready() and not is_last):
            return
        # Each request in the engine's counts then has its hold or its entry in the ledger.
        with self._ledger.holds_first():
            at_ms = self._wall()
            try:
                async with asyncio.timeout(STATS_TIMEOUT_S):
                    stats = await replica.running().get_stats()
            except (EngineError, TimeoutError):
                return
            if replica.has_foreign_hold:
                return
            totals = self._totals(info.epoch, stats, at_ms, is_last=is_last)
            with suppress(LedgerUnavailable):
                await self._ledger.write(totals)

    def _totals(self, epoch: str, stats: Stats, at_ms: int, *, is_last: bool) -> EngineTotals:
        """Return what an engine has counted, and what this gateway has under its epoch."""
        prompt, cached, output = self._metrics.epoch_tokens(epoch)
        # Tokens after a stop are not charged, whether the engine or the gateway found the stop.
        unneeded = stats.unneeded_tokens_total + stats.abandoned_output_tokens_total
        return EngineTotals(
            epoch=epoch,
            at_ms=at_ms,
            prompt_tokens=stats.prompt_tokens_total,
            cached_tokens=stats.cached_tokens_total,
            output_tokens=stats.output_tokens_total,
            metric_prompt_tokens=prompt,
            metric_cached_tokens=cached,
            metric_output_tokens=output,
            is_ended=is_last,
            gateway=self._gateway,
            uncharged_prompt_tokens=stats.abandoned_prompt_tokens_total,
            uncharged_cached_tokens=stats.abandoned_cached_tokens_total,
            uncharged_output_tokens=unneeded,
        )

    async def check(self) -> bool:
        """Return whether the counts of each engine's epoch agree, as far as they can be compared
        now."""
        replicas = [replica for model in self._models for replica in model.replicas]
        agree = [await self._check(replica.info) for replica in replicas]
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
        if epoch is None:
            return True
        was_doubted = epoch.epoch in self._doubted
        self._doubted.discard(epoch.epoch)
        if not epoch.has_mismatch:
            return True
        if not self._store.is_local and not was_doubted:
            self._doubted.add(epoch.epoch)
            return True  # another gateway may have come or died just now: the next check knows
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
        if clock() - self._settled_s >= SETTLE_INTERVAL_S:
            self._settled_s = clock()
            await self._deaths.settle()
        if clock() - self._noted_s >= NOTE_INTERVAL_S:
            self._noted_s = clock()
            await self.note()
            await self.check()


class GatewayDeaths:
    """The deaths of other starts of gateways, as the engines of this one know them."""

    def __init__(
        self,
        models: ServedModels,
        ledger: LedgerClient,
        store: Store,
        wall: WallClock,
        log: Log,
        start: str,
    ) -> None:
        """`start`: names this start of this gateway."""
        self._models, self._ledger, self._store = models, ledger, store
        self._wall, self._log, self._start = wall, log, start
        self._settled: dict[str, list[str]] = {}
        """By epoch: the starts that the engine need not tell again."""
        self._written: set[tuple[str, str]] = set()

    async def settle(self) -> None:
        """Settle what can be settled now; what cannot, because a hold is open or the database is
        away, is settled by a later call."""
        replicas = [one for model in self._models for one in model.replicas if one.ready()]
        for replica in replicas:
            with suppress(EngineError, StoreError, LedgerUnavailable):
                await self._settle(replica)
        known = {one.info.epoch for one in replicas if one.info is not None}
        self._settled = {epoch: self._settled.get(epoch, []) for epoch in known}
        self._written = {one for one in self._written if one[0] in known}

    async def _settle(self, replica: Replica) -> None:
        engine = replica.running()
        assert engine.info is not None
        epoch = engine.info.epoch
        departed = await engine.get_departed(self._settled.get(epoch, []))
        self._settled[epoch] = settled = list[str]()
        for gateway in departed.gateways:
            which = epoch, gateway.start
            if await asyncio.to_thread(is_settled, self._store, *which):
                settled.append(gateway.start)
                if which in self._written:
                    self._written.discard(which)
                    self._log("gateway_settled", {"epoch": epoch, "gateway": gateway.start})
            elif await self._is_dead(gateway.start):
                await self._ledger.write(self._death(epoch, gateway))
                self._written.add(which)

    async def _is_dead(self, start: str) -> bool:
        gateway = gateway_of(start)
        if gateway == gateway_of(self._start):
            return start != self._start
        return not await asyncio.to_thread(self._store.is_gateway_held, gateway)

    def _death(self, epoch: str, gateway: DepartedGateway) -> GatewayDeath:
        return GatewayDeath(
            epoch,
            gateway.start,
            self._wall(),
            (gateway.prompt_tokens, gateway.cached_tokens, gateway.output_tokens),
            tuple(
                CountedRequest(
                    one.request_id, (one.prompt_tokens, one.cached_tokens, one.output_tokens)
                )
                for one in gateway.ended
            ),
        )
