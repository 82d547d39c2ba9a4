"""Tenants, keys and shared scopes that the configuration file declares, reconciled in one
transaction.

The file defines a declared tenant completely: an omitted setting has its default. A tenant that the
file no longer names is suspended, never deleted, because it may have promised leases and has ledger
entries. A reload does not resume a declared tenant that an operator suspended; newly declaring a
tenant that was not declared before makes it active. A shared scope that is no longer declared is
removed. The module reads no file; the gateway calls it at startup and at each reload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
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
    find_tenant_in,
    insert_tenant,
    list_tenant_records,
    write_settings,
)
from tenancy.errors import BadName
from tenancy.ledger.idempotency import forget
from tenancy.storage.audit_log import Actor, record
from tenancy.storage.interface import Store, Transaction
from tenancy.types import Tenant, TenantSettings, WallClock

DECLARED_MAX = 10_000
"""The most tenants that a configuration file may declare."""


class DeclaredTenant(TenantSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[[tenants]]` table: a name, the tenant's settings, and its declared keys."""

    name: str
    keys: tuple[DeclaredKey, ...] = ()

    @property
    def settings(self) -> TenantSettings:
        """The settings without the name and the keys."""
        return msgspec.convert(self, TenantSettings, from_attributes=True)


class TenantChange(Struct, frozen=True):
    """A change that a reload made to a tenant; `suspended` means that the file no longer declares
    it."""

    tenant: str
    what: Literal["created", "adopted", "changed", "suspended"]


def check_declared(declared: Sequence[DeclaredTenant]) -> None:
    """Raise BadName for invalid declarations, before any change."""
    if len(declared) > DECLARED_MAX:
        raise BadName(
            "bad_setting", f"too many declared tenants: {len(declared)}; limit {DECLARED_MAX}"
        )
    seen: set[str] = set()
    for one in declared:
        check_new_name(one.name)
        if one.name in seen:
            raise BadName("name_taken", f"tenant declared twice: {one.name!r}")
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
    by: Actor | None = None,
) -> list[TenantChange | KeyChange | ScopeChange]:
    """Reconcile the database with the declarations, all or nothing. Returns the changes.

    The changes come by name: tenants, then keys, then shared scopes. None for `declared` or
    `scopes` means that the file does not mention them. Every key must have its digest. If nothing
    differs, nothing is written, so an unchanged reload costs one read. O(tenants + keys). Raises
    BadName and StoreError.
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
        for change in changes:
            _record(db, by, change)
    return changes


def _record(
    db: Transaction, by: Actor | None, change: TenantChange | KeyChange | ScopeChange
) -> None:
    """Record a change by its file's word; the file has the values."""
    what = {"what": change.what}
    if isinstance(change, ScopeChange):
        sql = "select scope_id, owner_id from shared_scopes where name = ?"
        rows = db.rows(sql, (change.scope,))
        scope_id, owner_id = rows[0] if rows else ("removed", None)
        target = f"shared_scope:{scope_id}"
        record(db, by, "shared_scope.declare", target, tenant_id=owner_id, after=what)
        return
    tenant_id = find_tenant_in(db.rows, change.tenant).tenant.tenant_id
    if isinstance(change, KeyChange):
        target = f"key:{change.key_id}"
        record(db, by, "key.declare", target, tenant_id=tenant_id, after=what)
    else:
        record(db, by, "tenant.declare", f"tenant:{tenant_id}", tenant_id=tenant_id, after=what)


def _reconcile_tenants(
    store: Store, db: Transaction, clock: WallClock, wanted: dict[str, TenantSettings]
) -> list[TenantChange]:
    """Reconcile all tenants. `store` reads the committed state; no other transaction writes
    meanwhile."""
    changes = []
    current = {one.tenant.name: one for one in list_tenant_records(store)}
    for name in sorted(wanted.keys() | current.keys()):
        what = _reconcile_tenant(db, clock, name, current.get(name), wanted.get(name))
        if what is not None:
            changes.append(TenantChange(name, what))
    return changes


def _keys_by_tenant(declared: Sequence[DeclaredTenant]) -> DeclaredKeys:
    return {one.name: one.keys for one in declared}


def _tenants_differ(current: list[TenantRecord], wanted: dict[str, TenantSettings]) -> bool:
    declared = {one.tenant.name: one.settings for one in current if one.tenant.is_declared}
    return declared != wanted


def _reconcile_tenant(
    db: Transaction,
    clock: WallClock,
    name: str,
    current: TenantRecord | None,
    wanted: TenantSettings | None,
) -> Literal["created", "adopted", "changed", "suspended"] | None:
    """Reconcile one tenant. Returns what was done, or None."""
    if current is None:
        assert wanted is not None, "every name is current or wanted"
        tenant = Tenant(0, name, "active", clock(), wanted.tier, is_declared=True)
        insert_tenant(db, TenantRecord(tenant, wanted.policy, wanted.limits))
        return "created"
    tenant = current.tenant
    if wanted is None:
        if tenant.is_declared:
            _set_declared(db, tenant.tenant_id, is_declared=False, status="suspended")
            forget(db, tenant.tenant_id)
            return "suspended"
        return None
    if not tenant.is_declared:
        _set_declared(db, tenant.tenant_id, is_declared=True, status="active")
    if current.settings != wanted:
        write_settings(db, tenant.tenant_id, wanted)
    if not tenant.is_declared:
        return "adopted"
    return "changed" if current.settings != wanted else None


def _set_declared(db: Transaction, tenant_id: int, *, is_declared: bool, status: str) -> None:
    db.execute(
        "update tenants set is_declared = ?, status = ? where tenant_id = ?",
        (is_declared, status, tenant_id),
    )
