"""Keys: made once, shown once, kept as a digest.

A key is `tl-` and 43 signs of base 62: 256 random bits. It is stored as its SHA-256. A slow hash
(argon2) protects secrets that people choose and others can guess; nobody guesses 256 bits, and a
slow hash on each request would be a way to wear the server out. A key that is rotated, and what it
is rotated to, are one line: they share limits and budgets. A tenant's key has scopes; an
administrator's belongs to no tenant and has one scope of its own. It knows no HTTP; `registry`,
the admin API and the command line call it, `key_ring` finds keys.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from tenancy.errors import BadName
from tenancy.limits import check_limits
from tenancy.pseudonyms import check_not_deleted
from tenancy.storage.interface import Row, Store, Transaction, Value
from tenancy.types import Limits, WallClock

PREFIX = "tl-"
DIGEST_PREFIX = "sha256:"  # lists show this of a key of which only the digest was ever there
SHOWN_CHARS = 8
LIFE_MS_MAX = 100 * 366 * 86_400_000
GRACE_MS_MAX = 90 * 86_400_000
LABEL_CHARS_MAX = 200
SCOPES = ("inference", "usage", "cache")
"""What a tenant's key may be for: prompts; its own counts and charges; its own cache's contents."""

ADMIN = "admin"
_ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
_RANDOM_CHARS = 43
_KEY = re.compile(f"{PREFIX}[{_ALPHABET}]{{{_RANDOM_CHARS}}}")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_FREE = Limits()
_SHA256 = hashlib.sha256()


class Key(Struct, frozen=True):
    """A key as lists show it: `shown` is its beginning, never more. An administrator's has no
    tenant. `replaced_by`: the id of the key it was rotated to. `is_declared`: the configuration
    file says what it is."""

    key_id: int
    tenant: str | None
    workspace: str
    label: str
    shown: str
    created_ms: int
    expires_ms: int | None
    revoked_ms: int | None
    scopes: tuple[str, ...] = SCOPES
    limits: Limits = _FREE
    replaced_by: int | None = None
    is_declared: bool = False


def digest_of(key: str) -> bytes:
    """What is stored of a key."""
    digest = _SHA256.copy()  # made anew, the library looks for its algorithm first
    digest.update(key.encode(errors="surrogatepass"))
    return digest.digest()


def is_key(text: str) -> bool:
    """Does it look like a key of ours?"""
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
) -> str:
    """Make a tenant's key and return it: the only time anybody sees it.

    Raises BadName for a workspace, a label, a life, scopes or limits that cannot be, and a tenant
    that is unknown or deleted.
    """
    check_name(workspace, "workspace")
    text = encode_scopes(scopes)
    check_limits(limits)
    expires_ms = _expiry(clock, label, lives_ms)
    key = _new_key()
    with store.change() as db:
        names = db.rows("select name from tenants where tenant_id = ?", (tenant_id,))
        if not names:
            raise BadName("tenant_unknown", f"there is no tenant with the id {tenant_id}")
        check_not_deleted(names[0][0])
        _insert(db, key, tenant_id, (workspace, label, clock(), expires_ms, text, limits))
    return key


def create_admin_key(
    store: Store, clock: WallClock, *, label: str = "", lives_ms: int | None = None
) -> str:
    """Make an administrator's key and return it, once. Raises BadName as `create_key`."""
    expires_ms = _expiry(clock, label, lives_ms)
    key = _new_key()
    with store.change() as db:
        _insert(db, key, None, ("", label, clock(), expires_ms, ADMIN, _FREE))
    return key


def rotate_key(store: Store, clock: WallClock, which: str, grace_ms: int) -> tuple[str, Key, Key]:
    """(the new key, what lists show of it, the old one): the same tenant, workspace, label, scopes
    and limits, and a life as long as the old one's was. The old one works for `grace_ms` more.

    Raises BadName if it is not one key, or is declared, works no more or was rotated before.
    """
    if not 0 <= grace_ms <= GRACE_MS_MAX:
        raise BadName("bad_time", "the old key may work for between 0 and 90 days more")
    key = _new_key()
    with store.change() as db:
        old, now_ms = _find_changeable(db, which), clock()
        _check_live(old, now_ms)
        life_ms = None if old.expires_ms is None else old.expires_ms - old.created_ms
        expires_ms = None if life_ms is None else now_ms + life_ms
        ends_ms = min(old.expires_ms or now_ms + grace_ms, now_ms + grace_ms)
        whose = "select tenant_id, coalesce(line_id, key_id) from keys where key_id = ?"
        tenant_id, line_id = db.rows(whose, (old.key_id,))[0]
        text = " ".join(sorted(old.scopes))
        facts = (old.workspace, old.label, now_ms, expires_ms, text, old.limits)
        new_id = _insert(db, key, tenant_id, facts, line_id)
        db.execute(
            "update keys set expires_ms = ?, replaced_by = ?, is_declared = 0 where key_id = ?",
            (ends_ms, new_id, old.key_id),
        )
        # A budget of the old key holds for the new one: whoever keeps budgets reads them again.
        db.execute("update money_version set version = version + 1")
    return key, find_key(store, str(new_id)), find_key(store, str(old.key_id))


def change_key(
    store: Store,
    which: str,
    *,
    label: str | None = None,
    scopes: Iterable[str] | None = None,
    limits: Limits | None = None,
) -> Key:
    """Change what is named, from the next request. Raises BadName."""
    with store.change() as db:
        old = _find_changeable(db, which)
        if old.tenant is None and (scopes is not None or limits is not None):
            raise BadName("bad_scopes", "an administrator's key has no other scopes, and no limits")
        check_label(old.label if label is None else label)
        check_limits(limits or _FREE)
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
    return find_key(store, str(old.key_id))


