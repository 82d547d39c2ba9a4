"""Connections over raw sockets: heads, deadlines, caps, keep-alive and pipelining.

Numbers in docstrings (A1, A16 ...) are rows of the list of bad inputs.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

from gateway.config import ServerConfig
from gateway.http import connection
from gateway.http.connection import Connections
from tests.tables import each_row
from tests.unit.gateway.gateway_fixture import (
    PATIENCE_S,
    GatewayFixture,
    head,
    read_answer,
    read_late_answer,
    status_of,
)
from tests.unit.gateway.http.conftest import OpenGateway

SECRET = "sk-planted-secret-that-must-not-come-back"


def chat(gateway: GatewayFixture, who: str = "ada", **more: Any) -> bytes:
    """Return the bytes of a small chat request."""
    return gateway.post("/v1/chat/completions", json.dumps(gateway.chat(**more)).encode(), who=who)


@asynccontextmanager
async def unread_socket(gateway: GatewayFixture) -> AsyncIterator[socket.socket]:
    """Yield a connection whose client has little room for answers, and reads none."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", gateway.port))
        yield sock


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


@each_row("lines", UNREADABLE.values())
async def test_unreadable_requests_get_a_fixed_page_and_a_closed_connection(
    gateway: GatewayFixture, lines: str
) -> None:
    """aiohttp's own error page echoes the unparsable bytes, keys included."""
    answer = await gateway.raw(head("POST /v1/chat/completions HTTP/1.1", lines))

    assert status_of(answer) in (400, 401, 431), answer
    assert b"xxx" not in answer
    assert SECRET.encode() not in answer
    assert SECRET not in json.dumps(gateway.lines)
    assert b"x-request-id" in answer.lower()
    assert b"application/json" in answer.lower()
    await gateway.check_quiet()


LARGE = {
    "a header": ("/v1/models", f"X-Long: {'x' * 9_000}", 431, "headers_too_large"),
    "a header in several packets": ("/v1/models", f"X-L: {'x' * 90_000}", 431, "headers_too_large"),
    "many headers": (
        "/v1/models",
        "\r\n".join(f"X-{n}: {n}" for n in range(200)),
        431,
        "headers_too_large",
    ),
    "a URL": (f"/v1/models?{'x' * 9_000}", "X-Short: x", 414, "url_too_long"),
    "none": ("/v1/models", f"X Space: {'x' * 900}", 400, "bad_http"),
}


@pytest.mark.parametrize("name", LARGE)
async def test_a_head_that_is_too_large_is_told_so(gateway: GatewayFixture, name: str) -> None:
    """Proxies add headers, and clients cookies: their users look for the large one."""
    path, lines, status, code = LARGE[name]
    answer = await gateway.raw(head(f"GET {path} HTTP/1.1", lines))

    assert status_of(answer) == status
    assert code.encode() in answer
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


@pytest.mark.parametrize("data", [b"GET /healthz HTTP/1.1\r\nHost: 127", b""])
async def test_slow_head_times_out(
    forward: Callable[[float], None], open_gateway: OpenGateway, data: bytes
) -> None:
    """A16, slowloris: bare aiohttp waits forever. A18: a silent connection counts against the
    connection limit."""
    gateway = await open_gateway(header_timeout_s=20.0)

    async with gateway.connection() as (reader, writer):
        writer.write(data)
        answer = await read_late_answer(reader, forward)

    assert status_of(answer) == 408


async def test_slow_head_of_a_later_request_times_out(
    forward: Callable[[float], None], open_gateway: OpenGateway
) -> None:
    """A16: each head has a deadline, not only the connection's first."""
    gateway = await open_gateway(header_timeout_s=20.0, keep_alive_timeout_s=300.0)

    async with gateway.connection() as (reader, writer):
        writer.write(head("GET /healthz HTTP/1.1"))
        first = await read_answer(reader)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127")
        second = await read_late_answer(reader, forward)

    assert [status_of(first), status_of(second)] == [200, 408]


@pytest.mark.parametrize("more", [b"", b"GET /healthz HTTP/1.1\r\nHost: 127"])
async def test_keep_alive_bounds_what_follows_a_request(
    forward: Callable[[float], None], open_gateway: OpenGateway, more: bytes
) -> None:
    """A18: aiohttp's default keep-alive is an hour. A16: bytes that arrive during a request may be
    its body, so they start no head deadline."""
    gateway = await open_gateway(header_timeout_s=3_600.0, keep_alive_timeout_s=20.0)

    async with gateway.connection() as (reader, writer):
        writer.write(head("GET /healthz HTTP/1.1") + more)
        first = await read_answer(reader)
        rest = await read_late_answer(reader, forward)

    assert (status_of(first), rest) == (200, b"")


