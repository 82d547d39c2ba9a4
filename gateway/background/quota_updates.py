"""Updates of tenants' block quotas in the engine, and a warning if floors exceed the pool.

A request carries its payer's quota. That is too late for a payer that sends no more requests: a
lowered floor, or the floor of a suspended tenant, would reserve its blocks until the engine ends.
This module knows no HTTP; `StorageMetering` calls it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from msgspec import structs

from engine.api import Quota
from engine.errors import EngineError
from gateway.caching.namespaces import quota_of
from gateway.context import Log
from gateway.engines.cache_usage import CacheUsage
from gateway.engines.served_models import ServedModels
from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.accounts.tenants import TenantRecord, floor_blocks_of, write_floor_blocks_max
from tenancy.storage.interface import Store


class QuotaUpdates:
    """Sends the quotas of changed tenants to the engine of each model."""

    def __init__(
        self,
        models: ServedModels,
        usage: CacheUsage,
        authenticator: KeyAuthenticator,
        store: Store,
        log: Log,
    ) -> None:
        self._models, self._usage, self._authenticator = models, usage, authenticator
        self._store, self._log = store, log
        self._recent: dict[int, TenantRecord] = {}
        self._cuts: dict[str, tuple[int, int]] = {}
        """Models with a pool that the floors exceed: the blocks they ask for, and may take."""
        self._recorded: set[str] = set()

    def send_changes(self) -> None:
        """Send the quotas changed since the last call. Without changes, it costs one look at the
        registry."""
        changed = {one.tenant.tenant_id: one for one in self._authenticator.take_changed()}
        self._recent |= changed
        self._send(changed)
        self._log_floor_cut()

    def resend_recent(self) -> None:
        """Send recent changes once more, then drop them.

        A request in flight during a change carries the old quota to the engine after the new one.
        """
        recent, self._recent = self._recent, {}
        self._send(recent)

    async def record_floors_max(self) -> None:
        """Store the pools' limit for floors, for commands that run without an engine.

        Raises StoreError; the next call then tries again.
        """
        models = self._models
        epochs, most = models.epochs(), models.floor_blocks_max()
        if most is not None and epochs != self._recorded:
            await asyncio.to_thread(write_floor_blocks_max, self._store, most)
            self._recorded = epochs

    def _log_floor_cut(self) -> None:
        """Log when floors exceed the pool, and when they fit again.

        A floor may be set where no engine's limit is known: on the command line, or in the file.
        """
        models, floors = self._models, self._authenticator.floor_blocks()
        for model in models:
            info = model.replicas.info
            if info is None:
                continue
            asked, most = int(floors * model.quota_scale), info.floor_blocks_max
            cut = (asked, most) if asked > most else None
            if cut != self._cuts.get(model.name):
                facts: dict[str, object] = {"asked_blocks": asked, "floor_blocks_max": most}
                if models.are_several:
                    facts["model"] = model.name
                self._log("floors_satisfied" if cut is None else "floors_cut", facts)
                self._cuts.pop(model.name, None)
                if cut is not None:
                    self._cuts[model.name] = cut

    def _send(self, tenants: dict[int, TenantRecord]) -> None:
        for model in self._models:
            info = model.replicas.info
            quotas = []
            for one in tenants.values():
                default = on_device = None
                if info is not None:
                    tenant_id = one.tenant.tenant_id
                    default = self._usage.promised_blocks_default(info, model.name, tenant_id)
                    on_device = self._usage.on_device_default(info, model.name, tenant_id)
                quotas.append(_current_quota(one, default, model.quota_scale, on_device))
            with suppress(EngineError):  # `resend_recent` or the next request delivers it
                model.replicas.set_quotas(quotas)


def _current_quota(
    one: TenantRecord, promised_default: int | None, scale: float, on_device: int | None
) -> Quota:
    """Return a tenant's quota. A suspended tenant has no floor; its blocks stay until they are
    evicted. `scale`: the factor of the model's pool."""
    policy = structs.replace(one.policy, floor_blocks=floor_blocks_of(one))
    payer = str(one.tenant.tenant_id).encode()
    return quota_of(policy, payer, promised_default, scale, on_device)
