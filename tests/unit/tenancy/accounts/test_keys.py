"""Keys: which authenticate, which do not, and what is never shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tenancy.accounts.key_index import KeyIndex, load_keys
from tenancy.accounts.keys import (
    ADMIN_SCOPES,
    change_key,
    create_admin_key,
    create_key,
    digest_of,
    list_keys,
    revoke_key,
    rotate_key,
)
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import BadName, KeyRefused
from tenancy.storage.interface import Store
from tenancy.types import HOUR_MS, Limits
from tests.actors import TESTER
from tests.tables import each_row
from tests.unit.tenancy.conftest import Wall
from tests.unit.tenancy.storage.new_sqlite import new_sqlite


@pytest.fixture
def tenant_id(store: Store, wall: Wall) -> int:
    return create_tenant(store, wall, "ada").tenant_id


def code(store: Store, key: str, now_ms: int) -> str:
    """Return the code with which a key is refused."""
    with pytest.raises(KeyRefused) as caught:
        KeyIndex(load_keys(store)).find(key, now_ms)
    assert key not in str(caught.value) or len(key) < 4
    return caught.value.code


def test_key_authenticates_its_tenant_and_workspace(
    store: Store, wall: Wall, tenant_id: int
) -> None:
    """Two keys, two workspaces, one tenant."""
    first = create_key(store, wall, tenant_id)
    second = create_key(store, wall, tenant_id, workspace="lab")
    ring = KeyIndex(load_keys(store))

    assert ring.find(first, wall()).workspace == "default"
    assert ring.find(second, wall()).workspace == "lab"
    assert ring.find(first, wall()).key_id != ring.find(second, wall()).key_id


def test_key_has_256_random_bits_in_base_62(store: Store, wall: Wall, tenant_id: int) -> None:
    """43 characters after the prefix, so a double click selects it; none twice."""
    keys = {create_key(store, wall, tenant_id) for _ in range(20)}

    assert len(keys) == 20
    assert all(re.fullmatch(r"tl-[0-9A-Za-z]{43}", key) for key in keys)


def test_database_contains_no_key(tmp_path: Path, wall: Wall) -> None:
    """A stolen copy of the file opens nothing."""
    store = new_sqlite(tmp_path / "test.db")
    key = create_key(store, wall, create_tenant(store, wall, "ada").tenant_id)

    content = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    store.close()
    assert key.encode() not in content
    assert key[3:].encode() not in content
    assert digest_of(key) in content


def test_lists_show_only_the_beginning_of_a_key(store: Store, wall: Wall, tenant_id: int) -> None:
    """Enough to tell two keys apart, too little to use one."""
    key = create_key(store, wall, tenant_id, label="laptop")
    (shown,) = list_keys(store)

    assert shown.shown == key[:11]
    assert key not in repr(shown)
    assert key not in repr(KeyIndex(load_keys(store)))


def test_key_expires_at_its_instant(store: Store, wall: Wall, tenant_id: int) -> None:
    """Not a millisecond earlier or later."""
    key = create_key(store, wall, tenant_id, lives_ms=HOUR_MS)
    last_ms = wall() + HOUR_MS - 1

    assert KeyIndex(load_keys(store)).find(key, last_ms).tenant_id == tenant_id
    assert code(store, key, last_ms + 1) == "key_expired"


@pytest.mark.parametrize("by", ["id", "beginning", "beginning…", "key"])
def test_revokes_by_id_beginning_or_key(store: Store, wall: Wall, tenant_id: int, by: str) -> None:
    create_key(store, wall, tenant_id)
    key = create_key(store, wall, tenant_id)
    which = {"id": "2", "beginning": key[:11], "beginning…": f"{key[:11]}…", "key": key}[by]
    revoked = revoke_key(store, wall, which, by=TESTER)

    assert revoked.revoked_ms == wall()
    for now_ms in (wall(), wall() - HOUR_MS):  # and when the clock was set back
        assert code(store, key, now_ms) == "key_revoked"


def test_second_revocation_keeps_the_first_time(store: Store, wall: Wall, tenant_id: int) -> None:
    """When the key stopped working is a fact."""
    create_key(store, wall, tenant_id)
    first = revoke_key(store, wall, "1", by=TESTER)
    wall.ms += HOUR_MS

    assert revoke_key(store, wall, "1", by=TESTER) == first


@pytest.mark.parametrize("which", ["", "…", "7", "tl-", "tl-00000000", "' or 1=1 --"])
def test_unknown_name_revokes_nothing(store: Store, wall: Wall, tenant_id: int, which: str) -> None:
    """A typo must not lock a customer out."""
    create_key(store, wall, tenant_id)

    with pytest.raises(BadName, match="key list"):
        revoke_key(store, wall, which, by=TESTER)
    assert [key.revoked_ms for key in list_keys(store)] == [None]


@each_row(
    "key",
    ["", "x", "x" * 10_000, "tl-", "ключ", "\ud800", "a\nb", "\x00", "' or 1=1 --", "'; drop"],
)
def test_malformed_key_is_unknown(store: Store, wall: Wall, tenant_id: int, key: str) -> None:
    """C1, C5: any text is hashed and compared, never interpreted."""
    create_key(store, wall, tenant_id)

    assert code(store, key, wall()) == "key_unknown"


def test_key_with_another_last_character_is_unknown(
    store: Store, wall: Wall, tenant_id: int
) -> None:
    """C6: no part of a key decides."""
    key = create_key(store, wall, tenant_id)
    near = key[:-1] + ("0" if key[-1] != "0" else "1")

    assert code(store, near, wall()) == "key_unknown"
    assert code(store, key.upper(), wall()) == "key_unknown"


@each_row(
    "wrong",
    [
        {"workspace": ""},
        {"workspace": "A"},
        {"workspace": "../etc"},
        {"workspace": "x" * 65},
        {"label": "x" * 201},
        {"label": "two\nlines"},
        {"lives_ms": 0},
        {"lives_ms": -5},
        {"lives_ms": 2**62},
    ],
)
def test_refuses_invalid_key_settings(
    store: Store, wall: Wall, tenant_id: int, wrong: dict[str, object]
) -> None:
    """Before anything is written."""
    with pytest.raises(BadName):
        create_key(store, wall, tenant_id, **wrong)  # type: ignore[arg-type]
    assert list_keys(store) == []


def test_refuses_key_for_unknown_tenant(store: Store, wall: Wall) -> None:
    """Such a key would belong to the next tenant with that id."""
    with pytest.raises(BadName, match="unknown tenant"):
        create_key(store, wall, 7)


# --- scopes, limits, administrators --------------------------------------------------------------


def test_key_has_its_scopes_and_limits(store: Store, wall: Wall, tenant_id: int) -> None:
    """A dashboard's key reads usage and cannot generate; a script's key has a bound."""
    limits = Limits(requests_per_minute=5)
    key = create_key(store, wall, tenant_id, scopes=["usage"], limits=limits)
    facts = KeyIndex(load_keys(store)).find(key, wall())

    assert (facts.scopes, facts.limits) == (frozenset({"usage"}), limits)
    assert (list_keys(store)[0].scopes, list_keys(store)[0].limits) == (("usage",), limits)


@each_row("scopes", [[], ["admin"], ["usage", "admin"], ["Usage"], ["usage cache"]])
def test_refuses_invalid_scopes(
    store: Store, wall: Wall, tenant_id: int, scopes: list[str]
) -> None:
    """Above all `admin` for a tenant's key."""
    with pytest.raises(BadName, match="inference, usage, cache"):
        create_key(store, wall, tenant_id, scopes=scopes)
    assert list_keys(store) == []