async def test_connections_above_the_address_limit_get_503(open_gateway: OpenGateway) -> None:
    """A18: ten thousand idle connections must not lock tenants out for long."""
    gateway = await open_gateway(connections_per_address_max=3)
    held = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(3)]

    answer = await gateway.raw(b"")
    for _, writer in held:
        writer.close()
        await writer.wait_closed()
    later = b""
    async with asyncio.timeout(PATIENCE_S):
        while status_of(later) != 200:
            later = await gateway.raw(head("GET /healthz HTTP/1.1", "Connection: close"))

    assert status_of(answer) == 503
    assert b"retry-after" in answer.lower()


async def test_unread_stream_is_cancelled_and_its_blocks_are_freed(
    open_gateway: OpenGateway,
) -> None:
    """A26: a bare aiohttp handler waits forever once the buffers are full."""
    gateway = await open_gateway(write_timeout_s=0.3, send_buffer_bytes=4_096)
    data = chat(gateway, max_tokens=450, n=16, stream=True, logprobs=True)
    async with unread_socket(gateway) as sock:
        await asyncio.get_running_loop().sock_sendall(sock, data)
        await gateway.until(lambda: bool(gateway.entries()))

        assert [entry[0] for entry in gateway.entries()] == ["cancelled"]
        await gateway.check_quiet()


async def test_head_deadline_does_not_run_between_requests(
    forward: Callable[[float], None], open_gateway: OpenGateway
) -> None:
    """The client would take an unsolicited 408 for the response to its next request."""
    gateway = await open_gateway(header_timeout_s=20.0, keep_alive_timeout_s=300.0)
    async with gateway.connection() as (reader, writer):
        writer.write(chat(gateway))
        first = await read_answer(reader)
        forward(40.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await reader.read(1)
        writer.write(chat(gateway))
        second = await read_answer(reader)

    assert [status_of(first), status_of(second)] == [200, 200]


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

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Do nothing: the buffer has to be empty first."""

    def resume_reading(self) -> None:
        """Do nothing: nothing comes."""

    def close(self) -> None:
        """Do nothing: asyncio's transport also stays open until its buffer is empty."""

    def abort(self) -> None:
        self.aborted.set()


async def test_unread_closing_connection_is_reset() -> None:
    """A26: asyncio waits forever for the last bytes, and the connection stays counted."""
    settings = ServerConfig(write_timeout_s=0.05)
    connections = Connections(asyncio.Protocol, settings, lambda: "id", lambda: None)
    made, unread = connections(), UnreadTransport()
    made.connection_made(unread)
    made.close()

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
    data = chat(gateway)
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
    async with gateway.connection() as (reader, writer):
        writer.write(chat(gateway))
        first = await read_answer(reader)
        gateway.runner.hold_after(0)
        writer.write(chat(gateway, max_tokens=400))
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


# --- a close that the client can read ------------------------------------------------------------


async def test_refusal_reaches_a_client_that_sends_all_before_it_reads(
    gateway: GatewayFixture,
) -> None:
    """As most HTTP clients do, with a body of any size that the server would take."""
    lines = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {8 * 2**20}"
    async with gateway.connection() as (reader, writer):
        writer.write(lines.encode() + b"\r\n\r\n")
        for _ in range(8):
            writer.write(b" " * 2**20)
            await writer.drain()
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()

    assert status_of(answer) == 401
    assert b"connection: close" in answer.lower()
    await gateway.check_quiet()


async def test_refused_connection_reads_its_answer_after_sending(open_gateway: OpenGateway) -> None:
    """The 503 is written at once, and the client sends its request on top of it."""
    gateway = await open_gateway(connections_per_address_max=1)
    async with gateway.connection() as (held, keeper):
        keeper.write(head("GET /healthz HTTP/1.1"))
        await read_answer(held)
        async with gateway.connection() as (reader, writer):
            writer.write(gateway.post("/v1/chat/completions", b" " * 2**20))
            await writer.drain()
            async with asyncio.timeout(PATIENCE_S):
                answer = await reader.read()

    assert status_of(answer) == 503
    assert b"too_many_connections" in answer


async def test_endless_body_of_a_refused_request_is_cut(open_gateway: OpenGateway) -> None:
    """What is dropped after the answer is bounded like a body."""
    gateway = await open_gateway(body_bytes_max=100_000)
    async with gateway.connection() as (reader, writer):
        writer.write(head("POST /v1/models HTTP/1.1", f"Content-Length: {2**30}"))
        answer = await read_answer(reader)
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionError):
                while True:
                    writer.write(b" " * 65_536)
                    await writer.drain()
                    await asyncio.sleep(0)

    assert status_of(answer) == 405


