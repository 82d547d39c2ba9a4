"""Keys that the configuration file declares, reconciled within the caller's transaction.

A declared key is identified by its tenant and label; the file contains its SHA-256, never the key.
Another digest under the same label is a rotation without grace: the old key is revoked and the new
one continues its budget. A key is revoked if its label is removed. A digest that any other key has
or had is refused, so a revoked key stays revoked. When the file no longer names a tenant, its keys
and settings stay as they are: the tenant is suspended, and operators may change its keys again. The
module reads no file; `declared_tenants` calls it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from tenancy.accounts.keys import (
    DIGEST_PREFIX,
    LIFE_MS_MAX,
    SCOPES,
    SHOWN_CHARS,
    check_label,
    check_name,
    encode_limits,
    encode_scopes,
)
from tenancy.errors import BadName
from tenancy.limits import check_limits
from tenancy.storage.interface import Row, Store, Transaction
from tenancy.types import CacheKeyMode, Limits, ToleranceMode, WallClock

KEYS_DECLARED_MAX = 10_000
"""The most keys that a configuration file may declare."""
_DIGEST = re.compile("[0-9a-fA-F]{64}")


class DeclaredKey(Limits, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[[tenants.keys]]` table: the settings of `trunkline key create`, with limits inlined.

    `tolerance`, `cache_key`: None leaves it to the server.
    """

    label: str
    sha256: str = ""
    """The digest of the whole key, in hexadecimal."""
    file: str = ""
    """Alternatively, the file from which the gateway reads the key."""
    workspace: str = "default"
    scopes: tuple[str, ...] = SCOPES
    expires: Annotated[datetime, Meta(tz=True)] | None = None
    tolerance: ToleranceMode | None = None
    cache_key: CacheKeyMode | None = None

    @property
    def limits(self) -> Limits:
        """The fields of `Limits`."""
        return msgspec.convert(self, Limits, from_attributes=True)


class KeyChange(Struct, frozen=True):
    """A change that a reload made to a key; `revoked` means that the file no longer declares it."""

    tenant: str
    label: str
    key_id: int
    what: Literal["created", "changed", "replaced", "revoked"]


class _Terms(Struct, frozen=True):
    """A declared key's columns in the database."""

    digest: bytes
    workspace: str
    scopes: str
    expires_ms: int | None
    limits: str
    tolerance: ToleranceMode | None
    cache_key: CacheKeyMode | None


_KeyPath = tuple[str, str]
"""A tenant's name and a key's label."""

DeclaredKeys = Mapping[str, Sequence[DeclaredKey]]
"""Declared keys by the name of every declared tenant."""


def check_keys(declared: DeclaredKeys) -> None:
    """Raise BadName for invalid declarations, before any change.

    No message contains a digest, because a key may be in its place by mistake.
    """
    count = sum(map(len, declared.values()))
    if count > KEYS_DECLARED_MAX:
        raise BadName("bad_setting", f"too many declared keys: {count}; limit {KEYS_DECLARED_MAX}")
    labels: set[_KeyPath] = set()
    digests: dict[str, _KeyPath] = {}
    for tenant, keys in declared.items():
        for key in keys:
            at = tenant, key.label
            try:
                _check_key(key)
                if at in labels:
                    raise BadName("name_taken", "the label is declared twice")
                if key.sha256 and (other := digests.get(key.sha256.lower())):
                    raise BadName("key_taken", f"the same key is declared as {_describe(other)}")
            except BadName as error:
                raise BadName(error.code, f"{_describe(at)}: {error.message}") from error
            labels.add(at)
            digests[key.sha256.lower()] = at


def keys_differ(store: Store, wanted: DeclaredKeys) -> bool:
    """Return whether the declared keys in the database differ from `wanted`. O(keys). Raises
    StoreError."""
    current = {at: terms for at, (_, terms) in _declared_terms(store.query(_DECLARED)).items()}
    return current != _wanted_terms(wanted)


def reconcile_keys(db: Transaction, clock: WallClock, wanted: DeclaredKeys) -> list[KeyChange]:
    """Create, change, replace and revoke keys as the file says.

    Runs within the caller's transaction, which has already written the tenants. O(keys), plus one
    query for each new key. Raises BadName.
    """
    now_ms, terms = clock(), _wanted_terms(wanted)
    current = _declared_terms(db.rows(_DECLARED))
    tenants: dict[str, int] = dict(db.rows(_TENANTS))
    changed = []
    for at in sorted(current.keys() | terms.keys()):
        key_id, old = current.get(at, (0, None))
        new = terms.get(at)
        if old == new:
            continue
        changed.append((at, key_id, old, new))
        try:  # before any change, as a revocation would hide that the digest is used
            _check_change(db, now_ms, old, new)
        except BadName as error:
            raise BadName(error.code, f"{_describe(at)}: {error.message}") from error
    changes = []
    for (tenant, label), key_id, old, new in changed:
        changed_id, what = _apply_change(db, now_ms, (tenants[tenant], label), key_id, old, new)
        changes.append(KeyChange(tenant, label, changed_id, what))
    return changes


