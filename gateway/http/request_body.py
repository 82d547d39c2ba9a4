"""Reads request bodies: bounded in size and time, and decompressed.

It knows no dialect and no tenant, and counts the bytes that each payer holds in memory. It checks
that the body is declared as JSON and does not parse it. Handlers call it after the middleware has
authenticated the key.

    head ── coding, type, length ── room in the budget ── pieces: deadline, minimum rate
         ── gzip, piece by piece ── bytes
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Hashable

from aiohttp import web
from aiohttp.http import HttpProcessingError, HttpVersion11
from msgspec import Struct

from gateway.config import ServerConfig
from gateway.errors import Kind, Refusal
from gateway.http.connection import CONNECTION
from gateway.structured_output.json_text import count_values

PIECE_BYTES = 262_144
"""Bytes decompressed before the event loop runs other tasks; one piece takes some 0.2 ms."""

SHARE_PARTS = 4
"""A payer may hold one part in this many of the budget that the others leave."""
RETRY_AFTER_S = 1.0


class BodyBudget:
    """The room for the bodies that a listener holds in memory at a time, in bytes.

    Bytes are taken before they are read, where the request declares a length, or else as they
    arrive; decompressed bytes count too. They are given back when the prompt is prepared. A payer
    may hold a quarter of what the others leave: a single one gets a quarter of the budget, and
    however many share it, the next one finds room. Belongs to one event loop.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_taken = 0
        self.by_payer: Counter[Hashable] = Counter()


