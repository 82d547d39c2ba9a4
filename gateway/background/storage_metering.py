"""Storage metering: token-seconds that each tenant holds in the cache, and periodic upkeep.

A block belongs to one namespace and a namespace to one tenant, however many sequences share the
block: it is counted once, and the tenants' sum is the number of blocks in use. The engine reports
changes; each state holds until the next change. Every minute the readings go to the ledger, and
unreadable contents (removed shared scopes, expired cached contents) are erased. `gateway.app` runs
it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress

from msgspec import to_builtins

from engine.client.namespace_stats import Change, NamespaceTable
from engine.errors import EngineError
from gateway.background.budget_alerts import BudgetAlerts
from gateway.background.erasure import CacheErasure
from gateway.background.quota_updates import QuotaUpdates
from gateway.caching.namespaces import owner_of
from gateway.context import Context
from gateway.periodic_task import PeriodicTask
from gateway.retention_classes import BEST_EFFORT
from tenancy.accounts.cached_contents import sweep_cached_contents
from tenancy.accounts.tenants import list_tenants
from tenancy.errors import LedgerUnavailable, StoreError
from tenancy.ledger.idempotency import sweep
from tenancy.ledger.transactions import StorageReading, StorageReadings, forget_meters
from tenancy.responses.conversations import sweep_conversations
from tenancy.responses.stored_responses import sweep_stored
from tenancy.storage.audit_log import delete_old_changes
from tenancy.types import DAY_MS

POLL_INTERVAL_S = 0.5
"""Interval of meter and quota updates."""
CHURN_INTERVAL_S = 5.0
"""Interval of churn updates; changes of an engine that dies in between are lost."""

WRITE_INTERVAL_S = 60.0
"""Interval of writes to the ledger and of upkeep."""
READINGS_AT_ONCE = 128
"""Readings in one write: requests wait for its commit."""
NS_PER_S = 1_000_000_000

Key = tuple[int, str]
"""A tenant's id, and the retention class that promises a block for longest, or `best_effort`."""


class StorageMeter:
    """Sums whole token-seconds by tenant and class; remainders are carried over. Pure."""

    def __init__(self) -> None:
        self._table: NamespaceTable | None = None
        self._now_ns: int | None = None
        self._held: dict[Key, int] = {}
        self._since_ns: dict[Key, int] = {}
        self._token_ns: dict[Key, int] = defaultdict(int)

    def update(self, table: NamespaceTable | None, block_size: int, now_ns: int) -> None:
        """Apply the engine's changes as of `now_ns`. O(changed namespaces).

        `table`: the engine's namespaces, or None without an engine. A new table replaces all of the
        old one's holdings.
        """
        if self._now_ns is None or now_ns > self._now_ns:
            self._now_ns = now_ns
        if table is not self._table:
            self._table = table
            self._move({key: -tokens for key, tokens in self._held.items()})
        if table is not None:
            self._move(token_changes(table.take_changes(self), block_size))

    def take(self) -> dict[Key, int]:
        """Return the whole token-seconds between the previous `take` and the last update."""
        for key in self._held:
            self._settle(key)
        found = {}
        for key, token_ns in list(self._token_ns.items()):
            whole, rest = divmod(token_ns, NS_PER_S)
            if whole:
                found[key] = whole
            if rest:
                self._token_ns[key] = rest
            else:
                del self._token_ns[key]
        return found

    def _move(self, changes: dict[Key, int]) -> None:
        for key, tokens in changes.items():
            self._settle(key)
            tokens += self._held.get(key, 0)
            if tokens:
                self._held[key] = tokens
            else:
                del self._held[key], self._since_ns[key]

    def _settle(self, key: Key) -> None:
        """Add the time since the key's last change to its token-seconds."""
        assert self._now_ns is not None, "nothing is held before the first update"
        since_ns = self._since_ns.get(key, self._now_ns)
        if since_ns < self._now_ns and key in self._held:
            self._token_ns[key] += self._held[key] * (self._now_ns - since_ns)
        self._since_ns[key] = self._now_ns


