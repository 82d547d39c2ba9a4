"""The audit log: who changed what, from which values to which, when, and from where.

Functions that change tenants, keys, prices, budgets or caches take an `Actor` and record the change
in their own transaction, so that no change is durable without its record. A record names its target
by number, never by a name or a secret: a deleted tenant leaves no name here. Rows never change, and
are deleted after a configured number of days. The admin API, the command line and the configuration
file are the actors; changes without an actor, such as those of tests, are not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec
from msgspec import Struct, structs

from tenancy.errors import BadName
from tenancy.storage.interface import Store, Transaction
from tenancy.types import format_utc

PAGE_MAX = 1_000
"""The most records of one page."""
ACTIONS = (
    *("tenant.create", "tenant.change", "tenant.delete", "tenant.declare"),
    *("key.create", "key.change", "key.rotate", "key.revoke", "key.declare"),
    *("shared_scope.set", "shared_scope.remove", "shared_scope.declare"),
    *("rate_card.add", "budget.set", "ledger.adjust", "ledger.close", "ledger.restore"),
    *("cache.erase", "fleet.forget", "webhook.test"),
)
"""Every action that is recorded."""
_ENCODE = msgspec.json.Encoder(order="sorted").encode

ActorKind = Literal["admin_key", "command", "file", "trusted_header"]


class Actor(Struct, frozen=True):
    """The party that makes a change, and the time."""

    kind: ActorKind
    actor_id: str
    """The number of the administrator's key, the user of the command, or the user that a trusted
    proxy named."""
    at_ms: int
    address: str = ""
    """The address of the administrator's client, or of the proxy."""


class AuditRecord(Struct, frozen=True):
    """One change. `before`, `after`: the values that differ, as JSON values; None if there was,
    or is, nothing."""

    audit_id: int
    at_ms: int
    actor: ActorKind
    actor_id: str
    address: str
    action: str
    tenant_id: int | None
    target: str
    """Its kind and number, such as `key:7`."""
    before: Mapping[str, object] | None
    after: Mapping[str, object] | None


class AuditFilter(Struct, frozen=True):
    """Which records to return; a field that is None restricts nothing. `since_ms` <= time <
    `until_ms`."""

    since_ms: int | None = None
    until_ms: int | None = None
    tenant_id: int | None = None
    actor: str | None = None
    actor_id: str | None = None
    action: str | None = None
    """A whole action, or its part before the point."""


Values = Struct | Mapping[str, object] | None
"""Values of a target before or after a change."""


def record(
    db: Transaction,
    by: Actor | None,
    action: str,
    target: str,
    *,
    tenant_id: int | None = None,
    before: Values = None,
    after: Values = None,
) -> None:
    """Record a change within the caller's transaction; nothing without an actor.

    Of values before and after only those that differ are kept; a change that changed nothing is not
    recorded. Values hold no secrets and no names of tenants.
    """
    if by is None:
        return
    assert action in ACTIONS, f"an unknown action: {action}"
    was, now = _plain(before), _plain(after)
    if was is not None and now is not None:
        differing = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        if not differing:
            return
        was = {name: was[name] for name in differing if name in was}
        now = {name: now[name] for name in differing if name in now}
    db.execute(
        "insert into audit_log (at_ms, actor, actor_id, address, action, tenant_id, target,"
        " before_values, after_values) values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(by.at_ms, by.kind, by.actor_id, by.address, action, tenant_id, target),
            *(None if values is None else _ENCODE(values).decode() for values in (was, now)),
        ),
    )


def forget_values(db: Transaction, tenant_id: int) -> None:
    """Delete the values of a deleted tenant's records: labels may name persons. The records of who
    did what stay. Within the caller's transaction."""
    db.execute(
        "update audit_log set before_values = null, after_values = null where tenant_id = ?",
        (tenant_id,),
    )


def list_changes(
    store: Store, wanted: AuditFilter, *, before_id: int | None = None, limit: int = 100
) -> list[AuditRecord]:
    """Return records, newest first. `before_id`: only older ones, the last id of the page before.

    Raises BadName for an unknown action or a limit out of range, and StoreError.
    """
    if not 1 <= limit <= PAGE_MAX:
        raise BadName("bad_setting", f"limit out of range: {limit}; expected 1 to {PAGE_MAX}")
    action = wanted.action
    if action is not None and action not in {*ACTIONS, *(one.split(".")[0] for one in ACTIONS)}:
        raise BadName(
            "bad_setting", f"unknown action: {action[:80]!r}; expected one of {', '.join(ACTIONS)}"
        )
    like = None if action is None else action if "." in action else f"{action}.%"
    conditions = {
        "at_ms >= ?": wanted.since_ms,
        "at_ms < ?": wanted.until_ms,
        "tenant_id = ?": wanted.tenant_id,
        "actor = ?": wanted.actor,
        "actor_id = ?": wanted.actor_id,
        "action like ?": like,
        "audit_id < ?": before_id,
    }
    given = {sql: value for sql, value in conditions.items() if value is not None}
    where = f" where {' and '.join(given)}" if given else ""
    rows = store.query(
        "select audit_id, at_ms, actor, actor_id, address, action, tenant_id, target,"
        f" before_values, after_values from audit_log{where} order by audit_id desc limit ?",
        (*given.values(), limit),
    )
    return [AuditRecord(*(*row[:8], _decoded(row[8]), _decoded(row[9]))) for row in rows]


def all_changes(store: Store, wanted: AuditFilter) -> Iterator[AuditRecord]:
    """Yield all records, newest first, in pages. Raises as `list_changes`."""
    last: int | None = None
    while page := list_changes(store, wanted, before_id=last, limit=PAGE_MAX):
        yield from page
        last = page[-1].audit_id


def delete_old_changes(store: Store, before_ms: int) -> int:
    """Delete records made before an instant; returns their number. Raises StoreError."""
    if not store.query("select 1 from audit_log where at_ms < ? limit 1", (before_ms,)):
        return 0
    with store.change() as db:
        return db.execute("delete from audit_log where at_ms < ?", (before_ms,))


def change_row(one: AuditRecord, names: Mapping[int, str]) -> dict[str, object]:
    """Return a record as the admin API and the command line show it. `names`: of tenants by id."""
    return {
        "audit_id": one.audit_id,
        "at": format_utc(one.at_ms),
        "actor": one.actor,
        "actor_id": one.actor_id,
        "address": one.address or None,
        "action": one.action,
        "tenant": None if one.tenant_id is None else names.get(one.tenant_id),
        "tenant_id": one.tenant_id,
        "target": one.target,
        "before": one.before,
        "after": one.after,
    }


def _plain(values: Values) -> dict[str, object] | None:
    """Return the values as JSON values, by name."""
    if values is None:
        return None
    plain = structs.asdict(values) if isinstance(values, Struct) else dict(values)
    built: dict[str, object] = msgspec.to_builtins(plain)
    return {name: list(one) if isinstance(one, tuple) else one for name, one in built.items()}


def _decoded(text: str | None) -> dict[str, object] | None:
    return None if text is None else msgspec.json.decode(text, type=dict[str, object])
