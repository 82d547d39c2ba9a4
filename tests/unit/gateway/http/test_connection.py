"""Connections over raw sockets: heads, deadlines, caps, keep-alive and pipelining.

Numbers in docstrings (A1, A16 ...) are rows of the list of bad inputs.
"""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from gateway.config import ServerConfig
from gateway.http.connection import Connections
from tests.unit.gateway.gateway_fixture import (
    PATIENCE_S,
    GatewayFixture,
    head,
    read_answer,
    status_of,
)

SECRET = "sk-planted-secret-that-must-not-come-back"

UNREADABLE = {
    "A1 length and chunked": "Content-Length: 2\r\nTransfer-Encoding: chunked",
    "A2 two lengths": "Content-Length: 2\r\nContent-Length: 3",
    "A3 negative length": "Content-Length: -1",
    "A3 signed length": "Content-Length: +5",
    "A3 hexadecimal length": "Content-Length: 0x10",
    "A3 huge length": f"Content-Length: 1{'0' * 30}",
    "A4 unknown coding": "Transfer-Encoding: xchunked",
    "A4 doubled coding": "Transfer-Encoding: chunked, chunked",
    "A6 NUL in a header": "X-Thing: a\x00b",
    "A6 folded header": "X-Thing: a\r\n b",
    "A7 200 headers": "\r\n".join(f"X-{n}: {n}" for n in range(200)),
    "A7 a header of 9 kB": f"X-Long: {'x' * 9_000}",
    "A8 a key of 9 kB": f"Authorization: Bearer {SECRET}{'x' * 9_000}",
}


@pytest.mark.parametrize("lines", UNREADABLE.values(), ids=UNREADABLE.keys())
async def test_unreadable_requests_get_a_fixed_page_and_a_closed_connection(
    gateway: GatewayFixture, lines: str
) -> None:
    """aiohttp's own error page echoes the unparsable bytes, keys included."""
    answer = await gateway.raw(head("POST /v1/chat/completions HTTP/1.1", lines))

    assert status_of(answer) in (400, 401), answer
    assert b"xxx" not in answer
    assert SECRET.encode() not in answer
    assert SECRET not in json.dumps(gateway.lines)
    assert b"x-request-id" in answer.lower()
    assert b"application/json" in answer.lower()
    await gateway.check_quiet()


@pytest.mark.parametrize(
    "data",
    [
        b"GET /healthz\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
        b"FOO /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"\r\n\x00\x01garbage\r\n\r\n",
    ],
    ids=["HTTP/0.9", "HTTP/9.9", "HTTP/2 preface", "TLS hello", "no method", "garbage"],
)
async def test_other_protocols_are_refused_and_closed(gateway: GatewayFixture, data: bytes) -> None:
    """A13: no handler runs, and the connection closes at once."""
    answer = await gateway.raw(data)

    assert status_of(answer) in (0, 400), answer
    await gateway.check_quiet()


async def test_slow_head_times_out(unopened_gateway: GatewayFixture) -> None:
    """A16, slowloris: bare aiohttp waits forever."""
    unopened_gateway.set_server(header_timeout_s=0.1)
    await unopened_gateway.open()

    answer = await unopened_gateway.raw(b"GET /healthz HTTP/1.1\r\nHost: 127")

    assert status_of(answer) == 408
    await unopened_gateway.close()


async def test_slow_head_of_a_later_request_times_out(unopened_gateway: GatewayFixture) -> None:
    """A16: each head has a deadline, not only the connection's first."""
    unopened_gateway.set_server(header_timeout_s=0.2, keep_alive_timeout_s=60.0)
    await unopened_gateway.open()

    async with unopened_gateway.connection() as (reader, writer):
        writer.write(head("GET /healthz HTTP/1.1"))
        first = await read_answer(reader)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127")
        second = await read_answer(reader)

    assert [status_of(first), status_of(second)] == [200, 408]
    await unopened_gateway.close()


