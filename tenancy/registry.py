"""Who there is: tenants with their policies, and the identity behind a key.

`Registry` keeps a snapshot in memory, so that authentication costs no query; it looks at the
database again when another process has written, at most every `REFRESH_S`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tenancy.errors import BadName, KeyRefused
from tenancy.keys import KeyRing, create_key, load_key_ring
from tenancy.store import Store
from tenancy.types import CachePolicy, Identity, Tenant, WallClock

REFRESH_S = 0.5
DEFAULT_TENANT = "default"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class Registry:
    """Tenants and keys of one store."""

    def __init__(self, store: Store, wall: WallClock, clock: Callable[[], float]) -> None:
        self._store = store
        self._wall = wall
        self._clock = clock
        self._looked_at_s = clock()
        self._load()

    def authenticate(self, key: str) -> Identity:
        """Who holds this key? Raises KeyRefused. About 5 us."""
        self._refresh()
        key_id, tenant_id, workspace = self._ring.find(key, self._wall())
        tenant, policy = self._tenants[tenant_id]
        if tenant.status != "active":
            raise KeyRefused("tenant_suspended", f"The tenant {tenant.name} is suspended.")
        return Identity(tenant, workspace, key_id, policy)

    def tenants(self) -> list[Tenant]:
        """All tenants, by name."""
        self._refresh()
        return sorted((t for t, _ in self._tenants.values()), key=lambda t: t.name)

    def _refresh(self) -> None:
        now_s = self._clock()
        if now_s - self._looked_at_s >= REFRESH_S:
            self._looked_at_s = now_s
            if self._store.changed():
                self._load()

    def _load(self) -> None:
        self._tenants = {t.tenant_id: (t, policy) for t, policy in list_tenants(self._store)}
        self._ring: KeyRing = load_key_ring(self._store)


def list_tenants(store: Store) -> list[tuple[Tenant, CachePolicy]]:
    """All tenants with their policies, by name."""
    rows = store.query(
        "select tenant_id, name, status, created_ms, floor_blocks, ceiling_blocks, weight, priority"
        " from tenants order by name"
    )
    return [(Tenant(*row[:4]), CachePolicy(*row[4:])) for row in rows]


def find_tenant(store: Store, name: str) -> tuple[Tenant, CachePolicy]:
    """One tenant. Raises BadName, naming those there are."""
    tenants = list_tenants(store)
    for tenant, policy in tenants:
        if tenant.name == name:
            return tenant, policy
    known = ", ".join(tenant.name for tenant, _ in tenants[:10]) or "none yet"
    raise BadName("tenant_unknown", f"there is no tenant {name!r} (there are: {known})")


def create_tenant(
    store: Store, clock: WallClock, name: str, policy: CachePolicy | None = None
) -> Tenant:
    """Make a tenant. Raises BadName if the name cannot be, or is taken."""
    policy = policy or CachePolicy()
    if not _NAME.fullmatch(name):
        raise BadName(
            "bad_name",
            f"{name!r} is no tenant name: 1 to 64 of a-z, 0-9, '.', '_' and '-', beginning with a"
            " letter or a digit",
        )
    _check(policy)
    with store.transaction() as db:
        if db.execute("select 1 from tenants where name = ?", (name,)).fetchall():
            raise BadName("name_taken", f"there is a tenant {name!r} already")
        db.execute(
            "insert into tenants"
            " (name, status, floor_blocks, ceiling_blocks, weight, priority, created_ms)"
            " values (?, 'active', ?, ?, ?, ?, ?)",
            (
                name,
                policy.floor_blocks,
                policy.ceiling_blocks,
                policy.weight,
                policy.priority,
                clock(),
            ),
        )
    return find_tenant(store, name)[0]


def set_policy(store: Store, name: str, policy: CachePolicy) -> None:
    """Change a tenant's share of cache and service; it holds from the next request."""
    tenant, _ = find_tenant(store, name)
    _check(policy)
    with store.transaction() as db:
        db.execute(
            "update tenants set floor_blocks = ?, ceiling_blocks = ?, weight = ?, priority = ?"
            " where tenant_id = ?",
            (
                policy.floor_blocks,
                policy.ceiling_blocks,
                policy.weight,
                policy.priority,
                tenant.tenant_id,
            ),
        )


def set_status(store: Store, name: str, status: str) -> None:
    """`suspended` or `active`: its keys stop or start working within a second."""
    tenant, _ = find_tenant(store, name)
    with store.transaction() as db:
        db.execute("update tenants set status = ? where tenant_id = ?", (status, tenant.tenant_id))


def bootstrap(store: Store, clock: WallClock) -> str | None:
    """On a store without tenants: make the default one and return its key."""
    if list_tenants(store):
        return None
    tenant = create_tenant(store, clock, DEFAULT_TENANT)
    return create_key(store, clock, tenant.tenant_id, label="made on first start")


def _check(policy: CachePolicy) -> None:
    ceiling = policy.ceiling_blocks
    if policy.floor_blocks < 0 or (ceiling is not None and ceiling < policy.floor_blocks):
        raise BadName(
            "bad_policy",
            f"a floor of {policy.floor_blocks} and a ceiling of {ceiling} blocks cannot be",
        )
    if not 0 < policy.weight <= 1e6:
        raise BadName("bad_policy", f"a weight of {policy.weight} is not between 0 and a million")
