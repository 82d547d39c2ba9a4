"""A request's body: all of it, within bounds of size and time, as it was before it was compressed.

It knows no dialect and no tenant, and asks nothing of what it reads but that it says to be JSON.
`answer` and the handlers call it, once a key is known to be good.

    head ── coding, type, length ── pieces: deadline, least rate ── gzip, piece by piece ── bytes
"""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import web
from aiohttp.http import HttpProcessingError

from gateway.config import ServerConfig
from gateway.errors import Kind, Refusal
from gateway.http.connection import CONNECTION

PIECE_BYTES = 262_144
"""So much is made of a compressed body before others have their turn: some 0.2 ms."""

PLAIN, GZIP = ("", "identity"), ("gzip", "x-gzip")


async def read_body(request: web.BaseRequest, settings: ServerConfig) -> bytes:
    """The whole body, bounded in size and in time. `Expect: 100-continue` is answered here, once
    the key is known, and nowhere before.

    Reading stops at the limit, not after it. Raises Refusal: TOO_BIG, TIMEOUT, MEDIA for what is no
    JSON in UTF-8, plain or with gzip, EXPECTATION, BAD for broken framing.
    """
    coding = _check_head(request, settings)
    if "Expect" in request.headers:
        request[CONNECTION].invite_body()
    data = await _receive(request, settings)
    return data if coding in PLAIN else await _unzip(data, settings)


async def _receive(request: web.BaseRequest, settings: ServerConfig) -> bytes:
    content, began_s = request.content, -1.0
    pieces: list[bytes] = []
    size = 0
    try:
        while not content.at_eof():
            if content.is_eof():
                piece = content.read_nowait()  # it came with its head: no timer is needed
            else:
                if began_s < 0:
                    began_s = asyncio.get_running_loop().time()
                due_s = settings.body_timeout_s + size / settings.body_rate_min_bytes_per_s
                async with asyncio.timeout_at(began_s + due_s):
                    piece = await content.readany()
            size += len(piece)
            if size > settings.body_bytes_max:
                raise _too_big(settings)
            pieces.append(piece)
    except TimeoutError:
        raise Refusal(
            Kind.TIMEOUT,
            "request_timeout",
            f"The body did not arrive: {size} bytes came in {settings.body_timeout_s:g} s and at"
            f" least {settings.body_rate_min_bytes_per_s:g} bytes/s are needed after that.",
        ) from None
    except (web.RequestPayloadError, web.HTTPException, HttpProcessingError):
        raise Refusal(Kind.BAD, "bad_http", "The body's framing is broken.") from None
    return b"".join(pieces)


async def _unzip(data: bytes, settings: ServerConfig) -> bytes:
    """What was compressed. O(what comes out), which is never more than a piece above the limit,
    however little came in."""
    member = zlib.decompressobj(zlib.MAX_WBITS | 16)
    pieces: list[bytes] = []
    size = 0
    while not member.eof:
        try:
            piece = member.decompress(data, PIECE_BYTES)
        except zlib.error:
            raise _broken() from None
        data = member.unconsumed_tail
        if not piece and not data and not member.eof:
            raise _broken()  # it ends in the middle
        size += len(piece)
        if size > settings.body_bytes_max:
            raise _too_big(settings)
        pieces.append(piece)
        if len(piece) == PIECE_BYTES:
            await asyncio.sleep(0)
    if member.unused_data:
        raise _broken()
    return b"".join(pieces)


def _check_head(request: web.BaseRequest, settings: ServerConfig) -> str:
    """The body's coding. Raises Refusal for what need not be read at all."""
    headers = request.headers
    if headers.get("Expect", "100-continue").lower() != "100-continue":
        raise Refusal(
            Kind.EXPECTATION, "unsupported_expectation", "Only Expect: 100-continue is understood."
        )
    coding = ""
    if "Content-Encoding" in headers:
        coding = ", ".join(headers.getall("Content-Encoding")).strip().lower()
        if coding not in (*PLAIN, *GZIP):
            message = "The body may be sent plain or with gzip, and in no other Content-Encoding."
            raise Refusal(Kind.MEDIA, "unsupported_encoding", message)
    if headers.get("Content-Type") != "application/json" and (
        request.content_type != "application/json" or (request.charset or "utf-8") != "utf-8"
    ):
        message = "The body has to be application/json in UTF-8."
        raise Refusal(Kind.MEDIA, "unsupported_media_type", message)
    if (request.content_length or 0) > settings.body_bytes_max:
        raise _too_big(settings)
    return coding


def _too_big(settings: ServerConfig) -> Refusal:
    return Refusal(
        Kind.TOO_BIG,
        "request_too_large",
        f"The body is larger than the {settings.body_bytes_max} bytes allowed.",
    )


def _broken() -> Refusal:
    return Refusal(Kind.BAD, "bad_encoding", "The body is not one whole gzip stream.")
