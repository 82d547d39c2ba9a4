"""Erasures that an engine elsewhere has missed: carried out before it takes requests again.

An engine can be away, or not be in the directory, while a cache is erased, and come back with what
it has kept on the device, in host memory or on a disk. So each engine elsewhere that comes is held
back first. Its erasures are read from the receipts: those that wait for it, and all since it was
last known to have carried out all (`tenancy.accounts.erasure_receipts`). Both are in the database,
and outlive this gateway. A receipt that waits for an engine which this gateway can reach, because
another gateway could not, is carried out within a minute.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from msgspec import Struct

from engine.api import Clock
from engine.client.client import Engine
from engine.errors import EngineError
from gateway.background.erasure import (
    CALLS_IN_FLIGHT_MAX,
    CacheErasure,
    ErasureTarget,
    levels_of,
    target_of,
)
from gateway.context import Log
from gateway.engines.replica import Replica
from gateway.engines.served_models import ServedModels
from gateway.levels.report import is_disk_away
from gateway.observability.level_metrics import LevelMetrics
from gateway.periodic_task import PeriodicTask
from tenancy.accounts.erasure_receipts import (
    ErasedLevel,
    MissedErasure,
    add_levels,
    confirm_replica,
    forget_replica,
    list_missed,
    list_uncompleted,
    note_erased_until,
)
from tenancy.errors import StoreError
from tenancy.storage.audit_log import Actor
from tenancy.storage.interface import Store
from tenancy.types import WallClock

ROUND_S: Final = 60.0
RETRY_S: Final = 1.0
FIRST_S: Final = 10.0
"""Longest wait for the engines that are there when the gateway opens, in seconds."""
SINGLE_MAX: Final = 100
"""Missed erasures of a tenant that are carried out one by one; of more, all that it has goes. The
oldest receipts of a tenant are dropped, but never before there are so many newer ones."""
REASON: Final = "It erases what was erased while it was away."
DISK_AWAY: Final = "Its disk is away, and may have what was erased while the engine was away."


class _Due(Struct):
    """An erasure to carry out at an engine, and the receipts that wait for it there."""

    target: ErasureTarget
    receipts: list[str]


class MissedErasures:
    """Has engines elsewhere carry out what they have missed. Belongs to one event loop."""

    def __init__(
        self,
        models: ServedModels,
        store: Store,
        erasure: CacheErasure,
        metrics: LevelMetrics,
        clock: Clock,
        wall: WallClock,
        log: Log,
    ) -> None:
        """`erasure`: of this gateway, whose erasures under way count too. `metrics`: have the
        number of pending receipts."""
        self._models, self._store, self._erasure = models, store, erasure
        self._metrics, self._wall, self._log = metrics, wall, log
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._rounds = PeriodicTask("missed_erasures", self.look, ROUND_S, log, clock)
        erasure.on_pending = self._hold_back_named

    async def open(self) -> None:
        """Hold back each engine elsewhere that comes from now on, and those that are there; wait
        for these, but not long. Before the gateway takes requests."""
        for model in self._models:
            model.replicas.gate = self._hold_back
            for replica in model.replicas:
                if replica.is_elsewhere and replica.engine is not None:
                    self._hold_back(replica)
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=FIRST_S)

    def start(self) -> None:
        """Look each minute, on the running event loop."""
        self._rounds.start()

    async def close(self) -> None:
        """Stop. What is not carried out stays due."""
        await self._rounds.close()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def look(self) -> None:
        """Carry out what waits for engines that are there, and note how far all others are. Raises
        StoreError."""
        now, store = self._wall(), self._store
        ready = [one for one in self._elsewhere() if one.ready()]
        found = await asyncio.to_thread(list_uncompleted, store)
        named = {name for receipt in found for name in receipt.pending_at}
        done = [one.name for one in ready if one.ready() and one.name not in named]
        if done:
            await asyncio.to_thread(note_erased_until, store, done, now)
        self._hold_back_named(named)
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=ROUND_S)

    async def forget(self, name: str, by: Actor) -> int:
        """Have no receipt wait for an engine elsewhere that is away for good; return how many did.
        Raises ValueError if it is there, and StoreError."""
        if any(one.name == name and one.engine is not None for one in self._elsewhere()):
            raise ValueError(f"engine {name} is connected")
        found, completed = await asyncio.to_thread(forget_replica, self._store, name, by)
        self._metrics.pending_receipts -= completed
        self._log("engine_forgotten", {"replica": name, "receipts": found})
        return found

    # -- internals ----------------------------------------------------------------------------

    def _elsewhere(self) -> Iterator[Replica]:
        for model in self._models:
            yield from (one for one in model.replicas if one.is_elsewhere and one.name)

    def _hold_back_named(self, names: Collection[str]) -> None:
        for one in self._elsewhere():
            if one.name in names and one.engine is not None:
                self._hold_back(one)

    def _hold_back(self, replica: Replica) -> None:
        """Have a replica whose engine is there take no requests until it has missed nothing."""
        replica.hold_back(REASON)
        if (before := self._tasks.get(replica)) is not None:
            before.cancel()
        task = self._tasks[replica] = asyncio.create_task(self._catch_up(replica, before))
        task.add_done_callback(lambda _: self._forget(replica, task))

    def _forget(self, replica: Replica, task: asyncio.Task[None]) -> None:
        if self._tasks.get(replica) is task:
            del self._tasks[replica]

    async def _catch_up(self, replica: Replica, before: asyncio.Task[None] | None) -> None:
        if before is not None:  # a thread of it may still write
            await asyncio.wait([before])
        engine = replica.engine
        while engine is not None and replica.engine is engine:
            try:
                reason = await self._carry_out(replica.name, engine)
            except (EngineError, StoreError) as error:
                reason = f"{REASON} It is tried again: {error}"
            if replica.engine is engine and not reason:
                replica.admit()
                return
            replica.reason = reason
            await asyncio.sleep(RETRY_S)

    async def _carry_out(self, name: str, engine: Engine) -> str:
        """Carry out what an engine has missed. Returns why that cannot be done now, or "". Raises
        EngineError and StoreError."""
        now, store = self._wall(), self._store
        missed = await asyncio.to_thread(list_missed, store, name)
        due = [*_merge(missed), *(_Due(target, []) for target in self._erasure.under_way)]
        if due:
            stats = await engine.get_stats()
            if is_disk_away(stats):
                return DISK_AWAY
        blocks = 0
        for one in due:
            levels = await self._erase_at(engine, one.target)
            blocks += levels["device"].blocks
            for receipt_id in one.receipts:
                # What was found counts once, in the oldest of the receipts.
                completed = await asyncio.to_thread(
                    confirm_replica, store, receipt_id, name, levels, self._wall()
                )
                levels = {}
                self._metrics.pending_receipts -= completed
                self._log("erasure_confirmed", {"receipt": receipt_id, "replica": name})
        await asyncio.to_thread(note_erased_until, store, [name], now)
        if due:
            facts = {"replica": name, "erasures": len(due), "blocks": blocks}
            self._log("missed_erasures_carried_out", facts)
        return ""

    async def _erase_at(self, engine: Engine, target: ErasureTarget) -> dict[str, ErasedLevel]:
        """Erase a target in one engine; return what each level lost. Raises EngineError."""
        size = 0 if engine.info is None else engine.info.kv_bytes_per_block
        names = [one.namespace for one in engine.namespaces if target.covers(one.namespace)]
        sums = {"device": ErasedLevel(0, 0)}
        for start in range(0, len(names), CALLS_IN_FLIGHT_MAX):
            batch = names[start : start + CALLS_IN_FLIGHT_MAX]
            calls = (engine.erase(one, lease_id=target.lease_id) for one in batch)
            for erased in await asyncio.gather(*calls):
                sums = add_levels(sums, levels_of(erased, size))
        return sums


def _merge(missed: Sequence[MissedErasure]) -> list[_Due]:
    """Return what is to be erased, each target once, oldest first; all of a tenant's cache where it
    has more than `SINGLE_MAX` missed erasures."""
    counts = Counter(one.tenant_id for one in missed)
    found: dict[tuple[int, str], _Due] = {}
    for one in missed:
        what = "all" if counts[one.tenant_id] > SINGLE_MAX else one.what
        due = found.setdefault((one.tenant_id, what), _Due(target_of(what, one.tenant_id), []))
        if one.receipt_id is not None:
            due.receipts.append(one.receipt_id)
    return list(found.values())
