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
from gateway.context import Context
from tenancy.accounts.tenants import TenantRecord, floor_blocks_of, write_floor_blocks_max


class QuotaUpdates:
    """Sends the quotas of changed tenants to the engine."""

    def __init__(self, gateway: Context) -> None:
        self._gateway = gateway
        self._recent: dict[int, TenantRecord] = {}
        self._cut: tuple[int, int] | None = None
        self._recorded_epoch = ""

    def send_changes(self) -> None:
        """Send the quotas changed since the last call. Without changes, it costs one look at the
        registry."""
        changed = {one.tenant.tenant_id: one for one in self._gateway.registry.take_changed()}
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
        """Store the pool's limit for floors, for commands that run without an engine.

        Raises StoreError; the next call then tries again.
        """
        info = self._gateway.engine.info
        if info is not None and info.epoch != self._recorded_epoch:
            await asyncio.to_thread(
                write_floor_blocks_max, self._gateway.store, info.floor_blocks_max
            )
            self._recorded_epoch = info.epoch

    def _log_floor_cut(self) -> None:
        """Log when floors exceed the pool, and when they fit again.

        A floor may be set where no engine's limit is known: on the command line, or in the file.
        """
        info, requested = self._gateway.engine.info, self._gateway.registry.floor_blocks()
        if info is None:
            return
        cut = (requested, info.floor_blocks_max) if requested > info.floor_blocks_max else None
        if cut != self._cut:
            facts: dict[str, object] = {
                "asked_blocks": requested,
                "floor_blocks_max": info.floor_blocks_max,
            }
            self._gateway.log("floors_satisfied" if cut is None else "floors_cut", facts)
            self._cut = cut

    def _send(self, tenants: dict[int, TenantRecord]) -> None:
        with suppress(EngineError):  # `resend_recent` or the next request delivers it
            default = self._gateway.promised_blocks_default()
            quotas = [_current_quota(one, default) for one in tenants.values()]
            self._gateway.engine.set_quotas(quotas)


def _current_quota(one: TenantRecord, promised_default: int | None) -> Quota:
    """Return a tenant's quota. A suspended tenant has no floor; its blocks stay until they are
    evicted."""
    policy = structs.replace(one.policy, floor_blocks=floor_blocks_of(one))
    return quota_of(policy, str(one.tenant.tenant_id).encode(), promised_default)
