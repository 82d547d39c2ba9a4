"""Functions, JSON and breakpoints in chat through OpenAI's own SDK, its parsing helpers included.

The model is a fake that says what a test tells it to; the template is one that knows no tools.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.unit.gateway.gateway_fixture import GatewayFixture

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLS = (
    "Let me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
HELLO: Any = {"role": "user", "content": "hello"}
SYSTEM = "You are a librarian who knows every book there is, and where it stands. " * 2


class Point(BaseModel):
    """What an application wants back."""

    x: Literal[1, 2, 3]
    label: Literal["a", "b"]


@pytest.fixture
def unopened_gateway(unopened_gateway: GatewayFixture) -> GatewayFixture:
    """With room for tools, and answers that are held to schemas."""
    unopened_gateway.context_tokens, unopened_gateway.takes_grammars = 2_048, True
    return unopened_gateway


@pytest.fixture
async def client(gateway: GatewayFixture) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=gateway.keys["ada"], max_retries=0, timeout=60
    ) as client:
        yield client


async def test_calls_are_the_same_in_both_shapes(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """Text first, then each call with its own id; the reason says why it stopped."""
    gateway.say(CALLS)
    whole = await client.chat.completions.create(
        model=gateway.model, messages=[HELLO], tools=[WEATHER]
    )
    async with client.chat.completions.stream(
        model=gateway.model, messages=[HELLO], tools=[WEATHER]
    ) as stream:
        kinds = {event.type async for event in stream}
        folded = await stream.get_final_completion()

    first, second = whole.choices[0], folded.choices[0]
    assert first.finish_reason == second.finish_reason == "tool_calls"
    found = [
        [
            (call.function.name, call.function.arguments)
            for call in choice.message.tool_calls or ()
            if call.type == "function"
        ]
        for choice in (first, second)
    ]
    assert found[0] == [("weather", '{"city": "Oslo"}'), ("weather", '{"city": "Rome"}')]
    assert found[0] == found[1]
    assert (first.message.content or "").strip() == "Let me see."
    assert first.message.content == second.message.content
    assert len({call.id for call in first.message.tool_calls or ()}) == 2
    assert "tool_calls.function.arguments.delta" in kinds
    await gateway.check_quiet()


async def test_calls_of_several_choices_stream_side_by_side(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """The helper's accumulator wants choice 0 first, and each choice's calls apart."""
    gateway.say(CALLS)
    async with client.chat.completions.stream(
        model=gateway.model, messages=[HELLO], tools=[WEATHER], n=2
    ) as stream:
        folded = await stream.get_final_completion()

    assert [choice.index for choice in folded.choices] == [0, 1]
    assert [len(choice.message.tool_calls or ()) for choice in folded.choices] == [2, 2]
    assert {choice.finish_reason for choice in folded.choices} == {"tool_calls"}
    ids = [call.id for choice in folded.choices for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == 4
    await gateway.check_quiet()


async def test_an_answer_goes_back_with_its_results(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """The whole round: the SDK's own message as history, and the prefix read again."""
    options: Any = {"ttl": "30m"}
    gateway.say(CALLS)
    first = await client.chat.completions.create(
        model=gateway.model, messages=[HELLO], tools=[WEATHER], prompt_cache_options=options
    )
    message = first.choices[0].message
    said: Any = message.to_dict()
    results: Any = [
        {"role": "tool", "tool_call_id": call.id, "content": "dry"}
        for call in message.tool_calls or ()
    ]
    gateway.say("Dry in both.")
    second = await client.chat.completions.create(
        model=gateway.model,
        messages=[HELLO, said, *results],
        tools=[WEATHER],
        prompt_cache_options=options,
    )

    assert second.choices[0].message.content == "Dry in both."
    assert second.choices[0].finish_reason == "stop"
    assert first.usage is not None
    assert second.usage is not None
    wrote, read = first.usage.prompt_tokens_details, second.usage.prompt_tokens_details
    assert wrote is not None
    assert read is not None
    assert wrote.cache_write_tokens
    assert read.cached_tokens == wrote.cache_write_tokens
    await gateway.check_quiet()