async def test_partial_head_after_a_request_is_bounded_by_keep_alive(
    unopened_gateway: GatewayFixture,
) -> None:
    """A16: bytes that arrive during a request may be its body, so they start no head deadline;
    the keep-alive deadline closes the connection."""
    unopened_gateway.set_server(header_timeout_s=60.0, keep_alive_timeout_s=0.2)
    await unopened_gateway.open()

    async with unopened_gateway.connection() as (reader, writer):
        writer.write(head("GET /healthz HTTP/1.1") + b"GET /healthz HTTP/1.1\r\nHost: 127")
        first = await read_answer(reader)
        async with asyncio.timeout(PATIENCE_S):
            rest = await reader.read()

    assert (status_of(first), rest) == (200, b"")
    await unopened_gateway.close()


async def test_silent_connection_is_closed(unopened_gateway: GatewayFixture) -> None:
    """A18: a silent connection counts against the connection limit."""
    unopened_gateway.set_server(header_timeout_s=0.1)
    await unopened_gateway.open()

    answer = await unopened_gateway.raw(b"")

    assert status_of(answer) == 408
    await unopened_gateway.close()


async def test_idle_connection_is_closed_after_keep_alive(
    unopened_gateway: GatewayFixture,
) -> None:
    """A18: aiohttp's default keep-alive is an hour."""
    unopened_gateway.set_server(keep_alive_timeout_s=0.1)
    await unopened_gateway.open()

    async with unopened_gateway.connection() as (reader, writer):
        writer.write(head("GET /healthz HTTP/1.1"))
        answer = await read_answer(reader)
        async with asyncio.timeout(PATIENCE_S):
            rest = await reader.read()

    assert status_of(answer) == 200
    assert rest == b""
    await unopened_gateway.close()


async def test_connections_above_the_address_limit_get_503(
    unopened_gateway: GatewayFixture,
) -> None:
    """A18: ten thousand idle connections must not lock tenants out for long."""
    unopened_gateway.set_server(connections_per_address_max=3)
    await unopened_gateway.open()
    held = [await asyncio.open_connection("127.0.0.1", unopened_gateway.port) for _ in range(3)]

    answer = await unopened_gateway.raw(b"")
    for _, writer in held:
        writer.close()
        await writer.wait_closed()
    later = b""
    async with asyncio.timeout(PATIENCE_S):
        while status_of(later) != 200:
            later = await unopened_gateway.raw(head("GET /healthz HTTP/1.1", "Connection: close"))

    assert status_of(answer) == 503
    assert b"retry-after" in answer.lower()
    await unopened_gateway.close()


async def test_unread_stream_is_cancelled_and_its_blocks_are_freed(
    unopened_gateway: GatewayFixture,
) -> None:
    """A26: a bare aiohttp handler waits forever once the buffers are full."""
    unopened_gateway.set_server(write_timeout_s=0.3, send_buffer_bytes=4_096)
    await unopened_gateway.open()
    body = json.dumps(
        unopened_gateway.chat(max_tokens=450, n=16, stream=True, logprobs=True)
    ).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", unopened_gateway.port))
    await loop.sock_sendall(sock, unopened_gateway.post("/v1/chat/completions", body))
    await unopened_gateway.until(lambda: bool(unopened_gateway.entries()))

    assert [entry[0] for entry in unopened_gateway.entries()] == ["cancelled"]
    await unopened_gateway.check_quiet()
    sock.close()
    await unopened_gateway.close()


async def test_head_deadline_does_not_run_between_requests(
    unopened_gateway: GatewayFixture,
) -> None:
    """The client would take an unsolicited 408 for the response to its next request."""
    unopened_gateway.set_server(header_timeout_s=0.5, keep_alive_timeout_s=60.0)
    await unopened_gateway.open()
    body = json.dumps(unopened_gateway.chat()).encode()
    async with unopened_gateway.connection() as (reader, writer):
        writer.write(unopened_gateway.post("/v1/chat/completions", body))
        first = await read_answer(reader)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await reader.read(1)
        writer.write(unopened_gateway.post("/v1/chat/completions", body))
        second = await read_answer(reader)

    assert [status_of(first), status_of(second)] == [200, 200]
    await unopened_gateway.close()


