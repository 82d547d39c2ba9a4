"""The listener over raw sockets: Host, paths, methods, Expect, Upgrade and pipelining.

Numbers in docstrings (A1, A16 ...) are rows of the list of bad inputs.
"""

from __future__ import annotations

import asyncio
import errno
import json

import pytest

from gateway.http.server import log_accept_errors
from tests.tables import each_row
from tests.unit.gateway.gateway_fixture import (
    PATIENCE_S,
    GatewayFixture,
    head,
    read_answer,
    status_of,
)

SECRET = "sk-planted-secret-that-must-not-come-back"


@each_row(
    "host",
    ["h/health?x=", "foo#", "a@b", "", "[fe80::1%eth0]", "evil.example", "127.0.0.1, 127.0.0.1"],
)
async def test_foreign_or_malformed_host_is_refused_before_routing(
    gateway: GatewayFixture, host: str
) -> None:
    """A10: no path is parsed from Host and no handler runs."""
    answer = await gateway.raw(head("GET /healthz HTTP/1.1", "Connection: close", host=host))

    assert status_of(answer) == 400, answer


@pytest.mark.parametrize("headers", [[], ["Host: 127.0.0.1", "Host: 127.0.0.1"]])
async def test_missing_or_repeated_host_is_refused(
    gateway: GatewayFixture, headers: list[str]
) -> None:
    """A11: a proxy may have believed the other of two hosts."""
    answer = await gateway.raw(
        head("GET /healthz HTTP/1.1", *headers, "Connection: close", host=None)
    )

    assert status_of(answer) == 400


@each_row(
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
async def test_path_variants_reach_no_handler_without_a_key(
    gateway: GatewayFixture, target: str
) -> None:
    """A12: authentication depends on the declared route, not on comparing path strings."""
    answer = await gateway.raw(
        head(f"POST {target} HTTP/1.1", "Content-Length: 0", "Connection: close")
    )

    assert status_of(answer) in (400, 401, 404), answer
    assert gateway.entries() == []


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "//v1/chat/completions", "/v1//chat///completions//"]
)
async def test_slash_too_many_is_served(gateway: GatewayFixture, path: str) -> None:
    """Base URLs end with one; behind `messages` clients add their own."""
    status, answer, _ = await gateway.ask(path, gateway.chat())

    assert (status, answer["object"]) == (200, "chat.completion")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/responses", "/x"])
async def test_websocket_handshake_gets_426(gateway: GatewayFixture, path: str) -> None:
    """Codex tries a handshake seven times unless it is told that the mode is not supported."""
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    answer = await gateway.raw(head(f"GET {path} HTTP/1.1", *upgrade))

    assert status_of(answer) == 426, answer
    assert b"use streaming" in answer
    assert b"\r\nupgrade: http/1.1\r\n" in answer.lower()


async def test_path_of_the_other_listener_names_it(gateway: GatewayFixture) -> None:
    """A client with the wrong port otherwise looks for a fault in its path."""
    url = f"{gateway.admin_url}/v1/chat/completions"
    async with gateway.session.post(url, json=gateway.chat()) as response:
        on_admin = response.status, (await response.json())["error"]["message"]
    status, answer, _ = await gateway.ask("/admin/v1/tenants", method="GET")

    assert on_admin[0] == status == 404
    assert "server.listen" in on_admin[1]
    assert "admin.listen" in answer["error"]["message"]


@pytest.mark.parametrize("method", ["PUT", "DELETE", "TRACE"])
async def test_wrong_method_gets_405_with_allow(gateway: GatewayFixture, method: str) -> None:
    """A14: Allow tells the client the supported methods."""
    answer = await gateway.raw(head(f"{method} /v1/chat/completions HTTP/1.1", "Connection: close"))

    assert status_of(answer) == 405, answer
    assert b"allow: post" in answer.lower()


@pytest.mark.parametrize(
    ("path", "allow"),
    [("/v1/chat/completions", "POST"), ("/v1/models", "GET, HEAD"), ("/health", "GET, HEAD")],
)
async def test_options_tells_methods_and_lets_no_other_origin_in(
    gateway: GatewayFixture, path: str, allow: str
) -> None:
    """Proxies and tools ask before the first request; a browser's preflight finds no permission."""
    lines = ("Origin: http://evil.example", "Access-Control-Request-Method: POST")
    answer = await gateway.raw(head(f"OPTIONS {path} HTTP/1.1", *lines, "Connection: close"))

    assert status_of(answer) == 204
    assert f"allow: {allow}\r\n".lower().encode() in answer.lower()
    assert b"access-control" not in answer.lower()