async def test_a_schema_comes_back_as_an_object(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """`.parse()` of both endpoints, with the schema the SDK makes of a class. Nobody tells the
    model what to say: what it draws is held to the schema."""
    chat = await client.chat.completions.parse(
        model=gateway.model, messages=[HELLO], response_format=Point, seed=3
    )
    response = await client.responses.parse(
        model=gateway.model, input="hello", text_format=Point, extra_body={"seed": 3}
    )

    assert isinstance(chat.choices[0].message.parsed, Point)
    assert isinstance(response.output_parsed, Point)
    await gateway.check_quiet()


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
async def test_what_the_sdk_parsed_goes_back_as_it_is(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """An application appends the message it got, with what the SDK put into it, and so do loops
    over calls; the prompt is what it would be without."""
    function = openai.pydantic_function_tool(Point)
    answered = await client.chat.completions.parse(
        model=gateway.model, messages=[HELLO], response_format=Point, seed=3
    )
    gateway.say('<tool_call>\n{"name": "Point", "arguments": {"x": 1, "label": "a"}}\n</tool_call>')
    async with client.chat.completions.stream(
        model=gateway.model, messages=[HELLO], tools=[function]
    ) as stream:
        called = await stream.get_final_completion()
    message = called.choices[0].message
    call = (message.tool_calls or [])[0]
    history: Any = [HELLO, answered.choices[0].message, HELLO, message]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "drawn"})
    gateway.say("Drawn.")
    last = await client.chat.completions.create(
        model=gateway.model, messages=history, tools=[function]
    )

    assert isinstance(answered.choices[0].message.parsed, Point)
    assert isinstance(call.function.parsed_arguments, Point)
    assert last.choices[0].message.content == "Drawn."
    await gateway.check_quiet()


async def test_a_schema_that_is_cut_off_raises_in_parse(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """Half an object is no object."""
    gateway.say('{"x":3,"label":"a"}')
    with pytest.raises(openai.LengthFinishReasonError):
        await client.chat.completions.parse(
            model=gateway.model, messages=[HELLO], response_format=Point, max_completion_tokens=3
        )


async def test_a_breakpoint_is_written_once_and_read_in_either_spelling(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """Exactly what the first wrote is what the second reads; the sum holds each time."""

    async def ask(mark: dict[str, Any], question: str) -> tuple[int, int, int]:
        messages: Any = [
            {"role": "system", "content": [{"type": "text", "text": SYSTEM, **mark}]},
            {"role": "user", "content": question},
        ]
        answer = await client.chat.completions.create(
            model=gateway.model,
            messages=messages,
            max_tokens=2,
            prompt_cache_options={"mode": "explicit"},
        )
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        assert details is not None
        return (
            answer.usage.prompt_tokens,
            details.cached_tokens or 0,
            details.cache_write_tokens or 0,
        )

    _, nothing, wrote = await ask({"prompt_cache_breakpoint": {"mode": "explicit"}}, "one")
    total, read, again = await ask({"cache_control": {"type": "ephemeral"}}, "another")

    assert (nothing, again) == (0, 0)
    assert read == wrote > 20
    assert read < total
    await gateway.check_quiet()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_the_same_request_again_reads_exactly_what_was_written(
    gateway: GatewayFixture, path: str, seed: int
) -> None:
    """For any marks, in both spellings and both modes; and the sums hold each time."""
    draw = random.Random(seed)
    marks: list[Any] = [
        {},
        {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}},
        {"cache_control": {"type": "ephemeral", "ttl": draw.choice(["5m", "1h"])}},
    ]
    is_chat = path.endswith("completions")
    kind = "text" if is_chat else "input_text"
    parts = [
        {"type": kind, "text": f"part {n} of {seed}. " * 4, **draw.choice(marks)} for n in range(6)
    ]
    body = {
        "model": gateway.model,
        "messages" if is_chat else "input": [{"role": "user", "content": parts}],
        "max_tokens" if is_chat else "max_output_tokens": 2,
        "prompt_cache_options": {"mode": draw.choice(["implicit", "explicit"])},
    }

    async def ask() -> tuple[int, int]:
        status, answer, _ = await gateway.ask(path, body)
        assert status == 200, answer
        usage = answer["usage"]
        details = usage["prompt_tokens_details" if is_chat else "input_tokens_details"]
        read, wrote = details["cached_tokens"], details["cache_write_tokens"]
        assert read + wrote <= usage["prompt_tokens" if is_chat else "input_tokens"]
        return read, wrote

    (nothing, wrote), (read, again) = await ask(), await ask()

    assert (nothing, again) == (0, 0)
    assert read == wrote


async def test_explicit_mode_without_a_mark_reads_and_writes_nothing(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """The engine finds the prefix all the same; the contract says nobody asked for it."""
    found = []
    for _ in range(2):
        answer = await client.chat.completions.create(
            model=gateway.model,
            messages=[{"role": "user", "content": SYSTEM}],
            max_tokens=2,
            prompt_cache_options={"mode": "explicit"},
        )
        assert answer.usage is not None
        found.append(answer.usage.prompt_tokens_details)

    assert [d and (d.cached_tokens, d.cache_write_tokens) for d in found] == [(0, 0), (0, 0)]


async def test_too_long_a_prompt_names_its_own_field(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """Completions have no messages."""
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(
            model=gateway.model, prompt="word " * 1_500, max_tokens=1_500
        )

    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


CITY: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
PICK: Any = {"type": "function", "function": {"name": "pick", "parameters": CITY}}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "pick"}}], ids=str
)
async def test_a_forced_call_is_one_whatever_the_model_would_say(
    gateway: GatewayFixture, client: AsyncOpenAI, choice: Any
) -> None:
    """The answer is held to the function's own schema."""
    tools = [PICK] if choice == "required" else [WEATHER, PICK]
    answer = await client.chat.completions.create(
        model=gateway.model,
        messages=[HELLO],
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=False,
    )

    calls: Any = answer.choices[0].message.tool_calls
    (call,) = calls
    assert call.function.name == "pick"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    assert answer.choices[0].finish_reason in ("stop", "tool_calls")
    await gateway.check_quiet()


