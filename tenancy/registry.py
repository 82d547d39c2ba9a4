"""Who there is: tenants with their settings, and the identity behind a key.

`Registry` keeps all of them in memory, so that authentication costs no query; at most every
`REFRESH_S` it looks whether tenants or keys have changed, in this process or another, and reads
those that have. It knows no HTTP and no engine; the middleware, the admin API and the command line
call it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress

import apsw
import msgspec
from msgspec import Struct, structs

from tenancy.errors import BadName, KeyRefused, StoreError
from tenancy.keys import (
    ADMIN,
    check_name,
    create_admin_key,
    create_key,
    load_key_ring,
    read_limits,
    write_limits,
)
from tenancy.limits import check_limits
from tenancy.shared_scopes import ALL, Membership, memberships, owned_by
from tenancy.store import Row, Store
from tenancy.types import (
    CachePolicy,
    Identity,
    Limits,
    SharedScope,
    Tenant,
    TenantSettings,
    WallClock,
)

REFRESH_S = 0.5
CHANGES_MAX = 500
"""As many at once are read one by one; where more have changed, everything is read again."""

DEFAULT_TENANT = "default"
BLOCKS_MAX = 2**40
PRIORITY_MAX = 1_000_000
WEIGHT_MAX = 1e6
CLASSES_MAX = 16
MADE_AT_FIRST = "made on first start"


class Registered(Struct, frozen=True):
    """A tenant with all that is set of it."""

    tenant: Tenant
    policy: CachePolicy
    limits: Limits

    @property
    def settings(self) -> TenantSettings:
        """The same in one level."""
        return TenantSettings(
            tier=self.tenant.tier, **structs.asdict(self.policy), **structs.asdict(self.limits)
        )


class Registry:
    """Tenants and keys of one store. Belongs to one thread."""

    def __init__(self, store: Store, wall: WallClock, clock: Callable[[], float]) -> None:
        """`wall` decides what has expired, `clock` (monotonic seconds) when to look again."""
        self._store = store
        self._wall = wall
        self._clock = clock
        self._looked_at_s = clock()
        self._version = 0
        self._load()

    def authenticate(self, key: str) -> Identity:
        """Which tenant holds this key? About 3 us. Raises KeyRefused."""
        self._refresh()
        facts = self._ring.find(key, self._wall())
        if ADMIN in facts.scopes:
            raise KeyRefused("scope_missing", "An administrator's key belongs to no tenant.")
        found = self._tenants.get(facts.tenant_id)
        if found is None:
            raise KeyRefused("key_unknown", "No such key.")
        if found.tenant.status != "active":
            raise KeyRefused("tenant_suspended", f"The tenant {found.tenant.name} is suspended.")
        return Identity(
            found.tenant,
            facts.workspace,
            facts.key_id,
            found.policy,
            facts.scopes,
            found.limits,
            facts.limits,
            self._scope_of(facts.tenant_id, facts.workspace),
        )

    def authenticate_admin(self, key: str) -> int:
        """The id of an administrator's key. About 3 us. Raises KeyRefused."""
        self._refresh()
        facts = self._ring.find(key, self._wall())
        if ADMIN not in facts.scopes:
            raise KeyRefused("scope_missing", "This needs an administrator's key.")
        return facts.key_id

    def look_again(self) -> None:
        """Something has been changed here: the next question sees it."""
        self._looked_at_s = -math.inf

    def _scope_of(self, tenant_id: int, workspace: str) -> SharedScope | None:
        """The scope that a workspace shares, while its owner is there to pay for it."""
        mine = self._memberships.get(tenant_id)
        found = mine.get(workspace, mine.get(ALL)) if mine else None
        owner = self._tenants.get(found.owner_id) if found else None
        if found is None or owner is None or owner.tenant.status != "active":
            return None
        return SharedScope(found.scope_id, found.name, found.owner_id, owner.policy)

    def _refresh(self) -> None:
        now_s = self._clock()
        if now_s - self._looked_at_s >= REFRESH_S:
            self._looked_at_s = now_s
            # While the file is being checked after an error the last snapshot stands; nothing can
            # be admitted then, since no hold can be written.
            with suppress(StoreError):
                if self._store.registry_version() != self._version:
                    self._follow()

    def _follow(self) -> None:
        """Read again what has changed since, or everything where that is not known any more."""
        version = self._store.registry_version()
        rows = self._store.query(
            "select version, kind, id from registry_changes where version > ? order by version"
            " limit ?",
            (self._version, CHANGES_MAX + 1),
        )
        if not rows or len(rows) > CHANGES_MAX:  # many more are kept: what is there is whole
            self._load()
            return
        changed: dict[str, list[int]] = {"key": [], "tenant": []}
        for _, kind, number in rows:
            changed[kind].append(number)
        self._ring.refresh(self._store, sorted(set(changed["key"])))
        for tenant_id in sorted(set(changed["tenant"])):
            self._tenants.pop(tenant_id, None)
            for row in self._store.query(f"{_TENANTS} where tenant_id = ?", (tenant_id,)):
                self._tenants[tenant_id] = _registered(row)
            self._memberships.pop(tenant_id, None)
            self._memberships |= memberships(self._store, tenant_id)
        self._version = max(version, rows[-1][0])

    def _load(self) -> None:
        """The version first, keys before tenants: what changes meanwhile is looked at again, and
        a key's tenant is there unless both have just been deleted."""
        version = self._store.registry_version()
        ring = load_key_ring(self._store)
        self._memberships: dict[int, dict[str, Membership]] = memberships(self._store)
        self._tenants = {one.tenant.tenant_id: one for one in list_registered(self._store)}
        self._ring, self._version = ring, version