@pytest.mark.parametrize("path", ["/health", "/healthz", "/readyz", "/v1/models"])
async def test_head_is_get_without_the_body(gateway: GatewayFixture, path: str) -> None:
    """Load balancers and download tools probe with HEAD; the route's key is still required."""
    authorization = f"Authorization: Bearer {gateway.keys['ada']}"
    answers = []
    for method in ("GET", "HEAD"):
        async with gateway.connection() as (reader, writer):
            writer.write(head(f"{method} {path} HTTP/1.1", authorization, "Connection: close"))
            async with asyncio.timeout(PATIENCE_S):
                answers.append(await reader.read())
    (whole, body), (bare, nothing) = (answer.split(b"\r\n\r\n", 1) for answer in answers)

    assert [status_of(answer) for answer in answers] == [200, 200]
    assert (len(body) > 0, nothing) == (True, b"")
    assert f"content-length: {len(body)}\r\n".encode() in bare.lower() + b"\r\n"
    assert whole.lower().count(b"\r\n") == bare.lower().count(b"\r\n")


async def test_head_needs_the_routes_key(gateway: GatewayFixture) -> None:
    """The answer's length would tell the models."""
    async with gateway.connection() as (reader, writer):
        writer.write(head("HEAD /v1/models HTTP/1.1", "Connection: close"))
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()

    assert status_of(answer) == 401


async def test_unsupported_expect_header_gets_417(gateway: GatewayFixture) -> None:
    """A15: only 100-continue is supported."""
    data = gateway.post("/v1/chat/completions", b"{}", "Expect: nonsense", "Connection: close")

    assert status_of(await gateway.raw(data)) == 417


async def test_100_continue_is_sent_only_with_a_valid_key(
    gateway: GatewayFixture,
) -> None:
    """A15: a request without a key must not make the gateway receive its body."""
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


async def test_http_1_0_gets_no_interim_reply(gateway: GatewayFixture) -> None:
    """Its client would take `100 Continue` for the answer."""
    body = json.dumps(gateway.chat()).encode()
    data = gateway.post("/v1/chat/completions", body, "Expect: 100-continue")
    answer = await gateway.raw(data.replace(b"HTTP/1.1", b"HTTP/1.0", 1))

    assert status_of(answer) == 200


async def test_bytes_after_a_body_are_the_next_request(gateway: GatewayFixture) -> None:
    """A22: bytes beyond Content-Length are a pipelined request with its own authentication."""
    body = json.dumps(gateway.chat()).encode()
    second = head("GET /v1/models HTTP/1.1", "Connection: close")
    async with gateway.connection() as (reader, writer):
        writer.write(gateway.post("/v1/chat/completions", body) + second)
        async with asyncio.timeout(PATIENCE_S):
            answers = await reader.read()

    assert status_of(answers) == 200
    assert b"HTTP/1.1 401" in answers


async def test_request_id_header_of_a_client_is_ignored(gateway: GatewayFixture) -> None:
    """A24: client ids could inject text into logs and headers."""
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
async def test_upgrade_header_is_ignored(gateway: GatewayFixture, lines: tuple[str, ...]) -> None:
    """A25: the connection never switches to another protocol."""
    async with gateway.connection() as (reader, writer):
        writer.write(head("GET /v1/chat/completions HTTP/1.1", *lines))
        answer = await read_answer(reader)

    assert status_of(answer) in (405, 426)


async def test_connect_method_is_refused(gateway: GatewayFixture) -> None:
    """A25: the gateway is not a proxy."""
    answer = await gateway.raw(head("CONNECT example.com:443 HTTP/1.1", "Connection: close"))

    assert status_of(answer) in (400, 404, 405)


async def test_query_strings_are_not_logged(gateway: GatewayFixture) -> None:
    """A9: query strings may hold keys."""
    await gateway.ask(f"/v1/models?api_key={SECRET}", method="GET")

    assert SECRET not in json.dumps(gateway.lines)


async def test_failed_accepts_are_one_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio reports each of a round; 1.6 million lines came in half a minute."""
    loop = asyncio.get_running_loop()
    lines: list[str] = []
    log_accept_errors(loop, lambda event, facts: lines.append(f"{event} {facts}"))
    for _ in range(1_000):
        error = OSError(errno.EMFILE, "Too many open files")
        loop.call_exception_handler({"message": "socket.accept()", "exception": error})
    loop.call_exception_handler({"message": "another", "exception": ValueError("x")})

    assert lines == ["accept_failed {'error': 'EMFILE'}"]
    assert [record.getMessage().splitlines()[0] for record in caplog.records] == ["another"]