async def test_none_is_text_and_keeps_the_prefix(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """What is shown stays; only what an answer means changes."""
    options: Any = {"ttl": "30m"}
    gateway.say(CALLS)
    ask: Any = {"model": gateway.model, "messages": [HELLO], "tools": [WEATHER]}
    first = await client.chat.completions.create(**ask, prompt_cache_options=options)
    second = await client.chat.completions.create(
        **ask, tool_choice="none", prompt_cache_options=options
    )

    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].finish_reason == "stop"
    assert first.usage.prompt_tokens_details.cache_write_tokens > 0
    assert (
        second.usage.prompt_tokens_details.cached_tokens
        == first.usage.prompt_tokens_details.cache_write_tokens
    )


async def test_a_schema_that_no_answer_can_have_is_refused_by_its_field(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """Only the engine can tell; the client looks where it stands."""
    wrong: Any = {"type": "nonsense"}
    strict: Any = {"name": "f", "strict": True, "parameters": {"type": "object", "required": 1}}
    schema: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": wrong}}
    with pytest.raises(openai.BadRequestError) as of_format:
        await client.chat.completions.create(
            model=gateway.model, messages=[HELLO], response_format=schema
        )
    with pytest.raises(openai.BadRequestError) as of_tool:
        await client.chat.completions.create(
            model=gateway.model, messages=[HELLO], tools=[{"type": "function", "function": strict}]
        )
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": wrong}}
    with pytest.raises(openai.BadRequestError) as of_text:
        await client.responses.create(model=gateway.model, input="hello", text=text)

    assert {one.value.code for one in (of_format, of_tool, of_text)} == {"invalid_json_schema"}
    assert of_format.value.param == "response_format.json_schema.schema"
    assert str(of_tool.value.param).startswith("tools[0]")
    assert of_text.value.param == "text.format.schema"
    assert [entry[1:] for entry in gateway.entries()] == [(0, 0, 0)] * 3
    await gateway.check_quiet()


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"anyOf": [{"$ref": "#/anyOf/0"}]}], ids=str)
async def test_arguments_that_no_text_can_be_are_the_clients_mistake(
    gateway: GatewayFixture, client: AsyncOpenAI, schema: Any
) -> None:
    """A call has begun when it shows; nothing is wrong with the server."""
    function: Any = {"name": "f", "parameters": schema}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model=gateway.model,
            messages=[HELLO],
            tools=[{"type": "function", "function": function}],
            tool_choice="required",
        )

    assert (caught.value.code, caught.value.param) == ("invalid_json_schema", "tools[0].function")
    await gateway.check_quiet()


async def test_an_answer_that_breaks_its_format_is_counted(
    gateway: GatewayFixture, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constrained decoding should leave none: each finished text is looked at once more."""
    monkeypatch.setattr("gateway.generation.output_parser.satisfies", lambda text, wanted: False)
    gateway.say('{"x":3}')
    await client.chat.completions.create(
        model=gateway.model, messages=[HELLO], response_format={"type": "json_object"}
    )
    async with gateway.session.get(f"{gateway.admin_url}/metrics") as answer:
        metrics = await answer.text()

    assert "trunkline_output_format_violations_total 1.0" in metrics


async def test_every_caching_field_of_a_request_passes_through_the_sdk(
    gateway: GatewayFixture, client: AsyncOpenAI
) -> None:
    """By its own names where it has them, as extra ones where not; each key is a cache of its own,
    and the deprecated field reads what is there."""

    async def ask(**fields: Any) -> int:
        answer = await client.chat.completions.create(
            model=gateway.model,
            messages=[{"role": "user", "content": SYSTEM}],
            max_completion_tokens=2,
            **fields,
        )
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        return (details and details.cached_tokens) or 0

    narrowings: list[Any] = [
        {},
        {"prompt_cache_key": "a"},
        {"prompt_cache_key": "b"},
        {"extra_body": {"cache_salt": "a"}},
        {"extra_body": {"extra_key": "a"}},
    ]
    first = [await ask(**fields) for fields in narrowings]
    second = [await ask(**fields, prompt_cache_retention="24h") for fields in narrowings]

    assert first == [0] * len(narrowings)
    assert len(set(second)) == 1
    assert second[0] > 0
    await gateway.check_quiet()
