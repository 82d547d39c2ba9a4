"""Who there is: tenants with their policies, and the identity behind a key.

`Registry` keeps a snapshot in memory, so that authentication costs no query; at most every
`REFRESH_S` it looks whether tenants or keys have changed, in this process or another. It knows no
HTTP and no engine; the middleware and the command line call it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from tenancy.errors import BadName, KeyRefused, StoreError
from tenancy.keys import check_name, create_key, load_key_ring
from tenancy.store import Store
from tenancy.types import CachePolicy, Identity, Tenant, WallClock

REFRESH_S = 0.5
DEFAULT_TENANT = "default"
BLOCKS_MAX = 2**40
PRIORITY_MAX = 1_000_000
WEIGHT_MAX = 1e6


class Registry:
    """Tenants and keys of one store. Belongs to one thread."""

    def __init__(self, store: Store, wall: WallClock, clock: Callable[[], float]) -> None:
        """`wall` decides what has expired, `clock` (monotonic seconds) when to look again."""
        self._store = store
        self._wall = wall
        self._clock = clock
        self._looked_at_s = clock()
        self._load()

    def authenticate(self, key: str) -> Identity:
        """Who holds this key? About 3 us. Raises KeyRefused."""
        self._refresh()
        facts = self._ring.find(key, self._wall())
        tenant, policy = self._tenants[facts.tenant_id]
        if tenant.status != "active":
            raise KeyRefused("tenant_suspended", f"The tenant {tenant.name} is suspended.")
        return Identity(tenant, facts.workspace, facts.key_id, policy)

    def _refresh(self) -> None:
        now_s = self._clock()
        if now_s - self._looked_at_s >= REFRESH_S:
            self._looked_at_s = now_s
            # While the file is being checked after an error the last snapshot stands; nothing can
            # be admitted then, since no hold can be written.
            with suppress(StoreError):
                if self._store.registry_version() != self._version:
                    self._load()

    def _load(self) -> None:
        """The version first, keys before tenants: what changes meanwhile is looked at again, and
        a key's tenant is always there."""
        version = self._store.registry_version()
        ring = load_key_ring(self._store)
        self._tenants = {t.tenant_id: (t, policy) for t, policy in list_tenants(self._store)}
        self._ring, self._version = ring, version


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
    more = f" and {len(tenants) - 10} more" if len(tenants) > 10 else ""
    raise BadName("tenant_unknown", f"there is no tenant {name[:80]!r} (there are: {known}{more})")


def create_tenant(
    store: Store, clock: WallClock, name: str, policy: CachePolicy | None = None
) -> Tenant:
    """Make a tenant. Raises BadName if the name cannot be, or is taken."""
    policy = policy or CachePolicy()
    check_name(name, "tenant")
    _check(policy)
    shares = (policy.floor_blocks, policy.ceiling_blocks, policy.weight, policy.priority)
    with store.change() as db:
        if db.execute("select 1 from tenants where name = ?", (name,)).fetchall():
            raise BadName("name_taken", f"there is a tenant {name!r} already")
        db.execute(
            "insert into tenants"
            " (name, status, floor_blocks, ceiling_blocks, weight, priority, created_ms)"
            " values (?, 'active', ?, ?, ?, ?, ?)",
            (name, *shares, clock()),
        )
    return find_tenant(store, name)[0]


def set_policy(store: Store, name: str, policy: CachePolicy) -> None:
    """Change a tenant's share of cache and service, from the next request. Raises BadName."""
    tenant, _ = find_tenant(store, name)
    _check(policy)
    shares = (policy.floor_blocks, policy.ceiling_blocks, policy.weight, policy.priority)
    with store.change() as db:
        db.execute(
            "update tenants set floor_blocks = ?, ceiling_blocks = ?, weight = ?, priority = ?"
            " where tenant_id = ?",
            (*shares, tenant.tenant_id),
        )


def set_status(store: Store, name: str, status: str) -> None:
    """`suspended` or `active`: its keys stop or start working within a second. Raises BadName."""
    assert status in ("active", "suspended")
    tenant, _ = find_tenant(store, name)
    with store.change() as db:
        db.execute("update tenants set status = ? where tenant_id = ?", (status, tenant.tenant_id))


def bootstrap(store: Store, clock: WallClock) -> str | None:
    """On a store without tenants: make the default one and return its key."""
    if list_tenants(store):
        return None
    tenant = create_tenant(store, clock, DEFAULT_TENANT)
    return create_key(store, clock, tenant.tenant_id, label="made on first start")


def _check(policy: CachePolicy) -> None:
    floor, ceiling = policy.floor_blocks, policy.ceiling_blocks
    if not 0 <= floor <= BLOCKS_MAX:
        raise BadName("bad_policy", f"a floor of {floor} blocks is not between 0 and {BLOCKS_MAX}")
    if ceiling is not None and not 1 <= ceiling <= BLOCKS_MAX:
        raise BadName(
            "bad_policy", f"a ceiling of {ceiling} blocks is not between 1 and {BLOCKS_MAX}"
        )
    if ceiling is not None and ceiling < floor:
        raise BadName("bad_policy", f"a ceiling of {ceiling} blocks is below the floor of {floor}")
    if not 0 < policy.weight <= WEIGHT_MAX:
        raise BadName("bad_policy", f"a weight of {policy.weight} is not above 0 and at most 1e6")
    if abs(policy.priority) > PRIORITY_MAX:
        raise BadName(
            "bad_policy", f"a priority of {policy.priority} is beyond {PRIORITY_MAX} either way"
        )
