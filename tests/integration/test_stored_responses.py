"""Stored responses over HTTP: a turn continues the one before it, and reads its blocks."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gateway.config import ResponsesConfig
from gateway.dialects.openai.responses.hosted_items import KINDS
from gateway.ledger import response_writer
from gateway.ledger.metering import LedgerReservation
from tenancy.accounts.keys import create_key
from tenancy.errors import LedgerUnavailable, StoreError
from tenancy.types import wall_ms
from tests.unit.gateway.dialects.openai.test_hosted_items import item_of
from tests.unit.gateway.gateway_fixture import GatedRunner, GatewayFixture, parse_events

pytestmark = pytest.mark.usefixtures("room_for_turns")

PATH = "/v1/responses"
LONG = "The trunk is shared, the branches are one's own, and every leaf knows it. " * 4
CLOCK: dict[str, Any] = {
    "type": "function",
    "name": "clock",
    "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
}
CALLS = 'One moment.\n<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'


async def create(
    gateway: GatewayFixture, text: Any = LONG, who: str = "ada", **fields: Any
) -> dict[str, Any]:
    """Return the response to a request, which must succeed."""
    body = {"model": gateway.model, "input": text, "temperature": 0, **fields}
    status, found, _ = await gateway.ask(PATH, body, who=who)
    assert status == 200, found
    if fields.get("stream"):
        found = parse_events(found)[-1]["response"]
    return dict(found)


async def refused(gateway: GatewayFixture, previous: str, who: str = "ada") -> tuple[int, str]:
    """Return the status and the code of a request that continues a response."""
    body = {"model": gateway.model, "input": "And?", "previous_response_id": previous}
    status, found, _ = await gateway.ask(PATH, body, who=who)
    return status, found["error"]["code"] if status != 200 else ""


async def get(gateway: GatewayFixture, path: str, who: str = "ada") -> tuple[int, Any]:
    status, found, _ = await gateway.ask(f"{PATH}/{path}", method="GET", who=who)
    return status, found


@pytest.mark.parametrize("is_stream", [False, True])
async def test_next_turn_reads_the_blocks_of_the_stored_one(
    gateway: GatewayFixture, is_stream: bool
) -> None:
    """The prompt of the second turn begins with the tokens of the first one and its answer."""
    gateway.say("Every leaf knows the trunk, and no leaf knows another one by its name.")
    first = await create(gateway, stream=is_stream)
    second = await create(gateway, "And?", previous_response_id=first["id"], stream=is_stream)
    third = await create(gateway, "Then?", previous_response_id=second["id"])
    by_hand = await create(
        gateway,
        [
            {"role": "user", "content": LONG},
            *first["output"],
            {"role": "user", "content": "And?"},
            *second["output"],
            {"role": "user", "content": "Then?"},
        ],
        store=False,
    )

    for earlier, later in ((first, second), (second, third)):
        usage = earlier["usage"]
        cached = later["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached >= usage["input_tokens"] + usage["output_tokens"] - 16
    assert first["store"]
    assert second["previous_response_id"] == first["id"]
    assert by_hand["usage"]["input_tokens"] == third["usage"]["input_tokens"]
    assert not by_hand["store"]
    assert (await get(gateway, by_hand["id"]))[0] == 404
    await gateway.check_quiet()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_stored_response_is_the_answer(gateway: GatewayFixture, is_stream: bool) -> None:
    answer = await create(gateway, stream=is_stream, max_output_tokens=4, ignore_eos=True)

    assert answer["status"] == "incomplete"
    assert await get(gateway, answer["id"]) == (200, answer)
    assert (await get(gateway, answer["id"], "bob"))[0] == 404


async def test_calls_and_their_results_are_continued(gateway: GatewayFixture) -> None:
    """The client sends the result alone; without it the call stays open."""
    gateway.say(CALLS)
    first = await create(gateway, tools=[CLOCK])
    call = first["output"][-1]
    open_call = await refused(gateway, first["id"])
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
    gateway.say("It is noon.")
    second = await create(gateway, [result], tools=[CLOCK], previous_response_id=first["id"])

    assert call["type"] == "function_call"
    assert open_call == (400, "invalid_value")
    usage = first["usage"]
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached >= usage["input_tokens"] + usage["output_tokens"] - 32
    await gateway.check_quiet()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_calls_name_their_namespace(gateway: GatewayFixture, is_stream: bool) -> None:
    """Beside the function, as Codex reads it, and so do calls that come back."""
    group = {"type": "namespace", "name": "crm", "description": "Times", "tools": [CLOCK]}
    gateway.say(CALLS.replace("clock", "crm.clock"))
    first = await create(gateway, "When?", tools=[CLOCK, group], stream=is_stream)
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
    gateway.say("It is noon.")
    turn = [{"role": "user", "content": "When?"}, *first["output"], result]
    second = await create(gateway, turn, tools=[CLOCK, group])

    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "crm", "clock")
    assert first["tools"][1] == group
    usage = first["usage"]
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached >= usage["input_tokens"] + usage["output_tokens"] - 32


async def test_input_items_are_those_of_the_thread(gateway: GatewayFixture) -> None:
    """In either order, page by page; ids are the same each time."""
    gateway.say("Yes.")
    first = await create(gateway, "one")
    second = await create(gateway, "two", previous_response_id=first["id"])
    _, found = await get(gateway, f"{second['id']}/input_items?order=asc")
    _, last = await get(gateway, f"{second['id']}/input_items?limit=1")
    _, rest = await get(gateway, f"{second['id']}/input_items?after={last['last_id']}")

    texts = [item["content"][0]["text"] for item in found["data"]]
    assert texts == ["one", "Yes.", "two"]
    assert (last["has_more"], rest["has_more"]) == (True, False)
    assert [*last["data"], *rest["data"]] == found["data"][::-1]
    for query in ("limit=0", "limit=x", "order=up", "after=no"):
        assert (await get(gateway, f"{second['id']}/input_items?{query}"))[0] == 400
    assert (await get(gateway, f"{second['id']}/input_items", "bob"))[0] == 404


async def test_items_by_reference_read_the_blocks_of_their_turns(gateway: GatewayFixture) -> None:
    """AI SDK sends the earlier output by reference. Input items can be named too."""
    gateway.say(CALLS)
    first = await create(gateway, tools=[CLOCK])
    message, call = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
    gateway.say("It is noon.")
    _, listed = await get(gateway, f"{first['id']}/input_items")
    references = [{"type": "item_reference", "id": one["id"]} for one in (message, call)]
    question = {"type": "item_reference", "id": listed["data"][0]["id"]}
    second = await create(gateway, [question, *references, result], tools=[CLOCK])
    await gateway.ask(f"{PATH}/{first['id']}", method="DELETE")
    third = await create(gateway, "And?", tools=[CLOCK], previous_response_id=second["id"])

    for earlier, later in ((first, second), (second, third)):
        usage = earlier["usage"]
        cached = later["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached >= usage["input_tokens"] + usage["output_tokens"] - 32
    await gateway.check_quiet()


async def test_missing_and_foreign_items_are_not_found(gateway: GatewayFixture) -> None:
    """As OpenAI's API says it, by the id that was sent."""
    gateway.say("Yes.")
    answer = await create(gateway)
    unstored = await create(gateway, store=False)
    gateway.keys["lab"] = create_key(gateway.store, wall_ms, 1, workspace="lab")
    gateway.gateway.context.authenticator.refresh_now()
    item, gone = answer["output"][0]["id"], unstored["output"][0]["id"]
    turn = [{"role": "user", "content": "Hi"}, {"type": "item_reference"}]

    asked = (("bob", item), ("lab", item), ("ada", gone), ("ada", f"{item}1"), ("ada", "msg_1"))
    for who, name in asked:
        turn[1]["id"] = name
        body = {"model": gateway.model, "input": turn}
        status, found, _ = await gateway.ask(PATH, body, who=who)
        assert (status, found["error"]["code"]) == (404, "item_not_found")
        assert repr(name) in found["error"]["message"]
    turn[1]["id"] = item
    assert (await create(gateway, turn))["store"]