@each_row("limit", [0, -1, 10**13])
def test_refuses_invalid_limits(store: Store, wall: Wall, tenant_id: int, limit: int) -> None:
    """None means no limit; a limit of zero would be a revoked key."""
    with pytest.raises(BadName, match="tokens_per_minute out of range"):
        create_key(store, wall, tenant_id, limits=Limits(tokens_per_minute=limit))


def test_admin_key_has_no_tenant(store: Store, wall: Wall) -> None:
    """It opens the admin API and no paid endpoint."""
    key = create_admin_key(store, wall, label="ops")
    facts = KeyIndex(load_keys(store)).find(key, wall())

    assert (facts.tenant_id, facts.scopes) == (0, frozenset({"admin", *ADMIN_SCOPES}))
    assert [(one.tenant, one.label) for one in list_keys(store)] == [(None, "ops")]
    with pytest.raises(BadName, match="administrator's key"):
        change_key(store, "1", scopes=["inference"], by=TESTER)


def test_change_keeps_fields_not_named(store: Store, wall: Wall, tenant_id: int) -> None:
    """Above all its secret: a new limit does not need a new key."""
    key = create_key(store, wall, tenant_id, label="a", limits=Limits(requests_at_once=1))
    change_key(store, "1", limits=Limits(requests_per_minute=2), by=TESTER)
    change_key(store, "1", scopes=["inference"], by=TESTER)
    changed = change_key(store, "1", label="b", by=TESTER)

    assert (changed.label, changed.scopes) == ("b", ("inference",))
    assert KeyIndex(load_keys(store)).find(key, wall()).limits == Limits(requests_per_minute=2)


