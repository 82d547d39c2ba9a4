"""Shared scopes: named caches that workspaces of several tenants share, defined by the operator.

A scope has an owner, whose quota holds its blocks and who pays for their storage, and members:
"tenant/workspace", or "tenant" for all of a tenant's workspaces. A workspace is in at most one
scope. The module knows no namespace. `authentication` reads memberships, `declared_tenants`
reconciles declared scopes, and the admin API and the command line change the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from tenancy.accounts.keys import check_name
from tenancy.errors import BadName
from tenancy.storage.audit_log import Actor, record
from tenancy.storage.interface import Row, Store, Transaction
from tenancy.types import WallClock

SCOPES_MAX = 1_000
"""The most shared scopes of a database."""
MEMBERS_MAX = 10_000
"""The most members of all declared scopes together."""
ALL_WORKSPACES = ""
"""The workspace value of a member that means every workspace of its tenant."""


class ScopeTerms(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The owner and members that a scope shall have: one `[[tenancy.shared_scopes]]` table."""

    name: str
    owner: str
    members: tuple[str, ...] = ()


class ScopeRecord(Struct, frozen=True):
    """A shared scope in the database. `members` are sorted."""

    scope_id: int
    name: str
    owner_id: int
    owner: str
    members: tuple[str, ...]
    is_declared: bool
    created_ms: int


class Membership(Struct, frozen=True):
    """The scope that a workspace is in, and the scope's owner."""

    scope_id: int
    name: str
    owner_id: int


class ScopeChange(Struct, frozen=True):
    """A change that a reload made to a scope."""

    scope: str
    what: Literal["created", "adopted", "changed", "removed"]


# --- queries -------------------------------------------------------------------------------------


def list_scopes(store: Store) -> list[ScopeRecord]:
    """Return all shared scopes, by name. O(members)."""
    with store.snapshot() as db:
        return _scopes_in(db)


def find_scope(store: Store, name: str) -> ScopeRecord:
    """Return a shared scope by name. Raises BadName."""
    for scope in list_scopes(store):
        if scope.name == name:
            return scope
    raise _unknown_scope(name)


def memberships(store: Store, tenant_id: int | None = None) -> dict[int, dict[str, Membership]]:
    """Return memberships by tenant id and workspace, for one tenant or all. O(members read)."""
    of_one = "" if tenant_id is None else " where members.tenant_id = ?"
    rows = store.query(
        "select members.tenant_id, members.workspace, scopes.scope_id, scopes.name,"
        " scopes.owner_id from scope_members as members"
        f" join shared_scopes as scopes on scopes.scope_id = members.scope_id{of_one}",
        () if tenant_id is None else (tenant_id,),
    )
    found: dict[int, dict[str, Membership]] = {}
    for member_id, workspace, *scope in rows:
        found.setdefault(member_id, {})[workspace] = Membership(*scope)
    return found


# --- changes -------------------------------------------------------------------------------------


def set_scope(store: Store, clock: WallClock, terms: ScopeTerms, by: Actor) -> ScopeRecord:
    """Create a shared scope or replace its members, from the next request.

    With another owner it becomes a new scope, which begins empty. Raises BadName, with nothing
    changed.
    """
    check_scopes([terms])
    with store.change() as db:
        current = {scope.name: scope for scope in _scopes_in(db)}
        old = current.get(terms.name)
        if old is None and len(current) >= SCOPES_MAX:
            message = f"too many shared scopes: {len(current) + 1}; limit {SCOPES_MAX}"
            raise BadName("too_many_scopes", message)
        _check_not_declared(old)
        _write_scope(db, clock, terms, old, is_declared=False)
        _record(db, by, "shared_scope.set", old, terms.name)
    return find_scope(store, terms.name)


def remove_scope(store: Store, name: str, by: Actor) -> None:
    """Remove a shared scope, from the next request; each member goes back to its own cache. Raises
    BadName."""
    with store.change() as db:
        old = {scope.name: scope for scope in _scopes_in(db)}.get(name)
        if old is None:
            raise _unknown_scope(name)
        _check_not_declared(old)
        _record(db, by, "shared_scope.remove", old, "")
        _delete_scope(db, old)


