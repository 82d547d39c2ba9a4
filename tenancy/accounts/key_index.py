"""All keys in memory, indexed by digest.

The lookup by digest tells an attacker nothing about a key, and the digests are compared in constant
time; an unknown key takes the same work as a known one. The module changes no key and knows no
HTTP. `authentication` keeps the index up to date and queries it.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from functools import cache

from msgspec import Struct

from tenancy.accounts.keys import ADMIN, ADMIN_SCOPES, decode_limits, digest_of
from tenancy.errors import KeyRefused
from tenancy.storage.interface import Row, Store
from tenancy.types import CacheKeyMode, Limits, ToleranceMode


class KeyFacts(Struct, frozen=True):
    """The columns of a key that authentication needs.

    `tenant_id` is 0 for an administrator's key, which has the scope `admin` beside its own.
    """

    digest: bytes
    key_id: int
    tenant_id: int
    workspace: str
    expires_ms: int | None
    revoked_ms: int | None
    scopes: frozenset[str]
    limits: Limits
    line_id: int
    """The first key of its rotation chain, or its own id."""
    tolerance: ToleranceMode | None = None
    cache_key: CacheKeyMode | None = None


_NO_KEY = KeyFacts(bytes(32), 0, 0, "", None, None, frozenset(), Limits(), 0)
"""The facts that an unknown key is compared with. No known key has the digest of all zeros."""


class KeyIndex:
    """An index of all keys by digest. Belongs to one thread."""

    def __init__(self, keys: Iterable[KeyFacts]) -> None:
        self._by_digest: dict[bytes, KeyFacts] = {}
        self._digests: dict[int, bytes] = {}
        for facts in keys:
            self._put(facts)

    def __len__(self) -> int:
        return len(self._digests)

    def find(self, key: str, now_ms: int) -> KeyFacts:
        """Return the facts of a live key. O(1). Raises KeyRefused."""
        digest = digest_of(key)
        found = self._by_digest.get(digest, _NO_KEY)
        if not hmac.compare_digest(digest, found.digest):
            raise KeyRefused("key_unknown", "Unknown key.")
        whose = found.key_id, found.tenant_id
        if found.revoked_ms is not None:  # also if the clock was set back since
            raise KeyRefused("key_revoked", "This key has been revoked.", *whose)
        if found.expires_ms is not None and found.expires_ms <= now_ms:
            raise KeyRefused("key_expired", "This key has expired.", *whose)
        return found

    def replace(self, key_ids: Iterable[int], keys: Iterable[KeyFacts]) -> None:
        """Replace the facts of these key ids; ids without facts are removed. O(key ids)."""
        for key_id in key_ids:
            old_digest = self._digests.pop(key_id, None)
            if old_digest is not None:
                del self._by_digest[old_digest]
        for facts in keys:
            self._put(facts)

    def _put(self, facts: KeyFacts) -> None:
        self._by_digest[facts.digest] = facts
        self._digests[facts.key_id] = facts.digest


def load_keys(store: Store, key_ids: Sequence[int] | None = None) -> list[KeyFacts]:
    """Read the facts of these key ids, or of all keys. O(keys), about 5 us each. Raises
    StoreError."""
    if key_ids is None:
        return list(map(_facts_of, store.query(_FACTS)))
    if not key_ids:
        return []
    marks = ", ".join("?" * len(key_ids))
    return list(map(_facts_of, store.query(f"{_FACTS} where key_id in ({marks})", key_ids)))


_FACTS = (
    "select digest, key_id, coalesce(tenant_id, 0), workspace, expires_ms, revoked_ms, scopes,"
    " limits, coalesce(line_id, key_id), admin_scopes, tolerance,"
    " cache_key from keys"
)


@cache
def _scopes(text: str) -> frozenset[str]:
    """Parse a scope list. Cached: however many keys there are, few combinations exist."""
    return frozenset(text.split())


_ALL_ADMIN_SCOPES = frozenset(ADMIN_SCOPES)


def _facts_of(row: Row) -> KeyFacts:
    scopes = _scopes(row[6])
    if ADMIN in scopes:
        scopes |= _ALL_ADMIN_SCOPES if row[9] is None else _scopes(row[9])
    return KeyFacts(*(*row[:6], scopes, decode_limits(row[7]), row[8], *row[10:]))