@pytest.mark.slow
async def test_referenced_responses_are_bounded(unopened_gateway: GatewayFixture) -> None:
    """A short body cannot make the server read all that a tenant has stored."""
    gateway = unopened_gateway
    gateway.set_server(body_bytes_max=4_096, body_bytes_in_flight_max=65_536)
    await gateway.open()
    answers = [await create(gateway, instructions=LONG * 5) for _ in range(6)]
    turn = [{"type": "item_reference", "id": one["output"][0]["id"]} for one in answers]
    status, found, _ = await gateway.ask(PATH, {"model": gateway.model, "input": turn})

    assert (status, found["error"]["param"]) == (400, "input")
    assert "limit 12288" in found["error"]["message"]
    await gateway.close()


async def test_deleted_response_is_gone_from_its_thread(gateway: GatewayFixture) -> None:
    """Later responses can be read, and no longer be continued."""
    first = await create(gateway)
    second = await create(gateway, "And?", previous_response_id=first["id"])
    path = f"{PATH}/{first['id']}"
    others, _, _ = await gateway.ask(path, method="DELETE", who="bob")
    status, deleted, _ = await gateway.ask(path, method="DELETE")
    again, _, _ = await gateway.ask(path, method="DELETE")

    assert (others, status, again) == (404, 200, 404)
    assert deleted == {"id": first["id"], "object": "response", "deleted": True}
    assert (await get(gateway, second["id"]))[0] == 200
    assert await refused(gateway, second["id"]) == (400, "previous_response_not_found")


async def test_no_other_tenant_or_workspace_continues_a_response(gateway: GatewayFixture) -> None:
    answer = await create(gateway)
    gateway.keys["lab"] = create_key(gateway.store, wall_ms, 1, workspace="lab")
    gateway.gateway.context.authenticator.refresh_now()

    for who in ("bob", "lab"):
        assert await refused(gateway, answer["id"], who) == (400, "previous_response_not_found")
        assert (await get(gateway, answer["id"], who))[0] == 404


