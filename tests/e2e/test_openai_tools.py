"""Functions, JSON and breakpoints in chat through OpenAI's SDK and its parsing helpers.

The model is a fake that generates the text that a test sets; the template has no tools.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.e2e.sdks import CALLS, CITY, HELLO, SYSTEM, chat_request, response_request
from tests.unit.gateway.gateway_fixture import GatewayFixture

pytestmark = pytest.mark.usefixtures("room_for_tools")

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


class Point(BaseModel):
    """A class that an application parses answers into."""

    x: Literal[1, 2, 3]
    label: Literal["a", "b"]


async def test_calls_are_equal_in_completion_and_stream(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """Text first, then each call with its id; the finish reason is `tool_calls`."""
    gateway.say(CALLS)
    unary = await client.chat.completions.create(**chat_request(gateway, tools=[WEATHER]))
    async with client.chat.completions.stream(**chat_request(gateway, tools=[WEATHER])) as stream:
        kinds = {event.type async for event in stream}
        folded = await stream.get_final_completion()

    first, second = unary.choices[0], folded.choices[0]
    assert first.finish_reason == second.finish_reason == "tool_calls"
    found = [
        [
            (call.function.name, call.function.arguments)
            for call in choice.message.tool_calls or ()
            if call.type == "function"
        ]
        for choice in (first, second)
    ]
    arguments = ['{"city": "Oslo"}', '{"city": "Rome", "days": 2.50}']
    assert found[0] == found[1] == [("weather", one) for one in arguments]
    assert (first.message.content or "").strip() == "Let me see."
    assert first.message.content == second.message.content
    assert len({call.id for call in first.message.tool_calls or ()}) == 2
    assert "tool_calls.function.arguments.delta" in kinds
    await gateway.check_quiet()


async def test_streams_calls_of_several_choices(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """The helper's accumulator expects choice 0 first, and each choice's calls apart."""
    gateway.say(CALLS)
    async with client.chat.completions.stream(
        **chat_request(gateway, tools=[WEATHER], n=2)
    ) as stream:
        folded = await stream.get_final_completion()

    assert [choice.index for choice in folded.choices] == [0, 1]
    assert [len(choice.message.tool_calls or ()) for choice in folded.choices] == [2, 2]
    assert {choice.finish_reason for choice in folded.choices} == {"tool_calls"}
    ids = [call.id for choice in folded.choices for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == 4
    await gateway.check_quiet()


async def test_accepts_an_answer_with_its_results_as_history(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """A full round with the SDK's message, which reads the first prompt."""
    options: Any = {"ttl": "30m"}
    gateway.say(CALLS)
    first = await client.chat.completions.create(
        **chat_request(gateway, tools=[WEATHER], prompt_cache_options=options)
    )
    message = first.choices[0].message
    said: Any = message.to_dict()
    results: Any = [
        {"role": "tool", "tool_call_id": call.id, "content": "dry"}
        for call in message.tool_calls or ()
    ]
    gateway.say("Dry in both.")
    second = await client.chat.completions.create(
        **chat_request(
            gateway, messages=[HELLO, said, *results], tools=[WEATHER], prompt_cache_options=options
        )
    )

    assert second.choices[0].message.content == "Dry in both."
    assert second.choices[0].finish_reason == "stop"
    wrote, read = first.usage.prompt_tokens_details, second.usage.prompt_tokens_details
    assert wrote.cache_write_tokens
    assert read.cached_tokens == wrote.cache_write_tokens
    await gateway.check_quiet()


async def test_parse_returns_an_object_of_the_schema(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """`.parse()` of both endpoints, with the SDK's schema of a class.

    The model draws random tokens under constrained decoding.
    """
    chat = await client.chat.completions.parse(
        **chat_request(gateway, response_format=Point, seed=3)
    )
    response = await client.responses.parse(
        **response_request(gateway, text_format=Point, extra_body={"seed": 3})
    )

    assert isinstance(chat.choices[0].message.parsed, Point)
    assert isinstance(response.output_parsed, Point)
    await gateway.check_quiet()


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
async def test_accepts_the_sdks_parsed_fields_in_history(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """Applications append the message with the fields that the SDK added; the prompt must not
    change.
    """
    function = openai.pydantic_function_tool(Point)
    answered = await client.chat.completions.parse(
        **chat_request(gateway, response_format=Point, seed=3)
    )
    gateway.say('<tool_call>\n{"name": "Point", "arguments": {"x": 1, "label": "a"}}\n</tool_call>')
    async with client.chat.completions.stream(**chat_request(gateway, tools=[function])) as stream:
        called = await stream.get_final_completion()
    message = called.choices[0].message
    call = (message.tool_calls or [])[0]
    history: Any = [HELLO, answered.choices[0].message, HELLO, message]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "drawn"})
    gateway.say("Drawn.")
    last = await client.chat.completions.create(
        **chat_request(gateway, messages=history, tools=[function])
    )

    assert isinstance(answered.choices[0].message.parsed, Point)
    assert isinstance(call.function.parsed_arguments, Point)
    assert last.choices[0].message.content == "Drawn."
    await gateway.check_quiet()


