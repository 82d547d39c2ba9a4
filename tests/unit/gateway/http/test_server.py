"""The listener against raw sockets: each of aiohttp's open ends is closed.

Numbers in names' reasons (A1, A16 ...) are the rows of the list of bad inputs.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.unit.gateway.gateway_fixture import (
    PATIENCE_S,
    GatewayFixture,
    head,
    read_answer,
    status_of,
)

SECRET = "sk-planted-secret-that-must-not-come-back"


@pytest.mark.parametrize(
    "host",
    ["h/health?x=", "foo#", "a@b", "", "[fe80::1%eth0]", "evil.example", "127.0.0.1, 127.0.0.1"],
)
async def test_hosts_that_are_not_ours_are_refused_before_routing(
    gateway: GatewayFixture, host: str
) -> None:
    """A10: whatever stands in Host, no path is read from it and no handler runs."""
    answer = await gateway.raw(head("GET /healthz HTTP/1.1", "Connection: close", host=host))

    assert status_of(answer) == 400, answer


@pytest.mark.parametrize("headers", [[], ["Host: 127.0.0.1", "Host: 127.0.0.1"]])
async def test_no_host_or_two_are_refused(gateway: GatewayFixture, headers: list[str]) -> None:
    """A11: which of two would a proxy have believed?"""
    answer = await gateway.raw(
        head("GET /healthz HTTP/1.1", *headers, "Connection: close", host=None)
    )

    assert status_of(answer) == 400


@pytest.mark.parametrize(
    "target",
    [
        "//v1/chat/completions",
        "/v1%2fchat%2fcompletions",
        "/x/../v1/chat/completions",
        "/v1/chat/completions;a=b",
        "/v1/chat/completions/",
        "/V1/Chat/Completions",
        "http://other.example/v1/chat/completions",
    ],
)
async def test_spellings_of_a_path_reach_no_handler_without_a_key(
    gateway: GatewayFixture, target: str
) -> None:
    """A12: authentication hangs on the declared route, never on a string comparison."""
    answer = await gateway.raw(
        head(f"POST {target} HTTP/1.1", "Content-Length: 0", "Connection: close")
    )

    assert status_of(answer) in (400, 401, 404), answer
    assert gateway.entries() == []


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "TRACE", "OPTIONS"])
async def test_wrong_methods_name_the_right_one(gateway: GatewayFixture, method: str) -> None:
    """A14: a 405 without Allow leaves the client guessing."""
    answer = await gateway.raw(head(f"{method} /v1/chat/completions HTTP/1.1", "Connection: close"))

    assert status_of(answer) == 405, answer
    assert b"allow: post" in answer.lower()


async def test_a_nonsense_expectation_is_refused(gateway: GatewayFixture) -> None:
    """A15."""
    data = gateway.post("/v1/chat/completions", b"{}", "Expect: nonsense", "Connection: close")

    assert status_of(await gateway.raw(data)) == 417


async def test_expect_100_continue_is_answered_only_with_a_good_key(
    gateway: GatewayFixture,
) -> None:
    """A15: who has no key is not invited to send a body."""
    body = json.dumps(gateway.chat()).encode()
    lines = ("Expect: 100-continue", f"Content-Length: {len(body)}", "Connection: close")
    async with gateway.connection() as (reader, writer):
        writer.write(gateway.post("/v1/chat/completions", b"", *lines))
        invitation = await reader.readuntil(b"\r\n\r\n")
        writer.write(body)
        answer = await read_answer(reader)
    uninvited = await gateway.raw(head("POST /v1/chat/completions HTTP/1.1", *lines))

    assert status_of(invitation) == 100
    assert status_of(answer) == 200
    assert status_of(uninvited) == 401


async def test_what_follows_a_body_is_its_own_request(gateway: GatewayFixture) -> None:
    """A22: longer than Content-Length is pipelining, not smuggling; each is judged apart."""
    body = json.dumps(gateway.chat()).encode()
    second = head("GET /v1/models HTTP/1.1", "Connection: close")
    async with gateway.connection() as (reader, writer):
        writer.write(gateway.post("/v1/chat/completions", body) + second)
        async with asyncio.timeout(PATIENCE_S):
            answers = await reader.read()

    assert status_of(answers) == 200
    assert b"HTTP/1.1 401" in answers


async def test_our_request_id_is_used_whatever_is_sent(gateway: GatewayFixture) -> None:
    """A24: ids from clients would be a way into logs and headers."""
    _, _, response = await gateway.ask(
        "/healthz", method="GET", headers={"X-Request-Id": "mine; injected"}
    )
    other, _, second = await gateway.ask("/nowhere", method="GET")

    assert "mine" not in response.headers["x-request-id"]
    assert len(response.headers["x-request-id"]) == 32
    assert other == 404
    assert second.headers["x-request-id"] != response.headers["x-request-id"]


@pytest.mark.parametrize(
    "lines",
    [
        ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"),
        ("Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABkAAQAAP__"),
    ],
)
async def test_upgrades_are_not_taken(gateway: GatewayFixture, lines: tuple[str, ...]) -> None:
    """A25: no other protocol begins on this connection."""
    async with gateway.connection() as (reader, writer):
        writer.write(head("GET /v1/chat/completions HTTP/1.1", *lines))
        answer = await read_answer(reader)

    assert status_of(answer) in (400, 405)


async def test_connect_is_refused(gateway: GatewayFixture) -> None:
    """A25: this is no proxy."""
    answer = await gateway.raw(head("CONNECT example.com:443 HTTP/1.1", "Connection: close"))

    assert status_of(answer) in (400, 404, 405)


async def test_query_strings_are_not_logged(gateway: GatewayFixture) -> None:
    """A9: keys travel in query strings."""
    await gateway.ask(f"/v1/models?api_key={SECRET}", method="GET")

    assert SECRET not in json.dumps(gateway.lines)
