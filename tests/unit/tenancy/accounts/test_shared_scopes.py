"""Shared scopes: who is in which, and what cannot be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.accounts.declared_tenants import DeclaredTenant, reconcile
from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.keys import create_key
from tenancy.accounts.shared_scopes import (
    ScopeChange,
    ScopeTerms,
    check_scopes,
    find_scope,
    list_scopes,
    remove_scope,
    set_scope,
)
from tenancy.accounts.tenants import create_tenant, set_status
from tenancy.errors import BadName
from tenancy.storage.interface import Store
from tenancy.types import CachePolicy, Identity, SharedScope
from tests.fakes import FakeClock
from tests.unit.tenancy.conftest import Wall

OURS = ScopeTerms(name="ours", owner="ada", members=("ada/lab", "bob"))


class Town:
    """Three tenants with a key in each of two workspaces."""

    def __init__(self, store: Store, wall: Wall) -> None:
        self.store, self.wall = store, wall
        self.clock = FakeClock()
        self.keys = {}
        for name in ("ada", "bob", "eve"):
            policy = CachePolicy(floor_blocks=8) if name == "ada" else None
            tenant = create_tenant(store, wall, name, policy)
            for workspace in ("lab", "home"):
                key = create_key(store, wall, tenant.tenant_id, workspace=workspace)
                self.keys[f"{name}/{workspace}"] = key
        self.registry = KeyAuthenticator(store, wall, self.clock)

    def set(self, terms: ScopeTerms = OURS) -> None:
        set_scope(self.store, self.wall, terms)

    def who(self, member: str) -> Identity:
        """As a running server sees it a second later."""
        self.clock.advance(1.0)
        return self.registry.authenticate(self.keys[member])

    def shared(self) -> dict[str, str]:
        """Members by key with the scope each is in."""
        found = {member: self.who(member).scope for member in self.keys}
        return {member: scope.name for member, scope in found.items() if scope is not None}


@pytest.fixture
def town(store: Store, wall: Wall) -> Town:
    return Town(store, wall)


def test_nothing_is_shared_unless_the_operator_says_so(town: Town) -> None:
    """Off by default: two workspaces of one tenant share nothing either."""
    assert town.shared() == {}
    assert list_scopes(town.store) == []


def test_a_running_server_sees_who_shares_within_a_second(town: Town) -> None:
    """A workspace, or all of a tenant's; made, changed and removed beside it."""
    town.set()
    first = town.shared()
    town.set(ScopeTerms(name="ours", owner="ada", members=("eve/home",)))
    second = town.shared()
    remove_scope(town.store, "ours")

    assert first == {"ada/lab": "ours", "bob/lab": "ours", "bob/home": "ours"}
    assert second == {"eve/home": "ours"}
    assert town.shared() == {}


def test_a_server_that_starts_later_knows_them_too(town: Town) -> None:
    """Whether it followed the changes or read everything is the same."""
    town.set()
    fresh = KeyAuthenticator(town.store, town.wall, town.clock)

    for member, key in town.keys.items():
        assert fresh.authenticate(key).scope == town.who(member).scope


def test_blocks_are_bounded_by_the_owners_policy(town: Town) -> None:
    """Its quota holds them, whoever asked; what else a member may do stays its own."""
    town.set()
    bob, eve = town.who("bob/lab"), town.who("eve/lab")

    scope = find_scope(town.store, "ours")
    assert bob.scope == SharedScope(scope.scope_id, "ours", 1, CachePolicy(floor_blocks=8))
    assert (bob.blocks_policy.floor_blocks, bob.policy.floor_blocks) == (8, 0)
    assert eve.blocks_policy is eve.policy


def test_without_its_owner_everybody_goes_on_alone(town: Town) -> None:
    """Whoever is suspended pays for nothing more; when it is back, so is the scope."""
    town.set()
    set_status(town.store, "ada", "suspended")
    without = town.who("bob/lab").scope
    set_status(town.store, "ada", "active")

    assert without is None
    assert town.who("bob/lab").scope is not None


def test_with_another_owner_it_is_another_scope(town: Town) -> None:
    """Blocks are held in the owner's name: the new one's begin with none, under a number that was
    never used, so that nothing of the old one is found."""
    town.set()
    before = find_scope(town.store, "ours")
    town.set(ScopeTerms(name="ours", owner="bob", members=OURS.members))
    after = find_scope(town.store, "ours")
    remove_scope(town.store, "ours")
    town.set()
    again = find_scope(town.store, "ours")

    assert (after.owner, after.members) == ("bob", before.members)
    assert len({before.scope_id, after.scope_id, again.scope_id}) == 3


@pytest.mark.parametrize(
    "members",
    [
        ("bob/lab",),
        ("bob",),
        ("ada/lab",),
        ("ada",),
        ("eve/lab", "eve/lab"),
        ("eve", "eve/lab"),
        ("eve/lab", "eve"),
    ],
)
def test_a_workspace_is_in_one_scope_at_most(town: Town, members: tuple[str, ...]) -> None:
    """Else where it reads from would be a matter of order. Nothing is changed."""
    town.set()
    before = town.shared()

    with pytest.raises(BadName) as caught:
        town.set(ScopeTerms(name="theirs", owner="eve", members=members))
    assert caught.value.code == "scope_overlap"
    assert town.shared() == before
    assert [scope.name for scope in list_scopes(town.store)] == ["ours"]


