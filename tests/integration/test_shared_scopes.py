"""Caches shared by several tenants, through the whole gateway: hits, bills and erasures."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import HeldTokens, Quota
from engine.cache import PrefixCache
from gateway.background.erasure import ErasureTarget, list_holdings, scope_target
from gateway.caching.namespaces import namespace_of, parts_of
from tenancy.accounts.keys import create_key
from tenancy.accounts.shared_scopes import ScopeTerms, find_scope, remove_scope, set_scope
from tenancy.accounts.tenants import change_tenant, create_tenant
from tenancy.types import CachePolicy, Identity, SharedScope, Tenant, wall_ms
from tests.actors import TESTER
from tests.examples import examples
from tests.strategies import tokens
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture

LONG = "Once upon a time there was a cache that forgot nothing, until it was told to. " * 2
OURS = ScopeTerms(name="ours", owner="eve", members=("ada", "bob/default"))


@pytest.fixture
async def shared(gateway: GatewayFixture) -> GatewayFixture:
    """ada and bob share a scope of eve's; carol is not a member."""
    for name in ("eve", "carol"):
        tenant = create_tenant(gateway.store, wall_ms, name)
        gateway.keys[name] = create_key(gateway.store, wall_ms, tenant.tenant_id)
    share(gateway)
    return gateway


def share(gateway: GatewayFixture, terms: ScopeTerms = OURS) -> None:
    """Create the scope as the operator."""
    set_scope(gateway.store, wall_ms, terms, by=TESTER)
    gateway.gateway.context.authenticator.refresh_now()


async def cached(gateway: GatewayFixture, *who: str) -> list[int]:
    """Return the cached tokens reported to each tenant, in turn, for the same prompt."""
    found = []
    for name in who:
        status, body, _ = await gateway.ask(body=gateway.chat(LONG), who=name)
        assert status == 200, body
        found.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
    return found


# --- isolation -----------------------------------------------------------------------------------


async def test_quote_hides_members_prompts_from_owner(shared: GatewayFixture) -> None:
    """A miss is explained by the reader's other namespaces, and a shared one is not among them, not
    even for its payer."""
    await cached(shared, "ada")
    request = {"endpoint": "/v1/chat/completions", "request": shared.chat(LONG)}
    _, owners, _ = await shared.ask("/v1/cache/quote", request, who="eve")
    _, members, _ = await shared.ask("/v1/cache/quote", request, who="bob")

    assert (owners["miss"]["cause"], owners["physical"]["cached_tokens"]) == (None, 0)
    assert members["physical"]["cached_tokens"] > 0


async def test_only_members_share(shared: GatewayFixture) -> None:
    """The second member finds the first's prefix; the owner, who is not a member, and other tenants
    compute it."""
    ada, bob, eve, carol = await cached(shared, "ada", "bob", "eve", "carol")

    assert (ada, eve, carol) == (0, 0, 0)
    assert bob > 0
    await shared.check_quiet()


def identity(name: int, scope: SharedScope | None) -> Identity:
    return Identity(
        Tenant(name, f"t{name}", "active", 0), "w", name, name, CachePolicy(), scope=scope
    )


def lived(life: list[tuple[int, tuple[int, ...]]], sharing: bool, alone: int | None) -> list[int]:
    """Return the hits of tenant 3 (of all, without `alone`) while 1 and 2 share a scope, or not."""
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
@settings(max_examples=examples(60))
def test_scope_does_not_change_other_tenants_counts(
    life: list[tuple[int, tuple[int, ...]]],
) -> None:
    """Exactly equal: with a scope, without one, and alone."""
    with_scope, without = lived(life, True, None), lived(life, False, None)
    alone = lived(life, True, 3)

    assert with_scope == without == alone


