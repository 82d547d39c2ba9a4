"""Cached contents: named prefixes, held until their time is over, whatever the pool does."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gateway.retention_classes import CacheProfile
from tenancy.accounts.cached_contents import cached_content_token_seconds
from tenancy.accounts.tenants import change_tenant
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


async def created(gateway: GatewayFixture, who: str = "ada", **fields: Any) -> dict[str, Any]:
    status, found, _ = await gateway.ask(ALL, creation(gateway, **fields), who=who)
    assert status == 200, found
    resource: dict[str, Any] = found
    return resource


def hour(gateway: GatewayFixture) -> dict[str, Any]:
    """The same words in another dialect, kept for an hour."""
    control = {"type": "ephemeral", "ttl": "1h"}
    text = {"type": "text", "text": LONG, "cache_control": control}
    messages = [{"role": "user", "content": [text]}]
    return {"model": gateway.model, "max_tokens": 1, "messages": messages}


async def asked(gateway: GatewayFixture, name: str, who: str = "ada") -> tuple[int, dict[str, Any]]:
    path, body = question(gateway, name)
    status, found, _ = await gateway.ask(path, body, who=who)
    return status, found


async def test_what_was_cached_is_read_and_need_not_be_sent_again(gateway: GatewayFixture) -> None:
    """The answer counts it in the prompt and as cached, to the token."""
    resource = await created(gateway, displayName="trunk")

    status, found = await asked(gateway, resource["name"])

    tokens = resource["usageMetadata"]["totalTokenCount"]
    assert (status, resource["displayName"]) == (200, "trunk")
    assert found["usageMetadata"]["cachedContentTokenCount"] >= tokens
    assert found["usageMetadata"]["promptTokenCount"] > tokens


async def test_without_room_for_its_promise_it_is_made_and_read_all_the_same(
    gateway: GatewayFixture,
) -> None:
    """A quota bounds what is kept, not what may be named: the refusal is said, its keeping is not
    billed, and it is read as long as it is there."""
    change_tenant(gateway.store, "ada", {"promised_blocks_max": 0})
    gateway.gateway.context.registry.refresh_now()
    status, resource, response = await gateway.ask(ALL, creation(gateway))
    before = gateway.store.query("select cache_write_tokens, fresh_tokens from ledger")
    _, found = await asked(gateway, resource["name"])

    tokens = resource["usageMetadata"]["totalTokenCount"]
    assert status == 200
    assert "lease=refused; bound=quota" in response.headers["X-Trunkline-Cache"]
    assert before == [(0, tokens)]
    assert found["usageMetadata"]["cachedContentTokenCount"] >= tokens


async def test_creating_is_billed_once_as_a_write_and_using_as_a_read(
    gateway: GatewayFixture,
) -> None:
    """What was paid for is not paid for again."""
    resource = await created(gateway)
    await asked(gateway, resource["name"])

    rows = gateway.store.query(
        "select cache_write_tokens, cache_read_tokens, prompt_tokens from ledger order by entry_id"
    )

    tokens = resource["usageMetadata"]["totalTokenCount"]
    assert rows[0] == (tokens, 0, tokens)
    assert rows[1][0] == 0
    assert rows[1][1] >= tokens
    gateway.gateway.context.contracts.entries.check()


async def test_creating_pays_for_all_of_it_whatever_is_there(gateway: GatewayFixture) -> None:
    """What is bought is its keeping: words that happen to be cached are no discount on that."""
    path, body = question(gateway, "")
    del body["cachedContent"]
    await gateway.ask(path, {**body, "contents": creation(gateway)["contents"]})

    resource = await created(gateway, systemInstruction=None)

    rows = gateway.store.query("select cache_write_tokens from ledger order by entry_id")
    assert rows[-1] == (resource["usageMetadata"]["totalTokenCount"],)


async def test_an_erased_pool_changes_nothing_for_its_reader(gateway: GatewayFixture) -> None:
    """It is computed again: the operator's cost, still the client's hit."""
    resource = await created(gateway)
    await gateway.engine.get_stats()
    namespaces = [space.namespace for space in gateway.engine.namespaces]
    for namespace in namespaces:
        await gateway.engine.erase(namespace)
        gateway.gateway.context.contracts.entries.erase_namespace(namespace)

    _, found = await asked(gateway, resource["name"])

    tokens = resource["usageMetadata"]["totalTokenCount"]
    assert found["usageMetadata"]["cachedContentTokenCount"] == tokens


async def test_it_survives_a_restart_of_everything(unopened_gateway: GatewayFixture) -> None:
    """Gateway and engine start anew with nothing but the database: it is computed again."""
    await unopened_gateway.open()
    resource = await created(unopened_gateway)
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


async def test_a_list_has_pages_and_shows_no_content(gateway: GatewayFixture) -> None:
    """In the order of their ids, each once."""
    names = {(await created(gateway))["name"] for _ in range(3)}
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


async def test_an_empty_list_is_an_empty_object(gateway: GatewayFixture) -> None:
    """As upstream answers."""
    status, page, _ = await gateway.ask(ALL, method="GET")

    assert (status, page) == (200, {})


async def test_its_time_can_be_changed_and_it_can_be_deleted(gateway: GatewayFixture) -> None:
    """Nothing else can; both answer 200 with JSON."""
    name = (await created(gateway))["name"]
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
async def test_what_cannot_change_is_refused(
    gateway: GatewayFixture, fields: dict[str, Any], param: str
) -> None:
    """A change that is dropped in silence looks like one that was made. What a resource says of
    itself may be sent back."""
    resource = await created(gateway, displayName="trunk")
    path = f"/v1/{resource['name']}"
    same = {name: resource[name] for name in ("name", "model", "displayName", "usageMetadata")}

    status, error, _ = await gateway.ask(path, {"ttl": "7200s", **fields}, method="PATCH")
    as_it_was, _, _ = await gateway.ask(path, {**same, "ttl": "7200s"}, method="PATCH")

    violations = error["error"]["details"][1]["fieldViolations"]
    assert (status, violations[0]["field"], as_it_was) == (400, param, 200)


@pytest.mark.parametrize("kind", ["text/plain", "application/json; charset=latin-1"])
async def test_what_is_not_sent_as_json_is_refused(gateway: GatewayFixture, kind: str) -> None:
    """As on every other path that takes a body, and before anything is kept."""
    name = (await created(gateway))["name"]
    typed = {"Content-Type": kind}
    make, _, _ = await gateway.ask(ALL, creation(gateway), headers=typed)
    change, _, _ = await gateway.ask(f"/v1/{name}", {"ttl": "9s"}, method="PATCH", headers=typed)
    quote, _, _ = await gateway.ask("/v1/cache/quote", {}, headers=typed)
    _, listed, _ = await gateway.ask(ALL, method="GET")

    assert (make, change, quote) == (400, 400, 415)
    assert [one["name"] for one in listed["cachedContents"]] == [name]


async def test_a_deleted_one_gives_its_blocks_back(gateway: GatewayFixture) -> None:
    """Its lease covered them alone."""
    name = (await created(gateway))["name"]
    held = (await gateway.engine.get_stats()).cached_blocks

    await gateway.ask(f"/v1/{name}", method="DELETE")

    assert held > 0
    assert (await gateway.engine.get_stats()).cached_blocks == 0


async def left(gateway: GatewayFixture, has_come: Callable[[], bool]) -> None:
    """A client that asks for a cached content, and leaves when that much has happened; the server
    knows it when this returns."""
    asking = asyncio.create_task(created(gateway))
    await gateway.until(has_come)
    asking.cancel()
    await asyncio.wait([asking])
    await gateway.ask("/healthz", method="GET", who=None)


async def test_one_whose_client_leaves_while_it_is_stored_is_not_kept(
    gateway: GatewayFixture,
) -> None:
    """Nobody has paid for it, and whoever finds it in the list would read it all the same."""
    is_busy, may_end = threading.Event(), threading.Event()

    def keep_busy() -> None:
        with gateway.store.change():
            is_busy.set()
            may_end.wait(PATIENCE_S)

    writing = asyncio.create_task(asyncio.to_thread(keep_busy))
    await gateway.until(is_busy.is_set)
    await left(gateway, lambda: bool(gateway.gateway.context.background))
    may_end.set()
    await writing
    await gateway.until(lambda: [line["ending"] for line in gateway.lines] == ["cancelled"])
    await gateway.check_quiet()

    assert gateway.store.query("select count(*) from cached_contents where ended_ms is null") == [
        (0,)
    ]
    assert gateway.entries() == []


async def test_one_whose_client_leaves_while_it_is_computed_holds_nothing(
    gateway: GatewayFixture,
) -> None:
    """Its lease has no end before its time, and storage is charged for what is held."""
    gateway.runner.hold_after(0)
    await left(gateway, lambda: gateway.runner.is_held)
    gateway.runner.release()
    await gateway.check_quiet()
    async with asyncio.timeout(PATIENCE_S):  # nobody is told when it has been taken back
        while len(gateway.engine.namespaces):
            await gateway.engine.get_stats()

    assert gateway.entries()[0][0] == "cancelled"


async def test_a_deleted_one_leaves_what_others_keep(gateway: GatewayFixture) -> None:
    """The same words under another name, or at a breakpoint, were paid for too."""
    first, second = await created(gateway), await created(gateway, ttl="7200s")
    held = (await gateway.engine.get_stats()).cached_blocks
    await gateway.ask(f"/v1/{first['name']}", method="DELETE")
    after_one = (await gateway.engine.get_stats()).cached_blocks
    await gateway.ask(f"/v1/{second['name']}", method="DELETE")
    after_both = (await gateway.engine.get_stats()).cached_blocks

    assert (after_one, after_both) == (held, 0)
    rows = gateway.store.query("select cache_write_tokens, cache_read_tokens from ledger")
    assert rows == [(first["usageMetadata"]["totalTokenCount"], 0)] * 2


async def test_a_deleted_one_ends_no_promise_at_a_breakpoint(gateway: GatewayFixture) -> None:
    """Whoever wrote the same words for an hour, in whatever dialect, has that hour."""
    await gateway.ask("/v1/messages", hour(gateway))
    resource = await created(gateway, systemInstruction=None)
    held = (await gateway.engine.get_stats()).cached_blocks
    await gateway.ask(f"/v1/{resource['name']}", method="DELETE")
    after = (await gateway.engine.get_stats()).cached_blocks
    _, again, _ = await gateway.ask("/v1/messages", hour(gateway))

    assert (held, after) == (after, held)
    assert again["usage"]["cache_read_input_tokens"] == resource["usageMetadata"]["totalTokenCount"]
    promises = gateway.gateway.context.contracts.promises.by_class(gateway.gateway.context.clock())
    assert (promises["1h"]["running"], promises["resource"]["given_up"]) == (1, 1)


async def test_what_was_deleted_is_nobodys_read(gateway: GatewayFixture) -> None:
    """Nothing of it is there any more: whoever sends the words again writes them again."""
    resource = await created(gateway, systemInstruction=None)
    await gateway.ask(f"/v1/{resource['name']}", method="DELETE")
    _, found, _ = await gateway.ask("/v1/messages", hour(gateway))

    tokens = resource["usageMetadata"]["totalTokenCount"]
    assert found["usage"]["cache_read_input_tokens"] == 0
    assert found["usage"]["cache_creation_input_tokens"] == tokens


async def test_an_expired_one_is_as_if_it_had_never_been(gateway: GatewayFixture) -> None:
    """Its time is over by the clock, whether or not anybody has swept it away."""
    name = (await created(gateway, ttl="300s"))["name"]
    now = gateway.gateway.context.wall
    gateway.gateway.context.wall = lambda: now() + 301_000
    status, error = await asked(gateway, name)
    streamed, _, _ = await gateway.ask(
        f"/v1/models/{gateway.model}:streamGenerateContent?alt=sse", question(gateway, name)[1]
    )
    seen, _, _ = await gateway.ask(f"/v1beta/{name}", method="GET")
    listed = (await gateway.ask(ALL, method="GET"))[1]

    assert (status, streamed, seen, listed) == (403, 403, 403, {})
    assert error["error"]["details"][0]["reason"] == "CACHED_CONTENT_NOT_FOUND"
    await gateway.check_quiet()


async def test_another_tenants_is_as_if_it_were_not_there(gateway: GatewayFixture) -> None:
    """Neither its use, nor its sight, nor its end."""
    name = (await created(gateway))["name"]

    use, _ = await asked(gateway, name, who="bob")
    see, _, _ = await gateway.ask(f"/v1/{name}", method="GET", who="bob")
    end, _, _ = await gateway.ask(f"/v1/{name}", method="DELETE", who="bob")
    change, _, _ = await gateway.ask(f"/v1/{name}", {"ttl": "9s"}, method="PATCH", who="bob")

    assert [use, see, end, change] == [403, 403, 403, 403]
    assert (await asked(gateway, name))[0] == 200


@pytest.mark.parametrize(
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
async def test_what_cannot_be_kept_is_refused_and_leaves_nothing(
    gateway: GatewayFixture, fields: dict[str, Any], words: str
) -> None:
    """No row, no lease, no hold."""
    status, found, _ = await gateway.ask(ALL, creation(gateway, **fields))

    assert 400 <= status < 500
    assert words in json.dumps(found)
    assert gateway.store.query("select 1 from cached_contents") == []
    assert gateway.store.query("select 1 from holds") == []


async def test_one_that_is_too_small_is_refused_with_its_numbers(gateway: GatewayFixture) -> None:
    """An explicit cache below the minimum is an error here, not silence."""
    profiles = {"gemini": CacheProfile(min_tokens=400)}
    caching = msgspec.structs.replace(gateway.config.caching, profiles=profiles)
    gateway.gateway.context.config = msgspec.structs.replace(gateway.config, caching=caching)

    status, found, _ = await gateway.ask(ALL, creation(gateway))

    assert status == 400
    assert "expected at least 400" in found["error"]["message"]
    assert gateway.store.query("select 1 from cached_contents") == []


async def test_a_tenants_cached_contents_are_counted(gateway: GatewayFixture) -> None:
    """Pins without a bound would be somebody else's blocks."""
    caching = msgspec.structs.replace(gateway.config.caching, resources_per_tenant_max=1)
    gateway.gateway.context.config = msgspec.structs.replace(gateway.config, caching=caching)
    await created(gateway)

    status, found, _ = await gateway.ask(ALL, creation(gateway))

    assert status == 429
    assert found["error"]["status"] == "RESOURCE_EXHAUSTED"


