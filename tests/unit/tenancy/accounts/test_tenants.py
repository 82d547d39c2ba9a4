"""Tenants and `KeyAuthenticator`, also while another process changes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tenancy.accounts.authentication import (
    CHANGES_MAX,
    REFRESH_S,
    Administrator,
    KeyAuthenticator,
)
from tenancy.accounts.deletion import delete_tenant
from tenancy.accounts.keys import (
    ADMIN_SCOPES,
    SCOPES,
    change_key,
    create_admin_key,
    create_key,
    revoke_key,
    rotate_key,
)
from tenancy.accounts.tenants import (
    TenantRecord,
    bootstrap,
    bootstrap_admin,
    change_tenant,
    create_tenant,
    find_tenant,
    find_tenant_record,
    list_tenant_records,
    list_tenants,
    set_status,
)
from tenancy.errors import BadName, KeyRefused, StoreError
from tenancy.storage.interface import Store
from tenancy.types import CachePolicy, Limits, TenantSettings
from tests.actors import TESTER
from tests.examples import examples
from tests.tables import each_row
from tests.unit.tenancy.conftest import Wall, new_store
from tests.unit.tenancy.storage.new_sqlite import new_sqlite
from tests.unit.tenancy.storage.postgres_server import Server as PostgresServer


class Server:
    """An authenticator with its own clock, and a key of the tenant `ada`."""

    def __init__(self, store: Store, wall: Wall) -> None:
        self.now_s = 0.0
        self.key = create_key(store, wall, create_tenant(store, wall, "ada").tenant_id)
        self.registry = KeyAuthenticator(store, wall, lambda: self.now_s)

    def answer(self, key: str | None = None) -> str:
        """Return the tenant's name or the refusal's code, one check later."""
        self.now_s += REFRESH_S
        try:
            return self.registry.authenticate(key or self.key).tenant.name
        except KeyRefused as refusal:
            return refusal.code


@pytest.fixture
def server(store: Store, wall: Wall) -> Server:
    return Server(store, wall)


@pytest.fixture
def other(store: Store) -> Iterator[Store]:
    """The same database, as the command line opens it beside a running server."""
    other = store.open_another()
    yield other
    other.close()


def test_identity_comes_from_the_key_alone(store: Store, wall: Wall, server: Server) -> None:
    """Tenant, workspace, key and policy; nothing that a client sends."""
    policy = CachePolicy(floor_blocks=8, ceiling_blocks=64, weight=2.5, priority=3)
    tenant = create_tenant(store, wall, "bob", policy)
    key = create_key(store, wall, tenant.tenant_id, workspace="lab")
    server.answer()
    identity = server.registry.authenticate(key)

    assert (identity.tenant, identity.workspace) == (tenant, "lab")
    assert (identity.policy, identity.scopes) == (policy, frozenset(SCOPES))


def test_sees_changes_of_another_process_at_the_next_check(
    other: Store, wall: Wall, server: Server
) -> None:
    """`trunkline key` and `trunkline tenant` work beside a running server."""
    answers = [server.answer()]
    key = create_key(other, wall, create_tenant(other, wall, "bob").tenant_id)
    answers.append(server.answer(key))
    set_status(other, "ada", "suspended")
    answers.append(server.answer())
    set_status(other, "ada", "active")
    answers.append(server.answer())
    revoke_key(other, wall, "1", by=TESTER)
    answers.append(server.answer())

    assert answers == ["ada", "bob", "tenant_suspended", "ada", "key_revoked"]


def test_sees_changes_of_its_own_process(store: Store, wall: Wall, server: Server) -> None:
    """An embedder has one store for both. At once, where it says so; a log names the key."""
    set_status(store, "ada", "suspended")
    server.registry.refresh_now()
    with pytest.raises(KeyRefused) as caught:
        server.registry.authenticate(server.key)

    refused = caught.value
    assert (refused.code, refused.key_id, refused.tenant_id) == ("tenant_suspended", 1, 1)
    assert server.registry.active_tenants == 0


def test_changed_tenants_are_told_once(store: Store, wall: Wall, server: Server) -> None:
    """All at first; then those of every check since."""
    told = []
    for names in ((), ("bob", "cid"), ()):
        for name in names:
            server.answer()
            create_tenant(store, wall, name)
        server.now_s += REFRESH_S
        told.append([one.tenant.name for one in server.registry.take_changed()])

    assert told == [["ada"], ["bob", "cid"], []]


def test_queries_at_most_once_between_two_checks(
    store: Store, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of requests is not a flood of queries."""
    looks, version = list[int](), store.registry_version

    def look() -> int:
        looks.append(1)
        return version()

    monkeypatch.setattr(store, "registry_version", look)
    server.answer()
    names = {server.registry.authenticate(server.key).tenant.name for _ in range(100)}

    assert names == {"ada"}
    assert len(looks) < 10, "each of a hundred requests asked the database"