@given(owner=st.integers(1, 99), number=st.integers(1, 99), partition=st.text(max_size=8))
@settings(max_examples=examples(60))
def test_scope_namespace_differs_from_workspaces(owner: int, number: int, partition: str) -> None:
    """It is separate from all of its owner's workspaces, and a partition only narrows it."""
    scope = SharedScope(number, "ours", owner, CachePolicy())
    name = namespace_of(identity(7, scope), "m", "t", partition)
    own = namespace_of(identity(owner, None), "m", "t", partition)

    assert parts_of(name) == (str(owner), f"scope:{number}", "m", "t", partition)
    assert name != own
    assert name != namespace_of(identity(7, scope), "m", "t", partition + "x")
    assert name == namespace_of(identity(8, scope), "m", "t", partition)


async def test_partition_narrows_shared_scope(shared: GatewayFixture) -> None:
    """Members with the same cache_salt share, others do not."""
    found = []
    for who, salt in (("ada", "a"), ("bob", "b"), ("bob", "a")):
        body = shared.chat(LONG, cache_salt=salt)
        _, answer, _ = await shared.ask(body=body, who=who)
        found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert found[:2] == [0, 0]
    assert found[2] > 0


# --- money ---------------------------------------------------------------------------------------


async def test_members_are_billed_for_their_own_tokens(shared: GatewayFixture) -> None:
    """A read of another member's prefix is a read; the ledger names the reader."""
    await cached(shared, "ada", "bob")
    rows = shared.store.query(
        "select tenant_id, prompt_tokens, cache_read_tokens from ledger order by entry_id"
    )

    (ada, asked, none), (bob, same, read) = rows
    assert (ada, bob, none) == (1, 2, 0)
    assert asked == same
    assert read > 0


async def test_member_reads_another_members_promise(
    shared: GatewayFixture,
) -> None:
    """Contracts belong to the scope: bob's breakpoint finds ada's prefix."""
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


async def test_owner_pays_for_blocks_and_storage(shared: GatewayFixture) -> None:
    """Within its quota, on its bill; members hold no blocks."""
    await cached(shared, "ada", "bob")
    await shared.quiet()
    scope = find_scope(shared.store, "ours")
    held: tuple[HeldTokens, ...] = ()
    while not held:  # until it has held them for a whole token-second
        held = (await shared.engine.get_held()).readings

    assert {(one.tenant_id, one.scope_id) for one in list_holdings(shared.engine.namespaces)} == {
        (scope.owner_id, scope.scope_id)
    }
    assert {one.payer for one in held} == {str(scope.owner_id).encode()}


async def test_owners_ceiling_bounds_members(shared: GatewayFixture) -> None:
    """A prompt above the owner's quota is refused, also within the member's quota."""
    change_tenant(shared.store, "eve", {"ceiling_blocks": 2})
    shared.gateway.context.authenticator.refresh_now()
    refused, body, _ = await shared.ask(body=shared.chat(LONG), who="ada")
    taken, _, _ = await shared.ask(body=shared.chat(LONG), who="carol")

    assert (refused, body["error"]["code"]) == (400, "context_length_exceeded")
    assert taken == 200


async def test_ceiling_covers_all_partitions(shared: GatewayFixture) -> None:
    """One cache_salt after the other: the tenant's blocks stay bounded."""
    change_tenant(shared.store, "carol", {"ceiling_blocks": 30})
    shared.gateway.context.authenticator.refresh_now()
    for number in range(6):
        body = shared.chat(LONG, cache_salt=str(number))
        assert (await shared.ask(body=body, who="carol"))[0] == 200
    await shared.quiet()

    assert len(shared.engine.namespaces) > 1
    assert sum(one.blocks for one in shared.engine.namespaces) <= 30


# --- leaving -------------------------------------------------------------------------------------


async def test_removed_member_no_longer_shares(shared: GatewayFixture) -> None:
    """From the next request; the others keep the cache."""
    await cached(shared, "ada")
    share(shared, ScopeTerms(name="ours", owner="eve", members=("ada",)))
    bob, ada = await cached(shared, "bob", "ada")

    assert bob == 0
    assert ada > 0


