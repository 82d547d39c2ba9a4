"""Keys that the configuration file declares."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from tenancy.accounts.declared_keys import DeclaredKey, KeyChange
from tenancy.accounts.declared_tenants import DeclaredTenant, reconcile
from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.key_index import KeyIndex, load_keys
from tenancy.accounts.keys import (
    change_key,
    create_key,
    digest_of,
    find_key,
    list_keys,
    revoke_key,
    rotate_key,
)
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import BadName, KeyRefused
from tenancy.ledger.ledger import Ledger
from tenancy.pricing.budgets import Budget, load_budgets, set_budget
from tenancy.storage.interface import Store
from tenancy.types import Limits
from tests.actors import TESTER
from tests.tables import each_row
from tests.unit.tenancy.conftest import Wall, used

WEB, APP = "tl-" + "a" * 43, "tl-" + "b" * 43
LATER = datetime(1970, 1, 2, tzinfo=UTC)
LATER_MS = 86_400_000


def keyed(label: str = "web", key: str = WEB, **terms: object) -> DeclaredKey:
    """Return a key as the file declares it."""
    said = DeclaredKey(label=label, sha256=hashlib.sha256(key.encode()).hexdigest())
    return replace(said, **terms)


def ada(*keys: DeclaredKey, name: str = "ada") -> DeclaredTenant:
    """Return a declared tenant with these keys."""
    return DeclaredTenant(name=name, keys=keys)


def told(store: Store, wall: Wall, *tenants: DeclaredTenant) -> list[tuple[str, int, str]]:
    """Reconcile and return what changed."""
    return [
        (one.label, one.key_id, one.what)
        for one in reconcile(store, wall, tenants)
        if isinstance(one, KeyChange)
    ]


def opens(store: Store, wall: Wall, key: str) -> str:
    """Return the workspace that a key opens, or the refusal's code."""
    try:
        return KeyIndex(load_keys(store)).find(key, wall()).workspace
    except KeyRefused as error:
        return error.code


def test_declared_key_authenticates(store: Store, wall: Wall) -> None:
    """By its digest, with its declared settings; omitted settings have the defaults of `key
    create`."""
    lab = keyed("lab", APP, workspace="lab", scopes=("usage",), expires=LATER, requests_at_once=3)
    lab = replace(lab, tolerance="strict", cache_key="namespace")
    made = told(store, wall, ada(keyed(), lab))
    of_lab, of_web = list_keys(store)
    by_hand = create_key(store, wall, 1, label="web")
    plain = find_key(store, by_hand)

    assert made == [("lab", 1, "created"), ("web", 2, "created")]
    assert (opens(store, wall, WEB), opens(store, wall, APP)) == ("default", "lab")
    assert (of_lab.scopes, of_lab.expires_ms) == (("usage",), LATER_MS)
    assert of_lab.limits == Limits(requests_at_once=3)
    assert (of_lab.tolerance, of_web.tolerance) == ("strict", None)
    assert (of_lab.cache_key, of_web.cache_key) == ("namespace", None)
    assert (of_web.scopes, of_web.expires_ms, of_web.limits) == (plain.scopes, None, plain.limits)
    assert (of_web.is_declared, plain.is_declared) == (True, False)


def test_unchanged_keys_write_nothing(store: Store, wall: Wall) -> None:
    """Also when a key has expired meanwhile; otherwise every restart would fail."""
    reconcile(store, wall, [ada(keyed(expires=LATER), keyed("app", APP))])
    before = store.registry_version()
    wall.ms = LATER_MS + 1

    assert told(store, wall, ada(keyed("app", APP), keyed(expires=LATER))) == []
    assert store.registry_version() == before
    assert opens(store, wall, WEB) == "key_expired"


def test_undeclared_key_is_revoked(store: Store, wall: Wall) -> None:
    """At once. Other tenants' keys and keys made by command stay."""
    reconcile(store, wall, [ada(keyed(), keyed("app", APP))])
    by_hand = create_key(store, wall, 1)

    assert told(store, wall, ada(keyed("app", APP))) == [("web", 2, "revoked")]
    assert opens(store, wall, WEB) == "key_revoked"
    assert opens(store, wall, APP) == opens(store, wall, by_hand) == "default"
    assert told(store, wall, ada(keyed("app", APP))) == []


