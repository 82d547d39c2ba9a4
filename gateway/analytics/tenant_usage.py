"""Cache usage of each tenant: sums over its namespaces, updated as they change.

An update costs O(changed namespaces), not O(all). This module reads no clock, and of the engine
only its `NamespaceTable`. `background.storage_metering` updates the sums twice a second,
`api.admin.analytics` before each answer.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

from engine.api import Namespace
from engine.client.namespace_stats import NamespaceTable
from engine.statistics import NamespaceStats

FIELDS = ("blocks", "pinned_blocks", "promised_blocks", "promised_below", "running", "waiting")


_NOTHING = [0] * len(FIELDS)
_PROMISED, _BELOW = FIELDS.index("promised_blocks"), FIELDS.index("promised_below")


class TenantCacheUsage:
    """Cache usage of a gateway's tenants. Belongs to one thread."""

    def __init__(self) -> None:
        self._tables: dict[str, Sequence[NamespaceTable]] = {}
        self._sums: dict[str, dict[int, list[int]]] = {}
        """Sums by model and tenant."""
        self._promised: Counter[str] = Counter()
        """Promised blocks of all tenants by model."""
        self._below: Counter[str] = Counter()
        """Those of them that a level below the device keeps."""

    def update(
        self,
        tables: Sequence[NamespaceTable],
        owner_of: Callable[[Namespace], int | None],
        model: str = "",
    ) -> None:
        """Apply the changes of the `tables` of a model's engines. Others than the last time
        replace all sums of the model. O(changes)."""
        changes = [change for table in tables for change in table.take_changes(self)]
        sums, known = self._sums.setdefault(model, {}), self._tables.get(model, ())
        if [*map(id, tables)] != [*map(id, known)]:
            self._tables[model] = tables
            sums.clear()
            self._promised[model] = self._below[model] = 0
            changes = [(None, stats) for table in tables for stats in table]
        for before, after in changes:
            for stats, sign in ((before, -1), (after, 1)):
                if stats is not None and (owner := owner_of(stats.namespace)) is not None:
                    _add(sums, owner, stats, sign)
                    self._promised[model] += sign * stats.promised_blocks
                    self._below[model] += sign * stats.promised_below

    def total(self, name: str, model: str | None = None) -> int:
        """Return the sum of one of `FIELDS` over all tenants, of all models or of one.
        O(tenants)."""
        index = FIELDS.index(name)
        wanted = self._sums.values() if model is None else [self._sums.get(model, {})]
        return sum(row[index] for sums in wanted for row in sums.values())

    def promised(self, model: str, tenant_id: int) -> tuple[int, int]:
        """Return the blocks of a model that are promised to a tenant, and to all. O(1)."""
        own = self._sums.get(model, {}).get(tenant_id, _NOTHING)
        return own[_PROMISED], self._promised[model]

    def promised_on_device(self, model: str, tenant_id: int) -> tuple[int, int]:
        """Return the blocks of a model that promises to a tenant, and to all, hold on the device.
        O(1)."""
        own = self._sums.get(model, {}).get(tenant_id, _NOTHING)
        return own[_PROMISED] - own[_BELOW], self._promised[model] - self._below[model]

    def of(self, tenant_id: int) -> dict[str, int]:
        """Return what a tenant uses, by `FIELDS`. O(models)."""
        rows = [sums.get(tenant_id, _NOTHING) for sums in self._sums.values()] or [_NOTHING]
        return dict(zip(FIELDS, map(sum, zip(*rows, strict=True)), strict=True))

    def by_model(self, tenant_id: int) -> dict[str, dict[str, int]]:
        """Return what a tenant uses of each model that holds something of it. O(models)."""
        return {
            model: dict(zip(FIELDS, sums[tenant_id], strict=True))
            for model, sums in self._sums.items()
            if tenant_id in sums
        }

    def largest(self, limit: int) -> list[tuple[int, dict[str, int]]]:
        """Return the tenants with most blocks and what they use, largest first. O(tenants)."""
        blocks: Counter[int] = Counter()
        for sums in self._sums.values():
            for tenant, row in sums.items():
                blocks[tenant] += row[0]
        found = heapq.nlargest(limit, blocks.items(), key=lambda one: one[1])
        return [(tenant, self.of(tenant)) for tenant, _ in found]


def _add(sums: dict[int, list[int]], owner: int, stats: NamespaceStats, sign: int) -> None:
    row = sums.setdefault(owner, [0] * len(FIELDS))
    for index, name in enumerate(FIELDS):
        row[index] += sign * getattr(stats, name)
    if not any(row):
        del sums[owner]
