"""Who a key is, found in memory.

A lookup finds the entry by the digest, which tells an attacker nothing about the key, and compares
it in constant time; a key that does not exist takes the same work. It changes no key and knows no
HTTP; `identities` keeps it up to date and asks it.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from functools import cache

from msgspec import Struct

from tenancy.accounts.keys import decode_limits, digest_of
from tenancy.errors import KeyRefused
from tenancy.storage.interface import Row, Store
from tenancy.types import Limits


class KeyFacts(Struct, frozen=True):
    """What authentication needs of a key. An administrator's has the tenant id 0. `line_id`: the
    first key of those that it was rotated from, or its own."""

    digest: bytes
    key_id: int
    tenant_id: int
    workspace: str
    expires_ms: int | None
    revoked_ms: int | None
    scopes: frozenset[str]
    limits: Limits
    line_id: int


_NO_KEY = KeyFacts(bytes(32), 0, 0, "", None, None, frozenset(), Limits(), 0)
"""What a key that does not exist is compared with. Nothing is known whose digest is all zeros."""


class KeyIndex:
    """Every key, found by its digest. Belongs to one thread."""

    def __init__(self, keys: Iterable[KeyFacts]) -> None:
        self._by_digest: dict[bytes, KeyFacts] = {}
        self._digests: dict[int, bytes] = {}
        for facts in keys:
            self._put(facts)

    def __len__(self) -> int:
        return len(self._digests)

    def find(self, key: str, now_ms: int) -> KeyFacts:
        """The facts of a live key. O(1). Raises KeyRefused."""
        digest = digest_of(key)
        found = self._by_digest.get(digest, _NO_KEY)
        if not hmac.compare_digest(digest, found.digest):
            raise KeyRefused("key_unknown", "No such key.")
        if found.revoked_ms is not None and found.revoked_ms <= now_ms:
            raise KeyRefused("key_revoked", "This key has been revoked.")
        if found.expires_ms is not None and found.expires_ms <= now_ms:
            raise KeyRefused("key_expired", "This key has expired.")
        return found

    def replace(self, key_ids: Iterable[int], keys: Iterable[KeyFacts]) -> None:
        """These are now so; those of the ids that are not among them go. O(key ids)."""
        for key_id in key_ids:
            gone = self._digests.pop(key_id, None)
            if gone is not None:
                del self._by_digest[gone]
        for facts in keys:
            self._put(facts)

    def _put(self, facts: KeyFacts) -> None:
        self._by_digest[facts.digest] = facts
        self._digests[facts.key_id] = facts.digest


def load_keys(store: Store, key_ids: Sequence[int] | None = None) -> list[KeyFacts]:
    """Those of these ids that there are, or all. O(keys), about 5 us each. Raises StoreError."""
    if key_ids is None:
        return list(map(_facts_of, store.query(_FACTS)))
    if not key_ids:
        return []
    marks = ", ".join("?" * len(key_ids))
    return list(map(_facts_of, store.query(f"{_FACTS} where key_id in ({marks})", key_ids)))


_FACTS = (
    "select digest, key_id, coalesce(tenant_id, 0), workspace, expires_ms, revoked_ms, scopes,"
    " limits, coalesce(line_id, key_id) from keys"
)


@cache
def _scopes(text: str) -> frozenset[str]:
    """A few sets, however many keys: there are eight."""
    return frozenset(text.split())


def _facts_of(row: Row) -> KeyFacts:
    return KeyFacts(*(*row[:6], _scopes(row[6]), decode_limits(row[7]), row[8]))
