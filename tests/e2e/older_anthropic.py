"""An application with an older Anthropic SDK; a process can import only one SDK.

`test_older_sdks.py` runs it: URL, key and model in, one line of JSON out.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import anthropic
from pydantic import BaseModel


class Sky(BaseModel):
    """The object that the application requests."""

    dry: bool


async def main(url: str, key: str, model: str) -> None:
    """Use text, a stream, caching, a tool, JSON, counting, models and an error."""
    system = [
        {
            "type": "text",
            "text": "You are a librarian who knows every book. " * 4,
            "cache_control": {"type": "ephemeral", "ttl": "1h"},
        }
    ]
    ask: dict[str, Any] = {
        "model": model,
        "max_tokens": 8,
        "system": system,
        "messages": [{"role": "user", "content": "hello"}],
        "extra_body": {"ignore_eos": True, "temperature": 0},
    }
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        whole = await client.messages.create(**ask)
        async with client.messages.stream(**ask) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            folded = await stream.get_final_message()
        betas = ["prompt-caching-2024-07-31", "extended-cache-ttl-2025-04-11"]
        beta: Any = await client.beta.messages.create(**ask, betas=betas)
        counted = await client.messages.count_tokens(
            model=model, system=ask["system"], messages=ask["messages"]
        )
        schema = {**Sky.model_json_schema(), "additionalProperties": False}
        tool: Any = {"name": "weather", "input_schema": schema}
        choice: Any = {"type": "any", "disable_parallel_tool_use": True}
        short: Any = {"model": model, "max_tokens": 300, "messages": ask["messages"]}
        called: Any = await client.messages.create(**short, tools=[tool], tool_choice=choice)
        # Where the oldest has it: among betas, in a field that has been renamed since.
        parse: Any = getattr(client.messages, "parse", client.beta.messages.parse)
        formed = await parse(**short, output_format=Sky)
        refused: Any = None
        try:
            await client.messages.create(**{**ask, "model": "claude-9"})
        except anthropic.NotFoundError as error:
            refused = error.body
        found = {
            "version": anthropic.__version__,
            "texts": [getattr(whole.content[0], "text", ""), text],
            "usages": [message.usage.to_dict() for message in (whole, folded, beta)],
            "call": [called.content[0].name, called.content[0].input["dry"]],
            "json": formed.parsed_output.dry,
            "counted": counted.input_tokens,
            "models": [model.id async for model in client.models.list()],
            "error": refused["error"]["type"],
        }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