def test_new_digest_rotates_the_key_and_keeps_its_budget(store: Store, wall: Wall) -> None:
    """A rotation without grace; a new key does not get a new budget."""
    reconcile(store, wall, [ada(keyed())])
    set_budget(store, Budget(1, "day", hard_micros=5, key_id=1))
    version = store.query("select version from money_version")

    assert told(store, wall, ada(keyed(key=APP))) == [("web", 2, "replaced")]
    assert (opens(store, wall, WEB), opens(store, wall, APP)) == ("key_revoked", "default")
    assert find_key(store, "1").replaced_by == 2
    assert store.query("select version from money_version") > version
    with store.snapshot() as db:
        assert load_budgets(db).keys() == {(1, 1), (1, 2)}
    assert [facts.line_id for facts in load_keys(store)] == [1, 1]


def test_expired_key_can_be_replaced(store: Store, wall: Wall) -> None:
    reconcile(store, wall, [ada(keyed(expires=LATER))])
    wall.ms = LATER_MS

    assert told(store, wall, ada(keyed(key=APP))) == [("web", 2, "replaced")]
    assert opens(store, wall, APP) == "default"


@pytest.mark.parametrize(
    ("terms", "field", "value"),
    [
        ({"scopes": ("usage", "cache")}, "scopes", ("cache", "usage")),
        ({"expires": LATER}, "expires_ms", LATER_MS),
        ({"tokens_per_minute": 7}, "limits", Limits(tokens_per_minute=7)),
        ({"workspace": "lab"}, "workspace", "lab"),
        ({"tolerance": "lenient"}, "tolerance", "lenient"),
        ({"cache_key": "namespace"}, "cache_key", "namespace"),
    ],
)
def test_changed_settings_change_the_key(
    store: Store, wall: Wall, terms: dict[str, Any], field: str, value: object
) -> None:
    """The key stays the same; an omitted setting returns to its default."""
    reconcile(store, wall, [ada(keyed())])
    before = list_keys(store)

    assert told(store, wall, ada(keyed(**terms))) == [("web", 1, "changed")]
    assert getattr(find_key(store, "1"), field) == value
    assert told(store, wall, ada(keyed())) == [("web", 1, "changed")]
    assert list_keys(store) == before


ACTS: dict[str, Callable[[Store, Wall], object]] = {
    "change": lambda store, wall: change_key(store, "1", label="mine", by=TESTER),
    "rotate": lambda store, wall: rotate_key(store, wall, "1", 0, by=TESTER),
    "revoke": lambda store, wall: revoke_key(store, wall, "1", by=TESTER),
}


@pytest.mark.parametrize("act", ACTS)
def test_declared_key_is_changed_in_the_file_only(store: Store, wall: Wall, act: str) -> None:
    """The next reload would undo the change, or fail."""
    reconcile(store, wall, [ada(keyed())])
    before = list_keys(store)

    with pytest.raises(BadName, match="configuration file") as caught:
        ACTS[act](store, wall)
    assert caught.value.code == "key_declared"
    assert list_keys(store) == before


def test_keys_of_a_redeclared_tenant_are_unchanged(store: Store, wall: Wall) -> None:
    """After a table was removed by mistake, the tenant's keys are the file's again."""
    reconcile(store, wall, [ada(keyed(), keyed("app", APP))])
    before = list_keys(store)
    gone = told(store, wall)

    assert (gone, [key.is_declared for key in list_keys(store)]) == ([], [False, False])
    assert told(store, wall, ada(keyed(), keyed("app", APP))) == []
    assert list_keys(store) == before


@pytest.mark.parametrize("act", ACTS)
def test_operator_may_change_keys_of_an_undeclared_tenant(
    store: Store, wall: Wall, act: str
) -> None:
    """Otherwise the keys could not be revoked. A later declaration does not undo the change
    silently."""
    reconcile(store, wall, [ada(keyed())])
    reconcile(store, wall, [])
    ACTS[act](store, wall)

    assert not find_key(store, "1").is_declared
    with pytest.raises(BadName, match=r"ada: key 'web': the digest is that of"):
        reconcile(store, wall, [ada(keyed())])


def test_keys_of_a_deleted_tenant_conflict_with_nothing(store: Store, wall: Wall) -> None:
    """Two keys without labels do not collide, and their digests are free."""
    reconcile(store, wall, [ada(keyed(), keyed("app", APP))])
    ledger = Ledger(store, wall)
    ledger.settle(used("r", 1)).result(60)
    ledger.close()
    reconcile(store, wall, [])
    delete_tenant(store, wall, "ada")

    assert told(store, wall, ada(keyed())) == [("web", 3, "created")]


def test_lists_show_the_beginning_of_the_digest(store: Store, wall: Wall) -> None:
    """The key itself was never stored. The digest finds the key, in full or by its beginning."""
    reconcile(store, wall, [ada(keyed())])
    digest = digest_of(WEB).hex()
    (key,) = list_keys(store)

    assert key.shown == f"sha256:{digest[:8]}"
    assert find_key(store, f"{key.shown}…") == find_key(store, f"sha256:{digest}") == key


