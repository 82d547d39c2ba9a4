"""Functions and JSON through Google's own SDK: its modes, its automatic calling, its schemas.

The model is a fake that says what a test tells it to; the template is one that knows no tools.
"""

from __future__ import annotations

import enum
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from google import genai
from google.genai import errors, types
from pydantic import BaseModel

from tests.unit.gateway.gateway_fixture import GatewayFixture

# The SDK's own way with its HTTP client, which warns and collects its sockets late.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Inheritance class:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CALLS = (
    "Let me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2.5}}\n</tool_call>'
)


class Colour(enum.Enum):
    """One of few."""

    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    """What an application wants back."""

    x: Literal["1", "2"]
    label: Colour
    note: Literal["a"] | None


@pytest.fixture
def unopened_gateway(unopened_gateway: GatewayFixture) -> GatewayFixture:
    """With room for tools, and answers that are held to schemas."""
    unopened_gateway.context_tokens, unopened_gateway.takes_grammars = 2_048, True
    return unopened_gateway


@pytest.fixture
async def client(gateway: GatewayFixture) -> AsyncIterator[Any]:
    options = types.HttpOptions(base_url=gateway.url, timeout=60_000)
    client = genai.Client(api_key=gateway.keys["ada"], http_options=options).aio
    yield client
    await client.aclose()


def weather(parameters: dict[str, Any] | None = None) -> types.FunctionDeclaration:
    schema = parameters or {"type": "object", "properties": {"city": {"type": "string"}}}
    return types.FunctionDeclaration(
        name="weather", description="Of a city", parameters_json_schema=schema
    )


def config(
    mode: str | None = None,
    names: list[str] | None = None,
    functions: list[types.FunctionDeclaration] | None = None,
    **more: Any,
) -> types.GenerateContentConfig:
    """The function, in a mode; nothing is called on the client's side."""
    calling = types.FunctionCallingConfig.model_validate(
        {"mode": mode, "allowed_function_names": names}
    )
    return types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=functions or [weather()])],
        tool_config=types.ToolConfig(function_calling_config=calling) if mode else None,
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        **{"max_output_tokens": 300, **more},
    )


def called(answer: types.GenerateContentResponse) -> list[tuple[str | None, Any]]:
    """(name, arguments) of each call."""
    return [(call.name, call.args) for call in answer.function_calls or ()]


async def test_parallel_calls_are_parts_in_both_shapes(
    gateway: GatewayFixture, client: Any
) -> None:
    """Text first, then each call whole, with an id of its own; calls finish with STOP."""
    gateway.say(CALLS)
    whole = await client.models.generate_content(
        model=gateway.model, contents="hello", config=config("AUTO")
    )
    stream = await client.models.generate_content_stream(
        model=gateway.model, contents="hello", config=config("AUTO")
    )
    chunks = [chunk async for chunk in stream]
    parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts or ()]

    calls = [("weather", {"city": "Oslo"}), ("weather", {"city": "Rome", "days": 2.5})]
    assert called(whole) == calls
    assert [(p.function_call.name, p.function_call.args) for p in parts if p.function_call] == calls
    assert len({call.id for call in whole.function_calls or ()}) == 2
    texts = [whole.candidates[0].content.parts[0].text, "".join(p.text or "" for p in parts)]
    assert [text.strip() for text in texts] == ["Let me see."] * 2
    assert whole.candidates[0].finish_reason == chunks[-1].candidates[0].finish_reason == "STOP"
    await gateway.check_quiet()


