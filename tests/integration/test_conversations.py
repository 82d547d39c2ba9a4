"""Conversations over HTTP: items that clients and responses append to, and that a turn reads."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gateway.config import ResponsesConfig
from gateway.ledger.metering import LedgerReservation
from tenancy.accounts.keys import create_key
from tenancy.errors import LedgerUnavailable
from tenancy.types import wall_ms
from tests.integration.test_stored_responses import create
from tests.published_schema import violations
from tests.tables import each_row
from tests.unit.gateway.gateway_fixture import GatewayFixture

pytestmark = pytest.mark.usefixtures("room_for_turns")

PATH = "/v1/conversations"
LONG = "The trunk is shared, the branches are one's own, and every leaf knows it. " * 4
HI = {"type": "message", "role": "user", "content": "Hello"}
CALL = {"type": "function_call", "call_id": "a", "name": "clock", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "a", "output": "noon"}


async def ask(
    gateway: GatewayFixture, path: str = "", body: Any = None, who: str = "ada", method: str = ""
) -> tuple[int, Any]:
    """Return the status and the body of one request for a conversation."""
    method = method or ("GET" if body is None else "POST")
    status, found, _ = await gateway.ask(f"{PATH}{path}", body, method=method, who=who)
    return status, found


async def make(gateway: GatewayFixture, *items: Any, who: str = "ada") -> str:
    """Return the path of a new conversation."""
    status, found = await ask(gateway, body={"items": list(items)}, who=who)
    assert status == 200, found
    return f"/{found['id']}"


async def respond(
    gateway: GatewayFixture, conversation: str, text: Any = LONG, who: str = "ada", **fields: Any
) -> dict[str, Any]:
    """Return the response to a request in a conversation, which must succeed."""
    return await create(gateway, text, who, conversation=conversation.removeprefix("/"), **fields)


async def texts(gateway: GatewayFixture, conversation: str, query: str = "order=asc") -> list[str]:
    """Return the texts of a page of items."""
    status, found = await ask(gateway, f"{conversation}/items?{query}")
    assert status == 200, found
    return [item["content"][0]["text"] for item in found["data"]]


async def test_conversation_is_made_changed_and_deleted(gateway: GatewayFixture) -> None:
    metadata = {"topic": "trees"}
    status, made = await ask(gateway, body={"metadata": metadata})
    path = f"/{made['id']}"
    changed = await ask(gateway, path, {"metadata": {"topic": "leaves"}})
    found = await ask(gateway, path)
    deleted = await ask(gateway, path, method="DELETE")

    assert status == 200
    assert made["id"].startswith("conv_")
    assert (made["object"], made["metadata"]) == ("conversation", metadata)
    assert changed == found == (200, {**made, "metadata": {"topic": "leaves"}})
    assert deleted == (
        200,
        {"id": made["id"], "object": "conversation.deleted", "deleted": True},
    )
    assert (await ask(gateway, path))[0] == 404
    assert (await ask(gateway, path, method="DELETE"))[0] == 404


async def test_items_are_appended_listed_and_deleted(gateway: GatewayFixture) -> None:
    """With ids that are the server's: an id that comes along may be that of another item."""
    path = await make(gateway, {**HI, "id": "msg_mine_0"})
    _, added = await ask(gateway, f"{path}/items", {"items": [CALL, RESULT]})
    _, first = await ask(gateway, f"{path}/items?limit=2")
    _, rest = await ask(gateway, f"{path}/items?limit=2&after={first['last_id']}")
    item = rest["data"][0]["id"]
    found = await ask(gateway, f"{path}/items/{item}")
    kept = await ask(gateway, f"{path}/items/{item}", method="DELETE")

    assert [one["type"] for one in added["data"]] == ["function_call", "function_call_output"]
    assert first["data"] == added["data"][::-1]
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert found == (200, rest["data"][0])
    assert item != "msg_mine_0"
    assert found[1]["content"] == [{"type": "input_text", "text": "Hello"}]
    assert kept == await ask(gateway, path)
    assert (await ask(gateway, f"{path}/items/{item}"))[0] == 404
    assert (await ask(gateway, f"{path}/items/{item}", method="DELETE"))[0] == 404
    for query in ("limit=0", "order=up", f"after={item}"):
        assert (await ask(gateway, f"{path}/items?{query}"))[0] == 400


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_stored", [False, True])
async def test_turns_of_a_conversation_read_the_blocks_before(
    gateway: GatewayFixture, is_stream: bool, is_stored: bool
) -> None:
    """Input and output are appended whether or not the response itself is stored."""
    more: Any = {"stream": is_stream, "store": is_stored}
    path = await make(gateway, {**HI, "content": LONG})
    gateway.say("Every leaf knows the trunk.")
    first = await respond(gateway, path, "One?", **more)
    second = await respond(gateway, path, "Two?", **more)
    third = await respond(gateway, path, [{"role": "user", "content": "Three?"}], **more)

    for earlier, later in ((first, second), (second, third)):
        usage = earlier["usage"]
        cached = later["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached >= usage["input_tokens"] + usage["output_tokens"] - 16
    said = "Every leaf knows the trunk."
    assert await texts(gateway, path) == [LONG, "One?", said, "Two?", said, "Three?", said]
    assert first["conversation"] == {"id": path.removeprefix("/")}
    assert first["store"] == is_stored
    assert await asyncio.to_thread(violations, first, "Response") == []
    stored, _, _ = await gateway.ask(f"/v1/responses/{first['id']}", method="GET")
    assert stored == (200 if is_stored else 404)
    _, listed = await ask(gateway, f"{path}/items?order=asc")
    assert listed["data"][2] == first["output"][0]
    await gateway.check_quiet()


async def test_items_of_a_conversation_can_be_referred_to(gateway: GatewayFixture) -> None:
    """By the ids that its list shows."""
    path = await make(gateway, HI)
    gateway.say("Yes.")
    answer = await respond(gateway, path, "One?", store=False)
    _, listed = await ask(gateway, f"{path}/items?order=asc")
    references = [{"type": "item_reference", "id": one["id"]} for one in listed["data"]]
    body = {"model": gateway.model, "input": references}
    status, found, _ = await gateway.ask("/v1/responses", body)
    others, _, _ = await gateway.ask("/v1/responses", body, who="bob")

    assert (status, others) == (200, 404)
    assert found["usage"]["input_tokens"] > answer["usage"]["input_tokens"]


async def test_no_other_tenant_or_workspace_sees_a_conversation(gateway: GatewayFixture) -> None:
    path = await make(gateway, HI)
    gateway.keys["lab"] = create_key(gateway.store, wall_ms, 1, workspace="lab")
    gateway.gateway.context.authenticator.refresh_now()
    _, listed = await ask(gateway, f"{path}/items")
    item = f"{path}/items/{listed['data'][0]['id']}"
    other = await make(gateway, who="bob")

    for who in ("bob", "lab"):
        assert (await ask(gateway, path, who=who))[0] == 404
        assert (await ask(gateway, path, {"metadata": {}}, who=who))[0] == 404
        assert (await ask(gateway, path, method="DELETE", who=who))[0] == 404
        assert (await ask(gateway, f"{path}/items", who=who))[0] == 404
        assert (await ask(gateway, f"{path}/items", {"items": [HI]}, who=who))[0] == 404
        assert (await ask(gateway, item, who=who))[0] == 404
        assert (await ask(gateway, item, method="DELETE", who=who))[0] == 404
        body = {"model": gateway.model, "input": "Hi", "conversation": path[1:]}
        status, found, _ = await gateway.ask("/v1/responses", body, who=who)
        assert (status, found["error"]["code"]) == (404, "conversation_not_found")
    assert (await ask(gateway, item.replace(path, other), who="bob"))[0] == 404
    assert await texts(gateway, path) == ["Hello"]


@each_row(
    ("body", "param"),
    [
        ({"items": [HI] * 21}, "items"),
        ({"items": [{"type": "computer_call"}]}, "items[0].type"),
        ({"items": [{"type": "item_reference", "id": "msg_1_0"}]}, "items[0].type"),
        ({"items": [{**HI, "content": [{"type": "input_image"}]}]}, "items[0].content[0]"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"topic": "x"}, "topic"),
    ],
)
async def test_bad_conversations_are_refused(
    gateway: GatewayFixture, body: dict[str, Any], param: str
) -> None:
    """Items are those that a request could send."""
    status, found = await ask(gateway, body=body)

    assert status == 400
    assert found["error"]["param"].startswith(param)