async def test_items_of_hosted_tools_are_stored_listed_and_continued(
    gateway: GatewayFixture,
) -> None:
    """As the client sent them; an answer after them reads what it read before."""
    history = [item_of(kind) for kind in KINDS]
    answer = await create(gateway, [*history, {"role": "user", "content": "Hi"}])
    _, listed = await get(gateway, f"{answer['id']}/input_items?order=asc&limit=100")
    later = await create(gateway, "And?", previous_response_id=answer["id"])

    for shown, sent in zip(listed["data"], history, strict=False):
        assert shown | sent == shown
    assert len(listed["data"]) == len(history) + 1
    read = later["usage"]["input_tokens_details"]["cached_tokens"]
    assert read >= answer["usage"]["input_tokens"] // 64 * 64 - 64 > 0


async def test_cancel_is_refused(gateway: GatewayFixture) -> None:
    answer = await create(gateway)

    status, found, _ = await gateway.ask(f"{PATH}/{answer['id']}/cancel")
    missing, _, _ = await gateway.ask(f"{PATH}/resp_1/cancel")

    assert (status, missing) == (400, 404)
    assert "background" in found["error"]["message"]


async def test_stored_responses_survive_a_restart(unopened_gateway: GatewayFixture) -> None:
    gateway = unopened_gateway
    await gateway.open()
    answer = await create(gateway)
    await gateway.close()
    gateway.runner = GatedRunner(gateway.card.config.vocab)
    await gateway.open()

    assert await get(gateway, answer["id"]) == (200, answer)
    assert await refused(gateway, answer["id"]) == (200, "")
    await gateway.close()


async def test_erasure_deletes_stored_responses(gateway: GatewayFixture) -> None:
    """Of the tenant that asks, with its cache."""
    mine, others = await create(gateway), await create(gateway, who="bob")

    erase = create_key(gateway.store, wall_ms, 1, scopes=frozenset({"cache"}))
    gateway.keys["eraser"] = erase
    gateway.gateway.context.authenticator.refresh_now()
    status, _, _ = await gateway.ask("/v1/cache", method="DELETE", who="eraser")

    assert status == 200
    assert (await get(gateway, mine["id"]))[0] == 404
    assert (await get(gateway, others["id"], "bob"))[0] == 200


async def test_server_may_store_nothing(unopened_gateway: GatewayFixture) -> None:
    """Then every answer says so."""
    gateway = unopened_gateway
    gateway.config = msgspec.structs.replace(
        gateway.config, responses=ResponsesConfig(keep_hours=0)
    )
    await gateway.open()
    answer = await create(gateway, store=True)

    assert not answer["store"]
    assert (await get(gateway, answer["id"]))[0] == 404
    assert await refused(gateway, answer["id"]) == (400, "previous_response_not_found")
    assert gateway.store.query("select * from stored_responses") == []
    await gateway.close()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_full_quota_is_told(unopened_gateway: GatewayFixture, is_stream: bool) -> None:
    """The answer comes all the same, and says that it is not stored."""
    gateway = unopened_gateway
    settings = ResponsesConfig(per_tenant_max=1)
    gateway.config = msgspec.structs.replace(gateway.config, responses=settings)
    await gateway.open()
    first = await create(gateway, stream=is_stream)
    second = await create(gateway, stream=is_stream)

    assert (first["store"], second["store"]) == (True, False)
    assert (await get(gateway, second["id"]))[0] == 404
    assert {"event": "response_not_stored", "tenant_id": 1, "reason": "quota"} in gateway.lines
    await gateway.close()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_failed_database_is_told(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    """The answer comes all the same, and says that it is not stored."""

    def fail(*_: object) -> None:
        raise StoreError("not_written", "the disk is full")

    monkeypatch.setattr(response_writer, "store_responses", fail)
    answer = await create(gateway, stream=is_stream)

    assert not answer["store"]
    lines = [line for line in gateway.lines if line["event"] == "response_not_stored"]
    assert [line["reason"] for line in lines] == ["not_written"]
    await gateway.check_quiet()


async def test_response_without_its_entry_is_withdrawn(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that is not delivered cannot be read later."""
    stored: list[int] = []

    def fail(*_: object, **__: object) -> asyncio.Future[None]:
        stored.append(len(gateway.store.query("select 1 from stored_responses")))
        failed = asyncio.get_running_loop().create_future()
        failed.set_exception(LedgerUnavailable("ledger_unavailable", "the disk is full"))
        return failed

    monkeypatch.setattr(LedgerReservation, "settle", fail)
    body = {"model": gateway.model, "input": LONG}
    status, _, _ = await gateway.ask(PATH, body)
    await gateway.quiet()

    assert (status, stored[0]) == (503, 1)
    assert gateway.store.query("select 1 from stored_responses") == []


async def test_many_responses_are_stored_together(gateway: GatewayFixture) -> None:
    """Each is told its own outcome, whichever transaction it was part of."""
    answers = await asyncio.gather(*(create(gateway, f"{number}") for number in range(12)))

    for one in answers:
        assert one["store"]
        assert await get(gateway, one["id"]) == (200, one)