async def test_storage_is_tokens_times_seconds_to_the_end(gateway: GatewayFixture) -> None:
    """From creation to deletion or expiry, whichever came first, within the window."""
    resource = await created(gateway, ttl="100s")
    tenant_id, start, tokens = gateway.store.query(
        "select tenant_id, created_ms, tokens from cached_contents"
    )[0]

    whole = cached_content_token_seconds(gateway.store, tenant_id, 0, start + 10**9)
    part = cached_content_token_seconds(gateway.store, tenant_id, start + 40_000, start + 60_000)

    assert tokens == resource["usageMetadata"]["totalTokenCount"]
    assert whole == 100 * tokens
    assert part == 20 * tokens


async def test_what_an_expired_one_held_is_cleared_without_being_asked(
    unopened_gateway: GatewayFixture,
) -> None:
    """It is somebody's prompt: kept for its time, and not a minute longer."""
    await unopened_gateway.open()
    await created(unopened_gateway, ttl="300s")
    held = "select count(*) from cached_contents where content is not null"
    before = unopened_gateway.store.query(held)[0][0]
    now = unopened_gateway.gateway.context.wall
    unopened_gateway.gateway.context.wall = lambda: now() + 301_000
    await unopened_gateway.close()

    assert (before, unopened_gateway.store.query(held)[0][0]) == (1, 0)
