"""API keys: generated once, shown once, stored as a digest.

A key is `tl-` and 43 characters of base 62: 256 random bits. The database stores its SHA-256. Slow
hashes (argon2) protect passwords that can be guessed; 256 bits cannot be guessed, and a slow hash
on each request would allow a denial of service. A rotated key and its successors are one line: they
share limits and budgets. A tenant's key has scopes; an administrator's key belongs to no tenant and
has the scope `admin`. The module knows no HTTP. `key_index` finds keys.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import UNSET, Struct, UnsetType, structs

from tenancy.errors import BadName
from tenancy.limits import check_limits
from tenancy.pseudonyms import check_not_deleted
from tenancy.storage.audit_log import Actor, record
from tenancy.storage.interface import (
    ALL_ROWS,
    Row,
    Store,
    Transaction,
    Value,
    pad_to_power_of_two,
    placeholders,
)
from tenancy.types import (
    CACHE_KEY_MODES,
    TOLERANCE_MODES,
    CacheKeyMode,
    Limits,
    ToleranceMode,
    WallClock,
)

PREFIX = "tl-"
DIGEST_PREFIX = "sha256:"
"""Precedes the shown digest of a key of which only the digest was declared."""
SHOWN_CHARS = 8
"""Characters of a key or digest that lists show, after the prefix."""
LIFE_MS_MAX = 100 * 366 * 86_400_000
"""The longest life of a key: 100 years."""
GRACE_MS_MAX = 90 * 86_400_000
"""The longest grace of a rotated key: 90 days."""
LABEL_CHARS_MAX = 200
SCOPES = ("inference", "usage", "cache")
"""Scopes of a tenant's key: generation; the tenant's own usage and charges; the tenant's own
cache."""

ADMIN = "admin"
ADMIN_SCOPES = ("erase", "money", "read", "tenants")
"""Scopes of an administrator's key: erasures; prices and budgets; everything that only reads;
tenants, keys, shared scopes and the configuration file. A key has all of them by default."""
_ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
_RANDOM_CHARS = 43
_KEY = re.compile(f"{PREFIX}[{_ALPHABET}]{{{_RANDOM_CHARS}}}")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_FREE = Limits()
_SHA256 = hashlib.sha256()


class Key(Struct, frozen=True):
    """A key as lists show it.

    `tenant` is None for an administrator's key, whose scopes are `admin` for all, or some of
    `ADMIN_SCOPES`. `tolerance`, `cache_key`: None leaves it to the server.
    """

    key_id: int
    tenant: str | None
    workspace: str
    label: str
    shown: str
    """The beginning of the key, never more."""
    created_ms: int
    expires_ms: int | None
    revoked_ms: int | None
    scopes: tuple[str, ...] = SCOPES
    limits: Limits = _FREE
    replaced_by: int | None = None
    """The id of the key it was rotated to."""
    is_declared: bool = False
    """The configuration file declares the key."""
    tolerance: ToleranceMode | None = None
    cache_key: CacheKeyMode | None = None


def digest_of(key: str) -> bytes:
    """Return the digest that the database stores for a key."""
    digest = _SHA256.copy()  # a new one would look up the algorithm first
    digest.update(key.encode(errors="surrogatepass"))
    return digest.digest()


def is_key(text: str) -> bool:
    """Return whether the text has the form of a key."""
    return _KEY.fullmatch(text) is not None


def create_key(
    store: Store,
    clock: WallClock,
    tenant_id: int,
    *,
    workspace: str = "default",
    label: str = "",
    lives_ms: int | None = None,
    scopes: Iterable[str] = SCOPES,
    limits: Limits = _FREE,
    tolerance: ToleranceMode | None = None,
    cache_key: CacheKeyMode | None = None,
    by: Actor | None = None,
) -> str:
    """Create a tenant's key and return it; it cannot be shown again. `by`: for the audit log.

    Raises BadName if the workspace, label, life, scopes, limits or modes are invalid, or the
    tenant is unknown or deleted.
    """
    check_name(workspace, "workspace")
    text = encode_scopes(scopes)
    check_limits(limits)
    modes = _checked_modes(tolerance, cache_key)
    expires_ms = _expiry(clock, label, lives_ms)
    key = _new_key()
    with store.change() as db:
        names = db.rows("select name from tenants where tenant_id = ?", (tenant_id,))
        if not names:
            raise BadName("tenant_unknown", f"unknown tenant id: {tenant_id}")
        check_not_deleted(names[0][0])
        key_id = _insert(
            db,
            key,
            tenant_id=tenant_id,
            workspace=workspace,
            label=label,
            created_ms=clock(),
            expires_ms=expires_ms,
            scopes=text,
            limits=encode_limits(limits),
            **modes,
        )
        _record(db, by, "key.create", key_id)
    return key


def create_admin_key(
    store: Store,
    clock: WallClock,
    *,
    label: str = "",
    lives_ms: int | None = None,
    scopes: Iterable[str] | None = None,
    by: Actor | None = None,
) -> str:
    """Create an administrator's key and return it, once. `scopes`: some of `ADMIN_SCOPES`; None for
    all. `by`: for the audit log. Raises BadName as `create_key`."""
    expires_ms = _expiry(clock, label, lives_ms)
    text = encode_admin_scopes(scopes)
    key = _new_key()
    with store.change() as db:
        key_id = _insert(
            db,
            key,
            workspace="",
            label=label,
            created_ms=clock(),
            expires_ms=expires_ms,
            scopes=ADMIN,
            admin_scopes=text,
        )
        _record(db, by, "key.create", key_id)
    return key


def rotate_key(
    store: Store, clock: WallClock, which: str, grace_ms: int, by: Actor
) -> tuple[str, Key, Key]:
    """Rotate a key. Returns the new key, its record, and the record of the old one.

    The new key has the same tenant, workspace, label, scopes and limits, and a life as long as the
    old one's. The old key works for `grace_ms` more; without, it is revoked: no clock that is set
    back opens it. Raises BadName if `which` does not name one key, or the key is declared, expired,
    revoked, or was rotated before.
    """
    if not 0 <= grace_ms <= GRACE_MS_MAX:
        message = f"grace out of range: {grace_ms / 1000:g} s; expected 0 s to 90 days"
        raise BadName("bad_time", message)
    key = _new_key()
    with store.change() as db:
        old, now_ms = _find_changeable(db, which), clock()
        _check_live(old, now_ms)
        life_ms = None if old.expires_ms is None else old.expires_ms - old.created_ms
        expires_ms = None if life_ms is None else now_ms + life_ms
        ends_ms = min(old.expires_ms or now_ms + grace_ms, now_ms + grace_ms)
        line_id, *kept = db.rows(
            f"select coalesce(line_id, key_id), {', '.join(_KEPT)} from keys where key_id = ?",
            (old.key_id,),
        )[0]
        new_id = _insert(
            db,
            key,
            line_id=line_id,
            created_ms=now_ms,
            expires_ms=expires_ms,
            **dict(zip(_KEPT, kept, strict=True)),
        )
        db.execute(
            "update keys set expires_ms = ?, revoked_ms = ?, replaced_by = ?, is_declared = 0"
            " where key_id = ?",
            (ends_ms, None if grace_ms else now_ms, new_id, old.key_id),
        )
        _record(db, by, "key.rotate", old.key_id, old)
        _record(db, by, "key.create", new_id)
        # Caches of budgets reload: the old key's budget now also applies to the new key.
        db.execute("update money_version set version = version + 1")
        # Read before the commit: a failed query after it would lose the key, shown only once.
        return key, _read(db, new_id), _read(db, old.key_id)


def change_key(
    store: Store,
    which: str,
    *,
    label: str | None = None,
    scopes: Iterable[str] | None = None,
    limits: Limits | None = None,
    tolerance: ToleranceMode | UnsetType | None = UNSET,
    cache_key: CacheKeyMode | UnsetType | None = UNSET,
    by: Actor,
) -> Key:
    """Change the given fields of a key, from the next request. Raises BadName."""
    with store.change() as db:
        old = _find_changeable(db, which)
        check_label(old.label if label is None else label)
        check_limits(limits or _FREE)
        if old.tenant is None:
            if limits is not None:
                raise BadName("bad_limits", "an administrator's key cannot have limits")
            if scopes is not None:
                db.execute(
                    "update keys set admin_scopes = ? where key_id = ?",
                    (encode_admin_scopes(scopes), old.key_id),
                )
                scopes = None
        db.execute(
            "update keys set label = coalesce(?, label), scopes = coalesce(?, scopes),"
            " limits = coalesce(?, limits), is_declared = 0 where key_id = ?",
            (
                label,
                None if scopes is None else encode_scopes(scopes),
                None if limits is None else encode_limits(limits),
                old.key_id,
            ),
        )
        for column, mode in _checked_modes(tolerance, cache_key).items():
            db.execute(f"update keys set {column} = ? where key_id = ?", (mode, old.key_id))
        _record(db, by, "key.change", old.key_id, old)
        return _read(db, old.key_id)


def list_keys(
    store: Store,
    tenant: str | None = None,
    *,
    is_admin: bool = False,
    after: int = 0,
    limit: int = ALL_ROWS,
) -> list[Key]:
    """Return keys, oldest first: all, a tenant's, or administrators'. `after`: the id of the last
    one before them. Raises StoreError."""
    wanted = (
        " where (cast(?1 as text) is null or name = ?1) and (?2 = 0 or keys.tenant_id is null)"
        " and key_id > ?3 order by key_id limit ?4"
    )
    rows = store.query(_KEYS + wanted, (tenant, int(is_admin), after, limit))
    return [_key_of(row) for row in rows]


def tenants_with_keys(store: Store, now_ms: int) -> set[int]:
    """Return the ids of the tenants that have a valid key. Raises StoreError."""
    rows = store.query(
        "select distinct tenant_id from keys where tenant_id is not null and revoked_ms is null"
        " and (expires_ms is null or expires_ms > ?)",
        (now_ms,),
    )
    return {tenant_id for (tenant_id,) in rows}


def find_key(store: Store, which: str) -> Key:
    """Return a key by its id, by its shown beginning, or by the whole key.

    Raises BadName if that is not exactly one key.
    """
    return _single(store.query(*_lookup(which)))


def revoke_key(store: Store, clock: WallClock, which: str, by: Actor) -> Key:
    """Revoke a key by its id or its shown beginning. A second call changes nothing.

    Raises BadName if that is not exactly one key, or the key is declared.
    """
    with store.change() as db:
        key = _find_changeable(db, which)
        db.execute(
            "update keys set revoked_ms = ?, is_declared = 0"
            " where key_id = ? and revoked_ms is null",
            (clock(), key.key_id),
        )
        _record(db, by, "key.revoke", key.key_id, key)
        return _read(db, key.key_id)


def check_name(name: str, what: str) -> None:
    """Raise BadName if the name has characters or a length that names may not have."""
    if not _NAME.fullmatch(name):
        raise BadName(
            "bad_name",
            f"invalid {what} name: {name[:80]!r}; expected 1 to 64 characters of a-z, 0-9, '.', '_'"
            " and '-', beginning with a letter or a digit",
        )


def check_label(label: str) -> None:
    """Raise BadName if the label is too long or not printable."""
    if len(label) > LABEL_CHARS_MAX or not label.isprintable():
        shown, most = label[:80], LABEL_CHARS_MAX
        message = f"invalid label: {shown!r}; expected at most {most} printable characters"
        raise BadName("bad_label", message)


def decode_limits(text: str) -> Limits:
    """Decode limits as `encode_limits` wrote them."""
    return _FREE if text == "{}" else msgspec.json.decode(text, type=Limits)


def encode_limits(limits: Limits) -> str:
    """Encode limits as the database stores them."""
    return msgspec.json.encode(limits).decode()


def encode_scopes(scopes: Iterable[str]) -> str:
    """Encode scopes as the database stores them: sorted words. Raises BadName."""
    wanted = set(scopes)
    if not wanted or not wanted <= set(SCOPES):
        known, given = ", ".join(SCOPES), ", ".join(sorted(wanted))[:80]
        raise BadName("bad_scopes", f"invalid scopes: {given!r}; expected one or more of {known}")
    return " ".join(sorted(wanted))


def encode_admin_scopes(scopes: Iterable[str] | None) -> str | None:
    """Encode an administrator's scopes as the database stores them; None for all. Raises
    BadName."""
    if scopes is None:
        return None
    wanted = set(scopes)
    if wanted in ({ADMIN}, set(ADMIN_SCOPES)):
        return None
    if not wanted or not wanted <= set(ADMIN_SCOPES):
        known, given = ", ".join(ADMIN_SCOPES), ", ".join(sorted(wanted))[:80]
        raise BadName(
            "bad_scopes",
            f"invalid scopes of an administrator's key: {given!r}; expected one or more of {known}",
        )
    return " ".join(sorted(wanted))


def _new_key() -> str:
    return PREFIX + "".join(secrets.choice(_ALPHABET) for _ in range(_RANDOM_CHARS))


def key_labels(store: Store, key_ids: Sequence[int]) -> dict[int, str]:
    """Return the labels of these keys by id; keys without one are left out. Raises StoreError."""
    if not key_ids:
        return {}
    wanted = pad_to_power_of_two(key_ids)
    found = store.query(
        f"select key_id, label from keys where key_id in {placeholders(len(wanted))}", wanted
    )
    return {row[0]: row[1] for row in found if row[1]}


def _expiry(clock: WallClock, label: str, lives_ms: int | None) -> int | None:
    check_label(label)
    if lives_ms is not None and not 0 < lives_ms <= LIFE_MS_MAX:
        message = f"life out of range: {lives_ms / 1000:g} s; expected 1 ms to 100 years"
        raise BadName("bad_time", message)
    return None if lives_ms is None else clock() + lives_ms


_MODES: Mapping[str, tuple[str, ...]] = {"tolerance": TOLERANCE_MODES, "cache_key": CACHE_KEY_MODES}
"""Columns of a key that replace a mode of the server, and their values."""

_KEPT = ("tenant_id", "workspace", "label", "scopes", "admin_scopes", "limits", *_MODES)
"""Columns that a rotated key's successor has from it."""


