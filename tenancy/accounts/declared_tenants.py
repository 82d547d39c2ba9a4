"""Tenants, their keys and shared scopes that the configuration file declares: made so, in one
transaction.

A declared tenant is what the file says, all of it: what is not said there has its default. One
that the file names no longer is suspended, never deleted: it may have leases that are promised and
entries that are kept. Whether an operator suspended a declared tenant is not the file's to say;
but naming one anew that was not declared before makes it active. A shared scope that is declared
no longer is removed. It reads no file; the gateway calls it at the start and at each reload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from tenancy.accounts.declared_keys import (
    DeclaredKey,
    DeclaredKeys,
    KeyChange,
    check_keys,
    keys_differ,
    reconcile_keys,
)
from tenancy.accounts.shared_scopes import (
    ScopeChange,
    ScopeTerms,
    check_scopes,
    reconcile_scopes,
    scopes_differ,
)
from tenancy.accounts.tenants import (
    TenantRecord,
    check_new_name,
    check_settings,
    insert_tenant,
    list_tenant_records,
    write_settings,
)
from tenancy.errors import BadName
from tenancy.ledger.idempotency import forget
from tenancy.storage.interface import Store, Transaction
from tenancy.types import Tenant, TenantSettings, WallClock

DECLARED_MAX = 10_000


class DeclaredTenant(TenantSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[[tenants]]` table: a name, what is set of it, and its keys that the file declares."""

    name: str
    keys: tuple[DeclaredKey, ...] = ()

    @property
    def settings(self) -> TenantSettings:
        """Without the name and the keys."""
        return TenantSettings(
            **{name: getattr(self, name) for name in TenantSettings.__struct_fields__}
        )


class TenantChange(Struct, frozen=True):
    """What a reload did to a tenant; `suspended` is one that is declared no longer."""

    tenant: str
    what: Literal["created", "adopted", "changed", "suspended"]


def check_declared(declared: Sequence[DeclaredTenant]) -> None:
    """Raises BadName for what cannot be, before anything is changed."""
    if len(declared) > DECLARED_MAX:
        raise BadName("bad_setting", f"more than {DECLARED_MAX} tenants are declared")
    seen: set[str] = set()
    for one in declared:
        check_new_name(one.name)
        if one.name in seen:
            raise BadName("name_taken", f"the tenant {one.name!r} is declared twice")
        seen.add(one.name)
        try:
            check_settings(one.settings)
        except BadName as error:
            raise BadName(error.code, f"{one.name}: {error.message}") from error
    check_keys(_keys_by_tenant(declared))


def reconcile(
    store: Store,
    clock: WallClock,
    declared: Sequence[DeclaredTenant] | None,
    scopes: Sequence[ScopeTerms] | None = None,
) -> list[TenantChange | KeyChange | ScopeChange]:
    """Make it so, all or nothing; what was done, by name: tenants, then keys, then shared scopes.
    None: the file says nothing of them. O(tenants + keys). Raises BadName, StoreError.

    Each key is declared by its digest. Nothing is written where nothing differs, so a reload that
    changes nothing costs a read.
    """
    check_declared(declared or ())
    check_scopes(scopes or ())
    wanted = None if declared is None else {one.name: one.settings for one in declared}
    keys = _keys_by_tenant(declared or ())
    changes: list[TenantChange | KeyChange | ScopeChange] = []
    are_tenants_new = wanted is not None and (
        _tenants_differ(list_tenant_records(store), wanted) or keys_differ(store, keys)
    )
    are_scopes_new = scopes is not None and scopes_differ(store, scopes)
    if not are_tenants_new and not are_scopes_new:
        return changes
    with store.change() as db:
        if wanted is not None:
            changes += _reconcile_tenants(store, db, clock, wanted)
            changes += reconcile_keys(db, clock, keys)
        if scopes is not None:
            changes += reconcile_scopes(db, clock, scopes)
    return changes


def _reconcile_tenants(
    store: Store, db: Transaction, clock: WallClock, wanted: dict[str, TenantSettings]
) -> list[TenantChange]:
    """Nobody else writes until this ends; the reader sees what was committed before."""
    changes = []
    there = {one.tenant.name: one for one in list_tenant_records(store)}
    for name in sorted(wanted.keys() | there.keys()):
        what = _reconcile_tenant(db, clock, name, there.get(name), wanted.get(name))
        if what is not None:
            changes.append(TenantChange(name, what))
    return changes


def _keys_by_tenant(declared: Sequence[DeclaredTenant]) -> DeclaredKeys:
    return {one.name: one.keys for one in declared}


def _tenants_differ(there: list[TenantRecord], wanted: dict[str, TenantSettings]) -> bool:
    declared = {one.tenant.name: one.settings for one in there if one.tenant.is_declared}
    return declared != wanted


def _reconcile_tenant(
    db: Transaction,
    clock: WallClock,
    name: str,
    there: TenantRecord | None,
    wanted: TenantSettings | None,
) -> Literal["created", "adopted", "changed", "suspended"] | None:
    """One tenant: what was done, None for nothing."""
    if there is None:
        assert wanted is not None, "a name is there or wanted"
        tenant = Tenant(0, name, "active", clock(), wanted.tier, is_declared=True)
        insert_tenant(db, TenantRecord(tenant, wanted.policy, wanted.limits))
        return "created"
    tenant = there.tenant
    if wanted is None:
        if tenant.is_declared:
            _set_declared(db, tenant.tenant_id, is_declared=False, status="suspended")
            forget(db, tenant.tenant_id)
            return "suspended"
        return None
    if not tenant.is_declared:
        _set_declared(db, tenant.tenant_id, is_declared=True, status="active")
    if there.settings != wanted:
        write_settings(db, tenant.tenant_id, wanted)
    if not tenant.is_declared:
        return "adopted"
    return "changed" if there.settings != wanted else None


def _set_declared(db: Transaction, tenant_id: int, *, is_declared: bool, status: str) -> None:
    db.execute(
        "update tenants set is_declared = ?, status = ? where tenant_id = ?",
        (is_declared, status, tenant_id),
    )
