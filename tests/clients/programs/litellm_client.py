"""LiteLLM as a client: four of its providers, history sent back, and its classes of errors."""

from __future__ import annotations

import functools
from typing import Any

import litellm
from cases import KEY, LONG, MODEL, URL, case, main, raises

PROVIDERS = {
    "openai": f"{URL}/v1",
    "hosted_vllm": f"{URL}/v1",
    "anthropic": URL,
    "gemini": f"{URL}/v1beta",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
litellm.num_retries = 0
litellm.suppress_debug_info = True


def ask(provider: str, messages: str | list[Any], **settings: Any) -> Any:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return litellm.completion(
        model=f"{provider}/{MODEL}",
        api_base=PROVIDERS[provider],
        messages=messages,
        **{"api_key": KEY, "max_tokens": 12, **settings},
    )


def unary(provider: str) -> None:
    answer = ask(provider, "Hello", temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens > 0


def stream(provider: str) -> None:
    chunks = list(ask(provider, "Hello", stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def second_turn(provider: str) -> None:
    """The message objects go back as they came, with the fields that LiteLLM adds."""
    history: list[Any] = [{"role": "user", "content": "Hello"}]
    history.append(ask(provider, history).choices[0].message)
    history.append({"role": "user", "content": "And then?"})
    assert ask(provider, history).choices[0].message.content


def tool_turn(provider: str) -> None:
    history: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    settings = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60, "temperature": 0}
    message = ask(provider, history, **settings).choices[0].message
    assert message.tool_calls[0].function.name == "weather"
    history.append(message)
    history += [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
    ]
    assert ask(provider, history, tools=[TOOL]).choices[0].message is not None


def overflow(provider: str) -> None:
    raises(litellm.ContextWindowExceededError, lambda: ask(provider, LONG))


def wrong_key(provider: str) -> None:
    raises(litellm.AuthenticationError, lambda: ask(provider, "Hello", api_key="sk-no"))


def hints(provider: str) -> None:
    extra = {"reasoning_effort": "low", "verbosity": "low", "service_tier": "flex", "store": True}
    assert ask(provider, "Hello", extra_body=extra).choices[0].message.content


for one in PROVIDERS:
    for work in (unary, stream, second_turn, tool_turn, overflow):
        case(f"{one}: {work.__name__}")(functools.partial(work, one))
for one in ("openai", "hosted_vllm"):
    for work in (wrong_key, hints):
        case(f"{one}: {work.__name__}")(functools.partial(work, one))


@case("openai: schema")
def schema() -> None:
    form = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": form, "strict": True}}
    answer = ask("openai", "A number", response_format=wanted, max_tokens=40)
    assert "n" in answer.choices[0].message.content


@case("text completion")
def text() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        api_base=f"{URL}/v1",
        api_key=KEY,
        prompt="Once upon",
        max_tokens=8,
    )
    assert answer.choices[0].text


main("litellm", "openai")
