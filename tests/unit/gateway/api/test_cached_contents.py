"""Cached contents: named prefixes that are retained until they expire."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gateway.retention_classes import CacheProfile
from tenancy.accounts.tenants import change_tenant
from tests.tables import each_row
from tests.unit.gateway.gateway_fixture import PATIENCE_S, GatedRunner, GatewayFixture

ALL = "/v1beta/cachedContents"
LONG = "The trunk is shared, the branches are one's own. " * 6


def creation(gateway: GatewayFixture, **fields: Any) -> dict[str, Any]:
    return {
        "model": f"models/{gateway.model}",
        "systemInstruction": {"parts": [{"text": "You answer briefly."}]},
        "contents": [{"role": "user", "parts": [{"text": LONG}]}],
        "ttl": "300s",
        **fields,
    }


def question(gateway: GatewayFixture, name: str) -> tuple[str, dict[str, Any]]:
    body = {
        "contents": [{"role": "user", "parts": [{"text": "And now?"}]}],
        "cachedContent": name,
        "generationConfig": {"maxOutputTokens": 4, "temperature": 0},
    }
    return f"/v1beta/models/{gateway.model}:generateContent", body


async def create(gateway: GatewayFixture, who: str = "ada", **fields: Any) -> dict[str, Any]:
    status, found, _ = await gateway.ask(ALL, creation(gateway, **fields), who=who)
    assert status == 200, found
    resource: dict[str, Any] = found
    return resource


async def test_every_version_of_the_api_is_served(gateway: GatewayFixture) -> None:
    """Google's SDK asks for `v1alpha` where a client tries what is new."""
    status, made, _ = await gateway.ask("/v1alpha/cachedContents", creation(gateway))
    path, body = question(gateway, made["name"])
    answers = [
        await gateway.ask(path.replace("v1beta", version), body)
        for version in ("v1", "v1beta", "v1alpha")
    ]

    assert status == 200
    assert [status for status, _, _ in answers] == [200, 200, 200]
    for _, answer, _ in answers:
        assert answer["usageMetadata"]["cachedContentTokenCount"] > 0


def hour_request(gateway: GatewayFixture) -> dict[str, Any]:
    """Return a request of another dialect with the same text at a breakpoint, for an hour."""
    control = {"type": "ephemeral", "ttl": "1h"}
    text = {"type": "text", "text": LONG, "cache_control": control}
    messages = [{"role": "user", "content": [text]}]
    return {"model": gateway.model, "max_tokens": 1, "messages": messages}


async def asked(gateway: GatewayFixture, name: str, who: str = "ada") -> tuple[int, dict[str, Any]]:
    path, body = question(gateway, name)
    status, found, _ = await gateway.ask(path, body, who=who)
    return status, found


async def test_request_reads_cached_content(gateway: GatewayFixture) -> None:
    """The response counts it in the prompt and as cached, to the token."""
    resource = await create(gateway, displayName="trunk")

    status, found = await asked(gateway, resource["name"])

    tokens = resource["usageMetadata"]["totalTokenCount"]
    assert (status, resource["displayName"]) == (200, "trunk")
    assert found["usageMetadata"]["cachedContentTokenCount"] >= tokens
    assert found["usageMetadata"]["promptTokenCount"] > tokens


async def test_creates_without_promise_if_the_quota_is_full(
    gateway: GatewayFixture,
) -> None:
    """A quota bounds promises, not names: the response says so, storage is not billed, and
    requests read it while it is cached."""
    change_tenant(gateway.store, "ada", {"promised_blocks_max": 0})
    gateway.gateway.context.authenticator.refresh_now()
    status, resource, response = await gateway.ask(ALL, creation(gateway))
    before = gateway.store.query("select cache_write_tokens, fresh_tokens from ledger")
    _, found = await asked(gateway, resource["name"])

    tokens = resource["usageMetadata"]["totalTokenCount"]
    assert status == 200
    assert "lease=refused; bound=quota" in response.headers["X-Trunkline-Cache"]
    assert before == [(0, tokens)]
    assert found["usageMetadata"]["cachedContentTokenCount"] >= tokens


async def test_bills_creation_as_a_write_and_use_as_a_read(
    gateway: GatewayFixture,
) -> None:
    resource = await create(gateway)
    await asked(gateway, resource["name"])

    rows = gateway.store.query(
        "select cache_write_tokens, cache_read_tokens, prompt_tokens from ledger order by entry_id"
    )

    tokens = resource["usageMetadata"]["totalTokenCount"]
    assert rows[0] == (tokens, 0, tokens)
    assert rows[1][0] == 0
    assert rows[1][1] >= tokens
    gateway.gateway.context.contracts.entries.check()


