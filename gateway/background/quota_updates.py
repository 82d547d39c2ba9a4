"""What operators change of a tenant's blocks, told to the engine when it changes; and to the log,
where floors ask for more than the engine can keep.

A request carries its payer's quota with it. That is too late for a payer that sends no more: a
floor that was lowered, or is a suspended tenant's, would keep its room from everybody else until
the engine ends. Knows no HTTP; `storage_meter` lets it look.
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
    """Tells the engine of tenants that have changed."""

    def __init__(self, gateway: Context) -> None:
        self._gateway = gateway
        self._told: dict[int, TenantRecord] = {}
        self._cut: tuple[int, int] | None = None
        self._noted = ""

    def tell(self) -> None:
        """Those that have changed since the last call. Where nothing has, one look at the
        registry."""
        changed = {one.tenant.tenant_id: one for one in self._gateway.registry.take_changed()}
        self._told |= changed
        self._send(changed)
        self._say_what_is_cut()

    def tell_again(self) -> None:
        """Those of late once more, and then no more: a request that was on its way when its
        tenant changed has brought the old quota with it."""
        told, self._told = self._told, {}
        self._send(told)

    async def note_pool(self) -> None:
        """For those who list tenants without an engine. Raises StoreError: then again."""
        info = self._gateway.engine.info
        if info is not None and info.epoch != self._noted:
            await asyncio.to_thread(
                write_floor_blocks_max, self._gateway.store, info.floor_blocks_max
            )
            self._noted = info.epoch

    def _say_what_is_cut(self) -> None:
        """Whoever wrote more than the pool can keep may have done it where nobody could say so."""
        info, asked = self._gateway.engine.info, self._gateway.registry.floor_blocks()
        if info is None:
            return
        cut = (asked, info.floor_blocks_max) if asked > info.floor_blocks_max else None
        if cut != self._cut:
            facts: dict[str, object] = {
                "asked_blocks": asked,
                "floor_blocks_max": info.floor_blocks_max,
            }
            self._gateway.log("floors_fit" if cut is None else "floors_cut", facts)
            self._cut = cut

    def _send(self, tenants: dict[int, TenantRecord]) -> None:
        with suppress(EngineError):  # told again, and by the next request
            self._gateway.engine.set_quotas([_present(one) for one in tenants.values()])


def _present(one: TenantRecord) -> Quota:
    """Nothing is guaranteed to a suspended tenant; what it holds stays while there is room."""
    policy = structs.replace(one.policy, floor_blocks=floor_blocks_of(one))
    return quota_of(policy, str(one.tenant.tenant_id).encode())
