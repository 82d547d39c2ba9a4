"""Authentication: the identity behind an API key.

`KeyAuthenticator` keeps all tenants and keys in memory, so authentication costs no query. At most
every `REFRESH_S` it checks whether this or another process changed any, and reads the changed ones.
For a database that is not local a thread checks, so no request waits for a round trip. The module
knows no HTTP and no engine; the gateway's middleware authenticates by it, and code that changes a
tenant or key calls `refresh_now`. `read_now` is for a key that is unknown so far.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress

from msgspec import Struct

from tenancy.accounts.key_index import KeyFacts, KeyIndex, load_keys
from tenancy.accounts.keys import ADMIN
from tenancy.accounts.shared_scopes import ALL_WORKSPACES, Membership, memberships
from tenancy.accounts.tenants import (
    TenantRecord,
    floor_blocks_of,
    list_tenant_records,
    read_tenant_records,
)
from tenancy.errors import KeyRefused, StoreError
from tenancy.storage.interface import Store
from tenancy.types import Identity, SharedScope, WallClock

REFRESH_S = 1 / 64
"""Seconds between checks of a local database for changed tenants and keys, of about 12 us each."""
WATCH_S = 0.5
"""Seconds between the thread's checks of another database: round trips."""
CHANGES_MAX = 500
"""Up to this many changed ids are read one by one; beyond it everything is read again."""


Memberships = dict[int, dict[str, Membership]]
"""Memberships in shared scopes, by tenant id and workspace."""


class Administrator(Struct, frozen=True):
    """What an administrator's key proves: its id, and its scopes among `keys.ADMIN_SCOPES`."""

    key_id: int
    scopes: frozenset[str]


class KeyAuthenticator:
    """The tenants and keys of one store, in memory. Belongs to one thread."""

    def __init__(self, store: Store, wall: WallClock, clock: Callable[[], float]) -> None:
        """Read all tenants and keys.

        `wall` decides which keys have expired; `clock` (monotonic seconds) paces the checks for
        changes. `active_tenants`: the number of tenants that are not suspended.
        """
        self._store = store
        self._wall = wall
        self._clock = clock
        self._checked_at_s = clock()
        self._keys = KeyIndex(())
        self._tenants: dict[int, TenantRecord] = {}
        self._memberships: Memberships = {}
        self._identities: dict[int, Identity] = {}  # of keys used since the last change
        self._version = 0
        self._changed: dict[int, TenantRecord] = {}
        self._floor_blocks: int | None = None
        self.active_tenants = 0
        self._take(_read_all(store))
        self._watcher: RegistryWatcher | None = None

    def authenticate(self, key: str) -> Identity:
        """Return the identity that a tenant's key proves. About 3 us. Raises KeyRefused."""
        self._refresh()
        facts = self._keys.find(key, self._wall())
        known = self._identities.get(facts.key_id)
        if known is None:
            known = self._identities[facts.key_id] = self._identity_of(facts)
        return known

    def _identity_of(self, facts: KeyFacts) -> Identity:
        if ADMIN in facts.scopes:
            message = (
                "An administrator's key does not belong to a tenant; expected a tenant's key, as"
                " `trunkline key create --tenant NAME` makes one."
            )
            raise KeyRefused("scope_missing", message)
        found = self._tenants.get(facts.tenant_id)
        if found is None:
            raise KeyRefused("key_unknown", "Unknown key.")
        if found.tenant.status != "active":
            message = f"Tenant is suspended: {found.tenant.name}."
            raise KeyRefused("tenant_suspended", message, facts.key_id, facts.tenant_id)
        return Identity(
            found.tenant,
            facts.workspace,
            facts.key_id,
            facts.line_id,
            found.policy,
            facts.scopes,
            found.limits,
            facts.limits,
            self._scope_of(facts.tenant_id, facts.workspace),
            facts.tolerance,
            facts.cache_key,
        )

    def authenticate_admin(self, key: str) -> Administrator:
        """Return the rights of an administrator's key. About 3 us. Raises KeyRefused."""
        self._refresh()
        facts = self._keys.find(key, self._wall())
        if ADMIN not in facts.scopes:
            message = (
                "This is a tenant's key; expected an administrator's, such as the one in admin.key"
                " in the data directory, or one of `trunkline key create --admin`."
            )
            raise KeyRefused("scope_missing", message)
        return Administrator(facts.key_id, facts.scopes - {ADMIN})

    def take_changed(self) -> list[TenantRecord]:
        """Return the tenants that were added or changed since the last call; at first, all."""
        self._refresh()
        changed, self._changed = self._changed, {}
        return list(changed.values())

    def tenant(self, tenant_id: int) -> TenantRecord | None:
        """Return a tenant as of the last check, or None."""
        return self._tenants.get(tenant_id)

    def floor_blocks(self) -> int:
        """Return the sum of all floors, in blocks. O(tenants) after a change."""
        self._refresh()
        if self._floor_blocks is None:
            self._floor_blocks = sum(map(floor_blocks_of, self._tenants.values()))
        return self._floor_blocks

    def _scope_of(self, tenant_id: int, workspace: str) -> SharedScope | None:
        """Return the workspace's shared scope, if its owner is active, or None."""
        members = self._memberships.get(tenant_id)
        found = members.get(workspace, members.get(ALL_WORKSPACES)) if members else None
        owner = self._tenants.get(found.owner_id) if found else None
        if found is None or owner is None or owner.tenant.status != "active":
            return None
        return SharedScope(found.scope_id, found.name, found.owner_id, owner.policy)

    def refresh_now(self) -> None:
        """Check for changes at the next call, after a change by this process.

        With a watcher thread, the change is visible after its next round trip.
        """
        self._checked_at_s = -math.inf
        if self._watcher is not None:
            self._watcher.wake()

    def read_now(self) -> Future[None]:
        """Read the changes up to this moment; the result is done when the next call sees them, or
        when the database could not be read. Without a watcher thread it is done at once."""
        if self._watcher is not None:
            return self._watcher.read_now()
        self._checked_at_s = -math.inf
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def start_watching(self) -> None:
        """Check for changes in a thread from now on, until `close`."""
        assert self._watcher is None, "one watcher is enough"
        self._watcher = RegistryWatcher(self._store, self._version)

    def close(self) -> None:
        """Stop the watcher thread. Safe to call twice."""
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None

    def _refresh(self) -> None:
        if self._watcher is not None:
            for update in self._watcher.drain():
                self._take(update)
            return
        now_s = self._clock()
        if now_s - self._checked_at_s >= REFRESH_S:
            self._checked_at_s = now_s
            # While the file is checked after an error, the last snapshot stays in use. No request
            # is admitted then, because no hold can be written.
            with suppress(StoreError):
                changed = _read_update(self._store, self._version)
                if changed is not None:
                    self._take(changed)

    def _take(self, update: _RegistryUpdate) -> None:
        self._identities.clear()
        self._floor_blocks = None
        if update.changed is None:
            self._keys = KeyIndex(update.keys)
            self._tenants = {one.tenant.tenant_id: one for one in update.tenants}
            self._memberships = update.memberships
        else:
            key_ids, tenant_ids = update.changed
            self._keys.replace(key_ids, update.keys)
            for tenant_id in tenant_ids:
                self._tenants.pop(tenant_id, None)
                self._memberships.pop(tenant_id, None)
            self._tenants.update({one.tenant.tenant_id: one for one in update.tenants})
            self._memberships.update(update.memberships)
        records = self._tenants.values()
        self.active_tenants = sum(one.tenant.status == "active" for one in records)
        self._changed |= {one.tenant.tenant_id: one for one in update.tenants}
        self._version = update.version


