"""A small answer that is complete before its first byte is sent, as most are.

aiohttp's own response looks whether a body is encoded, compressed, chunked or empty, and asks the
application for headers; all that is known here. It knows no dialect. `server.send` makes one,
`middleware` puts the headers on it that every answer has.
"""

from __future__ import annotations

from typing import Any, cast

from aiohttp import web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http_writer import HttpVersion11, StreamWriter, _serialize_headers


class Whole(web.StreamResponse):
    """A small answer that is complete: head and body in one write, without the ways of aiohttp's
    own for bodies that are encoded, compressed, chunked or empty."""

    def __init__(self, status: int, body: bytes, head: dict[str, str]) -> None:
        """`head`: all of its headers, but those that belong to the connection."""
        super().__init__(status=status)
        self.head = head
        self._whole = body
        self._has_left = False

    def leave(self, request: web.BaseRequest) -> None:
        """Write all of it. Raises ConnectionError if nobody is there."""
        head, version = self.head, request.version
        self._keep_alive = keeps = request.keep_alive and self._keep_alive is not False
        head["Content-Length"] = str(len(self._whole))
        head["Date"] = rfc822_formatted_time()
        if version != HttpVersion11 or not keeps:
            head["Connection"] = "keep-alive" if keeps else "close"
        line = f"HTTP/{version.major}.{version.minor} {self.status} {self.reason}"
        data = _serialize_headers(line, cast(Any, head)) + self._whole  # its items are all it asks
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("nobody is there")
        transport.write(data)
        self._has_left = True
        cast(StreamWriter, request.writer).output_size += len(data)

    async def prepare(self, request: web.BaseRequest) -> None:
        """Write what has not been written. Raises ConnectionError if nobody is there."""
        if not self._has_left:
            self.leave(request)

    async def write_eof(self, data: bytes = b"") -> None:
        """It has ended."""