# --- looking -------------------------------------------------------------------------------------

_TENANTS = (
    "select tenant_id, name, status, created_ms, tier, is_declared, floor_blocks, ceiling_blocks,"
    " weight, priority, classes, promised_blocks_max, limits from tenants"
)


def list_registered(store: Store) -> list[Registered]:
    """All tenants with all that is set of them, by name."""
    return [_registered(row) for row in store.query(f"{_TENANTS} order by name")]


def list_tenants(store: Store) -> list[tuple[Tenant, CachePolicy]]:
    """All tenants with their policies, by name."""
    return [(one.tenant, one.policy) for one in list_registered(store)]


def find_registered(store: Store, name: str) -> Registered:
    """One tenant. Raises BadName, naming those there are."""
    # A name that no tenant can have may be no text that SQLite can take either.
    plain = name.encode(errors="replace").decode()
    for row in store.query(f"{_TENANTS} where name = ?", (plain,)):
        return _registered(row)
    raise _unknown(name, [row[0] for row in store.query("select name from tenants order by name")])


def find_tenant(store: Store, name: str) -> tuple[Tenant, CachePolicy]:
    """One tenant and its policy. Raises BadName, naming those there are."""
    found = find_registered(store, name)
    return found.tenant, found.policy


# --- changing ------------------------------------------------------------------------------------


def create_tenant(
    store: Store,
    clock: WallClock,
    name: str,
    policy: CachePolicy | None = None,
    *,
    tier: str = "standard",
    limits: Limits | None = None,
) -> Tenant:
    """Make a tenant. Raises BadName if the name cannot be, or is taken, or a setting cannot be."""
    made = Registered(
        Tenant(0, name, "active", clock(), tier), policy or CachePolicy(), limits or Limits()
    )
    with store.change() as db:
        insert_tenant(db, made)
    return find_tenant(store, name)[0]


def change_tenant(store: Store, name: str, changes: Mapping[str, object]) -> Registered:
    """Set what is named, by the fields of `TenantSettings`, from the next request; the rest stays,
    whoever else is changing it. Raises BadName, with nothing changed."""
    with store.change() as db:
        found = _find_in(db, name)
        if found.tenant.is_declared:
            raise BadName(
                "tenant_declared",
                f"{name} is declared in the configuration file; change it there and reload",
            )
        write_settings(db, found.tenant.tenant_id, changed(found.settings, changes))
    return find_registered(store, name)


def set_status(store: Store, name: str, status: str) -> None:
    """`suspended` or `active`: its keys stop or start working within a second. Raises BadName."""
    assert status in ("active", "suspended")
    tenant, _ = find_tenant(store, name)
    with store.change() as db:
        db.execute("update tenants set status = ? where tenant_id = ?", (status, tenant.tenant_id))


def delete_tenant(store: Store, name: str) -> None:
    """Take back one that never used anything, with its keys. Raises BadName.

    What is in the ledger refers to its tenant for ever, so that one can only be suspended.
    """
    with store.change() as db:
        found = _find_in(db, name)
        if found.tenant.is_declared:
            raise BadName(
                "tenant_declared",
                f"{name} is declared in the configuration file; take it out there and reload",
            )
        if owned := owned_by(db, found.tenant.tenant_id):
            raise BadName("tenant_in_use", f"{name} owns the shared scope {owned[0]}; remove it")
        try:
            db.execute("delete from scope_members where tenant_id = ?", (found.tenant.tenant_id,))
            db.execute("delete from keys where tenant_id = ?", (found.tenant.tenant_id,))
            db.execute("delete from tenants where tenant_id = ?", (found.tenant.tenant_id,))
        except apsw.ConstraintError as error:
            raise BadName(
                "tenant_in_use",
                f"{name} has entries in the ledger, which are kept for ever; suspend it instead",
            ) from error


