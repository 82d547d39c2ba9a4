"""Pydantic AI's four models: with no settings at all, tools, history, streams and hints."""

from __future__ import annotations

import functools
from typing import Any

from anthropic import AsyncAnthropic
from cases import KEY, LONG, MODEL, URL, case, main
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.google import GoogleModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.google import GoogleProvider
from pydantic_ai.providers.openai import OpenAIProvider

OPENAI = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
MODELS: dict[str, Any] = {
    "chat": OpenAIChatModel(MODEL, provider=OPENAI),
    "responses": OpenAIResponsesModel(MODEL, provider=OPENAI),
    "anthropic": AnthropicModel(
        MODEL,
        provider=AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key=KEY)),
    ),
    "google": GoogleModel(MODEL, provider=GoogleProvider(base_url=URL, api_key=KEY)),
}
HINTS: dict[str, Any] = {
    "chat": {"openai_reasoning_effort": "low", "openai_service_tier": "flex"},
    "responses": {"openai_reasoning_effort": "low", "openai_text_verbosity": "low"},
    "anthropic": {"anthropic_thinking": {"type": "enabled", "budget_tokens": 1024}},
    "google": {"google_thinking_config": {"thinking_budget": 0}},
}
SHORT: Any = {"max_tokens": 12, "temperature": 0.0}


class City(BaseModel):
    """A city's weather."""

    sunny: bool


async def unary(name: str) -> None:
    answer = await Agent(MODELS[name]).run("Hello", model_settings=SHORT)
    assert answer.output
    assert answer.usage.input_tokens > 0


async def no_settings(name: str) -> None:
    """The model's own default of `max_tokens` may be larger than the context."""
    async with Agent(MODELS[name]).run_stream("Hello") as answer:
        async for text in answer.stream_text(delta=True):
            assert text
            return


async def stream(name: str) -> None:
    async with Agent(MODELS[name]).run_stream("Hello", model_settings=SHORT) as answer:
        assert "".join([text async for text in answer.stream_text(delta=True)])


async def second_turn(name: str) -> None:
    agent = Agent(MODELS[name])
    first = await agent.run("Hello", model_settings=SHORT)
    history = first.all_messages()
    assert (await agent.run("And?", message_history=history, model_settings=SHORT)).output


async def structured(name: str) -> None:
    agent: Any = Agent(MODELS[name], output_type=ToolOutput(City), retries=2)
    settings = {"max_tokens": 200, "temperature": 0.0, "parallel_tool_calls": False}
    answer = await agent.run("Is it sunny in Paris? Yes.", model_settings=settings)
    assert isinstance(answer.output, City)


async def hints(name: str) -> None:
    assert (await Agent(MODELS[name]).run("Hello", model_settings={**SHORT, **HINTS[name]})).output


async def overflow(name: str) -> None:
    status, body = 0, ""
    try:
        await Agent(MODELS[name]).run(LONG, model_settings=SHORT)
    except ModelHTTPError as error:
        status, body = error.status_code, str(error.body)
    assert status == 400
    assert any(word in body for word in ("exceed", "too long"))


def bind(work: Any, name: str) -> Any:
    async def bound() -> None:
        await work(name)

    return functools.update_wrapper(bound, work)


for one in MODELS:
    for work in (unary, no_settings, stream, second_turn, structured, hints, overflow):
        case(f"{one}: {work.__name__}")(bind(work, one))

main("pydantic-ai-slim", "openai", "anthropic", "google-genai")