async def test_creation_bills_all_tokens_even_if_cached(gateway: GatewayFixture) -> None:
    """A tenant buys retention: blocks that happen to be cached give no discount."""
    path, body = question(gateway, "")
    del body["cachedContent"]
    await gateway.ask(path, {**body, "contents": creation(gateway)["contents"]})

    resource = await create(gateway, systemInstruction=None)

    rows = gateway.store.query("select cache_write_tokens from ledger order by entry_id")
    assert rows[-1] == (resource["usageMetadata"]["totalTokenCount"],)


async def test_evicted_content_is_recomputed_and_billed_as_read(gateway: GatewayFixture) -> None:
    """The operator bears the recomputation."""
    resource = await create(gateway)
    await gateway.engine.get_stats()
    namespaces = [space.namespace for space in gateway.engine.namespaces]
    for namespace in namespaces:
        await gateway.engine.erase(namespace)
        gateway.gateway.context.contracts.entries.erase_namespace(namespace)

    _, found = await asked(gateway, resource["name"])

    tokens = resource["usageMetadata"]["totalTokenCount"]
    assert found["usageMetadata"]["cachedContentTokenCount"] == tokens


async def test_survives_a_restart_of_gateway_and_engine(unopened_gateway: GatewayFixture) -> None:
    """Both start with nothing but the database, and compute it again."""
    await unopened_gateway.open()
    resource = await create(unopened_gateway)
    await unopened_gateway.close()
    unopened_gateway.runner = GatedRunner(unopened_gateway.card.config.vocab)
    await unopened_gateway.open()
    (status, found), (_, again) = [
        await asked(unopened_gateway, resource["name"]) for _ in range(2)
    ]
    await unopened_gateway.check_quiet()
    await unopened_gateway.close()

    tokens = resource["usageMetadata"]["totalTokenCount"]
    assert status == 200
    assert found["usageMetadata"]["cachedContentTokenCount"] == tokens
    assert again["usageMetadata"]["cachedContentTokenCount"] >= tokens
    rows = unopened_gateway.store.query(
        "select recomputed_promised_tokens from ledger order by entry_id"
    )
    assert [row[0] for row in rows] == [0, tokens, 0]


async def test_lists_in_pages_without_content(gateway: GatewayFixture) -> None:
    """In the order of ids, each once."""
    names = {(await create(gateway))["name"] for _ in range(3)}
    seen: list[dict[str, Any]] = []
    token = ""
    for _ in range(5):
        _, page, _ = await gateway.ask(f"{ALL}?pageSize=2&pageToken={token}", method="GET")
        seen += page["cachedContents"]
        token = page.get("nextPageToken", "")
        if not token:
            break

    assert {one["name"] for one in seen} == names
    assert len(seen) == 3
    assert "contents" not in seen[0]
    assert "systemInstruction" not in seen[0]


async def test_empty_list_is_an_empty_object(gateway: GatewayFixture) -> None:
    """As Gemini's API answers."""
    status, page, _ = await gateway.ask(ALL, method="GET")

    assert (status, page) == (200, {})


async def test_updates_expiry_and_deletes(gateway: GatewayFixture) -> None:
    """Both answer 200 with JSON."""
    name = (await create(gateway))["name"]
    path = f"/v1/{name}"
    _, before, _ = await gateway.ask(path, method="GET")

    changed, after, _ = await gateway.ask(path, {"ttl": "7200s"}, method="PATCH")
    deleted, gone, _ = await gateway.ask(path, method="DELETE")
    again, _, _ = await gateway.ask(path, method="GET")
    used, _ = await asked(gateway, name)

    assert after["expireTime"] > before["expireTime"]
    assert (changed, deleted, gone) == (200, 200, {})
    assert (again, used) == (403, 403)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"displayName": "branch"}, "displayName"),
        ({"model": "models/other"}, "model"),
        ({"contents": [{"parts": [{"text": "other"}]}]}, "contents"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig"),
    ],
)
async def test_refuses_changes_of_immutable_fields(
    gateway: GatewayFixture, fields: dict[str, Any], param: str
) -> None:
    """A silently dropped change would look like a change. Unchanged values may be sent back."""
    resource = await create(gateway, displayName="trunk")
    path = f"/v1/{resource['name']}"
    same = {name: resource[name] for name in ("name", "model", "displayName", "usageMetadata")}

    status, error, _ = await gateway.ask(path, {"ttl": "7200s", **fields}, method="PATCH")
    as_it_was, _, _ = await gateway.ask(path, {**same, "ttl": "7200s"}, method="PATCH")

    violations = error["error"]["details"][1]["fieldViolations"]
    assert (status, violations[0]["field"], as_it_was) == (400, param, 200)


