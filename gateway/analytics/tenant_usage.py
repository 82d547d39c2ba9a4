"""Cache usage of each tenant: sums over its namespaces, updated as they change.

An update costs O(changed namespaces), not O(all). This module reads no clock, and of the engine
only its `NamespaceTable`. `background.storage_metering` updates the sums twice a second,
`api.admin.analytics` before each answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from engine.api import Namespace, NamespaceStats
from engine.client.namespace_stats import NamespaceTable

FIELDS = ("blocks", "pinned_blocks", "promised_blocks", "running", "waiting")


_NOTHING = [0] * len(FIELDS)


class TenantCacheUsage:
    """Cache usage of a gateway's tenants. Belongs to one thread."""

    def __init__(self) -> None:
        self._table: NamespaceTable | None = None
        self._sums_by_tenant: dict[int, list[int]] = {}

    def update(
        self, table: NamespaceTable | None, owner_of: Callable[[Namespace], int | None]
    ) -> None:
        """Apply the changes of `table`. Another table than the last time replaces all sums.
        O(changes)."""
        changes = [] if table is None else table.take_changes(self)
        if table is not self._table:
            self._table = table
            self._sums_by_tenant.clear()
            changes = [(None, stats) for stats in table or ()]
        for before, after in changes:
            for stats, sign in ((before, -1), (after, 1)):
                if stats is not None and (owner := owner_of(stats.namespace)) is not None:
                    self._add(owner, stats, sign)

    def total(self, name: str) -> int:
        """Return the sum of one of `FIELDS` over all tenants. O(tenants)."""
        index = FIELDS.index(name)
        return sum(sums[index] for sums in self._sums_by_tenant.values())

    def of(self, tenant_id: int) -> dict[str, int]:
        """Return what a tenant uses, by `FIELDS`. O(1)."""
        return dict(zip(FIELDS, self._sums_by_tenant.get(tenant_id, _NOTHING), strict=True))

    def largest(self, limit: int) -> list[tuple[int, dict[str, int]]]:
        """Return the tenants with most blocks and what they use, largest first. O(tenants)."""
        found = heapq.nlargest(limit, self._sums_by_tenant.items(), key=lambda one: one[1][0])
        return [(tenant, dict(zip(FIELDS, sums, strict=True))) for tenant, sums in found]

    def _add(self, owner: int, stats: NamespaceStats, sign: int) -> None:
        sums = self._sums_by_tenant.setdefault(owner, [0] * len(FIELDS))
        for index, name in enumerate(FIELDS):
            sums[index] += sign * getattr(stats, name)
        if not any(sums):
            del self._sums_by_tenant[owner]
