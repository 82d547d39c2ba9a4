"""Responses over raw sockets: headers, keep-alive, and pieces of long ones."""

from __future__ import annotations

import asyncio
import socket

import pytest
from msgspec.json import decode, encode

from gateway.http.response import PIECE_BYTES
from tenancy.accounts.tenants import find_tenant
from tenancy.responses.stored_responses import StoredResponse
from tenancy.types import HOUR_MS, wall_ms
from tests.unit.gateway.gateway_fixture import (
    PATIENCE_S,
    GatewayFixture,
    head,
    read_answer,
    status_of,
)


def request(gateway: GatewayFixture, version: str, *lines: str) -> bytes:
    """Return a short chat request in the given HTTP version."""
    body = gateway.post("/v1/chat/completions", encode(gateway.chat(max_tokens=1)), *lines)
    return body.replace(b"HTTP/1.1", version.encode(), 1)


@pytest.mark.parametrize(
    ("version", "lines", "connection"),
    [
        ("HTTP/1.1", (), b""),
        ("HTTP/1.1", ("Connection: close",), b"connection: close\r\n"),
        ("HTTP/1.0", (), b"connection: close\r\n"),
        ("HTTP/1.0", ("Connection: keep-alive",), b"connection: keep-alive\r\n"),
    ],
)
async def test_connection_header_says_whether_the_connection_stays_open(
    gateway: GatewayFixture, version: str, lines: tuple[str, ...], connection: bytes
) -> None:
    """Without a Connection header HTTP/1.0 clients expect a close, HTTP/1.1 clients keep-alive."""
    async with gateway.connection() as (reader, writer):
        writer.write(request(gateway, version, *lines))
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        rest = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        await reader.readexactly(rest)
        if connection.endswith(b"close\r\n"):
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.read() == b""

    assert head.startswith(version.lower().encode() + b" 200 ok\r\n")
    assert (b"connection: " in head) == bool(connection)
    assert connection in head


async def test_the_end_of_an_http_1_0_stream_is_that_of_its_connection(
    gateway: GatewayFixture,
) -> None:
    """It has neither a length nor chunks, so its client waits for the end; also one that asks for
    keep-alive."""
    body = encode(gateway.chat(max_tokens=1, stream=True))
    data = gateway.post("/v1/chat/completions", body, "Connection: keep-alive")
    answer = await gateway.raw(data.replace(b"HTTP/1.1", b"HTTP/1.0", 1))

    assert answer.endswith(b"data: [DONE]\n\n")
    assert b"connection: keep-alive" not in answer.lower()


async def test_response_has_every_standard_header_once(gateway: GatewayFixture) -> None:
    """Short responses take a faster path; their headers must be the same."""
    answer = await gateway.raw(request(gateway, "HTTP/1.1"))

    head = answer.partition(b"\r\n\r\n")[0].decode().lower().split("\r\n")[1:]
    names = [line.partition(":")[0] for line in head]
    wanted = {"content-type", "content-length", "date", "server", "x-request-id", "cache-control"}
    assert wanted <= set(names)
    assert "server: trunkline" in head
    assert len(names) == len(set(names))


async def test_response_is_sent_before_its_log_line(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client waits for the response; logging must not delay it."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", gateway.port))
        seen: list[bytes] = []
        log = gateway.log

        def look(event: str, facts: dict[str, object]) -> None:
            if event == "request":
                seen.append(client.recv(4_096))
            log(event, facts)

        monkeypatch.setattr(gateway, "log", look)
        await loop.sock_sendall(client, request(gateway, "HTTP/1.1"))
        await gateway.until(lambda: bool(gateway.lines))

    (answer,) = seen
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


async def test_long_response_is_complete_and_keeps_the_connection_open(
    gateway: GatewayFixture,
) -> None:
    """A long response is sent in pieces, each with its own deadline."""
    long = gateway.chat(max_tokens=300, n=4, logprobs=True)
    async with gateway.connection() as (reader, writer):
        answers = []
        for body in (long, gateway.chat(max_tokens=1)):
            writer.write(gateway.post("/v1/chat/completions", encode(body)))
            answers.append((await read_answer(reader)).partition(b"\r\n\r\n"))

    (head, _, content), (_, _, short) = answers
    assert b"x-request-id: " in head.lower()
    assert len(content) > 2**16
    assert len(decode(content)["choices"]) == 4
    assert len(decode(short)["choices"]) == 1


async def test_head_of_a_long_response_sends_no_body(gateway: GatewayFixture) -> None:
    """A body would be read as the next answer on the connection, which a proxy may share between
    clients: what one tenant stored would be the answer to another."""
    tenant, now_ms = find_tenant(gateway.store, "ada"), wall_ms()
    assert tenant is not None
    body = encode({"output": [], "text": "x" * 2 * PIECE_BYTES})
    name, workspace = "resp_1", "default"
    owner = tenant.tenant_id, workspace
    record = StoredResponse(name, *owner, now_ms, now_ms + HOUR_MS, b"[]", body)
    assert not await gateway.gateway.context.responses.write(record)
    async with gateway.connection() as (reader, writer):
        key = f"Authorization: Bearer {gateway.keys['ada']}"
        writer.write(head(f"HEAD /v1/responses/{name} HTTP/1.1", key))
        writer.write(head("GET /healthz HTTP/1.1", "Connection: close"))
        async with asyncio.timeout(PATIENCE_S):
            first, _, second = (await reader.read()).partition(b"\r\n\r\n")

    assert status_of(first) == 200
    assert f"content-length: {len(body)}\r\n".encode() in first.lower()
    assert second.startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_refusal_keeps_the_connection_of_a_body_that_is_here(
    gateway: GatewayFixture,
) -> None:
    """A client that is refused by a limit need not connect anew for its next try."""
    refused = head("POST /v1/chat/completions HTTP/1.1", "Content-Length: 5") + b"abcde"
    async with gateway.connection() as (reader, writer):
        statuses = []
        for data in (refused, request(gateway, "HTTP/1.1")):
            writer.write(data)
            statuses.append(status_of(await read_answer(reader)))

    assert statuses == [401, 200]
