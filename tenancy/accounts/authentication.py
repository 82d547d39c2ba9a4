"""Who is asking: the identity behind a key.

`KeyAuthenticator` keeps all tenants and keys in memory, so that authentication costs no query; at
most every `REFRESH_S` it looks whether any have changed, in this process or another, and reads
those that have. Where the database is not near, a thread looks, and nobody who asks waits for it.
It knows no HTTP and no engine; the middleware asks, and whoever changes something says so.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
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

REFRESH_S = 0.5
CHANGES_MAX = 500
"""As many at once are read one by one; where more have changed, everything is read again."""


Memberships = dict[int, dict[str, Membership]]
"""By tenant and workspace."""


class KeyAuthenticator:
    """Tenants and keys of one store. Belongs to one thread."""

    def __init__(self, store: Store, wall: WallClock, clock: Callable[[], float]) -> None:
        """`wall` decides what has expired, `clock` (monotonic seconds) when to look again."""
        self._store = store
        self._wall = wall
        self._clock = clock
        self._looked_at_s = clock()
        self._ring = KeyIndex(())
        self._tenants: dict[int, TenantRecord] = {}
        self._memberships: Memberships = {}
        self._identities: dict[int, Identity] = {}  # of keys that were used since the last change
        self._version = 0
        self._changed: dict[int, TenantRecord] = {}
        self._floor_blocks: int | None = None
        self._take(_read_all(store))
        self._watch: RegistryWatcher | None = None

    def authenticate(self, key: str) -> Identity:
        """Which tenant holds this key? About 3 us. Raises KeyRefused."""
        self._refresh()
        facts = self._ring.find(key, self._wall())
        known = self._identities.get(facts.key_id)
        if known is None:
            known = self._identities[facts.key_id] = self._identity_of(facts)
        return known

    def _identity_of(self, facts: KeyFacts) -> Identity:
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
            facts.line_id,
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

    def take_changed(self) -> list[TenantRecord]:
        """Tenants that have come or changed since the last call; at first, all."""
        self._refresh()
        changed, self._changed = self._changed, {}
        return list(changed.values())

    def tenant(self, tenant_id: int) -> TenantRecord | None:
        """One that there is, as of the last look."""
        return self._tenants.get(tenant_id)

    def floor_blocks(self) -> int:
        """What all floors together ask for. O(tenants) after a change."""
        self._refresh()
        if self._floor_blocks is None:
            self._floor_blocks = sum(map(floor_blocks_of, self._tenants.values()))
        return self._floor_blocks

    def _scope_of(self, tenant_id: int, workspace: str) -> SharedScope | None:
        """The scope that a workspace shares, while its owner is there to pay for it."""
        mine = self._memberships.get(tenant_id)
        found = mine.get(workspace, mine.get(ALL_WORKSPACES)) if mine else None
        owner = self._tenants.get(found.owner_id) if found else None
        if found is None or owner is None or owner.tenant.status != "active":
            return None
        return SharedScope(found.scope_id, found.name, found.owner_id, owner.policy)

    def look_again(self) -> None:
        """Something has been changed here: the next question sees it, or those after the next
        round trip where a thread looks."""
        self._looked_at_s = -math.inf
        if self._watch is not None:
            self._watch.look_now()

    def watch(self) -> None:
        """From now on a thread looks, until `close`."""
        assert self._watch is None, "one is enough"
        self._watch = RegistryWatcher(self._store, self._version)

    def close(self) -> None:
        """Watch no more. Safe to call twice."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _refresh(self) -> None:
        if self._watch is not None:
            for news in self._watch.taken():
                self._take(news)
            return
        now_s = self._clock()
        if now_s - self._looked_at_s >= REFRESH_S:
            self._looked_at_s = now_s
            # While the file is being checked after an error the last snapshot stands; nothing can
            # be admitted then, since no hold can be written.
            with suppress(StoreError):
                since = _read_update(self._store, self._version)
                if since is not None:
                    self._take(since)

    def _take(self, news: _RegistryUpdate) -> None:
        self._identities.clear()
        self._floor_blocks = None
        if news.changed is None:
            self._ring = KeyIndex(news.keys)
            self._tenants = {one.tenant.tenant_id: one for one in news.tenants}
            self._memberships = news.memberships
        else:
            key_ids, tenant_ids = news.changed
            self._ring.replace(key_ids, news.keys)
            for tenant_id in tenant_ids:
                self._tenants.pop(tenant_id, None)
                self._memberships.pop(tenant_id, None)
            self._tenants.update({one.tenant.tenant_id: one for one in news.tenants})
            self._memberships.update(news.memberships)
        self._changed |= {one.tenant.tenant_id: one for one in news.tenants}
        self._version = news.version


class _RegistryUpdate(Struct, frozen=True):
    """What there is at a version: of the ids of keys and tenants that changed, or all of it."""

    version: int
    keys: list[KeyFacts]
    tenants: list[TenantRecord]
    memberships: Memberships
    changed: tuple[list[int], list[int]] | None = None


def _read_update(store: Store, known: int) -> _RegistryUpdate | None:
    """What has changed since a version, or everything where that is not known any more; None:
    nothing. Raises StoreError."""
    version = store.registry_version()
    if version == known:
        return None
    rows = store.query(
        "select version, kind, id from registry_changes where version > ? order by version limit ?",
        (known, CHANGES_MAX + 1),
    )
    if not rows or len(rows) > CHANGES_MAX:  # many more are kept: what is there is whole
        return _read_all(store)
    changed: dict[str, set[int]] = {"key": set(), "tenant": set()}
    for _, kind, number in rows:
        changed[kind].add(number)
    key_ids, tenant_ids = sorted(changed["key"]), sorted(changed["tenant"])
    keys = load_keys(store, key_ids)
    tenants = read_tenant_records(store, tenant_ids)
    mine: Memberships = {}
    for tenant_id in tenant_ids:
        mine |= memberships(store, tenant_id)
    return _RegistryUpdate(max(version, rows[-1][0]), keys, tenants, mine, (key_ids, tenant_ids))


def _read_all(store: Store) -> _RegistryUpdate:
    """The version first, keys before tenants: what changes meanwhile is looked at again, and a
    key's tenant is there unless both have just been deleted."""
    version = store.registry_version()
    keys = load_keys(store)
    mine = memberships(store)
    return _RegistryUpdate(version, keys, list_tenant_records(store), mine)


class RegistryWatcher:
    """A thread that reads what has changed, every `REFRESH_S` and when it is told to."""

    def __init__(self, store: Store, version: int) -> None:
        """`version`: what is known."""
        self._store = store
        self._version = version
        self._news: deque[_RegistryUpdate] = deque()
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._main, name="registry", daemon=True)
        self._thread.start()

    def look_now(self) -> None:
        """Not after the rest of the wait."""
        self._wake.set()

    def taken(self) -> Iterator[_RegistryUpdate]:
        """What it has read that was not taken yet, in order."""
        while self._news:
            yield self._news.popleft()

    def close(self) -> None:
        """Look no more."""
        self._is_closed = True
        self._wake.set()
        self._thread.join()

    def _main(self) -> None:
        while not self._is_closed:
            self._wake.wait(REFRESH_S)
            self._wake.clear()
            # While the server is away the last that was read stands, as for a file.
            with suppress(StoreError):
                if (news := _read_update(self._store, self._version)) is not None:
                    self._version = news.version
                    self._news.append(news)
