"""Tenants that the configuration file declares."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tenancy.accounts.declared_tenants import DeclaredTenant, TenantChange, reconcile
from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.tenants import (
    change_tenant,
    create_tenant,
    find_tenant_record,
    list_tenant_records,
    set_status,
)
from tenancy.errors import BadName
from tenancy.storage.interface import Store
from tenancy.types import CachePolicy, Limits
from tests.tables import each_row
from tests.unit.tenancy.conftest import Wall

ADA = DeclaredTenant(name="ada", tier="gold", weight=2, requests_per_minute=60)
BOB = DeclaredTenant(name="bob", floor_blocks=8, classes=("5m", "1h"), promised_blocks_max=4)


def told(store: Store, wall: Wall, declared: Sequence[DeclaredTenant]) -> list[tuple[str, str]]:
    """Reconcile and return what changed."""
    changes = reconcile(store, wall, declared)
    return [(one.tenant, one.what) for one in changes if isinstance(one, TenantChange)]


def test_declared_tenant_is_created(store: Store, wall: Wall) -> None:
    """With all its settings; omitted settings have their defaults."""
    changes = reconcile(store, wall, [BOB, ADA])
    ada, bob = list_tenant_records(store)

    assert changes == [TenantChange("ada", "created"), TenantChange("bob", "created")]
    assert (ada.tenant.tier, ada.tenant.is_declared, ada.policy.weight) == ("gold", True, 2)
    assert ada.limits == Limits(requests_per_minute=60)
    assert bob.policy == CachePolicy(floor_blocks=8, classes=("5m", "1h"), promised_blocks_max=4)


def test_unchanged_declaration_writes_nothing(store: Store, wall: Wall) -> None:
    """An unchanged reload does not change the registry's version."""
    reconcile(store, wall, [ADA, BOB])
    before = store.registry_version()

    assert told(store, wall, [BOB, ADA]) == []
    assert store.registry_version() == before


def test_omitted_settings_return_to_defaults(store: Store, wall: Wall) -> None:
    reconcile(store, wall, [ADA])

    assert told(store, wall, [DeclaredTenant(name="ada", priority=1)]) == [("ada", "changed")]
    found = find_tenant_record(store, "ada")
    assert (found.tenant.tier, found.policy) == ("standard", CachePolicy(priority=1))
    assert found.limits == Limits()


def test_undeclared_tenant_is_suspended_not_deleted(store: Store, wall: Wall) -> None:
    """It may have promised leases, and its entries stay forever."""
    reconcile(store, wall, [ADA, BOB])

    assert told(store, wall, [BOB]) == [("ada", "suspended")]
    found = find_tenant_record(store, "ada")
    assert (found.tenant.status, found.tenant.is_declared) == ("suspended", False)
    assert found.policy.weight == 2
    assert told(store, wall, [BOB]) == []


def test_redeclared_tenant_is_active_again(store: Store, wall: Wall) -> None:
    """A line that was removed by mistake and restored has its old effect."""
    reconcile(store, wall, [ADA])
    before = find_tenant_record(store, "ada")
    reconcile(store, wall, [])

    assert told(store, wall, [ADA]) == [("ada", "adopted")]
    assert find_tenant_record(store, "ada") == before


def test_other_tenants_stay_until_declared(store: Store, wall: Wall) -> None:
    """The file has no effect on tenants that it never named."""
    create_tenant(store, wall, "ada", CachePolicy(weight=7))
    create_tenant(store, wall, "eve")

    assert told(store, wall, [ADA]) == [("ada", "adopted")]
    assert find_tenant_record(store, "ada").policy.weight == 2
    assert find_tenant_record(store, "eve").tenant.status == "active"


def test_reload_does_not_resume_a_suspended_tenant(store: Store, wall: Wall) -> None:
    """The operator had a reason that the file does not express."""
    reconcile(store, wall, [ADA])
    set_status(store, "ada", "suspended")

    assert told(store, wall, [ADA]) == []
    assert told(store, wall, [DeclaredTenant(name="ada")]) == [("ada", "changed")]
    assert find_tenant_record(store, "ada").tenant.status == "suspended"


def test_declared_tenant_is_changed_in_the_file_only(store: Store, wall: Wall) -> None:
    """The next reload would undo the change without a trace."""
    reconcile(store, wall, [ADA])

    with pytest.raises(BadName, match="configuration file"):
        change_tenant(store, "ada", {"weight": 3})
    with pytest.raises(BadName, match="configuration file"):
        delete_tenant(store, lambda: 1, "ada")


@each_row(
    ("wrong", "what"),
    [
        ([ADA, ADA], "declared twice"),
        ([BOB, DeclaredTenant(name="../etc")], "invalid tenant name"),
        (
            [BOB, DeclaredTenant(name="eve", floor_blocks=9, ceiling_blocks=8)],
            "eve: ceiling_blocks",
        ),
        ([BOB, DeclaredTenant(name="eve", tier="A B")], "eve: invalid tier name: 'A B'"),
        (
            [BOB, DeclaredTenant(name="eve", requests_per_minute=0)],
            "eve: requests_per_minute out of range: 0",
        ),
        ([DeclaredTenant(name=f"t{n}") for n in range(10_001)], "limit 10000"),
    ],
)
def test_invalid_declaration_changes_nothing(
    store: Store, wall: Wall, wrong: list[DeclaredTenant], what: str
) -> None:
    """A file with one mistake is not half applied."""
    reconcile(store, wall, [ADA])
    before = list_tenant_records(store)

    with pytest.raises(BadName, match=what):
        reconcile(store, wall, wrong)
    assert list_tenant_records(store) == before
