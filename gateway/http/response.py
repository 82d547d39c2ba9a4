"""An answer that is complete before its first byte is sent, as most are.

aiohttp's own response looks whether a body is encoded, compressed, chunked or empty, and asks the
application for headers; all that is known here. It knows no dialect. `server` makes one, and sends
it.
"""

from __future__ import annotations

from typing import Any, cast

from aiohttp import web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http_writer import HttpVersion11, StreamWriter, _serialize_headers


class Whole(web.StreamResponse):
    """A complete answer: `data` is its head and body, ready to leave."""

    def __init__(
        self, request: web.BaseRequest, status: int, body: bytes, head: dict[str, str]
    ) -> None:
        """`head`: all of its headers, but those that belong to the connection."""
        super().__init__(status=status)
        self.has_left = False
        version = request.version
        self._asked = request
        self._keep_alive = keeps = request.keep_alive
        head["Content-Length"] = str(len(body))
        head["Date"] = rfc822_formatted_time()
        if version != HttpVersion11 or not keeps:
            head["Connection"] = "keep-alive" if keeps else "close"
        line = f"HTTP/{version.major}.{version.minor} {self.status} {self.reason}"
        self.data = _serialize_headers(line, cast(Any, head)) + body  # its items are all it asks

    def leave(self) -> None:
        """Write all of it at once. Raises ConnectionError if nobody is there."""
        transport = self._asked.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("nobody is there")
        transport.write(self.data)
        self.has_left = True
        cast(StreamWriter, self._asked.writer).output_size += len(self.data)

    async def prepare(self, request: web.BaseRequest) -> None:
        """Once it has left there is nothing to do. Raises ConnectionError if it cannot."""
        if not self.has_left:
            self.leave()

    async def write_eof(self, data: bytes = b"") -> None:
        """It has ended."""
