"""An in-memory view of budgets for a process that checks one per request.

A version number in the database changes with every change of budgets, by any process; the budgets
of the last version are kept here. The module decides nothing about money: the ledger's writer does,
in its transactions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tenancy.pricing.budgets import Budgets, load_budgets
from tenancy.storage.interface import Store

REFRESH_S = 0.02
"""A budget set by another process may take effect this much later; `trunkline budget` waits for
it."""


class BudgetWatch:
    """The budgets of one local store. Belongs to one thread."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        assert store.is_local, "each refresh would be a round trip"
        self._store = store
        self._clock = clock
        self._known_until_s = -math.inf
        self._changes = -1  # of this store, at the last refresh
        self._version = -1
        self._budgets: Budgets = {}

    def refresh(self) -> bool:
        """Refresh the view. Returns whether any budget has changed.

        A change through this store is seen at once, a change by another process within `REFRESH_S`.
        About 0.2 us; up to 30 us after `REFRESH_S`, and a full read after a change. Raises
        StoreError and keeps the old view.
        """
        now_s, changes = self._clock(), self._store.changes
        if now_s < self._known_until_s and changes == self._changes:
            return False
        version = int(self._store.query(_VERSION)[0][0])
        is_new = version != self._version
        if is_new:
            with self._store.snapshot() as db:
                version = int(db.rows(_VERSION)[0][0])
                self._budgets = load_budgets(db)
            self._version = version
        self._known_until_s, self._changes = now_s + REFRESH_S, changes
        return is_new

    def has_budget(self, tenant_id: int, key_id: int) -> bool:
        """Return whether the tenant or the key's line had a budget at the last refresh. O(1)."""
        budgets = self._budgets
        return bool(budgets) and ((tenant_id, 0) in budgets or (tenant_id, key_id) in budgets)


_VERSION = "select version from money_version"
