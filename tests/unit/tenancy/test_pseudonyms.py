"""Deleted tenants accept nothing new."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.keys import create_key, list_keys
from tenancy.accounts.tenants import create_tenant, find_tenant_record, set_status
from tenancy.errors import BadName
from tenancy.ledger.ledger import Ledger
from tenancy.pricing.budgets import Budget, list_budgets, set_budget
from tenancy.storage.interface import Store
from tests.unit.tenancy.conftest import Wall, used

ACTS: dict[str, Callable[[Store, Wall, int, str], object]] = {
    "key": lambda store, wall, number, name: create_key(store, wall, number),
    "budget": lambda store, wall, number, name: set_budget(store, Budget(number, "day", 1)),
    "resume": lambda store, wall, number, name: set_status(store, name, "active"),
    "again": lambda store, wall, number, name: delete_tenant(store, wall, name),
}


@pytest.mark.parametrize("act", ACTS)
def test_deleted_tenant_accepts_nothing_new(store: Store, wall: Wall, act: str) -> None:
    """Its rows stay for the books; its keys and budgets have no user."""
    create_tenant(store, wall, "ada")
    create_key(store, wall, 1)
    ledger = Ledger(store, wall)
    ledger.settle(used("r", 1)).result(60)
    ledger.close()
    pseudonym = delete_tenant(store, wall, "ada")
    assert pseudonym is not None
    before = find_tenant_record(store, pseudonym), list_keys(store)

    with pytest.raises(BadName) as caught:
        ACTS[act](store, wall, 1, pseudonym)
    assert caught.value.code == "tenant_deleted"
    assert (find_tenant_record(store, pseudonym), list_keys(store)) == before
    with store.snapshot() as db:
        assert list_budgets(db) == []