@pytest.mark.parametrize("kind", ["text/plain", "application/json; charset=latin-1"])
async def test_refuses_bodies_that_are_not_json(gateway: GatewayFixture, kind: str) -> None:
    """Before anything is stored."""
    name = (await create(gateway))["name"]
    typed = {"Content-Type": kind}
    make, _, _ = await gateway.ask(ALL, creation(gateway), headers=typed)
    change, _, _ = await gateway.ask(f"/v1/{name}", {"ttl": "9s"}, method="PATCH", headers=typed)
    quote, _, _ = await gateway.ask("/v1/cache/quote", {}, headers=typed)
    _, listed, _ = await gateway.ask(ALL, method="GET")

    assert (make, change, quote) == (400, 400, 415)
    assert [one["name"] for one in listed["cachedContents"]] == [name]


async def test_deletion_frees_blocks(gateway: GatewayFixture) -> None:
    name = (await create(gateway))["name"]
    held = (await gateway.engine.get_stats()).cached_blocks

    await gateway.ask(f"/v1/{name}", method="DELETE")

    assert held > 0
    assert (await gateway.engine.get_stats()).cached_blocks == 0


async def disconnect_at(gateway: GatewayFixture, has_come: Callable[[], bool]) -> None:
    """Create a cached content and disconnect at this point; return when the server knows it."""
    asking = asyncio.create_task(create(gateway))
    await gateway.until(has_come)
    asking.cancel()
    await asyncio.wait([asking])
    await gateway.ask("/healthz", method="GET", who=None)


async def test_disconnect_while_storing_leaves_no_content(
    gateway: GatewayFixture,
) -> None:
    """It is not billed, and a listed one would be read for free."""
    is_busy, may_end = threading.Event(), threading.Event()

    def keep_busy() -> None:
        with gateway.store.change():
            is_busy.set()
            may_end.wait(PATIENCE_S)

    writing = asyncio.create_task(asyncio.to_thread(keep_busy))
    await gateway.until(is_busy.is_set)
    await disconnect_at(gateway, lambda: bool(gateway.gateway.context.work.tasks))
    may_end.set()
    await writing
    await gateway.until(lambda: [line["ending"] for line in gateway.lines] == ["cancelled"])
    await gateway.check_quiet()

    assert gateway.store.query("select count(*) from cached_contents where ended_ms is null") == [
        (0,)
    ]
    assert gateway.entries() == []


async def test_disconnect_while_computing_leaves_no_lease(
    gateway: GatewayFixture,
) -> None:
    """A lease without a request would be charged as storage until it expires."""
    gateway.runner.hold_after(0)
    await disconnect_at(gateway, lambda: gateway.runner.is_held)
    gateway.runner.release()
    await gateway.check_quiet()
    async with asyncio.timeout(PATIENCE_S):  # no event reports the rollback
        while len(gateway.engine.namespaces):
            await gateway.engine.get_stats()

    assert gateway.entries()[0][0] == "cancelled"


async def test_deletion_keeps_blocks_that_others_retain(gateway: GatewayFixture) -> None:
    """The same text under another name, or at a breakpoint, was paid for too."""
    first, second = await create(gateway), await create(gateway, ttl="7200s")
    held = (await gateway.engine.get_stats()).cached_blocks
    await gateway.ask(f"/v1/{first['name']}", method="DELETE")
    after_one = (await gateway.engine.get_stats()).cached_blocks
    await gateway.ask(f"/v1/{second['name']}", method="DELETE")
    after_both = (await gateway.engine.get_stats()).cached_blocks

    assert (after_one, after_both) == (held, 0)
    rows = gateway.store.query("select cache_write_tokens, cache_read_tokens from ledger")
    assert rows == [(first["usageMetadata"]["totalTokenCount"], 0)] * 2


async def test_deletion_ends_no_promise_at_a_breakpoint(gateway: GatewayFixture) -> None:
    """A tenant that wrote the same text for an hour, in any dialect, has that hour."""
    await gateway.ask("/v1/messages", hour_request(gateway))
    resource = await create(gateway, systemInstruction=None)
    held = (await gateway.engine.get_stats()).cached_blocks
    await gateway.ask(f"/v1/{resource['name']}", method="DELETE")
    after = (await gateway.engine.get_stats()).cached_blocks
    _, again, _ = await gateway.ask("/v1/messages", hour_request(gateway))

    assert (held, after) == (after, held)
    assert again["usage"]["cache_read_input_tokens"] == resource["usageMetadata"]["totalTokenCount"]
    promises = gateway.gateway.context.contracts.promises.by_class(gateway.gateway.context.clock())
    assert (promises["1h"]["running"], promises["resource"]["given_up"]) == (1, 1)


