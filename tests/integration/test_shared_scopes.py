"""Caches that several tenants share, through the whole gateway: who hits, pays and may erase."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import Quota
from engine.cache import PrefixCache
from gateway.background.erasure import ErasureTarget, forget_removed, holdings, of_scope
from gateway.background.storage_metering import held_more
from gateway.caching.namespaces import namespace_of, parts_of
from gateway.ledger.metering import wall_ms
from gateway.retention_classes import BEST_EFFORT
from tenancy.accounts.keys import create_key
from tenancy.accounts.shared_scopes import ScopeTerms, find_scope, remove_scope, set_scope
from tenancy.accounts.tenants import change_tenant, create_tenant
from tenancy.types import CachePolicy, Identity, SharedScope, Tenant
from tests.strategies import tokens
from tests.unit.gateway.admin_client import Admin
from tests.unit.gateway.gateway_fixture import GatewayFixture

LONG = "Once upon a time there was a cache that forgot nothing, until it was told to. " * 2
OURS = ScopeTerms(name="ours", owner="eve", members=("ada", "bob/default"))


@pytest.fixture
async def shared(gateway: GatewayFixture) -> GatewayFixture:
    """ada and bob share a scope of eve's; carol is a stranger."""
    for name in ("eve", "carol"):
        tenant = create_tenant(gateway.store, wall_ms, name)
        gateway.keys[name] = create_key(gateway.store, wall_ms, tenant.tenant_id)
    share(gateway)
    return gateway


def share(gateway: GatewayFixture, terms: ScopeTerms = OURS) -> None:
    """As the operator."""
    set_scope(gateway.store, wall_ms, terms)
    gateway.gateway.context.registry.look_again()


async def cached(gateway: GatewayFixture, *who: str) -> list[int]:
    """Cached tokens that each is told, one after the other, for the same words."""
    found = []
    for name in who:
        status, body, _ = await gateway.ask(body=gateway.chat(LONG), who=name)
        assert status == 200, body
        found.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
    return found


# --- isolation -----------------------------------------------------------------------------------


async def test_a_quote_does_not_tell_the_owner_what_members_sent(shared: GatewayFixture) -> None:
    """Other namespaces of one's own are asked why a prefix is missing; a shared one is not one's
    own, whoever pays for it."""
    await cached(shared, "ada")
    request = {"endpoint": "/v1/chat/completions", "request": shared.chat(LONG)}
    _, owners, _ = await shared.ask("/v1/cache/quote", request, who="eve")
    _, members, _ = await shared.ask("/v1/cache/quote", request, who="bob")

    assert (owners["miss"]["cause"], owners["physical"]["cached_tokens"]) == (None, 0)
    assert members["physical"]["cached_tokens"] > 0


async def test_members_share_and_nobody_else_does(shared: GatewayFixture) -> None:
    """The second member finds what the first wrote; the owner, who is no member, and a stranger
    compute it themselves."""
    ada, bob, eve, carol = await cached(shared, "ada", "bob", "eve", "carol")

    assert (ada, eve, carol) == (0, 0, 0)
    assert bob > 0
    await shared.check_quiet()


def identity(name: int, scope: SharedScope | None) -> Identity:
    return Identity(
        Tenant(name, f"t{name}", "active", 0), "w", name, name, CachePolicy(), scope=scope
    )


def lived(life: list[tuple[int, tuple[int, ...]]], sharing: bool, alone: int | None) -> list[int]:
    """What tenant 3 hits (or all do, without `alone`) while 1 and 2 share a scope, or do not."""
    cache, seen = PrefixCache(blocks=4_096, block_size=2), []
    scope = SharedScope(1, "ours", 1, CachePolicy()) if sharing else None
    for who, prompt in life:
        if alone is not None and who != alone:
            continue
        name = namespace_of(identity(who, scope if who < 3 else None), "m", "t", "")
        table = cache.begin(name, prompt, 0.0, quota=Quota())
        seen.append(table.kv_tokens if who == 3 or alone is None else 0)
        assert cache.grow(table, len(prompt), 0.0)
        cache.take_copies()
        cache.commit(table, prompt, len(prompt), 0.0)
        cache.release(table, prompt, 0.0)
    return [hit for hit, (who, _) in zip(seen, life, strict=False) if alone or who == 3]


