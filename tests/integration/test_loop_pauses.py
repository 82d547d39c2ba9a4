"""No body holds the event loop: large requests are refused early or prepared in threads."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.integration.loop_monitor import PAUSE_MAX, longest_turns
from tests.unit.gateway.gateway_fixture import GatewayFixture

CHAT, COUNT = "/v1/chat/completions", "/v1/messages/count_tokens"
RESPONSES, COMPLETIONS = "/v1/responses", "/v1/completions"
GEMINI = "/v1beta/models/tiny:countTokens"

ROLES = ("user", "assistant")


def schema_format(schema: object) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    return {"messages": user("x"), "response_format": form}


def user(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def tool(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", "parameters": {}}}


def called(number: int, arguments: str = "{}") -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    call = {"type": "function", "id": f"c{number}", "function": function}
    return [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": "x"},
    ]


BODIES: dict[str, tuple[str, Callable[[int], dict[str, Any]], int]] = {
    "messages": (
        CHAT,
        lambda n: {"messages": [{"role": ROLES[i % 2], "content": ""} for i in range(n)]},
        9_999,
    ),
    "parts": (CHAT, lambda n: {"messages": user([{"type": "text", "text": ""}] * n)}, 60_000),
    "blocks": (COUNT, lambda n: {"messages": user([{"type": "text", "text": "a"}] * n)}, 60_000),
    "anthropic tools": (
        COUNT,
        lambda n: {
            "messages": user("x"),
            "tools": [{"name": f"t{i}", "input_schema": {"type": "object"}} for i in range(n)],
        },
        9_999,
    ),
    "tools": (CHAT, lambda n: {"messages": user("x"), "tools": list(map(tool, range(n)))}, 128),
    "calls": (
        CHAT,
        lambda n: {"messages": [*user("x"), *(one for i in range(n) for one in called(i))]},
        4_000,
    ),
    "contents": (
        GEMINI,
        lambda n: {"contents": [{"role": "user", "parts": [{"text": "a"}]}] * n},
        20_000,
    ),
    "items": (RESPONSES, lambda n: {"input": user("x") * n}, 9_999),
    "prompts": (
        COMPLETIONS,
        lambda n: {"prompt": ["".join(f"{i}x{j} " for j in range(700)) for i in range(n)]},
        128,
    ),
    "short prompts": (COMPLETIONS, lambda n: {"prompt": [f"word {i}" for i in range(n)]}, 128),
    "token ids": (COMPLETIONS, lambda n: {"prompt": [5] * n}, 190_000),
    "words": (COUNT, lambda n: {"messages": user("word and more " * n)}, 150_000),
    "one word": (COUNT, lambda n: {"messages": user("a" * n)}, 2_000_000),
    "metadata": (
        CHAT,
        lambda n: {"messages": user("x"), "metadata": {f"k{i}": "" for i in range(n)}},
        190_000,
    ),
    "empty lists": (CHAT, lambda n: {"messages": user("x"), "metadata": [[]] * n}, 2_500_000),
    "schema": (
        CHAT,
        lambda n: schema_format(
            {"properties": {f"p{i:05d}": {"type": "string"} for i in range(n)}}
        ),
        8_000,
    ),
    "brackets": (
        CHAT,
        lambda n: schema_format({"properties": {"a": {"type": "string", "pattern": "[" * n}}}),
        200_000,
    ),
    "quotes in arguments": (
        CHAT,
        lambda n: {"messages": [*user("x"), *called(0, '"\\"' * n)]},
        40_000,
    ),
}
"""Bodies by what they hold many of: (path, body of n, the largest n)."""


@pytest.fixture
async def gateway(unopened_gateway: GatewayFixture) -> AsyncIterator[GatewayFixture]:
    """A gateway with a context in which large prompts fit."""
    unopened_gateway.context_tokens = 65_536
    unopened_gateway.set_limits(choices_max=64)
    await unopened_gateway.open()
    yield unopened_gateway
    await unopened_gateway.close()


async def check_turns(gateway: GatewayFixture, path: str, body: object) -> None:
    """Check that no turn of the loop is long while a body is answered."""
    data = gzip.compress(json.dumps(body).encode(), 1)
    headers = {"Content-Encoding": "gzip", "anthropic-version": "2023-06-01"}

    async def ask() -> None:
        status, answer, _ = await gateway.ask(path, data, headers=headers)
        assert status in (200, 400, 413, 429, 503), answer

    turns = await longest_turns(ask)
    assert min(turns) < PAUSE_MAX, turns


@pytest.mark.parametrize("divisor", [1, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", BODIES)
async def test_no_body_holds_the_loop(gateway: GatewayFixture, name: str, divisor: int) -> None:
    """The largest body that is parsed, and one of half its size; the best of some attempts."""
    path, make, largest = BODIES[name]
    body = make(largest // divisor)
    if path in (CHAT, COMPLETIONS):
        body["max_tokens"] = 1
    if path != GEMINI:
        body["model"] = gateway.model
    await check_turns(gateway, path, body)


@pytest.mark.parametrize("fields", [{"stream": True}, {"n": 40}, {"best_of": 20, "n": 20}])
async def test_no_echo_holds_the_loop(gateway: GatewayFixture, fields: dict[str, Any]) -> None:
    """The logprobs of a whole prompt are rendered and encoded in threads, once per choice."""
    body = {"prompt": [5] * 4_000, "echo": True, "logprobs": 4, "max_tokens": 1, **fields}
    await check_turns(gateway, COMPLETIONS, {"model": gateway.model, **body})
    await gateway.check_quiet()