class UnreadTransport(asyncio.Transport):
    """A transport whose client reads nothing, with a buffer below asyncio's pause limit."""

    def __init__(self) -> None:
        super().__init__({"peername": ("192.0.2.1", 1)})
        self.aborted = asyncio.Event()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Accept any limits; this transport never pauses."""

    def get_write_buffer_size(self) -> int:
        return 100

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: asyncio's transport also stays open until its buffer is empty."""

    def abort(self) -> None:
        self.aborted.set()


async def test_unread_closing_connection_is_reset() -> None:
    """A26: asyncio waits forever for the last bytes, and the connection stays counted."""
    settings = ServerConfig(write_timeout_s=0.05)
    connections = Connections(asyncio.Protocol, settings, lambda: "id", lambda: None)
    connection, unread = connections(), UnreadTransport()
    connection.connection_made(unread)
    connection.close()

    async with asyncio.timeout(PATIENCE_S):
        await unread.aborted.wait()


async def test_pipelined_requests_are_answered_in_order(gateway: GatewayFixture) -> None:
    """A19: aiohttp bounds the queue of pipelined requests; none is lost or reordered."""
    async with gateway.connection() as (reader, writer):
        writer.write(head("GET /healthz HTTP/1.1") * 199)
        writer.write(head("GET /nowhere HTTP/1.1", "Connection: close"))
        async with asyncio.timeout(PATIENCE_S):
            answers = await reader.read()

    assert answers.count(b"HTTP/1.1 200") == 199
    assert answers.count(b"HTTP/1.1 404") == 1
    assert answers.rfind(b"HTTP/1.1 404") > answers.rfind(b"HTTP/1.1 200")


@pytest.mark.parametrize("when", ["in the head", "in the body"])
async def test_reset_during_a_request_leaks_nothing(gateway: GatewayFixture, when: str) -> None:
    """A23: a TCP reset may come at any byte."""
    data = gateway.post("/v1/chat/completions", json.dumps(gateway.chat()).encode())
    cut = 20 if when == "in the head" else len(data) - 5
    async with gateway.connection() as (_, writer):
        writer.write(data[:cut])
        await writer.drain()
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        writer.transport.abort()

    await gateway.check_quiet()
    assert gateway.entries() == []


async def test_disconnect_cancels_only_the_running_request(gateway: GatewayFixture) -> None:
    """All requests of a connection share one task; finished requests must stay done."""
    body = json.dumps(gateway.chat(max_tokens=400)).encode()
    async with gateway.connection() as (reader, writer):
        writer.write(gateway.post("/v1/chat/completions", json.dumps(gateway.chat()).encode()))
        first = await read_answer(reader)
        gateway.runner.hold_after(0)
        writer.write(gateway.post("/v1/chat/completions", body))
        await gateway.until(lambda: bool(gateway.gateway.context.running))
        writer.transport.abort()
        gateway.runner.release()
        await gateway.until(lambda: len(gateway.entries()) == 2)

    assert status_of(first) == 200
    assert [entry[0] for entry in gateway.entries()] == ["done", "cancelled"]
    await gateway.check_quiet()


async def test_early_refusal_reaches_a_client_that_is_still_sending(
    gateway: GatewayFixture,
) -> None:
    """Closing a socket with unread bytes resets it, and the client loses the refusal."""
    lines = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {2**20}\r\n"
    async with gateway.connection() as (reader, writer):
        writer.write(lines.encode() + b"\r\n{")
        answer = await read_answer(reader)
        writer.write(b" " * 2**18)
        await writer.drain()
        writer.write_eof()
        async with asyncio.timeout(PATIENCE_S):
            rest = await reader.read()

    assert status_of(answer) == 401
    assert rest == b""
    await gateway.check_quiet()