@given(st.lists(st.tuples(st.integers(1, 3), tokens.map(lambda words: words[:10])), max_size=20))
@settings(max_examples=60)
def test_a_strangers_counts_are_the_same_whoever_shares(
    life: list[tuple[int, tuple[int, ...]]],
) -> None:
    """Bit for bit: with a scope, without one, and with nobody else there at all."""
    with_scope, without = lived(life, True, None), lived(life, False, None)
    alone = lived(life, True, 3)

    assert with_scope == without == alone


@given(owner=st.integers(1, 99), number=st.integers(1, 99), partition=st.text(max_size=8))
@settings(max_examples=60)
def test_no_workspace_reads_as_a_scope(owner: int, number: int, partition: str) -> None:
    """A scope's namespace is its owner's, apart from all of its workspaces, and a partition only
    narrows it."""
    scope = SharedScope(number, "ours", owner, CachePolicy())
    name = namespace_of(identity(7, scope), "m", "t", partition)
    own = namespace_of(identity(owner, None), "m", "t", partition)

    assert parts_of(name) == (str(owner), f"scope:{number}", "m", "t", partition)
    assert name != own
    assert name != namespace_of(identity(7, scope), "m", "t", partition + "x")
    assert name == namespace_of(identity(8, scope), "m", "t", partition)


async def test_a_partition_narrows_a_shared_scope_too(shared: GatewayFixture) -> None:
    """cache_salt is the client's; members with the same one share, others do not."""
    found = []
    for who, salt in (("ada", "a"), ("bob", "b"), ("bob", "a")):
        body = shared.chat(LONG, cache_salt=salt)
        _, answer, _ = await shared.ask(body=body, who=who)
        found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert found[:2] == [0, 0]
    assert found[2] > 0


# --- money ---------------------------------------------------------------------------------------


async def test_each_member_is_billed_for_its_own_tokens(shared: GatewayFixture) -> None:
    """A read of what another wrote is a read; the ledger names who asked."""
    await cached(shared, "ada", "bob")
    rows = shared.store.query(
        "select tenant_id, prompt_tokens, cache_read_tokens from ledger order by entry_id"
    )

    (ada, asked, none), (bob, same, read) = rows
    assert (ada, bob, none) == (1, 2, 0)
    assert asked == same
    assert read > 0


async def test_a_promise_that_one_member_paid_for_is_read_by_another(
    shared: GatewayFixture,
) -> None:
    """Contracts are kept by scope: bob's breakpoint finds what ada wrote there."""
    body = {
        "model": shared.model,
        "max_tokens": 4,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": LONG * 2, "cache_control": {"type": "ephemeral"}}
                ],
            }
        ],
    }
    used = []
    for who in ("ada", "bob", "carol"):
        headers = {"anthropic-version": "2023-06-01"}
        _, answer, _ = await shared.ask("/v1/messages", body, who=who, headers=headers)
        used.append(
            (
                answer["usage"]["cache_creation_input_tokens"],
                answer["usage"]["cache_read_input_tokens"],
            )
        )

    wrote = used[0][0]
    assert wrote > 0
    assert used == [(wrote, 0), (0, wrote), (wrote, 0)]


async def test_blocks_and_their_storage_are_the_owners(shared: GatewayFixture) -> None:
    """Within its quota, on its bill: the members hold nothing in their own names."""
    await cached(shared, "ada", "bob")
    await shared.quiet()
    scope = find_scope(shared.store, "ours")
    found = held_more(((None, one) for one in shared.engine.namespaces), 16)

    assert {(one.tenant_id, one.scope_id) for one in holdings(shared.engine.namespaces)} == {
        (scope.owner_id, scope.scope_id)
    }
    assert {tenant for tenant, _ in found} == {scope.owner_id}
    assert {kind for _, kind in found} <= {BEST_EFFORT}


async def test_the_owners_ceiling_bounds_what_members_may_have(shared: GatewayFixture) -> None:
    """A prompt that its quota cannot hold is refused, whatever the member's own says."""
    change_tenant(shared.store, "eve", {"ceiling_blocks": 2})
    shared.gateway.context.registry.look_again()
    refused, body, _ = await shared.ask(body=shared.chat(LONG), who="ada")
    taken, _, _ = await shared.ask(body=shared.chat(LONG), who="carol")

    assert (refused, body["error"]["code"]) == (400, "context_length_exceeded")
    assert taken == 200