async def test_conversation_excludes_a_previous_response(gateway: GatewayFixture) -> None:
    path = await make(gateway)
    body = {"model": gateway.model, "input": "Hi", "conversation": {"id": path[1:]}}
    refused, found, _ = await gateway.ask("/v1/responses", {**body, "previous_response_id": "r"})
    accepted, _, _ = await gateway.ask("/v1/responses", body)

    assert (refused, found["error"]["param"]) == (400, "conversation")
    assert accepted == 200


async def test_counting_appends_nothing(gateway: GatewayFixture) -> None:
    """And counts the conversation's tokens."""
    path = await make(gateway, {**HI, "content": LONG})
    body = {"model": gateway.model, "input": "Hi", "conversation": path[1:]}
    status, found, _ = await gateway.ask("/v1/responses/input_tokens", body)

    assert status == 200
    assert found["input_tokens"] > 40
    assert await texts(gateway, path) == [LONG]


async def test_full_conversation_is_told(unopened_gateway: GatewayFixture) -> None:
    """The answer comes all the same, and says that nothing was appended or stored."""
    gateway = unopened_gateway
    settings = ResponsesConfig(tenant_bytes_max=300)
    gateway.config = msgspec.structs.replace(gateway.config, responses=settings)
    await gateway.open()
    path = await make(gateway, HI)
    answer = await respond(gateway, path)
    status, found = await ask(gateway, f"{path}/items", {"items": [HI, HI]})

    assert (answer["conversation"], answer["store"]) == (None, False)
    assert (status, found["error"]["code"]) == (429, "storage_full")
    assert await texts(gateway, path) == ["Hello"]
    assert {"event": "response_not_stored", "tenant_id": 1, "reason": "quota"} in gateway.lines
    await gateway.close()