def _check_change(db: Transaction, now_ms: int, old: _Terms | None, new: _Terms | None) -> None:
    if new is None:
        return
    if new.expires_ms is not None and not 0 < new.expires_ms - now_ms <= LIFE_MS_MAX:
        raise BadName("bad_time", "expires: the time is past or more than 100 years away")
    if old is None or old.digest != new.digest:
        _check_unused(db, now_ms, new.digest)
    elif old.expires_ms is not None and old.expires_ms <= now_ms:
        raise BadName("key_not_live", "the key has expired; declare another key")


def _apply_change(
    db: Transaction,
    now_ms: int,
    at: tuple[int, str],
    key_id: int,
    old: _Terms | None,
    new: _Terms | None,
) -> tuple[int, Literal["created", "changed", "replaced", "revoked"]]:
    """Apply one key's change. Returns its id and what was done. `at`: tenant id and label."""
    if new is None:
        _revoke(db, now_ms, key_id)
        return key_id, "revoked"
    if old is None:
        return _insert(db, now_ms, at, new), "created"
    if old.digest == new.digest:
        db.execute(
            "update keys set workspace = ?, scopes = ?, expires_ms = ?, limits = ?, tolerance = ?,"
            " cache_key = ? where key_id = ?",
            (
                *(new.workspace, new.scopes, new.expires_ms, new.limits, new.tolerance),
                *(new.cache_key, key_id),
            ),
        )
        return key_id, "changed"
    _revoke(db, now_ms, key_id)
    line = db.rows("select coalesce(line_id, key_id) from keys where key_id = ?", (key_id,))
    new_id = _insert(db, now_ms, at, new, line[0][0])
    db.execute("update keys set replaced_by = ? where key_id = ?", (new_id, key_id))
    # Caches of budgets reload: the old key's budget now also applies to the new key.
    db.execute("update money_version set version = version + 1")
    return new_id, "replaced"


def _insert(
    db: Transaction, now_ms: int, at: tuple[int, str], new: _Terms, line_id: int | None = None
) -> int:
    tenant_id, label = at
    shown = DIGEST_PREFIX + new.digest.hex()[:SHOWN_CHARS]
    made = db.rows(
        "insert into keys (digest, shown, tenant_id, workspace, label, created_ms, expires_ms,"
        " scopes, limits, tolerance, cache_key, line_id, is_declared)"
        " values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1)"
        " returning key_id",
        (
            *(new.digest, shown, tenant_id, new.workspace, label, now_ms, new.expires_ms),
            *(new.scopes, new.limits, new.tolerance, new.cache_key, line_id),
        ),
    )
    return int(made[0][0])


def _revoke(db: Transaction, now_ms: int, key_id: int) -> None:
    db.execute("update keys set revoked_ms = ?, is_declared = 0 where key_id = ?", (now_ms, key_id))


def _check_unused(db: Transaction, now_ms: int, digest: bytes) -> None:
    """Raise BadName if any key, live or not, has this digest."""
    rows = db.rows(
        "select key_id, name, label, revoked_ms, expires_ms from keys"
        " left join tenants using (tenant_id) where digest = ?",
        (digest,),
    )
    for key_id, name, label, revoked_ms, expires_ms in rows:
        if revoked_ms is not None:
            raise BadName(
                "key_not_live", f"the digest is that of revoked key {key_id}; use another key"
            )
        if expires_ms is not None and expires_ms <= now_ms:
            raise BadName(
                "key_not_live", f"the digest is that of expired key {key_id}; use another key"
            )
        owner = name or "an administrator"
        message = f"the digest is that of key {key_id} of {owner} ({label!r}); use another key"
        raise BadName("key_taken", message)


def _check_key(key: DeclaredKey) -> None:
    check_label(key.label)
    if not key.label:
        raise BadName("bad_label", "the label is empty; expected a label for every declared key")
    if bool(key.sha256) == bool(key.file):
        raise BadName("bad_setting", "expected exactly one of sha256 and file")
    if key.sha256 and not _DIGEST.fullmatch(key.sha256):
        raise BadName("bad_setting", "sha256: invalid digest; expected 64 hexadecimal digits")
    if key.file and (not key.file.startswith("/") or "\0" in key.file):
        raise BadName("bad_setting", "file: invalid path; expected an absolute path")
    check_name(key.workspace, "workspace")
    encode_scopes(key.scopes)
    check_limits(key.limits)


def _describe(at: _KeyPath) -> str:
    tenant, label = at
    return f"{tenant}: key {label[:80]!r}"


_TENANTS = "select name, tenant_id from tenants where is_declared = 1"
_DECLARED = (
    "select name, label, key_id, digest, workspace, scopes, expires_ms, keys.limits, tolerance,"
    " cache_key from keys"
    " join tenants using (tenant_id) where keys.is_declared = 1 and tenants.is_declared = 1"
)


def _declared_terms(rows: list[Row]) -> dict[_KeyPath, tuple[int, _Terms]]:
    """Return key id and terms of the keys that are declared now."""
    return {
        (name, label): (int(key_id), _Terms(bytes(digest), *terms))
        for name, label, key_id, digest, *terms in rows
    }


def _wanted_terms(wanted: DeclaredKeys) -> dict[_KeyPath, _Terms]:
    return {
        (tenant, key.label): _Terms(
            bytes.fromhex(key.sha256),
            key.workspace,
            encode_scopes(key.scopes),
            None if key.expires is None else round(key.expires.timestamp() * 1000),
            encode_limits(key.limits),
            key.tolerance,
            key.cache_key,
        )
        for tenant, keys in wanted.items()
        for key in keys
    }
