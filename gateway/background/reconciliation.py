"""What the engine and the metrics have counted, beside the ledger: noted when a life of the engine
begins, every minute, and at the end.

The counts are kept by engine life in the database, where `trunkline reconcile` compares them. A
difference that nothing explains is logged as `counts_apart`. It bills nothing; `app` runs it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from engine.api import Stats
from engine.errors import EngineError
from gateway.context import Context
from tenancy.accounting.reconcile import Counts, reconcile_living
from tenancy.errors import LedgerUnavailable, StoreError
from tenancy.ledger.epochs import ledger_epoch
from tenancy.ledger.transactions import EngineTotals

EVERY_S = 60.0
LOOK_EVERY_S = 0.5
"""For a new life of the engine: one that ends before its first note would not be known of."""

PATIENCE_S = 5.0
"""How long the engine may take to say what it has counted."""


class Reconciler:
    """One gateway's notes of what was counted."""

    def __init__(self, gateway: Context) -> None:
        self._gateway = gateway
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin the watch on the running loop."""
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """End the watch with a last note, if the engine still answers. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await self.note(is_last=True)

    async def note(self, *, is_last: bool = False) -> None:
        """Write down what has been counted now. Without an engine there is nothing to write; what
        cannot be written now comes with the next note."""
        gateway = self._gateway
        info = gateway.engine.info
        if info is None or (not gateway.engine.ready() and not is_last):
            return
        # Whatever the engine has counted of has its hold by then, or its entry.
        with gateway.ledger.holds_first():
            at_ms = gateway.wall()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    stats = await gateway.engine.get_stats()
            except (EngineError, TimeoutError):
                return
            totals = self._totals(info.epoch, stats, at_ms, is_last=is_last)
            with suppress(LedgerUnavailable):
                await gateway.ledger.write(totals)

    def _totals(self, epoch: str, stats: Stats, at_ms: int, *, is_last: bool) -> EngineTotals:
        telemetry = self._gateway.telemetry
        prompt, cached, output = telemetry.epoch_tokens(epoch)
        # Behind the end of a text nothing is charged, whoever noticed that it was drawn.
        unneeded = stats.unneeded_tokens_total + telemetry.epoch_unneeded_tokens(epoch)
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
        """Do the counts of our engine's life agree, as far as they can be compared now?"""
        info, epoch = self._gateway.engine.info, None
        try:
            if info is not None:
                epoch = await asyncio.to_thread(reconcile_living, self._gateway.store, info.epoch)
            life = await asyncio.to_thread(ledger_epoch, self._gateway.store)
        except StoreError:
            return True  # it is told elsewhere that the file cannot be read
        self._gateway.telemetry.ledger_epoch.set(life.number)
        if epoch is None or not epoch.has_mismatch:
            return True
        facts = {"epoch": epoch.epoch, "state": epoch.state}
        for name in ("ledger", "engine", "metrics"):
            counts: Counts = getattr(epoch, name)
            for field in Counts.__struct_fields__:
                facts[f"{name}_{field}"] = getattr(counts, field)
        self._gateway.log("counts_apart", dict(facts))
        return False

    async def _watch(self) -> None:
        clock, engine = self._gateway.clock, self._gateway.engine
        known, noted_s = "", clock()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if engine.info is not None and engine.ready() and engine.info.epoch != known:
                known = engine.info.epoch
                await self.note()
            if clock() - noted_s >= EVERY_S:
                noted_s = clock()
                await self.note()
                await self.check()
