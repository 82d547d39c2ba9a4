"""Whoever asks at each request knows of every budget that was set before it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tenancy.accounts.keys import create_key, rotate_key
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import StoreError
from tenancy.pricing.budget_watch import REFRESH_S, BudgetWatch
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.storage.sqlite import SqliteStore


def wall() -> int:
    return 1_000


def test_a_budget_binds_from_its_first_instant_to_its_last(tmp_path: Path) -> None:
    """Through the store that is watched, which no message announces."""
    with closing(SqliteStore(tmp_path / "test.db")) as store:
        for name in ("ada", "bob"):
            create_tenant(store, wall, name)
        watch = BudgetWatch(store, lambda: 0.0)
        seen = [(watch.look(), watch.is_bound(1, 1))]
        set_budget(store, Budget(1, "day", hard_micros=5))
        seen.append((watch.look(), watch.is_bound(1, 1)))
        bob = watch.is_bound(2, 2)
        seen.append((watch.look(), watch.is_bound(1, 7)))
        set_budget(store, Budget(1, "day"))
        seen.append((watch.look(), watch.is_bound(1, 1)))

    assert seen == [(True, False), (True, True), (False, True), (True, False)]
    assert not bob


def test_what_another_process_sets_is_seen_a_moment_later(tmp_path: Path) -> None:
    """Within the time that is promised, and a file that stays as it is is not read until then."""
    now_s = [0.0]
    with closing(SqliteStore(tmp_path / "test.db")) as store, closing(store.another()) as beside:
        create_tenant(store, wall, "ada")
        watch = BudgetWatch(store, lambda: now_s[0])
        watch.look()
        set_budget(beside, Budget(1, "day", hard_micros=5))
        seen = []
        for now_s[0] in (0.9 * REFRESH_S, REFRESH_S, 1.5 * REFRESH_S):
            seen.append((watch.look(), watch.is_bound(1, 1)))

    assert seen == [(False, False), (True, True), (False, True)]


def test_a_keys_budget_binds_the_key_it_is_rotated_to(tmp_path: Path) -> None:
    """And no other key of the tenant."""
    with closing(SqliteStore(tmp_path / "test.db")) as store:
        create_tenant(store, wall, "ada")
        create_key(store, wall, 1)
        create_key(store, wall, 1)
        watch = BudgetWatch(store)
        set_budget(store, Budget(1, "month", soft_micros=5, key_id=1))
        watch.look()
        before = [watch.is_bound(1, key_id) for key_id in (1, 2, 3)]
        rotate_key(store, wall, "1", 1_000)
        watch.look()

        assert before == [True, False, False]
        assert [watch.is_bound(1, key_id) for key_id in (1, 2, 3)] == [True, False, True]


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """Who asks must not take silence for freedom."""
    store = SqliteStore(tmp_path / "test.db")
    watch = BudgetWatch(store)
    store.close()

    with pytest.raises(StoreError):
        watch.look()