@pytest.mark.parametrize(
    ("terms", "code"),
    [
        (ScopeTerms(name="x", owner="nobody"), "tenant_unknown"),
        (ScopeTerms(name="x", owner="ada", members=("nobody/lab",)), "tenant_unknown"),
        (ScopeTerms(name="../x", owner="ada"), "bad_name"),
        (ScopeTerms(name="x", owner="' or 1=1"), "bad_name"),
        (ScopeTerms(name="x", owner="ada", members=("ada/",)), "bad_name"),
        (ScopeTerms(name="x", owner="ada", members=("ada/lab/home",)), "bad_name"),
        (ScopeTerms(name="x", owner="ada", members=("",)), "bad_name"),
        (ScopeTerms(name="x", owner="ada", members=("ada/scope:1",)), "bad_name"),
    ],
)
def test_what_cannot_be_is_refused_with_nothing_changed(
    town: Town, terms: ScopeTerms, code: str
) -> None:
    """Paths, SQL and strangers included."""
    with pytest.raises(BadName) as caught:
        town.set(terms)
    assert caught.value.code == code
    assert list_scopes(town.store) == []


def test_a_scope_that_is_not_there_cannot_be_removed(town: Town) -> None:
    """A typo is told, not done."""
    with pytest.raises(BadName) as caught:
        remove_scope(town.store, "ours")
    assert caught.value.code == "scope_unknown"


def test_an_owner_cannot_be_deleted_and_a_member_leaves(town: Town) -> None:
    """A scope without an owner would hold blocks that nobody pays for."""
    town.set()
    with pytest.raises(BadName) as caught:
        delete_tenant(town.store, lambda: 1, "ada")
    delete_tenant(town.store, lambda: 1, "bob")

    assert caught.value.code == "tenant_in_use"
    assert find_scope(town.store, "ours").members == ("ada/lab",)


# --- declared ------------------------------------------------------------------------------------


def told(town: Town, scopes: Sequence[ScopeTerms] | None) -> list[tuple[str, str]]:
    """What a reload did."""
    changes = reconcile(town.store, town.wall, None, scopes)
    return [(one.scope, one.what) for one in changes if isinstance(one, ScopeChange)]


def test_what_is_declared_is_made_and_what_is_no_longer_is_removed(town: Town) -> None:
    """A file without any says nothing; an empty list says that there are none. What was made by
    hand stays, and is the file's once it names it."""
    town.set(ScopeTerms(name="hand", owner="eve", members=("eve",)))
    first = told(town, [OURS])
    same = told(town, [OURS])
    changed = told(town, [ScopeTerms(name="ours", owner="ada", members=("bob/lab",))])
    silent = told(town, None)
    adopted = told(town, [ScopeTerms(name="hand", owner="eve", members=("eve",))])
    with pytest.raises(BadName) as caught:
        remove_scope(town.store, "hand")

    assert (first, same) == ([("ours", "created")], [])
    assert (changed, silent) == ([("ours", "changed")], [])
    assert adopted == [("ours", "removed"), ("hand", "adopted")]
    assert caught.value.code == "scope_declared"
    assert told(town, []) == [("hand", "removed")]
    assert list_scopes(town.store) == []


def test_a_workspace_moves_from_a_scope_to_another_in_one_reload(town: Town) -> None:
    """Whichever of the two the file names first."""
    one = ScopeTerms(name="one", owner="ada", members=("bob/lab",))
    two = ScopeTerms(name="two", owner="ada", members=("eve/lab",))
    told(town, [one, two])
    swapped = [
        ScopeTerms(name=t.name, owner="ada", members=m.members) for t, m in ((one, two), (two, one))
    ]

    assert told(town, swapped) == [("one", "changed"), ("two", "changed")]
    assert town.shared() == {"bob/lab": "two", "eve/lab": "one"}


def test_a_reload_is_all_or_nothing(town: Town) -> None:
    """A scope that names a stranger leaves tenants as they were, too."""
    wrong = ScopeTerms(name="ours", owner="ada", members=("nobody",))

    with pytest.raises(BadName):
        reconcile(town.store, town.wall, [DeclaredTenant(name="zoe")], [wrong])
    assert "zoe" not in [row[0] for row in town.store.query("select name from tenants")]


def test_a_scope_may_be_declared_with_its_tenants(town: Town) -> None:
    """One file makes both."""
    declared = [DeclaredTenant(name="zoe")]
    changes = reconcile(
        town.store, town.wall, declared, [ScopeTerms(name="z", owner="zoe", members=("zoe",))]
    )

    assert len(changes) == 2
    assert find_scope(town.store, "z").owner == "zoe"


def test_what_is_declared_twice_is_refused() -> None:
    """Before anything is opened: `check-config` says so."""
    with pytest.raises(BadName) as caught:
        check_scopes([OURS, OURS])
    assert caught.value.code == "name_taken"