def _insert(db: Transaction, key: str, **columns: Value) -> int:
    """Insert a key with these columns. Returns its id."""
    row = {"digest": digest_of(key), "shown": key[: len(PREFIX) + SHOWN_CHARS], **columns}
    made = db.rows(
        f"insert into keys ({', '.join(row)}) values {placeholders(len(row))} returning key_id",
        tuple(row.values()),
    )
    return int(made[0][0])


def _checked_modes(
    tolerance: ToleranceMode | UnsetType | None, cache_key: CacheKeyMode | UnsetType | None
) -> dict[str, str | None]:
    """Return the given modes by column. Raises BadName for an unknown mode."""
    given: dict[str, str | None] = {}
    for (column, known), mode in zip(_MODES.items(), (tolerance, cache_key), strict=True):
        if mode is UNSET:
            continue
        if mode not in (None, *known):
            message = f"invalid {column}: {mode!r}; expected one of {', '.join(known)}"
            raise BadName("bad_setting", message)
        given[column] = mode
    return given


_KEYS = (
    "select key_id, name, workspace, label, shown, keys.created_ms, expires_ms, revoked_ms,"
    " coalesce(admin_scopes, scopes), keys.limits, replaced_by,"
    " keys.is_declared * tenants.is_declared, tolerance, cache_key from keys"
    " left join tenants using (tenant_id)"
)