async def test_removed_scope_is_erased(shared: GatewayFixture) -> None:
    """It can no longer be read, so storage ends; a new scope of the same name begins empty."""
    await cached(shared, "ada")
    remove_scope(shared.store, "ours", by=TESTER)
    shared.gateway.context.authenticator.refresh_now()
    before = (await shared.quiet()).cached_blocks
    await shared.gateway.erasure.erase_removed()
    after = (await shared.engine.get_stats()).cached_blocks
    share(shared)

    assert before > after == 0
    assert await cached(shared, "ada") == [0]


async def test_existing_scope_is_not_erased(shared: GatewayFixture) -> None:
    """The sweep erases only removed scopes."""
    await cached(shared, "ada")
    await shared.quiet()
    await shared.gateway.erasure.erase_removed()

    assert (await cached(shared, "bob"))[0] > 0


# --- asking and erasing --------------------------------------------------------------------------


async def test_member_sees_scope_name_but_no_other_figures(
    shared: GatewayFixture,
) -> None:
    """The scope's contents would reveal other members' usage."""
    await cached(shared, "ada", "ada", "ada")
    _, body, _ = await shared.ask("/v1/cache", method="GET", who="bob")
    _, other, _ = await shared.ask("/v1/cache", method="GET", who="carol")

    assert (body["shared_scope"], other["shared_scope"]) == ("ours", None)
    assert (body["blocks"], body["promised_blocks"], body["leases"]) == (0, 0, [])
    assert body["usage"]["requests"] == 0
    assert not {"ada", "eve", "carol"} & set(json.dumps(body).replace('"', " ").split())


async def test_member_may_not_erase_shared_cache(shared: GatewayFixture) -> None:
    """403 with the reason, for all and for a single lease; other tenants erase their own."""
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


async def test_operator_may_erase_scope(shared: GatewayFixture) -> None:
    """By the scope's name, with a receipt for the owner; not together with a tenant."""
    admin = AdminClient(shared)
    await cached(shared, "ada")
    path = "/admin/v1/erase"
    both, _ = await admin.ask("POST", path, {"tenant": "eve", "shared_scope": "ours"})
    none, _ = await admin.ask("POST", path, {})
    unknown, _ = await admin.ask("POST", path, {"shared_scope": "theirs"})
    status, receipt = await admin.ask("POST", path, {"shared_scope": "ours"})
    scope = find_scope(shared.store, "ours")

    assert (both, none, unknown, status) == (400, 400, 404, 200)
    assert (receipt["tenant"], receipt["shared_scope"]) == ("eve", "ours")
    assert receipt["what"] == f"shared scope {scope.scope_id}" == scope_target(scope, 1).describe()
    assert receipt["blocks"] > 0
    assert await cached(shared, "bob") == [0]


async def test_erasing_a_member_keeps_the_scope(shared: GatewayFixture) -> None:
    """Its cache is the owner's: erasing the owner erases it."""
    await cached(shared, "ada")
    scope = find_scope(shared.store, "ours")
    await shared.quiet()
    (one,) = list_holdings(shared.engine.namespaces)

    assert not ErasureTarget(1, 1).covers(one.stats.namespace)
    assert ErasureTarget(scope.owner_id, 1).covers(one.stats.namespace)
    assert not ErasureTarget(scope.owner_id, 1, "default").covers(one.stats.namespace)


async def test_deleting_cached_content_keeps_others_blocks(shared: GatewayFixture) -> None:
    """The same content may be held for another member; it goes when that lease ends."""
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


async def test_administrators_manage_scopes(gateway: GatewayFixture) -> None:
    """In force for the next request; a tenant's key may not manage them."""
    admin = AdminClient(gateway)
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
async def test_refuses_invalid_scope(
    gateway: GatewayFixture, body: dict[str, Any], status: int, code: str
) -> None:
    """With the reason; nothing is created."""
    admin = AdminClient(gateway)
    given, answer = await admin.ask("PUT", "/admin/v1/shared-scopes/ours", body)

    assert (given, answer["error"]["code"]) == (status, code)
    assert await admin.ask("GET", "/admin/v1/shared-scopes") == (200, {"shared_scopes": []})