def test_keeps_the_last_snapshot_while_the_database_fails(store: Store, server: Server) -> None:
    """No request is admitted then, as no hold can be written; but no key is called wrong."""
    store.close()

    assert server.answer() == "ada"


def test_unchanged_registry_is_not_read_again(
    store: Store, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger writes all the time; keys rarely change. A change is read once."""
    set_status(store, "ada", "active")
    server.answer()
    with store.change() as db:
        db.execute(
            "insert into holds (request_id, tenant_id, key_id, model, started_ms)"
            " values ('a', 1, 1, 'm', 0)"
        )
    for name in ("list_tenant_records", "read_tenant_records"):
        monkeypatch.setattr(
            f"tenancy.accounts.authentication.{name}", lambda *_: pytest.fail("read again")
        )

    assert server.answer() == "ada"


def test_reads_only_changed_rows(
    store: Store, other: Store, wall: Wall, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among a hundred thousand keys a new one must not block for half a second."""
    monkeypatch.setattr(
        "tenancy.accounts.authentication.list_tenant_records", lambda store: pytest.fail("all read")
    )
    monkeypatch.setattr(
        "tenancy.accounts.tenants.list_tenant_records", lambda store: pytest.fail("all read")
    )
    key = create_key(other, wall, create_tenant(other, wall, "bob").tenant_id)
    answers = [server.answer(key), server.answer()]
    delete_tenant(other, lambda: 1, "bob")

    assert answers == ["bob", "ada"]
    assert server.answer(key) == "key_unknown"
    assert server.registry.tenant(2) is None


def test_reads_all_of_a_restored_database(other: Store, server: Server) -> None:
    """Its version is an earlier one, without the changes since."""
    set_status(other, "ada", "suspended")
    answers = [server.answer()]
    set_status(other, "ada", "active")
    with other.change() as db:
        db.execute("delete from registry_changes")
        db.execute("update registry_version set version = 1")
    answers.append(server.answer())

    assert answers == ["tenant_suspended", "ada"]


def test_key_of_a_tenant_deleted_while_all_is_read_is_unknown(
    store: Store, other: Store, wall: Wall, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are read before tenants."""

    def deleted(store: Store) -> list[TenantRecord]:
        delete_tenant(other, wall, "ada")
        return list_tenant_records(store)

    monkeypatch.setattr("tenancy.accounts.authentication.list_tenant_records", deleted)
    registry = KeyAuthenticator(store, wall, lambda: 0.0)

    with pytest.raises(KeyRefused, match="Unknown key"):
        registry.authenticate(server.key)


def test_deleted_tenants_key_does_not_authenticate_the_next_tenant(
    other: Store, wall: Wall, server: Server
) -> None:
    """Neither its id nor its key is reused."""
    bob = create_tenant(other, wall, "bob")
    key = create_key(other, wall, bob.tenant_id)
    answers = [server.answer(key)]
    delete_tenant(other, lambda: 1, "bob")
    eve = create_tenant(other, wall, "eve")
    answers.append(server.answer(key))

    assert eve.tenant_id > bob.tenant_id
    assert answers == ["bob", "key_unknown"]


@pytest.mark.parametrize(
    "changes", [CHANGES_MAX, CHANGES_MAX + 1, pytest.param(12_000, marks=pytest.mark.slow)]
)
def test_sees_many_changes_at_once(
    store: Store, other: Store, wall: Wall, server: Server, changes: int
) -> None:
    """One by one or by a full read; also when the oldest changes are not recorded any more."""
    with other.change() as db:
        db.execute(
            "with recursive n (i) as (select 1 union all select i + 1 from n where i < ?)"
            " insert into tenants (name, status, created_ms) select 't' || i, 'active', 0 from n",
            (changes,),
        )
        db.execute("update keys set workspace = 'lab' where key_id = 1")
    kept = store.query("select count(*) from registry_changes")[0][0]
    server.answer()

    assert server.registry.authenticate(server.key).workspace == "lab"
    assert kept <= 10_000


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(
            ["tenant", "key", "revoke", "rotate", "suspend", "resume", "set", "delete"]
        ),
        st.integers(0, 5),
    ),
    max_size=25,
)


LOOKS = st.lists(st.booleans(), min_size=25, max_size=25)


@given(changes=CHANGES, looks=LOOKS)
@settings(max_examples=examples(20), deadline=None)
def test_followed_registry_equals_a_fresh_one(
    changes: list[tuple[str, int]], looks: list[bool]
) -> None:
    """After any changes by another process, with any checks between."""
    with new_store() as store:
        _check_followed(store, changes, looks)


@given(changes=CHANGES, looks=LOOKS)
@settings(max_examples=4, deadline=None)
def test_followed_registry_equals_a_fresh_one_on_a_server(
    postgres_server: PostgresServer, changes: list[tuple[str, int]], looks: list[bool]
) -> None:
    """PostgreSQL has its own triggers."""
    with new_store(postgres_server) as store:
        _check_followed(store, changes, looks)


def _check_followed(store: Store, changes: list[tuple[str, int]], looks: list[bool]) -> None:
    other, clock, wall = store.open_another(), [0.0], Wall()
    registry = KeyAuthenticator(store, wall, lambda: clock[0])
    keys: list[str] = []
    for (what, number), look in zip(changes, looks, strict=False):
        with suppress(BadName):
            _change(other, wall, what, number, keys)
        if look:
            clock[0] += REFRESH_S
            _answers(registry, keys)
    clock[0] += REFRESH_S
    followed = _answers(registry, keys)
    fresh = _answers(KeyAuthenticator(store, wall, lambda: 0.0), keys)
    other.close()

    assert followed == fresh


def _change(store: Store, wall: Wall, what: str, number: int, keys: list[str]) -> None:
    name = f"t{number}"
    match what:
        case "tenant":
            create_tenant(store, wall, name)
        case "key":
            keys.append(create_key(store, wall, number))
        case "revoke":
            revoke_key(store, wall, str(number), by=TESTER)
        case "rotate":
            keys.append(rotate_key(store, wall, str(number), 0, by=TESTER)[0])
        case "suspend" | "resume":
            set_status(store, name, "suspended" if what == "suspend" else "active")
        case "set":
            change_tenant(store, name, {"priority": number, "floor_blocks": number})
        case _:
            delete_tenant(store, lambda: 1, name)


def _answers(registry: KeyAuthenticator, keys: list[str]) -> list[object]:
    answers: list[object] = []
    for key in keys:
        try:
            answers.append(registry.authenticate(key))
        except KeyRefused as refusal:
            answers.append(refusal.code)
    answers += registry.floor_blocks(), registry.active_tenants  # checks for changes first
    return [*answers, *(registry.tenant(number) for number in range(1, 9))]


def test_policy_applies_from_the_next_check(other: Store, server: Server) -> None:
    """Without a restart."""
    before = server.registry.floor_blocks()
    change_tenant(other, "ada", {"weight": 7, "floor_blocks": 8})
    server.now_s += REFRESH_S

    assert (before, server.registry.floor_blocks()) == (0, 8)
    policy = CachePolicy(weight=7, floor_blocks=8)
    assert server.registry.authenticate(server.key).policy == policy


def test_keys_expire_by_the_wall_clock(store: Store, wall: Wall, server: Server) -> None:
    """A tenant's, and an administrator's that another process made."""
    key = create_key(store, wall, 1, lives_ms=60_000)
    admin = create_admin_key(store, wall, lives_ms=60_000)
    server.now_s += REFRESH_S
    server.registry.authenticate_admin(admin)
    server.registry.authenticate(key)
    wall.ms += 60_000

    with pytest.raises(KeyRefused, match="expired"):
        server.registry.authenticate(key)
    with pytest.raises(KeyRefused, match="expired"):
        server.registry.authenticate_admin(admin)


@pytest.mark.parametrize("name", ["a", "a-b_c.d", "0", "x" * 64])
def test_accepts_plain_names(store: Store, wall: Wall, name: str) -> None:
    """They appear in labels, URLs and shells without quotes."""
    assert create_tenant(store, wall, name).name == name


@each_row(
    "name",
    ["", "A", " a", "a b", "-a", ".", "..", "../a", "a/b", "x" * 65, "ä", "a\n", "a\x00", "'; --"],
)
def test_refuses_other_names_with_the_rule(store: Store, wall: Wall, name: str) -> None:
    """Such as a path, SQL or half a log line."""
    with pytest.raises(BadName, match="1 to 64 characters of a-z"):
        create_tenant(store, wall, name)
    assert list_tenants(store) == []


def test_refuses_a_taken_name(store: Store, wall: Wall) -> None:
    """The first tenant keeps its policy."""
    create_tenant(store, wall, "ada", CachePolicy(weight=2))

    with pytest.raises(BadName, match="taken"):
        create_tenant(store, wall, "ada")
    assert find_tenant_record(store, "ada").policy.weight == 2


def test_unknown_tenant_error_lists_known_names(store: Store, wall: Wall) -> None:
    """Most often it is a typo; a thousand names would not help."""
    for number in range(12):
        create_tenant(store, wall, f"t{number:02}")

    with pytest.raises(BadName, match=r"'t1'; did you mean 't11'\? \(known: t00, .* and 2 more\)"):
        find_tenant(store, "t1")
    with pytest.raises(BadName, match=r"'quite-another' \(known: t00"):
        find_tenant(store, "quite-another")


@pytest.mark.parametrize(
    "wrong",
    [
        CachePolicy(floor_blocks=-1),
        CachePolicy(floor_blocks=2**70),
        CachePolicy(ceiling_blocks=0),
        CachePolicy(ceiling_blocks=2**70),
        CachePolicy(floor_blocks=10, ceiling_blocks=9),
        CachePolicy(weight=0),
        CachePolicy(weight=-1),
        CachePolicy(weight=float("nan")),
        CachePolicy(weight=float("inf")),
        CachePolicy(priority=2**70),
    ],
)
def test_invalid_policy_changes_nothing(store: Store, wall: Wall, wrong: CachePolicy) -> None:
    """Absurd values are refused before they reach the engine."""
    create_tenant(store, wall, "ada")

    with pytest.raises(BadName):
        change_tenant(store, "ada", structs.asdict(wrong))
    with pytest.raises(BadName):
        create_tenant(store, wall, "bob", wrong)
    assert [one.policy for one in list_tenant_records(store)] == [CachePolicy()]


def test_first_start_creates_default_tenant_and_key(store: Store, wall: Wall) -> None:
    """Once: a second start, or a start with tenants, creates nothing."""
    key = bootstrap(store, wall)
    again = bootstrap(store, wall)

    assert key is not None
    assert again is None
    identity = KeyAuthenticator(store, wall, lambda: 0.0).authenticate(key)
    assert identity.tenant.name == "default"


def test_first_start_creates_one_admin_key(store: Store, wall: Wall) -> None:
    """Once: after its revocation no other appears."""
    key = bootstrap_admin(store, wall)
    revoke_key(store, wall, "1", by=TESTER)

    assert key is not None
    assert bootstrap_admin(store, wall) is None


def test_admin_key_and_tenant_key_are_not_interchangeable(
    store: Store, wall: Wall, server: Server
) -> None:
    admin = create_admin_key(store, wall)

    assert server.answer(admin) == "scope_missing"
    assert server.registry.authenticate_admin(admin) == Administrator(2, frozenset(ADMIN_SCOPES))
    with pytest.raises(KeyRefused, match="a tenant's key; expected an administrator's"):
        server.registry.authenticate_admin(server.key)


def test_identity_has_limits_and_scopes(
    store: Store, other: Store, wall: Wall, server: Server
) -> None:
    """Changed beside a running server, they apply from the next check."""
    change_tenant(other, "ada", {"requests_per_minute": 9, "tier": "gold"})
    change_key(other, "1", scopes=["usage"], limits=Limits(requests_at_once=1), by=TESTER)
    strict = create_key(other, wall, 1, tolerance="strict")
    server.answer()
    who = server.registry.authenticate(server.key)

    assert who.limits == Limits(requests_per_minute=9)
    assert who.key_limits == Limits(requests_at_once=1)
    assert (who.tenant.tier, who.scopes) == ("gold", frozenset({"usage"}))
    assert server.registry.authenticate(strict).tolerance == "strict"


def test_concurrent_changes_do_not_undo_each_other(store: Store, wall: Wall) -> None:
    """A change writes only the fields that it names."""
    create_tenant(store, wall, "ada")
    with ThreadPoolExecutor(4) as pool:
        pool.map(
            lambda change: change_tenant(store, "ada", change),
            [{"weight": 2.0}, {"priority": 3}, {"tier": "gold"}, {"tokens_per_minute": 4}],
        )
    found = find_tenant_record(store, "ada").settings

    assert (found.weight, found.priority) == (2.0, 3)
    assert (found.tier, found.tokens_per_minute) == ("gold", 4)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"flor_blocks": 1}, "flor_blocks"),
        ({"floor_blocks": "1"}, "Expected `int`, got `str` - at `floor_blocks`"),
        ({"floor_blocks": True}, "Expected `int`"),
        ({"classes": "5m"}, "Expected `array "),
        ({"classes": ["5m"] * 17}, "limit 16"),
        ({"classes": ["a b"]}, "invalid retention class name"),
        ({"promised_blocks_max": -1}, "promised_blocks_max"),
        ({"tier": ""}, "invalid tier name"),
        ({"fidelity": "lossy"}, "fidelity: 'lossy'; expected one of 'exact', 'near', 'rough'"),
        ({"at_rest": "bucket"}, "at_rest: 'bucket'; expected one of 'local', 'remote', 'never'"),
        ({"attention": "always"}, "attention: 'always'; expected 'allowed', 'never', or 'window="),
        ({"attention": "window=63;sinks=0"}, "with 64 to 1048576 tokens of window"),
        ({"attention": "window=64;sinks=65537"}, "at most 65536 sinks"),
        ({"attention": "window=64"}, "attention: 'window=64'"),
        ({"attention": "window=64;sinks=16\n"}, "attention: 'window=64;sinks=16"),
        ({"attention": None}, "Expected `str`, got `null` - at `attention`"),
        ({"requests_per_minute": 0}, "expected 1 to"),
        ({"tokens_per_minute": 10**30}, "expected 1 to"),
    ],
)
def test_invalid_change_names_the_value_and_changes_nothing(
    store: Store, wall: Wall, changes: dict[str, object], what: str
) -> None:
    """Valid fields of the same change are not applied either."""
    create_tenant(store, wall, "ada")

    with pytest.raises(BadName, match=what):
        change_tenant(store, "ada", {"weight": 2, **changes})
    assert find_tenant_record(store, "ada").settings == TenantSettings()


def test_attention_windows_of_a_tenant_are_kept(store: Store, wall: Wall) -> None:
    """Both bounds are allowed, and an older tenant's requests may ask for windows."""
    create_tenant(store, wall, "ada")
    before = find_tenant_record(store, "ada").policy.attention
    for setting in ("window=64;sinks=0", "window=1048576;sinks=65536", "never"):
        assert change_tenant(store, "ada", {"attention": setting}).policy.attention == setting

    assert before == "allowed"
    assert find_tenant_record(store, "ada").settings.attention == "never"


def test_unwritable_database_raises_store_error(tmp_path: Path, wall: Wall) -> None:
    """One line instead of SQLite's own exception."""
    store = new_sqlite(tmp_path / "test.db")
    store.close()

    with pytest.raises(StoreError, match="not changed"), store.change():
        pass


def test_check_holds_until_commit(store: Store, wall: Wall) -> None:
    """Of two processes that set a floor at the same time, the second sees the first's."""
    for name in ("ada", "bob"):
        create_tenant(store, wall, name)
    seen: dict[str, list[int]] = {}
    beside: list[threading.Thread] = []

    def check(tenants: Sequence[TenantRecord], *, who: str, then: Callable[[], None]) -> None:
        seen[who] = [one.policy.floor_blocks for one in tenants]
        then()

    def second() -> None:
        with closing(store.open_another()) as other:
            late = partial(check, who="bob", then=lambda: None)
            change_tenant(other, "bob", {"floor_blocks": 7}, check=late)

    def begin_second() -> None:
        beside.append(threading.Thread(target=second))
        beside[0].start()

    change_tenant(
        store, "ada", {"floor_blocks": 5}, check=partial(check, who="ada", then=begin_second)
    )
    beside[0].join(60)

    assert seen == {"ada": [], "bob": [5]}


def test_failed_check_changes_nothing(store: Store, wall: Wall) -> None:
    """Neither an existing tenant nor a new one."""
    create_tenant(store, wall, "ada", CachePolicy(floor_blocks=3))

    def refuse(tenants: Sequence[TenantRecord]) -> None:
        raise KeyError(*[one.tenant.name for one in tenants])

    with pytest.raises(KeyError, match="ada"):
        change_tenant(store, "ada", {"floor_blocks": 5}, "suspended", check=refuse)
    with pytest.raises(KeyError, match="ada"):
        create_tenant(store, wall, "bob", CachePolicy(floor_blocks=5), check=refuse)

    (left,) = list_tenant_records(store)
    assert (left.policy.floor_blocks, left.tenant.status) == (3, "active")