async def test_closed_connection_whose_client_stays_is_dropped(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds a descriptor for `LINGER_S` and no longer."""
    monkeypatch.setattr(connection, "LINGER_S", 0.05)
    async with gateway.connection() as (reader, writer):
        writer.write(head("GET /healthz HTTP/1.1", "Connection: close"))
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()
            public, _ = gateway.gateway.listeners
            await gateway.until(lambda: public.open_connections == 0)

    assert status_of(answer) == 200


# --- places --------------------------------------------------------------------------------------


async def test_idle_strangers_leave_room_for_a_client_with_a_key(open_gateway: OpenGateway) -> None:
    """Strangers hold three quarters of the places at most, and the oldest one gives way."""
    gateway = await open_gateway(connections_max=8, connections_per_address_max=0)
    ask = chat(gateway)
    async with AsyncExitStack() as held, gateway.connection() as (reader, writer):
        writer.write(ask)
        first = await read_answer(reader)
        strangers = []
        for _ in range(30):
            stranger = await held.enter_async_context(gateway.connection())
            stranger[1].write(head("GET /healthz HTTP/1.1"))
            assert status_of(await read_answer(stranger[0])) == 200
            strangers.append(stranger)
        writer.write(ask)
        again = await read_answer(reader)
        late = await gateway.raw(ask)
        async with asyncio.timeout(PATIENCE_S):
            ends = [await reader.read() for reader, _ in strangers[:24]]

    assert [status_of(answer) for answer in (first, again, late)] == [200] * 3
    assert ends == [b""] * 24
    await gateway.check_quiet()


async def test_idle_connections_of_one_tenant_leave_room_for_others(
    open_gateway: OpenGateway,
) -> None:
    """A pool of kept connections is closed from its oldest end; its client opens another."""
    gateway = await open_gateway(connections_max=4, connections_per_address_max=0)
    async with AsyncExitStack() as held:
        pool = []
        for _ in range(4):
            kept = await held.enter_async_context(gateway.connection())
            kept[1].write(chat(gateway, who="bob"))
            assert status_of(await read_answer(kept[0])) == 200
            pool.append(kept)
        answer = await gateway.raw(chat(gateway))
        async with asyncio.timeout(PATIENCE_S):
            rest = await pool[0][0].read()

    assert (status_of(answer), rest) == (200, b"")


async def test_streams_of_one_tenant_leave_its_address_to_others(open_gateway: OpenGateway) -> None:
    """Two tenants behind one router: the limit of an address is for clients without a key."""
    gateway = await open_gateway(connections_per_address_max=2)
    async with AsyncExitStack() as held:
        answers = []
        for who in ("bob", "bob", "bob", "ada"):
            kept = await held.enter_async_context(gateway.connection())
            kept[1].write(chat(gateway, who=who))
            answers.append(await read_answer(kept[0]))
        for _ in range(2):
            await held.enter_async_context(gateway.connection())
        stranger = await gateway.raw(b"")

    assert [status_of(answer) for answer in answers] == [200] * 4
    assert status_of(stranger) == 503


async def test_pipelined_requests_wait_for_their_reader(open_gateway: OpenGateway) -> None:
    """Answers that the client does not read are not computed; the write deadline ends the
    connection."""
    gateway = await open_gateway(write_timeout_s=0.3, send_buffer_bytes=4_096)
    count = 5_000
    one = head("GET /v1/models HTTP/1.1", f"Authorization: Bearer {gateway.keys['ada']}")
    public, _ = gateway.gateway.listeners
    async with unread_socket(gateway) as sock:
        sent = asyncio.get_running_loop().sock_sendall(sock, one * count)
        sending = asyncio.create_task(sent)
        await gateway.until(lambda: public.open_connections == 1)
        await gateway.until(lambda: public.open_connections == 0)
        await asyncio.wait([sending])
    handled = sum(line["event"] == "request" for line in gateway.lines)

    assert sending.exception() is None or isinstance(sending.exception(), ConnectionError)
    assert 0 < handled < count // 4


# --- draining ------------------------------------------------------------------------------------


async def test_each_answer_closes_its_connection_while_draining(gateway: GatewayFixture) -> None:
    """A client that keeps asking is told to go elsewhere, instead of being cut off at the end."""
    gateway.runner.hold_after(3)
    async with gateway.connection() as (reader, writer), gateway.connection() as (idle, asker):
        asker.write(head("GET /healthz HTTP/1.1"))
        await read_answer(idle)
        writer.write(chat(gateway, stream=True))
        begun = await reader.readuntil(b"data: ")
        draining = asyncio.create_task(gateway.gateway.drain(PATIENCE_S))
        await gateway.until(lambda: gateway.gateway.context.running.is_draining)
        asker.write(chat(gateway))
        late = await read_answer(idle)
        fresh = await gateway.raw(head("GET /healthz HTTP/1.1"))
        gateway.runner.release()
        async with asyncio.timeout(PATIENCE_S):
            await reader.readuntil(b"data: [DONE]")
            await draining
            writer.write(chat(gateway))
            last = b"HTTP/" + (await reader.read()).partition(b"HTTP/")[2]
        await gateway.gateway.refuse_last()

    assert status_of(begun) == 200
    assert [status_of(answer) for answer in (late, fresh, last)] == [503, 200, 503]
    assert all(b"connection: close" in answer.lower() for answer in (late, fresh, last))
    assert b"shutting_down" in late
    assert b"shutting_down" in last