@pytest.mark.parametrize("has_ids", [True, False])
async def test_an_answer_goes_back_with_its_responses(
    gateway: GatewayFixture, client: Any, has_ids: bool
) -> None:
    """The whole round with the SDK's own objects: results find their calls by id or by name, and
    the first prompt is read again."""
    gateway.say(CALLS)
    first = await client.models.generate_content(
        model=gateway.model, contents="hello", config=config()
    )
    said = first.candidates[0].content
    responses = []
    for part in said.parts:
        if part.function_call is not None:
            part.function_call.id = part.function_call.id if has_ids else None
            responses.append(
                types.Part(
                    function_response=types.FunctionResponse(
                        id=part.function_call.id, name="weather", response={"result": "dry"}
                    )
                )
            )
    history = [types.UserContent("hello"), said, types.UserContent(responses)]
    gateway.say("Dry in both.")
    second = await client.models.generate_content(
        model=gateway.model, contents=history, config=config()
    )

    assert second.text == "Dry in both."
    read = second.usage_metadata.cached_content_token_count
    assert read >= first.usage_metadata.prompt_token_count - 16
    await gateway.check_quiet()


async def test_the_sdk_calls_a_function_by_itself(gateway: GatewayFixture, client: Any) -> None:
    """A Python function as a tool: declared, called and answered without the application."""
    asked: list[str] = []

    def forecast(city: str) -> str:
        """Of a city."""
        asked.append(city)
        gateway.say("Dry.")
        return "dry"

    gateway.say('<tool_call>\n{"name": "forecast", "arguments": {"city": "Oslo"}}\n</tool_call>')
    answer = await client.models.generate_content(
        model=gateway.model,
        contents="hello",
        config=types.GenerateContentConfig(tools=[forecast], max_output_tokens=100),
    )

    assert (asked, answer.text) == (["Oslo"], "Dry.")
    assert len(answer.automatic_function_calling_history) == 3
    assert [entry[0] for entry in gateway.entries()] == ["done", "done"]
    await gateway.check_quiet()


@pytest.mark.parametrize("is_chat", [False, True])
async def test_the_sdk_calls_a_function_in_the_midst_of_a_stream(
    gateway: GatewayFixture, client: Any, is_chat: bool
) -> None:
    """It sends all chunks of the first answer back, each as a content of its own."""

    def forecast(city: str) -> str:
        """Of a city."""
        gateway.say("Dry.")
        return "dry"

    settings = types.GenerateContentConfig(tools=[forecast], max_output_tokens=100)
    gateway.say(
        'Well.\n<tool_call>\n{"name": "forecast", "arguments": {"city": "Oslo"}}\n</tool_call>'
    )
    if is_chat:
        chat = client.chats.create(model=gateway.model, config=settings)
        stream = await chat.send_message_stream("hello")
    else:
        stream = await client.models.generate_content_stream(
            model=gateway.model, contents="hello", config=settings
        )
    chunks = [chunk async for chunk in stream]

    assert "".join(chunk.text or "" for chunk in chunks).endswith("Dry.")
    first, second = gateway.entries()
    assert (first[0], second[0]) == ("done", "done")
    assert chunks[-1].usage_metadata.cached_content_token_count >= first[1] - 16
    await gateway.check_quiet()


@pytest.mark.parametrize("names", [None, ["weather"]])
async def test_any_is_a_call_whatever_the_model_would_say(
    gateway: GatewayFixture, client: Any, names: list[str] | None
) -> None:
    """The answer is held to the function's own schema."""
    other = types.FunctionDeclaration(name="other", parameters_json_schema=CITY)
    functions = [weather(CITY), other] if names else [weather(CITY)]
    answer = await client.models.generate_content(
        model=gateway.model, contents="hello", config=config("ANY", names, functions)
    )

    assert answer.function_calls
    assert {name for name, _ in called(answer)} == {"weather"}
    assert {args["city"] for _, args in called(answer)} <= {"Oslo", "Rome"}
    await gateway.check_quiet()


async def test_validated_arguments_satisfy_their_schema(
    gateway: GatewayFixture, client: Any
) -> None:
    """The model begins a call by itself; what it puts into it is held to the schema."""
    gateway.say('<tool_call>\n{"name": "weather", "arguments": {"city": "', ends=False)
    answer = await client.models.generate_content(
        model=gateway.model, contents="hello", config=config("VALIDATED", functions=[weather(CITY)])
    )

    ((name, args), *_) = called(answer)
    assert name == "weather"
    assert args["city"] in ("Oslo", "Rome")
    await gateway.check_quiet()


