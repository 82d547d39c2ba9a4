"""Functions and JSON through Google's SDK: its modes, its automatic calling, its schemas.

The model is a fake that generates the text that a test sets; the template has no tools.
"""

from __future__ import annotations

import enum
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from google import genai
from google.genai import types
from pydantic import BaseModel

from tests.e2e.sdks import CALLS, CITY, gemini_request
from tests.unit.gateway.gateway_fixture import GatewayFixture

# The SDK's HTTP client warns of its inheritance and closes its sockets late.
pytestmark = [
    pytest.mark.usefixtures("room_for_tools"),
    pytest.mark.filterwarnings("ignore:Inheritance class:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]


class Colour(enum.Enum):
    """An enum of few values."""

    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    """A class that an application parses answers into."""

    x: Literal["1", "2"]
    label: Colour
    note: Literal["a"] | None


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
    """Return a configuration with the function in a mode, without automatic calling."""
    calling = types.FunctionCallingConfig.model_validate(
        {"mode": mode, "allowed_function_names": names}
    )
    return types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=functions or [weather()])],
        tool_config=types.ToolConfig(function_calling_config=calling) if mode else None,
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        **{"max_output_tokens": 300, **more},
    )


def calls_of(answer: types.GenerateContentResponse) -> list[tuple[str | None, Any]]:
    """Return (name, arguments) of each call."""
    return [(call.name, call.args) for call in answer.function_calls or ()]


async def test_parallel_calls_are_parts_in_answer_and_stream(
    gateway: GatewayFixture, client: Any
) -> None:
    """Text first, then each complete call with its id; the finish reason is STOP."""
    gateway.say(CALLS)
    unary = await client.models.generate_content(**gemini_request(gateway, config=config("AUTO")))
    stream = await client.models.generate_content_stream(
        **gemini_request(gateway, config=config("AUTO"))
    )
    chunks = [chunk async for chunk in stream]
    parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts or ()]

    calls = [("weather", {"city": "Oslo"}), ("weather", {"city": "Rome", "days": 2.5})]
    assert calls_of(unary) == calls
    assert [(p.function_call.name, p.function_call.args) for p in parts if p.function_call] == calls
    assert len({call.id for call in unary.function_calls or ()}) == 2
    texts = [unary.candidates[0].content.parts[0].text, "".join(p.text or "" for p in parts)]
    assert [text.strip() for text in texts] == ["Let me see."] * 2
    assert unary.candidates[0].finish_reason == chunks[-1].candidates[0].finish_reason == "STOP"
    await gateway.check_quiet()


@pytest.mark.parametrize("has_ids", [True, False])
async def test_accepts_an_answer_with_its_responses_as_history(
    gateway: GatewayFixture, client: Any, has_ids: bool
) -> None:
    """A full round with the SDK's objects: responses name their calls by id or by name, and the
    first prompt is read.
    """
    gateway.say(CALLS)
    first = await client.models.generate_content(**gemini_request(gateway, config=config()))
    answered = first.candidates[0].content
    responses = []
    for part in answered.parts:
        if part.function_call is not None:
            part.function_call.id = part.function_call.id if has_ids else None
            responses.append(
                types.Part(
                    function_response=types.FunctionResponse(
                        id=part.function_call.id, name="weather", response={"result": "dry"}
                    )
                )
            )
    history = [types.UserContent("hello"), answered, types.UserContent(responses)]
    gateway.say("Dry in both.")
    second = await client.models.generate_content(
        **gemini_request(gateway, contents=history, config=config())
    )

    assert second.text == "Dry in both."
    read = second.usage_metadata.cached_content_token_count
    assert read >= first.usage_metadata.prompt_token_count - 16
    await gateway.check_quiet()


async def test_sdk_calls_a_python_function_automatically(
    gateway: GatewayFixture, client: Any
) -> None:
    """The SDK declares, calls and answers without the application."""
    request: list[str] = []

    def forecast(city: str) -> str:
        """Forecast of a city."""
        request.append(city)
        gateway.say("Dry.")
        return "dry"

    gateway.say('<tool_call>\n{"name": "forecast", "arguments": {"city": "Oslo"}}\n</tool_call>')
    answer = await client.models.generate_content(
        **gemini_request(
            gateway, config=types.GenerateContentConfig(tools=[forecast], max_output_tokens=100)
        )
    )

    assert (request, answer.text) == (["Oslo"], "Dry.")
    assert len(answer.automatic_function_calling_history) == 3
    assert [entry[0] for entry in gateway.entries()] == ["done", "done"]
    await gateway.check_quiet()


