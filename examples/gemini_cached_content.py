"""Use cached content through the official Gemini SDK: send it once, then refer to its name.

Start the server with `make serve`, then: python examples/gemini_cached_content.py
TRUNKLINE_URL and TRUNKLINE_KEY_FILE point it elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path

from google import genai
from google.genai import types

URL = os.environ.get("TRUNKLINE_URL", "http://127.0.0.1:8080/v1").removesuffix("/v1")
KEY_FILE = os.environ.get("TRUNKLINE_KEY_FILE", "data/default.key")
MODEL = "smollm2-135m-instruct"
HANDBOOK = "Answer briefly, in one sentence, and name the city. " * 8


def main() -> None:
    """Create cached content, ask about it twice, delete it."""
    client = genai.Client(
        api_key=Path(KEY_FILE).read_text().strip(),
        http_options=types.HttpOptions(base_url=URL),
    )
    made = client.caches.create(
        model=MODEL,
        config=types.CreateCachedContentConfig(system_instruction=HANDBOOK, ttl="600s"),
    )
    config = types.GenerateContentConfig(
        cached_content=made.name, max_output_tokens=24, temperature=0
    )
    for question in ("What is the capital of France?", "And of Germany?"):
        answer = client.models.generate_content(model=MODEL, contents=question, config=config)
        usage = answer.usage_metadata
        assert usage is not None
        print(
            f"{question}  [{usage.prompt_token_count} tokens,"
            f" {usage.cached_content_token_count} of them cached]"
        )
    client.caches.delete(name=made.name or "")


if __name__ == "__main__":
    main()
