"""LiteLLM's proxy before the gateway: OpenAI's and Anthropic's clients ask the proxy."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
from cases import KEY, LONG, MODEL, URL, case, main, raises

START_TIMEOUT_S = 120.0
MASTER = "sk-" + secrets.token_hex(24)
ROUTES = {"openai": f"{URL}/v1", "hosted_vllm": f"{URL}/v1", "anthropic": URL}


@contextlib.contextmanager
def proxy() -> Iterator[str]:
    """Yield the URL of a proxy with a model for each of `ROUTES`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    models = [
        {
            "model_name": name,
            "litellm_params": {"model": f"{name}/{MODEL}", "api_base": base, "api_key": KEY},
        }
        for name, base in ROUTES.items()
    ]
    settings = {"model_list": models, "general_settings": {"master_key": MASTER}}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps(settings))
        command = [str(Path(sys.executable).parent / "litellm"), "--config", str(config)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
        process = subprocess.Popen(
            command,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        url = f"http://127.0.0.1:{port}"
        deadline_s = time.monotonic() + START_TIMEOUT_S
        try:
            while True:
                try:
                    urllib.request.urlopen(f"{url}/health/liveliness", timeout=5)
                    break
                except OSError:
                    assert process.poll() is None, "the proxy ended"
                    assert time.monotonic() < deadline_s, "the proxy does not answer"
                    time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            process.wait()


def post(path: str, body: dict[str, Any]) -> Any:
    """Ask the proxy as a client of Anthropic's does."""
    headers = {"x-api-key": MASTER, "anthropic-version": "2023-06-01"}
    headers["Content-Type"] = "application/json"
    request = urllib.request.Request(PROXY + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def declare(name: str) -> None:
    def ask(messages: Any, **more: Any) -> Any:
        return CLIENT.chat.completions.create(
            model=name, messages=messages, **{"max_tokens": 12, **more}
        )

    @case(f"{name}: unary")
    def unary() -> None:
        assert ask([{"role": "user", "content": "Hello"}]).choices[0].message.content

    @case(f"{name}: stream")
    def stream() -> None:
        chunks = list(ask([{"role": "user", "content": "Hello"}], stream=True))
        assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)

    @case(f"{name}: second turn")
    def second_turn() -> None:
        history: list[Any] = [{"role": "user", "content": "Hello"}]
        history.append(ask(history).choices[0].message.model_dump())
        history.append({"role": "user", "content": "And then?"})
        assert ask(history).choices[0].message.content

    @case(f"{name}: overflow")
    def overflow() -> None:
        long = [{"role": "user", "content": LONG}]
        error = raises(openai.BadRequestError, lambda: ask(long))
        assert "ContextWindowExceeded" in str(error)

    @case(f"{name}: Messages in")
    def messages() -> None:
        turn = {"role": "user", "content": "Hello"}
        body = {"model": name, "max_tokens": 12, "messages": [turn]}
        assert post("/v1/messages", body)["content"]


for one in ROUTES:
    declare(one)

with proxy() as PROXY:
    CLIENT = openai.OpenAI(base_url=f"{PROXY}/v1", api_key=MASTER, max_retries=0)
    main("litellm", "openai")