@pytest.mark.parametrize("is_chat", [False, True])
async def test_sdk_calls_a_function_within_a_stream(
    gateway: GatewayFixture, client: Any, is_chat: bool
) -> None:
    """It sends each chunk of the first answer back as a separate content."""

    def forecast(city: str) -> str:
        """Forecast of a city."""
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
            **gemini_request(gateway, config=settings)
        )
    chunks = [chunk async for chunk in stream]

    assert "".join(chunk.text or "" for chunk in chunks).endswith("Dry.")
    first, second = gateway.entries()
    assert (first[0], second[0]) == ("done", "done")
    assert chunks[-1].usage_metadata.cached_content_token_count >= first[1] - 16
    await gateway.check_quiet()


@pytest.mark.parametrize("names", [None, ["weather"]])
async def test_mode_any_is_constrained_to_a_call(
    gateway: GatewayFixture, client: Any, names: list[str] | None
) -> None:
    """Decoding follows the function's schema."""
    other = types.FunctionDeclaration(name="other", parameters_json_schema=CITY)
    functions = [weather(CITY), other] if names else [weather(CITY)]
    answer = await client.models.generate_content(
        **gemini_request(gateway, config=config("ANY", names, functions))
    )

    assert answer.function_calls
    assert {name for name, _ in calls_of(answer)} == {"weather"}
    assert {args["city"] for _, args in calls_of(answer)} <= {"Oslo", "Rome"}
    await gateway.check_quiet()


async def test_mode_validated_constrains_the_arguments(
    gateway: GatewayFixture, client: Any
) -> None:
    """The model begins a call by itself, and decoding follows its schema."""
    gateway.say('<tool_call>\n{"name": "weather", "arguments": {"city": "', ends=False)
    answer = await client.models.generate_content(
        **gemini_request(gateway, config=config("VALIDATED", functions=[weather(CITY)]))
    )

    ((name, args), *_) = calls_of(answer)
    assert name == "weather"
    assert args["city"] in ("Oslo", "Rome")
    await gateway.check_quiet()


async def test_mode_none_keeps_the_prefix_and_returns_text(
    gateway: GatewayFixture, client: Any
) -> None:
    """The prompt still shows the functions; only the answer's meaning changes."""
    gateway.say(CALLS)
    first = await client.models.generate_content(**gemini_request(gateway, config=config("AUTO")))
    second = await client.models.generate_content(**gemini_request(gateway, config=config("NONE")))

    assert second.function_calls is None
    assert "<tool_call>" in second.text
    read = second.usage_metadata.cached_content_token_count
    assert read >= first.usage_metadata.prompt_token_count - 16


async def test_truncated_call_is_malformed(gateway: GatewayFixture, client: Any) -> None:
    gateway.say(CALLS)
    before = CALLS[: CALLS.index("slo")]
    tokens = len(gateway.renderer.tokenizer.encode(before, specials=False))
    answer = await client.models.generate_content(
        **gemini_request(gateway, config=config(max_output_tokens=tokens))
    )

    assert answer.function_calls is None
    assert answer.candidates[0].finish_reason == "MALFORMED_FUNCTION_CALL"
    await gateway.check_quiet()


# --- JSON ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_class_as_schema_parses_to_an_object(
    gateway: GatewayFixture, client: Any, is_streamed: bool
) -> None:
    """The SDK makes responseSchema of a class: capitals, enums, `nullable`."""
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


async def test_accepts_response_json_schema(gateway: GatewayFixture, client: Any) -> None:
    """The SDK sends responseJsonSchema in snake case."""
    answer = await client.models.generate_content(
        **gemini_request(
            gateway,
            config=types.GenerateContentConfig(
                response_mime_type="application/json", response_json_schema=CITY, seed=1
            ),
        )
    )

    assert json.loads(answer.text)["city"] in ("Oslo", "Rome")
    await gateway.check_quiet()
