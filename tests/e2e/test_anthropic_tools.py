"""Tools and prefills through Anthropic's SDK: the model calls, and the client answers.

The model is a fake that generates the text that a test sets; the template has no tools.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from anthropic.types import Message

from tests.e2e.anthropic_asks import connected
from tests.e2e.sdks import CALLS, CITY, HELLO
from tests.unit.gateway.gateway_fixture import GatewayFixture

pytestmark = pytest.mark.usefixtures("room_for_tools")

WEATHER: Any = {
    "name": "weather",
    "description": "Of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture
async def client(gateway: GatewayFixture) -> AsyncIterator[AsyncAnthropic]:
    async with connected(gateway) as client:
        yield client


def cached_prompt(gateway: GatewayFixture, **more: Any) -> dict[str, Any]:
    return {
        "model": gateway.model,
        "max_tokens": 300,
        "messages": [HELLO],
        "tools": [WEATHER],
        **more,
    }


def blocks(message: Message) -> list[tuple[str, Any]]:
    """Return (type, text or input) of each block."""
    return [
        (block.type, block.text if block.type == "text" else block.to_dict()["input"])
        for block in message.content
    ]


async def test_calls_are_blocks_in_message_and_stream(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """Text first, then each call with its id and input; the stop reason is `tool_use`."""
    gateway.say(CALLS)
    unary = await client.messages.create(**cached_prompt(gateway))
    async with client.messages.stream(**cached_prompt(gateway)) as stream:
        pieces = [e.partial_json async for e in stream if e.type == "input_json"]
        folded = await stream.get_final_message()

    assert blocks(unary) == blocks(folded)
    assert [kind for kind, _ in blocks(unary)] == ["text", "tool_use", "tool_use"]
    assert [value for _, value in blocks(unary)][1:] == [
        {"city": "Oslo"},
        {"city": "Rome", "days": 2.5},
    ]
    assert unary.stop_reason == folded.stop_reason == "tool_use"
    assert len({block.id for block in unary.content if block.type == "tool_use"}) == 2
    assert len(pieces) > 2, "arguments come as they are made"
    await gateway.check_quiet()


async def test_accepts_an_answer_with_its_results_as_history(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """A full round with the SDK's objects, which reads the first prompt."""
    caching: Any = {"cache_control": {"type": "ephemeral"}}
    gateway.say(CALLS)
    first = await client.messages.create(**cached_prompt(gateway, **caching))
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "dry"}
        for block in first.content
        if block.type == "tool_use"
    ]
    messages = [HELLO, first.to_param(), {"role": "user", "content": results}]
    gateway.say("Dry in both.")
    second = await client.messages.create(**cached_prompt(gateway, messages=messages, **caching))

    assert blocks(second) == [("text", "Dry in both.")]
    assert second.stop_reason == "end_turn"
    assert first.usage.cache_creation_input_tokens
    assert second.usage.cache_read_input_tokens == first.usage.cache_creation_input_tokens
    await gateway.check_quiet()


async def test_sdk_tool_runner_calls_a_function_and_continues(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """It requests a stored thread, receives the refusal and continues without one."""
    asked_for = []

    @beta_async_tool
    async def weather(city: str) -> str:
        """Weather of a city."""
        asked_for.append(city)
        gateway.say("Dry.")
        return "dry"

    gateway.say(CALLS.partition("</tool_call>")[0] + "</tool_call>")
    runner = client.beta.messages.tool_runner(
        model=gateway.model, max_tokens=300, messages=[HELLO], tools=[weather]
    )
    message: Any = await runner.until_done()

    assert asked_for == ["Oslo"]
    assert message.content[0].text == "Dry."
    assert len(gateway.entries()) == 2
    await gateway.check_quiet()


async def test_truncated_call_has_no_input(gateway: GatewayFixture, client: AsyncAnthropic) -> None:
    """max_tokens ends the answer in the middle of the arguments."""
    gateway.say(CALLS)
    before = CALLS[: CALLS.index("slo")]
    tokens = len(gateway.renderer.tokenizer.encode(before, specials=False))
    message = await client.messages.create(**cached_prompt(gateway, max_tokens=tokens))
    async with client.messages.stream(**cached_prompt(gateway, max_tokens=tokens)) as stream:
        pieces = [e.partial_json async for e in stream if e.type == "input_json"]

    assert message.stop_reason == "max_tokens"
    assert blocks(message)[1:] == [("tool_use", {})]
    assert "".join(pieces) == '{"city": "O'
    await gateway.check_quiet()


async def test_continues_a_prefill(gateway: GatewayFixture, client: AsyncAnthropic) -> None:
    """The turn stays open, so the answer adds no tokens of a new turn."""
    gateway.say(" 42.")
    prefill: Any = {"role": "assistant", "content": "The answer is"}
    message = await client.messages.create(
        model=gateway.model, max_tokens=9, messages=[HELLO, prefill]
    )
    without = await client.messages.count_tokens(model=gateway.model, messages=[HELLO])
    with_it = await client.messages.count_tokens(model=gateway.model, messages=[HELLO, prefill])
    text = gateway.renderer.tokenizer.encode("The answer is", specials=False)

    assert blocks(message) == [("text", " 42.")]
    assert with_it.input_tokens == without.input_tokens + len(text)
    await gateway.check_quiet()


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_forced_call_is_constrained_to_a_call(
    gateway: GatewayFixture, client: AsyncAnthropic, choice: dict[str, str]
) -> None:
    """Decoding follows the tool's schema, with one call if parallel calls are off."""
    tool = {**WEATHER, "input_schema": CITY}
    one = {**choice, "disable_parallel_tool_use": True}
    message = await client.messages.create(**cached_prompt(gateway, tools=[tool], tool_choice=one))

    ((kind, value),) = blocks(message)
    assert message.stop_reason == "tool_use"
    assert kind == "tool_use"
    assert value["city"] in ("Oslo", "Rome")
    await gateway.check_quiet()


async def test_json_schema_answer_satisfies_the_schema(
    gateway: GatewayFixture, client: AsyncAnthropic
) -> None:
    """This holds for the message and the stream."""
    config: Any = {"format": {"type": "json_schema", "schema": CITY}}
    ask = cached_prompt(gateway, tools=[], output_config=config)
    unary = await client.messages.create(**ask)
    async with client.messages.stream(**ask) as stream:
        folded = await stream.get_final_message()

    for message in (unary, folded):
        ((kind, text),) = blocks(message)
        assert (kind, message.stop_reason) == ("text", "end_turn")
        assert json.loads(text)["city"] in ("Oslo", "Rome")
    await gateway.check_quiet()