def check_scopes(wanted: Sequence[ScopeTerms]) -> None:
    """Raise BadName for invalid terms; unknown tenants are not checked here."""
    if len(wanted) > SCOPES_MAX:
        raise BadName("bad_setting", f"too many shared scopes: {len(wanted)}; limit {SCOPES_MAX}")
    members = sum(len(one.members) for one in wanted)
    if members > MEMBERS_MAX:
        raise BadName(
            "bad_setting", f"too many members of shared scopes: {members}; limit {MEMBERS_MAX}"
        )
    seen: set[str] = set()
    taken: dict[str, str] = {}
    for one in wanted:
        check_name(one.name, "shared scope")
        check_name(one.owner, "tenant")
        if one.name in seen:
            raise BadName("name_taken", f"shared scope declared twice: {one.name!r}")
        seen.add(one.name)
        for member in one.members:
            tenant, workspace = _split_member(member)
            check_name(tenant, "tenant")
            if "/" in member:
                check_name(workspace, "workspace")
            if member in taken:
                raise _overlap(member, taken[member], one.name)
            taken[member] = one.name
    for member, scope in taken.items():
        tenant, workspace = _split_member(member)
        if workspace != ALL_WORKSPACES and tenant in taken:
            raise _overlap(member, taken[tenant], scope)


def scopes_differ(store: Store, wanted: Sequence[ScopeTerms]) -> bool:
    """Return whether the declared scopes in the database differ from `wanted`."""
    return _declared_terms(list_scopes(store)) != {one.name: _terms_of(one) for one in wanted}


def reconcile_scopes(
    db: Transaction, clock: WallClock, wanted: Sequence[ScopeTerms]
) -> list[ScopeChange]:
    """Reconcile declared scopes with the file, within the caller's transaction.

    Scopes that are no longer declared are removed; scopes made by the admin API or the command line
    stay. Raises BadName.
    """
    changes = []
    current = {scope.name: scope for scope in _scopes_in(db)}
    terms = {one.name: one for one in wanted}
    for name, scope in current.items():
        if scope.is_declared and name not in terms:
            _delete_scope(db, scope)
            changes.append(ScopeChange(name, "removed"))
    # Remove members first: a reload may move a member from one scope to another.
    altered = [one for _, one in sorted(terms.items()) if not _matches(current.get(one.name), one)]
    for one in altered:
        if one.name in current:
            number = current[one.name].scope_id
            db.execute("delete from scope_members where scope_id = ?", (number,))
    for one in altered:
        old = current.get(one.name)
        _write_scope(db, clock, one, old, is_declared=True)
        what: Literal["created", "adopted", "changed"] = "created"
        if old is not None:
            what = "changed" if old.is_declared else "adopted"
        changes.append(ScopeChange(one.name, what))
    return changes


def list_owned_scopes(db: Transaction, tenant_id: int) -> list[str]:
    """Return the names of a tenant's scopes, within the caller's transaction."""
    rows = db.rows("select name from shared_scopes where owner_id = ?", (tenant_id,))
    return [str(row[0]) for row in rows]


# --- details -------------------------------------------------------------------------------------


def _scopes_in(db: Transaction) -> list[ScopeRecord]:
    members: dict[int, list[str]] = {}
    for scope_id, tenant, workspace in db.rows(
        "select members.scope_id, tenants.name, members.workspace from scope_members as members"
        " join tenants on tenants.tenant_id = members.tenant_id",
    ):
        members.setdefault(scope_id, []).append(f"{tenant}/{workspace}" if workspace else tenant)
    rows: list[Row] = db.rows(
        "select scopes.scope_id, scopes.name, scopes.owner_id, tenants.name, scopes.is_declared,"
        " scopes.created_ms from shared_scopes as scopes"
        " join tenants on tenants.tenant_id = scopes.owner_id order by scopes.name",
    )
    return [
        ScopeRecord(
            scope_id=scope_id,
            name=name,
            owner_id=owner_id,
            owner=owner,
            members=tuple(sorted(members.get(scope_id, ()))),
            is_declared=bool(is_declared),
            created_ms=created_ms,
        )
        for scope_id, name, owner_id, owner, is_declared, created_ms in rows
    ]


