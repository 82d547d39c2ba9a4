"""Responses through OpenAI's SDK against a complete gateway.

The tests cover create, the strict stream helper, counting, prewarming and miss diagnosis. The model
is a fake that generates the text that a test sets.
"""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.e2e.sdks import MORE, SYSTEM, chat_request, response_request
from tests.unit.gateway.gateway_fixture import GatewayFixture

pytestmark = pytest.mark.usefixtures("room_for_turns")

CLOCK: Any = {
    "type": "function",
    "name": "clock",
    "description": "The time",
    "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    "strict": False,
}
CALLS = 'One moment.\n<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'


async def test_stream_helper_and_create_return_equal_answers(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """The helper checks order and ids; get_final_response needs the last event."""
    gateway.say("Two words.")
    unary = await client.responses.create(**response_request(gateway, instructions=SYSTEM))
    async with client.responses.stream(**response_request(gateway, instructions=SYSTEM)) as stream:
        kinds = [event.type async for event in stream]
        folded: Any = await stream.get_final_response()

    assert unary.output_text == folded.output_text == "Two words."
    assert unary.status == folded.status == "completed"
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert unary.usage.input_tokens == folded.usage.input_tokens
    assert folded.usage.input_tokens_details.cached_tokens >= unary.usage.input_tokens - 16
    assert unary._request_id is not None
    assert unary.id != folded.id
    await gateway.check_quiet()


async def test_accepts_the_sdks_own_items_as_history(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """An agent appends the output and then the result to the input."""
    gateway.say(CALLS)
    first = await client.responses.create(**response_request(gateway, tools=[CLOCK]))
    async with client.responses.stream(**response_request(gateway, tools=[CLOCK])) as stream:
        events = [event async for event in stream]
    message, call = first.output
    output: Any = [item.to_dict() for item in first.output]
    assert call.type == "function_call"
    gateway.say("It is noon.")
    second = await client.responses.create(
        **response_request(
            gateway,
            input=[
                {"role": "user", "content": "hello"},
                *output,
                {"type": "function_call_output", "call_id": call.call_id, "output": "noon"},
            ],
            tools=[CLOCK],
        )
    )

    assert message.type == "message"
    assert (call.name, call.arguments) == ("clock", '{"zone": "UTC"}')
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    assert second.output_text == "It is noon."
    await gateway.check_quiet()


async def test_truncated_answer_is_incomplete(gateway: GatewayFixture, client: AsyncOpenAI) -> None:
    """The helper has no final response for it."""
    cut = await client.responses.create(
        **response_request(gateway, max_output_tokens=4, extra_body=MORE)
    )
    async with client.responses.stream(
        **response_request(gateway, max_output_tokens=4, extra_body=MORE)
    ) as stream:
        last = [event async for event in stream][-1]
        with pytest.raises(RuntimeError):
            await stream.get_final_response()

    assert cut.status == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert last.type == "response.incomplete"
    assert cut.usage.output_tokens == 4
    await gateway.check_quiet()


async def test_count_equals_the_billed_tokens(gateway: GatewayFixture, client: AsyncOpenAI) -> None:
    """One renderer serves both; a count writes no ledger entry."""
    counted = await client.responses.input_tokens.count(
        model=gateway.model, input="hello", instructions=SYSTEM, tools=[CLOCK]
    )
    entries = len(gateway.entries())
    gateway.say("Hi.")
    answer = await client.responses.create(
        **response_request(gateway, instructions=SYSTEM, tools=[CLOCK])
    )

    assert counted.input_tokens == answer.usage.input_tokens
    assert entries == 0


async def test_request_reads_what_a_prewarm_wrote(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """A prewarm generates nothing, and its write is billed once."""
    items: Any = [
        {
            "role": "user",
            "content": [
                {
                    "type": "input_text",
                    "text": SYSTEM,
                    "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"},
                },
                {"type": "input_text", "text": "hello"},
            ],
        }
    ]
    options: Any = {"mode": "explicit"}
    prewarm: Any = {**options, "prewarm": True}
    warmed = await client.responses.create(
        **response_request(gateway, input=items, prompt_cache_options=prewarm)
    )
    gateway.say("Hi.")
    answer = await client.responses.create(
        **response_request(gateway, input=items, prompt_cache_options=options)
    )

    assert (warmed.status, warmed.output) == ("completed", [])
    wrote = warmed.usage.input_tokens_details
    assert warmed.usage.output_tokens == 0
    assert wrote.cache_write_tokens > 20
    assert wrote.cache_write_tokens_details.ttl_12h_tokens == wrote.cache_write_tokens
    assert answer.usage.input_tokens_details.cached_tokens == wrote.cache_write_tokens
    assert answer.usage.input_tokens_details.cache_write_tokens == 0
    await gateway.check_quiet()


async def test_diagnosis_compares_with_an_earlier_response(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """The gateway remembers every response's prompt, so the baseline needs no field."""
    gateway.say("Hi.")
    first = await client.responses.create(**response_request(gateway, instructions=SYSTEM))

    async def compared(with_id: str, **more: Any) -> Any:
        asked: Any = {"model": gateway.model, "input": "hello", "instructions": SYSTEM, **more}
        options: Any = {"comparison_response_id": with_id}
        answer = await client.responses.create(**asked, prompt_cache_options=options)
        return answer.prompt_cache_diagnostics

    other = await compared(first.id, instructions="Be brief.")
    keyed = await compared(first.id, extra_body={"cache_salt": "k"})
    unknown = await compared("resp_nobody")
    warm = await client.responses.create(
        **response_request(gateway, prompt_cache_options={"ttl": "30m"})
    )
    same = await compared(warm.id, instructions=None)

    assert (other.type, other.reason) == ("cache_miss", "input_changed")
    assert other.cache_missed_tokens > 0
    assert keyed.reason == "prompt_cache_key_changed"
    assert unknown.type == "comparison_response_not_found"
    assert same.type == "cache_hit"


async def test_stored_responses_are_continued_and_deleted(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """Create, retrieve, list the input, continue, delete; afterwards it is not found."""
    gateway.say("Hi.")
    answer = await client.responses.create(**response_request(gateway))
    found = await client.responses.retrieve(answer.id)
    async with client.responses.stream(
        **response_request(gateway, input="and?", previous_response_id=answer.id)
    ) as stream:
        second = await stream.get_final_response()
    items = [item async for item in client.responses.input_items.list(second.id, limit=1)]
    await client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError) as gone:
        await client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.delete(answer.id)
    with pytest.raises(openai.BadRequestError) as previous:
        await client.responses.create(
            **response_request(gateway, input="and?", previous_response_id=answer.id)
        )

    assert found.to_dict() == answer.to_dict()
    assert second.previous_response_id == answer.id
    assert [item.type for item in items] == ["message"] * 3
    assert gone.value.code == "response_not_found"
    assert previous.value.code == "previous_response_not_found"
    assert previous.value.param == "previous_response_id"


async def test_conversations_are_continued_and_listed(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """The SDK's own types read every answer, and its pages find every item."""
    gateway.say(CALLS)
    first: Any = {"type": "message", "role": "user", "content": SYSTEM}
    made = await client.conversations.create(items=[first], metadata={"topic": "books"})
    asked: Any = {"model": gateway.model, "tools": [CLOCK], "conversation": made.id}
    called = await client.responses.create(input="And now?", **asked)
    call = called.output[1]
    assert call.type == "function_call"
    gateway.say("It is noon.")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    answer = await client.responses.create(input=[result], **asked)
    listed = client.conversations.items.list(made.id, order="asc", limit=2)
    items = [item async for item in listed]
    one = await client.conversations.items.retrieve(items[0].id or "", conversation_id=made.id)
    added = await client.conversations.items.create(made.id, items=[first])
    kept = await client.conversations.items.delete(added.last_id, conversation_id=made.id)
    changed = await client.conversations.update(made.id, metadata={"topic": "clocks"})
    deleted = await client.conversations.delete(made.id)

    assert answer.conversation.id == made.id
    kinds = ["message", "message", "message", "function_call", "function_call_output", "message"]
    assert [item.type for item in items] == kinds
    assert one == items[0]
    assert kept == made
    assert changed.metadata == {"topic": "clocks"}
    assert deleted.deleted
    with pytest.raises(openai.NotFoundError):
        await client.conversations.retrieve(made.id)
    await gateway.check_quiet()


async def test_errors_raise_the_sdks_exceptions(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """Their params name this endpoint's fields."""
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="tl-nobody").responses.create(**response_request(gateway))
    with pytest.raises(openai.NotFoundError) as unknown_model:
        await client.responses.create(model="gpt-9", input="hello")
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.responses.create(**response_request(gateway, input="word " * 3_000))

    assert unknown_model.value.code == "model_not_found"
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "input")


@pytest.mark.slow
async def test_sdk_retries_a_draining_server(gateway: GatewayFixture) -> None:
    """The server answers 503 with retry-after; the SDK makes three attempts by default."""
    tries: list[str] = []

    async def note(request: Any) -> None:
        tries.append(request.headers["x-stainless-retry-count"])

    async with AsyncOpenAI(
        base_url=f"{gateway.url}/v1",
        api_key=gateway.keys["ada"],
        max_retries=1,
        http_client=openai.DefaultAsyncHttpxClient(event_hooks={"request": [note]}),
    ) as client:
        await gateway.gateway.drain(0.0)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.responses.create(**response_request(gateway))

    assert tries == ["0", "1"]
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60


async def test_engine_failure_in_a_stream_fails_the_response(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """The last event has the reason, and the SDK's helper has no final response."""
    gateway.runner.hold_after(20)
    async with client.responses.stream(
        **response_request(gateway, max_output_tokens=400, extra_body=MORE)
    ) as stream:
        events = aiter(stream)
        seen = [await anext(events)]
        gateway.runner.fail_launch.update(range(2_000))
        gateway.runner.release()
        seen += [event async for event in events]
        with pytest.raises(RuntimeError):
            await stream.get_final_response()

    last: Any = seen[-1]
    assert last.type == "response.failed"
    assert last.response.error.code == "server_error"


async def test_base_url_without_v1_works(gateway: GatewayFixture) -> None:
    """The omission is a common mistake, so every path exists without /v1 too."""
    async with AsyncOpenAI(
        base_url=gateway.url, api_key=gateway.keys["ada"], max_retries=0
    ) as client:
        gateway.say("Hi.")
        answer = await client.responses.create(**response_request(gateway))
        chat = await client.chat.completions.create(**chat_request(gateway))
        text = await client.completions.create(model=gateway.model, prompt="hello", max_tokens=3)
        models = [model.id async for model in client.models.list()]
        counted = await client.responses.input_tokens.count(model=gateway.model, input="hello")
        found = await client.responses.retrieve(answer.id)

    assert found == answer
    assert answer.output_text == chat.choices[0].message.content == "Hi."
    assert text.choices[0].finish_reason in ("stop", "length")
    assert models == [gateway.model]
    assert counted.input_tokens > 0
