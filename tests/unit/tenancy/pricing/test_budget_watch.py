"""`BudgetWatch` sees every budget that was set before a request."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tenancy.accounts.keys import create_key, rotate_key
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import StoreError
from tenancy.pricing.budget_watch import REFRESH_S, BudgetWatch
from tenancy.pricing.budgets import Budget, set_budget
from tests.actors import TESTER
from tests.unit.tenancy.storage.new_sqlite import new_sqlite


def wall() -> int:
    return 1_000


def test_sees_changes_through_its_own_store_at_once(tmp_path: Path) -> None:
    """Without any message."""
    with closing(new_sqlite(tmp_path / "test.db")) as store:
        for name in ("ada", "bob"):
            create_tenant(store, wall, name)
        watch = BudgetWatch(store, lambda: 0.0)
        seen = [(watch.refresh(), watch.has_budget(1, 1))]
        set_budget(store, Budget(1, "day", hard_micros=5))
        seen.append((watch.refresh(), watch.has_budget(1, 1)))
        bob = watch.has_budget(2, 2)
        seen.append((watch.refresh(), watch.has_budget(1, 7)))
        set_budget(store, Budget(1, "day"))
        seen.append((watch.refresh(), watch.has_budget(1, 1)))

    assert seen == [(True, False), (True, True), (False, True), (True, False)]
    assert not bob


def test_sees_changes_of_another_process_within_the_period(tmp_path: Path) -> None:
    """An unchanged file is not read before that."""
    now_s = [0.0]
    with (
        closing(new_sqlite(tmp_path / "test.db")) as store,
        closing(store.open_another()) as beside,
    ):
        create_tenant(store, wall, "ada")
        watch = BudgetWatch(store, lambda: now_s[0])
        watch.refresh()
        set_budget(beside, Budget(1, "day", hard_micros=5))
        seen = []
        for now_s[0] in (0.9 * REFRESH_S, REFRESH_S, 1.5 * REFRESH_S):
            seen.append((watch.refresh(), watch.has_budget(1, 1)))

    assert seen == [(False, False), (True, True), (False, True)]


def test_budget_applies_to_rotated_keys(tmp_path: Path) -> None:
    """And to no other key of the tenant."""
    with closing(new_sqlite(tmp_path / "test.db")) as store:
        create_tenant(store, wall, "ada")
        create_key(store, wall, 1)
        create_key(store, wall, 1)
        watch = BudgetWatch(store)
        set_budget(store, Budget(1, "month", soft_micros=5, key_id=1))
        watch.refresh()
        before = [watch.has_budget(1, key_id) for key_id in (1, 2, 3)]
        rotate_key(store, wall, "1", 1_000, by=TESTER)
        watch.refresh()

        assert before == [True, False, False]
        assert [watch.has_budget(1, key_id) for key_id in (1, 2, 3)] == [True, False, True]


def test_unreadable_file_raises(tmp_path: Path) -> None:
    """A caller must not take a failure for the absence of budgets."""
    store = new_sqlite(tmp_path / "test.db")
    watch = BudgetWatch(store)
    store.close()

    with pytest.raises(StoreError):
        watch.refresh()
