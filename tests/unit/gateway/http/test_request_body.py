"""Request bodies: slow, large, compressed and malformed.

Numbers in docstrings (A17, B14 ...) are rows of the list of bad inputs.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from gateway.config import ServerConfig
from gateway.errors import Kind, Refusal
from gateway.http.connection import CONNECTION
from gateway.http.request_body import BODY_SHARE, BodyBudget, BodyShare, read_body
from tests.tables import each_row
from tests.unit.gateway.gateway_fixture import (
    PATIENCE_S,
    GatewayFixture,
    read_answer,
    read_late_answer,
    status_of,
)
from tests.unit.gateway.http.conftest import OpenGateway

CHAT = "/v1/chat/completions"
UNSUPPORTED = {
    CHAT: (415, {"error": ["code", "message", "param", "type"]}),
    "/v1/messages": (415, {"error": ["details", "message", "type"], "type": [], "request_id": []}),
    "/v1beta/models/{model}:generateContent": (
        400,
        {"error": ["code", "details", "message", "status"]},
    ),
}
"""Each dialect's status and error members for an unsupported Content-Encoding."""


async def test_slow_body_times_out(
    forward: Callable[[float], None], open_gateway: OpenGateway
) -> None:
    """A17: the body has a deadline, and after it a minimum rate."""
    gateway = await open_gateway(body_timeout_s=20.0, body_rate_min_bytes_per_s=1_000.0)

    async with gateway.connection() as (reader, writer):
        writer.write(gateway.post(CHAT, b"{", "Content-Length: 500"))
        answer = await read_late_answer(reader, forward)

    assert status_of(answer) == 408
    assert b"request_timeout" in answer
    await gateway.check_quiet()


async def test_steady_body_may_take_longer_than_the_deadline(
    forward: Callable[[float], None], open_gateway: OpenGateway
) -> None:
    """A17: large bodies over slow links are accepted while they keep the minimum rate."""
    gateway = await open_gateway(body_timeout_s=20.0, body_rate_min_bytes_per_s=2.0)
    body = json.dumps(gateway.chat()).encode()
    body += b" " * (200 - len(body) % 200)
    async with gateway.connection() as (reader, writer):
        data = gateway.post(CHAT, b"", f"Content-Length: {len(body)}")
        writer.write(data)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for start in range(0, len(body), 50):
            writer.write(body[start : start + 50])
            await asyncio.sleep(0.001)
            forward(15.0)
        answer = await read_answer(reader)

    assert loop.time() - began_s > 40
    assert status_of(answer) == 200


async def test_body_above_the_size_limit_gets_413(open_gateway: OpenGateway) -> None:
    """B14: a body at the limit is read; one byte more is refused, with or without a length."""
    limit = 600
    gateway = await open_gateway(body_bytes_max=limit)
    body = json.dumps(gateway.chat()).encode()

    def posted(size: int) -> bytes:
        return gateway.post(CHAT, body.ljust(size))

    def chunked(size: int) -> bytes:
        data = b"%x\r\n%s\r\n0\r\n\r\n" % (size, body.ljust(size))
        return gateway.post(CHAT, data, "Transfer-Encoding: chunked", "Connection: close")

    sent = (posted(limit), posted(limit + 1), chunked(limit), chunked(limit * 10))
    answers = [await gateway.raw(data) for data in sent]

    assert [status_of(answer) for answer in answers] == [200, 413, 200, 413]
    await gateway.check_quiet()


GZIPPED = gzip.compress(b"{}")


async def test_gzip_body_is_decompressed(gateway: GatewayFixture) -> None:
    """Some clients compress long bodies; letter case and the alias x-gzip are accepted."""
    body = gzip.compress(json.dumps(gateway.chat()).encode())

    for name in ("gzip", "GZIP", "x-gzip"):
        status, answer, _ = await gateway.ask(body=body, headers={"Content-Encoding": name})

        assert status == 200, answer
    await gateway.check_quiet()


@pytest.mark.parametrize(
    "length", [9 * 2**20, 11 * 2**20, 99 * 2**20], ids=["below", "above", "bomb"]
)
async def test_decompressed_size_is_bounded(gateway: GatewayFixture, length: int) -> None:
    """A20: a kilobyte of gzip may hold a megabyte; decompression stops at the size limit."""
    body = await asyncio.to_thread(gzipped_spaces, length)
    tracemalloc.start()

    status, answer, _ = await gateway.ask(body=body, headers={"Content-Encoding": "gzip"})

    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    code = "invalid_json" if length < gateway.config.server.body_bytes_max else "request_too_large"
    assert (status, answer["error"]["code"]) == (400 if code == "invalid_json" else 413, code)
    assert most < 4 * gateway.config.server.body_bytes_max
    await gateway.check_quiet()


