"""An application with an older OpenAI SDK; a process can import only one SDK.

`test_older_sdks.py` runs it: URL, key and model in, one line of JSON out.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel


class Place(BaseModel):
    """The object that the application requests."""

    city: Literal["Oslo", "Rome"]


async def main(url: str, key: str, model: str) -> None:
    """Use chat, responses, streams, caching fields, functions, JSON, models and an error."""
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    messages: Any = [
        {
            "role": "system",
            "content": [
                {"type": "text", "text": "You are a librarian who knows every book. " * 4, **mark}
            ],
        },
        {"role": "user", "content": "hello"},
    ]
    ask: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": 8}
    more = {"ignore_eos": True, "seed": 7}
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        whole: Any = await client.chat.completions.create(**ask, extra_body=more)
        text, usage = "", None
        ask |= {"extra_body": more}
        options: Any = {"include_usage": True}
        chunks: Any = await client.chat.completions.create(
            **ask, stream=True, stream_options=options
        )
        async for chunk in chunks:
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            usage = chunk.usage or usage
        response = await client.responses.create(
            model=model, input="hello", max_output_tokens=8, extra_body=more
        )
        async with client.responses.stream(model=model, input="hello") as stream:
            kinds = [event.type async for event in stream]
        short: Any = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
        function: Any = openai.pydantic_function_tool(Place, name="weather")
        called: Any = await client.chat.completions.create(
            **short, tools=[function], tool_choice="required", parallel_tool_calls=False
        )
        formed = await client.chat.completions.parse(**short, response_format=Place)
        answered = await client.responses.parse(model=model, input="hello", text_format=Place)
        made, parsed = called.choices[0].message.tool_calls[0].function, formed.choices[0].message
        refused: Any = None
        try:
            await client.chat.completions.create(**{**ask, "model": "gpt-9"})
        except openai.NotFoundError as error:
            refused = error.code
        assert usage is not None
        found = {
            "version": openai.__version__,
            "texts": [whole.choices[0].message.content, text],
            "usages": [answer.to_dict() for answer in (whole.usage, usage) if answer is not None],
            "response": [response.status, response.output_text],
            "call": [made.name, json.loads(made.arguments)["city"]],
            "json": [
                one.city for one in (parsed.parsed, answered.output_parsed) if one is not None
            ],
            "kinds": [kinds[0], kinds[-1]],
            "models": [model.id async for model in client.models.list()],
            "error": refused,
        }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
