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
from tests.unit.tenancy.conftest import Wall, used

WEB, APP = "tl-" + "a" * 43, "tl-" + "b" * 43
LATER = datetime(1970, 1, 2, tzinfo=UTC)
LATER_MS = 86_400_000


def keyed(label: str = "web", key: str = WEB, **terms: object) -> DeclaredKey:
    """A key as the file declares it."""
    said = DeclaredKey(label=label, sha256=hashlib.sha256(key.encode()).hexdigest())
    return replace(said, **terms)


def ada(*keys: DeclaredKey, name: str = "ada") -> DeclaredTenant:
    """A tenant with these."""
    return DeclaredTenant(name=name, keys=keys)


def told(store: Store, wall: Wall, *tenants: DeclaredTenant) -> list[tuple[str, int, str]]:
    """What a reload did to keys."""
    return [
        (one.label, one.key_id, one.what)
        for one in reconcile(store, wall, tenants)
        if isinstance(one, KeyChange)
    ]


def opens(store: Store, wall: Wall, key: str) -> str:
    """The workspace that a key opens, or why it does not."""
    try:
        return KeyIndex(load_keys(store)).find(key, wall()).workspace
    except KeyRefused as error:
        return error.code


def test_what_is_declared_opens(store: Store, wall: Wall) -> None:
    """By its digest, with what is said of it; what is not said is as for keys made by hand."""
    lab = keyed("lab", APP, workspace="lab", scopes=("usage",), expires=LATER, requests_at_once=3)
    made = told(store, wall, ada(keyed(), lab))
    of_lab, of_web = list_keys(store)
    by_hand = create_key(store, wall, 1, label="web")
    plain = find_key(store, by_hand)

    assert made == [("lab", 1, "created"), ("web", 2, "created")]
    assert (opens(store, wall, WEB), opens(store, wall, APP)) == ("default", "lab")
    assert (of_lab.scopes, of_lab.expires_ms) == (("usage",), LATER_MS)
    assert of_lab.limits == Limits(requests_at_once=3)
    assert (of_web.scopes, of_web.expires_ms, of_web.limits) == (plain.scopes, None, plain.limits)
    assert (of_web.is_declared, plain.is_declared) == (True, False)


def test_declaring_the_same_keys_again_writes_nothing(store: Store, wall: Wall) -> None:
    """Nor when one has expired meanwhile: every restart would stumble over it."""
    reconcile(store, wall, [ada(keyed(expires=LATER), keyed("app", APP))])
    before = store.registry_version()
    wall.ms = LATER_MS + 1

    assert told(store, wall, ada(keyed("app", APP), keyed(expires=LATER))) == []
    assert store.registry_version() == before
    assert opens(store, wall, WEB) == "key_expired"


def test_a_key_that_is_declared_no_longer_is_revoked(store: Store, wall: Wall) -> None:
    """At once; another's and those made by hand are left alone."""
    reconcile(store, wall, [ada(keyed(), keyed("app", APP))])
    by_hand = create_key(store, wall, 1)

    assert told(store, wall, ada(keyed("app", APP))) == [("web", 2, "revoked")]
    assert opens(store, wall, WEB) == "key_revoked"
    assert opens(store, wall, APP) == opens(store, wall, by_hand) == "default"
    assert told(store, wall, ada(keyed("app", APP))) == []


def test_another_digest_replaces_the_key_and_its_budget_goes_on(store: Store, wall: Wall) -> None:
    """As a rotation without a grace: whoever declares a new key does not get a new budget."""
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


def test_a_key_that_has_expired_is_replaced_like_another(store: Store, wall: Wall) -> None:
    """That is how its owner gets a new one."""
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
    ],
)
def test_changed_terms_change_the_key(
    store: Store, wall: Wall, terms: dict[str, Any], field: str, value: object
) -> None:
    """It stays the same key; what is said no longer goes back to its default."""
    reconcile(store, wall, [ada(keyed())])
    before = list_keys(store)

    assert told(store, wall, ada(keyed(**terms))) == [("web", 1, "changed")]
    assert getattr(find_key(store, "1"), field) == value
    assert told(store, wall, ada(keyed())) == [("web", 1, "changed")]
    assert list_keys(store) == before


ACTS: dict[str, Callable[[Store, Wall], object]] = {
    "change": lambda store, wall: change_key(store, "1", label="mine"),
    "rotate": lambda store, wall: rotate_key(store, wall, "1", 0),
    "revoke": lambda store, wall: revoke_key(store, wall, "1"),
}


@pytest.mark.parametrize("act", ACTS)
def test_a_declared_key_is_changed_in_the_file_only(store: Store, wall: Wall, act: str) -> None:
    """The next reload would take it back, or stumble over it."""
    reconcile(store, wall, [ada(keyed())])
    before = list_keys(store)

    with pytest.raises(BadName, match="configuration file") as caught:
        ACTS[act](store, wall)
    assert caught.value.code == "key_declared"
    assert list_keys(store) == before


def test_the_keys_of_a_tenant_that_comes_back_are_as_they_were(store: Store, wall: Wall) -> None:
    """A table taken out by mistake; what the tenant's keys are is the file's again."""
    reconcile(store, wall, [ada(keyed(), keyed("app", APP))])
    before = list_keys(store)
    gone = told(store, wall)

    assert (gone, [key.is_declared for key in list_keys(store)]) == ([], [False, False])
    assert told(store, wall, ada(keyed(), keyed("app", APP))) == []
    assert list_keys(store) == before