class BodyShare(Struct):
    """What one request has taken from its listener's budget."""

    budget: BodyBudget
    payer: Hashable
    """Who it counts for."""
    bytes_taken: int = 0

    def take(self, count: int) -> None:
        """Take more bytes. O(1). Raises Refusal: RATE for the payer's limit, else BUSY."""
        budget = self.budget
        held = budget.by_payer[self.payer]
        own, others = held + count, budget.bytes_taken - held
        if own * SHARE_PARTS > budget.bytes_max - others:
            raise _no_room(own, budget.bytes_max // SHARE_PARTS)
        self.bytes_taken += count
        budget.bytes_taken += count
        budget.by_payer[self.payer] = own

    def release(self) -> None:
        """Give all bytes back; a second call changes nothing. O(1)."""
        count, self.bytes_taken = self.bytes_taken, 0
        held = self.budget.by_payer
        self.budget.bytes_taken -= count
        held[self.payer] -= count
        if not held[self.payer]:
            del held[self.payer]


def _no_room(own: int, most: int) -> Refusal:
    if own > most:
        message = (
            f"Too many request bytes at once: {own} with this request, limit {most}; expected"
            " fewer or smaller requests at a time."
        )
        return Refusal(Kind.RATE, "rate_limit_exceeded", message, retry_after_s=RETRY_AFTER_S)
    message = "The server holds too many request bodies. Try again later."
    return Refusal(Kind.BUSY, "overloaded", message, retry_after_s=RETRY_AFTER_S)


BODY_SHARE = web.RequestKey("body_share", BodyShare)
"""A request's share of its listener's budget, which the middleware sets and releases."""
SMALL_VALUES_MAX = 10_000
"""Maximum number of values in the body of a call that generates nothing."""

CHARSETS = ("utf-8", "utf8", "us-ascii")
"""Names of UTF-8 and of its subset, in small letters."""
PLAIN, GZIP = ("", "identity"), ("gzip", "x-gzip")


async def read_body(request: web.BaseRequest) -> bytes:
    """Read and decompress the whole body; send `100 Continue` first if the client expects it.
    HTTP/1.0 has no such reply, and its clients would take it for the answer.

    Only an authenticated request gets `100 Continue`, because only handlers read bodies. Reading
    stops at the size limit. The bytes stay in the request's `BodyShare` until that is released.
    Cost: O(decompressed bytes). Raises Refusal: TOO_BIG, TIMEOUT, MEDIA unless the body is JSON in
    UTF-8, plain or gzip, EXPECTATION, RATE and BUSY without room, and BAD for broken framing.
    """
    settings = request[CONNECTION].owner.settings
    coding = _check_head(request, settings)
    share, declared = request[BODY_SHARE], request.content_length
    if declared:
        share.take(declared)
    if "Expect" in request.headers and request.version >= HttpVersion11:
        request[CONNECTION].send_continue()
    data = await _receive(request, settings, share)
    return data if coding in PLAIN else await _decompress(data, settings, share)


async def _receive(request: web.BaseRequest, settings: ServerConfig, share: BodyShare) -> bytes:
    content, began_s = request.content, -1.0
    taken = share.bytes_taken
    data = b""
    # A client may send a byte at a time; a list of such pieces would take fifty times their size.
    gathered = bytearray()
    size = 0
    try:
        while not content.at_eof():
            if content.is_eof():
                piece = content.read_nowait()  # arrived with the head: no timer is needed
            else:
                if began_s < 0:
                    began_s = asyncio.get_running_loop().time()
                due_s = settings.body_timeout_s + size / settings.body_rate_min_bytes_per_s
                async with asyncio.timeout_at(began_s + due_s):
                    piece = await content.readany()
            size += len(piece)
            if size > settings.body_bytes_max:
                raise _too_big(settings)
            if size > taken:
                share.take(size - taken)
                taken = size
            if content.at_eof() and not gathered:
                data = piece
            else:
                gathered += piece
    except TimeoutError:
        raise Refusal(
            Kind.TIMEOUT,
            "request_timeout",
            f"Request body timed out after {size} bytes; expected the whole body within"
            f" {settings.body_timeout_s:g} s, or at least"
            f" {settings.body_rate_min_bytes_per_s:g} bytes/s after that.",
        ) from None
    except (web.RequestPayloadError, web.HTTPException, HttpProcessingError):
        raise Refusal(Kind.BAD, "bad_http", "Invalid framing of the request body.") from None
    return bytes(gathered) if gathered else data


async def _decompress(data: bytes, settings: ServerConfig, share: BodyShare) -> bytes:
    """Decompress one gzip stream. O(decompressed bytes).

    Stops at most one piece above the size limit, however small `data` is.
    """
    member = zlib.decompressobj(zlib.MAX_WBITS | 16)
    pieces: list[bytes] = []
    size = 0
    while not member.eof:
        try:
            piece = member.decompress(data, PIECE_BYTES)
        except zlib.error:
            raise _invalid_gzip() from None
        data = member.unconsumed_tail
        if not piece and not data and not member.eof:
            raise _invalid_gzip()  # truncated stream
        size += len(piece)
        if size > settings.body_bytes_max:
            raise _too_big(settings)
        share.take(len(piece))
        pieces.append(piece)
        if len(piece) == PIECE_BYTES:
            await asyncio.sleep(0)
    if member.unused_data:
        raise _invalid_gzip()
    return b"".join(pieces)


def _check_head(request: web.BaseRequest, settings: ServerConfig) -> str:
    """Return the body's Content-Encoding. Raises Refusal if the headers rule the body out."""
    headers = request.headers
    if headers.get("Expect", "100-continue").lower() != "100-continue":
        message = "Unsupported Expect header; expected 100-continue."
        raise Refusal(Kind.EXPECTATION, "unsupported_expectation", message)
    if "Transfer-Encoding" in headers:
        transfer = ", ".join(headers.getall("Transfer-Encoding")).strip().lower()
        if transfer != "chunked":
            message = (
                f"Unsupported Transfer-Encoding: {transfer[:64]!r}; expected chunked. A compressed"
                " body is told by Content-Encoding: gzip."
            )
            raise Refusal(Kind.MEDIA, "unsupported_encoding", message)
    coding = ""
    if "Content-Encoding" in headers:
        coding = ", ".join(headers.getall("Content-Encoding")).strip().lower()
        if coding not in (*PLAIN, *GZIP):
            message = f"Unsupported Content-Encoding: {coding[:64]!r}; expected gzip or identity."
            raise Refusal(Kind.MEDIA, "unsupported_encoding", message)
    if headers.get("Content-Type") != "application/json" and (
        request.content_type != "application/json"
        or (request.charset or "utf-8").lower() not in CHARSETS
    ):
        given = headers.get("Content-Type", "")[:64]
        message = f"Unsupported Content-Type: {given!r}; expected application/json in UTF-8."
        raise Refusal(Kind.MEDIA, "unsupported_media_type", message)
    if (request.content_length or 0) > settings.body_bytes_max:
        raise _too_big(settings)
    return coding


def check_values(body: bytes, values_max: int) -> None:
    """Refuse a body of too many JSON values: each becomes an object in memory. O(bytes).

    Raises Refusal, TOO_BIG.
    """
    if len(body) <= values_max:
        return
    count = count_values(body, values_max)
    if count > values_max:
        raise Refusal(
            Kind.TOO_BIG,
            "request_too_large",
            f"Request body too large: about {count} JSON values; limit {values_max}.",
        )


def _too_big(settings: ServerConfig) -> Refusal:
    return Refusal(
        Kind.TOO_BIG,
        "request_too_large",
        f"Request body too large: limit {settings.body_bytes_max} bytes.",
    )


def _invalid_gzip() -> Refusal:
    return Refusal(
        Kind.BAD, "bad_encoding", "Invalid gzip body; expected exactly one complete gzip stream."
    )
