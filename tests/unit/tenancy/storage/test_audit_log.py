"""Every change of an actor has its record, in the same transaction, without names and secrets."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs

from tenancy.accounting.backups import mark_restored
from tenancy.accounting.closing import close_days
from tenancy.accounting.webhook_outbox import WebhookEvent, put_event
from tenancy.accounts import keys, tenants
from tenancy.accounts.declared_tenants import DeclaredTenant, reconcile
from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.erasure_receipts import ErasureReceipt, forget_replica, write_receipt
from tenancy.accounts.shared_scopes import ScopeTerms, remove_scope, set_scope
from tenancy.errors import BadName, ConstraintBroken
from tenancy.ledger.adjustments import Adjustment, adjust
from tenancy.ledger.ledger import Ledger
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.audit_log import (
    ACTIONS,
    Actor,
    AuditFilter,
    AuditRecord,
    all_changes,
    delete_old_changes,
    list_changes,
)
from tenancy.storage.interface import Store
from tenancy.types import DAY_MS
from tests.unit.tenancy.conftest import Wall, used

BY = Actor("admin_key", "7", 5_000, "10.0.0.9")
EVERYTHING = AuditFilter()


def latest(store: Store) -> AuditRecord:
    return list_changes(store, EVERYTHING, limit=1)[0]


def change_everything(store: Store, wall: Wall) -> list[str]:
    """Make one change of each action. Returns the secrets of the keys."""
    tenants.create_tenant(store, wall, "ada", by=BY)
    tenants.create_tenant(store, wall, "bob", by=BY)
    tenants.change_tenant(store, "ada", {"weight": 2.0}, by=BY)
    secrets = [
        keys.create_key(store, wall, 1, label="laptop", by=BY),
        keys.create_admin_key(store, wall, scopes=["read"], by=BY),
    ]
    keys.change_key(store, "1", label="phone", by=BY)
    secrets.append(keys.rotate_key(store, wall, "1", 60_000, BY)[0])
    keys.revoke_key(store, wall, "2", BY)
    set_scope(store, wall, ScopeTerms(name="ours", owner="ada", members=("bob/lab",)), BY)
    remove_scope(store, "ours", BY)
    add_card(store, wall, RateCard("std", input=1_000_000), BY)
    set_budget(store, Budget(1, "day", hard_micros=10**9), BY)
    write_receipt(store, ErasureReceipt("r", 1, 7, 1, "workspace lab", 2, "digest", 3), BY)
    forget_replica(store, "e1", BY)
    ledger = Ledger(store, wall)
    ledger.settle(structs.replace(used("r1", wall()), model="m")).result(60)
    ledger.close()
    adjust(store, wall, Adjustment("x", "r1", -9, "an outage"), BY)
    wall.ms += 2 * DAY_MS
    close_days(store, wall, "1970-01-02", despite_counts=True, by=BY)
    mark_restored(store, wall, BY)
    declared = [DeclaredTenant(name="cid")]
    reconcile(store, wall, declared, [ScopeTerms(name="filed", owner="cid")], BY)
    tenants.create_tenant(store, wall, "dan", by=BY)
    delete_tenant(store, wall, "dan", BY)
    put_event(store, WebhookEvent("1", "webhook.test", {}), ["ops"], wall(), BY)
    return secrets


def test_every_action_is_recorded_once(store: Store, wall: Wall) -> None:
    """With who, when and from where; no secret, and no name of a tenant in a target."""
    secrets = change_everything(store, wall)
    found = list(all_changes(store, EVERYTHING))
    text = msgspec.json.encode(found).decode()

    assert {one.action for one in found} == set(ACTIONS) - {"key.declare"}
    assert {(one.actor, one.actor_id, one.at_ms, one.address) for one in found} == {
        ("admin_key", "7", 5_000, "10.0.0.9")
    }
    assert all(":" in one.target for one in found)
    assert not any(secret in text or secret[:11] in text for secret in secrets)
    for name in ("ada", "bob", "cid", "dan"):
        assert f'"{name}' not in text


def test_values_are_those_that_differ(store: Store, wall: Wall) -> None:
    """Before and after, as they were."""
    tenants.create_tenant(store, wall, "ada", by=BY)
    made = latest(store)
    tenants.change_tenant(store, "ada", {"weight": 2.0}, "suspended", by=BY)
    changed = latest(store)
    tenants.change_tenant(store, "ada", {"weight": 2.0}, by=BY)

    assert made.before is None
    assert made.after is not None
    assert made.after["weight"] == 1.0
    assert changed.before == {"weight": 1.0, "status": "active"}
    assert changed.after == {"weight": 2.0, "status": "suspended"}
    assert latest(store) == changed, "a change that changes nothing has no record"


def test_budget_is_recorded_with_its_amounts(store: Store, wall: Wall) -> None:
    tenants.create_tenant(store, wall, "ada")
    set_budget(store, Budget(1, "day", hard_micros=5), BY)
    set_budget(store, Budget(1, "day"), BY)
    removed = latest(store)

    assert removed.target == "budget:1/0/day"
    assert (removed.before, removed.after) == ({"hard_micros": 5}, {"hard_micros": None})


def test_refused_change_has_no_record(store: Store, wall: Wall) -> None:
    """The record is in the transaction of the change."""
    tenants.create_tenant(store, wall, "ada", by=BY)

    def refuse(_: object) -> None:
        raise BadName("floor_too_large", "no room")

    with pytest.raises(BadName):
        tenants.change_tenant(store, "ada", {"weight": 2.0}, check=refuse, by=BY)
    with pytest.raises(BadName):
        tenants.create_tenant(store, wall, "ada", by=BY)

    assert len(list_changes(store, EVERYTHING)) == 1


def test_change_without_an_actor_has_no_record(store: Store, wall: Wall) -> None:
    tenants.create_tenant(store, wall, "ada")

    assert list_changes(store, EVERYTHING) == []


def test_filters_and_pages(store: Store, wall: Wall) -> None:
    """By time, tenant, actor and action; pages follow each other without a gap."""
    change_everything(store, wall)
    tenants.set_status(store, "bob", "suspended", Actor("command", "root", 9_000))
    everything = list(all_changes(store, EVERYTHING))
    pages = []
    last: int | None = None
    while page := list_changes(store, EVERYTHING, before_id=last, limit=3):
        pages += page
        last = page[-1].audit_id

    assert pages == everything
    assert {one.action for one in all_changes(store, AuditFilter(action="key"))} == {
        one for one in ACTIONS if one.startswith("key.") and one != "key.declare"
    }
    assert len(list(all_changes(store, AuditFilter(action="key.revoke")))) == 1
    assert [one.actor_id for one in all_changes(store, AuditFilter(since_ms=9_000))] == ["root"]
    assert {one.actor for one in all_changes(store, AuditFilter(until_ms=9_000))} == {"admin_key"}
    assert {one.tenant_id for one in all_changes(store, AuditFilter(tenant_id=2))} == {2}
    assert len(list(all_changes(store, AuditFilter(actor="command", actor_id="root")))) == 1
    for wrong in (AuditFilter(action="key.%"), AuditFilter(action="")):
        with pytest.raises(BadName):
            list_changes(store, wrong)


def test_deleted_tenant_leaves_no_values(store: Store, wall: Wall) -> None:
    """Labels may name persons; who changed what stays."""
    tenants.create_tenant(store, wall, "ada")
    keys.create_key(store, wall, 1, label="Ada's laptop", by=BY)
    ledger = Ledger(store, wall)
    ledger.settle(used("r1", wall())).result(60)
    ledger.close()
    delete_tenant(store, wall, "ada", BY)
    found = list_changes(store, EVERYTHING)

    assert [one.action for one in found] == ["tenant.delete", "key.create"]
    assert all(one.before is None and one.after is None for one in found)


def test_records_never_change_and_end_after_their_time(store: Store, wall: Wall) -> None:
    """Neither by a program nor by a slip."""
    tenants.create_tenant(store, wall, "ada", by=BY)
    tenants.set_status(store, "ada", "suspended", Actor("command", "root", 9_000))
    texts = ("actor_id", "address", "action", "target", "before_values", "after_values")
    changes = [
        *("audit_id = 77", "at_ms = 1", "tenant_id = null", "actor = 'file'"),
        *(f"{column} = '{{}}'" for column in texts),
    ]
    for change in changes:
        with pytest.raises(ConstraintBroken, match="never changes"), store.change() as db:
            db.execute(f"update audit_log set {change} where audit_id = 1")

    assert delete_old_changes(store, 5_000) == 0
    assert delete_old_changes(store, 9_000) == 1
    assert [one.actor for one in list_changes(store, EVERYTHING)] == ["command"]
