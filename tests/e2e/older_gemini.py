"""An application with an older google-genai; a process can import only one SDK.

`test_older_sdks.py` runs it: URL, key and model in, one line of JSON out.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import google.genai
from google.genai import errors, types

LONG = "The trunk is shared, the branches are one's own. " * 6


async def main(url: str, key: str, model: str) -> None:
    """Use text, a stream, a function, JSON, counting, cached content, models and an error."""
    options = types.HttpOptions(base_url=url, timeout=60_000)
    client: Any = google.genai.Client(api_key=key, http_options=options).aio
    short = types.GenerateContentConfig(max_output_tokens=6, temperature=0)
    ask: dict[str, Any] = {"model": model, "contents": LONG}
    whole = await client.models.generate_content(**ask, config=short)
    text, last = "", None
    async for chunk in await client.models.generate_content_stream(**ask, config=short):
        text, last = text + (chunk.text or ""), chunk
    schema = {
        "type": "OBJECT",
        "properties": {"city": {"type": "STRING", "enum": ["Oslo", "Rome"]}},
        "required": ["city"],
    }
    declared: Any = {"name": "weather", "description": "Of a city", "parameters": schema}
    forced: Any = {
        "tools": [{"function_declarations": [declared]}],
        "tool_config": {"function_calling_config": {"mode": "ANY"}},
        "max_output_tokens": 200,
    }
    called = await client.models.generate_content(**ask, config=forced)
    formed: Any = {"response_mime_type": "application/json", "response_schema": schema}
    answer = await client.models.generate_content(**ask, config=formed)
    counted = await client.models.count_tokens(**ask)
    kept = await client.caches.create(
        model=model, config=types.CreateCachedContentConfig(contents=LONG, ttl="300s")
    )
    used = await client.models.generate_content(
        model=model,
        contents="And?",
        config=types.GenerateContentConfig(cached_content=kept.name, max_output_tokens=4),
    )
    listed = [one.name async for one in await client.caches.list()]
    await client.caches.delete(name=kept.name)
    refused: Any = None
    try:
        await client.caches.get(name=kept.name)
    except errors.ClientError as error:
        refused = [error.code, error.status]
    found = {
        "version": google.genai.__version__,
        "texts": [whole.text, text],
        "tokens": [
            counted.total_tokens,
            whole.usage_metadata.prompt_token_count,
            last and last.usage_metadata.prompt_token_count,
        ],
        "cached": last and last.usage_metadata.cached_content_token_count,
        "call": [called.function_calls[0].name, called.function_calls[0].args["city"]],
        "json": json.loads(answer.text)["city"],
        "resource": [
            kept.usage_metadata.total_token_count,
            used.usage_metadata.cached_content_token_count,
        ],
        "is_listed": listed == [kept.name],
        "models": [one.name async for one in await client.models.list()],
        "error": refused,
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
