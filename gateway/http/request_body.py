"""Reads request bodies: bounded in size and time, and decompressed.

It knows no dialect and no tenant. It checks that the body is declared as JSON and does not parse
it. Handlers call it after the middleware has authenticated the key.

    head ── coding, type, length ── pieces: deadline, minimum rate ── gzip, piece by piece ── bytes
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
"""Bytes decompressed before the event loop runs other tasks; one piece takes some 0.2 ms."""

PLAIN, GZIP = ("", "identity"), ("gzip", "x-gzip")


async def read_body(request: web.BaseRequest, settings: ServerConfig) -> bytes:
    """Read and decompress the whole body; send `100 Continue` first if the client expects it.

    Only an authenticated request gets `100 Continue`, because only handlers read bodies. Reading
    stops at the size limit. Cost: O(decompressed bytes). Raises Refusal: TOO_BIG, TIMEOUT, MEDIA
    unless the body is JSON in UTF-8, plain or gzip, EXPECTATION, and BAD for broken framing.
    """
    coding = _check_head(request, settings)
    if "Expect" in request.headers:
        request[CONNECTION].send_continue()
    data = await _receive(request, settings)
    return data if coding in PLAIN else await _decompress(data, settings)


async def _receive(request: web.BaseRequest, settings: ServerConfig) -> bytes:
    content, began_s = request.content, -1.0
    pieces: list[bytes] = []
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
            pieces.append(piece)
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
    return b"".join(pieces)


async def _decompress(data: bytes, settings: ServerConfig) -> bytes:
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
    coding = ""
    if "Content-Encoding" in headers:
        coding = ", ".join(headers.getall("Content-Encoding")).strip().lower()
        if coding not in (*PLAIN, *GZIP):
            message = f"Unsupported Content-Encoding: {coding[:64]!r}; expected gzip or identity."
            raise Refusal(Kind.MEDIA, "unsupported_encoding", message)
    if headers.get("Content-Type") != "application/json" and (
        request.content_type != "application/json" or (request.charset or "utf-8") != "utf-8"
    ):
        given = headers.get("Content-Type", "")[:64]
        message = f"Unsupported Content-Type: {given!r}; expected application/json in UTF-8."
        raise Refusal(Kind.MEDIA, "unsupported_media_type", message)
    if (request.content_length or 0) > settings.body_bytes_max:
        raise _too_big(settings)
    return coding


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
