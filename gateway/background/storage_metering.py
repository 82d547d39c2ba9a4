"""Storage metering: token-seconds that each tenant holds in the cache, and periodic upkeep.

The engines count (`engine.core.storage_meter`), each from its start on. Every minute the gateway
asks them and writes what they have told; the ledger enters what is new of it, so that several
gateways may write the same. Unreadable contents (removed shared scopes, expired cached contents)
are erased at the same interval. `gateway.app` runs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from msgspec import to_builtins

from engine.api import HeldTokens
from engine.errors import EngineError
from gateway.background.budget_alerts import BudgetAlerts
from gateway.background.erasure import CacheErasure
from gateway.background.quota_updates import QuotaUpdates
from gateway.context import Context
from gateway.engines.replica import Replica
from gateway.periodic_task import PeriodicTask
from gateway.retention_classes import BEST_EFFORT
from tenancy.accounts.cached_contents import sweep_cached_contents
from tenancy.accounts.tenants import list_tenants
from tenancy.errors import LedgerUnavailable, StoreError
from tenancy.ledger.idempotency import sweep
from tenancy.ledger.transactions import StorageReading, StorageReadings, forget_readings
from tenancy.responses.conversations import sweep_conversations
from tenancy.responses.stored_responses import sweep_stored
from tenancy.storage.audit_log import delete_old_changes
from tenancy.types import DAY_MS

POLL_INTERVAL_S = 0.5
"""Interval of quota updates."""
CHURN_INTERVAL_S = 5.0
"""Interval of churn updates; changes of an engine that dies in between are lost."""

WRITE_INTERVAL_S = 60.0
"""Interval of writes to the ledger and of upkeep."""
READINGS_AT_ONCE = 128
"""Readings in one write: requests wait for its commit."""
ANSWER_S_MAX = 5.0
"""Most time for an engine to tell what it holds."""


class StorageMetering:
    """The task that writes what engines hold and runs the periodic upkeep."""

    def __init__(self, gateway: Context, erasure: CacheErasure) -> None:
        self._gateway = gateway
        self._erasure = erasure
        self._tiers: Mapping[int, str] = {}
        self._unwritten: dict[tuple[str, str], Sequence[StorageReadings]] = {}
        """The last readings that the ledger has not got, by model and epoch."""
        self._quotas = QuotaUpdates(
            gateway.models, gateway.usage, gateway.authenticator, gateway.store, gateway.log
        )
        self._budget_alerts = BudgetAlerts(
            gateway.reports, gateway.authenticator, gateway.metrics, gateway.wall, gateway.log
        )
        self._written_s = self._churn_s = gateway.clock()
        self._task = PeriodicTask(
            "storage_metering",
            self._meter_storage,
            POLL_INTERVAL_S,
            gateway.log,
            gateway.clock,
            begins_at_once=True,
        )

    def start(self) -> None:
        """Start the task on the running event loop."""
        self._task.start()

    async def close(self) -> None:
        """Stop the task and write the last readings."""
        await self._task.close()
        self._gateway.usage.update_tenants()  # the last samples have its blocks
        await self.write()
        await self.clear_expired()

    async def _meter_storage(self) -> None:
        """Do what is due of the upkeep."""
        clock = self._gateway.clock
        self._gateway.usage.update_tenants()
        self._quotas.send_changes()
        with suppress(StoreError):  # the next poll tries again
            await self._quotas.record_floors_max()
        if clock() - self._churn_s >= CHURN_INTERVAL_S:
            self._churn_s = clock()
            self._gateway.usage.update_churn()
        if clock() - self._written_s >= WRITE_INTERVAL_S:
            self._written_s = clock()
            await self.write()
            with suppress(EngineError, StoreError):  # tried again in a minute
                await self._erasure.erase_removed()
                await self._erasure.retry_pending()
            await self.clear_expired()
            self._quotas.resend_recent()
            await self._budget_alerts.check()

    async def write(self) -> None:
        """Ask the engines for what they hold, and write it. What an engine has told, and what could
        not be written yet, is kept until it is, or until it tells more."""
        replicas = [(model.name, one) for model in self._gateway.models for one in model.replicas]
        with suppress(StoreError):  # the next minute's readings have this one's
            tenants = await asyncio.to_thread(list_tenants, self._gateway.store)
            self._tiers = {tenant.tenant_id: tenant.tier for tenant in tenants}
        await asyncio.gather(*(self._ask(model, replica) for model, replica in replicas))
        for key, unwritten in list(self._unwritten.items()):
            if await self._write_all(unwritten) and self._unwritten.get(key) is unwritten:
                del self._unwritten[key]

    async def _ask(self, model: str, replica: Replica) -> None:
        """Take what an engine tells; without an answer, nothing."""
        if (info := replica.info) is None:
            return
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                held = await replica.running().get_held()
        except (EngineError, TimeoutError):
            return
        self._unwritten[model, info.epoch] = readings_of(
            info.epoch, self._gateway.wall(), model, held.readings, self._tiers
        )

    async def _write_all(self, unwritten: Sequence[StorageReadings]) -> bool:
        """Write an engine's readings. Returns whether that is done."""
        for readings in unwritten:
            try:
                await self._gateway.ledger.write(readings)
            except LedgerUnavailable as error:
                if error.code != "impossible_entry":
                    return False
                self._gateway.log("storage_readings_refused", to_builtins(readings))
        return True

    async def clear_expired(self) -> None:
        """Delete expired cached contents, stored responses and conversations, which no client may
        read, and old records of the audit log."""
        store, now_ms = self._gateway.store, self._gateway.wall()
        with suppress(StoreError):  # tried again in a minute
            await asyncio.to_thread(forget_readings, store, now_ms)
            await asyncio.to_thread(store.make_room)
            await asyncio.to_thread(sweep_cached_contents, store, now_ms)
            kept_ms = self._gateway.config.admin.audit_days * DAY_MS
            await asyncio.to_thread(delete_old_changes, store, now_ms - kept_ms)
            for expired in (sweep, sweep_stored, sweep_conversations):
                while await asyncio.to_thread(expired, store, now_ms):
                    pass
            await asyncio.to_thread(store.keep_room)


def readings_of(
    epoch: str, at_ms: int, model: str, held: Sequence[HeldTokens], tiers: Mapping[int, str]
) -> list[StorageReadings]:
    """Return what an engine has told as items of at most `READINGS_AT_ONCE`. `tiers`: of the
    tenants; a payer that is none is left out."""
    readings = [
        StorageReading(tenant_id, one.retention or BEST_EFFORT, one.token_seconds, model, tier)
        for one in held
        if one.payer.isdigit() and (tier := tiers.get(tenant_id := int(one.payer))) is not None
    ]
    return [
        StorageReadings(epoch, at_ms, tuple(readings[first : first + READINGS_AT_ONCE]))
        for first in range(0, len(readings), READINGS_AT_ONCE)
    ]
