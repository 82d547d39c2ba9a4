"""Deleting a tenant: nothing of it is left, or its money rows alone, under a pseudonym.

What is in the ledger refers to its tenant's number for ever, and is never changed. Everything that
says who that was, and everything it kept, goes; its name is free again. It knows no engine: what
the cache holds for it the gateway forgets. The admin API and the command line call it.
"""

from __future__ import annotations

import hashlib

from tenancy.accounts.shared_scopes import list_owned_scopes
from tenancy.accounts.tenants import (
    TenantRecord,
    find_tenant_in,
    read_tenant_records,
    write_settings,
)
from tenancy.errors import BadName, ConstraintBroken
from tenancy.ledger import idempotency
from tenancy.pseudonyms import PSEUDONYM_PREFIX, check_not_deleted, is_pseudonym
from tenancy.storage.interface import Store, Transaction
from tenancy.types import TenantSettings, WallClock


def delete_tenant(store: Store, clock: WallClock, name: str) -> str | None:
    """Delete it with its keys, limits, budgets, memberships, cached contents and kept answers.

    The pseudonym under which its money rows stay, None where it has none: then its number goes too.
    Raises BadName while it owns a shared scope, is declared, or has requests that run.
    """
    try:
        with store.change() as db:
            tenant_id = _find_deletable(db, name).tenant.tenant_id
            idempotency.forget(db, tenant_id)
            for table in ("scope_members", "keys", "named_sums", "tenants"):
                db.execute(f"delete from {table} where tenant_id = ?", (tenant_id,))
        return None
    except ConstraintBroken:  # something that stays refers to it
        with store.change() as db:
            return _pseudonymise(db, _find_deletable(db, name), clock())


def filter_deleted(store: Store, tenant_ids: set[int]) -> set[int]:
    """Those of them that are deleted and have money rows. O(ids)."""
    found = read_tenant_records(store, sorted(tenant_ids))
    return {one.tenant.tenant_id for one in found if is_pseudonym(one.tenant.name)}


def _find_deletable(db: Transaction, name: str) -> TenantRecord:
    found = find_tenant_in(db, name)
    check_not_deleted(name)
    if found.tenant.is_declared:
        raise BadName(
            "tenant_declared",
            f"{name} is declared in the configuration file; take it out there and reload",
        )
    if owned := list_owned_scopes(db, found.tenant.tenant_id):
        raise BadName("tenant_in_use", f"{name} owns the shared scope {owned[0]}; remove it")
    return found


def _pseudonymise(db: Transaction, found: TenantRecord, now_ms: int) -> str:
    tenant_id, pseudonym = found.tenant.tenant_id, f"{PSEUDONYM_PREFIX}{found.tenant.tenant_id}"
    if db.rows("select 1 from holds where tenant_id = ? limit 1", (tenant_id,)):
        raise BadName(
            "tenant_in_use",
            f"requests of {found.tenant.name} are running; suspend it, and delete it when they"
            " have ended",
        )
    if db.rows("select 1 from tenants where name = ?", (pseudonym,)):
        raise BadName("name_taken", f"another tenant has the name {pseudonym}")
    idempotency.forget(db, tenant_id)
    for table in ("scope_members", "budgets", "budget_windows"):
        db.execute(f"delete from {table} where tenant_id = ?", (tenant_id,))
    for key_id, digest in db.rows(
        "select key_id, digest from keys where tenant_id = ?", (tenant_id,)
    ):
        # Its number stays with its entries; what would open a door is no text that can be sent.
        db.execute(
            "update keys set digest = ?, shown = '', label = '', limits = '{}', is_declared = 0,"
            " revoked_ms = coalesce(revoked_ms, ?) where key_id = ?",
            (hashlib.sha256(bytes(digest)).digest(), now_ms, key_id),
        )
    db.execute(
        "update cached_contents set content = null, display_name = '', ended_ms ="
        " case when ended_ms is not null then ended_ms when expires_ms < ?1 then expires_ms"
        " else ?1 end where tenant_id = ?2",
        (now_ms, tenant_id),
    )
    write_settings(db, tenant_id, TenantSettings(tier=found.tenant.tier))
    db.execute(
        "update tenants set name = ?, status = 'suspended' where tenant_id = ?",
        (pseudonym, tenant_id),
    )
    return pseudonym
