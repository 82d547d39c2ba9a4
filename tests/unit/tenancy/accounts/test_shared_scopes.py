"""Shared scopes: membership and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tenancy.accounts import shared_scopes
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
from tests.actors import TESTER
from tests.fakes import FakeClock
from tests.tables import each_row
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
        set_scope(self.store, self.wall, terms, by=TESTER)

    def who(self, member: str) -> Identity:
        """Return the member's scope as a running server sees it a second later."""
        self.clock.advance(1.0)
        return self.registry.authenticate(self.keys[member])

    def shared(self) -> dict[str, str]:
        """Return members by key with their scope."""
        found = {member: self.who(member).scope for member in self.keys}
        return {member: scope.name for member, scope in found.items() if scope is not None}


@pytest.fixture
def town(store: Store, wall: Wall) -> Town:
    return Town(store, wall)


def test_nothing_is_shared_by_default(town: Town) -> None:
    """Two workspaces of one tenant share nothing either."""
    assert town.shared() == {}
    assert list_scopes(town.store) == []


def test_running_server_sees_membership_within_a_second(town: Town) -> None:
    """One workspace or all of a tenant's; created, changed and removed by another process."""
    town.set()
    first = town.shared()
    town.set(ScopeTerms(name="ours", owner="ada", members=("eve/home",)))
    second = town.shared()
    remove_scope(town.store, "ours", by=TESTER)

    assert first == {"ada/lab": "ours", "bob/lab": "ours", "bob/home": "ours"}
    assert second == {"eve/home": "ours"}
    assert town.shared() == {}


def test_new_server_reads_existing_memberships(town: Town) -> None:
    """Following changes and reading everything give the same result."""
    town.set()
    fresh = KeyAuthenticator(town.store, town.wall, town.clock)

    for member, key in town.keys.items():
        assert fresh.authenticate(key).scope == town.who(member).scope


def test_owners_policy_bounds_the_blocks(town: Town) -> None:
    """The owner's quota holds them, whichever member requests; a member's other settings stay its
    own."""
    town.set()
    bob, eve = town.who("bob/lab"), town.who("eve/lab")

    scope = find_scope(town.store, "ours")
    assert bob.scope == SharedScope(scope.scope_id, "ours", 1, CachePolicy(floor_blocks=8))
    assert (bob.blocks_policy.floor_blocks, bob.policy.floor_blocks) == (8, 0)
    assert eve.blocks_policy is eve.policy


def test_suspended_owner_suspends_the_scope(town: Town) -> None:
    """A suspended owner pays for nothing; when it resumes, so does the scope."""
    town.set()
    set_status(town.store, "ada", "suspended")
    without = town.who("bob/lab").scope
    set_status(town.store, "ada", "active")

    assert without is None
    assert town.who("bob/lab").scope is not None


def test_new_owner_makes_a_new_scope(town: Town) -> None:
    """Blocks are held in the owner's name. The new scope has a number that was never used, so
    nothing of the old scope is found."""
    town.set()
    before = find_scope(town.store, "ours")
    town.set(ScopeTerms(name="ours", owner="bob", members=OURS.members))
    after = find_scope(town.store, "ours")
    remove_scope(town.store, "ours", by=TESTER)
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
def test_workspace_is_in_at_most_one_scope(town: Town, members: tuple[str, ...]) -> None:
    """Otherwise its cache would depend on the order of rows. Nothing is changed."""
    town.set()
    before = town.shared()

    with pytest.raises(BadName) as caught:
        town.set(ScopeTerms(name="theirs", owner="eve", members=members))
    assert caught.value.code == "scope_overlap"
    assert town.shared() == before
    assert [scope.name for scope in list_scopes(town.store)] == ["ours"]