def _write_scope(
    db: Transaction,
    clock: WallClock,
    terms: ScopeTerms,
    old: ScopeRecord | None,
    *,
    is_declared: bool,
) -> None:
    ids = _tenant_ids(db, [terms.owner, *(_split_member(member)[0] for member in terms.members)])
    if old is not None and old.owner_id != ids[terms.owner]:
        _delete_scope(db, old)
        old = None
    if old is None:
        db.execute(
            "insert into shared_scopes (name, owner_id, is_declared, created_ms)"
            " values (?, ?, ?, ?)",
            (terms.name, ids[terms.owner], is_declared, clock()),
        )
    else:
        db.execute(
            "update shared_scopes set is_declared = ? where scope_id = ?",
            (is_declared, old.scope_id),
        )
        db.execute("delete from scope_members where scope_id = ?", (old.scope_id,))
    ((scope_id,),) = db.rows("select scope_id from shared_scopes where name = ?", (terms.name,))
    for member in terms.members:
        tenant, workspace = _split_member(member)
        _check_no_overlap(db, ids[tenant], workspace, member, terms.name)
        db.execute(
            "insert into scope_members (tenant_id, workspace, scope_id) values (?, ?, ?)",
            (ids[tenant], workspace, scope_id),
        )


def _record(
    db: Transaction, by: Actor | None, action: str, old: ScopeRecord | None, name: str
) -> None:
    """Record a change of a scope; `name`: of the scope as it is now, or "" for none."""
    if by is None:
        return
    now = next((scope for scope in _scopes_in(db) if scope.name == name), None)
    one = now or old
    assert one is not None, "a scope was or is there"
    before, after = (None if scope is None else _audited(db, scope) for scope in (old, now))
    target = f"shared_scope:{one.scope_id}"
    record(db, by, action, target, tenant_id=one.owner_id, before=before, after=after)


def _audited(db: Transaction, scope: ScopeRecord) -> dict[str, object]:
    """Return a scope with its tenants by number."""
    members = [_split_member(member) for member in scope.members]
    ids = _tenant_ids(db, [tenant for tenant, _ in members])
    named = [
        f"{ids[tenant]}/{workspace}" if workspace else str(ids[tenant])
        for tenant, workspace in members
    ]
    return {"scope_id": scope.scope_id, "owner_id": scope.owner_id, "members": named}


def _delete_scope(db: Transaction, old: ScopeRecord) -> None:
    db.execute("delete from scope_members where scope_id = ?", (old.scope_id,))
    db.execute("delete from shared_scopes where scope_id = ?", (old.scope_id,))


def _check_no_overlap(
    db: Transaction, tenant_id: int, workspace: str, member: str, scope: str
) -> None:
    """Raise BadName if the workspace, or its whole tenant, is in another scope."""
    rows = db.rows(
        "select members.workspace, scopes.name from scope_members as members"
        " join shared_scopes as scopes on scopes.scope_id = members.scope_id"
        " where members.tenant_id = ?",
        (tenant_id,),
    )
    for taken, name in rows:
        if ALL_WORKSPACES in (workspace, taken) or taken == workspace:
            raise _overlap(member, str(name), scope)


def _check_not_declared(old: ScopeRecord | None) -> None:
    if old is not None and old.is_declared:
        raise BadName(
            "scope_declared",
            f"shared scope is declared in the configuration file: {old.name}; change it there and"
            " reload",
        )


def _tenant_ids(db: Transaction, names: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in dict.fromkeys(names):
        rows = db.rows("select tenant_id from tenants where name = ?", (name,))
        if not rows:
            raise BadName("tenant_unknown", f"unknown tenant: {name!r}")
        found[name] = int(rows[0][0])
    return found


def _declared_terms(scopes: Sequence[ScopeRecord]) -> Mapping[str, tuple[str, tuple[str, ...]]]:
    return {scope.name: _terms_of(scope) for scope in scopes if scope.is_declared}


def _matches(scope: ScopeRecord | None, terms: ScopeTerms) -> bool:
    return scope is not None and scope.is_declared and _terms_of(scope) == _terms_of(terms)


def _terms_of(one: ScopeRecord | ScopeTerms) -> tuple[str, tuple[str, ...]]:
    return one.owner, tuple(sorted(one.members))


def _split_member(member: str) -> tuple[str, str]:
    tenant, _, workspace = member.partition("/")
    return tenant, workspace


def _overlap(member: str, one: str, other: str) -> BadName:
    return BadName(
        "scope_overlap",
        f"member of two shared scopes: {member} in {one} and {other}; expected each workspace in"
        " at most one scope",
    )


def _unknown_scope(name: str) -> BadName:
    return BadName("scope_unknown", f"unknown shared scope: {name[:80]!r}")
