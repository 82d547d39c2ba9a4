"""Deletion of a tenant: what goes, what stays, and under which name."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tenancy.accounting.audit import check_books
from tenancy.accounts import deletion
from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.accounts.cached_contents import (
    CachedContentQuota,
    CachedContentRecord,
    create_cached_content,
)
from tenancy.accounts.declared_tenants import DeclaredTenant, reconcile
from tenancy.accounts.deletion import delete_tenant, filter_deleted
from tenancy.accounts.keys import create_key, list_keys, rotate_key
from tenancy.accounts.shared_scopes import ScopeTerms, reconcile_scopes
from tenancy.accounts.tenants import (
    change_tenant,
    create_tenant,
    find_tenant_record,
    list_tenants,
    set_status,
)
from tenancy.errors import BadName, KeyRefused
from tenancy.history.request_records import RequestRecord, write_records
from tenancy.history.request_users import UserNote, write_users
from tenancy.history.samples import Sample, write_samples
from tenancy.ledger.idempotency import Claim, ReplayedResponse, ReplayRecord
from tenancy.ledger.ledger import Hold, Ledger
from tenancy.ledger.transactions import NamedEntry
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.storage.interface import Store
from tenancy.types import TenantSettings, UsageEntry
from tests.actors import TESTER
from tests.unit.tenancy.conftest import Wall

ENTRY = UsageEntry("r", 1, 1, "m", "done", 1, 2, 4, 0, 0, 4, 3, 0)
CONTENT = CachedContentRecord("c", 1, "lab", "m", "my secret plans", 10, 1, 1, 10**15)


def furnish(store: Store, wall: Wall) -> str:
    """Create ada with a row in every table; return her key."""
    create_tenant(store, wall, "ada", limits=None)
    change_tenant(store, "ada", {"weight": 2, "requests_per_minute": 9, "tier": "gold"})
    key = create_key(store, wall, 1, label="ada's laptop")
    rotate_key(store, wall, "1", 60_000, by=TESTER)
    set_budget(store, Budget(1, "day", hard_micros=10**9))
    ledger = Ledger(store, wall)
    ledger.hold(Hold("r", 1, 1, "m", 1, claim=Claim("n", bytes(32), 9))).result(60)
    keeping = ReplayRecord(10**15, 10**6, ReplayedResponse("head", b"what ada was told"))
    ledger.settle(NamedEntry(ENTRY, keeping)).result(60)
    ledger.close()
    create_cached_content(store, CONTENT, b"ada's words", CachedContentQuota())
    return key


def everything(store: Store) -> str:
    """Return every column that could identify the tenant."""
    tables = ("tenants", "keys", "cached_contents", "named_requests", "budgets", "ledger")
    return repr([store.query(f"select * from {table}") for table in tables])


def test_unused_tenant_is_deleted_completely(store: Store, wall: Wall) -> None:
    """A mistyped tenant does not stay in lists. Its keys go with it."""
    key = create_key(store, wall, create_tenant(store, wall, "ada").tenant_id)
    pseudonym = delete_tenant(store, wall, "ada")

    assert (pseudonym, list_tenants(store), list_keys(store)) == (None, [], [])
    with pytest.raises(KeyRefused):
        KeyAuthenticator(store, wall, lambda: 0.0).authenticate(key)
    with pytest.raises(BadName, match="unknown tenant"):
        delete_tenant(store, wall, "ada")


def test_ledger_rows_stay_under_a_pseudonym(store: Store, wall: Wall) -> None:
    """Charges stay, the tenant cannot be identified, and the books are right."""
    key = furnish(store, wall)
    pseudonym = delete_tenant(store, wall, "ada")

    assert pseudonym == "deleted-1"
    assert store.query("select request_id, tenant_id from ledger") == [("r", 1)]
    assert check_books(store) == []
    text = everything(store)
    assert not any(word in text for word in ("ada", "secret", "laptop"))
    assert store.query("select count(*) from named_requests") == [(0,)]
    assert store.query("select count(*) from cached_contents where content is not null") == [(0,)]
    assert store.query("select count(*) from budgets") == [(0,)]
    assert find_tenant_record(store, "deleted-1").settings == TenantSettings(tier="gold")
    with pytest.raises(KeyRefused):
        KeyAuthenticator(store, wall, lambda: 0.0).authenticate(key)


def test_name_is_free_and_pseudonym_is_reserved(store: Store, wall: Wall) -> None:
    """A later tenant of that name is a different one; the pseudonym cannot be taken."""
    furnish(store, wall)
    delete_tenant(store, wall, "ada")
    again = create_tenant(store, wall, "ada")

    assert again.tenant_id == 2
    assert filter_deleted(store, {1, 2, 3}) == {1, 3}
    for attempt in (
        lambda: set_status(store, "deleted-1", "active"),
        lambda: change_tenant(store, "deleted-1", {"weight": 3}),
        lambda: delete_tenant(store, wall, "deleted-1"),
        lambda: create_tenant(store, wall, "deleted-9"),
        lambda: reconcile(store, wall, [DeclaredTenant(name="deleted-1")]),
    ):
        with pytest.raises(BadName, match="deleted"):
            attempt()


def test_tenant_with_a_running_request_is_not_deleted(store: Store, wall: Wall) -> None:
    """Its hold becomes an entry, and may become a stored response."""
    furnish(store, wall)
    ledger = Ledger(store, wall)
    ledger.hold(Hold("s", 1, 1, "m", 1)).result(60)

    with pytest.raises(BadName, match="suspend it"):
        delete_tenant(store, wall, "ada")
    assert [tenant.name for tenant in list_tenants(store)] == ["ada"]
    ledger.settle(replace(ENTRY, request_id="s")).result(60)
    assert delete_tenant(store, wall, "ada") == "deleted-1"
    ledger.close()


def test_notes_of_users_are_deleted_in_small_transactions(
    store: Store, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one for each request of the tenant's life, and all others wait for the lock."""
    furnish(store, wall)
    write_users(store, [UserNote(f"n{number}", 1, "alice") for number in range(5)])
    monkeypatch.setattr(deletion, "SWEPT_AT_ONCE", 2)
    before = store.changes
    delete_tenant(store, wall, "ada")

    assert store.changes - before == 3 + 1
    assert store.query("select count(*) from request_users") == [(0,)]