def bootstrap(store: Store, clock: WallClock) -> str | None:
    """On a store without tenants: make the default one and return its key."""
    if list_tenants(store):
        return None
    tenant = create_tenant(store, clock, DEFAULT_TENANT)
    return create_key(store, clock, tenant.tenant_id, label=MADE_AT_FIRST)


def bootstrap_admin(store: Store, clock: WallClock) -> str | None:
    """On a store that never had an administrator's key: make one and return it."""
    if store.query("select 1 from keys where tenant_id is null limit 1"):
        return None
    return create_admin_key(store, clock, label=MADE_AT_FIRST)


def changed(settings: TenantSettings, changes: Mapping[str, object]) -> TenantSettings:
    """The same but for what is named. Raises BadName for what is no setting, or cannot be one."""
    try:
        return msgspec.convert({**structs.asdict(settings), **changes}, TenantSettings)
    except msgspec.ValidationError as error:
        raise BadName("bad_setting", str(error).replace("`$.", "`")) from error


def insert_tenant(db: apsw.Connection, made: Registered) -> None:
    """Within the caller's transaction. Raises BadName."""
    tenant = made.tenant
    check_name(tenant.name, "tenant")
    check_settings(made.settings)
    if db.execute("select 1 from tenants where name = ?", (tenant.name,)).fetchall():
        raise BadName("name_taken", f"there is a tenant {tenant.name!r} already")
    db.execute(
        "insert into tenants (name, status, created_ms, is_declared) values (?, ?, ?, ?)",
        (tenant.name, tenant.status, tenant.created_ms, tenant.is_declared),
    )
    write_settings(db, int(db.last_insert_rowid()), made.settings)


def write_settings(db: apsw.Connection, tenant_id: int, settings: TenantSettings) -> None:
    """Within the caller's transaction. Raises BadName."""
    check_settings(settings)
    db.execute(
        "update tenants set tier = ?, floor_blocks = ?, ceiling_blocks = ?, weight = ?,"
        " priority = ?, classes = ?, promised_blocks_max = ?, limits = ? where tenant_id = ?",
        (
            settings.tier,
            settings.floor_blocks,
            settings.ceiling_blocks,
            settings.weight,
            settings.priority,
            None if settings.classes is None else " ".join(settings.classes),
            settings.promised_blocks_max,
            write_limits(settings.limits),
            tenant_id,
        ),
    )


def check_settings(settings: TenantSettings) -> None:
    """Raises BadName for what cannot be, saying what came and what would be right."""
    check_name(settings.tier, "tier")
    check_limits(settings.limits)
    floor, ceiling = settings.floor_blocks, settings.ceiling_blocks
    promised = settings.promised_blocks_max
    if not 0 <= floor <= BLOCKS_MAX:
        raise BadName("bad_policy", f"a floor of {floor} blocks is not between 0 and {BLOCKS_MAX}")
    if ceiling is not None and not 1 <= ceiling <= BLOCKS_MAX:
        raise BadName(
            "bad_policy", f"a ceiling of {ceiling} blocks is not between 1 and {BLOCKS_MAX}"
        )
    if ceiling is not None and ceiling < floor:
        raise BadName("bad_policy", f"a ceiling of {ceiling} blocks is below the floor of {floor}")
    if promised is not None and not 0 <= promised <= BLOCKS_MAX:
        raise BadName(
            "bad_policy", f"{promised} promised blocks are not between 0 and {BLOCKS_MAX}"
        )
    if not 0 < settings.weight <= WEIGHT_MAX:
        raise BadName("bad_policy", f"a weight of {settings.weight} is not above 0 and at most 1e6")
    if abs(settings.priority) > PRIORITY_MAX:
        raise BadName(
            "bad_policy", f"a priority of {settings.priority} is beyond {PRIORITY_MAX} either way"
        )
    if len(settings.classes or ()) > CLASSES_MAX:
        raise BadName("bad_policy", f"more than {CLASSES_MAX} retention classes")
    for name in settings.classes or ():
        check_name(name, "retention class")


def _find_in(db: apsw.Connection, name: str) -> Registered:
    """As `find_registered`, within a transaction: what it says is so until that ends."""
    plain = name.encode(errors="replace").decode()
    for row in db.execute(f"{_TENANTS} where name = ?", (plain,)).fetchall():
        return _registered(row)
    names = [row[0] for row in db.execute("select name from tenants order by name")]
    raise _unknown(name, names)


def _registered(row: Row) -> Registered:
    classes = None if row[10] is None else tuple(row[10].split())
    return Registered(
        Tenant(*(*row[:5], bool(row[5]))),
        CachePolicy(*(*row[6:10], classes, row[11])),
        read_limits(row[12]),
    )


def _unknown(name: str, names: list[str]) -> BadName:
    known = ", ".join(names[:10]) or "none yet"
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return BadName("tenant_unknown", f"there is no tenant {name[:80]!r} (there are: {known}{more})")
