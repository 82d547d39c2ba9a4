"""OpenAI's Agents SDK over responses and chat: tools, streams, sessions and settings."""

from __future__ import annotations

import functools
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from cases import KEY, LONG, MODEL, URL, case, main
from openai import AsyncOpenAI, BadRequestError
from openai.types.shared import Reasoning

set_tracing_disabled(True)
CLIENT = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
MODELS: dict[str, Any] = {
    "responses": OpenAIResponsesModel(MODEL, CLIENT),
    "chat": OpenAIChatCompletionsModel(MODEL, CLIENT),
}


@function_tool
def weather(sunny: bool) -> str:
    """Tell the weather."""
    return "sunny" if sunny else "rainy"


def made(name: str, tools: Any = (), **settings: Any) -> Any:
    settings = {"max_tokens": 24, "temperature": 0, **settings}
    return Agent(
        name="a", model=MODELS[name], tools=list(tools), model_settings=ModelSettings(**settings)
    )


async def unary(name: str) -> None:
    assert (await Runner.run(made(name), "Hello")).final_output


async def stream(name: str) -> None:
    result = Runner.run_streamed(made(name), "Hello")
    assert [event async for event in result.stream_events()]
    assert result.final_output


async def session(name: str) -> None:
    """The second turn has the first one's items as they came."""
    kept = SQLiteSession("s")
    await Runner.run(made(name), "Hello", session=kept)
    assert (await Runner.run(made(name), "And then?", session=kept)).final_output


async def tool_run(name: str) -> None:
    agent = made(name, [weather], tool_choice="weather", parallel_tool_calls=False, max_tokens=100)
    result = await Runner.run(agent, "Call weather with sunny true", max_turns=3)
    assert any(item.type == "tool_call_output_item" for item in result.new_items)


async def hints(name: str) -> None:
    settings = {"reasoning": Reasoning(effort="low"), "verbosity": "low", "store": True}
    settings["metadata"] = {"a": "b"}
    if name == "responses":
        settings["truncation"] = "auto"
    assert (await Runner.run(made(name, **settings), "Hello")).final_output


async def overflow(name: str) -> None:
    code = None
    try:
        await Runner.run(made(name), LONG)
    except BadRequestError as error:
        code = error.code
    assert code == "context_length_exceeded"


def bind(work: Any, name: str) -> Any:
    async def bound() -> None:
        await work(name)

    return functools.update_wrapper(bound, work)


for one in MODELS:
    for work in (unary, stream, session, tool_run, hints, overflow):
        case(f"{one}: {work.__name__}")(bind(work, one))


@case("responses: previous_response_id")
async def previous_response() -> None:
    first = await Runner.run(made("responses"), "Hello")
    await Runner.run(made("responses"), "And?", previous_response_id=first.last_response_id)


@case("responses: a session kept as a conversation")
async def conversation() -> None:
    """The session is kept by the server, and its items are those of both turns."""
    kept = OpenAIConversationsSession(openai_client=CLIENT)
    await Runner.run(made("responses"), "Hello", session=kept)
    assert (await Runner.run(made("responses"), "And then?", session=kept)).final_output
    assert len(await kept.get_items()) == 4
    await kept.clear_session()


main("openai-agents", "openai")