def test_owner_or_declared_tenant_is_not_deleted(store: Store, wall: Wall) -> None:
    """A shared scope needs its owner; a declared tenant belongs to the file."""
    create_tenant(store, wall, "ada")
    reconcile(store, wall, [DeclaredTenant(name="bob")])
    with store.change() as db:
        reconcile_scopes(db, wall, [ScopeTerms(name="handbook", owner="ada", members=("ada",))])

    with pytest.raises(BadName, match="handbook"):
        delete_tenant(store, wall, "ada")
    with pytest.raises(BadName, match="declared"):
        delete_tenant(store, wall, "bob")


def test_ids_of_deleted_tenants_are_not_reused(store: Store, wall: Wall) -> None:
    """A cache, a receipt or a log may still contain the id of the deleted tenant or of its key."""
    create_key(store, wall, create_tenant(store, wall, "ada").tenant_id)
    delete_tenant(store, wall, "ada")
    next_tenant = create_tenant(store, wall, "eve").tenant_id
    create_key(store, wall, next_tenant)

    assert next_tenant == 2
    assert [key.key_id for key in list_keys(store)] == [2]


@pytest.mark.parametrize("has_entries", [True, False])
def test_samples_and_records_of_requests_go(store: Store, wall: Wall, has_entries: bool) -> None:
    """They are kept for charts and support, and no invoice needs them."""
    if has_entries:
        furnish(store, wall)
    else:
        create_tenant(store, wall, "ada")
    write_samples(store, [Sample(1, 0), Sample(2, 0)])
    for number in (1, 2):
        record = RequestRecord(f"q{number}", number, 1, "/", "", "m", False, 429, "refused", "c", 1)
        write_records(store, [record])
    delete_tenant(store, wall, "ada")

    for table in ("history_samples", "request_records"):
        assert store.query(f"select tenant_id from {table}") == [(2,)]
