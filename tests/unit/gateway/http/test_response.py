"""Small answers in one write: what aiohttp's own response would have said around them."""

from __future__ import annotations

import asyncio
import socket

import pytest
from msgspec.json import decode, encode

from tests.unit.gateway.gateway_fixture import PATIENCE_S, GatewayFixture, read_answer


def request(gateway: GatewayFixture, version: str, *lines: str) -> bytes:
    """A small chat in this version of HTTP."""
    body = gateway.post("/v1/chat/completions", encode(gateway.chat(max_tokens=1)), *lines)
    return body.replace(b"HTTP/1.1", version.encode(), 1)


@pytest.mark.parametrize(
    ("version", "lines", "said"),
    [
        ("HTTP/1.1", (), b""),
        ("HTTP/1.1", ("Connection: close",), b"connection: close\r\n"),
        ("HTTP/1.0", (), b"connection: close\r\n"),
        ("HTTP/1.0", ("Connection: keep-alive",), b"connection: keep-alive\r\n"),
    ],
)
async def test_an_answer_says_whether_its_connection_goes_on(
    gateway: GatewayFixture, version: str, lines: tuple[str, ...], said: bytes
) -> None:
    """A client of HTTP/1.0 takes silence for the end, one of HTTP/1.1 for more to come."""
    async with gateway.connection() as (reader, writer):
        writer.write(request(gateway, version, *lines))
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        rest = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        await reader.readexactly(rest)
        if said.endswith(b"close\r\n"):
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.read() == b""

    assert head.startswith(version.lower().encode() + b" 200 ok\r\n")
    assert (b"connection: " in head) == bool(said)
    assert said in head


async def test_an_answer_has_the_headers_of_every_other(gateway: GatewayFixture) -> None:
    """Proxies and clients are told the same of an answer that takes the short way: once."""
    answer = await gateway.raw(request(gateway, "HTTP/1.1"))

    head = answer.partition(b"\r\n\r\n")[0].decode().lower().split("\r\n")[1:]
    names = [line.partition(":")[0] for line in head]
    wanted = {"content-type", "content-length", "date", "server", "x-request-id", "cache-control"}
    assert wanted <= set(names)
    assert "server: trunkline" in head
    assert len(names) == len(set(names))


async def test_an_answer_leaves_before_it_is_told_of(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody waits for the answer, and nobody for its line in the log."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", gateway.port))
        seen: list[bytes] = []
        log = gateway.gateway.context.log

        def look(event: str, facts: dict[str, object]) -> None:
            if event == "request":
                seen.append(client.recv(4_096))
            log(event, facts)

        monkeypatch.setattr(gateway.gateway.context, "log", look)
        await loop.sock_sendall(client, request(gateway, "HTTP/1.1"))
        await gateway.until(lambda: bool(gateway.lines))

    (answer,) = seen
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_long_answer_is_whole_too_and_its_connection_goes_on(
    gateway: GatewayFixture,
) -> None:
    """It leaves in pieces, each with a deadline of its own."""
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
