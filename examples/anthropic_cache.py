"""Cache a prefix through the official Anthropic SDK: one call writes it, the next call reads it.

Start the server with `make serve`, then: python examples/anthropic_cache.py
TRUNKLINE_URL and TRUNKLINE_KEY_FILE point it elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path

from anthropic import Anthropic

URL = os.environ.get("TRUNKLINE_URL", "http://127.0.0.1:8080/v1").removesuffix("/v1")
KEY_FILE = os.environ.get("TRUNKLINE_KEY_FILE", "data/default.key")
HANDBOOK = "Answer briefly, in one sentence, and name the city. " * 8


def main() -> None:
    """Ask twice about the same handbook; print the tokens written, read and computed."""
    client = Anthropic(base_url=URL, api_key=Path(KEY_FILE).read_text().strip())
    for question in ("What is the capital of France?", "And of Germany?"):
        message = client.messages.create(
            model="smollm2-135m-instruct",
            max_tokens=24,
            system=[
                {
                    "type": "text",
                    "text": HANDBOOK,
                    "cache_control": {"type": "ephemeral", "ttl": "1h"},
                }
            ],
            messages=[{"role": "user", "content": question}],
        )
        usage = message.usage
        print(
            f"{question}  [{usage.cache_creation_input_tokens} written,"
            f" {usage.cache_read_input_tokens} read, {usage.input_tokens} computed]"
        )


if __name__ == "__main__":
    main()
