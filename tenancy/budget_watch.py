"""Who has a budget, as of this instant, for a process that asks about each request.

One number in the database differs after any change of budgets, by whatever process; what it stands
for is kept here. It decides nothing about money: the ledger's writer does, in its transactions.
`gateway.late_holds` asks.
"""

from __future__ import annotations

from tenancy.budgets import Budgets, load_budgets
from tenancy.store import Store


class BudgetWatch:
    """Of one store that is near. Belongs to one thread."""

    def __init__(self, store: Store) -> None:
        assert store.is_near, "each look would be a round trip"
        self._store = store
        self._version = -1
        self._budgets: Budgets = {}

    def look(self) -> bool:
        """Know what there is now: has it changed? About 5 us, and a read where it has. Raises
        StoreError, and knows what it knew."""
        version = int(self._store.query(_VERSION)[0][0])
        if version == self._version:
            return False
        with self._store.snapshot() as db:
            version = int(db.rows(_VERSION)[0][0])
            self._budgets = load_budgets(db)
        self._version = version
        return True

    def is_bound(self, tenant_id: int, key_id: int) -> bool:
        """Was there a budget, of the tenant or of the key's line, at the last look? O(1)."""
        budgets = self._budgets
        return bool(budgets) and ((tenant_id, 0) in budgets or (tenant_id, key_id) in budgets)


_VERSION = "select version from money_version"
