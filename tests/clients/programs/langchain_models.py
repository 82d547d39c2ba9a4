"""LangChain's three families: streams, tools, history, hints, overflow, an agent, caching."""

from __future__ import annotations

import functools
from typing import Any

from cases import KEY, LONG, MODEL, URL, case, main, raises
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_google_genai import ChatGoogleGenerativeAI
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

OPENAI = {"base_url": f"{URL}/v1", "api_key": KEY, "model": MODEL, "max_retries": 0}


def chat(name: str, **more: Any) -> Any:
    more = {"temperature": 0, **more}
    if name == "anthropic":
        more = {"max_tokens": 12, **more}
        return ChatAnthropic(base_url=URL, api_key=KEY, model=MODEL, max_retries=0, **more)
    if name == "google":
        more = {"max_output_tokens": more.pop("max_tokens", 12), **more}
        return ChatGoogleGenerativeAI(base_url=URL, api_key=KEY, model=MODEL, retries=1, **more)
    more = {"max_tokens": 12, **more}
    if name == "responses":
        return ChatOpenAI(**OPENAI, use_responses_api=True, **more)
    return ChatOpenAI(**OPENAI, **more)


HINTS: dict[str, dict[str, Any]] = {
    "chat": {"reasoning_effort": "low", "verbosity": "low", "service_tier": "flex", "store": True},
    "responses": {"reasoning": {"effort": "low"}, "verbosity": "low", "truncation": "auto"},
    "anthropic": {
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "max_tokens": 2000,
        "temperature": 1,
    },
    "google": {"thinking_budget": 0},
}


@tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


class Number(BaseModel):
    """A number."""

    n: int


def unary(name: str) -> None:
    answer = chat(name).invoke("Hello")
    assert answer.text
    assert answer.usage_metadata["input_tokens"] > 0


def stream(name: str) -> None:
    assert "".join(chunk.text for chunk in chat(name).stream("Hello"))


def second_turn(name: str) -> None:
    model = chat(name)
    first = model.invoke("Hello")
    history = [HumanMessage("Hello"), first, HumanMessage("And then?")]
    assert model.invoke(history).text is not None


def tool_turn(name: str) -> None:
    model = chat(name, max_tokens=80)
    forced = model.bind_tools([weather], tool_choice="weather")
    question = HumanMessage("What is the weather in Paris?")
    asked = forced.invoke([question])
    assert asked.tool_calls[0]["name"] == "weather"
    results = [ToolMessage("sunny", tool_call_id=call["id"]) for call in asked.tool_calls]
    assert model.invoke([question, asked, *results]) is not None


def structured(name: str) -> None:
    found = chat(name, max_tokens=80).with_structured_output(Number).invoke("The number 7")
    assert isinstance(found, Number)


def hints(name: str) -> None:
    assert chat(name, **HINTS[name]).invoke("Say yes") is not None


def overflow(name: str) -> None:
    raises(ContextOverflowError, lambda: chat(name).invoke(LONG))


def agent(name: str) -> None:
    made = create_agent(chat(name, max_tokens=30), tools=[weather])
    assert made.invoke({"messages": [HumanMessage("Hello")]})["messages"]


for one in ("chat", "responses", "anthropic", "google"):
    for work in (unary, stream, second_turn, tool_turn, structured, hints, overflow, agent):
        case(f"{one}: {work.__name__}")(functools.partial(work, one))


@case("anthropic: cache_control is read on the second call")
def cache_control() -> None:
    block = {"type": "text", "text": "Shared words. " * 150, "cache_control": {"type": "ephemeral"}}
    message = HumanMessage(content=[block, {"type": "text", "text": "Hello"}])
    chat("anthropic").invoke([message])
    usage = chat("anthropic").invoke([message]).usage_metadata
    assert usage["input_token_details"]["cache_read"] > 0


main("langchain", "langchain-core", "langchain-openai", "langchain-anthropic", "openai")