async def test_deleted_content_is_not_billed_as_read(gateway: GatewayFixture) -> None:
    """The same text is written again."""
    resource = await create(gateway, systemInstruction=None)
    await gateway.ask(f"/v1/{resource['name']}", method="DELETE")
    _, found, _ = await gateway.ask("/v1/messages", hour_request(gateway))

    tokens = resource["usageMetadata"]["totalTokenCount"]
    assert found["usage"]["cache_read_input_tokens"] == 0
    assert found["usage"]["cache_creation_input_tokens"] == tokens


async def test_expired_content_is_not_found(gateway: GatewayFixture) -> None:
    """It expires by the clock, before any sweep."""
    name = (await create(gateway, ttl="300s"))["name"]
    now = gateway.wall
    gateway.wall = lambda: now() + 301_000
    status, error = await asked(gateway, name)
    streamed, _, _ = await gateway.ask(
        f"/v1/models/{gateway.model}:streamGenerateContent?alt=sse", question(gateway, name)[1]
    )
    seen, _, _ = await gateway.ask(f"/v1beta/{name}", method="GET")
    listed = (await gateway.ask(ALL, method="GET"))[1]

    assert (status, streamed, seen, listed) == (403, 403, 403, {})
    assert error["error"]["details"][0]["reason"] == "CACHED_CONTENT_NOT_FOUND"
    await gateway.check_quiet()


async def test_another_tenants_content_is_not_found(gateway: GatewayFixture) -> None:
    """It cannot be used, shown or deleted."""
    name = (await create(gateway))["name"]

    use, _ = await asked(gateway, name, who="bob")
    see, _, _ = await gateway.ask(f"/v1/{name}", method="GET", who="bob")
    end, _, _ = await gateway.ask(f"/v1/{name}", method="DELETE", who="bob")
    change, _, _ = await gateway.ask(f"/v1/{name}", {"ttl": "9s"}, method="PATCH", who="bob")

    assert [use, see, end, change] == [403, 403, 403, 403]
    assert (await asked(gateway, name))[0] == 200


@each_row(
    ("fields", "words"),
    [
        ({"ttl": "300"}, "ttl"),
        ({"ttl": "0s"}, "future"),
        ({"ttl": "1s", "expireTime": "2030-01-01T00:00:00Z"}, "expected only one"),
        ({"ttl": None, "expireTime": "yesterday"}, "expireTime"),
        ({"ttl": None, "expireTime": "2001-01-01T00:00:00Z"}, "future"),
        ({"contents": [], "systemInstruction": None}, "nothing to cache"),
        ({"model": ""}, "model"),
        ({"model": "models/other"}, "Model not found"),
        ({"displayName": "x" * 129}, "display"),
    ],
)
async def test_refused_creation_leaves_no_row_lease_or_hold(
    gateway: GatewayFixture, fields: dict[str, Any], words: str
) -> None:
    status, found, _ = await gateway.ask(ALL, creation(gateway, **fields))

    assert 400 <= status < 500
    assert words in json.dumps(found)
    assert gateway.store.query("select 1 from cached_contents") == []
    assert gateway.store.query("select 1 from holds") == []


async def test_refuses_content_below_the_minimum(gateway: GatewayFixture) -> None:
    profiles = {"gemini": CacheProfile(min_tokens=400)}
    caching = msgspec.structs.replace(gateway.config.caching, profiles=profiles)
    gateway.gateway.context.config = msgspec.structs.replace(gateway.config, caching=caching)

    status, found, _ = await gateway.ask(ALL, creation(gateway))

    assert status == 400
    assert "expected at least 400" in found["error"]["message"]
    assert gateway.store.query("select 1 from cached_contents") == []


async def test_limits_cached_contents_per_tenant(gateway: GatewayFixture) -> None:
    caching = msgspec.structs.replace(gateway.config.caching, resources_per_tenant_max=1)
    gateway.gateway.context.config = msgspec.structs.replace(gateway.config, caching=caching)
    await create(gateway)

    status, found, _ = await gateway.ask(ALL, creation(gateway))

    assert status == 429
    assert found["error"]["status"] == "RESOURCE_EXHAUSTED"


async def test_sweeps_expired_content(
    unopened_gateway: GatewayFixture,
) -> None:
    """It is a tenant's prompt, stored for its lifetime only."""
    await unopened_gateway.open()
    await create(unopened_gateway, ttl="300s")
    held = "select count(*) from cached_contents where content is not null"
    before = unopened_gateway.store.query(held)[0][0]
    now = unopened_gateway.wall
    unopened_gateway.wall = lambda: now() + 301_000
    await unopened_gateway.close()

    assert (before, unopened_gateway.store.query(held)[0][0]) == (1, 0)