@pytest.mark.parametrize("act", ACTS)
def test_a_key_is_an_operators_while_its_tenant_is_not_declared(
    store: Store, wall: Wall, act: str
) -> None:
    """He could not end it otherwise; what he changed is not taken back in silence."""
    reconcile(store, wall, [ada(keyed())])
    reconcile(store, wall, [])
    ACTS[act](store, wall)

    assert not find_key(store, "1").is_declared
    with pytest.raises(BadName, match=r"ada: key 'web': it is key 1"):
        reconcile(store, wall, [ada(keyed())])


def test_what_a_deleted_tenant_leaves_of_its_keys_is_nobodys(store: Store, wall: Wall) -> None:
    """Two keys that lost their labels are not two of one label; their digests are free."""
    reconcile(store, wall, [ada(keyed(), keyed("app", APP))])
    ledger = Ledger(store, wall)
    ledger.settle(used("r", 1)).result(20)
    ledger.close()
    reconcile(store, wall, [])
    delete_tenant(store, wall, "ada")

    assert told(store, wall, ada(keyed())) == [("web", 3, "created")]


def test_lists_show_the_beginning_of_a_declared_keys_digest(store: Store, wall: Wall) -> None:
    """Nothing else was ever there; a person finds the key by it, or by all of the digest."""
    reconcile(store, wall, [ada(keyed())])
    digest = digest_of(WEB).hex()
    (key,) = list_keys(store)

    assert key.shown == f"sha256:{digest[:8]}"
    assert find_key(store, f"{key.shown}…") == find_key(store, f"sha256:{digest}") == key


def test_one_wrong_key_changes_nothing(store: Store, wall: Wall) -> None:
    """Neither tenants nor the keys before it."""
    create_tenant(store, wall, "eve")
    create_key(store, wall, 1)
    store_digest = bytes(store.query("select digest from keys")[0][0]).hex()
    taken = DeclaredKey(label="x", sha256=store_digest)

    with pytest.raises(BadName, match=r"bob: key 'x': it is key 1 of eve \(''\)"):
        reconcile(store, wall, [ada(keyed()), ada(taken, name="bob")])
    assert store.query("select name from tenants") == [("eve",)]
    assert len(list_keys(store)) == 1


@pytest.mark.parametrize(
    ("then", "what"),
    [
        ([ada(keyed("new"))], r"new': it is key 1 of ada \('web'\)"),
        ([ada(keyed("x"))], r"x': it is key 1 of ada \('web'\)"),
        ([ada(keyed(key=APP), keyed("x"))], r"x': it is key 1 of ada \('web'\)"),
        ([ada(keyed("app", APP)), ada(keyed(), name="bob")], "it is key 1"),
        ([ada(keyed(expires=datetime(1970, 1, 1, tzinfo=UTC)))], "expires: it is past"),
        ([ada(keyed(expires=datetime(2100, 1, 1, tzinfo=UTC)))], "100 years"),
    ],
)
def test_what_cannot_become_of_a_key_leaves_it_as_it_was(
    store: Store, wall: Wall, then: list[DeclaredTenant], what: str
) -> None:
    """A label is its identity; an end that is past is no end."""
    reconcile(store, wall, [ada(keyed())])
    before = list_keys(store)

    with pytest.raises(BadName, match=what):
        reconcile(store, wall, then)
    assert list_keys(store) == before


def test_what_was_revoked_or_has_expired_stays_so(store: Store, wall: Wall) -> None:
    """Putting an old line back must not open what was closed for a reason."""
    reconcile(store, wall, [ada(keyed(), keyed("app", APP, expires=LATER))])
    reconcile(store, wall, [ada(keyed("app", APP, expires=LATER))])
    wall.ms = LATER_MS

    with pytest.raises(BadName, match="key 'web': it is key 2, which was revoked"):
        reconcile(store, wall, [ada(keyed(), keyed("app", APP, expires=LATER))])
    with pytest.raises(BadName, match="key 'app': it has expired"):
        reconcile(store, wall, [ada(keyed("app", APP))])
    with pytest.raises(BadName, match="key 'x': it is key 1, which has expired"):
        reconcile(store, wall, [ada(keyed("x", APP))])


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ([ada(keyed(), keyed(key=APP))], "ada: key 'web': the label is there twice"),
        ([ada(keyed(), keyed("x"))], "ada: key 'x': it is ada: key 'web' too"),
        ([ada(keyed()), ada(keyed("x"), name="bob")], "bob: key 'x': it is ada: key 'web' too"),
        ([ada(keyed(sha256="a" * 64), keyed("x", sha256="A" * 64))], "too"),
        ([ada(keyed(""))], "not empty"),
        ([ada(keyed("a\nb"))], "printable"),
        ([ada(DeclaredKey(label="x"))], "either sha256 or file"),
        ([ada(keyed(file="/x"))], "either sha256 or file"),
        ([ada(keyed(sha256=WEB))], "not 64 hexadecimal digits"),
        ([ada(keyed(sha256="a b" + "0" * 61))], "not 64 hexadecimal digits"),
        ([ada(DeclaredKey(label="x", file="keys/web"))], "no absolute path"),
        ([ada(keyed(workspace="../x"))], "no workspace name"),
        ([ada(keyed(scopes=("admin",)))], "one or more of inference"),
        ([ada(keyed(scopes=()))], "one or more of inference"),
        ([ada(keyed(requests_at_once=0))], "requests_at_once of 0"),
        ([ada(*[keyed(str(n), str(n)) for n in range(10_001)])], "more than 10000 keys"),
    ],
)
def test_a_key_that_cannot_be_is_told_by_its_place(
    store: Store, wall: Wall, wrong: list[DeclaredTenant], what: str
) -> None:
    """Before anything is changed; what may be a key by mistake is never quoted."""
    with pytest.raises(BadName, match=what) as caught:
        reconcile(store, wall, wrong)
    assert "aaaa" not in caught.value.message
    assert list_keys(store) == []
