"""Deletion of a tenant: all rows go, or all but its ledger rows, which stay under a pseudonym.

Ledger rows refer to the tenant's number forever and never change. Everything that identifies the
tenant, and everything it stored, is deleted; its name is free again. The module knows no engine:
the gateway erases the tenant's cache.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress

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
from tenancy.responses.conversations import forget_conversations
from tenancy.responses.stored_responses import forget_stored
from tenancy.storage.audit_log import Actor, forget_values, record
from tenancy.storage.interface import Store, Transaction
from tenancy.types import TenantSettings, WallClock

_PERSONAL = (
    *("scope_members", "written_prefixes", "stored_sums", "history_samples", "request_records"),
    *("request_causes", "findings", "prompt_origins", "webhook_deliveries", "request_users"),
)
"""Tables that lose a tenant's rows with it, even if its ledger rows stay."""
SWEPT_AT_ONCE = 2_000
"""Notes of users that one transaction deletes, so that other transactions wait only briefly."""


def delete_tenant(store: Store, clock: WallClock, name: str, by: Actor | None = None) -> str | None:
    """Delete a tenant with its keys, limits, budgets, memberships, cached contents, stored
    responses and conversations.

    Returns the pseudonym under which its ledger rows stay, or None if it has none; then its number
    is deleted too. Raises BadName while the tenant owns a shared scope, is declared, or has running
    requests. `by`: for the audit log, which keeps who changed the tenant and no value.
    """
    with store.snapshot() as db:
        tenant_id = _find_deletable(db, name).tenant.tenant_id
    _sweep_users(store, tenant_id)
    if not store.query("select 1 from ledger where tenant_id = ? limit 1", (tenant_id,)):
        with suppress(ConstraintBroken), store.change() as db:
            tenant_id = _find_deletable(db, name).tenant.tenant_id
            _forget_content(db, tenant_id)
            for table in (*_PERSONAL, "keys", "named_sums", "tenants"):
                db.execute(f"delete from {table} where tenant_id = ?", (tenant_id,))
            _record(db, by, tenant_id)
            return None
    with store.change() as db:  # rows of the ledger refer to the tenant
        found = _find_deletable(db, name)
        pseudonym = _pseudonymise(db, found, clock())
        _record(db, by, found.tenant.tenant_id)
        return pseudonym


def _sweep_users(store: Store, tenant_id: int) -> None:
    """Delete the tenant's notes of users: one for each of its requests, so in small
    transactions."""
    some = "select request_id from request_users where tenant_id = ? limit ?"
    sql = f"delete from request_users where request_id in ({some})"
    is_over = False
    while not is_over:
        with store.change() as db:
            is_over = db.execute(sql, (tenant_id, SWEPT_AT_ONCE)) < SWEPT_AT_ONCE


def _forget_content(db: Transaction, tenant_id: int) -> None:
    idempotency.forget(db, tenant_id)
    forget_stored(db, tenant_id)
    forget_conversations(db, tenant_id)


def _record(db: Transaction, by: Actor | None, tenant_id: int) -> None:
    forget_values(db, tenant_id)
    record(db, by, "tenant.delete", f"tenant:{tenant_id}", tenant_id=tenant_id)


def filter_deleted(store: Store, tenant_ids: set[int]) -> set[int]:
    """Return the ids that belong to deleted tenants, with ledger rows or without. O(ids)."""
    found = (one.tenant for one in read_tenant_records(store, sorted(tenant_ids)))
    return tenant_ids - {one.tenant_id for one in found if not is_pseudonym(one.name)}


def _find_deletable(db: Transaction, name: str) -> TenantRecord:
    found = find_tenant_in(db.rows, name)
    check_not_deleted(name)
    if found.tenant.is_declared:
        raise BadName(
            "tenant_declared",
            f"tenant is declared in the configuration file: {name}; remove it there and reload",
        )
    if owned := list_owned_scopes(db, found.tenant.tenant_id):
        raise BadName(
            "tenant_in_use", f"tenant owns the shared scope {owned[0]}: {name}; remove the scope"
        )
    if db.rows("select 1 from holds where tenant_id = ? limit 1", (found.tenant.tenant_id,)):
        raise BadName(
            "tenant_in_use",
            f"tenant has running requests: {name}; suspend it and delete it when they have ended",
        )
    return found


def _pseudonymise(db: Transaction, found: TenantRecord, now_ms: int) -> str:
    tenant_id, pseudonym = found.tenant.tenant_id, f"{PSEUDONYM_PREFIX}{found.tenant.tenant_id}"
    if db.rows("select 1 from tenants where name = ?", (pseudonym,)):
        raise BadName("name_taken", f"pseudonym is taken: {pseudonym}")
    _forget_content(db, tenant_id)
    for table in (*_PERSONAL, "budgets", "budget_windows"):
        db.execute(f"delete from {table} where tenant_id = ?", (tenant_id,))
    for key_id, digest in db.rows(
        "select key_id, digest from keys where tenant_id = ?", (tenant_id,)
    ):
        # Entries refer to the key's number. No text hashes to the digest of a digest.
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