@pytest.mark.parametrize(("field", "mode"), [("tolerance", "lenient"), ("cache_key", "namespace")])
def test_a_key_has_its_own_modes(
    store: Store, wall: Wall, tenant_id: int, field: str, mode: Any
) -> None:
    """One application can be strict beside another that cannot be changed. None: the server's."""
    key = create_key(store, wall, tenant_id, **{field: mode})
    other = create_key(store, wall, tenant_id)
    ring = KeyIndex(load_keys(store))
    found = [getattr(ring.find(one, wall()), field) for one in (key, other)]
    kept = change_key(store, "1", label="b", by=TESTER)
    _, rotated, _ = rotate_key(store, wall, "1", 0, by=TESTER)
    cleared = change_key(store, str(rotated.key_id), **{field: None}, by=TESTER)

    assert found == [mode, None]
    assert [getattr(one, field) for one in (kept, rotated, cleared)] == [mode, mode, None]
    wrong: Any = "loose"
    with pytest.raises(BadName, match=field):
        create_key(store, wall, tenant_id, **{field: wrong})


# --- rotation ------------------------------------------------------------------------------------


def test_rotated_key_works_until_the_end_of_grace(store: Store, wall: Wall, tenant_id: int) -> None:
    """Time to distribute the new key."""
    old = create_key(store, wall, tenant_id, workspace="lab", label="a", scopes=["inference"])
    new, made, left = rotate_key(store, wall, "1", HOUR_MS, by=TESTER)
    ring = KeyIndex(load_keys(store))
    facts = ring.find(new, wall() + 2 * HOUR_MS)

    assert ring.find(old, wall() + HOUR_MS - 1).key_id == 1
    assert code(store, old, wall() + HOUR_MS) == "key_expired"
    assert (facts.tenant_id, facts.workspace) == (tenant_id, "lab")
    assert (made.label, made.scopes, made.expires_ms) == ("a", ("inference",), None)
    assert (left.replaced_by, left.expires_ms) == (made.key_id, wall() + HOUR_MS)


def test_rotated_key_has_the_old_ones_lifetime(store: Store, wall: Wall, tenant_id: int) -> None:
    """A grace does not extend the old key's expiry."""
    create_key(store, wall, tenant_id, lives_ms=3 * HOUR_MS)
    wall.ms += HOUR_MS
    _, made, left = rotate_key(store, wall, "1", 24 * HOUR_MS, by=TESTER)

    assert made.expires_ms == wall() + 3 * HOUR_MS
    assert left.expires_ms == wall() + 2 * HOUR_MS


@pytest.mark.parametrize("scopes", [ADMIN_SCOPES, ("read",)])
def test_admin_key_rotates(store: Store, wall: Wall, scopes: tuple[str, ...]) -> None:
    """At once, if it has leaked, also where the clock is set back; to a key that may do no more."""
    old = create_admin_key(store, wall, scopes=scopes)
    new, _, _ = rotate_key(store, wall, "1", 0, by=TESTER)

    assert KeyIndex(load_keys(store)).find(new, wall()).scopes == {"admin", *scopes}
    assert code(store, old, wall() - HOUR_MS) == code(store, old, wall()) == "key_revoked"


def test_key_is_rotated_once_and_only_while_live(store: Store, wall: Wall, tenant_id: int) -> None:
    """Two concurrent rotations must not both succeed."""
    create_key(store, wall, tenant_id)
    create_key(store, wall, tenant_id)
    create_key(store, wall, tenant_id, lives_ms=HOUR_MS)
    rotate_key(store, wall, "1", HOUR_MS, by=TESTER)
    revoke_key(store, wall, "2", by=TESTER)
    wall.ms += HOUR_MS

    for which, hint in (
        ("1", "rotate its successor 4"),
        *((one, "create a new one") for one in "23"),
    ):
        with pytest.raises(BadName, match=hint):
            rotate_key(store, wall, which, 0, by=TESTER)
    assert len(list_keys(store)) == 4


def test_pages_of_keys_are_the_whole_list(store: Store, wall: Wall, tenant_id: int) -> None:
    for label in "abc":
        create_key(store, wall, tenant_id, label=label)
        create_admin_key(store, wall, label=label)
    everything = list_keys(store)
    pages, after = [], 0
    while page := list_keys(store, after=after, limit=2):
        pages += page
        after = page[-1].key_id

    assert pages == everything
    assert list_keys(store, is_admin=True) == [one for one in everything if one.tenant is None]
    assert list_keys(store, "nemo") == []


@pytest.mark.parametrize("grace_ms", [-1, 2**62])
def test_refuses_invalid_grace(store: Store, wall: Wall, tenant_id: int, grace_ms: int) -> None:
    """A leaked key that works for a century was not rotated."""
    create_key(store, wall, tenant_id)

    with pytest.raises(BadName, match="90 days"):
        rotate_key(store, wall, "1", grace_ms, by=TESTER)
    assert len(list_keys(store)) == 1