async def test_a_ceiling_holds_over_all_that_a_client_makes_up(shared: GatewayFixture) -> None:
    """One cache_salt after the other: the tenant's blocks are bounded all the same."""
    change_tenant(shared.store, "carol", {"ceiling_blocks": 30})
    shared.gateway.context.registry.look_again()
    for number in range(6):
        body = shared.chat(LONG, cache_salt=str(number))
        assert (await shared.ask(body=body, who="carol"))[0] == 200
    await shared.quiet()

    assert len(shared.engine.namespaces) > 1
    assert sum(one.blocks for one in shared.engine.namespaces) <= 30


# --- leaving -------------------------------------------------------------------------------------


async def test_who_is_no_member_any_more_goes_on_alone(shared: GatewayFixture) -> None:
    """From the next request; the others keep what is there."""
    await cached(shared, "ada")
    share(shared, ScopeTerms(name="ours", owner="eve", members=("ada",)))
    bob, ada = await cached(shared, "bob", "ada")

    assert bob == 0
    assert ada > 0


async def test_what_a_removed_scope_held_is_forgotten(shared: GatewayFixture) -> None:
    """Nobody can read it any more, so nobody shall pay for it; a scope of the same name begins
    empty."""
    await cached(shared, "ada")
    remove_scope(shared.store, "ours")
    shared.gateway.context.registry.look_again()
    before = (await shared.quiet()).cached_blocks
    await forget_removed(shared.gateway.context)
    after = (await shared.engine.get_stats()).cached_blocks
    share(shared)

    assert before > after == 0
    assert await cached(shared, "ada") == [0]


async def test_a_scope_that_is_there_is_not_forgotten(shared: GatewayFixture) -> None:
    """The sweep is for what was removed."""
    await cached(shared, "ada")
    await shared.quiet()
    await forget_removed(shared.gateway.context)

    assert (await cached(shared, "bob"))[0] > 0


# --- asking and erasing --------------------------------------------------------------------------


async def test_a_member_sees_the_scopes_name_and_nobody_elses_figures(
    shared: GatewayFixture,
) -> None:
    """What it holds tells what others sent; its own usage is its own."""
    await cached(shared, "ada", "ada", "ada")
    _, body, _ = await shared.ask("/v1/cache", method="GET", who="bob")
    _, other, _ = await shared.ask("/v1/cache", method="GET", who="carol")

    assert (body["shared_scope"], other["shared_scope"]) == ("ours", None)
    assert (body["blocks"], body["promised_blocks"], body["leases"]) == (0, 0, [])
    assert body["usage"]["requests"] == 0
    assert not {"ada", "eve", "carol"} & set(json.dumps(body).replace('"', " ").split())


async def test_a_member_may_not_erase_what_others_share(shared: GatewayFixture) -> None:
    """403 with the reason, for all of it and for a lease; whoever is no member erases its own."""
    await cached(shared, "ada")
    refused = [
        (await shared.ask(path, method="DELETE", who="bob"))[:2]
        for path in ("/v1/cache", "/v1/cache?lease_id=00")
    ]
    status, _, _ = await shared.ask("/v1/cache", method="DELETE", who="eve")

    assert [(code, body["error"]["code"]) for code, body in refused] == [(403, "shared_scope")] * 2
    assert "only the operator" in refused[0][1]["error"]["message"]
    assert status == 200
    assert (await cached(shared, "bob"))[0] > 0


async def test_the_operator_may_erase_it(shared: GatewayFixture) -> None:
    """By the scope's name, with a receipt in the owner's name; not together with a tenant."""
    admin = Admin(shared)
    await cached(shared, "ada")
    path = "/admin/v1/erase"
    both, _ = await admin.ask("POST", path, {"tenant": "eve", "shared_scope": "ours"})
    none, _ = await admin.ask("POST", path, {})
    unknown, _ = await admin.ask("POST", path, {"shared_scope": "theirs"})
    status, receipt = await admin.ask("POST", path, {"shared_scope": "ours"})
    scope = find_scope(shared.store, "ours")

    assert (both, none, unknown, status) == (400, 400, 404, 200)
    assert (receipt["tenant"], receipt["shared_scope"]) == ("eve", "ours")
    assert receipt["what"] == f"shared scope {scope.scope_id}" == of_scope(scope, 1).words()
    assert receipt["blocks"] > 0
    assert await cached(shared, "bob") == [0]


