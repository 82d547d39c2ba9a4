"""The minimum that must work with every allowed version of a dependency.

`tests.e2e.dependency_bounds` runs it with the oldest and with the newest versions.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.gateway.gateway_fixture import (
    PATIENCE_S,
    GatewayFixture,
    head,
    read_answer,
    read_late_answer,
    status_of,
)

TURN = [{"role": "user", "content": "hello"}]
GEMINI = {
    "contents": [{"role": "user", "parts": [{"text": "hello"}]}],
    "generationConfig": {"maxOutputTokens": 4},
}
STREAM = {"stream": True}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": TURN, "max_tokens": 4}),
    "completion": ("/v1/completions", {"prompt": "hello", "max_tokens": 4}),
    "response": ("/v1/responses", {"input": "hello", "max_output_tokens": 16}),
    "message": ("/v1/messages", {"messages": TURN, "max_tokens": 4}),
}


@pytest.mark.parametrize("kind", REQUESTS)
async def test_dialect_answers_unary_and_streamed(gateway: GatewayFixture, kind: str) -> None:
    """Prompt, engine, encoder, socket and ledger at once."""
    path, body = REQUESTS[kind]
    status, whole, response = await gateway.ask(path, {"model": gateway.model, **body})
    streamed, events, _ = await gateway.ask(path, {"model": gateway.model, **body, **STREAM})

    assert (status, streamed) == (200, 200)
    assert isinstance(whole, dict)
    assert response.headers["Server"] == "trunkline"
    assert len(response.headers["X-Request-Id"]) == 32
    assert events.count("data: ") >= 2
    assert [entry[0] for entry in gateway.entries()] == ["done", "done"]
    await gateway.check_quiet()


async def test_gemini_answers_unary_and_streamed(gateway: GatewayFixture) -> None:
    """Its path has the model and the action, with a colon."""
    path = f"/v1beta/models/{gateway.model}"
    status, whole, _ = await gateway.ask(f"{path}:generateContent", GEMINI)
    streamed, events, _ = await gateway.ask(f"{path}:streamGenerateContent?alt=sse", GEMINI)

    assert (status, streamed) == (200, 200)
    assert whole["candidates"]
    assert events.startswith("data: ")
    await gateway.check_quiet()


async def test_decodes_gzip_and_refuses_other_bodies(gateway: GatewayFixture) -> None:
    """The listener's options reach the parser: bodies arrive as sent."""
    body = gzip.compress(json.dumps(gateway.chat()).encode())
    status, _, _ = await gateway.ask(body=body, headers={"Content-Encoding": "gzip"})
    refused, error, _ = await gateway.ask(body=b"{", headers={"Content-Encoding": "identity"})

    assert (status, refused, error["error"]["code"]) == (200, 400, "invalid_json")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (head("GET /healthz HTTP/1.1", f"X-Long: {'x' * 9_000}"), 431),
        (head("GET /healthz HTTP/1.1", *(f"X-{number}: 1" for number in range(200))), 431),
        (head("GET /healthz HTTP/1.1", "Content-Length: 2", "Content-Length: 3"), 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64), 400),
    ],
    ids=["a long header", "many headers", "two lengths", "no HTTP"],
)
async def test_malformed_head_gets_our_error_page(
    gateway: GatewayFixture, data: bytes, expected: int
) -> None:
    """Its shape and an id, without any byte of the request."""
    answer = await gateway.raw(data)

    assert status_of(answer) == expected
    code = b"headers_too_large" if expected == 431 else b"bad_http"
    assert b'"code": "%b"' % code in answer
    assert b"x-request-id: " in answer
    assert b"xxx" not in answer


async def test_slow_head_times_out(
    unopened_gateway: GatewayFixture, forward: Callable[[float], None]
) -> None:
    """On a new connection, and after a response."""
    unopened_gateway.set_server(header_timeout_s=20.0, keep_alive_timeout_s=300.0)
    await unopened_gateway.open()
    async with unopened_gateway.connection() as (reader, writer):
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127")
        fresh = await read_late_answer(reader, forward)
    async with unopened_gateway.connection() as (reader, writer):
        writer.write(head("GET /healthz HTTP/1.1"))
        first = await read_answer(reader)
        writer.write(b"GET /")
        second = await read_late_answer(reader, forward)

    assert [status_of(one) for one in (fresh, first, second)] == [408, 200, 408]
    await unopened_gateway.close()


async def test_errors_have_their_dialects_shape(gateway: GatewayFixture) -> None:
    """Unknown paths, methods that are not allowed, and wrong keys."""
    answers = [
        await gateway.ask("/nowhere", method="GET"),
        await gateway.ask("/v1/messages", method="GET"),
        await gateway.ask("/v1/messages", {}, who=None),
    ]

    assert [status for status, _, _ in answers] == [404, 405, 401]
    assert answers[1][2].headers["Allow"] == "POST"
    assert answers[2][1]["type"] == "error"


async def test_connection_is_kept_alive_and_closed_on_request(
    gateway: GatewayFixture,
) -> None:
    """Either side may close it."""
    body = json.dumps(gateway.chat()).encode()
    async with gateway.connection() as (reader, writer):
        writer.write(gateway.post("/v1/chat/completions", body))
        first = await read_answer(reader)
        writer.write(gateway.post("/v1/chat/completions", body, "Connection: close"))
        second = await read_answer(reader)
        async with asyncio.timeout(PATIENCE_S):
            rest = await reader.read()

    assert [status_of(first), status_of(second), rest] == [200, 200, b""]
    await gateway.check_quiet()


async def test_disconnect_cancels_the_request(gateway: GatewayFixture) -> None:
    """The handler is cancelled, blocks are freed, and usage is recorded."""
    gateway.runner.hold_after(2)
    body = json.dumps(gateway.chat(max_tokens=400)).encode()
    async with gateway.connection() as (_, writer):
        writer.write(gateway.post("/v1/chat/completions", body))
        await gateway.until(lambda: gateway.runner.is_held)
        writer.transport.abort()
        gateway.runner.release()
        await gateway.until(lambda: bool(gateway.entries()))

    assert [entry[0] for entry in gateway.entries()] == ["cancelled"]
    await gateway.check_quiet()


async def test_shutdown_closes_idle_connections(unopened_gateway: GatewayFixture) -> None:
    """At once, not after the keep-alive timeout."""
    await unopened_gateway.open()
    async with unopened_gateway.connection() as (reader, writer):
        writer.write(head("GET /healthz HTTP/1.1"))
        answer = await read_answer(reader)
        await unopened_gateway.close()
        async with asyncio.timeout(PATIENCE_S):
            rest = await reader.read()

    assert (status_of(answer), rest) == (200, b"")