@each_row(
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
def test_refuses_invalid_scopes_unchanged(town: Town, terms: ScopeTerms, code: str) -> None:
    """Paths, SQL and unknown tenants included."""
    with pytest.raises(BadName) as caught:
        town.set(terms)
    assert caught.value.code == code
    assert list_scopes(town.store) == []


def test_scope_beyond_the_most_names_their_number(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full database still takes changes of its scopes."""
    monkeypatch.setattr(shared_scopes, "SCOPES_MAX", 1)
    town.set()
    with pytest.raises(BadName, match=": 2; limit 1") as caught:
        town.set(ScopeTerms(name="theirs", owner="eve"))
    town.set(ScopeTerms(name="ours", owner="eve"))

    assert caught.value.code == "too_many_scopes"
    assert [(scope.name, scope.owner) for scope in list_scopes(town.store)] == [("ours", "eve")]


def test_refuses_to_remove_an_unknown_scope(town: Town) -> None:
    with pytest.raises(BadName) as caught:
        remove_scope(town.store, "ours", by=TESTER)
    assert caught.value.code == "scope_unknown"


def test_owner_is_not_deleted_but_a_member_is(town: Town) -> None:
    """A scope without an owner would hold blocks without a payer."""
    town.set()
    with pytest.raises(BadName) as caught:
        delete_tenant(town.store, lambda: 1, "ada")
    delete_tenant(town.store, lambda: 1, "bob")

    assert caught.value.code == "tenant_in_use"
    assert find_scope(town.store, "ours").members == ("ada/lab",)


# --- declared ------------------------------------------------------------------------------------


def told(town: Town, scopes: Sequence[ScopeTerms] | None) -> list[tuple[str, str]]:
    """Reconcile and return what changed."""
    changes = reconcile(town.store, town.wall, None, scopes)
    return [(one.scope, one.what) for one in changes if isinstance(one, ScopeChange)]


def test_reconciles_declared_scopes(town: Town) -> None:
    """An absent list means no statement; an empty list means no scopes. Scopes made by command
    stay, and belong to the file once it names them."""
    town.set(ScopeTerms(name="hand", owner="eve", members=("eve",)))
    first = told(town, [OURS])
    same = told(town, [OURS])
    changed = told(town, [ScopeTerms(name="ours", owner="ada", members=("bob/lab",))])
    silent = told(town, None)
    adopted = told(town, [ScopeTerms(name="hand", owner="eve", members=("eve",))])
    with pytest.raises(BadName) as caught:
        remove_scope(town.store, "hand", by=TESTER)

    assert (first, same) == ([("ours", "created")], [])
    assert (changed, silent) == ([("ours", "changed")], [])
    assert adopted == [("ours", "removed"), ("hand", "adopted")]
    assert caught.value.code == "scope_declared"
    assert told(town, []) == [("hand", "removed")]
    assert list_scopes(town.store) == []


def test_reload_moves_a_workspace_between_scopes(town: Town) -> None:
    """In either order of the file."""
    one = ScopeTerms(name="one", owner="ada", members=("bob/lab",))
    two = ScopeTerms(name="two", owner="ada", members=("eve/lab",))
    told(town, [one, two])
    swapped = [
        ScopeTerms(name=t.name, owner="ada", members=m.members) for t, m in ((one, two), (two, one))
    ]

    assert told(town, swapped) == [("one", "changed"), ("two", "changed")]
    assert town.shared() == {"bob/lab": "two", "eve/lab": "one"}


def test_reload_is_all_or_nothing(town: Town) -> None:
    """A scope with an unknown tenant leaves tenants unchanged, too."""
    wrong = ScopeTerms(name="ours", owner="ada", members=("nobody",))

    with pytest.raises(BadName):
        reconcile(town.store, town.wall, [DeclaredTenant(name="zoe")], [wrong])
    assert "zoe" not in [row[0] for row in town.store.query("select name from tenants")]


def test_scope_and_its_tenants_in_one_file(town: Town) -> None:
    declared = [DeclaredTenant(name="zoe")]
    changes = reconcile(
        town.store, town.wall, declared, [ScopeTerms(name="z", owner="zoe", members=("zoe",))]
    )

    assert len(changes) == 2
    assert find_scope(town.store, "z").owner == "zoe"


def test_refuses_duplicate_declarations() -> None:
    """Before the database is opened, so `check-config` reports it."""
    with pytest.raises(BadName) as caught:
        check_scopes([OURS, OURS])
    assert caught.value.code == "name_taken"
