"""Keys: made once, shown once, kept as a digest.

A key is `tl-` and 43 signs of base 62: 256 random bits. It is stored as its SHA-256. A slow hash
(argon2) protects secrets that people choose and others can guess; nobody guesses 256 bits, and a
slow hash on each request would be a way to wear the server out. A lookup finds the entry by the
first bytes of the digest, which tell an attacker nothing about the key, and compares the whole in
constant time; a key that does not exist takes the same work. It knows no HTTP; `registry` and the
command line call it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string

from msgspec import Struct

from tenancy.errors import BadName, KeyRefused
from tenancy.store import Store
from tenancy.types import WallClock

PREFIX = "tl-"
SHOWN_SIGNS = 8
LIFE_MS_MAX = 100 * 366 * 86_400_000
LABEL_SIGNS_MAX = 200
_ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
_SIGNS = 43
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


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


class KeyFacts(Struct, frozen=True):
    """What authentication needs of a key."""

    digest: bytes
    key_id: int
    tenant_id: int
    workspace: str
    expires_ms: int | None
    revoked_ms: int | None


_NOBODY = KeyFacts(bytes(32), 0, 0, "", None, None)
"""What a key that does not exist is compared with. Nothing is known whose digest is all zeros."""


class KeyRing(Struct, frozen=True):
    """Every key, found by the first eight bytes of its digest: a snapshot, replaced whole."""

    by_digest: dict[bytes, KeyFacts]

    def find(self, key: str, now_ms: int) -> KeyFacts:
        """The facts of a live key. O(1). Raises KeyRefused."""
        digest = digest_of(key)
        found = self.by_digest.get(digest[:8], _NOBODY)
        if not hmac.compare_digest(digest, found.digest):
            raise KeyRefused("key_unknown", "No such key.")
        if found.revoked_ms is not None and found.revoked_ms <= now_ms:
            raise KeyRefused("key_revoked", "This key has been revoked.")
        if found.expires_ms is not None and found.expires_ms <= now_ms:
            raise KeyRefused("key_expired", "This key has expired.")
        return found


def digest_of(key: str) -> bytes:
    """What is stored of a key."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def load_key_ring(store: Store) -> KeyRing:
    """A fresh snapshot of all keys. O(keys)."""
    rows = store.query(
        "select digest, key_id, tenant_id, workspace, expires_ms, revoked_ms from keys"
    )
    return KeyRing({row[0][:8]: KeyFacts(*row) for row in rows})


def create_key(
    store: Store,
    clock: WallClock,
    tenant_id: int,
    *,
    workspace: str = "default",
    label: str = "",
    lives_ms: int | None = None,
) -> str:
    """Make a key and return it: the only time anybody sees it.

    Raises BadName for a workspace, a label or a life that cannot be, and an unknown tenant.
    """
    check_name(workspace, "workspace")
    if len(label) > LABEL_SIGNS_MAX or not label.isprintable():
        raise BadName("bad_label", f"a label is printable and has at most {LABEL_SIGNS_MAX} signs")
    if lives_ms is not None and not 0 < lives_ms <= LIFE_MS_MAX:
        raise BadName("bad_time", "a key lives for between a millisecond and 100 years")
    key = PREFIX + "".join(secrets.choice(_ALPHABET) for _ in range(_SIGNS))
    now_ms = clock()
    expires_ms = None if lives_ms is None else now_ms + lives_ms
    shown = key[: len(PREFIX) + SHOWN_SIGNS]
    with store.change() as db:
        if not db.execute("select 1 from tenants where tenant_id = ?", (tenant_id,)).fetchall():
            raise BadName("tenant_unknown", f"there is no tenant with the id {tenant_id}")
        db.execute(
            "insert into keys (tenant_id, workspace, label, digest, shown, created_ms, expires_ms)"
            " values (?, ?, ?, ?, ?, ?, ?)",
            (tenant_id, workspace, label, digest_of(key), shown, now_ms, expires_ms),
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
    """Revoke by id or by the beginning that lists show; revoking again changes nothing.

    Raises BadName if that is not exactly one key.
    """
    beginning = which.rstrip("….")[: len(PREFIX) + SHOWN_SIGNS]
    found = [key for key in list_keys(store) if which == str(key.key_id) or key.shown == beginning]
    if len(found) != 1:
        what = "no key has" if not found else f"{len(found)} keys have"
        raise BadName(
            "key_unknown", f"{what} that id or beginning; `trunkline key list` shows them"
        )
    with store.change() as db:
        db.execute(
            "update keys set revoked_ms = ? where key_id = ? and revoked_ms is null",
            (clock(), found[0].key_id),
        )
    return next(key for key in list_keys(store) if key.key_id == found[0].key_id)


def check_name(name: str, what: str) -> None:
    """Raises BadName for what cannot be a tenant's or a workspace's name."""
    if not _NAME.fullmatch(name):
        raise BadName(
            "bad_name",
            f"{name[:80]!r} is no {what} name: 1 to 64 of a-z, 0-9, '.', '_' and '-', beginning"
            " with a letter or a digit",
        )
