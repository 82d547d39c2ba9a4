"""What tenants hold and promise in the cache of all served models, counted as the engines tell it.

One gateway has one. Who shows or bounds a tenant's part asks it to update first; it reads only the
changes since the last time.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from engine.api import AT_REST, AtRest, EngineInfo, Quota
from gateway.analytics.block_churn import BlockChurn
from gateway.analytics.tenant_usage import TenantCacheUsage
from gateway.caching.namespaces import owner_of, promised_default, quota_of
from gateway.engines.replica import Replica
from gateway.engines.served_models import ServedModel, ServedModels
from gateway.levels.level_history import LevelHistory
from gateway.retention_classes import CachingConfig
from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.accounts.tenants import floor_blocks_of
from tenancy.types import WallClock


class CacheUsage:
    """The cache usage of one gateway. Belongs to its event loop."""

    def __init__(
        self,
        models: ServedModels,
        settings: CachingConfig,
        wall: WallClock,
        authenticator: KeyAuthenticator,
    ) -> None:
        self._models, self._settings, self._wall = models, settings, wall
        self._authenticator = authenticator
        self.churn = BlockChurn()
        self.level_history = LevelHistory()
        self.tenants = TenantCacheUsage()

    def update_churn(self) -> None:
        """Count inserted and evicted blocks, and moves between levels, since the last call.
        O(namespaces that changed)."""
        now_ms = self._wall()
        self.churn.update(self._models.take_moves(), owner_of, now_ms // 60_000)
        engines = ((f"{model.name}/{one.name}", one.stats) for model, one in self._replicas())
        self.level_history.update(engines, now_ms)

    def _replicas(self) -> Iterator[tuple[ServedModel, Replica]]:
        return ((model, one) for model in self._models for one in model.replicas)

    def update_tenants(self) -> None:
        """Update the sums of what each tenant holds of each model. O(namespaces that changed)."""
        for model in self._models:
            tables = [one.namespaces for one in model.replicas if one.info is not None]
            self.tenants.update(tables, owner_of, model.name)

    def terms_of(self, model: ServedModel, tenant_id: int, writer_id: int) -> tuple[Quota, AtRest]:
        """Return the quota of a tenant's blocks in a model's engines, and where what `writer_id`
        has written there may rest. One that is gone has no quota, and rests nowhere."""
        owner = self._authenticator.tenant(tenant_id)
        writer, payer = self._authenticator.tenant(writer_id), str(tenant_id).encode()
        if owner is None or writer is None:
            return Quota(ceiling_blocks=0, payer=payer), AT_REST[0]
        default = on_device = None
        if (info := model.replicas.info) is not None:
            default = self.promised_blocks_default(info, model.name, tenant_id)
            on_device = self.on_device_default(info, model.name, tenant_id)
        policy = replace(owner.policy, floor_blocks=floor_blocks_of(owner))
        quota = quota_of(policy, payer, default, model.quota_scale, on_device)
        return quota, min(owner.policy.at_rest, writer.policy.at_rest, key=AT_REST.index)

    def promised_blocks_default(self, info: EngineInfo, model: str, tenant_id: int) -> int | None:
        """Return the bound on the promises of a model's engine to a tenant that sets none; None for
        the engine's own bound. Promises of the last second may not count yet."""
        promised = self.tenants.promised(model, tenant_id)
        active = self._authenticator.active_tenants
        return promised_default(info.promisable_blocks, self._settings, active, promised)

    def on_device_default(self, info: EngineInfo, model: str, tenant_id: int) -> int | None:
        """Return the bound on what the promises of such a tenant hold on the device; None for the
        engine's own bound, and where no level below keeps promises."""
        if not info.promisable_on_device:
            return None
        promised = self.tenants.promised_on_device(model, tenant_id)
        active = self._authenticator.active_tenants
        return promised_default(info.promisable_on_device, self._settings, active, promised)