def gzipped_spaces(length: int) -> bytes:
    """Return gzip data of `length` spaces, which is not JSON."""
    press = zlib.compressobj(wbits=31)
    spaces = b" " * 2**20
    return b"".join(press.compress(spaces) for _ in range(length // 2**20)) + press.flush()


@pytest.mark.parametrize(
    "body",
    [b"{}", GZIPPED[:-1], GZIPPED[:12], GZIPPED[:-4] + b"\0\0\0\0", GZIPPED * 2, b""],
    ids=["plain", "cut short", "cut in the middle", "wrong length", "two members", "nothing"],
)
async def test_invalid_gzip_body_gets_400(gateway: GatewayFixture, body: bytes) -> None:
    """A truncated stream must not pass as a body, nor a second stream be ignored."""
    status, answer, _ = await gateway.ask(body=body, headers={"Content-Encoding": "gzip"})

    assert (status, answer["error"]["code"]) == (400, "bad_encoding")
    await gateway.check_quiet()


@pytest.mark.parametrize("path", UNSUPPORTED)
async def test_unsupported_content_encoding_is_refused_in_the_dialects_shape(
    gateway: GatewayFixture, path: str
) -> None:
    """aiohttp would decode some encodings and refuse others before the dialect is known. The body
    is neither read nor decoded."""
    status, shape = UNSUPPORTED[path]
    for coding in ("br", "zstd", "deflate", "compress", "zip", "gzip, gzip", "br, gzip", "ü"):
        data = gateway.post(
            path.format(model=gateway.model), b"x" * 100, f"Content-Encoding: {coding}"
        )
        answer = await gateway.raw(data)

        document = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert status_of(answer) == status
        assert shape == {
            name: sorted(part) if isinstance(part, dict) else [] for name, part in document.items()
        }
        assert "expected gzip or identity" in document["error"]["message"]
    await gateway.check_quiet()


async def test_repeated_content_encoding_header_is_refused(gateway: GatewayFixture) -> None:
    """A repeated header is a list of encodings; the first alone is not the whole."""
    data = gateway.post(CHAT, GZIPPED, "Content-Encoding: gzip", "Content-Encoding: br")

    assert status_of(await gateway.raw(data)) == 415
    await gateway.check_quiet()


@each_row("coding", ["gzip, chunked", "GZIP,chunked", "deflate, chunked"])
async def test_a_coding_of_the_transfer_is_named(gateway: GatewayFixture, coding: str) -> None:
    """The compressed bytes would be told as malformed JSON."""
    body = gzip.compress(json.dumps(gateway.chat()).encode())
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    answer = await gateway.raw(gateway.post(CHAT, chunked, f"Transfer-Encoding: {coding}"))

    assert status_of(answer) == 415
    assert b"expected chunked" in answer
    assert b"Content-Encoding: gzip" in answer
    await gateway.check_quiet()


async def test_invalid_chunk_size_gets_400(gateway: GatewayFixture) -> None:
    """A5: the chunk size is not a number."""
    data = gateway.post(
        "/v1/chat/completions", b"zz\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked"
    )

    assert status_of(await gateway.raw(data)) == 400
    await gateway.check_quiet()


async def test_truncated_body_runs_nothing(gateway: GatewayFixture) -> None:
    """A22: the client sends fewer bytes than Content-Length, then FIN."""
    data = gateway.post(CHAT, b'{"model":', "Content-Length: 500")

    answer = await gateway.raw(data, half_close=True)

    assert status_of(answer) in (0, 400)
    assert gateway.entries() == []
    await gateway.check_quiet()


# --- the budget ----------------------------------------------------------------------------------


@each_row("payers", [1, 2, 5, 20])
def test_next_payer_finds_room_beside_any_number_of_others(payers: int) -> None:
    """Each takes all that it can get, a byte at a time, one after another."""
    budget = BodyBudget(1_000_000)
    shares = [BodyShare(budget, number) for number in range(payers)]
    for share in shares:
        for size in (100_000, 10_000, 1_000, 100, 10, 1):
            with suppress(Refusal):
                while True:
                    share.take(size)
    newcomer = BodyShare(budget, "newcomer")
    newcomer.take((budget.bytes_max - budget.bytes_taken) // 4)

    assert shares[0].bytes_taken == 250_000
    assert budget.bytes_taken < budget.bytes_max
    assert newcomer.bytes_taken > 0.7 ** (payers + 5) * budget.bytes_max


def test_refusal_tells_whose_bytes_are_in_the_way() -> None:
    """429 for what a client can change by itself, 503 for the load of others."""
    budget = BodyBudget(1_000)
    own, other = BodyShare(budget, "own"), BodyShare(budget, "other")
    with pytest.raises(Refusal) as too_many:
        own.take(251)
    other.take(250)
    with pytest.raises(Refusal) as busy:
        own.take(200)
    other.release()
    other.release()
    own.take(200)
    own.release()

    assert (too_many.value.kind, too_many.value.code) == (Kind.RATE, "rate_limit_exceeded")
    assert "251 with this request, limit 250" in too_many.value.message
    assert (busy.value.kind, busy.value.code) == (Kind.BUSY, "overloaded")
    assert "other" not in busy.value.message
    assert budget.bytes_taken == 0


def _upload(gateway: GatewayFixture, kind: str) -> bytes:
    """Return an upload of 600 bytes that does not end."""
    match kind:
        case "declared":
            return gateway.post(CHAT, b"{", "Content-Length: 600")
        case "chunked":
            chunk = b"%x\r\n%s\r\n" % (600, b" " * 600)
            return gateway.post(CHAT, chunk, "Transfer-Encoding: chunked")
        case _:
            return gateway.post(CHAT, b" " * 600, "Content-Length: 601")


@pytest.mark.parametrize("kind", ["declared", "chunked", "nearly sent"])
async def test_uploads_of_a_tenant_hold_its_share_and_no_more(
    open_gateway: OpenGateway, kind: str
) -> None:
    """Two held uploads fill the tenant's share; a third is refused in words before it is read, and
    another tenant is served."""
    gateway = await open_gateway(body_bytes_max=700, body_bytes_in_flight_max=5_600)
    async with AsyncExitStack() as held:
        for _ in range(2):
            _, writer = await held.enter_async_context(gateway.connection())
            writer.write(_upload(gateway, kind))
        limiter = gateway.gateway.limits.limiter
        await gateway.until(lambda: limiter.running_of(1) == 2)
        answer = b""
        async with asyncio.timeout(PATIENCE_S):
            while status_of(answer) != 429:  # until the two have arrived
                answer = await gateway.raw(_upload(gateway, "declared"))
        other, _, _ = await gateway.ask(body=gateway.chat(), who="bob")
    await gateway.until(lambda: limiter.running_of(1) == 0)
    later, _, _ = await gateway.ask(body=gateway.chat())

    assert b"rate_limit_exceeded" in answer
    assert b"retry-after: 1" in answer.lower()
    assert b"connection: close" in answer.lower()
    assert (other, later) == (200, 200)
    await gateway.check_quiet()


async def test_decompressed_bytes_count(open_gateway: OpenGateway) -> None:
    """A kilobyte of gzip may hold a megabyte."""
    gateway = await open_gateway(body_bytes_max=2**20, body_bytes_in_flight_max=2**20)
    body = await asyncio.to_thread(gzip.compress, b" " * 2**19)
    status, answer, _ = await gateway.ask(body=body, headers={"Content-Encoding": "gzip"})

    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_body_of_small_pieces_takes_little_memory() -> None:
    """A list of such pieces would take more than twenty times their size."""
    count = 50_000

    class Pieces:
        """A body that arrives in pieces of two bytes."""

        left = count

        def at_eof(self) -> bool:
            return self.left == 0

        def is_eof(self) -> bool:
            return True

        def read_nowait(self) -> bytes:
            self.left -= 1
            return bytes((self.left % 251, 32))

    payload: Any = Pieces()
    headers = {"Content-Type": "application/json"}
    request = make_mocked_request("POST", CHAT, headers, payload=payload)
    request[BODY_SHARE] = BodyShare(BodyBudget(2**30), "own")
    connection: Any = SimpleNamespace(owner=SimpleNamespace(settings=ServerConfig()))
    request[CONNECTION] = connection
    tracemalloc.start()
    data = await read_body(request)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert len(data) == 2 * count
    assert most < 4 * len(data)