async def test_a_members_erasure_by_the_operator_leaves_the_scope(shared: GatewayFixture) -> None:
    """What is the scope's is its owner's: erasing the owner's cache erases it too."""
    await cached(shared, "ada")
    scope = find_scope(shared.store, "ours")
    await shared.quiet()
    (one,) = holdings(shared.engine.namespaces)

    assert not ErasureTarget(1, 1).covers(one.stats.namespace)
    assert ErasureTarget(scope.owner_id, 1).covers(one.stats.namespace)
    assert not ErasureTarget(scope.owner_id, 1, "default").covers(one.stats.namespace)


async def test_deleting_cached_content_takes_no_blocks_from_others(shared: GatewayFixture) -> None:
    """The same words may be held for another member: they go when the lease ends."""
    content = {"role": "user", "parts": [{"text": LONG * 3}]}
    body = {"model": f"models/{shared.model}", "contents": [content], "ttl": "600s"}
    made = []
    for who in ("ada", "bob"):
        headers = {"x-goog-api-key": shared.keys[who]}
        _, created, _ = await shared.ask("/v1beta/cachedContents", body, who=None, headers=headers)
        made.append((created["name"], headers))
    name, headers = made[0]
    before = (await shared.quiet()).cached_blocks
    status, _, _ = await shared.ask(f"/v1beta/{name}", method="DELETE", who=None, headers=headers)
    gone, _, _ = await shared.ask(f"/v1beta/{name}", method="GET", who=None, headers=headers)

    assert (status, gone) == (200, 403)
    assert (await shared.quiet()).cached_blocks == before


# --- administering -------------------------------------------------------------------------------


async def test_scopes_are_made_shown_and_removed_by_administrators(gateway: GatewayFixture) -> None:
    """Each is in force for the next request; a tenant's key opens none of it."""
    admin = Admin(gateway)
    path = "/admin/v1/shared-scopes"
    body = {"owner": "ada", "members": ["bob", "ada/default"]}
    made, scope = await admin.ask("PUT", f"{path}/ours", body)
    found = await cached(gateway, "ada", "bob")
    _, shown = await admin.ask("GET", f"{path}/ours")
    _, listed = await admin.ask("GET", path)
    _, contents = await admin.ask("GET", "/admin/v1/cache")
    removed, _ = await admin.ask("DELETE", f"{path}/ours")
    again, told = await admin.ask("DELETE", f"{path}/ours")
    foreign, _ = await admin.ask("GET", path, key=gateway.keys["ada"])

    assert (made, removed, again, foreign) == (200, 200, 404, 403)
    assert scope["members"] == ["ada/default", "bob"]
    assert shown == scope
    assert listed == {"shared_scopes": [scope]}
    assert found[1] > 0
    rows: list[dict[str, Any]] = contents["namespaces"]
    assert [(row["tenant"], row["workspace"], row["shared_scope"]) for row in rows] == [
        ("ada", None, "ours")
    ]
    assert told["error"]["code"] == "scope_unknown"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"owner": "nobody"}, 404, "tenant_unknown"),
        ({"owner": "ada", "members": ["ada", "ada/x"]}, 409, "scope_overlap"),
        ({"owner": "ada", "members": ["../etc"]}, 400, "bad_name"),
        ({"owner": "ada", "members": "ada"}, 400, "invalid_value"),
        ({"owner": "ada", "member": []}, 400, "invalid_value"),
        ({}, 400, "missing_required_parameter"),
    ],
)
async def test_a_scope_that_cannot_be_is_refused(
    gateway: GatewayFixture, body: dict[str, Any], status: int, code: str
) -> None:
    """With what is wrong, and nothing made."""
    admin = Admin(gateway)
    given, answer = await admin.ask("PUT", "/admin/v1/shared-scopes/ours", body)

    assert (given, answer["error"]["code"]) == (status, code)
    assert await admin.ask("GET", "/admin/v1/shared-scopes") == (200, {"shared_scopes": []})