def list_keys(store: Store, tenant: str | None = None) -> list[Key]:
    """All keys, or a tenant's, oldest first."""
    return [
        _key_of(row)
        for row in store.query(
            f"{_KEYS} where cast(?1 as text) is null or name = ?1 order by key_id", (tenant,)
        )
    ]


def find_key(store: Store, which: str) -> Key:
    """One key by its id or by the beginning that lists show, or by the whole key.

    Raises BadName if that is not exactly one.
    """
    return _single(store.query(*_lookup(which)))


def revoke_key(store: Store, clock: WallClock, which: str) -> Key:
    """Revoke by id or by the beginning that lists show; revoking again changes nothing.

    Raises BadName if that is not exactly one key, or one that is declared.
    """
    with store.change() as db:
        key = _find_changeable(db, which)
        db.execute(
            "update keys set revoked_ms = ?, is_declared = 0"
            " where key_id = ? and revoked_ms is null",
            (clock(), key.key_id),
        )
    return find_key(store, str(key.key_id))


def check_name(name: str, what: str) -> None:
    """Raises BadName for what cannot be a tenant's or a workspace's name."""
    if not _NAME.fullmatch(name):
        raise BadName(
            "bad_name",
            f"{name[:80]!r} is no {what} name: 1 to 64 of a-z, 0-9, '.', '_' and '-', beginning"
            " with a letter or a digit",
        )


def check_label(label: str) -> None:
    """Raises BadName for what would not fit a line."""
    if len(label) > LABEL_CHARS_MAX or not label.isprintable():
        raise BadName("bad_label", f"a label is printable and has at most {LABEL_CHARS_MAX} signs")


def decode_limits(text: str) -> Limits:
    """As `encode_limits` wrote them."""
    return _FREE if text == "{}" else msgspec.json.decode(text, type=Limits)


def encode_limits(limits: Limits) -> str:
    """The form in which the database keeps them."""
    return msgspec.json.encode(limits).decode()


def encode_scopes(scopes: Iterable[str]) -> str:
    """The form in which the database keeps them: sorted words. Raises BadName."""
    wanted = set(scopes)
    if not wanted or not wanted <= set(SCOPES):
        known, given = ", ".join(SCOPES), ", ".join(sorted(wanted))[:80]
        raise BadName("bad_scopes", f"a tenant's key has one or more of {known} (it is {given!r})")
    return " ".join(sorted(wanted))


def _new_key() -> str:
    return PREFIX + "".join(secrets.choice(_ALPHABET) for _ in range(_RANDOM_CHARS))


def _expiry(clock: WallClock, label: str, lives_ms: int | None) -> int | None:
    check_label(label)
    if lives_ms is not None and not 0 < lives_ms <= LIFE_MS_MAX:
        raise BadName("bad_time", "a key lives for between a millisecond and 100 years")
    return None if lives_ms is None else clock() + lives_ms


def _insert(
    db: Transaction,
    key: str,
    tenant_id: int | None,
    facts: tuple[str, str, int, int | None, str, Limits],
    line_id: int | None = None,
) -> int:
    workspace, label, created_ms, expires_ms, scopes, limits = facts
    shown = key[: len(PREFIX) + SHOWN_CHARS]
    values = (
        *(digest_of(key), shown, tenant_id, workspace, label, created_ms, expires_ms),
        *(scopes, encode_limits(limits), line_id),
    )
    made = db.rows(
        "insert into keys (digest, shown, tenant_id, workspace, label, created_ms, expires_ms,"
        " scopes, limits, line_id) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) returning key_id",
        values,
    )
    return int(made[0][0])


_KEYS = (
    "select key_id, name, workspace, label, shown, keys.created_ms, expires_ms, revoked_ms,"
    " scopes, keys.limits, replaced_by, keys.is_declared * tenants.is_declared from keys"
    " left join tenants using (tenant_id)"
)


def _key_of(row: Row) -> Key:
    return Key(*(*row[:8], tuple(row[8].split()), decode_limits(row[9]), row[10], bool(row[11])))


def _lookup(which: str) -> tuple[str, tuple[Value]]:
    """The query for a key by its id or its beginning."""
    if which.isascii() and which.isdigit() and len(which) <= 18:
        return f"{_KEYS} where key_id = ?", (int(which),)
    beginning = which.encode(errors="replace").decode().rstrip("….")
    prefix = DIGEST_PREFIX if beginning.startswith(DIGEST_PREFIX) else PREFIX
    beginning = beginning[: len(prefix) + SHOWN_CHARS]
    return f"{_KEYS} where shown = ?", (beginning,)


def _single(rows: list[Row]) -> Key:
    if len(rows) != 1:
        what = "no key has" if not rows else f"{len(rows)} keys have"
        raise BadName(
            "key_unknown", f"{what} that id or beginning; `trunkline key list` shows them"
        )
    return _key_of(rows[0])


def _find_changeable(db: Transaction, which: str) -> Key:
    """One that an operator may change. Those of a tenant that is declared no longer are his."""
    key = _single(db.rows(*_lookup(which)))
    if key.is_declared:
        raise BadName(
            "key_declared",
            f"key {key.key_id} is declared in the configuration file; change it there and reload",
        )
    return key


def _check_live(key: Key, now_ms: int) -> None:
    is_over = key.revoked_ms is not None or (key.expires_ms or now_ms + 1) <= now_ms
    if key.replaced_by is not None:
        message = f"key {key.key_id} was rotated before; rotate its successor, {key.replaced_by}"
        raise BadName("key_not_live", message)
    if is_over:
        raise BadName("key_not_live", f"key {key.key_id} works no more; make a new one")