async def test_truncated_json_raises_in_parse(gateway: GatewayFixture, client: AsyncOpenAI) -> None:
    gateway.say('{"x":3,"label":"a"}')
    with pytest.raises(openai.LengthFinishReasonError):
        await client.chat.completions.parse(
            **chat_request(gateway, response_format=Point, max_completion_tokens=3)
        )


PICK: Any = {"type": "function", "function": {"name": "pick", "parameters": CITY}}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "pick"}}], ids=str
)
async def test_forced_call_is_constrained_to_a_call(
    gateway: GatewayFixture, client: AsyncOpenAI, choice: Any
) -> None:
    """Decoding follows the function's schema."""
    tools = [PICK] if choice == "required" else [WEATHER, PICK]
    answer = await client.chat.completions.create(
        **chat_request(gateway, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    )

    calls: Any = answer.choices[0].message.tool_calls
    (call,) = calls
    assert call.function.name == "pick"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    assert answer.choices[0].finish_reason in ("stop", "tool_calls")
    await gateway.check_quiet()


async def test_refuses_unsatisfiable_schema_by_field(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """Before a hold is written: it costs nothing."""
    wrong: Any = {"type": "nonsense"}
    strict: Any = {"name": "f", "strict": True, "parameters": {"type": "object", "required": 1}}
    schema: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": wrong}}
    with pytest.raises(openai.BadRequestError) as of_format:
        await client.chat.completions.create(**chat_request(gateway, response_format=schema))
    with pytest.raises(openai.BadRequestError) as of_tool:
        await client.chat.completions.create(
            **chat_request(gateway, tools=[{"type": "function", "function": strict}])
        )
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": wrong}}
    with pytest.raises(openai.BadRequestError) as of_text:
        await client.responses.create(**response_request(gateway, text=text))

    assert {one.value.code for one in (of_format, of_tool, of_text)} == {"invalid_json_schema"}
    assert of_format.value.param == "response_format.json_schema.schema.type"
    assert str(of_tool.value.param).startswith("tools[0]")
    assert of_text.value.param == "text.format.schema.type"
    assert gateway.entries() == []
    await gateway.check_quiet()


@pytest.mark.parametrize(
    ("schema", "steps"),
    [({"$ref": "#"}, "$ref"), ({"anyOf": [{"$ref": "#/anyOf/0"}]}, "anyOf.0.$ref")],
    ids=["the schema itself", "an alternative"],
)
async def test_arguments_without_end_are_a_client_error(
    gateway: GatewayFixture, client: AsyncOpenAI, schema: Any, steps: str
) -> None:
    """The error names the client's reference; the server has not failed."""
    function: Any = {"name": "f", "parameters": schema}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            **chat_request(
                gateway, tools=[{"type": "function", "function": function}], tool_choice="required"
            )
        )

    place = f"tools[0].function.parameters.{steps}"
    assert (caught.value.code, caught.value.param) == ("invalid_json_schema", place)
    await gateway.check_quiet()


async def test_sdk_passes_every_caching_field(gateway: GatewayFixture, client: AsyncOpenAI) -> None:
    """By its own names or as extra fields.

    Each key has a separate cache, and the deprecated field reads any cached prefix.
    """

    async def ask(**fields: Any) -> int:
        answer = await client.chat.completions.create(
            **chat_request(
                gateway,
                messages=[{"role": "user", "content": SYSTEM}],
                max_completion_tokens=2,
                **fields,
            )
        )
        details = answer.usage.prompt_tokens_details
        return (details and details.cached_tokens) or 0

    narrowings: list[Any] = [
        {},
        {"extra_body": {"cache_salt": "b"}},
        {"extra_body": {"cache_salt": "a"}},
        {"extra_body": {"extra_key": "a"}},
    ]
    first = [await ask(**fields) for fields in narrowings]
    second = [await ask(**fields, prompt_cache_retention="24h") for fields in narrowings]

    assert first == [0] * len(narrowings)
    assert len(set(second)) == 1
    assert second[0] > 0
    await gateway.check_quiet()
