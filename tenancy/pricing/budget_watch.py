"""Who has a budget, as of this instant, for a process that asks about each request.

One number in the database differs after any change of budgets, by whatever process; what it stands
for is kept here. It decides nothing about money: the ledger's writer does, in its transactions.
`gateway.ledger.deferred_holds` asks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tenancy.pricing.budgets import Budgets, load_budgets
from tenancy.storage.interface import Store

REFRESH_S = 0.02
"""What another process sets may bind so much later: `trunkline` waits for it before it answers."""


class BudgetWatch:
    """Of one store that is near. Belongs to one thread."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        assert store.is_near, "each look would be a round trip"
        self._store = store
        self._clock = clock
        self._known_until_s = -math.inf
        self._changes = -1  # the store's own, as of the last look
        self._version = -1
        self._budgets: Budgets = {}

    def look(self) -> bool:
        """Know what there is: has it changed? What was set through this store is seen at once, what
        was elsewhere within `REFRESH_S`. About 0.2 us; up to 30 us where that has passed, and a
        read of it all where it has changed. Raises StoreError, and knows what it knew."""
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

    def is_bound(self, tenant_id: int, key_id: int) -> bool:
        """Was there a budget, of the tenant or of the key's line, at the last look? O(1)."""
        budgets = self._budgets
        return bool(budgets) and ((tenant_id, 0) in budgets or (tenant_id, key_id) in budgets)


_VERSION = "select version from money_version"
