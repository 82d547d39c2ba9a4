"""Writes responses: whole ones, and streams piece by piece.

It knows no dialect and no request body. Handlers and `gateway.generation` write through it;
`gateway.http.middleware` finishes the responses that handlers return.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec
from aiohttp import web
from aiohttp.http import HttpVersion11

from gateway.http.connection import CONNECTION

PIECE_BYTES = 65_536
"""The largest single write, in bytes; each piece of a longer response has its own deadline."""

ResponseHeaders = Callable[[dict[str, str]], dict[str, str]]
RESPONSE_HEADERS: web.RequestKey[ResponseHeaders] = web.RequestKey("response_headers")
"""Returns the given headers with those that every response to this request has."""


class ClientGone(Exception):
    """The client disconnected or reads too slowly; the connection is closed."""


def streamed(request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
    """Return a response to be streamed. `begin` sends its head. In HTTP/1.0 only the end of the
    connection ends it."""
    response = web.StreamResponse(headers=request[RESPONSE_HEADERS](headers))
    if request[CONNECTION].owner.is_draining or request.version < HttpVersion11:
        response.force_close()
    return response


async def begin(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Send the head of a streamed response. Raises ClientGone."""
    try:
        await response.prepare(request)
    except ConnectionError:
        abort(request)
        raise ClientGone from None


async def write(request: web.BaseRequest, response: web.StreamResponse, data: bytes) -> None:
    """Send a piece of a streamed response; wait while the send buffer is full.

    Closes the connection and raises ClientGone if the client disconnected or reads too slowly.
    """
    try:
        await response.write(data)
        await request[CONNECTION].drain()
    except ConnectionError:
        abort(request)
        raise ClientGone from None


async def send(
    request: web.BaseRequest, status: int, body: bytes, headers: dict[str, str]
) -> web.StreamResponse:
    """Send a whole response; to HEAD only its head. Raises ClientGone if the client leaves during a
    long one."""
    merged = request[RESPONSE_HEADERS](headers)
    is_last = request[CONNECTION].owner.is_draining
    if is_last or not request.keep_alive:
        merged["Connection"] = "close"  # aiohttp omits the header in HTTP/1.0
    if len(body) <= PIECE_BYTES or request.method == "HEAD":
        small = web.Response(status=status, body=body, headers=merged)
        if is_last:
            small.force_close()
        with suppress(ConnectionError):  # the middleware's `finish` raises it again
            await finish(request, small)
        return small
    response = web.StreamResponse(status=status, headers=merged)
    response.content_length = len(body)
    if is_last:
        response.force_close()
    try:
        await response.prepare(request)
        for start in range(0, len(body), PIECE_BYTES):
            await write(request, response, body[start : start + PIECE_BYTES])
        await response.write_eof()
    except ConnectionError:
        abort(request)
        raise ClientGone from None
    return response


async def send_json(request: web.BaseRequest, value: object) -> web.StreamResponse:
    """Send a value as JSON, as `send` does; bytes are JSON already."""
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return await send(request, 200, body, {"Content-Type": "application/json"})


async def finish(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Send the unsent rest of a response. Raises ConnectionError if the client left."""
    await response.prepare(request)
    await response.write_eof()


def abort(request: web.BaseRequest) -> None:
    """Reset the connection: the client sees an error instead of a truncated response."""
    request[CONNECTION].abort()