def token_changes(changes: Iterable[Change], block_size: int) -> dict[Key, int]:
    """Return the change in held tokens by tenant and class, without zeros.

    A promised block counts once, on the device or on a level below.
    """
    found: dict[Key, int] = defaultdict(int)
    for before, after in changes:
        for one, sign in ((before, -block_size), (after, block_size)):
            if one is None or (owner := owner_of(one.namespace)) is None:
                continue
            found[owner, BEST_EFFORT] += sign * one.unpromised_blocks
            for name, blocks in one.promised_by_class.items():
                found[owner, name] += sign * blocks
    return {key: tokens for key, tokens in found.items() if tokens}


class StorageMetering:
    """The task that feeds the meter, writes its readings and runs the periodic upkeep."""

    def __init__(self, gateway: Context, erasure: CacheErasure) -> None:
        self._gateway = gateway
        self._erasure = erasure
        self._meters = {model.name: StorageMeter() for model in gateway.models}
        self._name, self._number = secrets.token_hex(8), 0
        self._unwritten: deque[StorageReadings] = deque()
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
        self._update_meter()
        await self._write()
        await self.clear_expired()

    async def _meter_storage(self) -> None:
        """Feed the meter, and do what is due of the upkeep."""
        clock = self._gateway.clock
        self._update_meter()
        self._quotas.send_changes()
        with suppress(StoreError):  # the next poll tries again
            await self._quotas.record_floors_max()
        if clock() - self._churn_s >= CHURN_INTERVAL_S:
            self._churn_s = clock()
            self._gateway.usage.update_churn()
        if clock() - self._written_s >= WRITE_INTERVAL_S:
            self._written_s = clock()
            await self._write()
            with suppress(EngineError, StoreError):  # tried again in a minute
                await self._erasure.erase_removed()
                await self._erasure.retry_pending()
            await self.clear_expired()
            self._quotas.resend_recent()
            await self._budget_alerts.check()

    def _update_meter(self) -> None:
        now_ns = int(self._gateway.clock() * NS_PER_S)
        self._gateway.usage.update_tenants()
        for model in self._gateway.models:
            info, meter = model.engine.info, self._meters[model.name]
            if info is None:
                meter.update(None, 0, now_ns)
            else:
                meter.update(model.engine.namespaces, info.block_size, now_ns)

    async def _write(self) -> None:
        """Write the readings in order; those that could not be written are written again first, as
        they were."""
        if await self._write_taken():
            await self._take_readings()
            await self._write_taken()

    async def _write_taken(self) -> bool:
        """Write the readings that were taken. Returns whether none is left."""
        while self._unwritten:
            try:
                await self._gateway.ledger.write(self._unwritten[0])
            except LedgerUnavailable as error:
                if error.code != "impossible_entry":
                    return False
                self._gateway.log("storage_readings_refused", to_builtins(self._unwritten[0]))
            self._unwritten.popleft()
        return True

    async def _take_readings(self) -> None:
        """Take the readings since the last time, at most `READINGS_AT_ONCE` to a write."""
        try:
            tenants = await asyncio.to_thread(list_tenants, self._gateway.store)
        except StoreError:
            return
        tiers = {tenant.tenant_id: tenant.tier for tenant in tenants}
        readings = [
            StorageReading(tenant_id, name, seconds, model, tiers[tenant_id])
            for model, meter in self._meters.items()
            for (tenant_id, name), seconds in meter.take().items()
            if tenant_id in tiers
        ]
        at_ms = self._gateway.wall()
        for first in range(0, len(readings), READINGS_AT_ONCE):
            self._number += 1
            some = tuple(readings[first : first + READINGS_AT_ONCE])
            self._unwritten.append(StorageReadings(self._name, self._number, at_ms, some))

    async def clear_expired(self) -> None:
        """Delete expired cached contents, stored responses and conversations, which no client may
        read, and old records of the audit log."""
        store, now_ms = self._gateway.store, self._gateway.wall()
        with suppress(StoreError):  # tried again in a minute
            await asyncio.to_thread(forget_meters, store, now_ms - DAY_MS)
            await asyncio.to_thread(store.make_room)
            await asyncio.to_thread(sweep_cached_contents, store, now_ms)
            kept_ms = self._gateway.config.admin.audit_days * DAY_MS
            await asyncio.to_thread(delete_old_changes, store, now_ms - kept_ms)
            for expired in (sweep, sweep_stored, sweep_conversations):
                while await asyncio.to_thread(expired, store, now_ms):
                    pass
            await asyncio.to_thread(store.keep_room)