def test_one_invalid_key_changes_nothing(store: Store, wall: Wall) -> None:
    """Neither tenants nor the keys before it."""
    create_tenant(store, wall, "eve")
    create_key(store, wall, 1)
    store_digest = bytes(store.query("select digest from keys")[0][0]).hex()
    taken = DeclaredKey(label="x", sha256=store_digest)

    with pytest.raises(BadName, match=r"bob: key 'x': the digest is that of key 1 of eve \(''\)"):
        reconcile(store, wall, [ada(keyed()), ada(taken, name="bob")])
    assert store.query("select name from tenants") == [("eve",)]
    assert len(list_keys(store)) == 1


@each_row(
    ("then", "what"),
    [
        ([ada(keyed("new"))], r"new': the digest is that of key 1 of ada \('web'\)"),
        ([ada(keyed("x"))], r"x': the digest is that of key 1 of ada \('web'\)"),
        ([ada(keyed(key=APP), keyed("x"))], r"x': the digest is that of key 1 of ada \('web'\)"),
        ([ada(keyed("app", APP)), ada(keyed(), name="bob")], "the digest is that of key 1"),
        ([ada(keyed(expires=datetime(1970, 1, 1, tzinfo=UTC)))], "expires: the time is past"),
        ([ada(keyed(expires=datetime(2100, 1, 1, tzinfo=UTC)))], "100 years"),
    ],
)
def test_invalid_change_leaves_the_key_unchanged(
    store: Store, wall: Wall, then: list[DeclaredTenant], what: str
) -> None:
    """A label is the key's identity; a past expiry is invalid."""
    reconcile(store, wall, [ada(keyed())])
    before = list_keys(store)

    with pytest.raises(BadName, match=what):
        reconcile(store, wall, then)
    assert list_keys(store) == before


def test_revoked_or_expired_key_stays_closed(store: Store, wall: Wall) -> None:
    """Restoring an old line of the file must not reopen a closed key."""
    reconcile(store, wall, [ada(keyed(), keyed("app", APP, expires=LATER))])
    reconcile(store, wall, [ada(keyed("app", APP, expires=LATER))])
    wall.ms = LATER_MS

    with pytest.raises(BadName, match="key 'web': the digest is that of revoked key 2"):
        reconcile(store, wall, [ada(keyed(), keyed("app", APP, expires=LATER))])
    with pytest.raises(BadName, match="key 'app': the key has expired"):
        reconcile(store, wall, [ada(keyed("app", APP))])
    with pytest.raises(BadName, match="key 'x': the digest is that of expired key 1"):
        reconcile(store, wall, [ada(keyed("x", APP))])


@each_row(
    ("wrong", "what"),
    [
        ([ada(keyed(), keyed(key=APP))], "ada: key 'web': the label is declared twice"),
        ([ada(keyed(), keyed("x"))], "ada: key 'x': the same key is declared as ada: key 'web'"),
        (
            [ada(keyed()), ada(keyed("x"), name="bob")],
            "bob: key 'x': the same key is declared as ada: key 'web'",
        ),
        ([ada(keyed(sha256="a" * 64), keyed("x", sha256="A" * 64))], "same key"),
        ([ada(keyed(""))], "label is empty"),
        ([ada(keyed("a\nb"))], "printable"),
        ([ada(DeclaredKey(label="x"))], "exactly one of sha256 and file"),
        ([ada(keyed(file="/x"))], "exactly one of sha256 and file"),
        ([ada(keyed(sha256=WEB))], "expected 64 hexadecimal digits"),
        ([ada(keyed(sha256="a b" + "0" * 61))], "expected 64 hexadecimal digits"),
        ([ada(DeclaredKey(label="x", file="keys/web"))], "expected an absolute path"),
        ([ada(keyed(workspace="../x"))], "invalid workspace name"),
        ([ada(keyed(scopes=("admin",)))], "one or more of inference"),
        ([ada(keyed(scopes=()))], "one or more of inference"),
        ([ada(keyed(requests_at_once=0))], "requests_at_once out of range: 0"),
        (
            [ada(*[keyed(str(n), str(n)) for n in range(10_001)])],
            "keys: 10001; limit 10000",
        ),
    ],
)
def test_invalid_key_is_named_by_tenant_and_label(
    store: Store, wall: Wall, wrong: list[DeclaredTenant], what: str
) -> None:
    """Before any change; a digest is never quoted, as it may be a key by mistake."""
    with pytest.raises(BadName, match=what) as caught:
        reconcile(store, wall, wrong)
    assert "aaaa" not in caught.value.message
    assert list_keys(store) == []