async def test_server_may_store_nothing(unopened_gateway: GatewayFixture) -> None:
    gateway = unopened_gateway
    gateway.config = msgspec.structs.replace(
        gateway.config, responses=ResponsesConfig(keep_hours=0)
    )
    await gateway.open()
    body = {"model": gateway.model, "input": "Hi", "conversation": "conv_1"}
    status, found, _ = await gateway.ask("/v1/responses", body)
    made = await ask(gateway, body={})

    assert (status, found["error"]["code"]) == (404, "conversation_not_found")
    assert (made[0], made[1]["error"]["code"]) == (404, "not_served")
    await gateway.close()


async def test_turn_without_its_entry_is_withdrawn(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that is not delivered is no part of the conversation."""
    path = await make(gateway, HI)

    def fail(*_: object, **__: object) -> asyncio.Future[None]:
        failed = asyncio.get_running_loop().create_future()
        failed.set_exception(LedgerUnavailable("ledger_unavailable", "the disk is full"))
        return failed

    monkeypatch.setattr(LedgerReservation, "settle", fail)
    body = {"model": gateway.model, "input": LONG, "conversation": path[1:]}
    status, _, _ = await gateway.ask("/v1/responses", body)
    await gateway.quiet()

    assert status == 503
    assert await texts(gateway, path) == ["Hello"]
    assert gateway.store.query("select 1 from stored_responses") == []


async def test_erasure_deletes_conversations(gateway: GatewayFixture) -> None:
    """Of the tenant that asks, with its cache."""
    mine, others = await make(gateway, HI), await make(gateway, HI, who="bob")
    erase = create_key(gateway.store, wall_ms, 1, scopes=frozenset({"cache"}))
    gateway.keys["eraser"] = erase
    gateway.gateway.context.authenticator.refresh_now()
    status, _, _ = await gateway.ask("/v1/cache", method="DELETE", who="eraser")

    assert status == 200
    assert (await ask(gateway, mine))[0] == 404
    assert (await ask(gateway, others, who="bob"))[0] == 200


async def test_turns_at_once_stay_together(gateway: GatewayFixture) -> None:
    """Input and output of one response are neighbours, whichever ends first."""
    gateway.say("Yes.")
    path = await make(gateway)
    await asyncio.gather(*(respond(gateway, path, f"{number}") for number in range(6)))

    found = await texts(gateway, path)
    assert sorted(found[::2]) == [str(number) for number in range(6)]
    assert found[1::2] == ["Yes."] * 6


async def test_the_response_that_ends_first_is_appended_first(gateway: GatewayFixture) -> None:
    """Though its request came last: the rule that docs/dialects.md states. Neither turn sees the
    other, and the items of a turn stay together."""
    path = await make(gateway)
    gateway.say("word " * 30, ends=False)
    gateway.runner.hold_after(8)
    long = asyncio.create_task(respond(gateway, path, "first", max_output_tokens=120))
    await gateway.until(lambda: gateway.runner.is_held)
    short = asyncio.create_task(respond(gateway, path, "second", max_output_tokens=16))
    await gateway.until(lambda: sum(gateway.gateway.context.running.values()) == 2)
    gateway.runner.release()
    answers = await asyncio.gather(long, short)
    found = await texts(gateway, path)

    assert [found[place] for place in (0, 2)] == ["second", "first"]
    assert [len(text) for text in found[1::2]] == sorted(len(text) for text in found[1::2])
    assert [one["usage"]["output_tokens"] for one in answers] == [120, 16]
    await gateway.check_quiet()
