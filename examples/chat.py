"""Converse through the official OpenAI SDK: the second turn reuses the KV blocks of the first.

Start the server with `make serve`, then: python examples/chat.py
TRUNKLINE_URL and TRUNKLINE_KEY_FILE point it elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

URL = os.environ.get("TRUNKLINE_URL", "http://127.0.0.1:8080/v1")
KEY_FILE = os.environ.get("TRUNKLINE_KEY_FILE", "data/default.key")
QUESTIONS = ("What is the capital of France?", "And of Germany?")


def main() -> None:
    """Stream each answer; print how many prompt tokens were cached."""
    client = OpenAI(base_url=URL, api_key=Path(KEY_FILE).read_text().strip())
    messages: list[ChatCompletionMessageParam] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer, prompt, cached = "", 0, 0
        for chunk in client.chat.completions.create(
            model="smollm2-135m-instruct",
            messages=messages,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        ):
            if chunk.choices:
                answer += chunk.choices[0].delta.content or ""
            if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                prompt = chunk.usage.prompt_tokens
                cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
        messages.append({"role": "assistant", "content": answer})
        print(f"{answer}  [{prompt} tokens, {cached} of them cached]")


if __name__ == "__main__":
    main()
