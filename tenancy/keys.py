"""Keys: made once, shown once, kept as a digest.

A key is `tl-` and 43 signs of 256 random bits. It is stored as its SHA-256: a slow hash protects
guessable secrets, and nobody guesses 256 bits. Looking one up compares digests in constant time,
and takes the same work for a key that does not exist.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from msgspec import Struct

from tenancy.errors import BadName, KeyRefused
from tenancy.store import Store
from tenancy.types import WallClock

PREFIX = "tl-"
SHOWN_SIGNS = 8
_NOBODY = (bytes(32), 0, 0, "", None, None)


class Key(Struct, frozen=True):
    """A key as lists show it: `shown` is its beginning, never more."""

    key_id: int
    tenant: str
    workspace: str
    label: str
    shown: str
    created_ms: int
    expires_ms: int | None
    revoked_ms: int | None


class KeyRing(Struct, frozen=True):
    """Every key by digest, as authentication needs it: a snapshot, replaced whole."""

    by_digest: dict[bytes, tuple[bytes, int, int, str, int | None, int | None]]
    """By the first eight bytes: they find the entry, the comparison of all 32 decides."""

    def find(self, key: str, now_ms: int) -> tuple[int, int, str]:
        """(key id, tenant id, workspace) of a live key. Raises KeyRefused."""
        digest = digest_of(key)
        found = self.by_digest.get(digest[:8], _NOBODY)
        stored, key_id, tenant_id, workspace, expires_ms, revoked_ms = found
        if not hmac.compare_digest(digest, stored):
            raise KeyRefused("key_unknown", "No such key.")
        if revoked_ms is not None and revoked_ms <= now_ms:
            raise KeyRefused("key_revoked", "This key has been revoked.")
        if expires_ms is not None and expires_ms <= now_ms:
            raise KeyRefused("key_expired", "This key has expired.")
        return key_id, tenant_id, workspace


def digest_of(key: str) -> bytes:
    """What is stored of a key."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def load_key_ring(store: Store) -> KeyRing:
    """A fresh snapshot of all keys."""
    rows = store.query(
        "select digest, key_id, tenant_id, workspace, expires_ms, revoked_ms from keys"
    )
    return KeyRing({bytes(row[0])[:8]: (bytes(row[0]), *row[1:]) for row in rows})


def create_key(
    store: Store,
    clock: WallClock,
    tenant_id: int,
    *,
    workspace: str = "default",
    label: str = "",
    lives_ms: int | None = None,
) -> str:
    """Make a key and return it: the only time anybody sees it."""
    key = PREFIX + secrets.token_urlsafe(32)
    now_ms = clock()
    expires_ms = None if lives_ms is None else now_ms + lives_ms
    with store.transaction() as db:
        db.execute(
            "insert into keys (tenant_id, workspace, label, digest, shown, created_ms, expires_ms)"
            " values (?, ?, ?, ?, ?, ?, ?)",
            (
                tenant_id,
                workspace,
                label,
                digest_of(key),
                key[: len(PREFIX) + SHOWN_SIGNS],
                now_ms,
                expires_ms,
            ),
        )
    return key


def list_keys(store: Store, tenant: str | None = None) -> list[Key]:
    """All keys, or a tenant's, oldest first."""
    rows = store.query(
        "select key_id, name, workspace, label, shown, keys.created_ms, expires_ms, revoked_ms"
        " from keys join tenants using (tenant_id) where ?1 is null or name = ?1 order by key_id",
        (tenant,),
    )
    return [Key(*row) for row in rows]


def revoke_key(store: Store, clock: WallClock, which: str) -> Key:
    """Revoke by id or by the beginning that lists show. Raises BadName if that is not one key."""
    beginning = which.rstrip("…").rstrip(".")
    found = [
        key
        for key in list_keys(store)
        if which == str(key.key_id) or (beginning and key.shown == beginning[: len(key.shown)])
    ]
    if len(found) != 1:
        what = "no key" if not found else f"{len(found)} keys"
        raise BadName("key_unknown", f"{what} by that id; `trunkline key list` shows them")
    with store.transaction() as db:
        db.execute(
            "update keys set revoked_ms = ? where key_id = ? and revoked_ms is null",
            (clock(), found[0].key_id),
        )
    return next(key for key in list_keys(store) if key.key_id == found[0].key_id)
