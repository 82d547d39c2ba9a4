"""Responses on their way out: whole ones, and streams that are written piece by piece.

It knows no dialect. Handlers and `answer` write through it; `middleware` finishes what they return.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from aiohttp import web

from gateway.http.connection import CONNECTION

PIECE_BYTES = 65_536
"""A longer response leaves in pieces, so that a slow reader has a deadline for each."""

ResponseHeaders = Callable[[dict[str, str]], dict[str, str]]
RESPONSE_HEADERS: web.RequestKey[ResponseHeaders] = web.RequestKey("response_headers")
"""Adds to a response's headers those that every response to this request has."""


class ClientGone(Exception):
    """The client reads no more; the connection is closed and its request is given up."""


def streamed(request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
    """A response to be streamed; nothing of it is sent before `begin`."""
    return web.StreamResponse(headers=request[RESPONSE_HEADERS](headers))


async def begin(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Send the head of a streamed response. Raises ClientGone."""
    try:
        await response.prepare(request)
    except ConnectionError:
        abort(request)
        raise ClientGone from None


async def write(request: web.BaseRequest, response: web.StreamResponse, data: bytes) -> None:
    """Send `data` of a response that has begun; wait for the client if it is far behind.

    Raises ClientGone, having closed the connection, if the client left or reads too slowly.
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
    """Send a whole response. Raises ClientGone from the middle of a long one."""
    named = request[RESPONSE_HEADERS](headers)
    if not request.keep_alive:
        named["Connection"] = "close"  # aiohttp leaves it out of HTTP/1.0
    if len(body) <= PIECE_BYTES:
        small = web.Response(status=status, body=body, headers=named)
        with suppress(ConnectionError):  # `finish` meets it again, after the request has ended
            await finish(request, small)
        return small
    response = web.StreamResponse(status=status, headers=named)
    response.content_length = len(body)
    try:
        await response.prepare(request)
        for start in range(0, len(body), PIECE_BYTES):
            await write(request, response, body[start : start + PIECE_BYTES])
        await response.write_eof()
    except ConnectionError:
        abort(request)
        raise ClientGone from None
    return response


async def finish(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Send what has not been sent of a response. Raises ConnectionError if the client left."""
    await response.prepare(request)
    await response.write_eof()


def abort(request: web.BaseRequest) -> None:
    """Reset the connection, so that the client sees a broken response and not a short one."""
    request[CONNECTION].abort()