def _key_of(row: Row) -> Key:
    return Key(
        *(*row[:8], tuple(row[8].split()), decode_limits(row[9]), row[10], bool(row[11]), *row[12:])
    )


def _record(
    db: Transaction, by: Actor | None, action: str, key_id: int, before: Key | None = None
) -> None:
    """Record a change of a key, without its secret and its beginning."""
    if by is None:
        return
    which = (key_id,)
    tenant_id = db.rows("select tenant_id from keys where key_id = ?", which)[0][0]
    after = _read(db, key_id)
    was = None if before is None else _audited(before)
    what = f"key:{key_id}"
    record(db, by, action, what, tenant_id=tenant_id, before=was, after=_audited(after))


def _audited(key: Key) -> dict[str, object]:
    left_out = ("key_id", "tenant", "shown", "created_ms", "is_declared")
    return {name: one for name, one in structs.asdict(key).items() if name not in left_out}


def _lookup(which: str) -> tuple[str, tuple[Value]]:
    """Return the query and its value for a key by id or beginning."""
    if which.isascii() and which.isdigit() and len(which) <= 18:
        return f"{_KEYS} where key_id = ?", (int(which),)
    beginning = which.encode(errors="replace").decode().rstrip("….")
    prefix = DIGEST_PREFIX if beginning.startswith(DIGEST_PREFIX) else PREFIX
    beginning = beginning[: len(prefix) + SHOWN_CHARS]
    return f"{_KEYS} where shown = ?", (beginning,)


def _single(rows: list[Row]) -> Key:
    if len(rows) != 1:
        found = "unknown key" if not rows else f"ambiguous key: {len(rows)} matches"
        raise BadName("key_unknown", f"{found}; `trunkline key list` shows ids and prefixes")
    return _key_of(rows[0])


def _read(db: Transaction, key_id: int) -> Key:
    return _single(db.rows(*_lookup(str(key_id))))


def _find_changeable(db: Transaction, which: str) -> Key:
    """Return the key that an operator may change. A suspended, undeclared tenant's keys are
    changeable."""
    key = _single(db.rows(*_lookup(which)))
    if key.is_declared:
        raise BadName(
            "key_declared",
            f"key is declared in the configuration file: {key.key_id}; change it there and reload",
        )
    return key


def _check_live(key: Key, now_ms: int) -> None:
    is_over = key.revoked_ms is not None or (key.expires_ms or now_ms + 1) <= now_ms
    if key.replaced_by is not None:
        message = f"key was already rotated: {key.key_id}; rotate its successor {key.replaced_by}"
        raise BadName("key_not_live", message)
    if is_over:
        raise BadName("key_not_live", f"key is revoked or expired: {key.key_id}; create a new one")