async def test_none_is_text_and_keeps_the_prefix(gateway: GatewayFixture, client: Any) -> None:
    """What is shown stays; only what an answer means changes."""
    gateway.say(CALLS)
    first = await client.models.generate_content(
        model=gateway.model, contents="hello", config=config("AUTO")
    )
    second = await client.models.generate_content(
        model=gateway.model, contents="hello", config=config("NONE")
    )

    assert second.function_calls is None
    assert "<tool_call>" in second.text
    read = second.usage_metadata.cached_content_token_count
    assert read >= first.usage_metadata.prompt_token_count - 16


async def test_a_call_that_is_cut_off_is_malformed(gateway: GatewayFixture, client: Any) -> None:
    """Half of the arguments is no call."""
    gateway.say(CALLS)
    before = CALLS[: CALLS.index("slo")]
    tokens = len(gateway.renderer.tokenizer.encode(before, specials=False))
    answer = await client.models.generate_content(
        model=gateway.model, contents="hello", config=config(max_output_tokens=tokens)
    )

    assert answer.function_calls is None
    assert answer.candidates[0].finish_reason == "MALFORMED_FUNCTION_CALL"
    await gateway.check_quiet()


# --- JSON ----------------------------------------------------------------------------------------


async def test_json_mode_is_an_object(gateway: GatewayFixture, client: Any) -> None:
    """Nobody tells the model what to say: what it draws is JSON or was cut off."""
    gateway.say('{"a": [1, 2]}')
    answer = await client.models.generate_content(
        model=gateway.model,
        contents="hello",
        config=types.GenerateContentConfig(
            response_mime_type="application/json", max_output_tokens=50
        ),
    )

    assert json.loads(answer.text) == {"a": [1, 2]}
    await gateway.check_quiet()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_class_as_schema_comes_back_as_an_object(
    gateway: GatewayFixture, client: Any, is_streamed: bool
) -> None:
    """responseSchema as the SDK makes it of a class: capitals, enums, `nullable`."""
    ask = {
        "model": gateway.model,
        "contents": "hello",
        "config": types.GenerateContentConfig(
            response_mime_type="application/json", response_schema=Point, seed=3
        ),
    }
    if is_streamed:
        stream = await client.models.generate_content_stream(**ask)
        text = "".join([chunk.text or "" async for chunk in stream])
        parsed: Any = Point.model_validate_json(text)
    else:
        parsed = (await client.models.generate_content(**ask)).parsed

    assert isinstance(parsed, Point)
    await gateway.check_quiet()


async def test_a_json_schema_is_taken_as_it_stands(gateway: GatewayFixture, client: Any) -> None:
    """responseJsonSchema, which the SDK sends in snake case."""
    answer = await client.models.generate_content(
        model=gateway.model,
        contents="hello",
        config=types.GenerateContentConfig(
            response_mime_type="application/json", response_json_schema=CITY, seed=1
        ),
    )

    assert json.loads(answer.text)["city"] in ("Oslo", "Rome")
    await gateway.check_quiet()


async def test_a_schema_that_no_answer_can_have_is_refused_by_its_field(
    gateway: GatewayFixture, client: Any
) -> None:
    """Where an application looks for what it did wrong."""
    with pytest.raises(errors.ClientError) as caught:
        await client.models.generate_content(
            model=gateway.model,
            contents="hello",
            config=types.GenerateContentConfig(
                response_mime_type="application/json",
                response_json_schema={"type": "nonsense"},
            ),
        )

    details = caught.value.details["error"]["details"]
    assert caught.value.code == 400
    assert details[0]["reason"] == "INVALID_JSON_SCHEMA"
    assert details[1]["fieldViolations"][0]["field"] == "generationConfig.responseJsonSchema"
    await gateway.check_quiet()