class _RegistryUpdate(Struct, frozen=True):
    """The registry at a version: the changed keys and tenants, or all of them."""

    version: int
    keys: list[KeyFacts]
    tenants: list[TenantRecord]
    memberships: Memberships
    changed: tuple[list[int], list[int]] | None = None


def _read_update(store: Store, known: int) -> _RegistryUpdate | None:
    """Read the changes since version `known`; everything if they are not recorded any more.

    Returns None if nothing has changed. Raises StoreError.
    """
    version = store.registry_version()
    if version == known:
        return None
    rows = store.query(
        "select version, kind, id from registry_changes where version > ? order by version limit ?",
        (known, CHANGES_MAX + 1),
    )
    if not rows or len(rows) > CHANGES_MAX:  # the database records many more changes than this
        return _read_all(store)
    changed: dict[str, set[int]] = {"key": set(), "tenant": set()}
    for _, kind, number in rows:
        changed[kind].add(number)
    key_ids, tenant_ids = sorted(changed["key"]), sorted(changed["tenant"])
    keys = load_keys(store, key_ids)
    tenants = read_tenant_records(store, tenant_ids)
    members: Memberships = {}
    for tenant_id in tenant_ids:
        members |= memberships(store, tenant_id)
    return _RegistryUpdate(rows[-1][0], keys, tenants, members, (key_ids, tenant_ids))


def _read_all(store: Store) -> _RegistryUpdate:
    """Read everything.

    The version comes first and keys before tenants: a concurrent change is read again at the next
    check, and a key's tenant is present unless both were just deleted.
    """
    version = store.registry_version()
    keys = load_keys(store)
    members = memberships(store)
    return _RegistryUpdate(version, keys, list_tenant_records(store), members)


class RegistryWatcher:
    """A thread that reads changes every `WATCH_S` and when it is woken."""

    def __init__(self, store: Store, version: int) -> None:
        """Start the thread. `version`: the version that the caller has."""
        self._store = store
        self._version = version
        self._updates: deque[_RegistryUpdate] = deque()
        self._asked: deque[Future[None]] = deque()
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._main, name="registry", daemon=True)
        self._thread.start()

    def read_now(self) -> Future[None]:
        """Return a result that is done after a check that begins later than this call."""
        asked: Future[None] = Future()
        self._asked.append(asked)
        self._wake.set()
        return asked

    def wake(self) -> None:
        """Check now, without waiting for the rest of the period."""
        self._wake.set()

    def drain(self) -> Iterator[_RegistryUpdate]:
        """Yield the updates that were read and not taken yet, in order."""
        while self._updates:
            yield self._updates.popleft()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._is_closed = True
        self._wake.set()
        self._thread.join()

    def _main(self) -> None:
        while not self._is_closed:
            self._wake.wait(WATCH_S)
            self._wake.clear()
            asked = [self._asked.popleft() for _ in range(len(self._asked))]
            # While the server is unreachable, the last snapshot stays in use.
            with suppress(StoreError):
                if (update := _read_update(self._store, self._version)) is not None:
                    self._version = update.version
                    self._updates.append(update)
            for one in asked:
                if one.set_running_or_notify_cancel():  # false if the asking request has gone
                    one.set_result(None)
