"""The official SDKs at four endpoints, for tests of what holds for each of them."""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic
from google import genai
from google.genai import types
from openai import AsyncOpenAI

from gateway.dialects.anthropic import messages
from gateway.dialects.gemini import generate_content
from gateway.dialects.openai import chat
from gateway.dialects.openai.responses import dialect as responses
from tests.unit.gateway.gateway_fixture import GatewayFixture

MORE: Any = {"ignore_eos": True, "seed": 7}
"""The fake model draws end tokens as readily as others; these tests want whole answers."""
HELLO: Any = {"role": "user", "content": "hello"}
SYSTEM = "You are a librarian who knows every book there is, and where it stands. " * 2
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CALLS = (
    "Let me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2.50}}\n</tool_call>'
)


def chat_request(gateway: GatewayFixture, **more: Any) -> dict[str, Any]:
    """Return a small request for chat completions; `more` replaces and adds fields."""
    return {"model": gateway.model, "messages": [HELLO], **more}


def response_request(gateway: GatewayFixture, **more: Any) -> dict[str, Any]:
    """Return a small request for responses; `more` replaces and adds fields."""
    return {"model": gateway.model, "input": "hello", **more}


def gemini_request(gateway: GatewayFixture, **more: Any) -> dict[str, Any]:
    """Return a small request for Gemini's endpoint; `more` replaces and adds fields."""
    return {"model": gateway.model, "contents": "hello", **more}


class Chat:
    """OpenAI's SDK at chat completions."""

    dialect: Any = chat.DIALECT
    http_client = "http_client"
    """The option that takes another HTTP client."""

    def connect(self, url: str, key: str, **more: Any) -> Any:
        """Return a client that tries once."""
        return AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60, **more)

    async def stream(self, client: Any, model: str, tokens: int) -> Any:
        """Return the events of a stream of so many tokens."""
        return await client.chat.completions.create(
            model=model, messages=[HELLO], max_tokens=tokens, stream=True, extra_body=MORE
        )

    def has_text(self, event: Any) -> bool:
        """Return whether an event has text."""
        return bool(event.choices[0].delta.content)

    def is_last(self, event: Any) -> bool:
        """Return whether an event ends a stream that has had all its tokens."""
        return bool(event.choices[0].finish_reason == "length")

    async def leave(self, client: Any, stream: Any) -> None:
        """Give up a stream."""
        await stream.close()

    async def close(self, client: Any) -> None:
        """Close a client."""
        await client.close()


class Responses(Chat):
    """OpenAI's SDK at responses."""

    dialect = responses.DIALECT

    async def stream(self, client: Any, model: str, tokens: int) -> Any:
        """See `Chat.stream`."""
        return await client.responses.create(
            model=model, input="hello", max_output_tokens=tokens, stream=True, extra_body=MORE
        )

    def has_text(self, event: Any) -> bool:
        """See `Chat.has_text`."""
        return bool(event.type == "response.output_text.delta")

    def is_last(self, event: Any) -> bool:
        """See `Chat.is_last`."""
        return bool(event.type == "response.incomplete")


class Anthropic(Chat):
    """Anthropic's SDK."""

    dialect = messages.DIALECT

    def connect(self, url: str, key: str, **more: Any) -> Any:
        """See `Chat.connect`."""
        return AsyncAnthropic(base_url=url, api_key=key, max_retries=0, timeout=60, **more)

    async def stream(self, client: Any, model: str, tokens: int) -> Any:
        """See `Chat.stream`."""
        return await client.messages.create(
            model=model, messages=[HELLO], max_tokens=tokens, stream=True, extra_body=MORE
        )

    def has_text(self, event: Any) -> bool:
        """See `Chat.has_text`."""
        return bool(event.type == "content_block_delta")

    def is_last(self, event: Any) -> bool:
        """See `Chat.is_last`."""
        return bool(event.type == "message_stop")


class Gemini(Chat):
    """Google's SDK."""

    dialect = generate_content.DIALECT
    http_client = "httpx_async_client"

    def connect(self, url: str, key: str, **more: Any) -> Any:
        """See `Chat.connect`."""
        options = types.HttpOptions(base_url=url, timeout=60_000, **more)
        return genai.Client(api_key=key, http_options=options).aio

    async def stream(self, client: Any, model: str, tokens: int) -> Any:
        """See `Chat.stream`."""
        config = types.GenerateContentConfig(max_output_tokens=tokens, temperature=0)
        return await client.models.generate_content_stream(
            model=model, contents="hi", config=config
        )

    def has_text(self, event: Any) -> bool:
        """See `Chat.has_text`."""
        return bool(event.text)

    def is_last(self, event: Any) -> bool:
        """See `Chat.is_last`. It has no field by which an answer goes on after an end token."""
        return event.candidates[0].finish_reason in ("STOP", "MAX_TOKENS")

    async def leave(self, client: Any, stream: Any) -> None:
        """See `Chat.leave`. A closed generator leaves its connection open; its client closes it."""
        await stream.aclose()
        await client.aclose()

    async def close(self, client: Any) -> None:
        """See `Chat.close`."""
        await client.aclose()


SDKS = (Chat(), Responses(), Anthropic(), Gemini())
